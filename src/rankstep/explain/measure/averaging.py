"""Part 5, gradients against parameters: what comes out when the ranks average the one or the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankstep.explain.measure import vectors
from rankstep.explain.measure.peers import distance, length, ratio

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from rankstep.explain.measure.stage import Stage

    Factory = Callable[[nn.Module], torch.optim.Optimizer]


def measure(stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train the same model with each optimizer: averaging gradients, weights each step, weights now and then."""
    factories: list[tuple[str, Factory]] = [
        ("SGD", stage.sgd),
        ("SGD momentum=0.9", lambda m: torch.optim.SGD(_of(m), lr=stage.rate / 4, momentum=0.9)),
        ("Adam", lambda m: torch.optim.Adam(_of(m))),
        ("AdamW", lambda m: torch.optim.AdamW(_of(m))),
    ]
    # An optimizer for sparse gradients would not take the dense ones of this part.
    if stage.job.optimizer is not None and not _is_sparse(stage):
        name = type(stage.optimizer(stage.fresh())).__name__
        factories.append((f"{name} (job)", stage.optimizer))
    every = max(2, stage.steps // 2)
    rounds = stage.steps // every * every
    rows = [_row(stage, name, factory, rounds, every) for name, factory in factories]
    return {}, {"steps": rounds, "every": every, "optimizers": rows}


def _is_sparse(stage: Stage) -> bool:
    model = stage.fresh()
    stage.loss(model, stage.batch(stage.indices(0))).backward()
    return vectors.densify_gradients(model)


def _of(model: nn.Module) -> list[nn.Parameter]:
    return vectors.trained(model)


def _row(stage: Stage, name: str, factory: Factory, rounds: int, every: int) -> dict[str, Any]:
    start = vectors.weights(stage.base)
    right, _ = _train(stage, factory, rounds, 0)
    each, state = _train(stage, factory, rounds, 1)
    seldom, _ = _train(stage, factory, rounds, every)
    moved = distance(right, start)
    return {
        "optimizer": name,
        "moved": moved,
        "apart_every_step": distance(right, each),
        "apart_every_step_relative": ratio(distance(right, each), moved),
        "apart_every_few": distance(right, seldom),
        "apart_every_few_relative": ratio(distance(right, seldom), moved),
        "states_apart_relative": state,
    }


def _train(
    stage: Stage, factory: Factory, rounds: int, every: int
) -> tuple[torch.Tensor, float | None]:
    """Return the weights after some steps, and how far the ranks' optimizer states are apart.

    Args:
        stage: The job and the ranks.
        factory: Makes the optimizer.
        rounds: How many steps.
        every: Average the weights after so many steps; 0: average the gradients in each step.
    """
    model = stage.fresh()
    optimizer = factory(model)
    for step in range(rounds):
        optimizer.zero_grad()
        stage.loss(model, stage.batch(stage.indices(step)), step).backward()
        vectors.densify_gradients(model)
        if not every:
            vectors.average_gradients(model, stage.peers.mean)
        optimizer.step()
        if every and (step + 1) % every == 0:
            vectors.average_weights(model, stage.peers.mean)
    state = vectors.optimizer_state(optimizer)
    apart = None if state is None else ratio(stage.peers.farthest(state), length(state))
    return vectors.weights(model), apart
