"""Memory that other ranks of the host can see: made here, found again, and mapped from peers.

A segment has no name anywhere. Its descriptor travels to the peers over their sockets, and its pages are freed when the
last process that maps it ends, however that happens; so nothing can be left behind, and the size of ``/dev/shm`` does
not matter.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rankstep.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable

ALIGN_BYTES = 64
"""A cache line: two tensors never share one, and complex views begin at whole elements."""

ARENA_BYTES = 1 << 20
"""Small tensors beyond the first share segments of this size: mappings are limited, as a rule to 65,530 per process."""

OWN_SEGMENTS = 256
"""So many tensors get a segment of their own, whatever their size."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: a rank's segment, and the first byte in it."""

    segment: int
    offset_bytes: int


def map_segment(fd: int, nbytes: int) -> torch.Tensor:
    """All bytes of the segment behind a descriptor, which may be closed afterwards."""
    storage: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", True, nbytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))


def view(memory: torch.Tensor, offset_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """``numel`` elements of a mapped segment; no autograd view, so its base is not kept."""
    empty = torch.empty(0, dtype=dtype)
    return empty.set_(memory.untyped_storage(), offset_bytes // dtype.itemsize, (numel,), (1,))


class Memory:
    """This rank's segments.

    Args:
        rank: For messages.
        announce: Is called with (number, descriptor, bytes) of each new segment, before any use of it.
        withdraw: Is called with the number of a segment in which nothing lives any more; from any thread.
    """

    def __init__(
        self,
        rank: int,
        announce: Callable[[int, int, int], None],
        withdraw: Callable[[int], None],
    ) -> None:
        self._rank = rank
        self._announce = announce
        self._withdraw = withdraw
        self._made = 0
        self._by_address: dict[int, int] = {}
        # Of each segment, how many tensors live in it, and its address.
        self._living: dict[int, int] = {}
        self._address: dict[int, int] = {}
        self._arena: torch.Tensor | None = None
        self._arena_used = 0

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A zero-filled flat tensor that peers can be told of.

        Raises:
            CommunicationError: The system has no memory to share.
        """
        nbytes = -(-max(1, numel * dtype.itemsize) // ALIGN_BYTES) * ALIGN_BYTES
        if nbytes > ARENA_BYTES // 2 or len(self._living) < OWN_SEGMENTS:
            return self._carve(self._segment(nbytes), 0, numel, dtype)
        if self._arena is None or self._arena_used + nbytes > ARENA_BYTES:
            self._retire()
            self._arena, self._arena_used = self._segment(ARENA_BYTES), 0
            self._living[self._number(self._arena)] += 1
        tensor = self._carve(self._arena, self._arena_used, numel, dtype)
        self._arena_used += nbytes
        return tensor

    def place_of(self, tensor: torch.Tensor) -> Place | None:
        """Where a contiguous tensor lies; None: not in a segment of ours."""
        number = self._by_address.get(tensor.untyped_storage().data_ptr())
        if number is None or not tensor.is_contiguous():
            return None
        return Place(number, int(tensor.storage_offset()) * tensor.element_size())

    def _number(self, memory: torch.Tensor) -> int:
        return self._by_address[memory.untyped_storage().data_ptr()]

    def _segment(self, nbytes: int) -> torch.Tensor:
        fd = -1
        try:
            fd = os.memfd_create("rankstep", os.MFD_CLOEXEC)
            # Reserves the pages: to be told now is an error, to be told at the first write would be the end.
            os.posix_fallocate(fd, 0, nbytes)
            memory = map_segment(fd, nbytes)
            number = self._made
            self._announce(number, fd, nbytes)
        except (OSError, RuntimeError) as error:
            raise CommunicationError(
                f"rank {self._rank}: no {nbytes / 2**20:.1f} MiB of shared memory for gradients ({error}). Give the job more "
                "memory, or set RANKSTEP_SHARED_MEMORY=0 on all ranks to send them through sockets"
            ) from error
        finally:
            if fd >= 0:
                os.close(fd)
        self._made += 1
        self._address[number] = memory.untyped_storage().data_ptr()
        self._by_address[self._address[number]] = number
        self._living[number] = 0
        return memory

    def _carve(
        self, memory: torch.Tensor, offset_bytes: int, numel: int, dtype: torch.dtype
    ) -> torch.Tensor:
        number = self._number(memory)
        tensor = view(memory, offset_bytes, numel, dtype)
        self._living[number] += 1
        # Views of it may live on, as gradients do; nothing is sent from them.
        weakref.finalize(tensor, self._died, number).atexit = False
        return tensor

    def _retire(self) -> None:
        if self._arena is not None:
            arena, self._arena = self._arena, None
            self._died(self._number(arena))

    def _died(self, number: int) -> None:
        self._living[number] -= 1
        if not self._living[number]:
            del self._living[number]
            self._by_address.pop(self._address.pop(number), None)
            self._withdraw(number)
