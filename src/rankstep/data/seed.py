"""One seed for everything random, and yet another stream of random numbers on each rank and in each loader worker."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from rankstep.data.checks import whole_number
from rankstep.errors import DataError


def seed_everything(seed: int, *, per_rank: bool = True) -> int:
    """Seed Python's `random`, numpy's global generator and torch on all its devices, and return the seed they got.

    With one and the same seed on all ranks, dropout and augmentation draw the same numbers on each of them, and the
    global batch is less random than it looks. So each rank gets a seed of its own, hashed from (seed, rank). Adding the
    rank instead would make rank 1 of seed 0 equal rank 0 of seed 1.

    The rank is that in torch's default process group; where none is open yet it is RANK of the environment, or 0.
    Models built after this differ between the ranks; the wrapper starts them all from rank 0's. Where the ranks must draw
    the same numbers, pass per_rank=False.

    Args:
        seed: The run's seed, the same on all ranks, in [0, 2**63 - 1].
        per_rank: Give each rank a stream of its own; False gives `seed` itself to all, of which torch's generator on
            the CPU looks at the lowest 32 bits alone.

    Raises:
        DataError: `seed` is no whole number or out of range, or RANK in the environment is no rank.

    Source:
        numpy.random.SeedSequence, "Parallel random number generation" in numpy's manual; PyTorch's note
        "Reproducibility".
    """
    seed = whole_number(seed, "seed", least=0)
    if seed >= 2**63:
        raise DataError(f"seed must be below 2**63, got {seed}")
    if per_rank:
        seed = _derived(seed, _rank())
    _seed_all(seed)
    return seed


def worker_init_fn(worker_id: int) -> None:
    """Give a DataLoader's worker its own stream in `random`, numpy and torch; pass it as the loader's `worker_init_fn`.

    torch seeds each worker with a number drawn on its rank plus the worker's own. Ranks that were seeded alike draw the
    same number, so their workers would augment alike. Here the rank is hashed in too. The rank is found as in
    `seed_everything`; a worker that is spawned, not forked, sees no process group and relies on RANK.

    Args:
        worker_id: Number of the worker on this rank; the loader passes it.

    Raises:
        DataError: Called outside of a worker, or RANK in the environment is no rank.

    Source:
        PyTorch's FAQ, "My data loader workers return identical random numbers".
    """
    worker = get_worker_info()
    if worker is None:
        raise DataError(
            f"worker_init_fn({worker_id!r}) was called outside of a loader's worker; "
            "pass it on: DataLoader(..., worker_init_fn=worker_init_fn), or call seed_everything"
        )
    drawn_on_rank = worker.seed - worker.id
    _seed_all(_derived(drawn_on_rank, _rank(), worker.id))


def _derived(seed: int, *path: int) -> int:
    """Hash the seed and a path of numbers below it into a seed that every library takes."""
    word = np.random.SeedSequence(seed, spawn_key=path).generate_state(1, np.uint64)[0]
    return int(word) >> 1  # the sign bit stays free, so that the seed fits an int64 tensor


def _seed_all(seed: int) -> None:
    random.seed(seed)
    # Users' transforms draw from numpy's global generator; it takes 32 bits as an int and more as a list of words.
    np.random.seed(seed if seed < 2**32 else [seed % 2**32, seed >> 32])  # noqa: NPY002
    torch.manual_seed(seed)


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    text = os.environ.get("RANK", "0")
    try:
        rank = int(text)
    except ValueError:
        rank = -1
    if rank < 0:
        raise DataError(f"RANK={text!r} in the environment is no rank; it must be 0, 1, 2, ...")
    return rank
