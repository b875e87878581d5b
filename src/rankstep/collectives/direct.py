"""Reduce-scatter and all-gather by direct exchange: what belongs to rank p goes straight to rank p.

Every rank posts all its sends and receives at once, so a collective is one step of latency, and each link carries what
it would carry in a ring: (n-1)/n of the bytes each way. gloo moves the messages by itself; no thread of ours takes part.
Sums are taken in rank order while later chunks are still on their way, so they are the same on every run.

gloo's own reduce-scatter is an all-reduce of which most is thrown away.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
import zlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from rankstep.collectives.courier import Courier
from rankstep.collectives.ledger import Ledger
from rankstep.collectives.patrol import patrol
from rankstep.collectives.twin import twin_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

    from rankstep.collectives.communicator import Pending
    from rankstep.collectives.lookout import Lookout

CHUNK_BYTES = 1024 * 1024
"""A part travels in messages of this size: small enough to be summed in the cache while the next one arrives."""

_NUMBERS = 2**17
_NEVER_SENT = 2**31 - 1
_TOLD_PARTS = 8
_HALVES = (torch.bfloat16, torch.float16)


class _Memory:
    """Lends memory for messages, and keeps what comes back: fresh pages cost more than a copy.

    It keeps no more than was ever lent at once, so sizes that are no longer asked for go.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[torch.Tensor] = []
        self._lent_bytes = self._most_bytes = 0

    def borrow(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory that nobody uses."""
        nbytes = numel * dtype.itemsize
        with self._lock:
            self._lent_bytes += nbytes
            self._most_bytes = max(self._most_bytes, self._lent_bytes)
            for place, memory in enumerate(self._kept):
                if memory.nbytes == nbytes:
                    return self._kept.pop(place).view(dtype)
        return torch.empty(nbytes, dtype=torch.uint8).view(dtype)

    def give_back(self, borrowed: torch.Tensor) -> None:
        """Let the next collective use what :meth:`borrow` gave."""
        memory = borrowed.view(torch.uint8)
        with self._lock:
            self._lent_bytes -= memory.nbytes
            self._kept.append(memory)
            while sum(each.nbytes for each in self._kept) + self._lent_bytes > self._most_bytes:
                del self._kept[0]


class Lane:
    """A twin group for direct messages, with the tags that keep collectives under way at once apart.

    Args:
        group: The twin; nobody else sends in it.
        ledger: Of what goes through it.

    Attributes:
        peers: The other ranks, from the next one on, so that not all ranks send to the same one first.
        couriers: Threads for collectives that go on while the rank computes; they start at their first errand.
        borrow: Memory of so many elements of a dtype, for messages.
        give_back: Takes it again.
    """

    def __init__(self, group: dist.ProcessGroup, ledger: Ledger) -> None:
        self.group = group
        self.ledger = ledger
        self.rank: int = group.rank()
        self.world_size: int = group.size()
        self.peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        self.couriers = (Courier("rankstep sums", self), Courier("rankstep results", self))
        self._number = 0
        self._memory = _Memory()
        self.borrow = self._memory.borrow
        self.give_back = self._memory.give_back

    def tags(self, count: int, what: str) -> list[int]:
        """Tags for the chunks of one collective: 17 bits of a running number, and 14 that depend on what it is.

        gloo ends the process if a message is longer than the receive that it meets, so those of different collectives must
        not meet.

        Args:
            count: How many; equal on all ranks.
            what: As for :meth:`Ledger.enter`.
        """
        mark = self.ledger.enter(what)
        first, self._number = self._number, (self._number + count) % _NUMBERS
        return [((first + place) % _NUMBERS) << 14 | mark for place in range(count)]

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Start a message."""
        return self.group.send([tensor], peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Start to take a message in."""
        return self.group.recv([tensor], peer, tag)

    def close(self) -> None:
        """Make every wait in this group fail, here and on the other ranks: a receive that nobody answers times out."""
        with contextlib.suppress(RuntimeError):
            never = self.receive(torch.empty(1), self.peers[0], _NEVER_SENT)
            never.wait(timedelta(milliseconds=1))


_under_way: set[_Exchange] = set()
"""gloo writes into memory that it does not own: whoever drops an exchange without waiting must not free it."""


class _Exchange:
    """Messages under way, and what is done with them as they arrive.

    Args:
        lane: Carries them.
        lookout: Looks around when it takes long.
        arrivals: For each chunk the works to wait for, and what to do then.
        sends: Waited for at the end: the memory may not be written before.
        release: Called at the end.
    """

    def __init__(
        self,
        lane: Lane,
        lookout: Lookout,
        arrivals: Sequence[tuple[Sequence[dist.Work], Callable[[], None]]],
        sends: Sequence[dist.Work],
        release: Callable[[], None],
    ) -> None:
        self._lane = lane
        self._lookout = lookout
        self._arrivals = arrivals
        self._sends = sends
        self._release = release
        self._waited = False
        _under_way.add(self)

    def wait(self) -> None:
        """Return when this rank's result is there and its memory may be written again."""
        if self._waited:
            return
        lane = self._lane
        with patrol.watch(self._lookout, lane.close, lane.ledger.compare), torch.no_grad():
            for works, use in self._arrivals:
                for work in works:
                    work.wait()
                use()
            for work in self._sends:
                work.wait()
        self._waited = True
        _under_way.discard(self)
        self._release()
        self._arrivals, self._sends = (), ()


class Direct:
    """Reduce-scatter and all-gather among the ranks of one lane.

    Parts may have different sizes, also none, and may lie in one flat buffer; every rank passes the same sizes.

    Args:
        lane: Carries the messages.
        lookout: Of the communicator on whose behalf this is.
    """

    def __init__(self, lane: Lane, lookout: Lookout) -> None:
        self.lane = lane
        self.lookout = lookout

    def reduce_scatter(
        self, parts: Sequence[torch.Tensor], into: torch.Tensor | None = None
    ) -> Pending:
        """Start summing part p of all ranks on rank p.

        Half types are summed in float32. Until it is waited for, no part may be written, and the result not be read.

        Args:
            parts: One contiguous CPU tensor for each rank. They are left as they are, but for ``into``.
            into: Where this rank's sum goes; None: into its own part.

        Raises:
            RuntimeError: A connection is broken; also from ``wait``.
        """
        lane = self.lane
        parts = [part.detach() for part in parts]
        own = parts[lane.rank]
        into = own if into is None else into.detach()
        chunks = [chunks_of(part) for part in parts]
        tags = lane.tags(max(map(len, chunks)), _told("the sum of parts", parts))
        targets = chunks_of(into)
        scratch = [lane.borrow(own.numel(), own.dtype) for _ in lane.peers]
        pieces = dict(zip(lane.peers, map(chunks_of, scratch), strict=True))
        receives = [
            [lane.receive(pieces[peer][place], peer, tags[place]) for peer in lane.peers]
            for place in range(len(targets))
        ]
        sends = [
            lane.send(chunks[peer][place], peer, tags[place])
            for place in range(len(tags))
            for peer in lane.peers
            if place < len(chunks[peer])
        ]

        def add_up(place: int) -> Callable[[], None]:
            def add() -> None:
                target = targets[place]
                if into is not own:
                    target.copy_(chunks[lane.rank][place])
                add_in_order(target, {peer: pieces[peer][place] for peer in lane.peers}, lane.rank)

            return add

        def release() -> None:
            for borrowed in scratch:
                lane.give_back(borrowed)

        arrivals = [(works, add_up(place)) for place, works in enumerate(receives)]
        return _Exchange(lane, self.lookout, arrivals, sends, release)

    def all_gather(self, parts: Sequence[torch.Tensor]) -> Pending:
        """Start copying part p from rank p to all others. Until it is waited for, none may be written or read.

        Args:
            parts: One contiguous CPU tensor for each rank; this rank's own is what it gives.

        Raises:
            RuntimeError: A connection is broken; also from ``wait``.
        """
        lane = self.lane
        chunks = [chunks_of(part.detach()) for part in parts]
        tags = lane.tags(max(map(len, chunks)), _told("the gathering of parts", parts))
        receives = [
            lane.receive(chunks[peer][place], peer, tags[place])
            for place in range(len(tags))
            for peer in lane.peers
            if place < len(chunks[peer])
        ]
        sends = [
            lane.send(chunk, peer, tag)
            for chunk, tag in zip(chunks[lane.rank], tags, strict=False)
            for peer in lane.peers
        ]
        return _Exchange(lane, self.lookout, [(receives, _nothing)], sends, _nothing)


def _nothing() -> None:
    """Nothing is left to do."""


def _told(what: str, parts: Sequence[torch.Tensor]) -> str:
    return f"{what} of {told([part.numel() for part in parts], parts[0].dtype)}"


def told(numels: Sequence[int], dtype: torch.dtype) -> str:
    """The ranks' parts in words; the sizes of many ranks as a checksum."""
    sizes = ", ".join(map(str, numels))
    if len(numels) > _TOLD_PARTS:
        sizes = f"{len(numels)} ranks ({zlib.crc32(sizes.encode()):08x})"
    return f"{sizes} elements of {str(dtype).removeprefix('torch.')}"


def chunks_of(part: torch.Tensor) -> list[torch.Tensor]:
    """The part in pieces of at most ``CHUNK_BYTES``; none of an empty one."""
    if not part.numel():
        return []
    return list(part.view(-1).split(max(1, CHUNK_BYTES // part.element_size())))


def add_in_order(into: torch.Tensor, others: dict[int, torch.Tensor], rank: int) -> None:
    """Add what the other ranks sent to what this rank has, in rank order.

    Args:
        into: This rank's own; becomes the sum.
        others: What each other rank sent; half of it may be overwritten.
        rank: This rank.
    """
    if into.dtype in _HALVES:
        first, *rest = [
            into if sender == rank else others[sender] for sender in range(len(others) + 1)
        ]
        total = first.float()
        for part in rest:
            total.add_(part)
        into.copy_(total)
        return
    before = [others[sender] for sender in range(rank)]
    if before:
        for other in before[1:]:
            before[0].add_(other)
        # a + b is b + a: the lower ranks' sum may be added to this rank's.
        into.add_(before[0])
    for sender in range(rank + 1, len(others) + 1):
        into.add_(others[sender])


_lanes: weakref.WeakKeyDictionary[Any, Lane] = weakref.WeakKeyDictionary()


def lane_of(group: Any) -> Lane:
    """The lane of a process group; the first call is collective and makes it.

    Returns:
        Its twin group carries CPU tensors by gloo; see :meth:`C10dCommunicator.can_go_direct`.
    """
    if group not in _lanes:
        twin = twin_of(group, "direct", torch.device("cpu")).group
        rank, size = group.rank(), group.size()
        _lanes[group] = Lane(twin, Ledger(group, "direct", range(size), rank))
    return _lanes[group]
