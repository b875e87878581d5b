"""From the ranks' pipes to the screen: rank 0 as it is, the others line by line behind their number."""

from __future__ import annotations

import os
import select
import selectors
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path

Stream = Literal["stdout", "stderr"]

_CHUNK = 1 << 16
# A progress bar may go on for hours without ending its line; this much of it is kept.
_LONGEST_LINE = 1 << 16
_TAIL_LINES = 30
# A process that a rank has left behind may write for ever; the launcher does not stay for it.
_DRAIN_SECONDS = 2.0


@dataclass(slots=True)
class _Pipe:
    rank: int
    stream: Stream
    shown: bool
    tail: deque[bytes]
    partial: bytearray = field(default_factory=bytearray)


class Output:
    """Reads what ranks write and passes it on at once; remembers each rank's last lines.

    One thread reads all pipes. Pipes, and not files that are followed, so that nothing is delayed, nothing piles up
    on the disk, and a rank that outruns the screen waits for it as it would without a launcher.

    Args:
        folder: where the named pipes are made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails: dict[int, deque[bytes]] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._new: deque[tuple[int, _Pipe]] = deque()
        self._closing = False
        self._broken: set[Stream] = set()
        self._thread = threading.Thread(target=self._run, name="rankstep-output", daemon=True)
        self._thread.start()

    def pipe(self, rank: int, stream: Stream, attempt: int, *, shown: bool) -> str:
        """Make the pipe for one stream of one rank and return its path.

        Args:
            rank: the rank that will write into it.
            stream: ``"stdout"`` or ``"stderr"``.
            attempt: which start of the ranks this is, from 0; a restart has pipes and last lines of its own.
            shown: whether it goes to the screen; if not, only its last lines are remembered.
        """
        path = self._folder / f"{stream}-{rank}-{attempt}"
        os.mkfifo(path, 0o600)
        # Open for writing as well: then it never reaches its end, whichever process opens and closes it.
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        if attempt and stream == "stdout":
            self._tails.pop(rank, None)
        tail = self._tails.setdefault(rank, deque(maxlen=_TAIL_LINES))
        self._new.append((fd, _Pipe(rank, stream, shown, tail)))
        os.write(self._wake_write, b"n")
        return str(path)

    def tail(self, rank: int) -> list[str]:
        """Return the last lines a rank has written to either stream, oldest first."""
        return [line.decode(errors="replace") for line in self._tails.get(rank, ())]

    def close(self) -> None:
        """Pass on what the pipes still hold, then stop."""
        self._closing = True
        os.write(self._wake_write, b"c")
        self._thread.join()
        for fd in (self._wake_read, self._wake_write):
            os.close(fd)
        self._selector.close()

    def _run(self) -> None:
        while not self._closing:
            self._pump(None)
        give_up = time.monotonic() + _DRAIN_SECONDS
        while self._pump(0) and time.monotonic() < give_up:
            pass
        for key in list(self._selector.get_map().values()):
            if key.fd != self._wake_read:
                self._finish(key.data)
                os.close(key.fd)

    def _pump(self, timeout: float | None) -> bool:
        """Read from every pipe that holds something; tell whether any did."""
        while self._new:
            fd, pipe = self._new.popleft()
            self._selector.register(fd, selectors.EVENT_READ, pipe)
        events = self._selector.select(timeout)
        for key, _ in events:
            if key.fd == self._wake_read:
                os.read(self._wake_read, _CHUNK)
            else:
                self._read(key.fd, key.data)
        return bool(events)

    def _read(self, fd: int, pipe: _Pipe) -> None:
        try:
            pipe.partial += os.read(fd, _CHUNK)
        except BlockingIOError:
            return
        *lines, rest = bytes(pipe.partial).split(b"\n")
        pipe.partial[:] = rest
        for line in lines:
            self._pass_on(pipe, line + b"\n")
        if rest and pipe.rank == 0 and b"\r" in rest:
            # Rank 0's progress bar moves on the screen; what follows its last return is not complete yet.
            ready, _, unfinished = rest.rpartition(b"\r")
            pipe.partial[:] = unfinished
            self._write(pipe, ready + b"\r")
        elif len(rest) > _LONGEST_LINE:
            shown = rest.rpartition(b"\r")[2]
            pipe.partial[:] = shown if len(shown) <= _LONGEST_LINE else b""
            if not pipe.partial:
                self._pass_on(pipe, shown + b"\n")

    def _pass_on(self, pipe: _Pipe, line: bytes) -> None:
        # Of a line that was overwritten by returns, the last state is what a terminal would show.
        final = line.rstrip(b"\r\n").rpartition(b"\r")[2]
        # torch prefixes tracebacks with the rank as well.
        final = final.removeprefix(b"[rank%d]: " % pipe.rank)
        pipe.tail.append(final)
        self._write(pipe, line if pipe.rank == 0 else b"[rank %d] %s\n" % (pipe.rank, final))

    def _finish(self, pipe: _Pipe) -> None:
        if pipe.partial:
            self._pass_on(pipe, bytes(pipe.partial) + (b"" if pipe.rank == 0 else b"\n"))

    def _write(self, pipe: _Pipe, data: bytes) -> None:
        if not pipe.shown or pipe.stream in self._broken:
            return
        fd = (sys.stdout if pipe.stream == "stdout" else sys.stderr).fileno()
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                select.select([], [fd], [])
            except OSError:
                # Nobody reads any more (`| head`); the ranks go on, and their pipes must not fill up.
                self._broken.add(pipe.stream)
                return
