"""What is said when something goes wrong: the same faults under Rankstep and under torch's DDP, each with its launcher.

For every fault a training of three ranks is started, in which rank 1 does something in step 3. Told are the exit code,
the seconds until the job had ended (or that it was still standing when the time was over) and what stood on the screen,
without the tracebacks. `docs/faults.md` quotes it.
"""

# ruff: noqa: D102 - each fault is told in FAULTS

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import rankstep

ODD, AT, STEPS, RANKS = 1, 3, 6, 3
ALARM_S = 5
LONG_S = 20
DRIFT_STEPS = 60
LONGEST = 400
FAULTS = {
    "forward": "an exception in forward",
    "backward": "an exception in backward",
    "worker": "an exception in a data-loading worker",
    "kill": "kill -9 while computing",
    "stop": f"a signal stops the rank for {LONG_S} s",
    "more": "one batch too many on the others",
    "skip": "the rank leaves out a step",
    "hidden": "a collective hidden in the rank's evaluation",
    "sleep": f"the rank reads data for {LONG_S} s",
    "shapes": "another model on the rank",
    "nan": "a NaN on the rank",
    "drift": "the rank's weights change silently",
}
BIN = Path(sys.executable).parent
PREFIX = re.compile(r"^\[rank ?s? ?[\d, x-]+\]:? ?|^\[W\d+ .*|^[EW]\d{4} .*")
# What is left of a traceback without its frames are its last lines.
DROPPED = re.compile(
    r"^\s|^\[W|^$|^Traceback|^Original Traceback|^During handling|^The above exception|^rankstep: traceback of|^[-=]+$"
    r"|^Failures:|^\[\d+\]:|^Root Cause"
)


class Rows(Dataset):
    """Ones, and on one rank a row that cannot be read."""

    def __init__(self, *, broken: bool) -> None:
        self._broken = broken

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._broken and index == AT:
            raise OSError("cannot read file 3")
        return torch.ones(4)


class Training:
    """A few steps of a small model, with one fault."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.rank = int(os.environ["RANK"])
        torch.manual_seed(0)
        self.net = nn.Linear(4, 3 if fault == "shapes" and self.rank == ODD else 4)
        self.model = self.net

    def run(self) -> None:
        """Train; the fault waits in step 3 of rank 1."""
        broken = self.fault == "worker" and self.rank == ODD
        loader = DataLoader(Rows(broken=broken), num_workers=int(self.fault == "worker"))
        # Weights that have changed are found once the rotation comes to them.
        for step, batch in enumerate(itertools.chain(loader, [torch.ones(1, 4)] * DRIFT_STEPS)):
            if step == STEPS and self.fault != "drift":
                break
            odd = (self.rank, step) == (ODD, AT)
            if odd and self.fault == "more":
                break
            if odd and self.fault == "skip":
                continue
            self.step(getattr(self, self.fault, self.nothing)(batch) if odd else batch, odd=odd)
        weight = self.net.weight[0, 0].item()
        print(f"rank {self.rank} is through; its first weight is {weight:.3f}")

    def step(self, batch: torch.Tensor, *, odd: bool) -> None:
        """Forward, backward, and an optimizer."""
        loss = self.model(batch).square().sum()
        if odd and self.fault == "backward":
            loss.register_hook(self.fail)
        self.model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for param in self.model.parameters():
                param.sub_(param.grad, alpha=0.01)

    @staticmethod
    def fail(_: torch.Tensor) -> None:
        raise MemoryError("no room for this gradient")

    @staticmethod
    def nothing(batch: torch.Tensor) -> torch.Tensor:
        return batch

    @staticmethod
    def forward(_: torch.Tensor) -> torch.Tensor:
        raise ValueError("cannot use batch 7")

    @staticmethod
    def kill(_: torch.Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @staticmethod
    def stop(batch: torch.Tensor) -> torch.Tensor:
        pid = os.getpid()
        if os.fork() == 0:
            time.sleep(LONG_S)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
        os.kill(pid, signal.SIGSTOP)
        return batch

    def hidden(self, batch: torch.Tensor) -> torch.Tensor:
        self.evaluate()
        return batch

    @staticmethod
    def evaluate() -> None:
        torch.distributed.barrier()

    @staticmethod
    def sleep(batch: torch.Tensor) -> torch.Tensor:
        time.sleep(LONG_S)
        return batch

    @staticmethod
    def nan(batch: torch.Tensor) -> torch.Tensor:
        return batch * float("nan")

    def drift(self, batch: torch.Tensor) -> torch.Tensor:
        self.net.weight.data[0, 2] += 1e-3
        return batch


def rank(wrapper: str, fault: str) -> None:
    """Be one rank."""
    training = Training(fault)
    if wrapper == "rankstep":
        with rankstep.world():
            training.model = rankstep.DistributedDataParallel(training.net)
            if fault == "nan":
                training.model.report_nonfinite()
            training.run()
    else:
        torch.distributed.init_process_group("gloo")
        training.model = nn.parallel.DistributedDataParallel(training.net)
        training.run()
        torch.distributed.destroy_process_group()


# ---------------------------------------------------------------- all of them


def run(wrapper: str, fault: str, limit_s: float) -> str:
    """Start the ranks under the wrapper's own launcher; tell what happened."""
    launcher = (
        [BIN / "rankstep", "run"] if wrapper == "rankstep" else [BIN / "torchrun", "--standalone"]
    )
    command = [*launcher, f"--nproc-per-node={RANKS}", __file__, "--rank", wrapper, fault]
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rankstep-faults-") as folder:
        job = subprocess.Popen(
            [str(word) for word in command],
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "RANKSTEP_GUARD_ALARM": str(ALARM_S), "TMPDIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parent,
            start_new_session=True,
        )
        try:
            output, _ = job.communicate(timeout=limit_s)
            end = f"exit code {job.returncode} after {time.monotonic() - began_s:.0f} s"
        except subprocess.TimeoutExpired:
            end = f"still standing after {limit_s:.0f} s"
            job.send_signal(signal.SIGINT)
            try:
                output, _ = job.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
                output, _ = job.communicate()
    kept = [
        line.rstrip()[:LONGEST]
        for line in output.splitlines()
        if not DROPPED.search(PREFIX.sub("", line))
    ]
    return "\n".join([f"--- {wrapper}: {end}", *dict.fromkeys(kept)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument(
        "--wrappers", nargs="+", choices=["rankstep", "torch"], default=["rankstep", "torch"]
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=45.0,
        metavar="SECONDS",
        help="a job that stands for longer is ended",
    )
    parser.add_argument("--rank", nargs=2, metavar=("WRAPPER", "FAULT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(*args.rank)
        return
    for fault in args.faults:
        print(f"\n=== {fault}: {FAULTS[fault]}", flush=True)
        for wrapper in args.wrappers:
            print(run(wrapper, fault, args.limit), flush=True)


if __name__ == "__main__":
    main()
