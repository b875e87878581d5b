"""Part 2, the samples: who gets which, that each is dealt once, and what set_epoch is for."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from rankstep.data import DistributedSampler
from rankstep.data.sampler import RepeatedOrderWarning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankstep.explain.measure.stage import Stage

_FIRST = 5
_MAP = 40
# Counting how often each sample is dealt takes a number per sample; of a bigger dataset that many are dealt.
_COUNTED = 1 << 20


def measure(stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
    """Walk the samplers of all ranks to their ends and count how often each sample came up."""
    length = len(stage.job.dataset)
    counted = min(length, _COUNTED)
    samples = range(counted)
    padded = DistributedSampler(samples, seed=stage.seed)
    exact = DistributedSampler(samples, seed=stage.seed, pad="none")
    padded_counts = stage.peers.totals(_counts(padded, counted, stage))
    exact_counts = stage.peers.totals(_counts(exact, counted, stage))

    epochs = DistributedSampler(samples, seed=stage.seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RepeatedOrderWarning)
        first = torch.tensor(list(epochs))
        forgotten = torch.tensor(list(epochs))
    epochs.set_epoch(1)
    second = torch.tensor(list(epochs))
    own = {
        "samples": len(exact),
        "samples_padded": len(padded),
        "epoch_0": first[:_FIRST].tolist(),
        "epoch_1_without_set_epoch": forgotten[:_FIRST].tolist(),
        "epoch_1": second[:_FIRST].tolist(),
        "same_places_without_set_epoch": int((first == forgotten).sum()),
        "same_places_with_set_epoch": int((first == second).sum()),
        "places": len(first),
    }
    shared = {
        "dataset": type(stage.job.dataset).__name__,
        "dataset_samples": length,
        "counted_samples": counted,
        "dealt": int(exact_counts.sum()),
        "dealt_least": int(exact_counts.min()),
        "dealt_most": int(exact_counts.max()),
        "padded_dealt": int(padded_counts.sum()),
        "padded_least": int(padded_counts.min()),
        "padded_most": int(padded_counts.max()),
        "padded_twice": int((padded_counts == 2).sum()),
        "without_sampler_reads": counted * stage.size,
        "warning": str(caught[0].message) if caught else "",
        "owners_epoch_0": _owners(samples, stage, 0),
        "owners_epoch_1": _owners(samples, stage, 1),
    }
    return own, shared


def _counts(sampler: DistributedSampler, length: int, stage: Stage) -> torch.Tensor:
    dealt = torch.tensor(list(sampler), dtype=torch.int64)
    return torch.bincount(dealt, minlength=length).to(torch.int32).to(stage.world.device)


def _owners(samples: range, stage: Stage, epoch: int) -> list[int]:
    """Return which rank gets each of the first samples."""
    shown = min(len(samples), _MAP)
    owners = [-1] * shown
    for rank in range(stage.size):
        for index in _epoch(samples, stage, rank, epoch):
            if index < shown:
                owners[index] = rank
    return owners


def _epoch(samples: range, stage: Stage, rank: int, epoch: int) -> Iterator[int]:
    sampler = DistributedSampler(samples, stage.size, rank, seed=stage.seed, pad="none")
    sampler.set_epoch(epoch)
    return iter(sampler)
