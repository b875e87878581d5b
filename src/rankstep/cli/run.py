"""``rankstep run``: torchrun's command line, handed to our launcher."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.run import get_args_parser, parse_min_max_nnodes

from rankstep.errors import RankstepError
from rankstep.launch.launch import launch

if TYPE_CHECKING:
    import argparse

_USAGE = """\
rankstep run [flags] train.py [arguments of train.py]

example: four ranks on this machine
  rankstep run --nproc-per-node 4 train.py --epochs 3

example: the same, recorded; where the time went is told at the end
  rankstep run --nproc-per-node 4 --trace traces --trace-steps 10:30 train.py --epochs 3

example: what would be done, without doing it
  rankstep run --dry-run --nnodes 2 --master-addr 10.0.0.1 --nproc-per-node 4 train.py

example: two machines with four ranks each; the same line on both, with --node-rank 0 on the first and 1 on the second
  rankstep run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500 --nproc-per-node 4 train.py
"""


def main(words: list[str]) -> int:
    """Start the ranks and return the exit code.

    Args:
        words: torchrun's flags and ours, the script, and the script's own arguments.
    """
    parser = _parser()
    args = parser.parse_args(words)
    if args.trace is None and args.trace_steps is not None:
        parser.error("--trace-steps needs --trace DIR")
    if args.dry_run:
        return _rehearse(args, words)
    return launch(args) if args.trace is None else _launch_recorded(args)


def _parser() -> argparse.ArgumentParser:
    parser = get_args_parser()
    parser.prog, parser.usage = "rankstep run", _USAGE
    parser.description = (
        "Starts a training script on several processes. The flags are torchrun's, and PET_* variables set them too; on "
        "one machine no address or port is needed."
    )
    own = parser.add_argument_group("rankstep's own flags")
    own.add_argument(
        "--trace",
        metavar="DIR",
        help="record every step into DIR, one file per rank, and tell at the end where the time went; "
        "see `rankstep trace --help`",
    )
    own.add_argument(
        "--trace-steps",
        metavar="FIRST:LAST",
        help="record these steps only, counted from 0, without LAST",
    )
    own.add_argument(
        "--dry-run",
        action="store_true",
        help="print what each node would do, commands and variables, and start nothing",
    )
    return parser


def _rehearse(args: argparse.Namespace, words: list[str]) -> int:
    from rankstep.launch.rehearse import rehearse

    extra = {}
    if args.trace is not None:
        from rankstep.trace import recorder
        from rankstep.trace.steps import read_steps

        read_steps(args.trace_steps)
        extra = {recorder.DIRECTORY: str(Path(args.trace).absolute())}
        extra[recorder.STEPS] = args.trace_steps or ""
    print("\n".join(rehearse(args, words, extra)))  # noqa: T201
    return 0


def _launch_recorded(args: argparse.Namespace) -> int:
    from rankstep.trace import recorder
    from rankstep.trace.steps import read_steps

    read_steps(args.trace_steps)
    folder = Path(args.trace).absolute()
    if parse_min_max_nnodes(args.nnodes)[1] == 1:
        # Files of an earlier run would be taken for ranks of this one. Several nodes may share the directory.
        for old in folder.glob("rank-*.jsonl"):
            old.unlink()
    ours = {recorder.DIRECTORY: str(folder), recorder.STEPS: args.trace_steps or ""}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        code = launch(args)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    # When a rank has failed, why it did is the last thing on the screen.
    if code == 0:
        _tell(folder)
    return code


def _tell(folder: Path) -> None:
    from rankstep.cli.trace import show
    from rankstep.trace.files import load
    from rankstep.trace.summary import summarize

    try:
        trace = load(folder)
        show(trace, summarize(trace), sys.stderr, brief=True)
        told = f"rankstep: tables and a timeline: rankstep trace {folder}"
    except (RankstepError, OSError) as error:
        told = f"rankstep run: the trace cannot be told: {error}"
    print(told, file=sys.stderr)  # noqa: T201
