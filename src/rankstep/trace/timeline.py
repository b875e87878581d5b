"""One step of all ranks, drawn with characters.

Each rank has a lane for what its host did and, below it, one or more lanes for the buckets that were under way, each
bucket with its number where there is room for it. Every column is the same stretch of time on all lanes; what filled
most of it is drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from rankstep.trace import overlap
from rankstep.trace.model import SpanKind
from rankstep.trace.words import ms

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rankstep.trace.model import Span, StepTrace, Trace

SIGNS = {
    SpanKind.DATA: "d",
    SpanKind.FORWARD: "f",
    SpanKind.BACKWARD: "b",
    SpanKind.WAIT: ".",
    SpanKind.OPTIMIZER: "o",
    SpanKind.OTHER: " ",
}
STYLES = {
    SpanKind.DATA: "yellow",
    SpanKind.FORWARD: "cyan",
    SpanKind.BACKWARD: "blue",
    SpanKind.WAIT: "red",
    SpanKind.OPTIMIZER: "green",
    SpanKind.OTHER: "",
}
COMMUNICATION = "magenta"
HELD, FLYING = "-", "="
LEGEND = "d data  f forward  b backward  . waiting  o optimizer   buckets: - launched, not by all ranks  = under way"
RANKS_SHOWN = 16
_Row = list[tuple[str, str]]


def draw(trace: Trace, number: int, width: int) -> list[Text]:
    """Draw one step.

    Args:
        trace: As it was read.
        number: Of the step; every rank must have it.
        width: Columns of the terminal.
    """
    steps = {r.rank: s for r in trace.ranks for s in r.steps if s.number == number}
    shown = dict(sorted(steps.items())[:RANKS_SHOWN])
    label = max(len(f"rank {rank} ") for rank in shown)
    columns = max(8, width - label)
    begin = min(step.begin_ns for step in shown.values())
    end = max(step.end_ns for step in shown.values())
    scale = Scale(begin, max(end, begin + 1), columns)
    started = overlap.starts(steps.values())
    lines = [Text(f"{'':{label}}{_ruler(scale)}", style="dim")]
    for rank, step in shown.items():
        lines.append(_line(f"rank {rank}".ljust(label), _host_row(step.spans, scale)))
        lines += [_line(" " * label, row) for row in _bucket_rows(step, started, scale)]
    if len(steps) > len(shown):
        lines.append(Text(f"{len(steps) - len(shown)} more ranks are not drawn", style="dim"))
    lines.append(
        Text(LEGEND if len(LEGEND) <= width else LEGEND.replace("   buckets", "\nbuckets"))
    )
    return lines


class Scale:
    """From times to columns.

    Args:
        begin_ns: The left edge.
        end_ns: The right edge.
        columns: How many.
    """

    def __init__(self, begin_ns: int, end_ns: int, columns: int) -> None:
        self.begin_ns, self.columns = begin_ns, columns
        self.ns_per_column = (end_ns - begin_ns) / columns

    def column(self, at_ns: float) -> int:
        """The column in which a moment lies."""
        place = int((at_ns - self.begin_ns) / self.ns_per_column)
        return min(max(place, 0), self.columns - 1)

    def edges(self, column: int) -> tuple[float, float]:
        """From when to when a column goes."""
        left = self.begin_ns + column * self.ns_per_column
        return left, left + self.ns_per_column


def _ruler(scale: Scale) -> str:
    """Marks at round times, as many as have room."""
    total_ns = scale.ns_per_column * scale.columns
    every = 10.0 ** len(str(int(total_ns)))
    while every / scale.ns_per_column > scale.columns / 2:
        every /= 2 if str(int(every))[0] != "5" else 2.5
    row = [" "] * scale.columns
    mark = 0.0
    while mark < total_ns:
        text = f"|{mark / 1e6:g} ms"
        place = scale.column(scale.begin_ns + mark)
        if place + len(text) <= scale.columns:
            row[place : place + len(text)] = text
        mark += max(every, 12 * scale.ns_per_column)
    return "".join(row).rstrip()


def _host_row(spans: Sequence[Span], scale: Scale) -> _Row:
    filled: list[dict[SpanKind, float]] = [{} for _ in range(scale.columns)]
    for span in spans:
        for column in range(scale.column(span.begin_ns), scale.column(span.end_ns) + 1):
            left, right = scale.edges(column)
            part = min(right, span.end_ns) - max(left, span.begin_ns)
            filled[column][span.kind] = filled[column].get(span.kind, 0.0) + part
    row: _Row = []
    for share in filled:
        kind = max(share, key=lambda each: share[each], default=SpanKind.OTHER)
        kind = kind if share.get(kind, 0.0) > 0 else SpanKind.OTHER
        row.append((SIGNS[kind], STYLES[kind]))
    return row


def _bucket_rows(step: StepTrace, started: Mapping[int, int], scale: Scale) -> Iterable[_Row]:
    """As few lanes as let no two buckets touch."""
    free: list[int] = []
    rows: list[_Row] = []
    for bucket in step.buckets:
        start = started[bucket.index]
        end = overlap.end_of_flight(bucket.finished_ns, bucket.wait_end_ns, start)
        first, flying, last = map(scale.column, (bucket.launched_ns, start, end))
        lane = next((i for i, until in enumerate(free) if until < first), len(free))
        if lane == len(free):
            free.append(-1)
            rows.append([(" ", "")] * scale.columns)
        free[lane] = last
        name = str(bucket.index)
        drawn = HELD * (flying - first) + FLYING * (last - flying + 1)
        if len(name) <= len(drawn):
            drawn = name + drawn[len(name) :]
        rows[lane][first : last + 1] = [(sign, COMMUNICATION) for sign in drawn]
    return rows


def _line(label: str, row: _Row) -> Text:
    line = Text(label, no_wrap=True)
    for sign, style in row:
        line.append(sign, style=style or None)
    line.rstrip()
    return line


def heading(trace: Trace, number: int) -> str:
    """Say which step is drawn, of which wrappers where there are several, and how long it took."""
    steps = [(r, s) for r in trace.ranks for s in r.steps if s.number == number]
    longest = max(step.end_ns - step.begin_ns for _, step in steps)
    rank, step = steps[0]
    of = f" of {' + '.join(rank.wrappers[i] for i in step.wrappers)}" * (len(rank.wrappers) > 1)
    return f"Step {number}{of}, {ms(longest)} on the slowest rank"
