"""Corrects clocks that drifted or jumped after they were compared, by what the collectives themselves prove.

No rank can see an all-reduce end before every rank has started it. So in each step each bucket bounds a rank's clock
against rank 0's from both sides: its start here is not after its end there, and the other way round. Where the recorded
times break a bound, the step is moved by as little as heals it, and where that is more than the clocks were said to
differ, it is told. Ranks on GPUs whose times are those of the host are left alone: there the host does not wait.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from rankstep.trace.assemble import moved, on_host
from rankstep.trace.words import ms

if TYPE_CHECKING:
    from rankstep.trace.model import RankTrace, StepTrace

SLACK_NS: Final = 1_000_000
"""So much a thread may be held up between an event and the look at the clock: no sign of a wrong clock."""


def by_collectives(ranks: tuple[RankTrace, ...]) -> tuple[tuple[RankTrace, ...], list[str]]:
    """Move the steps of all ranks but the first so that they agree with its collectives.

    Args:
        ranks: As they were read. The first one's clock is the reference.

    Returns:
        The ranks, and what had to be said about their clocks, in sentences.
    """
    if not ranks or not all(on_host(rank.device) or rank.by_device for rank in ranks):
        return ranks, []
    reference = {step.number: step for step in ranks[0].steps}
    mended, notices = [ranks[0]], []
    for rank in ranks[1:]:
        own, notice = _corrected(rank, reference)
        mended.append(own)
        if notice:
            notices.append(notice)
    return tuple(mended), notices


def _corrected(rank: RankTrace, reference: dict[int, StepTrace]) -> tuple[RankTrace, str]:
    error = rank.clock_error_ns or 0
    shift = most = 0
    first: int | None = None
    impossible = []
    steps = []
    for step in rank.steps:
        if step.number in reference:
            low, high = bounds(step, reference[step.number])
            if low > high + SLACK_NS:
                impossible.append(step.number)
            elif low <= high:
                # A shift that one rank's delay explains is none.
                slack = SLACK_NS if rank.clock_error_ns == 0 else 0
                if not low - slack <= shift <= high + slack:
                    shift = min(max(shift, low), high)
        if abs(shift) > error + SLACK_NS and first is None:
            first = step.number
        most = max(most, abs(shift))
        steps.append(moved(step, shift))
    notice = ""
    if first is not None:
        notice = (
            f"The clock of rank {rank.rank} is wrong by up to {ms(most)} from step {first} on, as its collectives prove, "
            "so its times were moved by as much."
        )
    if impossible:
        notice += (
            f"{' ' * bool(notice)}The times of rank {rank.rank} contradict those of the first rank in "
            f"{len(impossible)} steps (step {impossible[0]}, for one) whatever its clock, so who waited for whom there "
            "cannot be told."
        )
    if all(new is old for new, old in zip(steps, rank.steps, strict=True)):
        return rank, notice
    return replace(rank, steps=tuple(steps)), notice


def bounds(step: StepTrace, reference: StepTrace) -> tuple[int, int]:
    """By how much the step's times are too late: at least and at most; nothing is known where low exceeds high.

    Args:
        step: Of one rank.
        reference: The same step of the reference rank.
    """
    others = {bucket.index: bucket for bucket in reference.buckets}
    pairs = [(b, others[b.index]) for b in step.buckets if b.index in others]
    if not pairs:
        return 0, 0
    return (
        max(own.launched_ns - other.wait_end_ns for own, other in pairs),
        min(own.wait_end_ns - other.launched_ns for own, other in pairs),
    )
