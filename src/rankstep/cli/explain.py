"""``rankstep explain``: the story of data parallelism, told from a real run."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from rankstep.explain.blame import JobError
from rankstep.explain.job import check_source
from rankstep.explain.page import page
from rankstep.explain.progress import Progress
from rankstep.explain.request import Request
from rankstep.explain.run import RanksFailed, run
from rankstep.explain.screen import show
from rankstep.explain.tell import tell
from rankstep.explain.texts import LANGUAGES

_EPILOG = """\
examples:
  rankstep explain
  rankstep explain --lang zh --html ddp.html
  rankstep explain job.py:job --nproc-per-node 2 --json numbers.json

A job is a function that returns a model, a dataset and a loss:

  def job():
      return {"model": model, "dataset": dataset, "loss": lambda model, batch: mean_loss}

and may add optimizer (params -> optimizer), batch_size (per rank) and collate.

Exit code: 0 if every claim held; 1 if one did not, which is named with its cause; 2 if the job or a flag is wrong.
"""
_CLAIM_FAILED = 1
_PLAIN_WIDTH = 100


def main(words: list[str]) -> int:
    """Run the ranks, tell the story, and return the exit code.

    Args:
        words: The command's flags.
    """
    parser = _parser()
    args = parser.parse_args(words)
    request = Request(
        job=args.job,
        ranks=args.nproc_per_node,
        lang=args.lang,
        device=args.device or _device(args.nproc_per_node),
        seed=args.seed,
        steps=args.steps,
        tensors=args.tensors,
        seconds=args.seconds,
        # Python and torch have been loading since before this line, and that takes a processor's time.
        began=time.monotonic() - time.process_time(),
    )
    _check(request, [path for path in (args.html, args.json) if path is not None])
    progress = Progress(request)
    progress.show("start")
    try:
        facts = run(request, progress.show)
    except RanksFailed as failed:
        return failed.code
    finally:
        progress.clear()
    story = tell(facts, args.lang)
    if args.json is not None:
        _write(args.json, json.dumps(facts, ensure_ascii=False, indent=1, allow_nan=False) + "\n")
    if args.html is not None:
        _write(args.html, page(story, facts))
    _print(story)
    return 0 if facts["held"] else _CLAIM_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rankstep explain",
        description=(
            "Starts real ranks, trains a model on them for a few steps, and tells with this run's numbers how data "
            "parallelism works: who gets which samples, what is averaged and why, when each gradient left."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "job",
        nargs="?",
        help="FILE.py:FUNCTION that returns a job; by default a small digits model",
    )
    add("--nproc-per-node", type=int, default=4, metavar="N", help="ranks to start (%(default)s)")
    add("--lang", choices=LANGUAGES, default="en", help="language of the story (%(default)s)")
    add("--html", type=Path, metavar="FILE", help="write the story as one self-contained page too")
    add("--json", type=Path, metavar="FILE", help="write all numbers and claims too")
    add(
        "--device",
        choices=("cpu", "cuda"),
        help="where ranks compute; by default on GPUs if there is one for each rank",
    )
    add("--seed", type=int, default=0, help="fixes weights, order and draws (%(default)s)")
    add(
        "--steps",
        type=int,
        metavar="K",
        help="steps in the parts that train; by default 8, or fewer where the model is slow",
    )
    add(
        "--tensors",
        type=int,
        default=10_000,
        metavar="T",
        help="tensors of the model of many small tensors (%(default)s)",
    )
    add(
        "--seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="time for everything (%(default)g); where it is short, fewer single all-reduces are run, and the story says so",
    )
    return parser


def _device(ranks: int) -> str:
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= ranks else "cpu"


def _check(request: Request, paths: list[Path]) -> None:
    """Refuse what cannot work, before any process is started."""
    if request.ranks < 2:
        raise JobError(
            f"--nproc-per-node {request.ranks}: this is a story about ranks. Next: start at least 2; they may share a core."
        )
    if request.steps is not None and request.steps < 2:
        raise JobError(
            f"--steps {request.steps}: drift needs steps to show. Next: take at least 2."
        )
    if request.tensors < 1:
        raise JobError(f"--tensors {request.tensors}: take at least 1.")
    if not request.seconds > 0:
        raise JobError(f"--seconds {request.seconds:g}: take more than 0.")
    if request.device == "cuda" and _device(request.ranks) != "cuda":
        raise JobError(
            f"--device cuda: PyTorch has {torch.cuda.device_count()} GPUs here for {request.ranks} ranks. Next: leave --device "
            "out, or start as many ranks as there are GPUs."
        )
    if not 0 <= request.seed < 2**32:
        raise JobError(f"--seed {request.seed}: take a number from 0, below 2**32.")
    if request.job is not None:
        check_source(request.job)
    _check_paths(paths)


def _check_paths(paths: list[Path]) -> None:
    if len({path.resolve() for path in paths}) < len(paths):
        raise JobError(f"{paths[0]}: --html and --json name the same file. Next: name two.")
    for path in paths:
        folder = path.resolve().parent
        if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise JobError(
                f"{path}: cannot write there. Next: name a file in an existing folder that you may write to."
            )


def _write(path: Path, text: str) -> None:
    """Write the whole file or none."""
    path = path.resolve()
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _print(story: Any) -> None:
    console = Console(highlight=False)
    if console.is_terminal:
        show(story, console)
        return
    # Rich fills lines up with spaces, which in a file are only in the way.
    written = io.StringIO()
    show(story, Console(file=written, width=_PLAIN_WIDTH, highlight=False, color_system=None))
    text = "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()
