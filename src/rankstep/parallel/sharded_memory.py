"""Where parameters live while an optimizer is dealt to the ranks, and how the ranks come by each other's new values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from rankstep.buckets.bucket import grad_view
from rankstep.parallel.sharded_host import HostMemory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankstep.buckets.plan import ParamSpec
    from rankstep.collectives import Communicator, Pending
    from rankstep.parallel.sharded_bucket import ShardedBucket


class Memory(Protocol):
    """The parameters' values, laid out like the gradients' buckets.

    Attributes:
        flats: For each bucket a flat tensor of which this rank writes its share, and nobody else does.
        whole: Each rank has flat tensors of its own, and fills all of them when it moves in.
        what: How the values travel, for people.
    """

    flats: Sequence[torch.Tensor]
    whole: bool
    what: str

    def view(self, bucket: int, offset: int, spec: ParamSpec) -> torch.Tensor:
        """The memory of one parameter, in its shape; ``offset``: where it begins, in elements of the bucket."""

    def settle_in(self) -> None:
        """Return when all ranks have moved in. Collective."""

    def open(self) -> None:
        """Return when the shares may be written: no rank reads old values any more. Collective."""

    def publish(self) -> Iterator[tuple[Pending, Sequence[int]]]:
        """Start to give the written shares to all ranks; yields what ends when they are there, and of which buckets.

        Collective, and in the order in which a forward needs them.
        """


class OwnMemory:
    """Each rank has all values to itself, and the ranks gather the new ones.

    Args:
        comm: The ranks.
        buckets: What is laid out.
    """

    whole = True
    what = "gathered"

    def __init__(self, comm: Communicator, buckets: Sequence[ShardedBucket]) -> None:
        self._comm = comm
        self.flats: Sequence[torch.Tensor] = [
            comm.allocate(bucket.spec.numel, bucket.spec.dtype, bucket.spec.device)
            for bucket in buckets
        ]
        self._parts = [
            bucket.parts_of(flat) for bucket, flat in zip(buckets, self.flats, strict=True)
        ]

    def view(self, bucket: int, offset: int, spec: ParamSpec) -> torch.Tensor:
        """Part of a flat tensor, with a storage of its own where that is possible."""
        flat = self.flats[bucket]
        if flat.device.type != "cpu":
            return grad_view(flat, offset, spec)
        return alone(flat.detach().view(torch.uint8), offset * flat.element_size(), spec)

    def settle_in(self) -> None:
        """Nobody else reads this memory."""

    def open(self) -> None:
        """Nobody else reads this memory."""

    def publish(self) -> Iterator[tuple[Pending, Sequence[int]]]:
        """Gather bucket by bucket, the last one first: forward begins with what backward ends with."""
        rank = self._comm.rank
        for index in reversed(range(len(self.flats))):
            parts = self._parts[index]
            if self.flats[index].numel() and self._comm.world_size > 1:
                yield self._comm.all_gather(parts, parts[rank]), (index,)


def alone(memory: torch.Tensor, offset_bytes: int, spec: ParamSpec) -> torch.Tensor:
    """A parameter's part of CPU memory as a storage of its own, so that saving it does not save its neighbours.

    Args:
        memory: Bytes.
        offset_bytes: Where it begins.
        spec: Its shape and strides.
    """
    nbytes = spec.numel * spec.dtype.itemsize
    if not nbytes:
        return torch.empty(spec.shape, dtype=spec.dtype)
    part = torch.from_numpy(memory.numpy()[offset_bytes : offset_bytes + nbytes])
    return part.view(spec.dtype).as_strided(spec.shape, spec.view_stride)


def in_order(tensor: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
    """The elements of a tensor as they lie in a bucket: flat, and as pairs of reals where they are complex.

    Args:
        tensor: Of the parameter's shape, any dtype.
        spec: The parameter.

    Returns:
        A view where the strides are those of the plan, else a copy.
    """
    tensor = tensor.detach()
    if tensor.numel() and tensor.stride() != spec.view_stride:
        strided = torch.empty_strided(
            spec.shape, spec.view_stride, dtype=tensor.dtype, device=tensor.device
        )
        tensor = strided.copy_(tensor)
    if not tensor.is_complex():
        return tensor.as_strided((tensor.numel(),), (1,))
    pairs = torch.view_as_real(tensor.resolve_conj())
    return pairs.as_strided((pairs.numel(),), (1,))


def numbers(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What :func:`in_order` gave, or a part of it, as numbers of the parameter's ``dtype``; a view."""
    return torch.view_as_complex(flat.view(-1, 2)) if dtype.is_complex else flat


def memory_for(comm: Communicator, buckets: Sequence[ShardedBucket], *, shared: bool) -> Memory:
    """The best memory that these ranks can have; collective.

    Args:
        comm: The ranks.
        buckets: What is laid out.
        shared: The ranks are on one host, and may share memory.
    """
    on_cpu = all(bucket.spec.device.type == "cpu" for bucket in buckets)
    memory: Memory | None = HostMemory.among(comm, buckets) if shared and on_cpu else None
    return OwnMemory(comm, buckets) if memory is None else memory
