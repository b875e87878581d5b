"""Does the job run at all? Tried on each rank by itself, before any rank waits for another."""

from __future__ import annotations

import copy
import math
import time
from typing import TYPE_CHECKING, Any

import torch

from rankstep.explain.job import JobError
from rankstep.explain.measure import vectors

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from rankstep.explain.measure.stage import Stage


def probe(stage: Stage) -> float:
    """Run one step of the job on this rank alone and return the seconds that forward and backward took.

    Args:
        stage: Everything but the other ranks.

    Raises:
        JobError: Names the piece of the job that does not work, and the cause.
    """
    batch = _calling(
        f"making a batch of samples {stage.indices(0)[:3]} and so on",
        lambda: stage.batch(stage.indices(0)),
    )
    model = _calling("copying the model", stage.fresh)
    seconds = 0.0
    for _ in range(2):  # the first time is longer: memory, kernels, caches
        model.zero_grad()
        began = time.perf_counter()
        _backward(stage, model, batch)
        stage.settle()
        seconds = time.perf_counter() - began
    optimizer = _calling("optimizer(params)", lambda: stage.optimizer(model))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(
            f"optimizer(params) returned {type(optimizer).__name__}. Next: return a torch.optim.Optimizer."
        )
    _calling("optimizer.step()", optimizer.step)
    return seconds


def copied(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of the job's model on the device.

    Raises:
        JobError: It cannot be copied, or not moved there.
    """
    moved: nn.Module = _calling(
        f"copying the model to {device}", lambda: copy.deepcopy(model).to(device)
    )
    return moved


def _backward(stage: Stage, model: nn.Module, batch: Any) -> None:
    loss = _calling("loss(model, batch)", lambda: stage.loss(model, batch))
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
    if not math.isfinite(float(loss.detach())):
        raise JobError(
            f"the loss of the first batch is {float(loss.detach())}. Next: see that the model's first weights and the "
            "samples give a finite loss."
        )
    _calling("loss.backward()", loss.backward)
    if not float(vectors.gradients(model).abs().max()):
        raise JobError(
            "the gradient of the first batch is zero everywhere. Next: see that the loss uses what the model returns."
        )


def _calling(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        raise JobError(f"{what} raised {type(error).__name__}: {error}") from error
