"""Models seen as vectors: all weights, gradients or optimizer state of a module in one flat tensor."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that get gradients."""
    return [param for param in model.parameters() if param.requires_grad]


def weights(model: nn.Module) -> torch.Tensor:
    """Return a copy of all trainable weights."""
    return _flat([param.detach() for param in trained(model)])


def gradients(model: nn.Module) -> torch.Tensor:
    """Return a copy of all gradients; zeros where a parameter has none."""
    return _flat(
        [
            torch.zeros_like(param) if param.grad is None else param.grad.detach()
            for param in trained(model)
        ]
    )


def optimizer_state(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """Return a copy of what the optimizer remembers for each weight, or None where that is nothing."""
    parts = [
        tensor.detach()
        for group in optimizer.param_groups
        for param in group["params"]
        for tensor in optimizer.state.get(param, {}).values()
        # Step counters are no memory of gradients.
        if isinstance(tensor, torch.Tensor) and tensor.numel() == param.numel() and tensor.ndim
    ]
    return _flat(parts) if parts else None


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return how many bytes these tensors hold."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return how many bytes an optimizer remembers."""
    return nbytes(
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def average_weights(model: nn.Module, mean: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put the ranks' mean in place of the trainable weights."""
    params = trained(model)
    _spread(mean(weights(model)), [param.detach() for param in params])


def average_gradients(model: nn.Module, mean: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put the ranks' mean in place of the gradients."""
    flat = mean(gradients(model))
    params = trained(model)
    for param in params:
        if param.grad is None or param.grad.is_sparse:
            param.grad = torch.zeros_like(param)
    _spread(flat, [param.grad for param in params if param.grad is not None])


def densify_gradients(model: nn.Module) -> bool:
    """Make sparse gradients dense, since most optimizers want them so; say whether there were any."""
    found = False
    for param in trained(model):
        if param.grad is not None and param.grad.is_sparse:
            param.grad = param.grad.to_dense()
            found = True
    return found


def digest(tensors: Iterable[torch.Tensor]) -> bytes:
    """Return a SHA-256 over the bytes of these tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        sha.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.digest()


def digest_of_batch(batch: Any) -> bytes:
    """Return a SHA-256 over the tensors, numbers and texts of a batch."""
    sha = hashlib.sha256()
    for leaf in _pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            sha.update(digest([leaf]))
        elif isinstance(leaf, (int, float, str, bool)):
            sha.update(repr(leaf).encode())
    return sha.digest()


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    wide = any(tensor.dtype in (torch.float64, torch.complex128) for tensor in tensors)
    dtype = torch.float64 if wide else torch.float32
    return torch.cat([_real(tensor).reshape(-1).to(dtype) for tensor in tensors])


def _real(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


@torch.no_grad()
def _spread(flat: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Write a flat vector back over the tensors it was made of."""
    place = 0
    for target in targets:
        real = torch.view_as_real(target) if target.is_complex() else target
        real.copy_(flat[place : place + real.numel()].view(real.shape))
        place += real.numel()
