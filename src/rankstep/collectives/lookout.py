"""Looks around when a wait takes long or fails: who else waits, and where.

Nothing is read or written while collectives end in good time. A rank that has waited for some seconds leaves a mark in
the group's store saying where it stands. Two ranks that keep standing in two different places wait for each other for
ever, so both raise; ranks that compute, load data or save a checkpoint leave no mark and are simply waited for.

The guard above (``rankstep.doctor``) knows more: what other ranks' programs are doing, and which ones have ended. What it
finds is put into :data:`news`, and whoever waits raises it.

Whoever raises here leaves a collective unfinished. Closing a gloo group waits for such ones, and their other ranks may
never come, so the group is kept for good: the process must be able to end.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from rankstep.errors import RankSkewError, SyncError, WorldError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankstep.collectives.communicator import Pending

ALARM_VARIABLE = "RANKSTEP_GUARD_ALARM"


def read_seconds(variable: str, default: float | None) -> float | None:
    """A positive number of seconds from the environment; ``default`` where there is none.

    Raises:
        WorldError: It is something else.
    """
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise WorldError(
            f"{variable}={text}: it must be a number of seconds above 0. Next: correct it, or leave it out."
        )
    return seconds


ALARM_S: float = read_seconds(ALARM_VARIABLE, 5.0) or 5.0
"""So long a wait is usual nowhere but behind a slow step, which is no alarm either."""

CONFIRM_S = min(2.0, ALARM_S)
"""Both ranks must still stand where they stood after this."""

LOOK_S = 0.5
"""How often a wait inside the backend is taken up again, to hear the news."""

PATIENCE_S = 1.5
"""After a failure: ranks that wait for the same dead one see their own failure within a fraction of this."""


class Watcher(Protocol):
    """Somebody else who may know why a rank does not come."""

    def look(self) -> None:
        """A wait takes long: raise RankSkewError if you know why."""

    def heard(self, error: RankSkewError) -> None:
        """A wait has been given up."""


class Board:
    """What the guard tells those who wait in this process.

    Attributes:
        news: Makes the error that a wait must end with, from this rank's number and what it waits for; None: wait on.
    """

    def __init__(self) -> None:
        self.news: Callable[[int, str], SyncError] | None = None
        self._latest: weakref.ref[Lookout] | None = None

    @property
    def latest(self) -> Lookout | None:
        """The lookout that was told last where its rank waits; kept weakly, since it keeps its group, and that a port."""
        return None if self._latest is None else self._latest()

    @latest.setter
    def latest(self, lookout: Lookout) -> None:
        self._latest = weakref.ref(lookout)


board = Board()

_watchers: weakref.WeakKeyDictionary[Any, list[Watcher]] = weakref.WeakKeyDictionary()


def also_ask(group: Any, watcher: Watcher) -> None:
    """Ask ``watcher``, too, whenever a wait of this group's ranks takes long."""
    _watchers.setdefault(group, []).append(watcher)


class Lookout:
    """This rank's marks in the store of one process group.

    Args:
        group: The ranks.
        carrier: The group that carries the collectives, if that is a twin of ``group``.
    """

    def __init__(self, group: dist.ProcessGroup, carrier: Any = None) -> None:
        # Weak, because twins and shared memory are kept, with their lookouts, as long as their group lives, and no longer.
        self._group: weakref.ref[Any] = weakref.ref(group)
        self._carrier: weakref.ref[Any] = weakref.ref(group if carrier is None else carrier)
        self._rank: int = group.rank()
        self._world_size: int = group.size()
        self._mark = {"place": "", "what": ""}
        self._posted = False
        self._elsewhere: dict[int, dict[str, str]] = {}

    def at(self, place: str, what: str) -> None:
        """This rank waits next in ``place``, the same text on all ranks that wait there, for ``what``."""
        self._mark = {"place": place, "what": what}
        board.latest = self

    @property
    def mark(self) -> dict[str, str]:
        """Where this rank waits, or waited last."""
        return self._mark

    @property
    def group(self) -> Any:
        """The ranks; None once they are gone."""
        return self._group()

    def hear(self) -> None:
        """Raise the guard's news, if there are any.

        Raises:
            SyncError: This wait can never end; says why.
        """
        if board.news is not None:
            self._keep_carrier()
            raise board.news(self._rank, self._mark["what"])

    def waited_long(self) -> None:
        """Leave a mark and look for those of the others.

        Raises:
            RankSkewError: Another rank has been waiting in another place, too, for a while, or will not come.
        """
        group = self._group()
        watchers = [] if group is None else _watchers.get(group, [])
        try:
            for watcher in watchers:
                watcher.look()
            self._compare()
        except RankSkewError as error:
            for watcher in watchers:
                watcher.heard(error)
            self._keep_carrier()
            raise

    def _keep_carrier(self) -> None:
        carrier = self._carrier()
        if carrier is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(carrier))

    def _compare(self) -> None:
        marks = self._look()
        elsewhere = {
            rank: mark for rank, mark in marks.items() if mark["place"] != self._mark["place"]
        }
        steady = [rank for rank, mark in elsewhere.items() if self._elsewhere.get(rank) == mark]
        self._elsewhere = elsewhere
        if steady:
            places = "; ".join(
                f"rank {rank} in {marks[rank]['what']}" for rank in sorted(marks)[:8]
            )
            raise RankSkewError(
                f"rank {self._rank}: the ranks wait for each other in different places: {places}. Some rank skipped, "
                "repeated or added a step or a forward that the others did not; every rank must take the same."
            )

    def give_up(self, error: SyncError) -> None:
        """Tell the ranks whose waits this one breaks why it does so."""
        self._mark = {**self._mark, "gave_up": str(error)}
        self._look()

    def given_up(self) -> RankSkewError | None:
        """After a failure: whether another rank broke this rank's wait because the ranks had got out of step."""
        for rank, mark in self._look().items():
            if rank != self._rank and "gave_up" in mark:
                return RankSkewError(
                    f"rank {self._rank}: rank {rank} gave up waiting: {mark['gave_up']}"
                )
        return None

    def came_through(self) -> None:
        """The wait is over: take the mark away."""
        if self._posted:
            self._posted = False
            self._elsewhere = {}
            try:
                self._store().delete_key(self._key(self._rank))
            except (RuntimeError, KeyError, ValueError):
                return

    def absent(self) -> list[int]:
        """After a failure: the ranks that do not report a failure of their own soon after."""
        until = time.monotonic() + PATIENCE_S
        missing = list(range(self._world_size))
        while missing and time.monotonic() < until:
            marks = self._look()
            if not marks:
                return []
            missing = [rank for rank in missing if rank not in marks]
            time.sleep(0.05)
        return missing

    def _look(self) -> dict[int, dict[str, str]]:
        """All marks, with this rank's own; empty if the store is gone."""
        try:
            store = self._store()
            store.set(self._key(self._rank), json.dumps(self._mark))
            self._posted = True
            return {
                rank: json.loads(store.get(self._key(rank)))
                for rank in range(self._world_size)
                if store.check([self._key(rank)])
            }
        except (RuntimeError, KeyError, ValueError):
            return {}

    def _store(self) -> Any:
        return dist.distributed_c10d._get_process_group_store(self._group())  # type: ignore[arg-type]  # None: a KeyError

    @staticmethod
    def _key(rank: int) -> str:
        return f"rankstep/waits/{rank}"


class WatchedWork:
    """A work of a backend whose ``wait`` blocks the host; looks around when it takes long.

    Args:
        work: The backend's own.
        lookout: Looks around.
    """

    __slots__ = ("_lookout", "_work")

    def __init__(self, work: dist.Work, lookout: Lookout) -> None:
        self._work = work
        self._lookout = lookout

    def wait(self) -> object:
        """Return when the result is there."""
        due_s = time.monotonic() + ALARM_S
        while True:
            try:
                done = self._work.wait(timedelta(seconds=min(LOOK_S, ALARM_S)))
            except RuntimeError:
                if not self._work.is_completed():
                    self._lookout.hear()
                    if time.monotonic() >= due_s:
                        self._lookout.waited_long()
                        due_s = time.monotonic() + CONFIRM_S
                    continue
                # It has ended just behind the time-out of this look, as when a signal had stopped this process: its own
                # result counts.
                done = self._work.wait()
            self._lookout.came_through()
            return done

    def get_future(self) -> Any:
        """The work's future."""
        return self._work.get_future()


def watched(work: dist.Work, lookout: Lookout | None) -> Pending:
    """The work, watched unless ``lookout`` is None."""
    return work if lookout is None else WatchedWork(work, lookout)
