"""Part 4, why to synchronise: the ranks' weights without it and with it, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankstep.explain.measure import vectors
from rankstep.explain.measure.peers import length, ratio
from rankstep.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch import nn

    from rankstep.explain.measure.stage import Stage


def measure(stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train plain copies that never speak, and wrapped ones, on the same samples with the same SGD."""
    alone = _train(stage, stage.fresh())
    together = _train(stage, DistributedDataParallel(stage.fresh()))
    weights = length(vectors.weights(stage.base))
    shared = {
        "steps": stage.steps,
        "rate": stage.rate,
        "weights_length": weights,
        "alone": [row["apart"] for row in alone],
        "alone_relative": [ratio(row["apart"], weights) for row in alone],
        "alone_checksums": [row["checksums"] for row in alone],
        "together": [row["apart"] for row in together],
        "together_checksums": [row["checksums"] for row in together],
    }
    return {}, shared


def _train(stage: Stage, model: nn.Module) -> list[dict[str, Any]]:
    """Return after each step how far the ranks are apart, and how many different checksums they have."""
    optimizer = stage.sgd(model)
    rows = []
    for step in range(stage.steps):
        optimizer.zero_grad()
        stage.loss(model, stage.batch(stage.indices(step)), step).backward()
        optimizer.step()
        digests = stage.peers.digests(vectors.digest(vectors.trained(model)))
        rows.append(
            {
                "apart": stage.peers.farthest(vectors.weights(model)),
                "checksums": len(set(digests)),
            }
        )
    return rows
