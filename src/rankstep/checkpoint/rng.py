"""The random numbers of one rank: Python's, numpy's, torch's, and those of its GPUs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture(devices: set[torch.device]) -> dict[str, Any]:
    """Return the state of every global generator that this process draws from.

    Args:
        devices: Where this rank computes.
    """
    version, words, gauss = random.getstate()
    return {
        "python": {
            "version": version,
            "words": torch.tensor(words, dtype=torch.int64, device="cpu"),
            "gauss": gauss,
        },
        "torch": torch.get_rng_state(),
        "gpus": [torch.cuda.get_rng_state(device) for device in _gpus(devices)],
        # The global generator, since that is what users' transforms draw from.
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002
    }


def restore(state: dict[str, Any], devices: set[torch.device]) -> None:
    """Go on with the random numbers that :func:`capture` has kept.

    Args:
        state: What it returned.
        devices: Where this rank computes.
    """
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"].cpu())
    for device, kept in zip(_gpus(devices), state["gpus"], strict=False):
        torch.cuda.set_rng_state(kept.cpu(), device)
    np.random.set_state(state["numpy"])  # noqa: NPY002


def seed_newcomer(state: dict[str, Any], rank: int, step: int) -> None:
    """Give a rank that was not there when the checkpoint was written numbers of its own.

    Args:
        state: What :func:`capture` returned on rank 0; it fixes the numbers.
        rank: The new rank.
        step: Of the checkpoint.
    """
    words = [int(word) for word in state["python"]["words"][:8]]
    seeds = np.random.SeedSequence(words, spawn_key=(step, rank)).generate_state(2, np.uint64)
    seed = int(seeds[0]) >> 1
    random.seed(seed)
    np.random.seed([seed % 2**32, seed >> 32])  # noqa: NPY002
    torch.manual_seed(seed)


def _gpus(devices: set[torch.device]) -> list[torch.device]:
    """The GPUs that this rank draws on, in a fixed order; asking for others would open them."""
    if not torch.cuda.is_initialized():
        return []
    found = {
        device.index for device in devices if device.type == "cuda" and device.index is not None
    }
    found.add(torch.cuda.current_device())
    return [torch.device("cuda", index) for index in sorted(found)]
