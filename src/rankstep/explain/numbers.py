"""Numbers as people read them, the same in all languages."""

from __future__ import annotations

MISSING = "?"
"""Stands for NaN and infinity."""


def count(value: int) -> str:
    """Return a whole number with groups of three digits."""
    return f"{value:,}"


def size(value: float) -> str:
    """Return bytes in the unit that leaves few digits."""
    unit = 0
    while value >= 1024 and unit < 4:
        value /= 1024
        unit += 1
    digits = 0 if unit == 0 else 1
    return f"{value:,.{digits}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def small(value: float | None) -> str:
    """Return a difference: 0 as such, what is tiny as a power of ten."""
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    return f"{value:.1e}" if abs(value) < 1e-2 else f"{value:.3f}"


def share(value: float | None) -> str:
    """Return a share in percent; a tiny one as a power of ten."""
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    return f"{value:.1e}" if abs(value) < 1e-3 else f"{100 * value:.1f} %"


def plain(value: float | None, digits: int = 4) -> str:
    """Return a number with fixed digits."""
    return MISSING if value is None else f"{value:.{digits}f}"


def milliseconds(value: float | None) -> str:
    """Return a time with about three digits."""
    if value is None:
        return MISSING
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def shares(values: list[float | None]) -> tuple[float, ...]:
    """Return each value as a share of the greatest; what is not finite is as long as that."""
    greatest = max((value for value in values if value is not None), default=0.0) or 1.0
    return tuple(1.0 if value is None else value / greatest for value in values)
