"""Optimizers that step inside backward, as ``torch.distributed.optim._apply_optimizer_in_backward`` sets them up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


class OptimizersInBackward:
    """Steps them once the global gradient is there, and not, as their own hooks would, on the local one.

    Args:
        params: Those of the wrapped module that are reduced.
    """

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self._optimizers: list[tuple[torch.Tensor, list[Any]]] = [
            (param, param._in_backward_optimizers)  # type: ignore[attr-defined]
            for param in params
            if getattr(param, "_in_backward_optimizers", None)
        ]
        if self._optimizers:
            # Only now: importing it takes a while.
            from torch.distributed.optim.apply_optimizer_in_backward import (
                param_to_optim_hook_handle_map,
            )

            for param, _ in self._optimizers:
                for handle in param_to_optim_hook_handle_map.get(param, ()):
                    handle.remove()

    def step(self) -> None:
        """Step each optimizer whose parameter has a gradient, and take the gradient away."""
        for param, optimizers in self._optimizers:
            if param.grad is not None:
                for optimizer in optimizers:
                    optimizer.step()
                param.grad = None
