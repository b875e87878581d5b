"""How numbers are written for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def ms(ns: float) -> str:
    """Write a time so that its size can be seen."""
    if ns < 999.5:
        return f"{ns:.0f} ns"
    if ns < 99_950:
        return f"{ns / 1e3:.1f} us"
    return f"{ns / 1e6:.2f} ms" if ns < 9_995_000 else f"{ns / 1e6:,.1f} ms"


def size(nbytes: float) -> str:
    """Write a number of bytes."""
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.2f} GiB"
    return f"{nbytes / 2**20:.2f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"


def plural(count: int, thing: str) -> str:
    """Write a number of things."""
    return f"{count:,} {thing}{'s' * (count != 1)}"


def some(numbers: Sequence[int], most: int = 8) -> str:
    """Write whole numbers, but no more than so many."""
    shown = ", ".join(map(str, numbers[:most]))
    return shown if len(numbers) <= most else f"{shown} and {len(numbers) - most} more"


def ranks(numbers: Sequence[int]) -> str:
    """Write which ranks."""
    return f"rank{'s' * (len(numbers) > 1)} {some(numbers)}"
