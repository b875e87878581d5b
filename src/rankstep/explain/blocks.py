"""What a story is made of; the screen and the page draw the same blocks."""

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
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its name, its length as a share of the longest, and its number as text."""

    label: str
    share: float
    shown: str


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars below each other."""

    caption: str
    bars: tuple[Bar, ...]


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
class Chain:
    """Steps that follow from each other."""

    caption: str
    links: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One claim: whether it held, what was measured, and why it did not hold."""

    held: bool
    text: str
    measured: str = ""
    causes: tuple[str, ...] = ()


Block: TypeAlias = Paragraph | Table | Bars | Owners | Timeline | Chain | Verdict


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
