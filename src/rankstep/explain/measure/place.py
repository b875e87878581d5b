"""Part 1, the world: who is where, and that every rank holds the whole model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from rankstep.explain.measure import vectors
from rankstep.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from rankstep.explain.measure.stage import Stage


def measure(stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
    """Look at this rank, then wrap a model that was made different on each rank, and look at it again.

    The copy that the wrapper leaves on every rank becomes the model of all further parts.
    """
    world, base = stage.world, stage.base
    model = stage.fresh()
    with torch.no_grad():
        for param in model.parameters():
            # Rank 0 keeps its weights; the others get weights of their own, as ranks that draw differently have.
            param.mul_(1 + world.rank)
            param.add_(world.rank)
    before = stage.peers.digests(vectors.digest(model.parameters()))
    wrapped = DistributedDataParallel(model)
    after = stage.peers.digests(vectors.digest(model.parameters()))
    with torch.no_grad():
        ours = [*base.parameters(), *base.buffers()]
        for mine, copied in zip(ours, [*model.parameters(), *model.buffers()], strict=True):
            mine.copy_(copied)
    del wrapped

    trial = stage.fresh()
    optimizer = stage.optimizer(trial)
    stage.loss(trial, stage.batch(stage.indices(0))).backward()
    optimizer.step()
    own: dict[str, Any] = {
        "rank": world.rank,
        "local_rank": world.local_rank,
        "node": world.node,
        "device": str(world.device),
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "parameters": sum(param.numel() for param in model.parameters()),
        "parameter_bytes": vectors.nbytes(model.parameters()),
        "buffer_bytes": vectors.nbytes(model.buffers()),
        "gradient_bytes": vectors.nbytes(vectors.trained(model)),
        "optimizer_bytes": vectors.state_bytes(optimizer),
        "digest_before": before[world.rank],
        "digest_after": after[world.rank],
    }
    shared = {
        "world_size": world.world_size,
        "nodes": world.node_count,
        "ranks_per_node": world.local_world_size,
        "backend": world.backend,
        "model": type(base).__name__,
        "tensors": len(list(base.parameters())),
        "trained_tensors": len(vectors.trained(base)),
        "trained_parameters": sum(param.numel() for param in vectors.trained(base)),
        "optimizer": type(optimizer).__name__,
        "parameter_bytes_of_all_ranks": own["parameter_bytes"] * world.world_size,
    }
    return own, shared
