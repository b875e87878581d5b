"""Part 7, what if: other ways to reduce the same gradients, really run and timed."""

from __future__ import annotations

import functools
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
    from collections.abc import Callable, Sequence

    from rankstep.explain.measure.peers import Peers
    from rankstep.explain.measure.stage import Stage

    Loss = Callable[[nn.Module], torch.Tensor]

REPEATS = 5
REPEATS_OF_MANY = 3
# Ten thousand small all-reduces may take a minute on a busy machine: after so many seconds the rest is worked out.
_PATIENCE_S = 5.0
_AT_ONCE = 250
_ELEMENTS = 64
# A bucket size below one element: every parameter is a bucket by itself.
_NOTHING_MB = 1e-9
_EVERYTHING_MB = 1e9


def measure(stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time one backward of the job's model, and of a model of many small tensors, each reduced in four ways."""
    batch = stage.batch(stage.indices(0))
    cap = cap_mb(stage)

    def loss(model: nn.Module) -> torch.Tensor:
        return stage.loss(model, batch)

    def many() -> nn.Module:
        return _Many(stage.tensors).to(stage.world.device)

    tiny = DistributedDataParallel(stage.fresh(), bucket_cap_mb=_NOTHING_MB)
    # With buckets this small, every parameter leaves alone, but still while backward runs.
    alone = {"per_parameter": _wrapped(tiny, loss)}
    job = _compare(stage, alone | _ways(stage, stage.fresh, loss, cap), cap, REPEATS)
    bucketed = _compare(stage, _ways(stage, many, _total, None), None, REPEATS_OF_MANY)
    bucketed["ways"].insert(0, _one_by_one(stage, many()))
    return {}, {"job": job, "many": bucketed | {"elements": _ELEMENTS}}


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


def _ways(
    stage: Stage, make: Callable[[], nn.Module], loss: Loss, cap: float | None
) -> dict[str, _Way]:
    planned = DistributedDataParallel(make(), bucket_cap_mb=cap)
    loss(planned).backward()
    plan = planned.reducer.plan
    groups = [bucket.params for bucket in plan.buckets] if plan else []
    return {
        "after_backward": _afterwards(make(), loss, groups, stage.peers),
        "one_bucket": _wrapped(DistributedDataParallel(make(), bucket_cap_mb=_EVERYTHING_MB), loss),
        "plan": _wrapped(planned, loss),
    }


def _compare(
    stage: Stage, ways: dict[str, _Way], cap: float | None, repeats: int
) -> dict[str, Any]:
    """Run all ways in turn, so that a busy moment of the machine hits all of them, and take medians."""
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
                "all_reduces_run": way.all_reduces(),
                "repeats": repeats,
                "milliseconds": statistics.median(slowest),
                "milliseconds_least": min(slowest),
                "milliseconds_most": max(slowest),
                "difference_relative": ratio(apart, length(reference)),
            }
        )
    tensors = vectors.trained(ways["plan"].model)
    return {
        "tensors": len(tensors),
        "bytes": vectors.nbytes(tensors),
        "bucket_cap_mb": cap,
        "ways": rows,
    }


def _wrapped(wrapped: DistributedDataParallel, loss: Loss) -> _Way:
    """Let the wrapper reduce its buckets."""

    def run() -> None:
        wrapped.zero_grad()
        loss(wrapped).backward()

    def all_reduces() -> int:
        step = wrapped.reducer.last_step
        return 0 if step is None else step.all_reduces

    return _Way(wrapped.module, run, all_reduces)


def _afterwards(
    model: nn.Module, loss: Loss, groups: Sequence[Sequence[int]], peers: Peers
) -> _Way:
    """Run a whole backward first, then reduce the plan's buckets one after the other."""
    params = vectors.trained(model)

    def run() -> None:
        model.zero_grad()
        loss(model).backward()
        for group in groups:
            _reduce([params[index] for index in group], peers)

    return _Way(model, run, lambda: len(groups))


def _reduce_each(params: Sequence[nn.Parameter], peers: Peers) -> None:
    for param in params:
        _reduce([param], peers)


def _reduce(params: list[nn.Parameter], peers: Peers) -> None:
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in params]
    mean = peers.mean(torch.cat([grad.reshape(-1) for grad in grads]))
    parts = mean.split([grad.numel() for grad in grads])
    for param, part in zip(params, parts, strict=True):
        param.grad = part.view(param.shape)


def _one_by_one(stage: Stage, model: nn.Module) -> dict[str, Any]:
    """Reduce each gradient by an all-reduce of its own, once, until all are done or it has taken too long."""
    peers, params = stage.peers, vectors.trained(model)
    spent = stage.milliseconds(lambda: _total(model).backward())
    parts = [spent]
    done = 0
    while done < len(params):
        group = params[done : done + _AT_ONCE]
        parts.append(stage.milliseconds(functools.partial(_reduce_each, group, peers)))
        done += len(group)
        # All ranks must stop at the same place: the slowest one decides.
        if max(row[0] for row in peers.table([sum(parts[1:])])) > 1e3 * _PATIENCE_S:
            break
    slowest = [max(column) for column in zip(*peers.table(parts), strict=True)]
    milliseconds = slowest[0] + sum(slowest[1:]) * len(params) / done
    got = torch.cat([param.grad.reshape(-1) for param in params[:done] if param.grad is not None])
    # Every rank has the same weights and no samples here: the mean is what each one had.
    expected = torch.cat([2 * param.detach() for param in params[:done]])
    return {
        "way": "per_parameter",
        "all_reduces": len(params),
        "all_reduces_run": done,
        "repeats": 1,
        "milliseconds": milliseconds,
        "milliseconds_least": milliseconds,
        "milliseconds_most": milliseconds,
        "difference_relative": ratio(distance(got, expected), length(expected)),
    }
