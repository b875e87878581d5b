"""What the recorded flights of buckets say about the link: when it was busy, and how much computing that cost."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING

from rankstep.buckets.predict import Link, as_charge, fit_link, tells_start
from rankstep.trace import overlap
from rankstep.trace.model import SpanKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankstep.trace.model import BucketTrace, RankTrace, StepTrace, Trace

WAITED_NS = 20_000
"""A shorter wait only found out that a bucket had ended before; when, it does not tell."""

USUAL_START_NS = 300_000
"""Where nothing tells what starting an all-reduce costs: between that of sockets and that of a cluster of many hosts."""

ENOUGH, HARDLY = 5, 0.1
"""If fewer than a tenth of at least five buckets ended while there was time, that is no chance."""

Step = dict[int, "StepTrace"]
"""The same step of all ranks, by rank."""


class Flights:
    """The flights of one plan's buckets.

    Args:
        trace: As it was read.
        steps: Of one plan, at least one.

    Attributes:
        launched: The buckets in launch order.
        busy: For each step, when the link was busy.
        lazy: The transport moves bytes only while a rank calls it; flights then begin with the next call.
        knows_start: Buckets that travelled alone tell the price of a start from that of bytes.
        link: What an all-reduce costs; None: no end of a bucket is known.
    """

    def __init__(self, trace: Trace, steps: Sequence[Step]) -> None:
        self._steps = steps
        first = trace.ranks[0]
        self.launched = [bucket.index for bucket in steps[-1][first.rank].buckets]
        self._nbytes = {index: first.buckets[index].nbytes for index in self.launched}
        self.lazy = False
        self._read()
        if self._is_lazy():
            self.lazy = True
            self._read()
        self.knows_start = False
        self.link = self._read_link(self._read_charge(trace))

    def _read(self) -> None:
        self._ends_known = False
        self._flights = [self._read_step(step) for step in self._steps]
        self.busy = [overlap.merged(flights) for flights in self._flights]

    def _read_step(self, step: Step) -> list[tuple[int, int]]:
        """When each bucket was in flight, in launch order."""
        started = overlap.starts(step.values())
        flights = []
        free_at = 0
        for index in self.launched:
            own = [b for s in step.values() for b in s.buckets if b.index == index]
            ends = [
                b.wait_end_ns if b.finished_ns is None else b.finished_ns for b in own if _told(b)
            ]
            begin = started[index]
            if self.lazy:
                # What one thread moves, it moves one after the other.
                begin = max(begin, free_at, *(_next_call(own, index) for own in step.values()))
            end = max(begin, min(ends or (b.wait_end_ns for b in own)))
            self._ends_known = self._ends_known or bool(ends)
            flights.append((begin, end))
            free_at = end
        return flights

    def _read_link(self, charge: float) -> Link | None:
        """Buckets that travel side by side share the link, so only their sum tells what bytes cost."""
        if not self._ends_known:
            return None
        total = statistics.median(sum(end - begin for begin, end in busy) for busy in self.busy)
        alone = self._alone(hidden=self.lazy or charge < 1.0)
        self.knows_start = tells_start(nbytes for nbytes, _ in alone)
        start = fit_link(alone).start_ns if self.knows_start else USUAL_START_NS
        start = min(start, total / len(self.launched))
        nbytes = sum(self._nbytes.values())
        byte = (total - start * len(self.launched)) / nbytes if nbytes else 0.0
        return Link(start, byte, charge)

    def _alone(self, *, hidden: bool) -> list[tuple[float, float]]:
        """(bytes, time) of buckets that had the link to themselves, medians over steps.

        Args:
            hidden: Also of those that travelled during backward; where the cores are shared that made them slower.
        """
        times: dict[int, list[int]] = {}
        for step, flights in zip(self._steps, self._flights, strict=True):
            after = backward_end(step)
            for place, (begin, end) in enumerate(flights):
                others = flights[:place] + flights[place + 1 :]
                alone = all(end <= b or begin >= e for b, e in others)
                if alone and end > begin and (hidden or begin >= after):
                    times.setdefault(self.launched[place], []).append(end - begin)
        return [
            (float(self._nbytes[index]), statistics.median(each)) for index, each in times.items()
        ]

    def _is_lazy(self) -> bool:
        """Buckets do not end before the rank's next call to the transport, although there would have been time.

        How long they need is known from those that travelled after the end of backward.
        """
        exposed = [
            (end - begin) / self._nbytes[index]
            for step, index, (begin, end) in self._each()
            if begin >= backward_end(step) and self._nbytes[index]
        ]
        if not exposed:
            return False
        rate = statistics.median(exposed)
        by_itself = [
            bucket.finished_ns < until
            for step, index, (begin, _) in self._each()
            for own in step.values()
            for bucket in own.buckets
            if bucket.index == index and bucket.finished_ns is not None
            for until in (_next_call(own, index),)
            if until - begin > 2 * rate * self._nbytes[index] + WAITED_NS
        ]
        return len(by_itself) >= ENOUGH and sum(by_itself) < HARDLY * len(by_itself)

    def _each(self) -> Iterator[tuple[Step, int, tuple[int, int]]]:
        for step, flights in zip(self._steps, self._flights, strict=True):
            for index, flight in zip(self.launched, flights, strict=True):
                yield step, index, flight

    def _read_charge(self, trace: Trace) -> float:
        """How much of the time in which the link is busy is lost for computing, 0 to 1."""
        if not all(rank.device.startswith("cpu") for rank in trace.ranks):
            return 0.0
        if self.lazy:
            return 1.0
        spent = waited = 0
        for step in self._steps:
            # The others may only have waited for it.
            last = max(step.values(), key=lambda s: s.buckets[-1].launched_ns)
            if last.wait_cpu_ns is not None:
                spent += last.wait_cpu_ns
                waited += sum(
                    span.end_ns - span.begin_ns for span in last.spans if span.kind is SpanKind.WAIT
                )
        hosts = Counter(rank.host for rank in trace.ranks)
        # Where it is not known, sockets of one host take it all and a network takes nothing.
        share = as_charge(spent / waited) if waited else float(len(hosts) == 1)
        return share * max(crowded(rank, hosts[rank.host]) for rank in trace.ranks)


def _told(bucket: BucketTrace) -> bool:
    """Whether its end is known: the backend told it, or this rank waited for it."""
    return bucket.finished_ns is not None or bucket.wait_end_ns - bucket.wait_begin_ns > WAITED_NS


def _next_call(step: StepTrace, index: int) -> int:
    """When a rank calls the transport for the next bucket; the last one is sent in calls that follow at once."""
    launched = [bucket.launched_ns for bucket in step.buckets]
    place = next(i for i, bucket in enumerate(step.buckets) if bucket.index == index)
    return launched[min(place + 1, len(launched) - 1)]


def backward_end(step: Step) -> int:
    """When backward had ended on the slowest rank: its last bucket leaves then."""
    return max(own.buckets[-1].launched_ns for own in step.values())


def crowded(rank: RankTrace, ranks: int) -> float:
    """How much of what communication takes is taken from a rank's own cores: 0, each rank has one to spare; 1, none has.

    Args:
        rank: One of the ranks of a host.
        ranks: How many there are on that host.
    """
    if not rank.cores:
        return 1.0
    spare = (rank.cores - ranks * max(1, rank.threads)) / ranks
    return 1.0 - min(1.0, max(0.0, spare))
