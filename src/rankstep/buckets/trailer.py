"""The few numbers that ride behind the gradients of the last bucket, in the same all-reduce.

The trailer holds one *used* flag per parameter, summed over the ranks, and for every rank a row of its own into which
nobody else adds, so that after the sum each rank reads what every rank said. Numbers are written as base-32 digits:
0 to 31 are exact in every floating dtype, also after a division by the world size has been undone by rounding.

Unused parameters, rank skew and exact weighted means therefore cost no additional collective.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

BASE = 32


class Mode(enum.IntEnum):
    """What a rank was doing when it took part. Never 0: an untouched row means that nobody wrote it."""

    SYNC = 1


_DIGITS = {
    "mode": 1,
    "wrapper": 2,
    "reductions": 4,
    "forwards": 2,
    "abandoned": 1,
    "late": 1,
}
ROW_NUMEL = sum(_DIGITS.values())


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
    """

    mode: int = Mode.SYNC
    wrapper: int = 0
    reductions: int = 0
    forwards: int = 0
    abandoned: int = 0
    late: int = 0

    def digits(self) -> list[int]:
        """The row as base-32 digits, most significant first; numbers wrap at the width of their field."""
        digits: list[int] = []
        for name, width in _DIGITS.items():
            value = int(getattr(self, name)) % BASE**width
            digits += [value // BASE**place % BASE for place in reversed(range(width))]
        return digits

    @classmethod
    def from_digits(cls, digits: Sequence[float]) -> Row:
        """Read a row back."""
        values: dict[str, int] = {}
        start = 0
        for name, width in _DIGITS.items():
            value = 0
            for digit in digits[start : start + width]:
                value = value * BASE + round(digit)
            values[name] = value
            start += width
        return cls(**values)


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
        self._region = region
        self._flags = region[:param_count]
        self._rows = region[param_count:].view(world_size, ROW_NUMEL)
        self._own_row = self._rows[rank]
        self._factor = world_size if averages else 1
        self._own = Row()
        self._own_digits = self._own.digits()

    def write(self, row: Row, used: Sequence[int] | None) -> None:
        """Put this rank's part in.

        Args:
            row: What this rank says.
            used: One 0 or 1 per parameter; None: this rank used all of them.
        """
        self._own, self._own_digits = row, row.digits()
        self._rows.zero_()
        self._own_row.copy_(torch.tensor(self._own_digits, dtype=self._region.dtype))
        if used is None:
            self._flags.fill_(1)
        else:
            self._flags.copy_(torch.tensor(used, dtype=self._region.dtype))

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

    def read_used(self) -> list[int]:
        """For each parameter, on how many ranks it was used. Reads the buffer."""
        return [round(count * self._factor) for count in self._flags.tolist()]
