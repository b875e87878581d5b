"""The ranks of one host at work on memory that all of them see: posts, sums, and word that they are done.

One operation goes like this. Every rank *posts* where its tensor lies. Once all have posted, each rank does its part: it
sums its slice of all tensors, chunk by chunk, and writes the result into every rank's tensor while it is in the cache.
Then it says *done*; who has heard that from all may use its tensor. Those are two messages to each peer.

Ranks do their parts in the calls that start or await operations: where they keep all cores busy there is nothing to
overlap with, and a thread would take its time from them. A thread only looks now and then whether something has been
left lying, since a rank may start an operation and then compute for long, or do nothing any more.
"""

from __future__ import annotations

import collections
import functools
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from rankstep.collectives.channels import Channels
from rankstep.collectives.operation import Operation, State, Watch, Work
from rankstep.collectives.posts import DTYPES, Kind, Peer, Post, Word, failure, pack
from rankstep.collectives.segments import Memory, Place, view
from rankstep.collectives.slices import Spreading, Summing, scratch_for, slice_sizes, slices
from rankstep.errors import RankSkewError
from rankstep.world import background

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankstep.collectives.bridge import Bridge
    from rankstep.collectives.lookout import Lookout
    from rankstep.collectives.neighbours import Meeting

SPINS = 40
"""Looks without sleeping, some tens of microseconds: longer than a peer of the same speed needs for a small tensor."""

LOOK_MS = 500
"""How often a sleeping rank asks whether it should say something."""

LEFT_S = 0.02
"""An operation that has lain so long is looked after by the thread."""

MAX_OPEN = 64
"""So many operations may be under way; a socket's buffer holds the messages of some more."""

KEPT_WORKS = 2048
"""Prepared parts: one per bucket and wrapper as a rule."""


class Hub:
    """This rank's end of everything that the ranks of its host do together.

    Args:
        rank: This rank in the group.
        meeting: The ranks of this host, with sockets.
        timeout_s: A wait longer than this fails.
        start_crossing: Sums a slice over the hosts and returns the work; None: there is one host.
        bridge: Carries parts between the hosts; None: there is one host.

    Attributes:
        local: The ranks of this host.
        index: This rank's place among them.
        memory: Where tensors must lie.
        bridge: To the other hosts.
        lookout: Is asked when a wait takes long.
        lock: Whoever holds it is at work here.
    """

    def __init__(
        self,
        rank: int,
        meeting: Meeting,
        timeout_s: float,
        start_crossing: Callable[[torch.Tensor], Any] | None = None,
        bridge: Bridge | None = None,
    ) -> None:
        self.rank = rank
        self.local = meeting.layout.local
        self.index = self.local.index(rank)
        self.lookout: Lookout | None = None
        self.bridge = bridge
        self._owners = meeting.layout.owners
        self._timeout_s = timeout_s
        self._start_crossing = start_crossing
        self.lock = threading.RLock()
        self._open: collections.deque[Operation] = collections.deque()
        self._by_number: dict[int, Operation] = {}
        self._next = 0
        self._broken: BaseException | None = None
        self._withdrawn: collections.deque[int] = collections.deque()
        self._works: dict[Any, Work] = {}
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        # Without a core for each rank, looking again would keep a peer from running.
        self._spins = SPINS if len(os.sched_getaffinity(0)) >= len(self.local) else 0
        this = weakref.ref(self)
        self._channels = Channels(meeting, functools.partial(_note_done, self._by_number))
        self.peers = self._channels.peers
        self.memory = Memory(rank, lambda *facts: _announce(this, *facts), self._withdrawn.append)
        self._some_open, ended = threading.Event(), threading.Event()
        weakref.finalize(self, _end, self._some_open, ended).atexit = False
        keeper = functools.partial(_look_after, this, self._some_open, ended)
        background.begin(
            "rankstep hub", keeper, (), functools.partial(_end, self._some_open, ended)
        )

    # ---------------------------------------------------------------- starting

    def start(
        self,
        kind: Kind,
        tensor: torch.Tensor | None = None,
        sizes: tuple[int, ...] = (),
        then: Callable[[], None] | None = None,
        cross: Callable[[torch.Tensor], Any] | None = None,
    ) -> Operation:
        """Post this rank's part of an operation, and do what can be done by now.

        Args:
            kind: Which one.
            tensor: Flat, in :attr:`memory`; None: nothing but the message.
            sizes: The ranks' parts of it, in elements, where the caller says them.
            then: Is called as soon as the result is there, before anybody hears of it.
            cross: Sums a slice over the hosts; None: as all others are.

        Raises:
            RuntimeError: A peer has ended or failed, or asks for something else.
        """
        with self.lock:
            self._raise_broken()
            post = Post(kind, 0, Place(0, 0), 0)
            if tensor is not None:
                place = self.memory.place_of(tensor)
                if place is None:
                    raise AssertionError("a tensor outside the shared segments")
                post = Post(kind, DTYPES.index(tensor.dtype), place, tensor.nbytes)
            operation = Operation(self, self._next, post, sizes, tensor, then)
            operation.cross = cross or self._start_crossing
            operation.missing = {peer.rank for peer in self.peers}
            self._next += 1
            self._open.append(operation)
            self._by_number[operation.number] = operation
            try:
                self._forget_withdrawn()
                self._channels.send(pack(Word.POST, operation.number, post))
                self._advance()
            except BaseException as error:
                self.give_up(error)
                raise
            while len(self._open) > MAX_OPEN:
                self.wait(self._open[0])
            if self._open:
                self._some_open.set()
            return operation

    def look_after(self) -> None:
        """Do what has been left lying, unless the rank is at work itself."""
        if self.lock.acquire(blocking=False):
            try:
                if self._broken is None:
                    self._advance()
                if not self._open or self._broken is not None:
                    self._some_open.clear()
            except BaseException as error:  # noqa: BLE001 - kept, and raised where the rank waits
                self.give_up(error)
            finally:
                self.lock.release()

    def _forget_withdrawn(self) -> None:
        while self._withdrawn:
            number = self._withdrawn.popleft()
            for key in [key for key in self._works if key[0].place.segment == number]:
                del self._works[key]
            self._channels.send(pack(Word.WITHDRAWN, number))

    # ---------------------------------------------------------------- doing

    def _advance(self) -> None:
        """Do what can be done without waiting."""
        self._channels.hear()
        for operation in list(self._open):
            if operation.state is State.POSTED:
                if not all(operation.number in peer.posts for peer in self.peers):
                    break
                self._do(operation)
            if operation.state is State.CROSSING and operation.arrived:
                self._end_crossing(operation)
                self._spread(operation)
            if operation.state is State.DONE and not operation.missing:
                operation.finish()
        while self._open and self._open[0].state is State.FINISHED:
            del self._by_number[self._open.popleft().number]

    def _do(self, operation: Operation) -> None:
        """All ranks have posted: check that they want the same, and do this rank's part."""
        posts = [peer.posts.pop(operation.number) for peer in self.peers]
        own = operation.post
        if any(post.wanted != own.wanted for post in posts):
            told = {self.rank: own}
            told |= {peer.rank: post for peer, post in zip(self.peers, posts, strict=True)}
            wanted = "; ".join(f"rank {rank} {told[rank]}" for rank in sorted(told))
            raise RankSkewError(
                f"rank {self.rank}: the ranks want different things at once: {wanted}. Some rank skipped, repeated or added a "
                "step or a forward that the others did not; every rank must take the same."
            )
        if own.kind is Kind.SHARE:
            operation.memory = operation.tensor if self.index == 0 else self._tensor(0, posts[0])
            # The first rank must not withdraw it before all have it.
            self._spread(operation)
            return
        if not own.nbytes:
            operation.missing.clear()
            operation.state = State.DONE
            return
        key = (own, *posts, operation.sizes)
        work = self._works.get(key)
        if work is None:
            if len(self._works) >= KEPT_WORKS:
                self._works.clear()
            work = self._works[key] = self._prepare(operation, posts)
        operation.work = work
        with torch.no_grad():
            work.sum()
        if work.start is not None:
            wake = functools.partial(_carried, self._channels, weakref.ref(self))
            operation.cross_over(work.start(), wake)
        elif work.crosses is not None and operation.cross is not None:
            operation.cross_over(operation.cross(work.crosses), self._channels.wake)
        else:
            self._spread(operation)

    def _end_crossing(self, operation: Operation) -> None:
        try:
            operation.crossing.wait()
        except RuntimeError as error:
            raise self._given_up() or RuntimeError(_text(error)) from error

    def _given_up(self) -> RankSkewError | None:
        """Another rank may have broken it off because the ranks are out of step."""
        if self.bridge is None or self.lookout is None:
            return None
        return self.lookout.given_up()

    def _spread(self, operation: Operation) -> None:
        with torch.no_grad():
            operation.work.spread()
        operation.state = State.DONE
        self._channels.send(pack(Word.DONE, operation.number))

    def _prepare(self, operation: Operation, posts: Sequence[Post]) -> Work:
        tensors = {peer.rank: self._tensor(i, posts[i]) for i, peer in enumerate(self.peers)}
        own_tensor = operation.tensor
        # Not the tensor itself: its owner's last reference ends it, and with it the segment.
        tensors[self.rank] = view(
            own_tensor,
            own_tensor.storage_offset() * own_tensor.element_size(),
            own_tensor.numel(),
            own_tensor.dtype,
        )
        kind = operation.post.kind
        sizes = operation.sizes or slice_sizes(own_tensor.numel(), self._owners)
        if own_tensor.dtype not in self._scratch:
            self._scratch[own_tensor.dtype] = scratch_for(own_tensor.dtype)
        scratch = self._scratch[own_tensor.dtype]
        if self.bridge is not None and kind in (Kind.REDUCE_SCATTER, Kind.ALL_GATHER):
            return self.bridge.prepare(kind, tensors, sizes, scratch)
        if self.index >= len(sizes) or not sizes[self.index]:
            return Work()
        parts = {rank: slices(tensors[rank], sizes)[self.index] for rank in sorted(tensors)}
        own = parts[self.rank]
        others = [part for rank, part in parts.items() if rank != self.rank]
        if kind in (Kind.ALL_GATHER, Kind.BROADCAST):
            return Work(spread=Spreading(own, others))
        crosses = kind is Kind.ALL_REDUCE and self._start_crossing is not None
        into = [own, *others] if kind is Kind.ALL_REDUCE and not crosses else [own]
        if not others:
            return Work(crosses=own)
        summing = Summing(list(parts.values()), into, scratch)
        spread = Spreading(own, others)
        return Work(summing, crosses=own, spread=spread) if crosses else Work(summing)

    def _tensor(self, position: int, post: Post) -> torch.Tensor:
        """The tensor that the peer at ``position`` has posted."""
        dtype = DTYPES[post.dtype]
        segment = self.peers[position].segments[post.place.segment]
        return view(segment, post.place.offset_bytes, post.nbytes // dtype.itemsize, dtype)

    # ---------------------------------------------------------------- waiting

    def wait(self, operation: Operation) -> None:
        """Do what is to do until ``operation`` has finished; see :meth:`Operation.wait`."""
        with self.lock:
            try:
                self._wait(operation)
            except BaseException as error:
                self.give_up(error)
                raise

    def _wait(self, operation: Operation) -> None:
        looks = self._spins
        compare = None if self.bridge is None else self.bridge.compare
        watch = Watch(self.lookout, self._timeout_s, compare)
        self._raise_broken()
        while True:
            self._advance()
            if operation.state is State.FINISHED:
                watch.over()
                return
            awaited = self._awaited(operation)
            self._raise_lost(awaited)
            if looks:
                looks -= 1
                os.sched_yield()
            elif not self._channels.sleep(LOOK_MS):
                watch.look(awaited)

    def _awaited(self, operation: Operation) -> list[Peer]:
        """The peers without whom it cannot go on; of operations in a row the first unfinished one decides."""
        first = next((o for o in self._open if o.state is not State.FINISHED), operation)
        if first.state is State.POSTED:
            return [peer for peer in self.peers if first.number not in peer.posts]
        missing = [peer for peer in self.peers if peer.rank in first.missing]
        if first.state is State.CROSSING:
            # It waits for another host, but without these it would wait for ever.
            return [peer for peer in missing if peer.failed or peer.ended]
        return missing if first.state is State.DONE else []

    def _raise_lost(self, awaited: Sequence[Peer]) -> None:
        for peer in awaited:
            if peer.failed:
                raise self._given_up() or RuntimeError(f"{peer} failed: {peer.failed}")
            if peer.ended:
                raise RuntimeError(f"{peer} has ended")

    def _raise_broken(self) -> None:
        if isinstance(self._broken, RankSkewError):
            raise RankSkewError(str(self._broken))
        if self._broken is not None:
            raise RuntimeError(f"an earlier collective failed: {_text(self._broken)}")

    def give_up(self, error: BaseException) -> None:
        """Nothing can be exchanged any more: every later use repeats why, and the peers hear of it."""
        if self._broken is None:
            self._broken = error
            if not isinstance(error, RankSkewError):
                self._channels.send(failure(_text(error)))
            elif self.bridge is not None and self.lookout is not None:
                # On one host that is found by every rank for itself.
                self.lookout.give_up(error)
                self._channels.send(failure(_text(error)))
            if self.bridge is not None:
                self.bridge.close()


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _announce(this: weakref.ref[Hub], number: int, fd: int, nbytes: int) -> None:
    hub = this()
    if hub is not None:
        with hub.lock:
            hub._channels.send(pack(Word.SEGMENT, number, nbytes=nbytes), fd)


def _carried(channels: Channels, this: weakref.ref[Hub]) -> None:
    """Called by a courier: tell the peers at once, since they may wait while this rank computes."""
    channels.wake()
    hub = this()
    if hub is not None:
        hub.look_after()


def _look_after(this: weakref.ref[Hub], some_open: threading.Event, ended: threading.Event) -> None:
    """The thread of a hub; ends with it."""
    while not ended.is_set():
        some_open.wait()
        ended.wait(LEFT_S)
        hub = this()
        if hub is not None:
            hub.look_after()
        del hub


def _end(some_open: threading.Event, ended: threading.Event) -> None:
    ended.set()
    some_open.set()


def _note_done(operations: dict[int, Operation], number: int, rank: int) -> None:
    operations[number].missing.discard(rank)
