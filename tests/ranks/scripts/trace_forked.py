"""Fork two ranks from a process that knows Rankstep already, as launchers in notebooks do."""

from __future__ import annotations

import multiprocessing
import os
import sys

from rankstep import DistributedDataParallel


def train(rank: int, store: str) -> None:
    """Be one rank for four steps, and end as a forked process does."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    for _ in range(4):
        model.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=train, args=(rank, sys.argv[1])) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    sys.exit(max(each.exitcode or 0 for each in ranks))
