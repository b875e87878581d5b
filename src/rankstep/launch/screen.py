"""What stands on the screen: rank 0 as it is, the others line by line behind their number, equal lines once."""

from __future__ import annotations

import os
import select
import sys
import time
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

Stream = Literal["stdout", "stderr"]
STREAMS: tuple[Stream, Stream] = ("stdout", "stderr")

# How long a line waits for the same line of other ranks, and how many may wait at a time.
_HOLD_SECONDS = 0.2
_MOST_HELD = 1000
# A progress line longer than this is not drawn again.
_LONGEST_PROGRESS = 4096
_CLEAR_LINE = b"\r\x1b[K"


@dataclass(slots=True)
class _Group:
    """One text and the ranks that have said it; ``number`` counts the groups."""

    number: int
    text: bytes
    until: float
    ranks: set[int] = field(default_factory=set)


class Collapser:
    """Holds lines for a moment, so that what several ranks say alike is shown once.

    Each rank's lines keep their order. A line waits until every rank has said it, or for 0.2 seconds.
    """

    def __init__(self) -> None:
        self.speakers: set[int] = set()
        self._groups: deque[_Group] = deque()
        self._by_text: dict[bytes, list[_Group]] = {}
        self._last: dict[int, int] = {}
        self._count = 0

    def add(self, rank: int, text: bytes, now: float) -> None:
        """Take one line.

        Args:
            rank: who has said it.
            text: the line without its end.
            now: the time, in seconds of ``time.monotonic``.
        """
        alike = self._by_text.setdefault(text, [])
        # Not in front of what this rank has said before.
        at = bisect_right(alike, self._last.get(rank, 0), key=lambda group: group.number)
        if at == len(alike):
            self._count += 1
            group = _Group(self._count, text, now + _HOLD_SECONDS)
            alike.append(group)
            self._groups.append(group)
        else:
            group = alike[at]
        group.ranks.add(rank)
        self._last[rank] = group.number

    def ready(self, now: float) -> list[tuple[list[int], bytes]]:
        """Return the lines that need not wait any longer, each with its ranks; oldest first.

        Args:
            now: the time, in seconds of ``time.monotonic``; infinity lets nothing wait.
        """
        found = []
        while self._groups and (
            self._groups[0].until <= now
            or self._groups[0].ranks >= self.speakers
            or len(self._groups) > _MOST_HELD
        ):
            group = self._groups.popleft()
            alike = self._by_text[group.text]
            del alike[0]
            if not alike:
                del self._by_text[group.text]
            found.append((sorted(group.ranks), group.text))
        return found

    def due(self) -> float | None:
        """Return when the oldest line has waited long enough; None if none waits."""
        return self._groups[0].until if self._groups else None


def prefix(ranks: list[int]) -> str:
    """Return what stands before a line: ``[rank 3]``, or ``[ranks 1-3,5 x4]``.

    Args:
        ranks: who has said it, in ascending order.
    """
    if len(ranks) == 1:
        return f"[rank {ranks[0]}]"
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    named = ",".join("-".join(map(str, span)) for span in spans)
    return f"[ranks {named} x{len(ranks)}]"


@dataclass(slots=True)
class _Device:
    """Where a stream ends, and the unfinished line that stands there: rank 0's progress bar."""

    fd: int
    terminal: bool
    progress: bytes = b""


class Screen:
    """Writes to the launcher's own standard output and standard error.

    Where rank 0 has a progress line on a terminal, lines of other ranks go above it; in a file they begin a new line.
    """

    def __init__(self) -> None:
        self._collapsers: dict[Stream, Collapser] = {stream: Collapser() for stream in STREAMS}
        self._devices = {
            stream: _Device(fd, os.isatty(fd)) for stream, fd in zip(STREAMS, _fds(), strict=True)
        }
        if one_terminal():
            # What stands on it stands on both.
            self._devices["stderr"] = self._devices["stdout"]
        # Nobody reads these any more (`| head`); the ranks go on, and their pipes must not fill up.
        self._broken: set[int] = set()

    def expect(self, rank: int, stream: Stream) -> None:
        """Know that this rank will write to this stream: until it has, a line that others have said alike waits."""
        if rank != 0:
            self._collapsers[stream].speakers.add(rank)

    def pass_on(self, stream: Stream, data: bytes) -> None:
        """Write what rank 0 has written, as it is."""
        device = self._devices[stream]
        self._write(device, data)
        line = (device.progress + data).rpartition(b"\n")[2]
        # Of a line that was overwritten by returns, what a terminal shows is behind the last one but a closing one.
        closed = line.endswith(b"\r")
        line = line.rstrip(b"\r").rpartition(b"\r")[2] + (b"\r" if closed else b"")
        device.progress = line if len(line) <= _LONGEST_PROGRESS else b""

    def add(self, rank: int, stream: Stream, text: bytes) -> None:
        """Write one line of another rank, soon.

        Args:
            rank: who has written it.
            stream: where to.
            text: the line without its end.
        """
        now = time.monotonic()
        self._collapsers[stream].add(rank, text, now)
        self._show(stream, now)

    def flush(self, *, last: bool = False) -> float | None:
        """Write what has waited long enough; return how many seconds the next may wait, None if none waits.

        Args:
            last: let nothing wait.
        """
        now = time.monotonic()
        for stream in STREAMS:
            self._show(stream, float("inf") if last else now)
        due = [at for each in self._collapsers.values() if (at := each.due()) is not None]
        return max(0.0, min(due) - now) if due else None

    def _show(self, stream: Stream, now: float) -> None:
        for ranks, text in self._collapsers[stream].ready(now):
            self._write_line(self._devices[stream], b"%s %s\n" % (prefix(ranks).encode(), text))

    def _write_line(self, device: _Device, line: bytes) -> None:
        if not device.progress:
            self._write(device, line)
        elif device.terminal:
            self._write(device, _CLEAR_LINE + line + device.progress)
        else:
            self._write(device, b"\n" + line)
            device.progress = b""

    def _write(self, device: _Device, data: bytes) -> None:
        if device.fd in self._broken:
            return
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(device.fd, view) :]
            except BlockingIOError:
                select.select([], [device.fd], [])
            except OSError:
                self._broken.add(device.fd)
                return


def one_terminal() -> bool:
    """Tell whether standard output and standard error are the same terminal."""
    fds = _fds()
    if not all(map(os.isatty, fds)):
        return False
    out, err = map(os.fstat, fds)
    return out.st_rdev == err.st_rdev


def _fds() -> tuple[int, int]:
    """Return the descriptors of standard output and standard error, also where Python's objects have none."""
    try:
        return sys.stdout.fileno(), sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return 1, 2
