"""Mends a rank's times where its clock went back, so that all of its steps can still be shown in their order.

The clock that the recorder reads never goes back on a sound machine. In a file each list of times was told in order, so
a list that descends shows a jump and, in itself, the place. What came after the jump is moved so that it follows what
came before; how much time passed between the two nobody knows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

from rankstep.trace.journal import COLUMNS, SPANS
from rankstep.trace.lines import Rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankstep.trace.lines import RankFile

TOLERANCE_NS: Final = 1_000_000
"""Threads tell of the ends of collectives, and one may be held up between its look at the clock and telling."""

JUMPS: Final = 20
"""More of them are no jumps but noise."""


def mend(file: RankFile) -> list[tuple[int, int]]:
    """Move the times after each jump, in place.

    Args:
        file: As it was read; its times on the rank's own clock.

    Returns:
        For each jump the step (as its wrapper counts) after which it was seen, and by how much the clock went back at
        least, in nanoseconds.
    """
    jumps: list[tuple[int, int]] = []
    while len(jumps) < JUMPS:
        found = _first(file)
        if found is None:
            break
        step, at, back = found
        jumps.append((step, back))
        _move(file, at)
    return jumps


def _first(file: RankFile) -> tuple[int, int, int] | None:
    """The earliest step that settled before its predecessor: that one's number and time, and the difference."""
    found = []
    for kinds in file.events.values():
        rows = [(step, at) for step, at in kinds["step_settled"]]
        found += [
            (step, at, at - after)
            for (step, at), (_, after) in pairwise(rows)
            if after < at - TOLERANCE_NS
        ]
    return min(found, key=lambda each: each[1], default=None)


def _lists(file: RankFile) -> Iterator[tuple[dict[str, Rows], str, list[int]]]:
    """Every list of rows, and which columns are times of this clock, the one that is told last at the end."""
    for kinds in file.events.values():
        for name, columns in COLUMNS.items():
            times = [i for i, c in enumerate(columns) if c in ("at_ns", "begun_ns", "host_ns")]
            yield kinds, name, times
    for name, width in SPANS.items():
        yield file.spans, name, {2: [0, 1], 3: [0, 2], 4: [0, 2]}[width]


def _move(file: RankFile, settled: int) -> None:
    """Let everything behind the jump follow what lies before it.

    Args:
        file: The file.
        settled: When the last step before the jump was settled.
    """
    cut: list[tuple[dict[str, Rows], str, list[int], list[tuple[int, ...]], int]] = []
    for kinds, name, times in _lists(file):
        rows = list(kinds[name])
        cut.append((kinds, name, times, rows, _place(rows, times[-1], settled)))
    before = [row[t] for _, _, times, rows, place in cut for row in rows[:place] for t in times]
    after = [row[t] for _, _, times, rows, place in cut for row in rows[place:] for t in times]
    shift = max(before) - min(after)
    for kinds, name, times, rows, place in cut:
        mended = [list(row) for row in rows]
        for row in mended[place:]:
            for t in times:
                row[t] += shift
        kinds[name] = Rows(kinds[name].width, (n for row in mended for n in row))


def _place(rows: list[tuple[int, ...]], told: int, settled: int) -> int:
    """Where in a list the jump is: where it descends, or else behind what was told before the last settlement."""
    for place, (one, after) in enumerate(pairwise(rows), 1):
        if after[told] < one[told] - TOLERANCE_NS:
            return place
    return next((place for place, row in enumerate(rows) if row[told] > settled), len(rows))
