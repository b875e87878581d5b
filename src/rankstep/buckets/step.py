"""What a step did, as a record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankstep.buckets.bucket import Kept
    from rankstep.buckets.plan import ParamSpec


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the last settled backward did.

    Attributes:
        step: Its number, counted from 0.
        buckets: How many buckets there are.
        all_reduces: How many all-reduces it took; a broadcast of the order in the first step is not counted.
        launched_in_backward: Buckets that left while other buckets still lacked gradients.
        unused: Names of the parameters that no rank used.
        second_round: Whether late gradients made a second round necessary.
    """

    step: int
    buckets: int
    all_reduces: int
    launched_in_backward: int
    unused: tuple[str, ...]
    second_round: bool


@dataclass(slots=True)
class Step:
    """What has happened in the step under way.

    Attributes:
        next_bucket: The lowest bucket that has not left.
        in_backward: Buckets that left while others lacked gradients.
        all_reduces: Collectives so far.
        unused: Parameters that this rank did not use, with what they had before.
        late: Parameters that fired after their bucket had left.
        used: On how many ranks each parameter was used, where that was read.
        nowhere: Parameters that no rank used.
        second_round: Late gradients were reduced on their own.
        changed: This rank's module has other trainable parameters than were wrapped.
        nonfinite: The first parameter whose local gradient was NaN or infinite, where that is looked for.
    """

    next_bucket: int = 0
    in_backward: int = 0
    all_reduces: int = 0
    unused: dict[int, Kept] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)
    used: list[int] | None = None
    nowhere: tuple[int, ...] = ()
    second_round: bool = False
    changed: bool = False
    nonfinite: int | None = None

    def used_flags(self, count: int, *, gives: bool) -> list[int] | None:
        """One 0 or 1 per parameter: whether this rank used it; None: it used all of them.

        Args:
            count: How many parameters there are.
            gives: False: this rank has no part in the gradients.
        """
        if not gives:
            return [0] * count
        if not self.unused:
            return None
        late = set(self.late)
        return [int(index not in self.unused or index in late) for index in range(count)]

    def facts(self, number: int, specs: Sequence[ParamSpec], buckets: int) -> StepFacts:
        """The record of this step, once it is over.

        Args:
            number: Which synced backward it was.
            specs: The parameters, for their names.
            buckets: How many buckets there are.
        """
        return StepFacts(
            step=number,
            buckets=buckets,
            all_reduces=self.all_reduces,
            launched_in_backward=self.in_backward,
            unused=tuple(specs[i].name for i in self.nowhere),
            second_round=self.second_round,
        )
