"""Reduce-scatter and all-gather over several hosts: each part crosses a link once, whatever the number of ranks behind it.

The ranks of a host first sum in the memory that they share, and only that sum leaves the host, to where the part's owner
is. In an all-gather a part comes to a host once, and is spread there through memory. The ranks of a host share the work:
each carries the parts of the ranks that have its own place on their hosts. Where hosts differ in size, as many carry as
the smallest one has, and a carrier puts the sum into the memory of its owner.

Messages go over connections of their own: the small all-reduces of a step must not queue behind them. A courier waits for
them, so that what has come is added, or handed on to the other ranks of the host, while all of them compute.
"""

from __future__ import annotations

import functools
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch

from rankstep.collectives.direct import add_in_order, chunks_of, told
from rankstep.collectives.operation import Work
from rankstep.collectives.posts import Kind
from rankstep.collectives.slices import Spreading, Summing, slices

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch.distributed as dist

    from rankstep.collectives.courier import Courier
    from rankstep.collectives.direct import Lane
    from rankstep.collectives.neighbours import Layout


class Bridge:
    """This rank's part in what goes on between hosts.

    Args:
        layout: Where the ranks live; several hosts.
        rank: This rank in the group.
        open_lane: Opens connections to the ranks that have this one's place on the other hosts; collective among them.

    Attributes:
        lane: Those connections; None until :meth:`connect`.
    """

    def __init__(self, layout: Layout, rank: int, open_lane: Callable[[], Lane]) -> None:
        self._rank = rank
        self._host = layout.host
        index, owners = layout.local.index(rank), layout.owners
        self._carries = index < owners
        # Of each host, the ranks whose parts go through this rank's lane.
        self._carried = [ranks[index::owners] for ranks in layout.hosts]
        self._open_lane = open_lane
        self.lane: Lane | None = None

    def connect(self) -> None:
        """Open the connections at the first use, which is collective; a rank that carries nothing has none."""
        if self.lane is None and self._carries:
            self.lane = self._open_lane()

    def close(self) -> None:
        """Nothing can be exchanged any more: end the waits of the other hosts' ranks, and of the couriers."""
        if self.lane is not None:
            self.lane.close()

    def compare(self) -> None:
        """A wait takes long: look whether the hosts exchange different things.

        Raises:
            RankSkewError: They do.
        """
        if self.lane is not None:
            self.lane.ledger.compare()

    def prepare(
        self,
        kind: Kind,
        tensors: Mapping[int, torch.Tensor],
        sizes: Sequence[int],
        scratch: torch.Tensor,
    ) -> Work:
        """This rank's part of one operation.

        Args:
            kind: REDUCE_SCATTER or ALL_GATHER.
            tensors: Of the ranks of this host, by rank.
            sizes: The parts of all ranks of the group, in elements.
            scratch: For sums; see :func:`rankstep.collectives.slices.scratch_for`.
        """
        lane = self.lane
        if lane is None or not any(sizes[rank] for ranks in self._carried for rank in ranks):
            return Work()
        parts = {rank: slices(tensors[rank], sizes) for rank in sorted(tensors)}
        own = parts[self._rank]
        # By host, and of this one what its own ranks give or get.
        crossing = [[own[rank] for rank in ranks] for ranks in self._carried]
        at_home = [parts[rank][rank] for rank in self._carried[self._host]]
        what = f"{kind.name.lower().replace('_', '-')} of {told(sizes, own[0].dtype)}"
        if kind is Kind.ALL_GATHER:
            crossing[self._host] = at_home
            others = [rank for rank in parts if rank != self._rank]
            copies = [
                [[parts[other][rank] for other in others if rank not in parts] for rank in ranks]
                for ranks in self._carried
            ]
            spreads = [
                Spreading(
                    parts[rank][rank], [parts[other][rank] for other in parts if other != rank]
                )
                for rank in self._carried[self._host]
            ]
            return Work(start=functools.partial(_hand_on, lane, what, crossing, copies, spreads))
        sums = [
            Summing([of[rank] for of in parts.values()], [own[rank]], scratch)
            for ranks in self._carried
            for rank in ranks
            if len(parts) > 1
        ]
        start = functools.partial(_add_up, lane, what, crossing, at_home)
        return Work(sum=functools.partial(_each, sums), start=start)


class Crossing:
    """Messages under way between hosts, and what a courier does as they arrive; a :class:`Pending`.

    Args:
        courier: Waits for them.
        arrivals: For each chunk the works to wait for, and what to do then.
        sends: Waited for at the end: the memory may not be written before.
        release: Called at the end.
    """

    def __init__(
        self,
        courier: Courier,
        arrivals: Sequence[tuple[Sequence[dist.Work], Callable[[], object]]],
        sends: Sequence[dist.Work],
        release: Callable[[], None],
    ) -> None:
        self._future: Future[None] = Future()
        courier.send(functools.partial(self._carry, arrivals, sends, release))

    def _carry(
        self,
        arrivals: Sequence[tuple[Sequence[dist.Work], Callable[[], object]]],
        sends: Sequence[dist.Work],
        release: Callable[[], None],
    ) -> None:
        try:
            with torch.no_grad():
                for works, use in arrivals:
                    for work in works:
                        work.wait()
                    use()
                for work in sends:
                    work.wait()
            release()
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            self._future.set_exception(error)
        else:
            self._future.set_result(None)

    def wait(self) -> None:
        """Return when everything has come and was used."""
        self._future.result()

    def get_future(self) -> Future[None]:
        """Calls back from the courier's thread."""
        return self._future


def _add_up(
    lane: Lane,
    what: str,
    sums: Sequence[Sequence[torch.Tensor]],
    into: Sequence[torch.Tensor],
) -> Crossing:
    """Send this host's sums to the hosts of their owners, and add theirs to ours, in the order of hosts.

    Args:
        lane: Its ranks stand for the hosts.
        what: For people, equal on all ranks of the lane.
        sums: By host, of the parts that belong there.
        into: Where the totals of this host's own go.
    """
    chunks = [[chunk for part in parts for chunk in chunks_of(part)] for parts in sums]
    own = chunks[lane.rank]
    targets = [chunk for part in into for chunk in chunks_of(part)]
    tags = lane.tags(max(map(len, chunks)), what)
    numel = sum(chunk.numel() for chunk in own)
    scratch = [lane.borrow(numel, sums[0][0].dtype) for _ in lane.peers] if own else []
    pieces = {
        peer: memory.split_with_sizes([chunk.numel() for chunk in own])
        for peer, memory in zip(lane.peers, scratch, strict=False)
    }
    arrivals = [
        (
            [lane.receive(pieces[peer][place], peer, tags[place]) for peer in lane.peers],
            functools.partial(
                _total,
                own[place],
                {peer: pieces[peer][place] for peer in lane.peers},
                lane.rank,
                targets[place],
            ),
        )
        for place in range(len(own))
    ]
    sends = [
        lane.send(chunks[peer][place], peer, tag)
        for place, tag in enumerate(tags)
        for peer in lane.peers
        if place < len(chunks[peer])
    ]

    def release() -> None:
        for memory in scratch:
            lane.give_back(memory)

    return Crossing(lane.couriers[0], arrivals, sends, release)


def _total(
    own: torch.Tensor, others: dict[int, torch.Tensor], host: int, into: torch.Tensor
) -> None:
    add_in_order(own, others, host)
    if into.data_ptr() != own.data_ptr():
        into.copy_(own)


def _hand_on(
    lane: Lane,
    what: str,
    parts: Sequence[Sequence[torch.Tensor]],
    copies: Sequence[Sequence[Sequence[torch.Tensor]]],
    spreads: Sequence[Callable[[], None]],
) -> Crossing:
    """Send this host's parts to the other hosts, and spread theirs here.

    Args:
        lane: Its ranks stand for the hosts.
        what: For people, equal on all ranks of the lane.
        parts: By host; those of the others are received.
        copies: For each of these parts where else it goes when it has come.
        spreads: Copy this host's parts to all of its ranks.
    """
    # Of each chunk first the one that is sent or received.
    chunks = [
        [
            same
            for part, places in zip(of_host, where, strict=True)
            for same in zip(chunks_of(part), *map(chunks_of, places), strict=True)
        ]
        for of_host, where in zip(parts, copies, strict=True)
    ]
    tags = lane.tags(max(map(len, chunks)), what)
    arrivals = [
        (
            [lane.receive(chunks[peer][place][0], peer, tags[place])],
            functools.partial(_copy, *chunks[peer][place]),
        )
        for place in range(len(tags))
        for peer in lane.peers
        if place < len(chunks[peer])
    ]
    sends = [
        lane.send(chunk, peer, tag)
        for (chunk, *_), tag in zip(chunks[lane.rank], tags, strict=False)
        for peer in lane.peers
    ]
    _each(spreads)
    return Crossing(lane.couriers[1], arrivals, sends, _nothing)


def _copy(chunk: torch.Tensor, *into: torch.Tensor) -> None:
    for each in into:
        each.copy_(chunk)


def _each(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _nothing() -> None:
    """Nothing is left to do."""
