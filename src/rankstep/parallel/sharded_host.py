"""Parameters of the ranks of one host in one piece of memory: each rank writes its share, and nothing has to travel.

Note [Two mappings]
    Every rank maps the same pages twice. The optimizer writes its share through a shared mapping. The module's parameters
    lie in a private one, which shows the same pages, but only until this process itself writes to them: the kernel then
    gives it a copy of that page. So ``p.mul_(0.9)`` or ``p.data.clamp_()`` in a training script, which every rank runs,
    happens once to every rank's parameters and not N times to all. Before the next step each rank asks the kernel which
    pages it has copies of (``sharded_pages.py``), carries its share of them over, and gives the copies back.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from typing import TYPE_CHECKING

import numpy as np
import torch

from rankstep.collectives.failures import naming_failure
from rankstep.parallel.sharded_pages import PAGE, Private

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankstep.buckets.plan import ParamSpec
    from rankstep.collectives import Communicator, Pending
    from rankstep.parallel.sharded_bucket import ShardedBucket


class HostMemory:
    """See Note [Two mappings]; made by :meth:`among`.

    Args:
        comm: The ranks.
        buckets: What is laid out.
        fd: The memory.
        offsets: Where each bucket begins, in bytes.
        nbytes: Of all.
    """

    whole = False
    what = "shared"

    def __init__(
        self,
        comm: Communicator,
        buckets: Sequence[ShardedBucket],
        fd: int,
        offsets: Sequence[int],
        nbytes: int,
    ) -> None:
        self._comm = comm
        self._offsets = offsets
        self._own = Private(fd, nbytes)
        self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
        self.bytes = torch.from_numpy(np.frombuffer(self._map, dtype=np.uint8))
        self.flats: Sequence[torch.Tensor] = [
            self.bytes[at : at + bucket.spec.nbytes].view(bucket.spec.dtype)
            for at, bucket in zip(offsets, buckets, strict=True)
        ]
        # In bytes of the whole memory.
        self._shares = [
            (at + low * bucket.spec.dtype.itemsize, at + high * bucket.spec.dtype.itemsize)
            for at, bucket in zip(offsets, buckets, strict=True)
            for low, high in [bucket.bounds[comm.rank : comm.rank + 2]]
        ]
        self._steps = 0

    @classmethod
    def among(cls, comm: Communicator, buckets: Sequence[ShardedBucket]) -> HostMemory | None:
        """Memory of all ranks of one host, made by the first one; None, on all, if a rank cannot have it. Collective."""
        offsets, end = [], PAGE
        for bucket in buckets:
            offsets.append(end)
            end += -(-bucket.spec.nbytes // PAGE) * PAGE
        with contextlib.ExitStack() as closing:
            fd = _made(end) if comm.rank == 0 else -1
            token = secrets.randbits(62)
            if fd >= 0:
                closing.callback(os.close, fd)
                os.pwrite(fd, token.to_bytes(8, "little"), 0)
            card = torch.tensor([os.getpid(), fd, token])
            with naming_failure(comm, "sharded/memory", "agreeing on memory for parameters"):
                comm.broadcast(card, 0).wait()
                pid, number, token = card.tolist()
                if comm.rank and number >= 0:
                    fd = _opened(f"/proc/{pid}/fd/{number}", token)
                    if fd >= 0:
                        closing.callback(os.close, fd)
                memory = None
                if fd >= 0:
                    with contextlib.suppress(OSError, ValueError):
                        memory = cls(comm, buckets, fd, offsets, end)
                able = torch.tensor([int(memory is not None)])
                answers = [torch.empty_like(able) for _ in range(comm.world_size)]
                comm.all_gather(answers, able).wait()
        return memory if all(int(answer) for answer in answers) else None

    def view(self, bucket: int, offset: int, spec: ParamSpec) -> torch.Tensor:
        """Part of the private mapping."""
        from rankstep.parallel.sharded_memory import alone

        start = self._offsets[bucket] + offset * self.flats[bucket].element_size()
        return alone(self._own.bytes, start, spec)

    def settle_in(self) -> None:
        """Meet."""
        with naming_failure(self._comm, "sharded/move in", "moving parameters to common memory"):
            self._comm.barrier().wait()

    def open(self) -> None:
        """Meet: who is here reads no old values any more. Then carry over what the user has written."""
        self._steps += 1
        with naming_failure(
            self._comm,
            f"sharded/open/{self._steps}",
            f"ShardedOptimizer.step() number {self._steps}",
        ):
            meeting = self._comm.barrier()
            written = self._own.written()
            meeting.wait()
        for start, end in written:
            for low, high in self._shares:
                a, b = max(start, low), min(end, high)
                if a < b:
                    self.bytes[a:b].copy_(self._own.bytes[a:b])
            self._own.drop(start, end)

    def publish(self) -> Iterator[tuple[Pending, Sequence[int]]]:
        """The values are there as soon as all ranks have written theirs."""
        yield self._comm.barrier(), range(len(self.flats))


def _made(nbytes: int) -> int:
    """Memory as a file without a name; -1: the system gives none."""
    if not hasattr(os, "memfd_create"):
        return -1
    fd = -1
    try:
        fd = os.memfd_create("rankstep-parameters", os.MFD_CLOEXEC)
        # Reserves the pages: to be told now is a fallback, to be told at the first write would be the end.
        os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        if fd >= 0:
            os.close(fd)
        return -1
    return fd


def _opened(path: str, token: int) -> int:
    """Another rank's memory; -1: it cannot be reached from here."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1
    # In another namespace of process numbers the path may lead elsewhere.
    try:
        known = os.pread(fd, 8, 0) == token.to_bytes(8, "little")
    except OSError:
        known = False
    if not known:
        os.close(fd)
        return -1
    return fd
