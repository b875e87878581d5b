"""A job that is told to end: notice it, and agree on the step after which all ranks do.

Note [Workers apart]
    Launchers and job managers signal a rank's whole process group. A loader's workers would die of it at once, and with
    them the steps that are left until all ranks agree; torch even raises in the middle of whatever the rank does. So
    workers that are forked leave the group. They end with their rank as ever, since they look whether it is there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

LOOK_SECONDS = 0.25
"""So often, roughly, the ranks ask each other; it takes about a tenth of a millisecond."""

_MOST_STEPS = 1000


class Stopped(SystemExit):
    """All ranks have saved and end, because one of them was told to by a signal.

    It ends the process with the code 128 + the signal, as shells have it, and without a traceback. Catch it for what is
    to be done before.
    """


class StopRequest:
    """Notes the signals that ask a job to end. Only the main thread can; in another one it hears nothing.

    Args:
        signals: Which. A second one has the effect that it had before.

    Attributes:
        signal: The one that came; 0: none.
    """

    def __init__(self, signals: Sequence[int]) -> None:
        self.signal = 0
        self._before: dict[int, Any] = {}
        self._signals = list(signals)

    @property
    def possible(self) -> bool:
        """Whether this thread can hear any."""
        return bool(self._signals) and threading.current_thread() is threading.main_thread()

    def listen(self) -> None:
        """Begin to, and forget what was heard before."""
        self.signal = 0
        if self.possible:
            self._before = {number: signal.signal(number, self._note) for number in self._signals}

    def close(self) -> None:
        """Give the signals back."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            # None: it was not set from Python, and cannot be set again from it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.signal = number
        self.close()


class Looks:
    """Says in which steps the ranks ask each other, the same ones on all ranks and a fraction of a second apart."""

    def __init__(self) -> None:
        self._next = 1
        self._last: tuple[int, float] | None = None

    def due(self, step: int) -> bool:
        """Whether this step is one."""
        return step >= self._next

    def proposal(self, step: int) -> int:
        """How many steps this rank would let pass until the next one."""
        now = time.monotonic()
        last, self._last = self._last, (step, now)
        if last is None:
            return 1
        each = (now - last[1]) / max(1, step - last[0])
        return max(1, min(_MOST_STEPS, int(LOOK_SECONDS / max(each, 1e-9))))

    def agreed(self, step: int, interval: int) -> None:
        """All ranks have taken the mean of their proposals."""
        self._next = step + max(1, interval)


class _Forks:
    """Whether processes that are forked now leave the process group."""

    leave = False
    known = False


def _forked() -> None:
    if _Forks.leave:
        os.setpgid(0, 0)


@contextlib.contextmanager
def workers_apart() -> Iterator[None]:
    """Around the start of a loader's workers: see Note [Workers apart]."""
    if not _Forks.known:
        _Forks.known = True
        os.register_at_fork(after_in_child=_forked)
    _Forks.leave = True
    try:
        yield
    finally:
        _Forks.leave = False
