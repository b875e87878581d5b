"""The fault table, rows 1 to 6, 8, 9 and 10: a rank ends, and every other one says which, how and where."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from table import WIDTH, Plan, same_verdict, told_by
from torch.utils.data import DataLoader, Dataset

ODD = 1
AT = 3


class InForward(Plan):
    def forward(self, model, x, step):
        if (self.me.rank, step) == (ODD, AT):
            raise ValueError("cannot use batch 7")
        return super().forward(model, x, step)


class InBackward(Plan):
    def forward(self, model, x, step):
        loss = super().forward(model, x, step)
        if (self.me.rank, step) == (ODD, AT):
            loss.register_hook(self.fail)
        return loss

    @staticmethod
    def fail(_):
        raise MemoryError("no room for this gradient")


class InHook(Plan):
    def train(self, world):
        reduced = []

        def hook(group, bucket):
            reduced.append(1)
            if self.me.rank == ODD and len(reduced) > AT:
                raise KeyError("no such bucket")
            return torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()

        init = super().forward

        def forward(model, x, step):
            if step == 0:
                model.register_comm_hook(None, self.wrap(hook))
            return init(model, x, step)

        self.forward = forward
        super().train(world)

    @staticmethod
    def wrap(hook):
        return lambda state, bucket: hook(state, bucket).then(lambda done: done.value()[0])


class Rows(Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if (self.rank, index) == (ODD, AT):
            raise OSError("cannot read file 3")
        return torch.ones(WIDTH)


class InWorker(Plan):
    def __init__(self, me):
        super().__init__(me)
        self.batches = iter(DataLoader(Rows(me.rank), batch_size=1, num_workers=1))

    def data(self, step):
        return next(self.batches)


@pytest.mark.parametrize(
    ("kind", "error", "function"),
    [
        (InForward, "ValueError: cannot use batch 7", "in forward"),
        (InBackward, "MemoryError: no room for this gradient", "in fail"),
        (InHook, "KeyError: 'no such bucket'", "in hook"),
        (InWorker, "OSError: cannot read file 3", "in data"),
    ],
    ids=["1 in forward", "2 in backward", "4 in a comm hook", "3 in a data-loading worker"],
)
def test_an_exception_is_told_by_every_rank_before_it_stops(ranks, kind, error, function):
    told = told_by(ranks, kind)
    verdict = same_verdict(told)
    assert verdict.startswith(f"rankstep: rank {ODD} failed: ")
    assert error in verdict
    assert "test_table_ends.py:" in verdict
    assert function in verdict
    assert "cause" not in verdict
    for rank, each in told.items():
        assert each.kinds, rank
        assert each.steps == AT
        if rank != ODD:
            assert f"rank {ODD}" in each.error
            assert "rankstep: rank 0 failed" not in each.said


class Ends(Plan):
    """One rank is gone from one moment to the next."""

    def __init__(self, me, how):
        super().__init__(me)
        self.how = how

    def data(self, step):
        if (self.me.rank, step) == (ODD, AT):
            if self.how == "computing":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.how == "exit code":
                os._exit(5)
            elif self.how == "all-reduce":
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
            elif self.how == "memory":
                self.fill()
        elif self.how == "all-reduce" and step == AT:
            # So that the other one is inside the all-reduce when it ends.
            time.sleep(1.0)
        return super().data(step)

    @staticmethod
    def fill():
        """Take more memory than the control group has."""
        folder = GROUPS / f"rankstep-test-{os.getpid()}"
        folder.mkdir()
        used = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        limit = "memory.limit_in_bytes" if (folder / "memory.limit_in_bytes").exists() else None
        (folder / (limit or "memory.max")).write_text(str(used + (64 << 20)))
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        kept = [b"x" * (8 << 20) for _ in range(128)]
        raise AssertionError(f"{len(kept)} times 8 MiB fitted in")


GROUPS = Path("/sys/fs/cgroup/memory")
if not GROUPS.is_dir():
    GROUPS = Path("/sys/fs/cgroup")


def memory_can_be_limited():
    try:
        probe = GROUPS / f"rankstep-probe-{os.getpid()}"
        probe.mkdir()
    except OSError:
        return False
    limits = [probe / name for name in ("memory.limit_in_bytes", "memory.max")]
    possible = any(limit.exists() for limit in limits)
    probe.rmdir()
    return possible


@pytest.mark.parametrize(
    "how",
    ["computing", "all-reduce", "memory", "exit code"],
    ids=["5 kill -9", "6 kill -9 inside an all-reduce", "8 out of memory", "os._exit"],
)
def test_a_process_that_is_gone_is_told(ranks, how):
    if how == "memory" and not memory_can_be_limited():
        pytest.skip("needs root and a memory controller")
    try:
        told = told_by(ranks, Ends, how, dead=(ODD,))
    finally:
        for folder in GROUPS.glob("rankstep-test-*"):
            folder.rmdir()
    verdict = same_verdict(told)
    # The pool may fetch the signal before anybody can read it; test_table_jobs.py has it with the launcher.
    assert verdict.startswith(f"rankstep: cause: rank {ODD} did not come: its process ")
    for each in told.values():
        assert "CommunicationError" in each.kinds
        assert f"the reduction of step {AT}" in each.error
        assert f"rank {ODD} did not come" in each.error


class Fewer(Plan):
    """One rank has fewer steps to take than the others."""

    def __init__(self, me):
        super().__init__(me, AT if me.rank == ODD else AT + 1)


class Skips(Plan):
    """One rank leaves a whole step out, and runs out of steps earlier."""

    def train(self, world):
        self.steps -= self.me.rank == ODD
        super().train(world)


@pytest.mark.parametrize(
    ("kind", "step"), [(Fewer, AT), (Skips, 5)], ids=["9 one batch too many", "10 skips a step"]
)
def test_a_rank_that_has_done_its_work_is_told_as_such(ranks, kind, step):
    outcomes = told_by(ranks, kind)
    assert outcomes[ODD].kinds == ()
    rest = {rank: each for rank, each in outcomes.items() if rank != ODD}
    verdict = same_verdict(rest)
    assert f"rank {ODD} did not come: its work is done: it has left world()" in verdict
    assert f"after {step} steps" in verdict
    for each in rest.values():
        assert "SyncError" in each.kinds
        assert f"the reduction of step {step}" in each.error


def test_nothing_is_said_where_nothing_is_wrong(ranks):
    told = told_by(ranks, Plan)
    for each in told.values():
        assert (each.steps, each.kinds, each.said) == (6, (), "")
