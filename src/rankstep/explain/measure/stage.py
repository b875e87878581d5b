"""The stage of all parts: this rank's world, the job, and fresh copies of the same model whenever one is needed."""

from __future__ import annotations

import copy
import itertools
import math
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.utils import _recursive_to
from torch.utils.data import default_collate

from rankstep.data import DistributedSampler
from rankstep.explain.measure import vectors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from rankstep.explain.job import Job
    from rankstep.explain.measure.peers import Peers
    from rankstep.world import World

# A permutation of more samples than this is not made for the sake of a few batches.
_MANY = 1 << 24
_SEEDS = 1 << 32
# After so many steps the next epoch begins, however long the dataset is.
_STEPS_KEPT = 64

MIB = 1024 * 1024


@dataclass(slots=True)
class Stage:
    """What all parts share.

    Args:
        world: This rank among all.
        job: The user's, or the built-in one.
        base: The model that every copy starts from, on the device; the same bits on all ranks.
        peers: The other ranks.
        seed: Fixes the order of samples and all draws.
        steps: How many steps the parts that train take.
        tensors: How many tensors the model of many small tensors has.
        local_batch: Samples per rank and step.
        deadline: When all parts should be done, by ``time.monotonic``.
        rate: A learning rate for plain SGD that moves the weights by about a hundredth in the first step.
    """

    world: World
    job: Job
    base: nn.Module
    peers: Peers
    seed: int
    steps: int
    tensors: int
    local_batch: int
    deadline: float = math.inf
    rate: float = 0.0
    orders: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.world.world_size

    def fresh(self) -> nn.Module:
        """Return a copy of the model as it was at the start."""
        model = copy.deepcopy(self.base)
        model.train()
        return model

    def indices(self, step: int, rank: int | None = None) -> list[int]:
        """Return the samples that a rank takes in a step, as the sampler deals them.

        Args:
            step: Counted from 0; after a pass over the dataset, or many steps, the next epoch begins.
            rank: Which rank; None: this one.
        """
        rank = self.world.rank if rank is None else rank
        per_epoch = len(self.job.dataset) // self.size // self.local_batch
        per_epoch = max(1, min(per_epoch, _STEPS_KEPT))
        epoch, place = divmod(step, per_epoch)
        if (epoch, rank) not in self.orders:
            order = "torch" if len(self.job.dataset) <= _MANY else "streaming"
            sampler = DistributedSampler(
                self.job.dataset,
                self.size,
                rank,
                seed=self.seed,
                drop_last=True,
                order=order,  # type: ignore[arg-type]
            )
            sampler.set_epoch(epoch)
            # Copied once, because the parts come back to the same steps again and again.
            taken = per_epoch * self.local_batch
            self.orders[epoch, rank] = list(itertools.islice(sampler, taken))
        return self.orders[epoch, rank][place * self.local_batch : (place + 1) * self.local_batch]

    def whole_indices(self, step: int) -> list[int]:
        """Return the samples of all ranks in a step: the global batch."""
        return [index for rank in range(self.size) for index in self.indices(step, rank)]

    def batch(self, indices: Sequence[int]) -> Any:
        """Make a batch of these samples on the device; random augmentation draws the same for the same sample."""
        items = []
        for index in indices:
            draw(self.seed, index)
            items.append(self.job.dataset[index])
        batch = (self.job.collate or default_collate)(items)
        if self.world.device.type == "cpu":
            return batch
        return _recursive_to(batch, self.world.device, use_side_stream_for_tensor_copies=False)[0]

    def loss(self, model: nn.Module, batch: Any, step: int = 0) -> torch.Tensor:
        """Return the job's loss; dropout draws anew on each rank and step, and the same when a step is run again."""
        draw(self.seed, step, self.world.rank)
        return self.job.loss(model, batch)

    def gradient(self, model: nn.Module, indices: Sequence[int]) -> tuple[float, torch.Tensor]:
        """Return loss and gradient of a plain model on these samples."""
        model.zero_grad()
        loss = self.loss(model, self.batch(indices))
        loss.backward()
        return float(loss.detach()), vectors.gradients(model)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the job's optimizer, or AdamW, for a model."""
        params = vectors.trained(model)
        return self.job.optimizer(params) if self.job.optimizer else torch.optim.AdamW(params)

    def sgd(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make a plain SGD whose steps are neither tiny nor wild, whatever the model."""
        return torch.optim.SGD(vectors.trained(model), lr=self.rate)

    def milliseconds(self, call: Callable[[], object]) -> float:
        """Return how long a call takes when all ranks begin together, on this rank."""
        self.settle()
        self.peers.wait()
        self.settle()
        began = time.perf_counter_ns()
        call()
        self.settle()
        return (time.perf_counter_ns() - began) / 1e6

    def seconds_left(self) -> float:
        """Return how much time is left."""
        return self.deadline - time.monotonic()

    def settle(self) -> None:
        """Let a GPU finish what it was given, so that the clock sees it."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)


def draw(*numbers: int) -> None:
    """Seed Python, numpy and torch from a path of numbers."""
    seed = int(np.random.SeedSequence(list(numbers)).generate_state(1, np.uint32)[0]) % _SEEDS
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - users' transforms draw from the global generator
    torch.manual_seed(seed)
