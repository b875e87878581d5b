"""The communicator for ranks that share hosts: shared memory inside a host, one exchange per local rank across hosts."""

from __future__ import annotations

import functools
import warnings
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rankstep.collectives.bridge import Bridge
from rankstep.collectives.c10d import C10dCommunicator
from rankstep.collectives.direct import Lane
from rankstep.collectives.hub import Hub
from rankstep.collectives.ledger import Ledger
from rankstep.collectives.neighbours import SWITCH_VARIABLE, meet
from rankstep.collectives.posts import DTYPES, Kind
from rankstep.collectives.twin import backend_of, store_of, timeout_of
from rankstep.collectives.wire import Wire, WireType
from rankstep.errors import CommunicationError, SharedMemoryWarning

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankstep.collectives.communicator import Communicator, Pending
    from rankstep.collectives.operation import Operation

PIECE_BYTES = 2 << 20
"""Between hosts: while one piece travels, the next is summed inside the host, and the one before is spread there."""

MOST_PIECES = 16
"""Of one tensor: they must leave room for those of others (:data:`rankstep.collectives.hub.MAX_OPEN`)."""

_PLACE = "rankstep/host"


def communicator_for(group: dist.ProcessGroup, device: torch.device) -> Communicator:
    """The quickest communicator for tensors of ``device``; not collective.

    Args:
        group: The ranks.
        device: Where their gradients are.

    Returns:
        One that uses shared memory, if the group's CPU tensors travel by gloo; it finds out at its first use, which is
        collective, whether ranks share a host. Otherwise the group's own way.
    """
    backend = backend_of(group, "cpu")
    if device.type != "cpu" or backend is None or backend.name() != "gloo" or group.size() == 1:
        return C10dCommunicator(group)
    return C10dCommunicator(group) if store_of(group) is None else HostCommunicator(group)


class HostCommunicator(C10dCommunicator):
    """Sums CPU tensors in memory that the ranks of a host share; everything else goes the group's own way.

    With several hosts each local rank sums its slice with its like on the other hosts, in a group of its own, so that a
    host's link carries each byte once; ``bridge.py`` does the same for parts. Tensors from :meth:`allocate` are summed
    where they lie, others by way of a copy. ``RANKSTEP_SHARED_MEMORY=0`` on any rank turns it off for all;
    ``RANKSTEP_HOST`` tells hosts apart where the kernel cannot (several network namespaces of one machine).

    Args:
        group: The process group, whose backend for CPU tensors is gloo; None takes the default one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self._spare: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    @functools.cached_property
    def _end(self) -> _End:
        """What all communicators of the group share; made by the first use of the first of them, which is collective."""
        if self.group not in _ends:
            _ends[self.group] = _meet(self.group)
        return _ends[self.group]

    @property
    def way(self) -> str:
        """How tensors travel, for people; collective as the first use is."""
        return self._end.way

    @property
    def one_host(self) -> bool:
        """Whether all ranks share memory, so that nothing has to be sent; collective as the first use is."""
        hub = self._end.hub
        return self.world_size == 1 or (hub is not None and len(hub.local) == self.world_size)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A zero-filled flat tensor that the other ranks of the host see.

        Raises:
            CommunicationError: There is no memory to share; the other ranks are told.
        """
        hub = self._hub_for(device, dtype)
        if hub is None:
            return super().allocate(numel, dtype, device)
        try:
            return hub.memory.allocate(numel, dtype)
        except CommunicationError as error:
            hub.give_up(error)
            raise

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start a sum over the group, in place."""
        plain = tensor.layout is torch.strided and tensor.numel()
        hub = self._hub_for(tensor.device, tensor.dtype) if plain else None
        if hub is None:
            return super().all_reduce(tensor)
        return self._in_shared_memory(hub, tensor)

    def all_reduce_in(self, tensor: torch.Tensor, dtype: WireType) -> Pending:
        """Start a sum over the group that is rounded, or packed, only on its way between hosts."""
        hub = self._hub_for(tensor.device, tensor.dtype) if tensor.numel() else None
        if hub is None:
            return super().all_reduce_in(tensor, dtype)
        lane = self._end.lane
        wire = None if lane is None else Wire(lane, self._marks, dtype)
        return self._in_shared_memory(hub, tensor, None if wire is None else wire.all_reduce)

    def _in_shared_memory(
        self, hub: Hub, tensor: torch.Tensor, cross: Callable[[torch.Tensor], Any] | None = None
    ) -> Pending:
        start: Callable[[torch.Tensor], Operation]
        start = functools.partial(hub.start, Kind.ALL_REDUCE, cross=cross)
        if hub.memory.place_of(tensor) is None:
            start = functools.partial(self._by_copy, hub, Kind.ALL_REDUCE, cross=cross)
        short = tensor.nbytes <= PIECE_BYTES or not tensor.is_contiguous()
        if short or len(hub.local) == self.world_size:
            return start(tensor)
        numel = max(PIECE_BYTES // tensor.element_size(), -(-tensor.numel() // MOST_PIECES))
        return _All([start(piece) for piece in tensor.view(-1).split(numel)])

    def broadcast(self, tensor: torch.Tensor, src: int) -> Pending:
        """Start a broadcast; in shared memory once the ranks have met, where they are all on one host."""
        met = self.group in _ends and tensor.layout is torch.strided and tensor.numel()
        hub = self._hub_for(tensor.device, tensor.dtype) if met else None
        if hub is None or len(hub.local) < self.world_size:
            return super().broadcast(tensor, src)
        # Everything is the part of one rank, which it hands out.
        sizes = tuple(tensor.numel() if rank == src else 0 for rank in range(self.world_size))
        return self._by_copy(hub, Kind.BROADCAST, tensor, sizes)

    def _by_copy(
        self,
        hub: Hub,
        kind: Kind,
        tensor: torch.Tensor,
        sizes: tuple[int, ...] = (),
        cross: Callable[[torch.Tensor], Any] | None = None,
    ) -> Operation:
        """Let a tensor of ordinary memory take part."""
        key = (tensor.numel(), tensor.dtype)
        spare = self._spare.setdefault(key, [])
        flat = spare.pop() if spare else self.allocate(*key, tensor.device)
        like = flat.view(tensor.shape)

        def back() -> None:
            with torch.no_grad():
                tensor.copy_(like)
            spare.append(flat)

        with torch.no_grad():
            like.copy_(tensor)
        return hub.start(kind, flat, sizes, back, cross)

    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor]) -> Pending:
        """Start a reduce-scatter; in shared memory where the parts are slices of one tensor of :meth:`allocate`.

        With several hosts the other ranks' parts are then overwritten with sums of this host's.
        """
        hub, flat = self._flat(inputs, output)
        if hub is None or flat is None:
            return super().reduce_scatter(output, inputs)
        if hub.bridge is not None:
            hub.bridge.connect()
        return hub.start(Kind.REDUCE_SCATTER, flat, tuple(part.numel() for part in inputs))

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Pending:
        """Start an all-gather; in shared memory where the parts are slices of one tensor of :meth:`allocate`."""
        hub, flat = self._flat(outputs, tensor)
        if hub is None or flat is None:
            return super().all_gather(outputs, tensor)
        if hub.bridge is not None:
            hub.bridge.connect()
        return hub.start(Kind.ALL_GATHER, flat, tuple(part.numel() for part in outputs))

    def shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Zero-filled memory that all ranks read and write; None where they are not all on this host."""
        hub = self._hub_for(torch.device("cpu"), dtype)
        if hub is None or len(hub.local) < self.world_size:
            return None
        operation = hub.start(
            Kind.SHARE, hub.memory.allocate(numel, dtype) if hub.index == 0 else None
        )
        operation.wait()
        return operation.memory

    def barrier(self) -> Pending:
        """Start to meet: the wait ends when all ranks have come here."""
        hub = self._hub_for(torch.device("cpu"), torch.uint8)
        if hub is None or len(hub.local) < self.world_size:
            return super().barrier()
        return hub.start(Kind.BARRIER)

    def _hub_for(self, device: torch.device, dtype: torch.dtype) -> Hub | None:
        if device.type != "cpu" or dtype not in DTYPES:
            return None
        hub = self._end.hub
        if hub is not None:
            hub.lookout = self._lookout
        return hub

    def _flat(
        self, parts: list[torch.Tensor], own: torch.Tensor
    ) -> tuple[Hub | None, torch.Tensor | None]:
        """The tensor that the parts are consecutive slices of, if the hub can use it."""
        hub = self._hub_for(own.device, own.dtype)
        if hub is None or own.data_ptr() != parts[self.rank].data_ptr():
            return None, None
        # An empty part has no address.
        some = [part for part in parts if part.numel()]
        if not some:
            return None, None
        first, storage = some[0], some[0].untyped_storage()
        address, numel = first.data_ptr(), 0
        for part in some:
            inside = part.untyped_storage().data_ptr() == storage.data_ptr()
            if not inside or part.data_ptr() != address or part.dtype != first.dtype:
                return None, None
            address += part.nbytes
            numel += part.numel()
        flat = torch.empty(0, dtype=first.dtype).set_(
            storage, int(first.storage_offset()), (numel,), (1,)
        )
        return (hub, flat) if hub.memory.place_of(flat) is not None else (None, None)

    def __repr__(self) -> str:
        return f"HostCommunicator(rank {self.rank} of {self.world_size})"


class _All:
    """Several operations as one.

    Args:
        operations: Started one after the other, the same number on all ranks.
    """

    def __init__(self, operations: list[Operation]) -> None:
        self._operations = operations

    def wait(self) -> None:
        """Wait for all."""
        for operation in self._operations:
            operation.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Is completed when all results are there."""
        return torch.futures.collect_all([each.get_future() for each in self._operations])


@dataclass(frozen=True, slots=True)
class _End:
    """What a group's communicators share on this rank.

    Attributes:
        hub: None: no memory is shared.
        way: See :attr:`HostCommunicator.way`.
        lane: To the ranks of the other hosts that own the same slice; None: there are none, or this rank owns no slice.
    """

    hub: Hub | None
    way: str
    lane: Lane | None = None


_ends: weakref.WeakKeyDictionary[Any, _End] = weakref.WeakKeyDictionary()


def _meet(group: dist.ProcessGroup) -> _End:
    """Find out who shares a host, connect to them, and open the groups between hosts; collective."""
    rank, size = group.rank(), group.size()
    base = store_of(group)
    # The number lives in the store, so that after a restart all ranks count from the same place.
    number = base.add(f"{_PLACE}/{rank}", 1)
    store = dist.PrefixStore(f"{_PLACE}/{number}", base)  # type: ignore[attr-defined]
    meeting = meet(store, rank, size)
    hosts = meeting.layout.hosts
    if meeting.reason or not meeting.layout.several_share:
        if meeting.reason and rank == 0 and SWITCH_VARIABLE not in meeting.reason:
            warnings.warn(
                f"ranks of one host do not share memory, and send gradients through sockets instead: {meeting.reason}",
                SharedMemoryWarning,
                stacklevel=2,
            )
        return _End(None, f"sockets ({meeting.reason or 'no two ranks share a host'})")
    timeout = timeout_of(group)
    if len(hosts) == 1:
        return _End(Hub(rank, meeting, timeout.total_seconds()), "shared memory")
    index = meeting.layout.local.index(rank)
    this = weakref.ref(group)

    def open_lane(purpose: str) -> Lane:
        """Connect to the ranks that have this one's place on the other hosts; collective among them."""
        own = dist.PrefixStore(f"{purpose}/{index}", store)  # type: ignore[attr-defined]
        across: Any = dist.ProcessGroupGloo(own, meeting.layout.host, len(hosts), timeout=timeout)
        members = [ranks[index] for ranks in hosts]
        return Lane(across, Ledger(this(), f"{purpose}/{index}", members, meeting.layout.host))

    lane = open_lane("across") if index < meeting.layout.owners else None
    across: Any = None if lane is None else lane.group
    hub = Hub(
        rank,
        meeting,
        timeout.total_seconds(),
        start_crossing=lambda part: across.allreduce([part]),
        bridge=Bridge(meeting.layout, rank, lambda: open_lane("parts")),
    )
    way = f"shared memory inside {len(hosts)} hosts, sockets between them"
    return _End(hub, way, lane)
