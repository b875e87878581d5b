"""The mixed precision option: forward and backward in a small dtype, weights and optimizer in the full one.

Forward runs on casts of the parameters, so autograd carries each gradient back to the full parameter by itself, in the
parameter's dtype; buckets travel in ``reduce_dtype``. Works on every device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import nn

    from rankstep.collectives import Communicator, Pending


class _CastBack:
    """A collective on a cast copy, whose result is cast back."""

    def __init__(self, work: Pending, small: torch.Tensor, tensor: torch.Tensor) -> None:
        self._work = work
        self._small = small
        self._tensor = tensor

    def wait(self) -> None:
        self._work.wait()
        self._tensor.copy_(self._small)


class CastingCommunicator:
    """Another communicator whose all-reduces travel in a smaller dtype.

    Args:
        inner: Does the work.
        dtype: On the wire.
    """

    def __init__(self, inner: Communicator, dtype: torch.dtype) -> None:
        self._inner = inner
        self._dtype = dtype
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.averages = inner.averages
        self.host_waits = inner.host_waits
        self.name = inner.name
        self.allocate = inner.allocate
        self.reduce_scatter = inner.reduce_scatter
        self.all_gather = inner.all_gather
        self.broadcast = inner.broadcast
        self.shared = inner.shared
        self.barrier = inner.barrier
        self.absent = inner.absent
        self.at = inner.at

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Sum over all ranks in ``dtype``."""
        small = tensor.to(self._dtype)
        return _CastBack(self._inner.all_reduce(small), small, tensor)


class MixedPrecision:
    """Runs a module in a smaller dtype.

    Args:
        module: The user's module.
        config: torch's ``_MixedPrecision``: ``param_dtype``, ``reduce_dtype``, ``buffer_dtype``, each may be None.
        ignored: Names of parameters and buffers to leave alone.
    """

    def __init__(self, module: nn.Module, config: Any, ignored: Collection[str]) -> None:
        self._module = module
        self._param_dtype: torch.dtype | None = config.param_dtype
        self._ignored = ignored
        if config.buffer_dtype is not None:
            for name, buffer in module.named_buffers():
                if name not in ignored and buffer.is_floating_point():
                    buffer.data = buffer.data.to(config.buffer_dtype)
        # torch's wrapper leaves these marks, and code written for it reads them; nothing here does.
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name not in ignored:
                tensor._mp_param = torch.empty(0, dtype=self._param_dtype or tensor.dtype)  # type: ignore[attr-defined]
                tensor._fp_param = tensor.detach()  # type: ignore[attr-defined]

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module on casts of its parameters and of the inputs."""
        if self._param_dtype is None:
            return self._module(*args, **kwargs)
        dtype = self._param_dtype

        def cast(value: Any) -> Any:
            return (
                value.to(dtype)
                if isinstance(value, torch.Tensor) and value.is_floating_point()
                else value
            )

        small = {
            name: cast(param)
            for name, param in self._module.named_parameters()
            if name not in self._ignored
        }
        args, kwargs = pytree.tree_map(cast, (args, kwargs))
        return torch.func.functional_call(self._module, small, args, kwargs, strict=False)
