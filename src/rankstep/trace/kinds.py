"""Steps of several kinds: wrappers that take turns, as a discriminator and a generator do, are told apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankstep.trace.overlap import Parts
from rankstep.trace.words import ms, plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankstep.trace.model import Trace

KINDS_TOLD = 4


@dataclass(frozen=True, slots=True)
class KindSummary:
    """Steps that reduced the gradients of the same wrappers, mean over them and all ranks.

    Attributes:
        wrappers: What they are called.
        steps: How many such steps count.
        parts: What they were spent on.
    """

    wrappers: tuple[str, ...]
    steps: int
    parts: Parts

    @property
    def name(self) -> str:
        """What such a step is called."""
        return " + ".join(self.wrappers)


def summarize_kinds(
    trace: Trace, told: Mapping[int, Mapping[int, Parts]], counted: Sequence[int]
) -> tuple[KindSummary, ...]:
    """Put the steps of each kind into figures, in the order in which they first come.

    Args:
        trace: As it was read.
        told: For each step and rank what it was spent on.
        counted: The steps that count.
    """
    of = {step.number: step.wrappers for rank in trace.ranks for step in rank.steps}
    by_kind: dict[tuple[int, ...], list[int]] = {}
    for number in counted:
        by_kind.setdefault(of[number], []).append(number)
    names = max((rank.wrappers for rank in trace.ranks), key=len)
    return tuple(
        KindSummary(
            tuple(names[place] if place < len(names) else str(place) for place in kind),
            len(numbers),
            Parts.mean([parts for number in numbers for parts in told[number].values()]),
        )
        for kind, numbers in by_kind.items()
    )


def sentence(kinds: Sequence[KindSummary]) -> str:
    """Tell the kinds apart in a sentence; nothing where all steps are of one kind."""
    if len(kinds) < 2:
        return ""
    each = []
    for kind in kinds[:KINDS_TOLD]:
        share = kind.parts.hidden_share
        hidden = "" if share is None else f", {share:.0%} of communication hidden"
        each.append(
            f"{kind.name} ({plural(kind.steps, 'step')} of {ms(kind.parts.step_ns)}{hidden})"
        )
    more = f" and {len(kinds) - KINDS_TOLD} more" if len(kinds) > KINDS_TOLD else ""
    return f"These are steps of {len(kinds)} kinds: {'; '.join(each)}{more}."
