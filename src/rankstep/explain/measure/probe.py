"""Does the job run at all? Tried on each rank by itself, before any rank waits for another."""

from __future__ import annotations

import copy
import math
import time
from typing import TYPE_CHECKING, Any

import torch

from rankstep.explain.blame import JobError, calling
from rankstep.explain.measure import vectors

if TYPE_CHECKING:
    from torch import nn

    from rankstep.explain.measure.stage import Stage


def probe(stage: Stage) -> float:
    """Run one step of the job on this rank alone and return the seconds that forward and backward took.

    Args:
        stage: Everything but the other ranks.

    Raises:
        JobError: Names the piece of the job that does not work, and the cause.
    """
    batch = calling(
        f"making a batch of samples {stage.indices(0)[:3]} and so on",
        lambda: stage.batch(stage.indices(0)),
    )
    model = calling("copying the model", stage.fresh)
    seconds = 0.0
    for _ in range(2):  # the first time is longer: memory, kernels, caches
        model.zero_grad()
        began = time.perf_counter()
        _backward(stage, model, batch)
        stage.settle()
        seconds = time.perf_counter() - began
    optimizer = calling("optimizer(params)", lambda: stage.optimizer(model))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(
            f"optimizer(params) returned {type(optimizer).__name__}. Next: return a torch.optim.Optimizer."
        )
    _check_optimizer(optimizer, model)
    calling("optimizer.step()", optimizer.step)
    return seconds


def _check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """See that it steps the parameters that it was given: there are several copies of the model."""
    given = {id(param) for param in model.parameters()}
    foreign = sum(id(p) not in given for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise JobError(
            f"optimizer(params) made an optimizer with {foreign} parameters that it was not given. Next: use its argument, as "
            "in lambda params: torch.optim.AdamW(params, lr=1e-3); several copies of the model are trained."
        )


def copied(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of the job's model on the device.

    Raises:
        JobError: It cannot be copied, or not moved there.
    """
    return calling(f"copying the model to {device}", lambda: copy.deepcopy(model).to(device))


def _backward(stage: Stage, model: nn.Module, batch: Any) -> None:
    # Whatever the annotations say, a user's function may return anything.
    loss: object = calling("loss(model, batch)", lambda: stage.loss(model, batch))
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else type(loss).__name__
        )
        raise JobError(
            f"loss(model, batch) returned {got}. Next: return a scalar tensor, the mean loss over the batch's samples."
        )
    if not loss.requires_grad:
        raise JobError(
            "the loss does not depend on the model's weights: it has no graph. Next: leave out .item(), .detach() and "
            "torch.no_grad()."
        )
    if not loss.is_floating_point():
        raise JobError(
            f"loss(model, batch) returned a {loss.dtype} scalar. Next: return a real number, the mean loss over the batch's "
            "samples."
        )
    if not math.isfinite(float(loss.detach())):
        raise JobError(
            f"the loss of the first batch is {float(loss.detach())}. Next: see that the model's first weights and the "
            "samples give a finite loss."
        )
    calling("loss.backward()", loss.backward)
    if not float(vectors.gradients(model).abs().max()):
        raise JobError(
            "the gradient of the first batch is zero everywhere. Next: see that the loss uses what the model returns."
        )
