"""Where the lines of the page's pictures run: from numbers to places on a canvas."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankstep.explain import numbers

if TYPE_CHECKING:
    from rankstep.explain.blocks import Arrows, Lines

WIDTH = 640
_ARROWS_HEIGHT = 260
_LINES_HEIGHT = 210
_EDGE = 16
# Room for names: beside the tips of arrows, and at the ends of lines.
_NAME = 56
_LEFT, _RIGHT, _BOTTOM = 58, 150, 30
_HEAD = 9


@dataclass(frozen=True, slots=True)
class DrawnArrow:
    """One arrow: its tip, the three corners of its head, and where its name stands."""

    name: str
    x: float
    y: float
    head: str
    name_x: float
    name_y: float


@dataclass(frozen=True, slots=True)
class Fan:
    """Arrows from one point; ``scale`` is the pixels of a length of one."""

    height: float
    x: float
    y: float
    scale: float
    arrows: tuple[DrawnArrow, ...]


def fan(block: Arrows) -> Fan:
    """Place arrows: the first one points to the right, angles go up, and all have one scale."""
    tips = [
        (
            arrow.length * math.cos(math.radians(arrow.degrees)),
            -arrow.length * math.sin(math.radians(arrow.degrees)),
        )
        for arrow in block.arrows
    ]
    left, right = (pick(0.0, *(x for x, _ in tips)) for pick in (min, max))
    top, bottom = (pick(0.0, *(y for _, y in tips)) for pick in (min, max))
    scale = min(
        (WIDTH - 2 * _NAME) / max(right - left, 1e-12),
        (_ARROWS_HEIGHT - 2 * _EDGE) / max(bottom - top, 1e-12),
    )
    # One that is far longer than wide needs no more height than it has.
    height = scale * (bottom - top) + 4 * _EDGE
    x, y = _NAME - scale * left, 2 * _EDGE - scale * top
    return Fan(
        height,
        x,
        y,
        scale,
        tuple(
            _arrow(arrow.name, (x, y), (x + scale * dx, y + scale * dy))
            for arrow, (dx, dy) in zip(block.arrows, tips, strict=True)
        ),
    )


def _arrow(name: str, origin: tuple[float, float], tip: tuple[float, float]) -> DrawnArrow:
    dx, dy = tip[0] - origin[0], tip[1] - origin[1]
    length = math.hypot(dx, dy) or 1.0
    dx, dy = dx / length, dy / length
    back = min(_HEAD, length)
    corners = [
        tip,
        (tip[0] - back * dx - back / 2 * dy, tip[1] - back * dy + back / 2 * dx),
        (tip[0] - back * dx + back / 2 * dy, tip[1] - back * dy - back / 2 * dx),
    ]
    head = " ".join(f"{x:.2f},{y:.2f}" for x, y in corners)
    return DrawnArrow(name, tip[0], tip[1], head, tip[0] + 12 * dx, tip[1] + 12 * dy)


@dataclass(frozen=True, slots=True)
class Dot:
    """One value of a line."""

    x: float
    y: float
    shown: str


@dataclass(frozen=True, slots=True)
class DrawnLine:
    """One line, and where its name stands."""

    name: str
    dots: tuple[Dot, ...]
    name_y: float

    @property
    def path(self) -> str:
        """Its corners, as SVG wants them."""
        return " ".join(f"{dot.x:.2f},{dot.y:.2f}" for dot in self.dots)


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over an axis; the ticks are heights with their texts, and places with theirs."""

    height: float
    left: float
    right: float
    floor: float
    heights: tuple[tuple[float, str], ...]
    places: tuple[tuple[float, str], ...]
    lines: tuple[DrawnLine, ...]


def chart(block: Lines) -> Chart:
    """Place lines over an axis that begins at 0."""
    top = max((value for series in block.series for value in series.values), default=0.0) or 1.0
    left, right, floor = _LEFT, WIDTH - _RIGHT, _LINES_HEIGHT - _BOTTOM
    step = (right - left) / max(1, len(block.places) - 1)
    xs = [left + step * place for place in range(len(block.places))]

    def height(value: float) -> float:
        return floor - (floor - _EDGE) * value / top

    lines: list[DrawnLine] = []
    for series in block.series:
        dots = tuple(
            Dot(x, height(value), shown)
            for x, value, shown in zip(xs, series.values, series.shown, strict=True)
        )
        lines.append(DrawnLine(series.name, dots, dots[-1].y))
    return Chart(
        _LINES_HEIGHT,
        left,
        right,
        floor,
        tuple((height(top * part), numbers.share(top * part)) for part in (0.0, 0.5, 1.0)),
        tuple(zip(xs, block.places, strict=True)),
        tuple(lines),
    )
