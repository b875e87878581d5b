"""What a step would take with other buckets, as plain figures; pure, and written for people here once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankstep.buckets.predict import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankstep.buckets.predict import Link

CAPS_MIB = (1, 5, 25, 100)
"""The caps that a plan is held against."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """One way to cut gradients into buckets.

    Attributes:
        caps_mib: That make it: one number for all buckets, or one for each in turn; empty: no caps do.
        buckets: How many it makes.
        step_ns: How long a step is expected to take.
    """

    caps_mib: tuple[float, ...]
    buckets: int
    step_ns: float

    @property
    def argument(self) -> str:
        """What to write in the wrapper's constructor."""
        if len(self.caps_mib) == 1:
            return f"bucket_cap_mb={self.caps_mib[0]:.10g}"
        return f"bucket_cap_mb_list=[{', '.join(f'{cap:.10g}' for cap in self.caps_mib)}]"


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a plan is expected to do.

    Attributes:
        link: What an all-reduce costs.
        compute_ns: A step without any communication.
        plan: The plan.
        others: What caps would do instead, in the order of ``CAPS_MIB``.
    """

    link: Link
    compute_ns: float
    plan: Outlook
    others: tuple[Outlook, ...]

    def lines(self) -> list[str]:
        """A table for people."""
        link = self.link
        charge = f"; {link.charge:.0%} of that is lost for computing" if link.charge else ""
        same = [f"the same without measuring: {self.plan.argument}"] if self.plan.caps_mib else []
        rows = [("this plan", self.plan)]
        rows += [(f"{one.caps_mib[0]:g} MiB", one) for one in self.others]
        return [
            f"an all-reduce takes {link.start_ns / 1e6:.3f} ms + {link.byte_ns * MIB / 1e6:.3f} ms per MiB{charge}",
            f"a step without communication takes {self.compute_ns / 1e6:.2f} ms; predicted:",
            *(
                f"  {name:>10}: {one.buckets:>4} bucket{'s' * (one.buckets != 1):1}  {one.step_ns / 1e6:9.2f} ms"
                for name, one in rows
            ),
            *same,
        ]


def simplest(best: Outlook, others: Sequence[Outlook], tolerance: float) -> Outlook:
    """The proposal: caps that are easy to write, where they cost hardly more than the best plan.

    Args:
        best: The best plan.
        others: Others, with a single cap each.
        tolerance: By which share of the best plan's step they may be slower.
    """
    near = [one for one in others if one.step_ns <= best.step_ns * (1 + tolerance)]
    return min(near, key=lambda one: (one.step_ns, one.buckets), default=best)
