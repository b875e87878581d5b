"""Which optimizers may be dealt to the ranks: those that treat every element by itself.

A rank steps its share of each bucket, cut without regard to shapes. That gives the same result only where an element's
update depends on nothing but that element's value, gradient and history. torch's own optimizers are listed; others are
tried out, which can prove that one is not elementwise, but never that it is.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from rankstep.errors import ModelError, ModelTypeError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
)
_NOT = {
    "Adafactor": "it keeps sums over the rows and columns of a whole matrix",
    "LBFGS": "it works with the vector of all parameters, and calls the closure again and again",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it takes sparse gradients, which do not travel in flat buckets",
}
_NUMEL, _STEPS = 48, 3
_TOLERANCE = 1e-9


def check_optimizer(
    kind: Any, options: Mapping[str, Any], rank: int, *, vouched: bool
) -> dict[str, bool]:
    """Return if each rank may step a part of the parameters by itself.

    Args:
        kind: The optimizer's class.
        options: Its arguments.
        rank: For messages.
        vouched: The user says that it is elementwise.

    Returns:
        For each entry of a parameter's state whether it has one value for each element.

    Raises:
        ModelTypeError: It is no optimizer class.
        ModelError: It is not elementwise, or nobody vouches for it.
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ModelTypeError(
            f"rank {rank}: ShardedOptimizer takes the class of an optimizer, not {kind!r}: "
            "ShardedOptimizer(model, torch.optim.AdamW, lr=...)"
        )
    name = kind.__name__
    start = f"rank {rank}: {name} cannot be dealt to the ranks"
    if options.get("differentiable"):
        raise ModelError(
            f"{start} with differentiable=True: a rank has no graph of the others' steps"
        )
    if name in _NOT and getattr(torch.optim, name, None) is kind:
        raise ModelError(f"{start}: {_NOT[name]}. Use {name} itself on the wrapped model")
    if kind not in _ELEMENTWISE:
        difference = _difference(kind, options)
        if difference:
            raise ModelError(
                f"{start}: tried out on {_NUMEL} elements, whole and in two halves, {difference}. Use {name} itself on the "
                "wrapped model"
            )
        if not vouched:
            raise ModelError(
                f"{start} without your word: nobody here knows it. If the update of each element depends on that element's "
                "value, gradient and history alone, and on no norm, shape or neighbour, pass elementwise=True"
            )
    return _per_element(kind, options)


def _difference(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> str:
    """What shows that the parts of a parameter do not go their own way; empty if nothing does."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(_NUMEL, dtype=torch.float64, generator=generator)
    grads = torch.randn(_STEPS, _NUMEL, dtype=torch.float64, generator=generator)
    whole = values.clone().view(6, -1)
    # In optimizers of their own: ranks do not see each other's part.
    halves = [half.clone() for half in values.split(_NUMEL // 2)]
    try:
        together = _made(kind, whole, options)
        apart = [_made(kind, half, options) for half in halves]
        for grad in grads:
            whole.grad = grad.view(6, -1).clone()
            together.step()
            for half, part, stepper in zip(halves, grad.split(_NUMEL // 2), apart, strict=True):
                half.grad = part.clone()
                stepper.step()
    except Exception as error:  # noqa: BLE001 - whatever an unknown class raises is the answer
        return f"it raised {type(error).__name__}: {error}"
    found = torch.cat(halves)
    off = float((found - whole.view(-1)).abs().max())
    return (
        f"the results differ by {off:.3g}" if off > _TOLERANCE * float(values.abs().max()) else ""
    )


def _per_element(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> dict[str, bool]:
    param = torch.zeros(3)
    stepper = _made(kind, param, options)
    param.grad = torch.ones(3)
    stepper.step()
    return {
        str(key): isinstance(value, torch.Tensor) and value.shape == param.shape
        for key, value in stepper.state.get(param, {}).items()
    }


def _made(
    kind: type[torch.optim.Optimizer], param: torch.Tensor, options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    # A step may write into its options (a learning rate as a tensor).
    return kind([param], **copy.deepcopy(dict(options)))
