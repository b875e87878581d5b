"""What measured steps were like over all ranks, and what they say about other buckets; pure.

All times are in nanoseconds and count from where the step before had settled. The ranks settle together, because each
waits for the last bucket, so such times of different ranks can be compared without comparing clocks.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankstep.buckets.predict import Gradients, Link, best_ends, finish_ns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankstep.buckets.plan import ParamSpec, Plan

NONE = -1
"""In a row: this rank has no such time."""

PER_STEP = 3
"""Numbers of a step in a row: backward's end, the time for sending, the whole step."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps in which all gradients left together at the end of backward.

    Attributes:
        end_ns: Backward had ended on the slowest rank.
        sending_ns: From there until everything was through: an all-reduce of all bytes, as it is in a step.
        step_ns: From one settlement to the next.
        ready_ns: When each parameter's gradient was ready on the slowest rank; None: it was not used.
    """

    end_ns: float
    sending_ns: float
    step_ns: float
    ready_ns: tuple[float | None, ...]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], steps: int) -> Measured | None:
        """Put the ranks' numbers together.

        Args:
            rows: For each rank ``PER_STEP`` numbers for each step, then one for each parameter.
            steps: How many steps a row tells of.

        Returns:
            None, if no rank has a whole step.
        """
        width = steps * PER_STEP
        each = [[row[at : at + PER_STEP] for at in range(0, width, PER_STEP)] for row in rows]
        # By step, of the ranks that have it.
        whole = [[s for s in same if s[0] != NONE] for same in zip(*each, strict=True)]
        whole = [same for same in whole if same]
        if not whole:
            return None
        ends = [[s[0] for s in own if s[0] != NONE] for own in each]
        ready = zip(*(row[width:] for row in rows), strict=True)
        return cls(
            end_ns=max(statistics.median(own) for own in ends if own),
            # The rank that came last waited for nobody.
            sending_ns=statistics.median(min(s[1] for s in same) for same in whole),
            step_ns=statistics.median(max(s[2] for s in same) for same in whole),
            ready_ns=tuple(None if latest == NONE else float(latest) for latest in map(max, ready)),
        )


class StepModel:
    """What a step would take with other plans.

    Args:
        link: As it was measured with nothing else to do.
        measured: Steps under ``whole``.
        specs: The parameters.
        order: Their order.
        whole: One bucket for each dtype and device, sent at the end of backward.

    Attributes:
        link: Its price of a byte is that of the measured steps: buckets of that size, with caches as a backward leaves
            them.
        compute_ns: A step without any communication.
    """

    def __init__(
        self,
        link: Link,
        measured: Measured,
        specs: Sequence[ParamSpec],
        order: Sequence[int],
        whole: Plan,
    ) -> None:
        nbytes = sum(bucket.nbytes for bucket in whole.buckets)
        start = min(link.start_ns, measured.sending_ns / len(whole.buckets))
        sending = measured.sending_ns - start * len(whole.buckets)
        self.link = Link(start, sending / nbytes if nbytes else 0.0, link.charge)
        self.compute_ns = measured.step_ns - measured.sending_ns
        self._end_ns = measured.end_ns
        self._after_ns = measured.step_ns - measured.end_ns - measured.sending_ns
        # A parameter that no rank used is not waited for.
        self._ready_ns = [0.0 if at is None else at for at in measured.ready_ns]
        self._specs = specs
        self._dense = [index for index in order if not specs[index].sparse]
        self._kinds = len({(specs[i].dtype, specs[i].device) for i in self._dense})

    @property
    def dense(self) -> list[int]:
        """The parameters that share buckets, in order."""
        return self._dense

    @property
    def of_one_kind(self) -> bool:
        """All of them have one dtype and device."""
        return self._kinds == 1

    def best_ends(self) -> tuple[int, ...]:
        """Where to cut the order of :attr:`dense`; with several dtypes each piece pays a start for each of them."""
        if not self._dense:
            return ()
        gradients = Gradients(
            tuple(self._ready_ns[i] for i in self._dense),
            tuple(self._specs[i].nbytes for i in self._dense),
            self._end_ns,
        )
        link = Link(self.link.start_ns * self._kinds, self.link.byte_ns, self.link.charge)
        return best_ends(gradients, link)

    def step_ns(self, plan: Plan) -> float:
        """How long a step would take with these buckets."""
        buckets = [
            (max((self._ready_ns[i] for i in bucket.params), default=0.0), bucket.nbytes)
            for bucket in plan.buckets
        ]
        buckets[-1] = (self._end_ns, buckets[-1][1])
        return finish_ns(buckets, self.link) + self._after_ns


def cut(
    specs: Sequence[ParamSpec], order: Sequence[int], dense: Sequence[int], ends: Sequence[int]
) -> list[list[int]]:
    """The groups that a plan makes buckets of, in launch order.

    Args:
        specs: All parameters.
        order: Their order.
        dense: Those that share buckets, in that order; the others are buckets of their own.
        ends: Where to cut ``dense``; each piece is a bucket for each dtype and device in it.
    """
    place_of = {index: place for place, index in enumerate(order)}
    groups = [[index] for index in order if specs[index].sparse]
    for begin, end in itertools.pairwise([0, *ends]):
        kinds: dict[object, list[int]] = {}
        for index in dense[begin:end]:
            kinds.setdefault((specs[index].dtype, specs[index].device), []).append(index)
        groups += kinds.values()
    return sorted(groups, key=lambda group: place_of[group[-1]])
