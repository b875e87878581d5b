"""From a list of parameters to a list of buckets: plain data, made and tested without a single tensor.

A plan is the same on every rank. It says which parameters share a bucket, where each lies in the bucket's flat buffer,
and in which order the buckets leave. Sizes and offsets count elements unless a name says bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rankstep.buckets.forecast import Forecast

FIRST_CAP_BYTES = 1024 * 1024
"""1 MiB: torch's first bucket, small so that communication starts early in backward."""

CAP_BYTES = 25 * 1024 * 1024
"""25 MiB: torch's default for every further bucket."""

MIN_RUN = 8
"""So many small parameters with equal rows lie side by side, to be copied in by one concatenation; fewer stay in order."""

_REAL = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What a plan needs to know of one parameter."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, *, sparse: bool = False) -> ParamSpec:
        """Describe ``tensor``; ``sparse``: its gradients are sparse."""
        return cls(
            name, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device, sparse
        )

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def buffer_dtype(self) -> torch.dtype:
        """The dtype of its bucket: complex gradients travel as pairs of reals."""
        return _REAL.get(self.dtype, self.dtype)

    @property
    def buffer_numel(self) -> int:
        """Elements it takes in its bucket."""
        return self.numel * (2 if self.dtype in _REAL else 1)

    @property
    def nbytes(self) -> int:
        """Bytes it takes in its bucket."""
        return self.numel * self.dtype.itemsize

    @property
    def dense(self) -> bool:
        """Its strides visit every element of one block of memory once, so a view can copy them."""
        expected = 1
        for size, stride in sorted(
            zip(self.shape, self.stride, strict=True), key=lambda pair: (pair[1], pair[0])
        ):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def view_stride(self) -> tuple[int, ...]:
        """Strides of its view in the bucket: its own where they are dense, else row-major."""
        if self.dense or 0 in self.shape:
            return self.stride
        return self._row_major

    @property
    def _row_major(self) -> tuple[int, ...]:
        strides, step = [], 1
        for size in reversed(self.shape):
            strides.append(step)
            step *= size
        return tuple(reversed(strides))

    @property
    def row_shape(self) -> tuple[int, ...] | None:
        """The shape without the first dimension, if its view is row after row of the buffer; else None.

        Views with equal rows, side by side, can be filled by one concatenation.
        """
        rows = bool(self.shape) and 0 not in self.shape and self.dtype not in _REAL
        return self.shape[1:] if rows and self.view_stride == self._row_major else None


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """One planned bucket.

    Attributes:
        index: Launch order, the same on every rank.
        params: Numbers of its parameters in the list that was planned, in order of expected readiness.
        offsets: Where each begins in the flat buffer, in elements of ``dtype``.
        numel: Elements of the flat buffer, without a trailer.
        packed_numel: The first elements of the buffer hold the small parameters, which are copied in together when
            the bucket is full; the others are copied one by one as they come, while they are still in the cache.
        dtype: Of the buffer; real also for complex parameters.
        device: Of the buffer.
        sparse: It is one parameter whose gradient is sparse, so there is no buffer.
    """

    index: int
    params: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int
    packed_numel: int
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the flat buffer, without a trailer."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Caps:
    """Upper bounds that close a bucket; the last one repeats.

    A bucket closes with the parameter that reaches its bound, so it may exceed it by that one.

    Attributes:
        cap_bytes: The bounds.
        measured: They serve only until measurements have found better buckets; see ``autoplan.py``.
    """

    cap_bytes: tuple[int, ...] = (FIRST_CAP_BYTES, CAP_BYTES)
    measured: bool = False

    def __post_init__(self) -> None:
        if not self.cap_bytes or any(cap <= 0 for cap in self.cap_bytes):
            raise ValueError(f"bucket caps must be positive numbers of bytes, not {self.cap_bytes}")

    def at(self, position: int) -> int:
        """The bound of the bucket at ``position`` among those of its dtype and device."""
        return self.cap_bytes[min(position, len(self.cap_bytes) - 1)]


@dataclass(frozen=True, slots=True)
class Plan:
    """All buckets of one model, in launch order.

    Attributes:
        params: What was planned.
        buckets: In launch order.
        caps: That would make these buckets.
        forecast: How long a step was expected to take with them and with others; None: nothing was measured.
    """

    params: tuple[ParamSpec, ...]
    buckets: tuple[BucketSpec, ...]
    caps: Caps
    forecast: Forecast | None = None

    @property
    def order(self) -> tuple[int, ...]:
        """Every parameter's number once, bucket after bucket."""
        return tuple(index for bucket in self.buckets for index in bucket.params)

    def fingerprint(self) -> str:
        """A digest that is equal exactly where the layouts are."""
        text = repr([(b.params, b.offsets, b.numel, str(b.dtype)) for b in self.buckets])
        names = repr([(p.name, p.shape, p.view_stride) for p in self.params])
        return hashlib.sha256((text + names).encode()).hexdigest()

    def describe(self) -> str:
        """A table for people: one line per bucket, and what was forecast."""
        lines = [f"{len(self.params)} parameters in {len(self.buckets)} buckets"]
        for bucket in self.buckets:
            names = [self.params[i].name for i in bucket.params[:: max(1, len(bucket.params) - 1)]]
            size = "   sparse rows" if bucket.sparse else f"{bucket.nbytes / 2**20:9.3f} MiB"
            lines.append(
                f"  bucket {bucket.index}: {len(bucket.params):>5} parameters  {size}  "
                f"{str(bucket.dtype).removeprefix('torch.')}  {' .. '.join(names) or '(trailer)'}"
            )
        return "\n".join(lines + ([] if self.forecast is None else self.forecast.lines()))


def make_plan(
    params: Sequence[ParamSpec], order: Sequence[int], caps: Caps, *, packed_below_bytes: int
) -> Plan:
    """Fill buckets in the order in which gradients become ready.

    Each pair of dtype and device has a running bucket of its own, since one buffer holds one dtype on one device; a
    parameter with sparse gradients is a bucket by itself. A bucket's place in the launch order is that of its last
    parameter: then it is full. The last bucket has a buffer in any case, since the trailer rides behind it.

    Args:
        params: The model's trainable parameters, in any fixed order.
        order: Their numbers, first ready first; every number exactly once.
        caps: When to close a bucket.
        packed_below_bytes: Parameters smaller than this are copied together when their bucket is full.

    Raises:
        ValueError: ``order`` is not a permutation of the parameters.

    Source: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3 (bucketing).
    """
    if sorted(order) != list(range(len(params))):
        raise ValueError(f"order must name each of {len(params)} parameters once, got {order!r}")
    running: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    running_bytes: Counter[tuple[torch.dtype, torch.device]] = Counter()
    closed: Counter[tuple[torch.dtype, torch.device]] = Counter()
    groups: list[tuple[int, list[int]]] = []
    position = {index: place for place, index in enumerate(order)}
    for index in order:
        spec = params[index]
        if spec.sparse:
            groups.append((position[index], [index]))
            continue
        key = (spec.dtype, spec.device)
        running[key].append(index)
        running_bytes[key] += spec.nbytes
        if running_bytes[key] >= caps.at(closed[key]):
            closed[key] += 1
            running_bytes[key] = 0
            groups.append((position[index], running.pop(key)))
    groups += [(position[group[-1]], group) for group in running.values()]
    return lay_out(params, [group for _, group in sorted(groups)], caps, packed_below_bytes)


def lay_out(
    params: Sequence[ParamSpec],
    groups: Iterable[list[int]],
    caps: Caps,
    packed_below_bytes: int,
) -> Plan:
    """Make a bucket of each group.

    Args:
        params: The model's trainable parameters.
        groups: Numbers of the parameters of each bucket, in launch order; one dtype and device in each.
        caps: That have made the groups.
        packed_below_bytes: As for :func:`make_plan`.
    """
    buckets = [
        _lay_out(index, group, params, packed_below_bytes) for index, group in enumerate(groups)
    ]
    if buckets[-1].sparse:
        last = buckets[-1]
        buckets.append(BucketSpec(len(buckets), (), (), 0, 0, torch.float32, last.device))
    return Plan(tuple(params), tuple(buckets), caps)


def _lay_out(
    index: int, group: list[int], params: Sequence[ParamSpec], packed_below_bytes: int
) -> BucketSpec:
    first = params[group[0]]
    if first.sparse:
        return BucketSpec(
            index, tuple(group), (0,), 0, 0, first.buffer_dtype, first.device, sparse=True
        )
    packed = [i for i in group if params[i].nbytes < packed_below_bytes]
    rows = Counter(params[i].row_shape for i in packed)
    run_of: dict[tuple[int, ...] | None, int] = {
        row: place
        for place, (row, count) in enumerate(rows.items())
        if row is not None and count >= MIN_RUN
    }
    offset_of: dict[int, int] = {}
    end = 0
    for i in sorted(packed, key=lambda i: run_of.get(params[i].row_shape, len(rows))):
        offset_of[i] = end
        end += params[i].buffer_numel
    packed_numel = end
    for i in group:
        if i not in offset_of:
            offset_of[i] = end
            end += params[i].buffer_numel
    return BucketSpec(
        index=index,
        params=tuple(group),
        offsets=tuple(offset_of[i] for i in group),
        numel=end,
        packed_numel=packed_numel,
        dtype=first.buffer_dtype,
        device=first.device,
    )
