"""Part 6, one backward as it happened: when each gradient was ready, when each bucket left and came back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rankstep.explain.measure import vectors
from rankstep.explain.measure.stage import MIB
from rankstep.parallel import DistributedDataParallel
from rankstep.trace import events

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankstep.explain.measure.stage import Stage

_BUCKETS = 4
_WARM = 3
_RECORDED = 5
_LATE_S = 0.5


@dataclass(slots=True)
class _Take:
    """One recorded step; filled in while it goes on, hence not frozen."""

    heard: list[events.Event] = field(default_factory=list)
    began: int = 0
    computed: int = 0
    settled: int = 0
    stepped: int = 0


def cap_mb(stage: Stage) -> float:
    """Return the bucket size, in MiB, that makes a few buckets of this model."""
    return max(1.0, vectors.nbytes(vectors.trained(stage.base)) / _BUCKETS) / MIB


def measure(stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take a few steps, record some on every rank, and keep the quickest."""
    model = stage.fresh()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=cap_mb(stage))
    optimizer = stage.optimizer(model)
    plan = None
    takes: list[_Take] = []
    for step in range(_WARM + _RECORDED):
        batch = stage.batch(stage.indices(step))
        optimizer.zero_grad()
        take = _Take()
        if step >= _WARM:
            wrapped.reducer.recorder = take.heard.append
            takes.append(take)
        stage.peers.wait()
        take.began = time.perf_counter_ns()
        loss = stage.loss(wrapped, batch, step)
        take.computed = time.perf_counter_ns()
        loss.backward()
        take.settled = time.perf_counter_ns()
        optimizer.step()
        take.stepped = time.perf_counter_ns()
        plan = wrapped.reducer.plan
        if plan is not None and step >= _WARM:
            _hear_the_end(take.heard, len(plan.buckets))
    wrapped.reducer.recorder = None
    assert plan is not None  # noqa: S101 - steps were taken
    # Of what other programs do to a step, the quickest one has the least; it is the same step on all ranks.
    lengths = stage.peers.table([float(take.stepped - take.began) for take in takes])
    slowest = [max(column) for column in zip(*lengths, strict=True)]
    take = takes[slowest.index(min(slowest))]
    began, heard = take.began, take.heard
    own = {
        "clock_began_ns": began,
        "forward": [0.0, _us(take.computed, began)],
        "backward": [_us(take.computed, began), _us(take.settled, began)],
        "step": [_us(take.settled, began), _us(take.stepped, began)],
        "ready": [
            {"param": event.param, "at": _us(event.at_ns, began)}
            for event in heard
            if isinstance(event, events.GradReady)
        ],
        "buckets": [_bucket(heard, bucket.index, began) for bucket in plan.buckets],
    }
    facts = wrapped.reducer.last_step
    assert facts is not None  # noqa: S101 - a step was taken
    shared = {
        "names": [spec.name for spec in plan.params],
        "bytes": [spec.nbytes for spec in plan.params],
        "plan": [
            {"bucket": b.index, "params": list(b.params), "bytes": b.nbytes} for b in plan.buckets
        ],
        "recorded": _RECORDED,
        "bucket_cap_mb": cap_mb(stage),
        "all_reduces": facts.all_reduces,
        "launched_in_backward": facts.launched_in_backward,
    }
    return own, shared


def _hear_the_end(heard: Sequence[events.Event], buckets: int) -> None:
    """Wait a moment: the end of the last all-reduce is told by a thread of the backend."""
    until = time.monotonic() + _LATE_S
    while (
        sum(isinstance(event, events.BucketFinished) for event in heard) < buckets
        and time.monotonic() < until
    ):
        time.sleep(0.005)


def _bucket(heard: Sequence[events.Event], index: int, began: int) -> dict[str, Any]:
    """Collect what happened to one bucket, in microseconds since the step began on this rank."""
    facts: dict[str, Any] = {"bucket": index, "finished": None}
    for event in heard:
        if getattr(event, "bucket", None) != index:
            continue
        if isinstance(event, events.BucketFilled):
            facts["filled"] = _us(event.at_ns, began)
        elif isinstance(event, events.BucketLaunched):
            facts["launched"] = _us(event.at_ns, began)
            facts["in_backward"] = event.in_backward
        elif isinstance(event, events.BucketFinished):
            facts["finished"] = _us(event.at_ns, began)
        elif isinstance(event, events.BucketWaited):
            facts["waited"] = [_us(event.begun_ns, began), _us(event.at_ns, began)]
    if facts["finished"] is None:
        # This backend cannot tell when a work has ended; it was certainly over when the wait was.
        facts["finished"] = facts["waited"][1]
    return facts


def _us(at_ns: int, began_ns: int) -> float:
    return (at_ns - began_ns) / 1e3
