"""``rankstep doctor``: where the ranks of a running job are, or what a dead one has left."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from rankstep.doctor.ask import Answer, ask, find

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXAMPLE = """\
examples:
  rankstep doctor                 every job of yours on this host
  rankstep doctor 4711            the job of which process 4711 is a rank or the launcher
  rankstep doctor --network ...   whether the nodes reach each other; see `rankstep doctor --network --help`
  rankstep doctor logs/           what a job has left that was started with `rankstep run --log-dir logs`
"""


def main(words: list[str]) -> int:
    """Tell and return the exit code.

    Args:
        words: the command line after ``doctor``.

    Raises:
        DoctorError: there is no such job, or it does not answer.
    """
    if "--network" in words:
        from rankstep.cli import doctor_network

        return doctor_network.main([word for word in words if word != "--network"])
    args = _parser().parse_args(words)
    answers = [ask(place) for place in find(args.job)]
    if args.json:
        told = [answer.as_dict() for answer in answers]
        json.dump(told[0] if args.job else told, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        sys.stdout.write("\n".join(_lines(answers)) + "\n")
    return 0


def _lines(answers: Sequence[Answer]) -> list[str]:
    lines: list[str] = []
    for answer in answers:
        if lines:
            lines.append("")
        lines += [answer.title, *answer.lines]
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rankstep doctor",
        description="Asks the guards of a running job where each rank is: step, line of the program, what it waits for, and "
        "who is missing. The job goes on meanwhile. Or reads what a job has left that has ended.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB|DIR",
        help="a process of the job, or the --log-dir of one that has ended; by default every job of yours on this host",
    )
    parser.add_argument(
        "--network",
        action="store_true",
        help="instead, try the network that `rankstep run` with the same flags would use",
    )
    parser.add_argument("--json", action="store_true", help="print all facts as JSON")
    return parser
