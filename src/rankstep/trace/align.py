"""Corrects clocks that drifted or jumped after they were compared, by what the collectives themselves prove.

No rank can see an all-reduce end before every rank has started it. So in each step each bucket bounds a rank's clock
against rank 0's from both sides: its start here is not after its end there, and the other way round. Where the recorded
times break a bound, the step is moved by as little as heals it. Ranks that read one and the same clock are left alone,
and so are those on GPUs, where the host does not wait.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankstep.trace.assemble import moved, on_host

if TYPE_CHECKING:
    from rankstep.trace.model import RankTrace, StepTrace


def by_collectives(ranks: tuple[RankTrace, ...]) -> tuple[RankTrace, ...]:
    """Move the steps of all ranks but the first so that they agree with its collectives.

    Args:
        ranks: As they were read. The first one's clock is the reference.
    """
    if not ranks:
        return ranks
    if not on_host(ranks[0].device):
        return ranks
    reference = {step.number: step for step in ranks[0].steps}
    return (ranks[0], *(_corrected(rank, reference) for rank in ranks[1:]))


def _corrected(rank: RankTrace, reference: dict[int, StepTrace]) -> RankTrace:
    if rank.clock_error_ns == 0:
        return rank
    shift = 0
    steps = []
    for step in rank.steps:
        if step.number in reference:
            low, high = bounds(step, reference[step.number])
            if low <= high:
                shift = min(max(shift, low), high)
        steps.append(moved(step, shift))
    if all(new is old for new, old in zip(steps, rank.steps, strict=True)):
        return rank
    return replace(rank, steps=tuple(steps))


def bounds(step: StepTrace, reference: StepTrace) -> tuple[int, int]:
    """By how much the step's times are too late: at least and at most; nothing is known where low exceeds high.

    Args:
        step: Of one rank.
        reference: The same step of the reference rank.
    """
    lows, highs = [], []
    for own, other in zip(step.buckets, reference.buckets, strict=False):
        lows.append(own.launched_ns - other.wait_end_ns)
        highs.append(own.wait_end_ns - other.launched_ns)
    return (max(lows), min(highs)) if lows else (0, 0)
