"""What a reducer can be doing, which moves are legal, and what it asks of its owner."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rankstep.buckets.bucket import Bucket
    from rankstep.buckets.line import Line
    from rankstep.buckets.plan import BucketSpec, ParamSpec
    from rankstep.collectives import Communicator


class ReducerState(enum.Enum):
    """What a reducer is doing; ``LEGAL`` has the moves."""

    IDLE = "idle"
    COLLECTING = "collecting gradients"
    SETTLING = "settling"
    DIED = "left by a backward that died"
    BROKEN = "broken"


LEGAL = {
    ReducerState.IDLE: (ReducerState.COLLECTING, ReducerState.BROKEN),
    ReducerState.COLLECTING: (ReducerState.SETTLING, ReducerState.DIED, ReducerState.BROKEN),
    ReducerState.SETTLING: (ReducerState.IDLE, ReducerState.BROKEN),
    ReducerState.DIED: (ReducerState.IDLE, ReducerState.BROKEN),
    ReducerState.BROKEN: (),
}


class Sharding(Protocol):
    """What the reducer asks of an optimizer that is dealt to the ranks; see ``parallel/sharded_shares.py``."""

    @staticmethod
    def bucket(
        spec: BucketSpec,
        specs: Sequence[ParamSpec],
        tensors: Sequence[torch.Tensor],
        comm: Communicator,
        extra_numel: int,
    ) -> Bucket:
        """A bucket whose sum is dealt to the ranks, in an ordinary one's place."""

    def laid_out(self, line: Line) -> None:
        """There is a new plan, the same on all ranks."""

    def retire(self) -> None:
        """Another optimizer takes its place."""

    def before_backward(self) -> None:
        """A synced backward has begun, or a window of weighted ones: the buffers are about to be written."""


class Owner(Protocol):
    """What the reducer asks of the wrapper."""

    def agreed_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Compare the changed module over all ranks, and return its trainable parameters.

        Raises on every rank if it differs.
        """

    def has_lost(self, params: Sequence[torch.Tensor]) -> bool:
        """Whether one of these parameters is no longer in the module."""

    def adopted(self, params: Sequence[torch.Tensor]) -> None:
        """From now on these are the reducer's parameters, in this order."""

    def settled(self, *, gave: bool) -> None:
        """The gradients are in place; ``gave``: this rank had a part in them."""

    def failed(self, error: BaseException) -> None:
        """A step raises."""
