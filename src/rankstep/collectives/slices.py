"""The arithmetic of ranks that see each other's memory: who sums which slice, chunk by chunk, in rank order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK_BYTES = 512 * 1024
"""A chunk of every rank's tensor stays in the second-level cache from the sum until it has been written everywhere."""

GRAIN_NUMEL = 16
"""Slices begin at multiples of this: 64 bytes of float32, so that no two ranks write into one cache line."""

_HALF = (torch.float16, torch.bfloat16)


def slice_sizes(numel: int, count: int) -> tuple[int, ...]:
    """Sizes of ``count`` contiguous slices of ``numel`` elements, as equal as the grain allows, the longest first."""
    grains = -(-numel // GRAIN_NUMEL)
    each, more = divmod(grains, count)
    sizes = []
    left = numel
    for position in range(count):
        size = min(left, (each + (position < more)) * GRAIN_NUMEL)
        sizes.append(size)
        left -= size
    return tuple(sizes)


def slices(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Contiguous slices of a flat tensor."""
    return list(tensor.split_with_sizes(list(sizes)))


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The same elements of every rank's tensor.

    Attributes:
        parts: Of each rank, in rank order.
        into: Where the sum goes.
    """

    parts: tuple[torch.Tensor, ...]
    into: tuple[torch.Tensor, ...]


class Summing:
    """One rank's part of a sum: its slice of all ranks' tensors, prepared once and done in every step.

    Args:
        parts: This rank's slice of every rank's tensor, in rank order.
        into: The tensors that shall hold the sum; they may be some of ``parts``.
        scratch: See :func:`scratch_for`.
    """

    def __init__(
        self, parts: Sequence[torch.Tensor], into: Sequence[torch.Tensor], scratch: torch.Tensor
    ) -> None:
        numel = CHUNK_BYTES // parts[0].element_size()
        self._chunks = [
            _Chunk(tuple(chunk[: len(parts)]), tuple(chunk[len(parts) :]))
            for chunk in zip(*(tensor.split(numel) for tensor in (*parts, *into)), strict=True)
            if chunk[0].numel()
        ]
        self._scratch = scratch
        # Two parts of the same dtype need no scratch: one addition rounds once, in any order and in any dtype.
        self._two = len(parts) == 2

    def __call__(self) -> None:
        """Sum now."""
        for chunk in self._chunks:
            first, second, *rest = chunk.parts
            into = chunk.into
            if self._two:
                total = torch.add(first, second, out=into[0])
                copies = into[1:]
            else:
                total = self._scratch[: first.numel()]
                if total.dtype == first.dtype:
                    torch.add(first, second, out=total)
                else:
                    total.copy_(first).add_(second)
                for part in rest:
                    total.add_(part)
                copies = into
            for copy in copies:
                copy.copy_(total)


class Spreading:
    """Copies one tensor into others, chunk by chunk.

    Args:
        source: Has the values.
        into: Get them.
    """

    def __init__(self, source: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
        numel = CHUNK_BYTES // source.element_size()
        self._chunks = [
            (chunk[0], chunk[1:])
            for chunk in zip(*(tensor.split(numel) for tensor in (source, *into)), strict=True)
            if chunk[0].numel()
        ]

    def __call__(self) -> None:
        """Copy now."""
        for source, into in self._chunks:
            for copy in into:
                copy.copy_(source)


def scratch_for(dtype: torch.dtype) -> torch.Tensor:
    """Memory for the sum of one chunk of ``dtype``: half types are summed in float32."""
    summed = torch.float32 if dtype in _HALF else dtype
    return torch.empty(CHUNK_BYTES // dtype.itemsize, dtype=summed)
