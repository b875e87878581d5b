"""The story on a terminal, or as plain text in a pipe or file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from rankstep.explain.blocks import (
    Block,
    Chain,
    Lines,
    Marks,
    Nodes,
    Owners,
    Paragraph,
    Table,
    Timeline,
    Verdict,
)
from rankstep.explain.texts import texts
from rankstep.explain.wrap import breaks

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from rankstep.explain.blocks import Lane, Story
    from rankstep.explain.texts import Texts

MARKS = {"forward": "▒", "compute": "█", "wait": "░", "flight": "━", "step": "▓"}
TICK = "╵"
_COLOURS = {
    "forward": "blue",
    "compute": "cyan",
    "wait": "bright_black",
    "flight": "magenta",
    "step": "green",
}
_RANKS = ("blue", "yellow", "green", "magenta", "cyan", "red", "bright_blue", "bright_yellow")
_WIDEST = 100
_INDENT = 2
_CODE = re.compile(r"`([^`]*)`")


def show(story: Story, console: Console) -> None:
    """Print the whole story.

    Args:
        story: In its language.
        console: Where to; it knows whether colours work there.
    """
    width = min(console.width, _WIDEST)
    printer = _Printer(console, width, texts(story.lang))
    console.print()
    console.print(Text(story.title, style="bold"))
    for block in story.intro:
        printer.show(block)
    for section in story.sections:
        console.print()
        console.print(Text(section.title, style="bold cyan"))
        console.print(Text("─" * min(width, cell_len(section.title)), style="cyan"))
        for block in section.blocks:
            printer.show(block)
    console.print()
    printer.end(Text(story.ending, style="bold green" if story.held else "bold red"))


class _Printer:
    def __init__(self, console: Console, width: int, text: Texts) -> None:
        self._console = console
        self._width = width
        self._text = text
        self._in_verdicts = False
        # Arrows are for the page alone: characters have no angles.
        self._draws: dict[type, Callable[[Any], None]] = {
            Paragraph: lambda block: self._put(_styled(block.text)),
            Chain: self._chain,
            Table: self._table,
            Lines: self._lines,
            Nodes: self._nodes,
            Marks: self._marks,
            Owners: self._owners,
            Timeline: self._timeline,
            Verdict: self._verdict,
        }

    def show(self, block: Block) -> None:
        draw = self._draws.get(type(block))
        if draw is None:
            return
        verdict = isinstance(block, Verdict)
        if not (verdict and self._in_verdicts):
            self._console.print()
        self._in_verdicts = verdict
        draw(block)

    def end(self, ending: Text) -> None:
        self._put(ending, 0)

    def _put(self, text: Text, indent: int = _INDENT) -> None:
        lines = text.divide(breaks(text.plain, self._width - indent))
        for line in lines:
            line.rstrip()
            self._console.print(Text(" " * indent).append_text(line), soft_wrap=True)

    def _table(self, table: Table) -> None:
        if table.caption:
            self._put(Text(table.caption, style="dim"))
        grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
        for head, align in zip(table.head, table.align, strict=True):
            grid.add_column(Text(head), justify="right" if align == "r" else "left")
        for row in table.rows:
            grid.add_row(*(Text(cell) for cell in row))
        self._console.print(Padding(grid, (0, 0, 0, _INDENT)), width=self._width)

    def _chain(self, chain: Chain) -> None:
        self._put(Text(chain.caption, style="dim"))
        for number, link in enumerate(chain.links):
            self._put(Text(f"{'  ' if number == 0 else '→ '}{link.text}"))
            if link.cells:
                self._put(Text("   ".join(link.cells), style="cyan"), 3 * _INDENT)

    def _nodes(self, nodes: Nodes) -> None:
        self._put(Text(nodes.caption, style="dim"))
        names = max(cell_len(name) for name, _ in nodes.nodes)
        for name, ranks in nodes.nodes:
            line = Text(f"{_padded(name, names)}  ")
            line.append("   ".join(f"[{rank} = {made_of}]" for rank, made_of in ranks))
            self._put(line)

    def _marks(self, marks: Marks) -> None:
        """One colour for each different text of a row."""
        self._put(Text(marks.caption, style="dim"))
        labels = max(cell_len(label) for label, _ in marks.rows)
        for label, texts_of_ranks in marks.rows:
            line = Text(f"{_padded(label, labels)}  ")
            seen = list(dict.fromkeys(texts_of_ranks))
            for mark in texts_of_ranks:
                line.append(f"{mark}  ", style=_RANKS[seen.index(mark) % len(_RANKS)])
            line.rstrip()
            self._put(line)

    def _lines(self, lines: Lines) -> None:
        """Draw bars of the first series; the others, which a page draws as well, are a number at the end."""
        first, *others = lines.series
        self._put(Text(f"{lines.caption}{self._text('colon')}{first.name}", style="dim"))
        longest = max(first.values, default=0.0) or 1.0
        told = [
            "   ".join([shown, *(f"{other.name} {other.shown[place]}" for other in others)])
            for place, shown in enumerate(first.shown)
        ]
        names = max(map(cell_len, lines.places))
        room = max(10, self._width - _INDENT - names - max(map(cell_len, told)) - 4)
        for place, value, shown in zip(lines.places, first.values, told, strict=True):
            line = Text(f"{_padded(place, names)}  ")
            line.append("█" * max(value > 0, round(value / longest * room)), style="cyan")
            line.append(f" {shown}")
            self._put(line)

    def _owners(self, owners: Owners) -> None:
        self._put(Text(owners.caption, style="dim"))
        labels = max(cell_len(label) for label, _ in owners.rows)
        for label, ranks in owners.rows:
            line = Text(f"{_padded(label, labels)}  ")
            for rank in ranks:
                line.append(f"{rank} ", style=_RANKS[rank % len(_RANKS)])
            line.rstrip()
            self._put(line)

    def _timeline(self, timeline: Timeline) -> None:
        labels = max(cell_len(lane.label) for lane in timeline.lanes)
        room = max(20, self._width - labels - 6)
        last = f"{timeline.end / 1e3:.1f} ms"
        axis = f"0{last.rjust(room - 1)}"
        caption = _padded(timeline.caption, labels)
        self._put(Text(f"{caption}  {axis}", style="dim"))
        for lane in timeline.lanes:
            line = Text(f"{_padded(lane.label, labels)}  ")
            for mark, kind in _cells(lane, timeline.end, room):
                line.append(mark, style=_COLOURS.get(kind, "yellow"))
            line.rstrip()
            self._put(line)
        if timeline.legend:
            self._console.print()
            self._legend(timeline.legend.format(tick=TICK, **MARKS).split("   "))

    def _legend(self, parts: list[str]) -> None:
        """Let no line end between a mark and its name."""
        line = ""
        for part in parts:
            longer = f"{line}   {part}" if line else part
            if line and cell_len(longer) > self._width - _INDENT:
                self._put(Text(line, style="dim"))
                longer = part
            line = longer
        self._put(Text(line, style="dim"))

    def _verdict(self, verdict: Verdict) -> None:
        sign, word = ("✓", self._text("held")) if verdict.held else ("✗", self._text("failed"))
        line = Text(f"{sign} ", style="green" if verdict.held else "bold red")
        line.append(self._text("verdict", word=word, claim=verdict.text))
        if verdict.measured:
            line.append(f"  ({verdict.measured})", style="dim")
        self._put(line)
        for cause in verdict.causes:
            self._put(_styled(cause), 3 * _INDENT)


def _cells(lane: Lane, end: float, room: int) -> list[tuple[str, str]]:
    """Return one character and its kind for each cell of a lane."""
    cells = [(" ", "")] * room
    scale = room / max(end, 1e-9)
    for span in lane.spans:
        first = min(room - 1, int(span.begin * scale))
        # What is shorter than a cell is drawn as one: it happened.
        for cell in range(first, min(room, max(first + 1, round(span.end * scale)))):
            cells[cell] = (MARKS[span.kind], span.kind)
    for tick in lane.ticks:
        cells[min(room - 1, int(tick * scale))] = (TICK, "tick")
    return cells


def _styled(text: str) -> Text:
    """Set words between backticks apart; where there are no colours the backticks stay."""
    styled = Text()
    place = 0
    for match in _CODE.finditer(text):
        styled.append(text[place : match.start()])
        styled.append(match[0], style="bold")
        place = match.end()
    return styled.append(text[place:])


def _padded(text: str, width: int) -> str:
    """Fill up with spaces; a Chinese character is two cells wide."""
    return text + " " * (width - cell_len(text))
