"""Part 8, the optimizer steps: each rank makes its own, and all come out the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankstep.explain.measure import vectors
from rankstep.explain.measure.peers import distance, ratio
from rankstep.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from rankstep.explain.measure.stage import Stage


def measure(stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train the wrapped model with the job's optimizer; rank 0 then does the same alone, on the global batches."""
    model = stage.fresh()
    wrapped = DistributedDataParallel(model)
    optimizer = stage.optimizer(model)
    rows, digests = [], []
    for step in range(stage.steps):
        optimizer.zero_grad()
        loss = stage.loss(wrapped, stage.batch(stage.indices(step)), step)
        loss.backward()
        optimizer.step()
        digests = stage.peers.digests(vectors.digest(vectors.trained(model)))
        losses = [row[0] for row in stage.peers.table([float(loss.detach())])]
        rows.append(
            {"loss": sum(losses) / stage.size, "losses": losses, "checksums": len(set(digests))}
        )
    state = vectors.optimizer_state(optimizer)
    states = 1
    if state is not None:
        states = len(set(stage.peers.digests(vectors.digest([state]))))
    shared: dict[str, Any] = {
        "optimizer": type(optimizer).__name__,
        "steps": stage.steps,
        "rows": rows,
        "state_checksums": states,
    }
    if stage.world.is_main:
        shared |= _alone(stage, model)
    stage.peers.wait()
    return {"digest": digests[stage.world.rank]}, shared


def _alone(stage: Stage, model: Any) -> dict[str, Any]:
    """Train a copy in this process on the samples of all ranks, and compare it with what the ranks have made."""
    single = stage.fresh()
    optimizer = stage.optimizer(single)
    losses = []
    for step in range(stage.steps):
        optimizer.zero_grad()
        loss = stage.loss(single, stage.batch(stage.whole_indices(step)), step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    ended = vectors.weights(single)
    moved = distance(ended, vectors.weights(stage.base))
    apart = distance(ended, vectors.weights(model))
    return {
        "one_process_losses": losses,
        "one_process_moved": moved,
        "one_process_apart": apart,
        "one_process_apart_relative": ratio(apart, moved),
    }
