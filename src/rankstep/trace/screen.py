"""The tables of a trace, drawn by rich."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from rankstep.trace.advice import Advice
from rankstep.trace.model import SpanKind
from rankstep.trace.summary import PHASE_WORDS
from rankstep.trace.words import ms, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rankstep.trace.overlap import Parts
    from rankstep.trace.summary import BucketSummary, Summary

STEPS_SHOWN = 24
RANKS_SHOWN = 32
KINDS_SHOWN = 16
_PHASES = {SpanKind.OTHER: "other code", SpanKind.OPTIMIZER: "optimizer"}
"""Where they are shorter: in a table there is little room."""
_PARTS = ("step", "compute", "exposed", "waiting", "data", "other", "hidden")


def tables(summary: Summary) -> Iterable[Table]:
    """Draw the ranks, the steps and the buckets; long ones are cut, ``--json`` has everything.

    Args:
        summary: What to show.
    """
    yield _ranks(summary)
    if len(summary.kinds) > 1:
        yield _kinds(summary)
    if len(summary.steps) > 1:
        yield _steps(summary)
    if summary.buckets:
        yield _buckets(summary)
    if isinstance(summary.advice, Advice):
        yield _advice(summary.advice)


def _table(title: str, columns: Sequence[str], left: int) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1))
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place in (0, left) else "right", no_wrap=True)
    return table


def _ranks(summary: Summary) -> Table:
    columns = ("rank", *_PARTS, "last", "late", "mostly in", "on")
    table = _table("Ranks: mean of their steps", columns, len(columns) - 1)
    slowest = sorted(summary.ranks, key=lambda rank: -rank.last * rank.late_ns)
    kept = {rank.rank for rank in slowest[:RANKS_SHOWN]}
    for rank in summary.ranks:
        if rank.rank in kept:
            late = (f"{rank.last:.0%}", ms(rank.late_ns)) if rank.last else ("0%", "")
            phase = "" if rank.phase is None else _PHASES.get(rank.phase, PHASE_WORDS[rank.phase])
            where = f"{rank.host} {rank.device}{'' if rank.complete else ', cut off'}"
            table.add_row(str(rank.rank), *_cells(rank.parts), *late, phase, Text(where))
    _tell_cut(table, len(summary.ranks), "ranks")
    return table


def _kinds(summary: Summary) -> Table:
    table = _table("Kinds of steps: mean of them and the ranks", ("of", "steps", *_PARTS), -1)
    for kind in summary.kinds[:KINDS_SHOWN]:
        table.add_row(Text(kind.name), str(kind.steps), *_cells(kind.parts))
    _tell_cut(table, len(summary.kinds), "kinds")
    return table


def _steps(summary: Summary) -> Table:
    table = _table("Steps: mean of the ranks", ("step", *_PARTS[1:], "total", "last", "late"), -1)
    for step in summary.steps[:STEPS_SHOWN]:
        total, *cells = _cells(step.parts)
        last = "" if step.last is None else f"rank {step.last}"
        late = "" if step.last is None else ms(step.late_ns)
        table.add_row(str(step.number), *cells, total, last, late)
    _tell_cut(table, len(summary.steps), "steps")
    return table


def _buckets(summary: Summary) -> Table:
    of = ("of",) * any(bucket.wrapper for bucket in summary.buckets)
    figures = ("size", "fill", "delay", "peers", "flight", "exposed", "early")
    columns = ("bucket", *of, *figures, "holds")
    table = _table("Buckets: mean of steps and ranks", columns, len(columns) - 1)
    for bucket in summary.buckets:
        table.add_row(
            str(bucket.index),
            *(Text(bucket.wrapper) for _ in of),
            size(bucket.nbytes),
            *("" if ns is None else ms(ns) for ns in (bucket.fill_ns, bucket.delay_ns)),
            *(ms(ns) for ns in (bucket.peers_ns, bucket.flight_ns, bucket.exposed_ns)),
            f"{bucket.in_backward:.0%}",
            Text(_holds(bucket)),
        )
    for _ in of:
        table.columns[1].justify = "left"
    table.columns[-1].no_wrap = False
    table.columns[-1].overflow = "fold"
    return table


def _advice(advice: Advice) -> Table:
    """What steps would take with other buckets, and how to get them."""
    table = _table(
        "Buckets that were not tried: steps predicted",
        ("caps", "buckets", "step", "of recorded", "write"),
        4,
    )
    rows = [("as recorded", advice.recorded), ("best", advice.best)]
    rows += [(f"{one.caps_mib[0]:g} MiB", one) for one in advice.others]
    for name, one in rows:
        share = f"{one.step_ns / advice.recorded.step_ns:.0%}"
        argument = "" if one is advice.recorded else one.argument
        table.add_row(name, str(one.buckets), ms(one.step_ns), share, Text(argument))
    table.columns[-1].no_wrap = False
    table.columns[-1].overflow = "fold"
    link = advice.link
    lost = f", {link.charge:.0%} of it lost for computing" if link.charge else ""
    start = "" if advice.knows_start else " (taken as usual)"
    table.caption = (
        f"an all-reduce takes {ms(link.start_ns)}{start} + {ms(link.byte_ns * 2**20)} per MiB{lost}; the model makes the recorded step "
        f"{ms(advice.model_ns)}"
    )
    table.caption_justify = "left"
    return table


def _cells(parts: Parts) -> list[str]:
    share = parts.hidden_share
    times = (
        parts.step_ns,
        parts.compute_ns,
        parts.exposed_ns,
        parts.waiting_ns,
        parts.data_ns,
        parts.other_ns,
    )
    return [*map(ms, times), "" if share is None else f"{share:.0%}"]


def _holds(bucket: BucketSummary) -> str:
    # With several wrappers a column of its own says whose they are.
    names = [name.removeprefix(f"{bucket.wrapper}: ") for name in bucket.params]
    if len(names) <= 2:
        return ", ".join(names)
    return f"{names[0]} .. {names[-1]} ({len(names)})"


def _tell_cut(table: Table, count: int, things: str) -> None:
    if count > table.row_count:
        table.caption = f"{table.row_count} of {count} {things}; --json has all"
        table.caption_justify = "left"
