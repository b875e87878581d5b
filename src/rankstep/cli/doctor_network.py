"""``rankstep doctor --network``: whether the nodes reach each other, under the same flags as ``rankstep run``."""

from __future__ import annotations

import sys

from torch.distributed.run import get_args_parser

from rankstep.launch.launch import launch

_USAGE = """\
rankstep doctor --network [flags of rankstep run]

example: two machines; the same line on both, with --node-rank 0 on the first and 1 on the second
  rankstep doctor --network --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500 --nproc-per-node 4

Every rank connects to every other one, both ways. Then all sum 4 KiB and 4 MiB and the times are told. The exit code
is 0 if all of it went well.
"""
_PROBE = "rankstep.launch.probe"


def main(words: list[str]) -> int:
    """Start the ranks of this node, let them try the network, and return the exit code.

    Args:
        words: what follows ``--network``: the flags of ``rankstep run``, without a script.
    """
    parser = get_args_parser()
    parser.prog, parser.usage = "rankstep doctor --network", _USAGE
    parser.description = "Tries the network that a run with the same flags would use."
    parser.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long ranks wait for each other (30)",
    )
    own = parser.parse_args([*words, _PROBE])
    if own.training_script != _PROBE:
        parser.error(f"takes no script, and got {own.training_script}")
    if not own.timeout > 0:
        parser.error(f"--timeout {own.timeout:g}: give a number of seconds above 0")
    own.module, own.no_python, own.run_path = True, False, False
    own.training_script_args = [str(own.timeout)]
    code = launch(own)
    if code:
        print("rankstep doctor: the network did not pass", file=sys.stderr)  # noqa: T201
    return code
