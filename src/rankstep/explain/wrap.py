"""Where lines may break: between words, and between Chinese characters, but never before a comma."""

from __future__ import annotations

import re

from rich.cells import cell_len

# Marks that no line may begin with, and marks that no line may end with.
_CLOSING = "。，、；：？！）」』”’…,.;:?!)]}%"  # noqa: RUF001
_OPENING = "（「『“‘([{"  # noqa: RUF001
_WIDE = "\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef\u3000-\u303f"
_UNITS = re.compile(rf"\s+|[{_WIDE}…“”‘’]|[^\s{_WIDE}…“”‘’]+")  # noqa: RUF001


def breaks(text: str, width: int) -> list[int]:
    """Return the places in a text at which to begin a new line.

    Args:
        text: One paragraph.
        width: Cells per line; a Chinese character takes two.
    """
    places: list[int] = []
    used = 0
    for begin, unit in _units(text):
        cells = cell_len(unit)
        if used and not unit.isspace() and used + cells > width:
            places.append(begin)
            used = 0
        used += cells
    return places


def _units(text: str) -> list[tuple[int, str]]:
    """Split a text into what must stay on one line, with where each begins."""
    units: list[tuple[int, str]] = []
    for match in _UNITS.finditer(text):
        unit = match[0]
        joins = bool(units) and (unit[0] in _CLOSING or units[-1][1][-1] in _OPENING)
        if joins and not unit.isspace() and not units[-1][1].isspace():
            units[-1] = (units[-1][0], units[-1][1] + unit)
        else:
            units.append((match.start(), unit))
    return units
