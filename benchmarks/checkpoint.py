"""What a checkpoint costs: beside a plain write of the same bytes, and beside a training that writes none.

*On the disk.* One rank saves a model and its AdamW state, and the same bytes are written from memory into one file by
plain write and fsync. Both take turns; files are deleted, and the disk is idle, before the next. A checkpoint is more than
its bytes: checksums, a JSON file, and an fsync for each file and folder.

*Behind the training's back.* Ranks train an MLP in turns of a few seconds, with one asynchronous checkpoint in each, or
none. What a checkpoint costs is the difference: copying the tensors, and the cores and memory that writing takes while
training goes on. It is told in milliseconds and as a share of the turn; checkpoints that are further apart cost
proportionally less.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import common
import rankstep

EXAMPLE = "python benchmarks/checkpoint.py --rounds 6 --json checkpoint.json"
GB = 1e9
SIDE = 1024
DISK, ASYNC = "disk", "async"
SAVED, PLAIN = "checkpoint", "plain"
WITH, WITHOUT = "with", "without"
BYTES_PER_PARAM = 12  # a weight and two moments of AdamW, in float32


class Training:
    """An MLP of so many bytes, with its optimizer's state."""

    def __init__(self, nbytes: float, *, wrapped: bool) -> None:
        layers = max(1, round(nbytes / BYTES_PER_PARAM / (SIDE * SIDE)))
        self.net = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(layers)))
        self.model = rankstep.DistributedDataParallel(self.net) if wrapped else self.net
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self.inputs = torch.randn(32, SIDE)
        self.step()

    def step(self) -> None:
        """Run one training step."""
        self.optimizer.zero_grad()
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        """All that a checkpoint of it holds but for a few hundred kilobytes."""
        states = self.optimizer.state.values()
        return [*self.net.parameters(), *(t for s in states for t in s.values() if t.numel() > 1)]


def plain_write(path: Path, tensors: list[torch.Tensor]) -> None:
    """Write the tensors' memory into a file, and see that it is on the disk."""
    with path.open("wb", buffering=0) as file:
        for tensor in tensors:
            data = memoryview(tensor.detach().numpy()).cast("B")
            while data:
                data = data[file.write(data) :]
        os.fsync(file.fileno())


def idle_disk() -> None:
    """Let nothing be left that still has to be written or freed."""
    os.sync()
    time.sleep(0.2)


def disk_job(nbytes: float, rounds: int, folder: str) -> dict[str, list[float]]:
    """Save and write plainly in turns; seconds of each."""
    training = Training(nbytes, wrapped=False)
    tensors = training.tensors()
    told: dict[str, list[float]] = {SAVED: [], PLAIN: []}
    for number in range(rounds + 1):
        for name in sorted(told, reverse=bool(number % 2)):
            place = Path(tempfile.mkdtemp(dir=folder))
            idle_disk()
            if name == PLAIN:
                begin = time.perf_counter()
                plain_write(place / "plain", tensors)
                seconds = time.perf_counter() - begin
            else:
                with rankstep.Checkpoint(
                    place, model=training.net, optimizer=training.optimizer, stop_signals=()
                ) as checkpoint:
                    checkpoint.step()
                    begin = time.perf_counter()
                    checkpoint.save()
                    seconds = time.perf_counter() - begin
            if number:  # the first round warms up
                told[name].append(seconds)
            shutil.rmtree(place)
    return told


def async_job(nbytes: float, rounds: int, turn_s: float, folder: str) -> dict[str, list[float]]:
    """Train with one checkpoint in each turn, or none; seconds of a turn."""
    training = Training(nbytes, wrapped=True)
    ranks = torch.distributed.get_world_size()
    for _ in range(3):
        training.step()
    begin = time.perf_counter()
    for _ in range(5):
        training.step()
    mean = torch.tensor([(time.perf_counter() - begin) / 5 / ranks])
    torch.distributed.all_reduce(mean)
    steps = max(1, round(turn_s / mean.item()))
    told: dict[str, list[float]] = {WITH: [], WITHOUT: [], "blocked": [], "steps": [steps]}
    order = random.Random(0)
    with rankstep.Checkpoint(
        folder,
        model=training.model,
        optimizer=training.optimizer,
        asynchronous=True,
        keep=1,
        stop_signals=(),
    ) as checkpoint:
        for number in range(rounds + 1):
            names = [WITH, WITHOUT]
            order.shuffle(names)
            for name in names:
                gc.collect()
                os.sync()
                torch.distributed.barrier()
                begin = time.perf_counter()
                for step in range(steps):
                    training.step()
                    checkpoint.step()
                    if name == WITH and step == 0:
                        before = time.perf_counter()
                        checkpoint.save()
                        blocked = time.perf_counter() - before
                torch.distributed.barrier()
                seconds = time.perf_counter() - begin
                if number:
                    told[name].append(seconds)
                    if name == WITH:
                        told["blocked"].append(blocked)
    return told


def main() -> None:
    parser = common.parser(__doc__, EXAMPLE)
    parser.add_argument("--rounds", type=common.count, default=8, help="default: %(default)s")
    parser.add_argument(
        "--gigabytes",
        type=float,
        default=1.0,
        help="of the checkpoint on the disk; default: %(default)s",
    )
    parser.add_argument(
        "--async-gigabytes",
        type=float,
        default=0.25,
        help="of the asynchronous ones; default: %(default)s",
    )
    parser.add_argument(
        "--ranks", type=common.count, default=2, help="that train; default: %(default)s"
    )
    parser.add_argument(
        "--turn",
        type=float,
        default=6.0,
        help="seconds between asynchronous ones; default: %(default)s",
    )
    parser.add_argument("--only", choices=("disk", "async"), help="measure one of the two")
    parser.add_argument("--folder", help="where to write; default: the system's temporary folder")
    args = parser.parse_args()
    machine = common.machine()
    common.tell_machine(machine)
    common.require_quiet(args.ranks, allow_busy=args.allow_busy)
    tables, bars = {}, []
    with tempfile.TemporaryDirectory(prefix="rankstep-bench-", dir=args.folder) as folder:
        if args.only != "async":
            disk = disk_job(args.gigabytes * GB, args.rounds, folder)
            tables[DISK] = of_disk(disk, args.gigabytes)
            bars.append(tell_disk(tables))
        if args.only != "disk":
            told = common.on_ranks(
                args.ranks, async_job, args.async_gigabytes * GB, args.rounds, args.turn, folder
            )
            tables[ASYNC] = of_async(told, args.async_gigabytes)
            bars.append(tell_async(tables, args.ranks))
    common.tell_bars(bars)
    settings = common.settings(args, "ranks", "rounds", "turn")
    common.write_result(args.json, "checkpoint", machine, settings, tables, bars)


def of_disk(seconds: dict[str, list[float]], gigabytes: float) -> common.Table:
    """All that is told about the disk."""
    variants = {name: {"seconds": common.Spread.of(times)} for name, times in seconds.items()}
    variants[SAVED]["ratio_to_plain"] = common.paired(seconds[SAVED], seconds[PLAIN])
    return common.Table(variants, None, {"gigabytes": gigabytes})


def tell_disk(tables: dict[str, common.Table]) -> common.Bar:
    table = tables[DISK]
    gigabytes = table.facts["gigabytes"]
    common.tell_table(
        f"a checkpoint of {gigabytes:g} GB on the disk, 1 rank",
        ("", "seconds", "GB/s"),
        [
            (name, f"{own['seconds']:.2f}", f"{gigabytes / own['seconds'].median:.2f}")
            for name, own in table.variants.items()
        ],
    )
    ratio = table.variants[SAVED]["ratio_to_plain"]
    print(f"checkpoint / plain write, paired: {common.cell(ratio)}\n")
    what = "checkpoint: seconds, of a plain write of the same bytes"
    return common.bar_at(what, 1.2, tables, (DISK, SAVED, "ratio_to_plain"))


def of_async(told: list[dict[str, list[float]]], gigabytes: float) -> common.Table:
    """All that is told about checkpoints behind the training's back, as means over ranks."""
    mean = {
        name: [sum(rank) / len(rank) for rank in zip(*(each[name] for each in told), strict=True)]
        for name in (WITH, WITHOUT, "blocked")
    }
    costs = [a - b for a, b in zip(mean[WITH], mean[WITHOUT], strict=True)]
    return common.Table(
        {
            WITHOUT: {"seconds": common.Spread.of(mean[WITHOUT])},
            WITH: {
                "seconds": common.Spread.of(mean[WITH]),
                "cost_seconds": common.Spread.of(costs),
                "blocked_seconds": common.Spread.of(mean["blocked"]),
                "ratio_to_without": common.paired(mean[WITH], mean[WITHOUT]),
            },
        },
        None,
        {"gigabytes": gigabytes, "steps": int(told[0]["steps"][0])},
    )


def tell_async(tables: dict[str, common.Table], ranks: int) -> common.Bar:
    table = tables[ASYNC]
    own, turn = table.variants[WITH], table.variants[WITHOUT]["seconds"]
    common.tell_table(
        f"{table.facts['steps']} steps with one asynchronous checkpoint of {table.facts['gigabytes']:g} GB, "
        f"{common.ranks(ranks)}",
        ("", "seconds"),
        [
            ("turn without", f"{turn:.2f}"),
            ("turn with", f"{own['seconds']:.2f}"),
            ("a checkpoint costs", f"{own['cost_seconds']:.3f}"),
            ("of it, the step waits", f"{own['blocked_seconds']:.3f}"),
        ],
    )
    print(f"with / without, paired: {common.cell(own['ratio_to_without'], '.4f')}")
    print(
        f"two percent of the time are reached with a checkpoint every {own['cost_seconds'].median / 0.02:.0f} s\n"
    )
    what = f"training with an asynchronous checkpoint every {turn.median:.0f} s, of one without"
    return common.bar_at(what, 1.02, tables, (ASYNC, WITH, "ratio_to_without"))


if __name__ == "__main__":
    main()
