"""The drift alarm: a rolling checksum of weights and buffers that rides in the trailer.

At the end of backward all ranks hold the same weights, or something is wrong. Steps add up the bits of a few of them, in
a fixed rotation, so that every weight is looked at again and again at a cost far below one percent of a step; how many,
and in every step or in every eighth, depends on the model's size alone, so that all ranks do the same. The sums travel in the ranks' rows; only when they differ do the ranks exchange more, to name the
rank and the first parameter.

A rank that writes its weights more often than the others between two reductions is suspected at once: the next step looks
at all weights, so that an optimizer step on one rank alone is found then and not when the rotation comes to it.

Buffers that are copied from rank 0 in every step are repaired, not compared. Others are compared among the ranks that
have not written them since they were wrapped, so that running statistics are no drift.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from rankstep.buckets.trailer import BASE, DRIFT_DIGITS, Mode
from rankstep.errors import DriftError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankstep.buckets.trailer import Row
    from rankstep.collectives import Communicator

SLICE_BYTES = 1 << 20
"""1 MiB a step: reading it takes about a tenth of a millisecond."""

EVERY = 8
"""Models below 1 MiB, whose steps may take less than a millisecond, are sampled in every eighth step."""

TENSORS_PER_SAMPLE = 4
"""Each tensor costs a few microseconds whatever its size; small models are sampled one at a time."""

_MOST_WRITES = BASE - 1

_BLOCK = 256
_MASK = (1 << 5 * DRIFT_DIGITS) - 1
# Wide elements as pairs: the top bit of a 64-bit sum has no place to carry a factor to.
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def bit_sum(tensor: torch.Tensor, start: int = 0, end: int | None = None) -> torch.Tensor:
    """Add up the elements' bits as integers: an int64 scalar on the tensor's device.

    Each block of elements has an odd factor of its own, a block of small tensors being one element: so changes that
    leave the plain sum alone (two rows swapped, as many signs turned to plus as to minus) are seen, too.

    Args:
        tensor: Any dtype and strides.
        start: First element, in the order of memory where that is dense.
        end: Element after the last one; None: to the end.
    """
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if not tensor.is_contiguous():
        # In the order of memory a dense tensor needs no copy.
        order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        tensor = tensor.permute(order)
    flat = tensor.reshape(-1)[start:end]
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    bits = flat.view(_INTEGER[flat.element_size()])
    whole = bits.numel() // _BLOCK * _BLOCK if bits.numel() > _BLOCK * _BLOCK else 0
    parts = torch.cat(
        [
            bits[:whole].view(-1, _BLOCK).sum(1, dtype=torch.int64),
            bits[whole:].to(torch.int64),
        ]
    )
    return (parts * (2 * torch.arange(len(parts), device=parts.device) + 1)).sum()


def _folded(total: torch.Tensor) -> torch.Tensor:
    """As many bits as travel, each depending on both halves of ``total``; never 0."""
    return (total ^ total >> 25) << 1 & _MASK | 1


class DriftAlarm:
    """Checks that the ranks still hold the same weights.

    Args:
        named: Weights and buffers, the same list on every rank.
        written: For each of them, its version at construction if it is a buffer, else None.
    """

    def __init__(
        self, named: Sequence[tuple[str, torch.Tensor]], written: Sequence[int | None]
    ) -> None:
        self._names = [name for name, _ in named]
        self._tensors = [tensor for _, tensor in named]
        self._written = list(written)
        self._parts = [
            (index, start, min(start + length, tensor.numel()))
            for index, tensor in enumerate(self._tensors)
            if tensor.numel()
            for length in [max(1, SLICE_BYTES // tensor.element_size())]
            for start in range(0, tensor.numel(), length)
        ]
        total = sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)
        self._every = EVERY if total < SLICE_BYTES else 1
        self._per_sample = TENSORS_PER_SAMPLE if total >= 16 * SLICE_BYTES else 1
        self._steps = 0
        self._next = 0
        self._sampled: list[int] = []
        self._agreed = [-1] * len(self._parts)
        # One parameter stands for all: an optimizer writes every one that has a gradient.
        self._witness = next((t for t in self._tensors if t.requires_grad), None)
        self._version = self._version_now()
        self._suspects = ""
        self._looks_at_all = False
        self._next_look, self._patience = 0, 1

    def writes(self) -> int:
        """How often this rank's weights were written since the last call, as the first trained one's version tells."""
        before, self._version = self._version, self._version_now()
        return max(0, min(self._version - before, _MOST_WRITES))

    def _version_now(self) -> int:
        return 0 if self._witness is None else self._witness._version

    def suspect(self, rows: Sequence[Row], step: int) -> None:
        """Look at all weights in the next step if some rank has written its own more often than the others.

        Ranks may do so rightly: one evaluates with averaged weights and puts the others back. Where nothing comes of it,
        it is looked into again after twice as many steps.

        Args:
            rows: What each rank said; the same on all ranks, so that all look, or none.
            step: Which synced backward, counted from 0.
        """
        counts = Counter(row.writes for row in rows)
        if len(counts) <= 1 or step < self._next_look:
            return
        if any(row.mode == Mode.JOINED for row in rows):
            # Such a rank takes no optimizer steps, and gets the others' weights when all have run out.
            return
        usual = counts.most_common(1)[0][0]
        told = [f"rank {r}: {row.writes}" for r, row in enumerate(rows) if row.writes != usual]
        self._suspects = (
            f" Between the last reduction and that of step {step} the weights were not written equally often: "
            f"{', '.join(told[:8])}; the others: {usual}."
        )
        self._looks_at_all = True
        self._patience *= 2
        self._next_look = step + self._patience

    def sample(self) -> torch.Tensor | None:
        """The next few parts' checksum, never 0; None if there is nothing to compare in this step."""
        self._steps += 1
        if self._looks_at_all:
            self._looks_at_all = False
            return self._sample_all()
        self._suspects = ""
        if not self._parts or self._steps % self._every:
            return None
        total: torch.Tensor | None = None
        size = 0
        written = False
        self._sampled = []
        for _ in range(min(self._per_sample, len(self._parts))):
            index, start, end = self._parts[self._next]
            part_bytes = (end - start) * self._tensors[index].element_size()
            is_buffer = self._written[index] is not None
            if total is not None and (size + part_bytes > SLICE_BYTES or is_buffer):
                break
            size += part_bytes
            self._sampled.append(self._next)
            self._next = (self._next + 1) % len(self._parts)
            written = self._is_written(index)
            part = bit_sum(self._tensors[index], start, end)
            # An odd factor per part: two errors in one sample do not cancel.
            total = part if total is None else total * 31 + part
            if is_buffer:
                break
        return None if total is None or written else _folded(total)

    def _sample_all(self) -> torch.Tensor | None:
        """All weights' checksum; buffers may be a rank's own."""
        whole = [
            number
            for number, (index, _, _) in enumerate(self._parts)
            if self._written[index] is None
        ]
        self._sampled = whole
        total: torch.Tensor | None = None
        for number in whole:
            index, start, end = self._parts[number]
            part = bit_sum(self._tensors[index], start, end).to(self._tensors[0].device)
            total = part if total is None else total * 31 + part
        return None if total is None else _folded(total)

    def agreed(self, step: int) -> None:
        """All ranks reported the same checksum in this step."""
        for part in self._sampled:
            self._agreed[part] = step

    def raise_difference(self, comm: Communicator, step: int) -> None:
        """The checksums differed: find out where, with one all-gather, and raise on every rank.

        Raises:
            DriftError: Names the ranks, the first tensor that differs and the step of the last agreement.
        """
        device = self._tensors[0].device
        written = torch.tensor([self._is_written(i) for i in range(len(self._tensors))])
        sums = torch.stack(
            [written.to(device).long(), torch.stack([bit_sum(t).to(device) for t in self._tensors])]
        )
        parts = [torch.empty_like(sums) for _ in range(comm.world_size)]
        comm.all_gather(parts, sums).wait()
        table = [
            [None if skip else value for skip, value in zip(*part.tolist(), strict=True)]
            for part in parts
        ]
        for index, name in enumerate(self._names):
            column = [row[index] for row in table]
            counts = Counter(value for value in column if value is not None)
            if len(counts) <= 1:
                continue
            usual, many = counts.most_common(1)[0]
            odd = [r for r, value in enumerate(column) if value not in (None, usual)]
            who = (
                f"rank {', '.join(map(str, odd))} differs from the others"
                if 2 * many > len(column)
                else (f"ranks {', '.join(map(str, range(len(column))))} hold different values")
            )
            agreed = min(self._agreed[p] for p, (i, _, _) in enumerate(self._parts) if i == index)
            since = f"they last agreed in step {agreed}" if agreed >= 0 else "they never agreed"
            raise DriftError(
                f"rank {comm.rank}: the ranks' weights have drifted apart, seen in step {step} (counted from 0): {who} in "
                f"{name!r}, the first of {sum(len({row[i] for row in table} - {None}) > 1 for i in range(len(self._names)))} that "
                f"differ; {since}.{self._suspects} Something outside the wrapper changed it: an optimizer step on one rank only, a "
                "random in-place edit, a faulty device. Load the last good checkpoint on all ranks."
            )
        raise DriftError(
            f"rank {comm.rank}: the ranks' weights differed in step {step} (counted from 0) and are equal again; "
            "something writes them while backward runs"
        )

    def _is_written(self, index: int) -> bool:
        before = self._written[index]
        return before is not None and self._tensors[index]._version != before
