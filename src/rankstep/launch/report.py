"""The last lines on the screen when ranks have failed: which one was first, and why."""

from __future__ import annotations

import re
import signal
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

_OTHERS_SHOWN = 8
_SIGNALLED = 128


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank ended.

    ``moment`` is when, in nanoseconds of ``time.monotonic_ns``; None if only the second is known.
    """

    rank: int
    pid: int
    exit_code: int
    message: str
    callstack: str
    moment: int | None

    def describe(self) -> str:
        """Say in a few words how it ended."""
        if self.message:
            # A rank that had failed and was then stopped has a signal for its code, which says nothing.
            return (
                f"{self.message} (exit code {self.exit_code})"
                if self.exit_code > 0
                else self.message
            )
        if self.exit_code < 0:
            return f"killed by {signal_name(-self.exit_code)}"
        return f"exited with code {self.exit_code}"


def signal_name(number: int) -> str:
    """Return a signal as ``signal 9 (SIGKILL)``."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def read_failures(error: ChildFailedError, ended_at: Callable[[int], int | None]) -> list[Failure]:
    """Put the failed ranks of this node in the order in which they failed.

    torch orders them by whole seconds. The moment of the exception counts, or that of the process's end: a rank that
    was killed is thus found before the ranks that failed because it was gone.

    Args:
        error: what the elastic launcher raised.
        ended_at: gives the moment at which a process ended, by its pid.
    """
    failures = [
        _read(rank, failure, ended_at(failure.pid)) for rank, failure in error.failures.items()
    ]
    return sorted(failures, key=lambda failure: (failure.moment is None, failure.moment or 0))


def write_report(failures: list[Failure], tail: list[str]) -> str:
    """Write the report; its last lines are about the rank that failed first.

    Args:
        failures: the failed ranks, the first failure first.
        tail: the last lines that this rank has written; empty if they went straight to the terminal.
    """
    first, *others = failures
    lines = [""]
    # Ranks that the launcher has stopped on account of the first are no news.
    others = [other for other in others if other.message or other.exit_code != -signal.SIGTERM]
    lines += [
        f"rankstep: rank {other.rank} failed later: {other.describe()}"
        for other in others[:_OTHERS_SHOWN]
    ]
    if len(others) > _OTHERS_SHOWN:
        lines.append(f"rankstep: {len(others) - _OTHERS_SHOWN} more ranks failed later")
    if first.callstack:
        lines += [f"rankstep: traceback of rank {first.rank}:", first.callstack.rstrip()]
    elif tail:
        lines += [f"rankstep: last lines of rank {first.rank}:", *tail]
    host = socket.gethostname()
    lines.append(
        f"rankstep: rank {first.rank} failed first (pid {first.pid} on {host}): {first.describe()}"
    )
    if first.exit_code == -signal.SIGKILL:
        lines[-1] += "; if nobody did that by hand, the host ran out of memory: see dmesg"
    return "\n".join(lines)


def exit_code(failure: Failure) -> int:
    """Return the launcher's exit code: the rank's own, or 128 and the signal, as shells do.

    A rank that had raised and was then stopped by the launcher counts as having ended by its exception.
    """
    if failure.message and failure.exit_code < 0:
        asked = re.fullmatch(r"SystemExit: (\d{1,3})", failure.message)
        return int(asked[1]) if asked else 1
    return failure.exit_code if failure.exit_code > 0 else _SIGNALLED - failure.exit_code


def _read(rank: int, failure: ProcessFailure, ended: int | None) -> Failure:
    recorded = failure.error_file_data.get("message")
    # Without an error file torch puts a text there; with one, the exception and its traceback.
    details = recorded if isinstance(recorded, dict) else {}
    extra = details.get("extraInfo", {})
    return Failure(
        rank=rank,
        pid=failure.pid,
        exit_code=failure.exitcode,
        message=str(details.get("message", "")).partition("\n")[0],
        callstack=str(extra.get("py_callstack", "")),
        moment=extra.get("monotonic_ns", ended),
    )
