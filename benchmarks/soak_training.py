"""What the ranks of `soak.py` run: a training on digits with a checkpoint every few steps, and faults by order.

The plan in the folder says which training it is. Every step's loss goes to the soak through a named pipe, as bits, before
the checkpoint is told of the step. What the soak cannot do to a rank from outside, at just this place, it orders by a file
that the rank takes and deletes: so each order is obeyed once.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import signal
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import rankstep
from rankstep.checkpoint import files, folder
from rankstep.errors import CheckpointError

BATCH = 64
MICRO_BATCH = 12
PACE_S = 0.005
"""A step takes so long at least: how far a training comes between two faults shall not depend on the machine."""

PIPE, PLAN, DATA, CHECKPOINTS = "told", "plan.json", "digits.npz", "checkpoints"


@dataclass(frozen=True, kw_only=True)
class Training:
    """One way to train; each has something that a resume must put right again.

    Args:
        name: Its name.
        story: What it is.
        optimizer: "sgd", "adamw" or "sharded".
        every: Steps from checkpoint to checkpoint.
        windows: Steps of several micro-batches, dealt by a `GlobalBatchSampler`.
        workers: Loader workers of each rank.
        augments: The workers change the images at random.
        asynchronous: Checkpoints are written behind the training's back.
    """

    name: str
    story: str
    optimizer: str
    every: int
    windows: bool = False
    workers: int = 0
    augments: bool = False
    asynchronous: bool = False


TRAININGS = [
    Training(name="momentum", story="SGD with momentum", optimizer="sgd", every=2),
    Training(
        name="workers",
        story="AdamW, two loader workers that augment at random, buckets by measurement",
        optimizer="adamw",
        every=3,
        workers=2,
        augments=True,
    ),
    Training(
        name="windows",
        story="AdamW, accumulation over micro-batches, a worker, asynchronous checkpoints",
        optimizer="adamw",
        every=2,
        windows=True,
        workers=1,
        asynchronous=True,
    ),
    Training(
        name="sharded",
        story="AdamW dealt to the ranks (ShardedOptimizer)",
        optimizer="sharded",
        every=2,
    ),
]


# ---------------------------------------------------------------- orders

SAVING = [(files, "sync", 12), (folder, "sync", 2), (Path, "rename", 4), (folder, "_remove", 2)]
"""Where a rank dies while it saves, and before the how manieth call at most: a file or its folder, the directory, the
checkpoint in its place or an old one out of it, an old one's files."""


class Orders:
    """What the soak wants this rank to do to itself.

    Args:
        where: The folder in which orders are left.
        rank: This one.
        net: What it trains.
    """

    def __init__(self, where: Path, rank: int, net: nn.Module) -> None:
        self._path = where / f"order-{rank}"
        self._net = net

    def take(self) -> None:
        """Obey, if there is something to."""
        if not self._path.exists():
            return
        order = json.loads(self._path.read_text(encoding="utf-8"))
        self._path.unlink()
        getattr(self, order["do"])(order["number"], order["detail"])

    def raise_forward(self, number: int, _: int) -> None:
        """Fail before the batch is used."""
        raise ValueError(f"soak: fault {number} in forward")

    def raise_backward(self, number: int, detail: int) -> None:
        """Fail where a gradient arrives."""

        def fail(_: torch.Tensor) -> None:
            raise MemoryError(f"soak: fault {number} in backward")

        self._any_parameter(detail).register_hook(fail)

    def kill_backward(self, _: int, detail: int) -> None:
        """Die where a gradient arrives."""
        self._any_parameter(detail).register_hook(lambda _: die())

    def kill_saving(self, _: int, detail: int) -> None:
        """Die before one of the calls that bring a checkpoint to the disk, put it in its place, or delete an old one."""
        place, name, most = SAVING[detail % len(SAVING)]
        real, left = getattr(place, name), [1 + detail // len(SAVING) % most]

        def call(*args: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                die()
            return real(*args)

        setattr(place, name, call)

    def fill_disk(self, _: int, detail: int) -> None:
        """Let no file grow beyond a few bytes, which is what a full disk does to a checkpoint."""
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (detail % 20_000, most))

    @staticmethod
    def empty_disk() -> None:
        """Make room again."""
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    def _any_parameter(self, detail: int) -> nn.Parameter:
        parameters = list(self._net.parameters())
        return parameters[detail % len(parameters)]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


# ---------------------------------------------------------------- data and model


class Digits(Dataset):
    """The training images; whoever reads one, the rank or its worker, obeys the order to fail.

    Args:
        where: The folder with the images and the orders.
        rank: This one.
        augments: Images change at random.
    """

    def __init__(self, where: Path, rank: int, *, augments: bool) -> None:
        with np.load(where / DATA, allow_pickle=False) as data:
            self._images = torch.from_numpy(data["images"])
            self._labels = torch.from_numpy(data["labels"])
        self._order = where / f"data-order-{rank}"
        self._augments = augments

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._order.exists():
            number = self._order.read_text(encoding="utf-8")
            self._order.unlink()
            raise OSError(f"soak: fault {number} in the data")
        image = self._images[index]
        if self._augments:
            image = image + 0.1 * torch.randn(image.shape) + 0.01 * random.random()
        return image, self._labels[index]


def make_net() -> nn.Module:
    """Build the CNN of `examples/digits.py` in small, with dropout: it draws random numbers in every step."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(128, 10),
    )


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.004)
    return rankstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.004)


def make_loader(
    training: Training, data: Digits, seed: int
) -> tuple[DataLoader, rankstep.DistributedSampler | rankstep.GlobalBatchSampler]:
    workers = {
        "num_workers": training.workers,
        "multiprocessing_context": "fork" if training.workers else None,
    }
    if training.windows:
        windows = rankstep.GlobalBatchSampler(data, BATCH, MICRO_BATCH, seed=seed)
        return DataLoader(data, batch_sampler=windows, **workers), windows
    sampler = rankstep.DistributedSampler(data, seed=seed, drop_last=True)
    loader = DataLoader(data, BATCH // 2, sampler=sampler, drop_last=True, **workers)
    return loader, sampler


# ---------------------------------------------------------------- the run


class Teller:
    """Tells the soak what happens on this rank, one line at a time.

    Args:
        where: The folder in which the soak reads a pipe.
        rank: This one.
    """

    def __init__(self, where: Path, rank: int) -> None:
        # Without a reader, who is gone then, this fails and does not wait.
        self._pipe = os.open(where / PIPE, os.O_WRONLY | os.O_NONBLOCK)
        os.set_blocking(self._pipe, True)
        self._rank = rank

    def __call__(self, what: str, **facts: Any) -> None:
        """Say one thing."""
        line = json.dumps({"is": what, "rank": self._rank, **facts}) + "\n"
        os.write(self._pipe, line.encode())


def main(where: Path) -> None:
    plan = json.loads((where / PLAN).read_text(encoding="utf-8"))
    training, seed = Training(**plan["training"]), plan["seed"]
    with rankstep.world() as world:
        tell = Teller(where, world.rank)
        rankstep.seed_everything(seed)
        net = make_net()
        cap = "auto" if training.name == "workers" else 0.01
        model = rankstep.DistributedDataParallel(net, bucket_cap_mb=cap)
        optimizer = make_optimizer(training.optimizer, model)
        data = Digits(where, world.rank, augments=training.augments)
        loader, sampler = make_loader(training, data, seed)
        steps = plan["epochs"] * len(data) // BATCH
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        orders = Orders(where, world.rank, net)
        checkpoint = rankstep.Checkpoint(
            where / CHECKPOINTS if plan["saves"] else None,
            model=model,
            optimizer=optimizer,
            scheduler=schedule,
            sampler=sampler,
            every=training.every,
            asynchronous=training.asynchronous,
        )
        with checkpoint:
            resumed = checkpoint.resumed
            ignored = [path.name for path, _ in resumed.ignored] if resumed else []
            tell("begun", step=checkpoint.steps, ignored=ignored, pid=os.getpid())
            losses = checkpoint.extra.setdefault("losses", [])
            for _ in checkpoint.epochs(plan["epochs"]):
                for batches in batches_of(training, checkpoint, loader):
                    began = time.monotonic()
                    orders.take()
                    optimizer.zero_grad()
                    loss, samples = compute(model, batches)
                    optimizer.step()
                    schedule.step()
                    losses.append(loss)
                    tell("step", step=checkpoint.steps + 1, loss=loss, samples=samples)
                    time.sleep(max(0.0, PACE_S - (time.monotonic() - began)))
                    save(checkpoint, training, tell, orders)
        state = final_state(net, optimizer, schedule, losses)
    part = where / f"result-{world.rank}.part"
    part.write_text(json.dumps(state), encoding="utf-8")
    part.replace(where / f"result-{world.rank}.json")


def batches_of(training: Training, checkpoint: rankstep.Checkpoint, loader: DataLoader) -> Any:
    """Yield for each step its batches."""
    if training.windows:
        return checkpoint.windows(loader)
    return ([batch] for batch in checkpoint.batches(loader, replay=training.augments))


def compute(model: rankstep.DistributedDataParallel, batches: Any) -> tuple[str, int]:
    """Forward and backward; returns this rank's loss as bits, and a checksum of what it has seen.

    All three generators of a rank are used, so a resume that forgot one of them shows.
    """
    total, seen = 0.0, 0
    for images, labels in batches:
        noise = torch.from_numpy(np.random.randn(*images.shape).astype(np.float32))  # noqa: NPY002
        logits = model(images * (1 + 0.1 * random.random()) + 0.05 * noise)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        model.backward(loss, count=len(labels))
        total += loss.item()
        seen = zlib.crc32(images.numpy().tobytes(), seen)
    return float(total).hex(), seen


def save(checkpoint: rankstep.Checkpoint, training: Training, tell: Teller, orders: Orders) -> None:
    """End a step; where the disk is full the run goes on."""
    try:
        checkpoint.step()
    except CheckpointError as error:
        orders.empty_disk()
        tell("unsaved", error=str(error)[:1000])
        return
    step = checkpoint.steps
    if step % training.every == 0:
        # The one before is on the disk for sure; this one, where it is written behind the training's back, perhaps not.
        tell("saved", step=step - training.every * training.asynchronous)


def final_state(net: nn.Module, optimizer: Any, schedule: Any, losses: list[str]) -> dict[str, Any]:
    """All that must be equal at the end: hashes of bits, by name."""
    tensors = {f"weights {name}": digest(value) for name, value in net.state_dict().items()}
    draws = [random.random(), np.random.rand(), torch.rand(()).item()]  # noqa: NPY002
    return {
        **tensors,
        "optimizer": digest(optimizer.state_dict()),
        "scheduler": digest(schedule.state_dict()),
        "losses": digest(losses),
        "random numbers": digest(draws),
    }


def digest(value: Any) -> str:
    """Hash a nest of containers with its tensors' bits."""
    found = hashlib.sha256()

    def add(each: Any) -> None:
        if isinstance(each, torch.Tensor):
            found.update(f"{each.dtype} {tuple(each.shape)}".encode())
            found.update(each.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(each, dict):
            for key, item in each.items():
                found.update(repr(key).encode())
                add(item)
        elif isinstance(each, list | tuple):
            found.update(str(len(each)).encode())
            for item in each:
                add(item)
        elif isinstance(each, float):
            found.update(each.hex().encode())
        else:
            found.update(repr(each).encode())

    add(value)
    return found.hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
