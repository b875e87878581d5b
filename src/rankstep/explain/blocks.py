"""What a story is made of; the screen and the page draw the same blocks, each in its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Running text; words between backticks are code."""

    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """A small table.

    Args:
        head: The columns' names.
        rows: As many cells each.
        align: One letter for each column: ``l`` or ``r``.
        caption: Above it.
        shares: For each row the length of a bar, as a share of the longest, which only a page has room for.
        shares_of: The column that they are of, counted from 0; the bar stands beside it.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str
    caption: str = ""
    shares: tuple[float, ...] = ()
    shares_of: int = 0


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a picture: its name, and a value with its text for each place of the axis."""

    name: str
    values: tuple[float, ...]
    shown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lines:
    """A picture of how several things went, step by step; on the screen bars of the first of them."""

    caption: str
    places: tuple[str, ...]
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class Arrow:
    """A vector: its name, its length, and its angle to the first arrow in degrees."""

    name: str
    length: float
    degrees: float


@dataclass(frozen=True, slots=True)
class Arrows:
    """Vectors from one point; only a page can draw them, and the numbers stand in a table beside it.

    Lengths and angles to the first arrow are true. Angles among the others cannot be, in a plane.
    """

    caption: str
    arrows: tuple[Arrow, ...]


@dataclass(frozen=True, slots=True)
class Nodes:
    """Boxes in boxes: for each node its name, and for each of its ranks a name and what it is made of."""

    caption: str
    nodes: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


@dataclass(frozen=True, slots=True)
class Marks:
    """Rows of short texts, one for each rank; equal texts of a row look equal, others do not."""

    caption: str
    rows: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class Owners:
    """For each sample of a row, the rank that gets it."""

    caption: str
    rows: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time in a lane; the kind is one of ``forward``, ``compute``, ``wait``, ``flight``, ``step``."""

    begin: float
    end: float
    kind: str


@dataclass(frozen=True, slots=True)
class Lane:
    """One line of a timeline: spans, and single moments."""

    label: str
    spans: tuple[Span, ...] = ()
    ticks: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """Lanes over one axis of time, from 0 to ``end`` microseconds.

    ``legend`` has a gap for each kind of mark, which the screen fills with its characters and the page with colours.
    """

    caption: str
    end: float
    lanes: tuple[Lane, ...]
    legend: str


@dataclass(frozen=True, slots=True)
class Link:
    """One step of a chain: what happens, and if it happens on each rank by itself, what comes out there.

    ``alike``: what comes out should be the same, so that equal texts are to look equal.
    """

    text: str
    cells: tuple[str, ...] = ()
    alike: bool = False


@dataclass(frozen=True, slots=True)
class Chain:
    """Steps that follow from each other; ``ranks`` are the names of what does them."""

    caption: str
    ranks: tuple[str, ...]
    links: tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One claim: whether it held, what was measured, and why it did not hold."""

    held: bool
    text: str
    measured: str = ""
    causes: tuple[str, ...] = ()


Block: TypeAlias = (
    Paragraph | Table | Lines | Arrows | Nodes | Marks | Owners | Timeline | Chain | Verdict
)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the story."""

    key: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Story:
    """All of it, in one language."""

    lang: str
    title: str
    intro: tuple[Block, ...]
    sections: tuple[Section, ...]
    ending: str
    held: bool
