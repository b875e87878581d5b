"""Keeping hold of the ranks: when each one ended, stopping them in time, leaving none behind."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing import SignalException

from rankstep.launch import keeper
from rankstep.launch.bootstrap import CONTROL_PIPE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import FrameType

_READ = 1 << 16
# Some wrappers pass a Ctrl-C on to the launcher that the terminal has sent it already; that is no second one.
_ECHO_SECONDS = 0.2
# After SIGKILL: how long the ranks may take to be gone, and the main thread to notice.
_LAST_SECONDS = 2.0
_NEVER = float("inf")


class Watch:
    """Knows the ranks' processes from their own reports, and stops them when a signal comes.

    The first signal is raised in the main thread as torch's SignalException, upon which the elastic agent passes it
    on to the ranks. Ranks that are still there when their grace is over, or at a second signal, are killed. A thread
    sees to that, because the main thread may be waiting inside torch, deaf to signals. Should the launcher itself be
    killed, its keeper ends what the ranks have started.

    Args:
        folder: where the control pipe is made; removed if the launcher has to end at once.
        grace: the signals handled, and the seconds that ranks get to end after each.
    """

    def __init__(self, folder: Path, grace: Mapping[int, float]) -> None:
        self.control_pipe = folder / "control"
        self._folder = folder
        self._grace = grace
        self._pids: set[int] = set()
        self._ended: dict[int, int] = {}
        self._signal: int | None = None
        self._signal_at = 0.0
        self._raised = False
        self._kill_at = self._leave_at = _NEVER
        self._closing = False
        self._mark = f"{CONTROL_PIPE}={self.control_pipe}"
        start = [sys.executable, "-I", "-S", keeper.__file__]
        # A session of its own: a Ctrl-C in the terminal is not for it. In / it keeps no file system busy.
        self._keeper = subprocess.Popen(  # noqa: S603 - our own file
            [*start, str(folder), str(os.getpid()), self._mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        os.mkfifo(self.control_pipe, 0o600)
        self._control = os.open(self.control_pipe, os.O_RDWR | os.O_NONBLOCK)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._control, selectors.EVENT_READ, self._read_reports)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._read_signals)
        self._thread = threading.Thread(target=self._run, name="rankstep-watch", daemon=True)
        self._thread.start()
        self._in_main = threading.current_thread() is threading.main_thread()
        if self._in_main:
            self._handlers = {number: signal.signal(number, self._handle) for number in grace}
            self._wakeup = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def ended_at(self, pid: int) -> int | None:
        """Return when a rank's process ended, in nanoseconds of ``time.monotonic_ns``, if that was seen."""
        return self._ended.get(pid)

    def kill_ranks(self) -> list[str]:
        """Kill what is left of the ranks and of the processes they started; return their names.

        Processes that a rank has moved to a session of their own are not its workers but services; they stay.
        """
        killed = keeper.kill(self._left, _LAST_SECONDS)
        return [f"{pid} ({name})" for pid, name in killed.items()]

    def close(self) -> None:
        """Give the signals back and stop watching."""
        if self._in_main:
            signal.set_wakeup_fd(self._wakeup)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        self._closing = True
        os.write(self._wake_write, b"\0")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
        os.close(self._wake_write)
        self._tell_keeper(keeper.DONE)
        if self._keeper.stdin is not None:
            with suppress(OSError):
                self._keeper.stdin.close()
        self._keeper.wait()

    def _tell_keeper(self, word: str) -> None:
        # A keeper that somebody has killed is missed only if the launcher is killed as well.
        with suppress(OSError, ValueError):
            if self._keeper.stdin is not None:
                self._keeper.stdin.write(f"{word}\n".encode())
                self._keeper.stdin.flush()

    def _handle(self, number: int, _: FrameType | None) -> None:
        if not self._raised:
            self._raised = True
            raise SignalException(f"launcher got signal {number}", signal.Signals(number))

    def _run(self) -> None:
        while not self._closing:
            now = time.monotonic()
            if now >= self._kill_at:
                self._kill_at = _NEVER
                self.kill_ranks()
                self._leave_at = time.monotonic() + _LAST_SECONDS
            elif now >= self._leave_at:
                # The main thread is stuck inside torch, where Python's handlers cannot reach it.
                shutil.rmtree(self._folder, ignore_errors=True)
                number = self._signal or signal.SIGTERM
                sys.stderr.write(f"rankstep: stopped by {signal.Signals(number).name}\n")
                sys.stderr.flush()
                os._exit(128 + number)
            due = min(self._kill_at, self._leave_at)
            timeout = None if due == _NEVER else max(0.0, due - time.monotonic())
            for key, _ in self._selector.select(timeout):
                key.data()

    def _read_reports(self) -> None:
        for report in os.read(self._control, _READ).split():
            pid = int(report)
            self._pids.add(pid)
            self._tell_keeper(report.decode())
            try:
                end = os.pidfd_open(pid)
            except OSError:
                self._ended[pid] = time.monotonic_ns()
            else:
                self._selector.register(
                    end, selectors.EVENT_READ, partial(self._note_end, pid, end)
                )

    def _note_end(self, pid: int, end: int) -> None:
        self._ended[pid] = time.monotonic_ns()
        self._selector.unregister(end)
        os.close(end)

    def _read_signals(self) -> None:
        for number in os.read(self._wake_read, _READ):
            now = time.monotonic()
            if number not in self._grace:
                continue
            if self._signal is None:
                self._signal, self._signal_at = number, now
                # Before any rank has started there is nobody to wait for.
                self._kill_at = now + (self._grace[number] if self._pids else 0.0)
            elif now - self._signal_at > _ECHO_SECONDS and self._leave_at == _NEVER:
                self._kill_at = now

    def _left(self) -> dict[int, str]:
        """Find living processes of the ranks: in their sessions, or our children that carry our mark."""
        return keeper.living(self._pids, os.getpid(), os.fsencode(self._mark))
