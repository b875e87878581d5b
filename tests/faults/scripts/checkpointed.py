"""Trains with a checkpoint behind every step; each life of the job ends as the plan in its folder says."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import rankstep
from rankstep.checkpoint import files

SAMPLES = 48


class Data:
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.linspace(0, index, 6), index


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, inputs):
        return self.layers(inputs)


def die():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def die_before(module, name, count):
    """Kill this process before the ``count``-th call of a function."""
    real, calls = getattr(module, name), [0]

    def call(*args, **kwargs):
        calls[0] += 1
        if calls[0] == count:
            die()
        return real(*args, **kwargs)

    setattr(module, name, call)


def arm(deaths, life, world, net):
    """Prepare this life's end."""
    if life >= len(deaths) or deaths[life]["rank"] != world.rank:
        return
    death = deaths[life]
    how, at = death["how"], death["at"]
    if how == "backward":
        calls = [0]

        def hook(_):
            calls[0] += 1
            if calls[0] == at:
                die()

        net.layers[0].weight.register_hook(hook)
    elif how == "sync":
        die_before(files, "sync", at)


def main(folder):
    plan = json.loads((folder / "plan.json").read_text())
    with rankstep.world() as world:
        told = torch.tensor([len(list(folder.glob("life-*")))])
        torch.distributed.broadcast(told, 0)
        life = int(told)
        world.print(f"life {life} of {world.world_size} ranks", flush=True)
        rankstep.seed_everything(4)
        net = Net()
        model = rankstep.DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        if plan.get("windows"):
            sampler = rankstep.GlobalBatchSampler(Data(), 6, 2)
            loader = DataLoader(Data(), batch_sampler=sampler)
        else:
            sampler = rankstep.DistributedSampler(Data())
            loader = DataLoader(
                Data(), batch_size=3, sampler=sampler, num_workers=1, multiprocessing_context="fork"
            )
        arm(plan["deaths"], life, world, net)
        if world.is_main:
            (folder / f"life-{life}").write_text(str(world.world_size))
        with rankstep.Checkpoint(
            folder / "checkpoints",
            model=model,
            optimizer=optimizer,
            sampler=sampler,
            every=1,
        ) as checkpoint:
            seen = checkpoint.extra.setdefault("seen", [])
            for _ in checkpoint.epochs(plan["epochs"]):
                steps = (
                    checkpoint.windows(loader)
                    if plan.get("windows")
                    else ([batch] for batch in checkpoint.batches(loader))
                )
                for step in steps:
                    optimizer.zero_grad()
                    mine = []
                    for inputs, indices in step:
                        loss = model(inputs).square().sum() * random.random()
                        model.backward(loss, count=len(indices))
                        mine += indices.tolist()
                    optimizer.step()
                    seen.append([checkpoint.steps + 1, mine])
                    note(folder, checkpoint.steps + 1, life, world, mine)
                    time.sleep(plan.get("pause", 0.0))
                    checkpoint.step()
        result = {
            "seen": seen,
            "weights": {name: value.tolist() for name, value in net.state_dict().items()},
            "optimizer": repr(optimizer.state_dict()),
            "draws": [random.random(), torch.rand(2).tolist()],
        }
        (folder / f"result-{world.rank}.json").write_text(json.dumps(result))


def note(folder, step, life, world, samples):
    """Leave word of a step, for tests of jobs whose ranks change."""
    with (folder / f"steps-{world.rank}").open("a") as file:
        file.write(json.dumps([step, life, world.world_size, samples]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
