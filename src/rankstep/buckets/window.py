"""One accumulation window of ``model.backward(loss_sum, count=n)``: how much was counted, and what was there before."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rankstep.errors import CountError, ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankstep.buckets.bucket import Bucket


def checked_count(count: Any, rank: int) -> float:
    """A count as a float.

    Args:
        count: How many samples or tokens the loss sums over; 0 or more, also a one-element tensor.
        rank: For the message.

    Raises:
        CountError: It is no number, negative, NaN or infinite.
    """
    try:
        value = float(count)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CountError(
            f"rank {rank}: count must be a number of samples or tokens, not {count!r}; pass count=len(batch)"
        ) from error
    if not math.isfinite(value) or value < 0:
        raise CountError(f"rank {rank}: count must be finite and not negative, but it is {value}")
    return value


@dataclass(slots=True)
class Window:
    """What has been counted since the last reduction.

    The gradients of a window are sums and are divided by the count of all ranks at its end. Gradients that an earlier
    window left in ``.grad`` are means already: they are set aside when the window opens and added when it closes.

    Attributes:
        count: Samples or tokens so far, on this rank.
        before: The gradients set aside, by parameter number.
    """

    count: float = 0.0
    before: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def opened(
        cls,
        params: Sequence[torch.Tensor],
        bucket_of: Sequence[Bucket],
        accumulated: Sequence[int],
        rank: int,
    ) -> Window:
        """A new window: every ``.grad`` is taken away, and copied only if it lies in a bucket.

        Args:
            params: The reducer's parameters.
            bucket_of: Their buckets; empty before there are any.
            accumulated: Nonzero for each parameter that a backward under ``no_sync`` has reached.
            rank: For the message.

        Raises:
            ModelError: A plain backward under ``no_sync``, which has no count, has begun the window.
        """
        if any(accumulated):
            raise ModelError(
                f"rank {rank}: a plain loss.backward() under no_sync and model.backward(count=...) met in one "
                "accumulation window; use model.backward for all of its micro-batches"
            )
        window = cls()
        for index, param in enumerate(params):
            grad = param.grad
            if grad is not None:
                in_bucket = bool(bucket_of) and grad is bucket_of[index].view_of.get(index)
                window.before[index] = grad.clone() if in_bucket else grad
                param.grad = None
        return window

    def add_back(self, params: Sequence[torch.Tensor]) -> None:
        """Add what was set aside to what the window gave."""
        with torch.no_grad():
            for index, old in self.before.items():
                grad = params[index].grad
                if grad is None:
                    params[index].grad = old
                else:
                    grad.add_(old)
        self.before.clear()
