"""A small process beside the launcher that outlives it, and ends what the ranks have started, if the launcher is killed.

The kernel kills the ranks themselves when their launcher is gone, but not what they have started: loading workers, a
compiler, a shell. The launcher starts this file by its path, and it imports nothing but the standard library, so it is
there in milliseconds and costs a few megabytes. It reads the launcher's pipe: a line with the number of each rank, and
at the end ``done``. A pipe that ends without that word means a launcher that was killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DONE = "done"
# How long processes may take to be gone after SIGKILL.
_LAST_SECONDS = 5.0
_LOOKS, _LOOK_EVERY_SECONDS = 5, 0.1
_SHOWN_COMMAND = 80


def main(folder: str, launcher: str, mark: str) -> None:
    """Wait for the launcher's end, then leave nothing behind.

    Args:
        folder: the launcher's private folder, removed as well if the launcher could not do it.
        launcher: its process number.
        mark: see `living`.
    """
    # What ends the launcher must not end its keeper.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    ranks: set[int] = set()
    for line in sys.stdin:
        if line.strip() == DONE:
            return
        ranks.add(int(line))
    # The kernel kills the ranks meanwhile, and one that is on its way out may start a last process, or be taken for another.
    for _ in range(_LOOKS):
        kill(lambda: living(ranks, int(launcher), os.fsencode(mark)), _LAST_SECONDS)
        time.sleep(_LOOK_EVERY_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)


def kill(find: Callable[[], dict[int, str]], limit_s: float) -> dict[int, str]:
    """Kill processes until none is found any more; return all that were found.

    Args:
        find: looks for them: their numbers and names.
        limit_s: when to give up, in seconds.
    """
    killed: dict[int, str] = {}
    give_up = time.monotonic() + limit_s
    while (left := find()) and time.monotonic() < give_up:
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        killed |= left
        time.sleep(0.02)
    return killed


@dataclass(frozen=True, slots=True)
class _Process:
    """One line of the process table."""

    path: Path
    state: str
    parent: int
    session: int

    @property
    def alive(self) -> bool:
        return self.state not in "ZX"

    def carries(self, mark: bytes) -> bool:
        try:
            return mark in (self.path / "environ").read_bytes()
        except OSError:
            return False

    def lacks(self, mark: bytes) -> bool:
        try:
            variables = (self.path / "environ").read_bytes()
        except PermissionError:
            return True
        except OSError:
            return False
        # A process on its way out has no environment any more.
        return bool(variables) and mark not in variables


def living(ranks: set[int], parent: int, mark: bytes) -> dict[int, str]:
    """Find the living processes of ranks: those in their sessions, each of which has its rank's number.

    Processes that a rank has moved to a session of their own are not its workers but services; they are not found. A
    number may have gone to a stranger since its rank has ended: no session counts whose living leader is neither a child
    of the launcher nor carries the mark.

    Args:
        ranks: the process numbers of the ranks, living or dead.
        parent: the launcher's process number; its children that carry the mark count as well.
        mark: the variable that all ranks of this run have in their environment, and others have not.

    Source: https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
    """
    table = dict(_processes())

    def led_by_stranger(session: int) -> bool:
        leader = table.get(session)
        return (
            leader is not None and leader.alive and leader.parent != parent and leader.lacks(mark)
        )

    found: dict[int, str] = {}
    for pid, process in table.items():
        if not process.alive:
            continue
        ours = (process.session in ranks and not led_by_stranger(process.session)) or (
            process.parent == parent and process.carries(mark)
        )
        with suppress(OSError):
            command = (process.path / "cmdline").read_bytes().replace(b"\0", b" ")
            # Python's resource tracker ends by itself, after it has cleaned up for the others.
            if ours and b"resource_tracker" not in command:
                found[pid] = command.decode("utf-8", "replace").strip()[:_SHOWN_COMMAND]
    return found


def _processes() -> Iterator[tuple[int, _Process]]:
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # pid (name) state parent group session ...; the name may hold spaces and brackets.
            fields = (path / "stat").read_text("utf-8", "replace").rpartition(") ")[2].split()
            yield int(path.name), _Process(path, fields[0], int(fields[1]), int(fields[3]))


if __name__ == "__main__":
    main(*sys.argv[1:])
