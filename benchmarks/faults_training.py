"""What the ranks of `faults.py` run: a few steps of a small model, with one fault, under Rankstep or under torch's DDP.

    faults_training.py WRAPPER FAULT FOLDER

Rank 1 does what the fault says in step 3, and leaves the moment of it in the folder.
"""

# ruff: noqa: D102 - each fault is told in faults.py

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler as TorchSampler

import rankstep

ODD, AT, STEPS = 1, 3, 6
LONG_S = 12.0
DISK_S = 35.0
"""Longer than 30 s, after which Rankstep says that such a wait goes on."""
DRIFT_STEPS = 60
TORCH_TIMEOUT_S = 20.0
"""In place of half an hour, so that what torch says in the end can be shown."""
WIDTH = 4
ENDLESS = ("endless", "stubborn", "preempted", "cut")
LEFT_OUT = ("more", "skip", "blind", "stale")
GROUPS = Path("/sys/fs/cgroup/memory")
if not GROUPS.is_dir():
    GROUPS = Path("/sys/fs/cgroup")


class Rows(Dataset):
    """Ones, and on one rank a row that cannot be read."""

    def __init__(self, length: int, note: object = None) -> None:
        self._length = length
        self._note = note

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._note is not None and index == AT:
            self._note("fault")
            raise OSError("cannot read file 3")
        return torch.ones(WIDTH)


class Training:
    """A few steps of a small model, with one fault."""

    def __init__(self, wrapper: str, fault: str, folder: Path) -> None:
        self.wrapper = wrapper
        self.fault = fault
        self.folder = folder
        self.rank = int(os.environ["RANK"])
        self.ranks = int(os.environ["WORLD_SIZE"])
        torch.manual_seed(0)
        self.net = self.made()
        self.model = self.net
        self.reduced = 0

    def made(self) -> nn.Module:
        """The model; on the odd rank another one, if that is the fault."""
        odd = self.rank == ODD
        if self.fault == "shapes":
            return nn.Linear(WIDTH, 3 if odd else WIDTH)
        if self.fault == "order":
            layers = OrderedDict((name, nn.Linear(WIDTH, WIDTH)) for name in ("left", "right"))
            return nn.Sequential(OrderedDict(reversed(layers.items())) if odd else layers)
        return nn.Linear(WIDTH, WIDTH)

    def note(self, name: str) -> None:
        """Leave the moment for `faults.py`, whole or not at all."""
        part = self.folder / f"{name}.{os.getpid()}.part"
        part.write_text(f"{time.monotonic()}")
        part.rename(self.folder / name)

    # ---------------------------------------------------------------- the loop

    def batches(self) -> object:
        if self.fault == "worker":
            broken = self.note if self.rank == ODD else None
            return DataLoader(Rows(STEPS, broken), num_workers=1)
        if self.fault == "skip":
            kind = rankstep.DistributedSampler if self.wrapper == "rankstep" else TorchSampler
            rows = Rows(STEPS * self.ranks)
            sampler = kind(rows, num_replicas=self.ranks, rank=self.rank, shuffle=False)
            return DataLoader(rows, sampler=sampler)
        steps = 10**7 if self.fault in ENDLESS else DRIFT_STEPS if self.fault == "drift" else STEPS
        return itertools.repeat(torch.ones(1, WIDTH), steps)

    def run(self) -> None:
        """Train; the fault waits in step 3 of rank 1."""
        if self.fault in ("disk", "hook"):
            getattr(self, f"prepare_{self.fault}")()
        if self.fault == "preempted" and self.wrapper == "rankstep":
            self.run_saved()
            return
        for step, batch in enumerate(self.batches()):
            odd = (self.rank, step) == (ODD, AT)
            if odd and self.fault in LEFT_OUT:
                self.leave_out()
                if self.fault == "more":
                    break
                continue
            if step == AT and self.fault in ("inside", "branch"):
                getattr(self, self.fault)()
            act = getattr(self, f"do_{self.fault}", self.nothing) if odd else self.nothing
            self.step(act(batch), odd=odd)
            if self.fault in ENDLESS:
                time.sleep(0.01)
                if step == AT:
                    self.note(f"ready{self.rank}")
        if self.fault == "blind" and self.rank == ODD:
            self.note("fault")
        total = sum(param.sum().item() for param in self.net.parameters())
        print(f"rank {self.rank} is through; its weights add up to {total:.4f}")

    def leave_out(self) -> None:
        """The odd rank takes no step; it may update its weights all the same."""
        self.note("skipped" if self.fault == "blind" else "fault")
        if self.fault == "stale":
            self.update()

    def run_saved(self) -> None:
        """Train with checkpoints, which save when the job is asked to end."""
        with rankstep.Checkpoint(self.folder / "checkpoints", model=self.model) as checkpoint:
            for _ in checkpoint.epochs(1):
                for step in checkpoint.batches(range(10**7), replay=True):
                    self.step(torch.ones(1, WIDTH), odd=False)
                    checkpoint.step()
                    time.sleep(0.01)
                    if step == AT:
                        self.note(f"ready{self.rank}")

    def step(self, batch: torch.Tensor, *, odd: bool) -> None:
        """Forward, backward, and an optimizer."""
        loss = self.model(batch).square().sum()
        if odd and self.fault == "backward":
            loss.register_hook(self.fail)
        self.model.zero_grad()
        loss.backward()
        self.update()

    def update(self) -> None:
        """One of torch's optimizers would load the compiler first."""
        with torch.no_grad():
            for param in self.model.parameters():
                param.sub_(param.grad, alpha=0.01)

    # ---------------------------------------------------------------- what one rank does

    @staticmethod
    def nothing(batch: torch.Tensor) -> torch.Tensor:
        return batch

    def fail(self, _: torch.Tensor) -> None:
        self.note("fault")
        raise MemoryError("no room for this gradient")

    def do_forward(self, _: torch.Tensor) -> torch.Tensor:
        self.note("fault")
        raise ValueError("cannot use batch 7")

    def prepare_hook(self) -> None:
        def hook(bucket: torch.distributed.GradBucket) -> torch.futures.Future:
            self.reduced += 1
            if self.rank == ODD and self.reduced > AT:
                self.note("fault")
                raise KeyError("no such bucket")
            work = torch.distributed.all_reduce(bucket.buffer() / self.ranks, async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        # torch looks at the annotations of a hook, and takes only classes.
        self.model.register_comm_hook(None, lambda _, bucket: hook(bucket))

    def do_kill(self, _: torch.Tensor) -> None:
        self.note("fault")
        os.kill(os.getpid(), signal.SIGKILL)

    def inside(self) -> None:
        """The odd rank is killed while it stands in the all-reduce, since the others come later."""
        if self.rank == ODD:
            threading.Timer(0.3, self.do_kill, (None,)).start()
        else:
            time.sleep(1.0)

    def do_stop(self, batch: torch.Tensor) -> torch.Tensor:
        self.note("fault")
        pid = os.getpid()
        if os.fork() == 0:
            with contextlib.suppress(BaseException):
                time.sleep(LONG_S)
                os.kill(pid, signal.SIGCONT)
            os._exit(0)
        os.kill(pid, signal.SIGSTOP)
        return batch

    def do_memory(self, _: torch.Tensor) -> torch.Tensor:
        """Take more memory than the control group has."""
        group = GROUPS / f"rankstep-faults-{os.getpid()}"
        group.mkdir()
        used = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        old = (group / "memory.limit_in_bytes").exists()
        limit = group / ("memory.limit_in_bytes" if old else "memory.max")
        limit.write_text(str(used + (64 << 20)))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        self.note("fault")
        kept = [b"x" * (8 << 20) for _ in range(128)]
        raise AssertionError(f"{len(kept)} times 8 MiB fitted in")

    def do_hidden(self, batch: torch.Tensor) -> torch.Tensor:
        self.note("fault")
        self.evaluate()
        return batch

    @staticmethod
    def evaluate() -> None:
        torch.distributed.barrier()

    def branch(self) -> None:
        if self.rank == ODD:
            self.note("fault")
            parts = [torch.ones(3) for _ in range(self.ranks)]
            torch.distributed.all_gather(parts, torch.ones(3))
        else:
            torch.distributed.barrier()

    def prepare_disk(self) -> None:
        """Rank 0 prepares data for all, on a slow disk."""
        if self.wrapper == "rankstep":
            with rankstep.rank_zero_first():
                self.write_slowly()
        else:
            self.write_slowly()
            torch.distributed.barrier()

    def write_slowly(self) -> None:
        if self.rank == 0:
            self.note("fault")
            time.sleep(DISK_S)

    def do_nan(self, batch: torch.Tensor) -> torch.Tensor:
        self.note("fault")
        return batch * float("nan")

    def do_drift(self, batch: torch.Tensor) -> torch.Tensor:
        self.note("fault")
        self.net.weight.data[0, 2] += 1e-3
        return batch

    def do_clock(self, batch: torch.Tensor) -> torch.Tensor:
        """`faults.py` moves the clock now; the wait for this rank must be as long as ever."""
        before = time.time()
        self.note("fault")
        time.sleep(LONG_S)
        print(f"rank {self.rank}: the clock has moved by {time.time() - before - LONG_S:.0f} s")
        return batch


def main(wrapper: str, fault: str, folder: Path) -> None:
    """Be one rank."""
    training = Training(wrapper, fault, folder)
    if fault == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if fault == "absent" and training.rank == ODD:
        training.note("fault")
        time.sleep(3600.0)
    if fault in ("shapes", "order") and training.rank == ODD:
        training.note("fault")
    if wrapper == "rankstep":
        # The same limit for those who wait at the start.
        with rankstep.world(timeout=TORCH_TIMEOUT_S if fault == "absent" else None):
            training.model = rankstep.DistributedDataParallel(training.net)
            if fault == "nan":
                training.model.report_nonfinite()
            training.run()
    else:
        limit = timedelta(seconds=TORCH_TIMEOUT_S)
        torch.distributed.init_process_group("gloo", timeout=limit)
        training.model = nn.parallel.DistributedDataParallel(training.net)
        training.run()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
