"""The ``rankstep`` program: finds the command and hands the rest of the line to it."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Final

from rankstep._version import __version__
from rankstep.errors import RankstepError

# Each command lives in a module of this name and is imported only when it is called: torch takes seconds to load.
_COMMANDS: Final = {
    "run": "start a training script on several processes, as torchrun does",
    "trace": "tell what a recorded run spent its time on, and who was late",
    "doctor": "tell where the ranks of a running job are, or why a dead one ended",
    "explain": "show how data parallelism works, with the numbers of a real run",
}

_EXAMPLE: Final = """\
example:
  rankstep run --nproc-per-node 4 train.py --epochs 3

`rankstep COMMAND --help` shows what a command takes.
"""

# What shells use when a command line is wrong, and when Ctrl-C has ended a program.
_USAGE_ERROR: Final = 2
_INTERRUPTED: Final = 130


def main(words: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        words: the command line after the program's name; by default the process's own.
    """
    words = sys.argv[1:] if words is None else words
    command = _parser().parse_args(words[:1]).command
    try:
        module = importlib.import_module(f"rankstep.cli.{command}")
        code: int = module.main(words[1:])
    except RankstepError as error:
        print(f"rankstep {command}: {error}", file=sys.stderr)  # noqa: T201
        return _USAGE_ERROR
    except KeyboardInterrupt:
        return _INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, _COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {summary}" for name, summary in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="rankstep",
        usage="rankstep COMMAND [arguments]",
        description=f"Train one PyTorch model on many processes as if they were one.\n\ncommands:\n{commands}",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rankstep {__version__}")
    parser.add_argument("command", choices=_COMMANDS, help=argparse.SUPPRESS)
    return parser
