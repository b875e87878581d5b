"""Looks around for waits that block inside the backend and cannot look for themselves.

A send or receive of gloo has no wait that may be taken up again: one that runs into its limit closes every connection of
its group. So whoever waits for one waits without a limit, and one thread of the process looks around in its stead. If it
finds that the ranks wait for each other for ever, it breaks the wait by that very limit, on purpose.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from rankstep.collectives import lookout as alarm
from rankstep.errors import SyncError
from rankstep.world import background

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rankstep.collectives.lookout import Lookout

LOOK_S = 0.5
"""How often the thread looks at who waits."""


class _Wait:
    """One rank's wait, as the patrol sees it."""

    def __init__(
        self, lookout: Lookout, give_up: Callable[[], None], compare: Callable[[], None]
    ) -> None:
        self.lookout = lookout
        self.give_up = give_up
        self.compare = compare
        self.next_look_s = time.monotonic() + alarm.ALARM_S
        self.looked = False
        self.error: SyncError | None = None


class Patrol:
    """One thread, started by the first wait; it sleeps while nobody waits."""

    def __init__(self) -> None:
        self._waits: set[_Wait] = set()
        self._entered = 0
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watch(
        self, lookout: Lookout, give_up: Callable[[], None], compare: Callable[[], None]
    ) -> Iterator[None]:
        """Look around while the body waits.

        Args:
            lookout: Knows where this rank waits, and looks for the others.
            give_up: Makes the body's wait fail; called from the patrol's thread.
            compare: Raises if the ranks exchange different things; called from there, too.

        Raises:
            RankSkewError: The ranks wait in different places or for different things, found here or by another rank that gave up for it.
            SyncError: The guard has found another reason why this wait cannot end.
        """
        wait = _Wait(lookout, give_up, compare)
        self._enter(wait)
        try:
            yield
        except RuntimeError as error:
            skew = wait.error or lookout.given_up()
            if skew is None:
                raise
            raise skew from error
        finally:
            self._waits.discard(wait)
        if wait.error is not None:
            raise wait.error
        lookout.came_through()

    def _enter(self, wait: _Wait) -> None:
        self._waits.add(wait)
        self._entered += 1
        # Another process after a fork has no such thread any more.
        if self._thread is None or not self._thread.is_alive():
            self._wake = threading.Event()
            self._ending = threading.Event()
            self._thread = background.begin(
                "rankstep patrol", self._walk, (self._wake, self._ending), self._end
            )
        if not self._wake.is_set():
            self._wake.set()

    def _end(self) -> None:
        self._ending.set()
        self._wake.set()

    def _walk(self, wake: threading.Event, ending: threading.Event) -> None:
        while not ending.is_set():
            wake.wait()
            seen = -1
            while (self._waits or seen != self._entered) and not ending.wait(LOOK_S):
                seen = self._entered
                for wait in list(self._waits):
                    self._look(wait)
            wake.clear()
            if self._waits:  # it came in between
                wake.set()

    @staticmethod
    def _look(wait: _Wait) -> None:
        if wait.error is not None:
            return
        try:
            wait.lookout.hear()
            if time.monotonic() >= wait.next_look_s:
                wait.next_look_s = time.monotonic() + alarm.CONFIRM_S
                wait.lookout.waited_long()
                # Places are known by name, and told at the second look, so they come first.
                if wait.looked:
                    wait.compare()
                wait.looked = True
        except SyncError as error:
            wait.error = error
            wait.lookout.give_up(error)
            wait.give_up()


patrol = Patrol()
