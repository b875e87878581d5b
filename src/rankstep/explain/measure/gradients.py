"""Part 3, the heart of it: the mean of the ranks' gradients is the gradient of one process on the global batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rankstep.explain.measure import vectors
from rankstep.explain.measure.peers import distance, length, ratio
from rankstep.parallel import DistributedDataParallel
from rankstep.world import agree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankstep.explain.measure.stage import Stage

# Sums of float32 taken in another order differ by a few units in the last place; this many are allowed.
_UNITS = 64
# So much of their length the weights move in the first step of plain SGD.
_FIRST_MOVE = 0.01

_DRAWING = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
)
_COUPLING = (nn.modules.batchnorm._BatchNorm,)


def measure(stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compute g_0 .. g_{N-1}, their mean, the wrapper's gradient and that of one process; then with uneven batches."""
    mine = stage.indices(0)
    loss, gradient = stage.gradient(stage.fresh(), mine)
    mean = stage.peers.mean(gradient)
    one_loss, one = _one_process(stage, stage.whole_indices(0))
    wrapped = DistributedDataParallel(stage.fresh())
    stage.loss(wrapped, stage.batch(mine)).backward()
    ours = vectors.gradients(wrapped.module)

    products = stage.peers.products(gradient)
    angles = _angles(products)
    stage.rate = _FIRST_MOVE * ratio(length(vectors.weights(stage.base)), length(one) or 1.0)
    # Every rank has computed the same numbers; agree() only makes sure that all go the same way.
    tolerance = _tolerance(stage.base)
    off = agree(not ratio(distance(mean, one), length(one)) <= tolerance)
    place = int(mean.abs().argmax())
    own = {
        "samples": mine,
        "loss": loss,
        "length": length(gradient),
        "angle_to_mean": _angle(float(gradient.double() @ mean.double()), gradient, mean),
        "element": float(gradient[place]),
    }
    shared = {
        "local_batch": stage.local_batch,
        "global_batch": stage.local_batch * stage.size,
        "smallest_angle": min(angles),
        "largest_angle": max(angles),
        "mean_length": length(mean),
        "one_process_loss": one_loss,
        "one_process_length": length(one),
        "difference": distance(mean, one),
        "difference_relative": ratio(distance(mean, one), length(one)),
        "wrapper_difference_relative": ratio(distance(ours, one), length(one)),
        "tolerance": tolerance,
        "element_name": _name_of(stage.base, place),
        "element_mean": float(mean[place]),
        "element_one_process": float(one[place]),
        "element_wrapper": float(ours[place]),
        "causes": _causes(stage, tolerance) if off else [],
    }
    uneven, uneven_shared = _uneven(stage, wrapped)
    return own | {"uneven": uneven}, shared | {"uneven": uneven_shared}


def _uneven(
    stage: Stage, wrapped: DistributedDataParallel
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Give the ranks batches of different sizes: the plain mean is wrong, the counted one is exact."""
    sizes = [max(1, stage.local_batch * (rank + 1) // stage.size) for rank in range(stage.size)]
    count = sizes[stage.world.rank]
    mine = stage.indices(0)[:count]
    _, one = _one_process(
        stage,
        [index for rank, size in enumerate(sizes) for index in stage.indices(0, rank)[:size]],
    )
    wrapped.zero_grad()
    stage.loss(wrapped, stage.batch(mine)).backward()
    plain = vectors.gradients(wrapped.module)
    wrapped.zero_grad()
    loss = stage.loss(wrapped, stage.batch(mine))
    wrapped.backward(loss * count, count=count)
    exact = vectors.gradients(wrapped.module)
    shared = {
        "sizes": sizes,
        "mean_of_means_relative": ratio(distance(plain, one), length(one)),
        "exact_relative": ratio(distance(exact, one), length(one)),
    }
    return {"samples": count, "loss": float(loss.detach())}, shared


def _one_process(
    stage: Stage, indices: Sequence[int], *, trains: bool = True
) -> tuple[float, torch.Tensor]:
    """Let rank 0 compute the gradient of all samples alone, and hand it to the others for comparison."""
    model = stage.fresh().train(trains)
    if stage.world.is_main:
        loss, gradient = stage.gradient(model, indices)
    else:
        loss, gradient = math.nan, torch.zeros_like(vectors.weights(model))
    return stage.peers.table([loss])[0][0], stage.peers.from_first(gradient)


def _causes(stage: Stage, tolerance: float) -> list[dict[str, Any]]:
    """Find out by further runs why the mean is not the gradient of one process."""
    _, gradient = stage.gradient(stage.fresh().eval(), stage.indices(0))
    mean = stage.peers.mean(gradient)
    one_loss, one = _one_process(stage, stage.whole_indices(0), trains=False)
    quiet = stage.fresh().eval()
    with torch.no_grad():
        local = float(stage.loss(quiet, stage.batch(stage.indices(0))))
    losses = [row[0] for row in stage.peers.table([local])]
    if not all(math.isfinite(value) for value in [*losses, one_loss, length(one)]):
        return [{"cause": "not_finite"}]
    if agree(ratio(distance(mean, one), length(one)) <= tolerance):
        # Only training behaves differently.
        found = [("batch_statistics", _COUPLING), ("draws", _DRAWING)]
        causes = [
            {"cause": cause, "modules": names}
            for cause, kinds in found
            if (names := _modules(stage.base, kinds))
        ]
        return causes or [{"cause": "training_mode"}]
    average = sum(losses) / stage.size
    if abs(one_loss - average) > 100 * tolerance * abs(average):
        return [{"cause": "loss_no_mean", "one_process": one_loss, "mean_of_ranks": average}]
    return [{"cause": "arithmetic"}]


def _modules(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> list[str]:
    return [
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, kinds)
    ]


def _tolerance(model: nn.Module) -> float:
    return _UNITS * max(torch.finfo(param.dtype).eps for param in vectors.trained(model))


def _angles(products: list[list[float]]) -> list[float]:
    """Return the angle of each pair of ranks' gradients, in degrees."""
    lengths = [math.sqrt(products[rank][rank]) for rank in range(len(products))]
    return [
        _degrees(ratio(products[a][b], lengths[a] * lengths[b]))
        for a in range(len(products))
        for b in range(a)
    ]


def _angle(product: float, a: torch.Tensor, b: torch.Tensor) -> float:
    return _degrees(ratio(product, length(a) * length(b)))


def _degrees(cosine: float) -> float:
    return math.degrees(math.acos(max(-1.0, min(1.0, cosine))))


def _name_of(model: nn.Module, place: int) -> str:
    """Return the name and position of one element of the flat vector."""
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        numel = param.numel() * (2 if param.is_complex() else 1)
        if place < numel:
            return f"{name}[{place}]"
        place -= numel
    raise IndexError(place)
