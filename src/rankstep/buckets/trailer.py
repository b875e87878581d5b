"""The few numbers that ride behind the gradients of the last bucket, in the same all-reduce.

The trailer holds one *used* flag per parameter, summed over the ranks, and for every rank a row of its own into which
nobody else adds, so that after the sum each rank reads what every rank said. Numbers are written as base-32 digits:
0 to 31 are exact in every floating dtype, also after a division by the world size has been undone by rounding.

Unused parameters, rank skew, exact weighted means and the drift alarm therefore cost no additional collective.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

BASE = 32
COUNT_DIGITS = 13
DRIFT_DIGITS = 8


class Mode(enum.IntEnum):
    """What a rank was doing when it took part. Never 0: an untouched row means that nobody wrote it.

    SYNC: ``loss.backward()``, a mean of means. WEIGHTED: ``model.backward(loss_sum, count=n)``. JOINED: it has run out
    of inputs under ``join`` and only keeps the others company. SPENT: the same under ``together``, with an empty batch.
    MIXED: its window had backwards of both kinds, which have no common mean.
    """

    SYNC = 1
    WEIGHTED = 2
    JOINED = 3
    SPENT = 4
    MIXED = 5


_DIGITS = {
    "mode": 1,
    "wrapper": 2,
    "reductions": 4,
    "forwards": 2,
    "abandoned": 1,
    "late": 1,
    "changed": 1,
    "nonfinite": 4,
    "drawn": 2,
    "writes": 1,
    "count": COUNT_DIGITS,
    "drift": DRIFT_DIGITS,
}
ROW_NUMEL = sum(_DIGITS.values())
_START = {name: sum(list(_DIGITS.values())[:i]) for i, name in enumerate(_DIGITS)}


@dataclass(frozen=True, slots=True)
class Row:
    """What one rank says about the step.

    Attributes:
        mode: See :class:`Mode`.
        wrapper: Which wrapper of the process this is, in order of construction.
        reductions: Synced backwards that this wrapper has begun before this one.
        forwards: Training forwards of the wrapper since the previous reduction.
        abandoned: 1 if the backward died and the rank sent zeros for what was missing.
        late: 1 if gradients came after their bucket had left, so that a second round must add them.
        changed: 1 if the module's trainable parameters are no longer those that were wrapped.
        nonfinite: 1 + the number of the first parameter whose gradient on this rank was NaN or infinite; 0: none, or
            nobody looked.
        drawn: Batches that this rank's loader has handed out since the previous reduction; 0: not known for sure.
        writes: How often the weights were written since the previous reduction; 31: so often, or more.
        count: Samples or tokens in this rank's window; its 64 bits travel, so any float is exact.
        drift: Checksum of a few weights and buffers.
    """

    mode: int = Mode.SYNC
    wrapper: int = 0
    reductions: int = 0
    forwards: int = 0
    abandoned: int = 0
    late: int = 0
    changed: int = 0
    nonfinite: int = 0
    drawn: int = 0
    writes: int = 0
    count: float = 0.0
    drift: int = 0

    def digits(self) -> list[int]:
        """The row as base-32 digits, most significant first; numbers wrap at the width of their field."""
        return [digit for name in _DIGITS for digit in _digits_of(name, getattr(self, name))]

    @classmethod
    def from_digits(cls, digits: Sequence[float]) -> Row:
        """Read a row back."""
        values: dict[str, int | float] = {}
        for name, width in _DIGITS.items():
            value = 0
            for digit in digits[_START[name] : _START[name] + width]:
                value = value * BASE + round(digit)
            values[name] = struct.unpack(">d", value.to_bytes(8))[0] if name == "count" else value
        return cls(**values)  # type: ignore[arg-type]


def _digits_of(name: str, value: float) -> list[int]:
    """One field of a row."""
    number = int.from_bytes(struct.pack(">d", value)) if name == "count" and value else int(value)
    return [number >> 5 * place & 31 for place in range(_DIGITS[name] - 1, -1, -1)]


assert tuple(_DIGITS) == tuple(f.name for f in fields(Row)), "a field of Row without digits"  # noqa: S101


def numel(param_count: int, world_size: int) -> int:
    """Elements that the trailer adds to the last bucket."""
    return param_count + world_size * ROW_NUMEL


class Trailer:
    """Writes and reads the tail of the last bucket's buffer.

    Args:
        region: The tail, ``numel(param_count, world_size)`` elements; real floating dtype.
        param_count: Parameters of the plan; flag i belongs to parameter i.
        rank: This rank.
        world_size: Ranks in the group.
        averages: The collective divides by the world size; reading multiplies by it again.
    """

    def __init__(
        self, region: torch.Tensor, param_count: int, rank: int, world_size: int, *, averages: bool
    ) -> None:
        self.region = region
        self.param_count = param_count
        self._flags = region[:param_count]
        self._rows = region[param_count:].view(world_size, ROW_NUMEL)
        self._factor = world_size if averages else 1
        self._own = Row()
        self._own_digits = self._own.digits()
        self._all_used = True
        # What this rank says, kept on the host: from step to step little of it changes, and one copy takes it along.
        self._host = torch.zeros(region.numel(), dtype=torch.float32, device="cpu")
        self._numbers = self._host.numpy()
        self._numbers[:param_count] = 1
        self._row_start = param_count + rank * ROW_NUMEL
        self._numbers[self._row_start : self._row_start + ROW_NUMEL] = self._own_digits

    def write(
        self, row: Row, used: Sequence[int] | None, checksum: torch.Tensor | None = None
    ) -> None:
        """Put this rank's part in.

        Args:
            row: What this rank says.
            used: One 0 or 1 per parameter; None: this rank used all of them.
            checksum: An int64 scalar on the device to travel as ``drift``, where the host must not wait for it.
        """
        for name, start in _START.items():
            value = getattr(row, name)
            if value != getattr(self._own, name):
                digits, place = _digits_of(name, value), self._row_start + start
                self._own_digits[start : start + len(digits)] = digits
                self._numbers[place : place + len(digits)] = digits
        self._own = row
        if used is not None:
            self._numbers[: self.param_count] = used
        elif not self._all_used:
            self._numbers[: self.param_count] = 1
        self._all_used = used is None
        self.region.copy_(self._host)
        if checksum is not None:
            places = torch.arange(DRIFT_DIGITS - 1, -1, -1, device=checksum.device)
            start = self._row_start + _START["drift"]
            self.region[start : start + DRIFT_DIGITS] = (checksum >> 5 * places & 31).to(
                self.region.dtype
            )

    def read_rows(self) -> list[Row]:
        """Every rank's row, in rank order. Reads the buffer, so on a GPU it waits for the collective."""
        return self.decode_rows(self._rows.tolist())

    def decode_rows(self, raw: list[list[float]]) -> list[Row]:
        """Rows from the numbers that a copy of the buffer holds."""
        own = self._own_digits
        if self._factor == 1 and all(digits == own for digits in raw):
            return [self._own] * len(raw)
        return [Row.from_digits([digit * self._factor for digit in digits]) for digits in raw]

    def rows_tensor(self) -> torch.Tensor:
        """The raw rows, for an asynchronous copy to the host."""
        return self._rows

    def read_total_count(self) -> torch.Tensor:
        """The sum of all ranks' counts as a float64 scalar on the device, without waiting for it."""
        start = _START["count"]
        digits = (
            (self._rows[:, start : start + COUNT_DIGITS].double() * self._factor).round().long()
        )
        places = torch.arange(COUNT_DIGITS - 1, -1, -1, device=digits.device)
        return (digits << 5 * places).sum(1).view(torch.float64).sum()

    def read_used(self) -> list[int]:
        """For each parameter, on how many ranks it was used. Reads the buffer."""
        return [round(count * self._factor) for count in self._flags.tolist()]
