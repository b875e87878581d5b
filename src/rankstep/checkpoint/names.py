"""The module's own names, whatever wrappers and compilers are around it or around its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Joinable

from rankstep.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Iterator


def bare(model: nn.Module) -> nn.Module:
    """Look through data-parallel wrappers and torch.compile."""
    while (inner := _inside(model)) is not None:
        model = inner
    return model


def named_state(model: nn.Module) -> dict[str, Any]:
    """A model's state dict in its own names, also where single parts of it are wrapped."""
    module = bare(model)
    own = _own_names(module)
    return {own(name): value for name, value in module.state_dict().items()}


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A model's parameters with their own names."""
    module = bare(model)
    own = _own_names(module)
    for name, param in module.named_parameters():
        yield own(name), param


def load_named_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Load what :func:`named_state` returned."""
    module = bare(model)
    own = _own_names(module)
    module.load_state_dict({name: state[own(name)] for name in module.state_dict()})


def apart(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors of a model that nobody keeps equal on all ranks, by their own names.

    A wrapper copies rank 0's buffers to all ranks, unless it was told not to; what it ignores, and whatever stands outside
    of a wrapper, is each rank's own.
    """
    module = bare(model)
    names = {name for name, _ in module.named_buffers()}
    for prefix, wrapper in _wrappers(model, module):
        if wrapper.forward_sync_buffers:
            names = {name for name in names if not name.startswith(prefix)}
        names |= {prefix + name for name in wrapper.parameters_to_ignore}
    own = _own_names(module)
    return {
        own(name): value
        for name, value in module.state_dict().items()
        if name in names and isinstance(value, torch.Tensor)
    }


def _inside(model: nn.Module) -> nn.Module | None:
    # Both torch's wrapper and ours can take part in torch's join, and nothing else that has a module inside.
    if isinstance(model, Joinable):
        inner = getattr(model, "module", None)
    else:
        inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


def _wrappers(model: nn.Module, module: nn.Module) -> Iterator[tuple[str, DistributedDataParallel]]:
    """Our wrappers around a module or its parts, with what the names inside begin with."""
    outer: nn.Module | None = model
    while outer is not None and outer is not module:
        if isinstance(outer, DistributedDataParallel):
            yield "", outer
        outer = _inside(outer)
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel):
            yield f"{name}.module.", part


def _own_names(module: nn.Module) -> Any:
    """A function that takes the parts that wrappers add out of a name."""
    added = {
        f"{name}.": f"{name}.{'module' if isinstance(part, Joinable) else '_orig_mod'}."
        for name, part in module.named_modules()
        if name and _inside(part) is not None
    }

    def own(name: str) -> str:
        # The innermost first, since the names of wrappers have those of outer ones in them.
        for short in sorted(added, key=len, reverse=True):
            if name.startswith(added[short]):
                name = short + name.removeprefix(added[short])
        return name

    return own
