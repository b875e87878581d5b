"""What a recorded run says about other buckets: which are best, and how long a step would take.

``rankstep.buckets.predict`` has the model. What it needs is read from the steps of the last plan:

* *The link.* Buckets that had it to themselves give the price of a start, by a line through the medians of their
  flights; the time for which it was busy in a step gives the price of a byte, whoever shared it.
* *The charge*: compute that is lost while the link is busy. Processor time that goes by in waits, where a rank does
  nothing but communicate, is what communication takes; it is taken from compute as far as the ranks of a host leave
  no core free. A transport whose buckets end only in a rank's own calls takes all of it.
* *When gradients would be ready* if nothing were sent: their times, without the compute that was lost on the way.

The recorded plan is predicted as well, and every other plan by its difference from that, so that whatever the model
does not know (late ranks, jitter) counts in all of them alike.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rankstep.buckets.forecast import CAPS_MIB, Outlook, simplest
from rankstep.buckets.predict import (
    MIB,
    Gradients,
    best_ends,
    cap_list,
    ends_of_caps,
    finish_ns,
)
from rankstep.trace import overlap
from rankstep.trace.flights import Flights, backward_end
from rankstep.trace.words import ms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankstep.buckets.predict import Link
    from rankstep.trace.flights import Step
    from rankstep.trace.model import Trace

STEPS = 40
"""So many steps are looked at, the last ones: medians of more say the same."""

WORTH = 0.02
"""A gain of less than 2 % is not worth a sentence of its own."""

NEAR = 0.01
"""Caps that are easy to write are proposed where they cost less than 1 % more than the best plan."""

_LISTED = 8
"""So many caps fit in a sentence."""

_OWN = 0.9
"""From 90 % on there is nothing to hide communication behind."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What other buckets would do; times in nanoseconds.

    Attributes:
        steps: How many steps it was read from.
        link: What an all-reduce costs.
        knows_start: The price of a start was read; False: no two buckets of different size travelled alone, so that a
            usual one was taken.
        recorded: The plan of the run, and how long its steps took.
        model_ns: How long the model says that they take.
        best: The best buckets.
        others: Caps of ``CAPS_MIB``.
        proposal: What to write: the best buckets, or caps that do nearly as well.
    """

    steps: int
    link: Link
    knows_start: bool
    recorded: Outlook
    model_ns: float
    best: Outlook
    others: tuple[Outlook, ...]
    proposal: Outlook

    @property
    def gain(self) -> float:
        """By which share of the recorded step the proposal is shorter; below 0 it is longer."""
        return 1 - self.proposal.step_ns / self.recorded.step_ns


def advise(trace: Trace, counted: Sequence[int]) -> Advice | str:
    """Predict a step with other buckets.

    Args:
        trace: As it was read.
        counted: Numbers of the steps that count.

    Returns:
        The prediction, or why there is none, in a sentence; an empty one where nobody expects it.
    """
    first = trace.ranks[0]
    if trace.world_size == 1 or not first.buckets or len(first.param_bytes) != len(first.params):
        return ""
    why = _unfit(trace)
    if why:
        return f"What other buckets would do cannot be told: {why}."
    steps = _usable(trace, counted)
    if not steps:
        return "What other buckets would do cannot be told: no step after the first was recorded."
    reading = _Reading(trace, steps)
    if reading.flights.link is None:
        return "What other buckets would do cannot be told: when buckets ended was not recorded, and no rank waited for any."
    return reading.advice(reading.flights.link)


def _unfit(trace: Trace) -> str:
    """Why no prediction can be made of this trace; empty: it can."""
    if len(trace.ranks) < trace.world_size:
        return "files of some ranks are missing"
    if any(len(rank.wrappers) > 1 for rank in trace.ranks):
        return "the run has several wrappers, and their buckets share one link"
    if any(not rank.device.startswith("cpu") and not rank.by_device for rank in trace.ranks):
        return 'on a GPU the host does not see when gradients are ready; bucket_cap_mb="auto" measures on the device'
    if any(rank.clock_error_ns is None for rank in trace.ranks):
        return "the ranks' clocks could not be compared"
    return ""


def _usable(trace: Trace, counted: Sequence[int]) -> list[Step]:
    """The steps of the last plan in which every rank saw its gradients become ready, each by rank."""
    by_rank = {rank.rank: {step.number: step for step in rank.steps} for rank in trace.ranks}
    steps = [{rank: own[number] for rank, own in by_rank.items()} for number in counted]
    steps = [each for each in steps if all(s.ready and s.buckets for s in each.values())]
    plans = [
        {tuple(sorted(bucket.index for bucket in s.buckets)) for s in each.values()}
        for each in steps
    ]
    return [each for each, plan in zip(steps, plans, strict=True) if plan == plans[-1]][-STEPS:]


class _Reading:
    """The steps, read as the model needs them.

    Args:
        trace: As it was read.
        steps: Of one plan, at least one.
    """

    def __init__(self, trace: Trace, steps: Sequence[Step]) -> None:
        self._first = trace.ranks[0]
        self._steps = steps
        self.flights = Flights(trace, steps)
        buckets = [self._first.buckets[index] for index in self.flights.launched]
        self._order = [param for bucket in buckets for param in bucket.params]
        self._ends = list(itertools.accumulate(len(bucket.params) for bucket in buckets))

    def advice(self, link: Link) -> Advice:
        gradients = self._gradients(link.charge)
        recorded_ns = statistics.fmean(
            s.end_ns - s.begin_ns for step in self._steps for s in step.values()
        )
        as_recorded = finish_ns(gradients.buckets(self._ends), link)

        def outlook(caps: tuple[float, ...], its_ends: Sequence[int]) -> Outlook:
            changed = finish_ns(gradients.buckets(its_ends), link) - as_recorded
            return Outlook(caps, len(its_ends), recorded_ns + changed)

        best_at = best_ends(gradients, link)
        best = outlook(cap_list(gradients.nbytes, best_at), best_at)
        others = tuple(
            outlook((float(cap),), ends_of_caps(gradients.nbytes, [cap * MIB])) for cap in CAPS_MIB
        )
        return Advice(
            steps=len(self._steps),
            link=link,
            knows_start=self.flights.knows_start,
            recorded=Outlook(cap_list(gradients.nbytes, self._ends), len(self._ends), recorded_ns),
            model_ns=self._outside_ns(link.charge) + as_recorded,
            best=best,
            others=others,
            proposal=simplest(best, others, NEAR),
        )

    def _gradients(self, charge: float) -> Gradients:
        """When gradients would be ready without communication, counted from the end of backward."""
        lead: dict[int, list[float]] = {}
        for step, busy in zip(self._steps, self.flights.busy, strict=True):
            end = backward_end(step)
            ready: dict[int, int] = {}
            for own in step.values():
                for param, at in own.ready:
                    ready[param] = max(at, ready.get(param, at))
            for param, at in ready.items():
                lost = charge * overlap.overlap(busy, [(at, end)]) if charge else 0.0
                lead.setdefault(param, []).append(end - at - lost)
        times = {param: -statistics.median(leads) for param, leads in lead.items()}
        earliest = min(times.values())
        nbytes = self._first.param_bytes
        return Gradients(
            # One that was never used is not waited for.
            tuple(times.get(param, earliest) for param in self._order),
            tuple(nbytes[param] for param in self._order),
            0.0,
        )

    def _outside_ns(self, charge: float) -> float:
        """What of a step the model does not tell of: what comes before the end of backward, and after the waits."""
        outside = []
        for step, busy in zip(self._steps, self.flights.busy, strict=True):
            end = backward_end(step)
            through = max(b.wait_end_ns for s in step.values() for b in s.buckets)
            whole = statistics.fmean(s.end_ns - s.begin_ns for s in step.values())
            lost = charge * overlap.overlap(busy, [(busy[0][0], end)]) if busy else 0.0
            outside.append(whole - (through - end) - lost)
        return statistics.median(outside)


def as_dict(advice: Advice | str) -> dict[str, Any] | None:
    """The same as JSON takes it; None: nothing is to be told."""
    if isinstance(advice, str):
        return {"why_not": advice} if advice else None
    told = asdict(advice) | {"gain": advice.gain}
    for name in ("best", "proposal"):
        told[name]["argument"] = getattr(advice, name).argument
    return told


def sentence(advice: Advice | str) -> str:
    """Tell it in a sentence."""
    if isinstance(advice, str):
        return advice
    best = ms(advice.best.step_ns)
    if advice.gain < WORTH:
        why = (
            ", since communication takes the ranks' own cores" if advice.link.charge > _OWN else ""
        )
        return f"Other buckets would gain next to nothing{why}: the best would make it {best}."
    caps = advice.proposal.caps_mib
    what = advice.proposal.argument
    if len(caps) > _LISTED:
        what = (
            f"{len(caps)} buckets of {min(caps):.3g} to {max(caps):.3g} MiB (the report lists them)"
        )
    told = f"With {what} the step would take about {ms(advice.proposal.step_ns)}, {advice.gain:.0%} less"
    if advice.knows_start:
        return f"{told}."
    return (
        f"{told}, if starting a bucket costs {ms(advice.link.start_ns)}: no two recorded buckets of different size "
        "travelled alone, which would tell."
    )
