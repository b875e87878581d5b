"""The arithmetic of a step: what its time was spent on. ``docs/tracing.md`` tells the same in words.

Of one rank and one step, in whole nanoseconds:

* *data*: waiting for a batch. *compute*: forward, backward and optimizer, without what follows.
* Waits for buckets at the end of backward fall into two parts. A bucket *starts* when the last rank has launched it.
  What a rank waits before that is *waiting* for the slowest rank, what it waits afterwards is *exposed* communication.
* *other*: the rest. compute + exposed + waiting + data + other is the step, exactly.
* *hidden* communication is no sixth part but a part of compute: the time in which at least one started bucket was under
  way while this rank computed. What is hidden of all communication is hidden / (hidden + exposed).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankstep.trace.model import SpanKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rankstep.trace.model import RankTrace, StepTrace

COMPUTE = (SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.OPTIMIZER)
PHASES = (*COMPUTE, SpanKind.DATA, SpanKind.OTHER)


@dataclass(frozen=True, slots=True)
class Parts:
    """What one rank's step was spent on, in nanoseconds; ``hidden_ns`` lies inside ``compute_ns``."""

    compute_ns: float
    hidden_ns: float
    exposed_ns: float
    waiting_ns: float
    data_ns: float
    other_ns: float

    @property
    def step_ns(self) -> float:
        """The whole step."""
        return self.compute_ns + self.exposed_ns + self.waiting_ns + self.data_ns + self.other_ns

    @property
    def hidden_share(self) -> float | None:
        """How much of the communication was hidden, 0 to 1; None: there was none."""
        communication = self.hidden_ns + self.exposed_ns
        return self.hidden_ns / communication if communication else None

    @classmethod
    def mean(cls, many: Sequence[Parts]) -> Parts:
        """The mean of each; the means add up as their parts do."""
        return cls(
            *(
                statistics.fmean(getattr(parts, name) for parts in many)
                for name in cls.__dataclass_fields__
            )
        )


@dataclass(frozen=True, slots=True)
class BucketFigures:
    """One bucket in one step on one rank, in nanoseconds.

    Attributes:
        index: Which bucket.
        fill_ns: From its first gradient to its last; None: not recorded.
        delay_ns: From being full to leaving: lower buckets were not full, or backward had to end; None: not recorded.
        peers_ns: From leaving here to leaving on the last rank.
        flight_ns: From then to its end.
        exposed_ns: The part of its flight in which this rank waited for it.
    """

    index: int
    fill_ns: float | None
    delay_ns: float | None
    peers_ns: float
    flight_ns: float
    exposed_ns: float


@dataclass(frozen=True, slots=True)
class Last:
    """Which rank was last in a step.

    Attributes:
        rank: It launched the step's last bucket after all others.
        late_ns: By how much, against the median of the others.
        phase: In which it lost most of that, against the median of the others.
    """

    rank: int
    late_ns: float
    phase: SpanKind


def starts(steps: Iterable[StepTrace]) -> dict[int, int]:
    """When each bucket started, by its index: the last rank had launched it.

    Args:
        steps: The same step of all ranks, whose plans are the same.
    """
    launched: dict[int, int] = {}
    for step in steps:
        for bucket in step.buckets:
            at = launched.get(bucket.index, bucket.launched_ns)
            launched[bucket.index] = max(at, bucket.launched_ns)
    return launched


def end_of_flight(finished_ns: int | None, wait_end_ns: int, started_ns: int) -> int:
    """When a bucket was through; where the backend does not tell, at the latest when the wait for it ended."""
    return max(started_ns, wait_end_ns if finished_ns is None else finished_ns)


def parts(step: StepTrace, started: Mapping[int, int]) -> Parts:
    """Say what a step was spent on.

    Args:
        step: Of one rank.
        started: When its buckets started, from :func:`starts`.
    """
    spent = dict.fromkeys(SpanKind, 0)
    for span in step.spans:
        spent[span.kind] += span.end_ns - span.begin_ns
    waits = merged((s.begin_ns, s.end_ns) for s in step.spans if s.kind is SpanKind.WAIT)
    before = merged(
        (bucket.wait_begin_ns, min(bucket.wait_end_ns, started[bucket.index]))
        for bucket in step.buckets
    )
    waiting = overlap(waits, before)
    flights = merged(
        (start, end_of_flight(bucket.finished_ns, bucket.wait_end_ns, start))
        for bucket in step.buckets
        for start in (started[bucket.index],)
    )
    computing = merged((s.begin_ns, s.end_ns) for s in step.spans if s.kind in COMPUTE)
    return Parts(
        compute_ns=sum(spent[kind] for kind in COMPUTE),
        hidden_ns=overlap(flights, computing),
        exposed_ns=spent[SpanKind.WAIT] - waiting,
        waiting_ns=waiting,
        data_ns=spent[SpanKind.DATA],
        other_ns=spent[SpanKind.OTHER],
    )


def bucket_figures(
    step: StepTrace, started: Mapping[int, int], params: Sequence[Sequence[int]]
) -> list[BucketFigures]:
    """Say what each bucket of a step did.

    Args:
        step: Of one rank.
        started: When its buckets started, from :func:`starts`.
        params: For each bucket of the rank's plan its parameters.
    """
    first: dict[int, int] = {}
    for param, at_ns in step.ready:
        first.setdefault(param, at_ns)
    figures = []
    for bucket in step.buckets:
        start = started[bucket.index]
        ready = [first[i] for i in params[bucket.index] if i in first]
        filled = bucket.filled_ns
        end = end_of_flight(bucket.finished_ns, bucket.wait_end_ns, start)
        figures.append(
            BucketFigures(
                index=bucket.index,
                fill_ns=None if filled is None or not ready else filled - min(ready),
                delay_ns=None if filled is None else bucket.launched_ns - filled,
                peers_ns=start - bucket.launched_ns,
                flight_ns=end - start,
                exposed_ns=overlap([(start, end)], [(bucket.wait_begin_ns, bucket.wait_end_ns)]),
            )
        )
    return figures


def last(steps: Mapping[int, StepTrace], before: Mapping[int, StepTrace]) -> Last | None:
    """Say who was last in a step, by how much, and what it did meanwhile; None: there is nobody to compare with.

    The ranks stood side by side when the waits of the step before ended. Since then each spent its time on some phases
    until it launched its last bucket; the phase in which the last rank exceeds the median of the others most is named.

    Args:
        steps: The same step of all ranks, by rank.
        before: The step before it.
    """
    arrived = {rank: step.buckets[-1].launched_ns for rank, step in steps.items() if step.buckets}
    if len(arrived) < 2:
        return None
    rank = max(arrived, key=lambda each: (arrived[each], -each))
    others = [each for each in arrived if each != rank]
    late = arrived[rank] - statistics.median(arrived[each] for each in others)
    spent = {each: _phases(steps[each], before.get(each), arrived[each]) for each in arrived}
    phase = max(
        PHASES,
        key=lambda kind: (
            spent[rank][kind] - statistics.median(spent[each][kind] for each in others)
        ),
    )
    return Last(rank, late, phase)


def _phases(step: StepTrace, before: StepTrace | None, until_ns: int) -> dict[SpanKind, int]:
    spent = dict.fromkeys(SpanKind, 0)
    spans = list(step.spans)
    if before is not None:
        waits = [place for place, s in enumerate(before.spans) if s.kind is SpanKind.WAIT]
        spans[:0] = before.spans[waits[-1] + 1 if waits else len(before.spans) :]
    for span in spans:
        spent[span.kind] += max(0, min(span.end_ns, until_ns) - span.begin_ns)
    return spent


# ---------------------------------------------------------------- sets of time


def merged(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of intervals, in order; empty and reversed ones count for nothing."""
    union: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union


def overlap(some: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> int:
    """How long two unions coincide, in nanoseconds; both as :func:`merged` returns them."""
    total = place = 0
    for begin, end in some:
        while place < len(others) and others[place][1] <= begin:
            place += 1
        at = place
        while at < len(others) and others[at][0] < end:
            total += min(end, others[at][1]) - max(begin, others[at][0])
            at += 1
    return total


def common_steps(ranks: Sequence[RankTrace]) -> list[int]:
    """The numbers of the steps that every rank has, in order."""
    if not ranks:
        return []
    numbers = set.intersection(*({step.number for step in rank.steps} for rank in ranks))
    return sorted(numbers)
