"""The guard of one rank: two threads that do nothing while all goes well.

*The watch* looks at the training thread about once a second, from outside. If it has stood in one wait for too long, or
a process of this host has ended, the watch rings. *The ear* blocks in the store until somebody rings, and says where its
rank is. The first to ring is the judge of the round: it collects what the ranks say, completes it with what the kernel
knows about those that say nothing, and lets all ranks print the same verdict.

Note [Who may end a wait]
    A verdict says whether the wait can ever end. If not, the waiting ranks raise (``collectives/lookout.py``). A wait
    inside torch's own collectives cannot be raised out of; it is broken by closing the connections of its group.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from rankstep.collectives.lookout import board
from rankstep.doctor.breaking import break_groups
from rankstep.doctor.channel import ASK, STOP, STORE_ERRORS, TOLD, WHERE, Channel, Ring
from rankstep.doctor.desk import Desk
from rankstep.doctor.judging import Bench
from rankstep.doctor.neighbours import Neighbours
from rankstep.doctor.own import Self
from rankstep.doctor.paper import keep, say
from rankstep.doctor.position import users_line
from rankstep.doctor.report import Report, Standing, name_ranks
from rankstep.doctor.settings import End
from rankstep.doctor.verdict import Cause, Verdict, ended
from rankstep.errors import CommunicationError, RankSkewError, SyncError
from rankstep.world import background

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankstep.doctor.settings import Settings

_TICK_S = 1.0
_FIRST_S = 0.1
"""Until the other ranks of this host are known."""

_AGAIN = 6.0
"""A wait that goes on is told again after six times as long: 5 s, 30 s, 3 minutes, 18 minutes."""

_VERDICT_S = 6.0
"""The judge needs a second for ranks that do not answer, and three where a store does not."""

_HEARD_S = 0.5
"""So long a rank that fails waits for the others to have heard of it."""

_WAKE_S = 10.0
"""So long a rank may take to leave a wait that was broken for it; then its process ends."""


class Guard:
    """Watches over one rank.

    Args:
        group: The default process group.
        settings: What the user wants.
        thread: The thread that trains.

    Attributes:
        own: What can be seen of this rank.
        verdict: Why this job cannot go on; None: it can, as far as is known.
    """

    def __init__(self, group: Any, settings: Settings, thread: int) -> None:
        self.group: weakref.ref[Any] = weakref.ref(group)
        self.settings = settings
        self.own = Self(group.rank(), thread, settings.alarm_s)
        self.verdict: Verdict | None = None
        self._rank: int = group.rank()
        self._channel = Channel(
            dist.distributed_c10d._get_default_store(), self._rank, group.size()
        )
        self._bench = Bench(self._channel, group.size(), settings)
        self._pid = os.getpid()
        self._closing = threading.Event()
        self._next_s = 0.0
        self._in_round = False
        self._late: Verdict | None = None
        self._broken_s = 0.0
        self._lock = threading.Lock()
        self._unfreed = threading.Lock()
        self._said: set[tuple[Any, ...]] = set()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, lambda: None)
        self._neighbours = Neighbours(self._channel, self._selector, self._neighbour_ended)
        self._desk = Desk(self._selector, self.where)
        self._threads: list[threading.Thread] = []

    def open(self) -> None:
        """Say who this rank is, and begin."""
        self._channel.introduce(self.own.card())
        for run, name in ((self._watch, "rankstep guard"), (self._hear, "rankstep guard ear")):
            self._threads.append(background.begin(name, self._carefully, (run,), self.close))

    def close(self) -> None:
        """End both threads."""
        if self._closing.is_set() or not self.is_of_this_process:
            return
        # In this order: once it sees that, the watch may free the pipe.
        os.write(self._wake_write, b"c")
        self._closing.set()
        self._channel.stop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(1.0)
        if not self._threads[0].is_alive() or self._threads[0] is threading.current_thread():
            self._free()

    def _free(self) -> None:
        """Give back what the watch has used: whoever is last does it, on a busy host the watch itself."""
        if self._unfreed.acquire(blocking=False):
            self._desk.close()
            self._neighbours.close()
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def close_in_child(self) -> None:
        """This process is a copy of the rank (a worker of a DataLoader): it must not keep the sockets open."""
        self._desk.close()
        self._neighbours.close()

    @property
    def is_of_this_process(self) -> bool:
        """False in a copy of the process: threads do not survive a fork."""
        return os.getpid() == self._pid

    # ---------------------------------------------------------------- this rank's end

    def left(self, how: str) -> None:
        """This rank's work is done."""
        with suppress(*STORE_ERRORS):
            steps = f" after {self.own.steps()} steps" if self.own.models else ""
            self._channel.post("left", {"detail": how + steps})

    def failed(self, detail: str, traceback: str, *, alone: bool) -> None:
        """An exception ends this rank: let all others know, before anything of this rank is closed.

        Args:
            detail: In a line.
            traceback: In full.
            alone: It is this rank's own error, and not one that every rank raises for itself.
        """
        with suppress(*STORE_ERRORS):
            self._channel.post("failed", {"detail": detail, "traceback": traceback})
            if alone and self.verdict is None:
                verdict = ended([Report(self._rank, Standing.FAILED, detail=detail)])
                number = self._announce(verdict)
                self._take(verdict)
                # Once this process has ended, a launcher may end the others before they have said anything.
                self._channel.answers(number, _HEARD_S)

    def explain(self, within_s: float = 0.5) -> str:
        """A collective of this rank has failed: say why, and tell all ranks; empty: this is not known."""
        until = time.monotonic() + within_s
        latest = until + _VERDICT_S
        while self.verdict is None:
            gone = self._gone()
            if gone:
                verdict = ended(gone)
                with suppress(*STORE_ERRORS):
                    self._announce(verdict)
                self._take(verdict)
            elif time.monotonic() > (latest if self._in_round else until):
                # A judge that has asked this rank where it stands is about to say why.
                return ""
            else:
                time.sleep(0.02)
        return self.verdict.reason

    def _gone(self) -> Sequence[Report]:
        """Other ranks that have failed, ended or left, as far as one look tells; the cause first."""
        left = []
        with suppress(*STORE_ERRORS):
            gone = self._bench.posted(Standing.FAILED, but=self._rank)
            if gone:
                return gone[:1]
            left = self._bench.posted(Standing.LEFT, but=self._rank)
        return [self._settled(report) for report in self._neighbours.ended()] or left

    def _settled(self, report: Report) -> Report:
        """As all ranks tell it: how a process ended can be read only until its parent has done so."""
        with suppress(*STORE_ERRORS):
            return Report.from_json(self._channel.settle(report.rank, report.as_json()))
        return report

    def _neighbour_ended(self, report: Report) -> None:
        """A process of this host has ended without a word, and nobody asked it to."""
        if self.verdict is not None or self._closing.is_set():
            return
        with suppress(*STORE_ERRORS):
            told = self._bench.posted(Standing.FAILED) + self._bench.posted(Standing.LEFT)
            if any(each.rank == report.rank for each in told):
                return
        verdict = ended([self._settled(report)])
        self._take(verdict)
        with suppress(*STORE_ERRORS):
            self._announce(verdict)

    def _announce(self, verdict: Verdict) -> int:
        number = self._channel.round
        while not self._channel.lead(number):
            number += 1
        self._channel.ring(number, Ring(TOLD, self._rank, verdict.as_json()))
        return number

    def _carefully(self, run: Callable[[], None]) -> None:
        """A guard with a fault of its own must not end a training: it says so, and leaves its place."""
        try:
            run()
        except Exception as error:  # noqa: BLE001
            where = users_line(error) or "?"
            say(
                [
                    f"the guard of rank {self._rank} has failed and watches no more: {error!r} ({where})"
                ]
            )

    # ---------------------------------------------------------------- the ear

    def _hear(self) -> None:
        while not self._closing.is_set():
            try:
                number = self._channel.round
                ring = self._channel.listen()
                if ring.kind == STOP:
                    return
                self._answer(number, ring)
            except STORE_ERRORS:
                # The store has gone. If that matters, this rank's own wait will tell.
                return

    def _answer(self, number: int, ring: Ring) -> None:
        if ring.kind == TOLD:
            self._take(Verdict.from_json(ring.text))
            self._channel.answer(number, "heard")
            return
        if ring.kind == ASK and ring.judge != self._rank:
            self._in_round = True
            try:
                self._channel.answer(number, self.own.report().as_json())
                text = self._channel.verdict(number, _VERDICT_S)
                self._take(Verdict.from_json(text) if text else None)
            finally:
                self._in_round = False
        else:
            self._channel.answer(number, self.own.report().as_json())

    # ---------------------------------------------------------------- the watch

    def _watch(self) -> None:
        tick_s = min(_TICK_S, self.settings.alarm_s / 5)
        due_s = time.monotonic() + _FIRST_S
        while not self._closing.is_set():
            for key, _ in self._selector.select(max(0.0, due_s - time.monotonic())):
                key.data()
            if self._closing.is_set() or self._group_is_gone():
                break
            if time.monotonic() >= due_s:
                self._tick()
                due_s = time.monotonic() + (tick_s if self._neighbours.all_met else _FIRST_S)
        if self._closing.is_set():
            self._free()
        else:
            self.close()

    def _group_is_gone(self) -> bool:
        group = self.group()
        return group is None or dist.GroupMember.WORLD is not group

    def _tick(self) -> None:
        pulse = self.own.beat()
        self._neighbours.meet()
        if pulse.ended_s and self._late is not None:
            late, self._late = self._late, None
            say(
                [
                    f"{name_ranks(list(late.ranks))} came after all: rank {self._rank} goes on after {pulse.ended_s:.0f} s"
                ]
            )
        if not pulse.waited_s:
            self._next_s = 0.0
            return
        if self._broken_s and time.monotonic() - self._broken_s > _WAKE_S:
            say([f"rank {self._rank} cannot be woken from its wait, so its process ends"])
            os._exit(1)
        idle = self.verdict is None and not self._in_round
        if idle and self.own.waits and pulse.waited_s >= self._due_s():
            self._ask_all()

    def _due_s(self) -> float:
        """When the present wait is looked into, or looked into again."""
        first_s = min(self.own.pulse.alarm_s, self.settings.limit_s or float("inf"))
        return self._next_s or first_s

    def _ask_all(self) -> None:
        """Ring, and judge what the ranks answer."""
        number = self._channel.round
        try:
            if not self._channel.lead(number):
                # Another rank rings at this moment. It may have been killed right before, though.
                time.sleep(_TICK_S)
                if self._channel.round > number:
                    return
            self._channel.ring(number, Ring(ASK, self._rank))
            verdict = self._bench.judge(number)
            self._channel.conclude(number, "" if verdict is None else verdict.as_json())
        except STORE_ERRORS as error:
            verdict = self._bench.cut_off(self.own.report(), error, self._neighbours.ended())
        self._take(verdict)

    def where(self) -> list[Report]:
        """Ask all ranks where they are, for ``rankstep doctor``."""
        number = self._channel.round
        while not self._channel.lead(number):
            number += 1
        self._channel.ring(number, Ring(WHERE, self._rank))
        return self._bench.reports(number)

    # ---------------------------------------------------------------- the verdict

    def _take(self, verdict: Verdict | None) -> None:
        """Print the verdict, once, and draw its consequence."""
        waited_s = max(self.own.pulse.waited_s, self.settings.alarm_s)
        if verdict is None:
            self._next_s = waited_s + min(2.0, self.settings.alarm_s / 2)
            return
        limit_s = self._limit_s(verdict)
        self._next_s = _AGAIN * waited_s
        if limit_s is not None and waited_s < limit_s:
            self._next_s = min(self._next_s, limit_s)
        ends = verdict.hopeless and self.settings.end is End.RAISE
        with self._lock:
            if self.verdict is not None or (verdict.cause, verdict.ranks) in self._said:
                return
            if verdict.hopeless:
                self._said.add((verdict.cause, verdict.ranks))
            say([*verdict.lines, *self._outlook(verdict)])
            keep(verdict, self.own.report(brief=True))
            # Last: whoever looks may raise at once, behind what has been said.
            self.verdict = verdict if ends else None
        if ends:
            self._end(verdict)
        elif verdict.cause is Cause.LATE and self._rank not in verdict.ranks:
            self._late = verdict

    def _limit_s(self, verdict: Verdict) -> float | None:
        unreachable = verdict.cause is Cause.UNREACHABLE
        return self.settings.lost_s if unreachable else self.settings.limit_s

    def _outlook(self, verdict: Verdict) -> list[str]:
        if verdict.cause in (Cause.FAILED, Cause.ENDED) or self.settings.end is End.TELL:
            return []
        if verdict.hopeless:
            return ["every rank that waits raises an error now"]
        limit_s = self._limit_s(verdict)
        until = "the process group's time-out" if limit_s is None else f"{limit_s:g} s"
        return [f"they wait on, until {until}"]

    def _end(self, verdict: Verdict) -> None:
        kind = RankSkewError if verdict.cause in (Cause.LEFT, Cause.APART) else CommunicationError

        def error(rank: int, what: str) -> SyncError:
            return kind(f"rank {rank}: {what or 'a wait'} cannot end: {verdict.reason}.")

        board.news = error
        if self._rank not in verdict.ranks or verdict.cause is Cause.APART:
            self._break_wait()

    def _break_wait(self) -> None:
        report = self.own.report()
        if report.standing is Standing.WAITING:
            self._broken_s = time.monotonic()
            if self.own.waits_in_torch:
                break_groups()
