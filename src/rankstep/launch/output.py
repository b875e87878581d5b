"""From the ranks' pipes to the screen and into files; the last lines of each rank are remembered."""

from __future__ import annotations

import os
import selectors
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rankstep.launch.screen import Screen, Stream, one_terminal
from rankstep.launch.terminal import Terminal, open_terminal

if TYPE_CHECKING:
    from pathlib import Path

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
    file: int | None = None
    terminal: Terminal | None = None
    partial: bytearray = field(default_factory=bytearray)


class Output:
    """Reads what ranks write and passes it on at once; remembers each rank's last lines.

    One thread reads all pipes. Pipes, and not files that are followed, so that nothing is delayed, nothing piles up
    on the disk unasked, and a rank that outruns the screen waits for it as it would without a launcher.

    Args:
        folder: where the named pipes are made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._screen = Screen()
        self._tails: dict[int, deque[bytes]] = {}
        self._pipes = 0
        # Rank 0's terminal by attempt, where one serves both of its streams.
        self._shared: dict[int, str] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._new: deque[tuple[int, _Pipe]] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rankstep-output", daemon=True)
        self._thread.start()

    def pipe(
        self, rank: int, stream: Stream, attempt: int, *, shown: bool, file: Path | None = None
    ) -> str:
        """Make the pipe for one stream of one rank and return its path.

        Args:
            rank: the rank that will write into it.
            stream: ``"stdout"`` or ``"stderr"``.
            attempt: which start of the ranks this is, from 0; a restart has pipes and last lines of its own.
            shown: whether it goes to the screen; if not, only its last lines are remembered.
            file: where all of it is kept as well.
        """
        # Ranks also start again because a node has come or gone, and that is no new attempt.
        self._pipes += 1
        path = self._folder / f"{stream}-{rank}-{attempt}-{self._pipes}"
        os.mkfifo(path, 0o600)
        # Open for writing as well: then it never reaches its end, whichever process opens and closes it.
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        pipe = _Pipe(rank, stream, shown, self._tail_of(rank, stream, attempt), _keep(file))
        self._read_from(fd, pipe)
        return str(path)

    def terminal(self, rank: int, stream: Stream, attempt: int, *, file: Path | None = None) -> str:
        """Make a terminal for one stream of one rank and return its path; "" where there can be none.

        The rank sees a terminal of the real one's size. Standard output and standard error share one, so that what is
        written to them keeps its order, unless they are kept in files of their own.

        Args:
            rank: the rank that will write to it.
            stream: ``"stdout"`` or ``"stderr"``; this process's own is a terminal.
            attempt: which start of the ranks this is, from 0.
            file: where all of it is kept as well.
        """
        share = file is None and one_terminal()
        if share and stream == "stderr" and attempt in self._shared:
            return self._shared.pop(attempt)
        real = sys.stdout if stream == "stdout" else sys.stderr
        made = open_terminal(real.fileno())
        if made is None:
            return ""
        tail = self._tail_of(rank, stream, attempt)
        pipe = _Pipe(rank, stream, shown=True, tail=tail, file=_keep(file), terminal=made)
        self._read_from(made.reader, pipe)
        if share and stream == "stdout":
            self._shared[attempt] = made.path
        return made.path

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

    def _tail_of(self, rank: int, stream: Stream, attempt: int) -> deque[bytes]:
        if attempt and stream == "stdout":
            self._tails.pop(rank, None)
        return self._tails.setdefault(rank, deque(maxlen=_TAIL_LINES))

    def _read_from(self, fd: int, pipe: _Pipe) -> None:
        if pipe.shown:
            self._screen.expect(pipe.rank, pipe.stream)
        self._new.append((fd, pipe))
        os.write(self._wake_write, b"n")

    def _run(self) -> None:
        while not self._closing:
            self._pump(self._screen.flush())
        give_up = time.monotonic() + _DRAIN_SECONDS
        while self._pump(0) and time.monotonic() < give_up:
            pass
        for key in list(self._selector.get_map().values()):
            if key.fd != self._wake_read:
                self._finish(key.fd, key.data)
        self._screen.flush(last=True)

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
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return
        _write_file(pipe, data)
        if pipe.terminal is not None:
            # Prompts and bars as they come: on a terminal nothing waits for the end of its line.
            pipe.terminal.fit()
            self._screen.pass_on(pipe.stream, data)
        pipe.partial += data
        *lines, rest = bytes(pipe.partial).split(b"\n")
        pipe.partial[:] = rest
        for line in lines:
            self._pass_on(pipe, line + b"\n")
        if rest and pipe.rank == 0 and pipe.terminal is None and b"\r" in rest:
            # Rank 0's progress bar moves on the screen; what follows its last return is not complete yet.
            ready, _, unfinished = rest.rpartition(b"\r")
            pipe.partial[:] = unfinished
            if pipe.shown:
                self._screen.pass_on(pipe.stream, ready + b"\r")
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
        if not pipe.shown or pipe.terminal is not None:
            return
        if pipe.rank == 0:
            self._screen.pass_on(pipe.stream, line)
        else:
            self._screen.add(pipe.rank, pipe.stream, final)

    def _finish(self, fd: int, pipe: _Pipe) -> None:
        if pipe.partial:
            self._pass_on(pipe, bytes(pipe.partial))
        if pipe.terminal is None:
            os.close(fd)
        else:
            pipe.terminal.close()
        if pipe.file is not None:
            os.close(pipe.file)


def _keep(file: Path | None) -> int | None:
    if file is None:
        return None
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _write_file(pipe: _Pipe, data: bytes) -> None:
    if pipe.file is None:
        return
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(pipe.file, view) :]
    except OSError as error:
        # A full disk must not stop the ranks.
        os.close(pipe.file)
        pipe.file = None
        print(  # noqa: T201
            f"rankstep: rank {pipe.rank}: its {pipe.stream} is not kept any longer: {error}",
            file=sys.stderr,
            flush=True,
        )
