"""static_graph=True is a promise of the user's, and is checked here for the price of a comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankstep.errors import StaticGraphError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankstep.buckets.learn import Firings
    from rankstep.buckets.plan import ParamSpec


class StaticPromise:
    """Raises when a backward uses other parameters than the first one did.

    As in torch, a parameter that is newly used is told at the end of that backward, one that is no longer used by the
    next forward. The gradients are right in both cases.

    Args:
        rank: Of this process, for the message.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._broken = ""

    def check_forward(self) -> None:
        """Raise what an earlier backward has left to be told.

        Raises:
            StaticGraphError: Some backward broke the promise.
        """
        if self._broken:
            raise StaticGraphError(self._broken)

    def check_backward(self, firings: Firings, specs: Sequence[ParamSpec], step: int) -> None:
        """Compare the parameters used so far with those of the first backward.

        Args:
            firings: What fired.
            specs: The parameters, for their names.
            step: Which synced backward, counted from 0.

        Raises:
            StaticGraphError: A parameter was used that the first backward did not use.
        """
        used, unused = firings.newly_used, firings.newly_unused
        if not used and not unused:
            return
        indices = " ".join(map(str, sorted(unused or used)))
        advice = "The gradients are right; leave static_graph out, which costs nothing here."
        self._broken = (
            "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates "
            "that your training graph has changed in this iteration, e.g., one parameter is used in first iteration, but "
            "then got unused in the second iteration. this is not compatible with static_graph set to True.\n"
            f"Parameter indices which did not receive grad for rank {self._rank}: {indices}. {advice}"
        )
        if used:
            names = ", ".join(specs[i].name for i in sorted(used)[:8])
            raise StaticGraphError(
                "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, "
                "but then got used in the second iteration. this is not compatible with static_graph set to True. "
                f"rank {self._rank}, step {step} (counted from 0): {names}. {advice}"
            )
