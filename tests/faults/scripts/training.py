"""A small training in which rank 1 does, in step 3, what the first argument says; the second one is a folder."""
# ruff: noqa: T201

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import rankstep

ODD = 1
AT = 3
HOW, FOLDER = sys.argv[1], Path(sys.argv[2])


def note(name):
    """Write this process's number where the test finds it, whole or not at all."""
    part = FOLDER / f"{name}.part"
    part.write_text(str(os.getpid()))
    part.rename(FOLDER / f"{name}.pid")


def evaluate():
    torch.distributed.barrier()


def wake(number, _):
    message = f"woken by signal {number}"
    raise ValueError(message)


def spoil(step):
    """What one rank does."""
    if HOW == "raise":
        message = f"cannot use batch {step}"
        raise ValueError(message)
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if HOW == "hidden":
        evaluate()
    if HOW == "sleep":
        signal.signal(signal.SIGUSR1, wake)
        note("late")
        time.sleep(60.0)


def take(model, step, rank):
    """One step, without an optimizer of torch's: building one loads its compiler."""
    if (rank, step) == (ODD, AT):
        spoil(step)
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        for param in model.parameters():
            param.sub_(param.grad, alpha=0.1)
    if step == AT:
        note(f"rank{rank}")


def train(world):
    torch.manual_seed(0)
    model = rankstep.DistributedDataParallel(nn.Linear(4, 4))
    if HOW == "preempted":
        with rankstep.Checkpoint(FOLDER / "checkpoints", model=model) as checkpoint:
            for _ in checkpoint.epochs(1):
                for step in checkpoint.batches(range(10**6), replay=True):
                    take(model, step, world.rank)
                    time.sleep(0.01)
                    checkpoint.step()
    for step in range(10**6 if HOW == "endless" else 8):
        take(model, step, world.rank)
        if HOW == "endless":
            time.sleep(0.01)
    print(f"rank {world.rank} is through")


if __name__ == "__main__":
    with rankstep.world() as here:
        train(here)
