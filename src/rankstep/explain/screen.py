"""The story on a terminal, or as plain text in a pipe or file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from rankstep.explain.blocks import (
    Bars,
    Block,
    Chain,
    Owners,
    Paragraph,
    Table,
    Timeline,
    Verdict,
)
from rankstep.explain.texts import texts
from rankstep.explain.wrap import breaks

if TYPE_CHECKING:
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

    def show(self, block: Block) -> None:
        verdict = isinstance(block, Verdict)
        if not (verdict and self._in_verdicts):
            self._console.print()
        self._in_verdicts = verdict
        match block:
            case Paragraph():
                self._put(_styled(block.text))
            case Chain():
                self._put(Text(block.caption, style="dim"))
                for number, link in enumerate(block.links):
                    self._put(Text(f"{'  ' if number == 0 else '→ '}{link}"))
            case Table():
                self._table(block)
            case Bars():
                self._bars(block)
            case Owners():
                self._owners(block)
            case Timeline():
                self._timeline(block)
            case Verdict():
                self._verdict(block)

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

    def _bars(self, bars: Bars) -> None:
        self._put(Text(bars.caption, style="dim"))
        labels = max(cell_len(bar.label) for bar in bars.bars)
        room = max(10, self._width - labels - 16)
        for bar in bars.bars:
            line = Text(f"{_padded(bar.label, labels)}  ")
            line.append("█" * max(bar.share > 0, round(bar.share * room)), style="cyan")
            line.append(f" {bar.shown}")
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
            self._put(Text(timeline.legend.format(tick=TICK, **MARKS), style="dim"))

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
