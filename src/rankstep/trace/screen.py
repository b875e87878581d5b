"""The tables of a trace, drawn by rich."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from rankstep.trace.summary import PHASE_WORDS, ms

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rankstep.trace.overlap import Parts
    from rankstep.trace.summary import BucketSummary, Summary

STEPS_SHOWN = 24
RANKS_SHOWN = 32
_PARTS = ("step", "compute", "exposed", "waiting", "data", "other", "hidden")


def tables(summary: Summary) -> Iterable[Table]:
    """Draw the ranks, the steps and the buckets; long ones are cut, ``--json`` has everything.

    Args:
        summary: What to show.
    """
    yield _ranks(summary)
    if len(summary.steps) > 1:
        yield _steps(summary)
    if summary.buckets:
        yield _buckets(summary)


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
            phase = "" if rank.phase is None else PHASE_WORDS[rank.phase]
            where = f"{rank.host} {rank.device}{'' if rank.complete else ', cut off'}"
            table.add_row(str(rank.rank), *_cells(rank.parts), *late, phase, Text(where))
    _tell_cut(table, len(summary.ranks), "ranks")
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
    columns = ("bucket", "size", "fill", "delay", "peers", "flight", "exposed", "early", "holds")
    table = _table("Buckets: mean of steps and ranks", columns, len(columns) - 1)
    for bucket in summary.buckets:
        table.add_row(
            str(bucket.index),
            size(bucket.nbytes),
            *("" if ns is None else ms(ns) for ns in (bucket.fill_ns, bucket.delay_ns)),
            *(ms(ns) for ns in (bucket.peers_ns, bucket.flight_ns, bucket.exposed_ns)),
            f"{bucket.in_backward:.0%}",
            Text(_holds(bucket)),
        )
    table.columns[-1].no_wrap = False
    table.columns[-1].overflow = "fold"
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
    names = bucket.params
    if len(names) <= 2:
        return ", ".join(names)
    return f"{names[0]} .. {names[-1]} ({len(names)})"


def _tell_cut(table: Table, count: int, things: str) -> None:
    if count > table.row_count:
        table.caption = f"{table.row_count} of {count} {things}; --json has all"
        table.caption_justify = "left"


def size(nbytes: int) -> str:
    """Write a number of bytes."""
    return f"{nbytes / 2**20:.2f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"
