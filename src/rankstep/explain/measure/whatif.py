"""Part 7, what if: other ways to reduce the same gradients, really run and timed."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rankstep.explain.measure import vectors
from rankstep.explain.measure.backward import cap_mb
from rankstep.explain.measure.peers import Peers, distance, length, ratio
from rankstep.explain.measure.stage import MIB
from rankstep.parallel import DistributedDataParallel
from rankstep.world import agree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankstep.explain.measure.stage import Stage

    Loss = Callable[[nn.Module], torch.Tensor]

REPEATS = 5
REPEATS_OF_MANY = 3
# At least so many single all-reduces are run, however late it is; then the clock is read after as many again.
_AT_ONCE = 250
# A tensor of one number carries as good as nothing: what is measured is the start of an all-reduce.
_ELEMENTS = 1
# A bucket size below one element: every parameter is a bucket by itself.
_NOTHING_MB = 1e-9
_EVERYTHING_MB = 1e9
_BUCKETS_OF_MANY = 4


def measure(stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time one backward of the job's model, and of a model of many small tensors, each reduced in four ways."""
    batch = stage.batch(stage.indices(0))

    def loss(model: nn.Module) -> torch.Tensor:
        return stage.loss(model, batch)

    tiny = DistributedDataParallel(stage.fresh(), bucket_cap_mb=_NOTHING_MB)
    peers = Peers(tiny.reducer.comm, stage.world.device)
    # With buckets this small, every parameter leaves alone, but still while backward runs.
    alone = {"per_parameter": _wrapped(tiny, loss)}
    cap = cap_mb(stage)
    ways = alone | _ways(stage.fresh, loss, cap, peers)
    # What all ways should come to is known without them: each rank's own gradient, and their mean.
    mean = peers.mean(stage.gradient(stage.fresh(), stage.indices(0))[1])
    job = _compare(stage, ways, mean, REPEATS) | {"bucket_cap_mb": cap}
    many = _many(stage, peers)
    return {}, {"job": job, "many": many, "way": getattr(peers.comm, "way", peers.comm.name)}


def _many(stage: Stage, peers: Peers) -> dict[str, Any]:
    """Do the same to a model of many small tensors, on other numbers on each rank."""
    generator = torch.Generator().manual_seed(stage.world.rank)
    factors = torch.rand(stage.tensors * _ELEMENTS, generator=generator).to(stage.world.device)

    def make() -> nn.Module:
        return _Many(stage.tensors).to(stage.world.device)

    def loss(model: nn.Module) -> torch.Tensor:
        total: torch.Tensor = model(factors)
        return total

    cap = max(factors.nbytes / _BUCKETS_OF_MANY, _ELEMENTS * factors.element_size()) / MIB
    mean = peers.mean(factors)
    many = _compare(stage, _ways(make, loss, cap, peers), mean, REPEATS_OF_MANY)
    many["ways"].insert(0, _one_by_one(stage, peers, make(), loss, mean))
    return many | {"bucket_cap_mb": cap, "elements": _ELEMENTS}


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to reduce a model's gradients: one backward with it, and how many all-reduces that took."""

    model: nn.Module
    run: Callable[[], None]
    all_reduces: Callable[[], int]


class _Many(nn.Module):
    """A model of nothing but small tensors, whose gradients are what it is given."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.full((_ELEMENTS,), 0.5) for _ in range(tensors))

    def forward(self, factors: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(self.parts)) @ factors


def _ways(make: Callable[[], nn.Module], loss: Loss, cap: float, peers: Peers) -> dict[str, _Way]:
    planned = DistributedDataParallel(make(), bucket_cap_mb=cap)
    loss(planned).backward()
    plan = planned.reducer.plan
    # Behind a last bucket of sparse gradients there is one without any, for what ranks tell each other.
    groups = [bucket.params for bucket in plan.buckets if bucket.params] if plan else []
    return {
        "after_backward": _afterwards(make(), loss, groups, peers),
        "one_bucket": _wrapped(DistributedDataParallel(make(), bucket_cap_mb=_EVERYTHING_MB), loss),
        "plan": _wrapped(planned, loss),
    }


def _compare(
    stage: Stage, ways: dict[str, _Way], reference: torch.Tensor, repeats: int
) -> dict[str, Any]:
    """Run all ways in turn, so that a busy moment of the machine hits all of them, and take medians."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            spent = stage.milliseconds(way.run)
            if repeat:  # the first time is for learning
                times[name].append(spent)
    rows = []
    for name, way in ways.items():
        # A step takes as long as on the slowest rank.
        slowest = [max(row) for row in zip(*stage.peers.table(times[name]), strict=True)]
        apart = distance(vectors.gradients(way.model), reference)
        rows.append(
            {
                "way": name,
                "all_reduces": way.all_reduces(),
                "tensors": len(vectors.trained(way.model)),
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
    made: list[int] = []

    def run() -> None:
        model.zero_grad()
        loss(model).backward()
        made.append(_reduce_each([[params[index] for index in group] for group in groups], peers))

    return _Way(model, run, lambda: made[-1])


def _reduce_each(groups: Sequence[Sequence[nn.Parameter]], peers: Peers) -> int:
    """Reduce these groups of gradients, one all-reduce each, and return how many that were."""
    made = 0
    for group in groups:
        _reduce(group, peers)
        made += 1
    return made


def _reduce(params: Sequence[nn.Parameter], peers: Peers) -> None:
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in params]
    mean = peers.mean(torch.cat([grad.reshape(-1) for grad in grads]))
    parts = mean.split([grad.numel() for grad in grads])
    for param, part in zip(params, parts, strict=True):
        param.grad = part.view(param.shape)


def _one_by_one(
    stage: Stage, peers: Peers, model: nn.Module, loss: Loss, expected: torch.Tensor
) -> dict[str, Any]:
    """Reduce each gradient by an all-reduce of its own, once, until all are done or there is no time left."""
    params = vectors.trained(model)
    parts = [stage.milliseconds(lambda: loss(model).backward())]
    done = 0
    made: list[int] = []

    def some() -> None:
        made.append(_reduce_each([[param] for param in params[done : done + _AT_ONCE]], peers))

    while done < len(params) and (done == 0 or not agree(stage.seconds_left() <= 0)):
        parts.append(stage.milliseconds(some))
        done = min(done + _AT_ONCE, len(params))
    # Every piece takes as long as on the slowest rank, as the next one begins on all of them together.
    milliseconds = sum(max(column) for column in zip(*peers.table(parts), strict=True))
    got = vectors.gradients(model)[: done * _ELEMENTS]
    expected = expected[: done * _ELEMENTS]
    return {
        "way": "per_parameter",
        "all_reduces": sum(made),
        "tensors": done,
        "repeats": 1,
        "milliseconds": milliseconds,
        "milliseconds_least": milliseconds,
        "milliseconds_most": milliseconds,
        "difference_relative": ratio(distance(got, expected), length(expected)),
    }
