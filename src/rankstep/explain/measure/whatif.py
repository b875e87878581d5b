"""Part 7, what if: other ways to reduce the same gradients, really run and timed."""

from __future__ import annotations

import copy
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rankstep.explain.measure import vectors
from rankstep.explain.measure.backward import cap_mb
from rankstep.explain.measure.peers import distance, length, ratio
from rankstep.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankstep.explain.measure.peers import Peers
    from rankstep.explain.measure.stage import Stage

    Loss = Callable[[nn.Module], torch.Tensor]

REPEATS = 5
REPEATS_OF_MANY = 3
_ELEMENTS = 64
# A bucket size below one element: every parameter is a bucket by itself.
_NOTHING_MB = 1e-9
_EVERYTHING_MB = 1e9


def measure(stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time one backward of the job's model, and of a model of many small tensors, each reduced in four ways."""
    batch = stage.batch(stage.indices(0))
    job = _compare(
        stage, stage.fresh, lambda model: stage.loss(model, batch), cap_mb(stage), REPEATS
    )
    many = _compare(
        stage, lambda: _Many(stage.tensors).to(stage.world.device), _total, None, REPEATS_OF_MANY
    )
    return {}, {"job": job, "many": many | {"elements": _ELEMENTS}}


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to reduce a model's gradients: one backward with it, and how many all-reduces that took."""

    model: nn.Module
    run: Callable[[], None]
    all_reduces: Callable[[], int]


class _Many(nn.Module):
    """A model of nothing but small tensors."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.full((_ELEMENTS,), 0.5) for _ in range(tensors))

    def forward(self) -> torch.Tensor:
        return torch.cat(list(self.parts)).square().sum()


def _total(model: nn.Module) -> torch.Tensor:
    total: torch.Tensor = model()
    return total


def _compare(
    stage: Stage,
    make: Callable[[], nn.Module],
    loss: Loss,
    cap: float | None,
    repeats: int,
) -> dict[str, Any]:
    """Run all ways in turn, so that a busy moment of the machine hits all of them, and take medians."""
    ways = {
        "per_parameter": _wrapped(make(), loss, _NOTHING_MB),
        "after_backward": _afterwards(make(), loss, cap, stage.peers),
        "one_bucket": _wrapped(make(), loss, _EVERYTHING_MB),
        "plan": _wrapped(make(), loss, cap),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            spent = stage.milliseconds(way.run)
            if repeat:  # the first time is for learning
                times[name].append(spent)
    reference = vectors.gradients(ways["plan"].model)
    rows = []
    for name, way in ways.items():
        # A step takes as long as on the slowest rank.
        slowest = [max(row) for row in zip(*stage.peers.table(times[name]), strict=True)]
        apart = distance(vectors.gradients(way.model), reference)
        rows.append(
            {
                "way": name,
                "all_reduces": way.all_reduces(),
                "milliseconds": statistics.median(slowest),
                "milliseconds_least": min(slowest),
                "milliseconds_most": max(slowest),
                "difference_relative": ratio(apart, length(reference)),
            }
        )
    tensors = vectors.trained(make())
    return {
        "tensors": len(tensors),
        "bytes": vectors.nbytes(tensors),
        "bucket_cap_mb": cap,
        "repeats": repeats,
        "ways": rows,
    }


def _wrapped(model: nn.Module, loss: Loss, cap: float | None) -> _Way:
    """Let the wrapper reduce, with buckets of this size."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=cap)

    def run() -> None:
        wrapped.zero_grad()
        loss(wrapped).backward()

    def all_reduces() -> int:
        step = wrapped.reducer.last_step
        return 0 if step is None else step.all_reduces

    return _Way(model, run, all_reduces)


def _afterwards(model: nn.Module, loss: Loss, cap: float | None, peers: Peers) -> _Way:
    """Run a whole backward first, then reduce the plan's buckets one after the other."""
    planner = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=cap)
    loss(planner).backward()
    plan = planner.reducer.plan
    params = vectors.trained(model)
    groups = [[params[i] for i in bucket.params] for bucket in plan.buckets] if plan else []

    def run() -> None:
        model.zero_grad()
        loss(model).backward()
        for group in groups:
            _reduce(group, peers)

    return _Way(model, run, lambda: len(groups))


def _reduce(params: list[nn.Parameter], peers: Peers) -> None:
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in params]
    mean = peers.mean(torch.cat([grad.reshape(-1) for grad in grads]))
    parts = mean.split([grad.numel() for grad in grads])
    for param, part in zip(params, parts, strict=True):
        param.grad = part.view(param.shape)
