"""Which part of a bucket belongs to which rank, and in which pieces it is stepped: arithmetic without tensors.

Positions count elements of a bucket's flat buffer.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankstep.buckets.plan import BucketSpec, ParamSpec

GRAIN_NUMEL = 64
"""A parameter is cut at multiples of this, counted from its beginning.

Kernels treat the elements behind the last full vector with other instructions, which for half types and fused optimizers
round differently. Cut like this, every element lies in a vector exactly if it does in the whole parameter.
"""

CHUNK_NUMEL = 256 * 1024
"""So many elements are stepped at once, 1 MiB of float32: the passes of an optimizer find them in the cache."""


def share_bounds(
    bucket: BucketSpec, params: Sequence[ParamSpec], world_size: int
) -> tuple[int, ...]:
    """Where the ranks' shares of a bucket begin, and where the last one ends.

    Shares are as equal as whole grains allow; parameters that are copied in together stay whole.

    Args:
        bucket: The planned bucket.
        params: All parameters of the plan.
        world_size: How many shares.
    """
    spans = sorted(
        (offset, offset + params[i].buffer_numel, offset < bucket.packed_numel)
        for i, offset in zip(bucket.params, bucket.offsets, strict=True)
        if params[i].buffer_numel
    )
    starts = [start for start, _, _ in spans]
    bounds = [0]
    for rank in range(1, world_size):
        ideal = bucket.numel * rank // world_size
        cut = ideal
        if spans:
            start, end, whole = spans[max(0, bisect_right(starts, ideal) - 1)]
            grain = end - start if whole else GRAIN_NUMEL
            cut = min(end, start + round((ideal - start) / grain) * grain)
        bounds.append(max(bounds[-1], cut))
    return (*bounds, bucket.numel)


def chunks(begin: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut the part of one parameter that lies in a share.

    Args:
        begin: Where the parameter begins.
        start: Where the part begins, whole grains behind ``begin``.
        end: Where it ends.
    """
    at = start
    while at < end:
        # From the parameter's beginning on, so that cuts do not depend on the number of ranks.
        after = min(end, begin + ((at - begin) // CHUNK_NUMEL + 1) * CHUNK_NUMEL)
        yield at, after
        at = after
