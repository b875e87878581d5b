"""The fault table, rows 7, 10 to 14, 16 to 18 and 22: ranks that are late, elsewhere, or different, but alive."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
import time
import warnings
from datetime import timedelta

import pytest
import torch
from table import QUICK_S, WIDTH, Plan, forked, same_verdict, told_by
from torch import nn

import rankstep

ODD = 1
AT = 3


class Quick(Plan):
    alarm_s = QUICK_S


class Stopped(Quick):
    """7: a signal stops one rank for a while."""

    def data(self, step):
        if (self.me.rank, step) == (ODD, AT):
            helper = forked(2.0, lambda pid: os.kill(pid, signal.SIGCONT))
            os.kill(os.getpid(), signal.SIGSTOP)
            os.waitpid(helper, 0)
        return super().data(step)

    def train(self, world):
        with warnings.catch_warnings():
            # The hub tells of it, too.
            warnings.simplefilter("ignore", rankstep.errors.StoppedRankWarning)
            super().train(world)


class Sleeps(Quick):
    """One rank takes its time in the user's own code."""

    def data(self, step):
        if (self.me.rank, step) == (ODD, AT):
            time.sleep(2.0)
        return super().data(step)


class Computes(Quick):
    def data(self, step):
        until = time.monotonic() + (2.0 if (self.me.rank, step) == (ODD, AT) else 0.0)
        while time.monotonic() < until:
            sum(range(1000))
        return super().data(step)


class Saves(Quick):
    """A checkpoint that takes long."""

    def data(self, step):
        if (self.me.rank, step) == (ODD, AT):
            torch.save(self, Slow())
        return super().data(step)

    def __reduce__(self):
        return (int, (1,))


class Slow:
    def write(self, data):
        time.sleep(2.0 if len(data) > 100 else 0.0)
        return len(data)

    def flush(self):
        pass


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Stopped, ["a signal has stopped it; `kill -CONT` lets it go on (process "]),
        (
            Sleeps,
            [f"step {AT}, outside of the model", "in data: `time.sleep(2.0)`", "idle: asleep"],
        ),
        (Computes, [f"step {AT}, ", "in data: `", "computing (process "]),
        (Saves, [f"step {AT}, checkpoint", "in write: `time.sleep("]),
    ],
    ids=["7 SIGSTOP", "asleep", "computing", "saving"],
)
def test_a_late_rank_is_told_once_and_waited_for(ranks, kind, words):
    told = told_by(ranks, kind)
    verdict = same_verdict({rank: told[rank] for rank in (0, 2)} | {ODD: told[ODD]})
    first, effect, outlook = verdict.splitlines()[:3]
    assert first.startswith(f"rankstep: cause: rank {ODD} has not come: ")
    for each in words:
        assert each in first
    assert effect.startswith("rankstep: effect: ranks 0, 2 ")
    assert f"in the reduction of step {AT}" in effect
    assert "`self.forward(model, self.data(step), step).backward()`" in effect
    assert outlook == "rankstep: they wait on, until the process group's time-out"
    for each in told.values():
        assert (each.steps, each.kinds) == (6, ())


def test_a_limit_ends_the_wait_for_a_late_rank(ranks):
    told = told_by(ranks, Limited)
    for rank in (0, 2):
        assert "CommunicationError" in told[rank].kinds
        assert f"rank {ODD} has not come" in told[rank].error
        assert "waited for longer than 1.2 s" in told[rank].error
        assert "every rank that waits raises an error now" in told[rank].said


class Limited(Sleeps):
    def __init__(self, me):
        os.environ["RANKSTEP_GUARD_LIMIT"] = "1.2"
        super().__init__(me)

    def data(self, step):
        if (self.me.rank, step) == (ODD, AT):
            time.sleep(4.0)
        return Plan.data(self, step)


class Hidden(Quick):
    """11: rank 0 evaluates, and something in there is a collective."""

    def data(self, step):
        if (self.me.rank, step) == (ODD, AT):
            self.evaluate()
        return super().data(step)

    def evaluate(self):
        torch.distributed.barrier()


class Branches(Quick):
    """12: the ranks take different branches, with different collectives in them."""

    def data(self, step):
        if step == AT:
            tensor = torch.ones(3)
            if self.me.rank == ODD:
                torch.distributed.all_gather([torch.ones(3) for _ in range(3)], tensor)
            else:
                torch.distributed.barrier()
        return super().data(step)


class First(Quick):
    """rank_zero_first on some ranks, and a collective on others."""

    def data(self, step):
        if step == AT and self.me.rank != 0:
            with rankstep.rank_zero_first():
                pass
        return super().data(step)


@pytest.mark.parametrize(
    ("kind", "odd", "words"),
    [
        (Hidden, ODD, "in evaluate: `torch.distributed.barrier()`, in torch.distributed.barrier()"),
        (Branches, ODD, "in torch.distributed.all_gather()"),
        (First, 0, "in the reduction of step 3"),
    ],
    ids=["11 a hidden collective", "12 different branches", "rank_zero_first"],
)
def test_ranks_that_wait_in_different_places_end_together(ranks, kind, odd, words):
    told = told_by(ranks, kind)
    verdict = same_verdict(told)
    first, effect, *_ = verdict.splitlines()
    assert first.startswith(f"rankstep: cause: rank {odd} has stood elsewhere")
    assert words in first
    others = [rank for rank in range(3) if rank != odd]
    assert effect.startswith(f"rankstep: effect: ranks {others[0]}, {others[1]} ")
    assert "they wait for each other in different places, and would do so for ever" in verdict
    (way,) = (line for line in verdict.splitlines() if "was called there from" in line)
    assert way.startswith(f"rankstep: rank {odd} was called there from ")
    assert " in follow" in way
    for rank, each in told.items():
        assert each.kinds, rank
        assert f"rank {odd} has stood elsewhere" in each.error


class BranchOfModel(Plan):
    """12: without a collective in it, a branch is no fault."""

    def train(self, world):
        super().train(world)
        self.extra = [param.grad.clone() for param in self.model.parameters()]

    def forward(self, model, x, step):
        model.module.forward = self.left if self.me.rank == ODD else self.right
        return super().forward(model, x, step)

    def left(self, x):
        return self.net[0](x)

    def right(self, x):
        return self.net[1](x)


def test_a_branch_of_the_model_is_no_fault(ranks):
    told = told_by(ranks, BranchOfModel)
    for each in told.values():
        assert (each.steps, each.kinds, each.said) == (6, (), "")
        assert all(torch.equal(a, b) for a, b in zip(each.extra, told[0].extra, strict=True))


class OtherModel(Plan):
    """13: the parameters of one rank stand in another order."""

    def __init__(self, me):
        super().__init__(me)
        sizes = (WIDTH, 3) if me.rank == ODD else (3, WIDTH)
        self.net = nn.Sequential(nn.Linear(WIDTH, sizes[0]), nn.Linear(sizes[0], sizes[1]))


def test_another_model_is_named_on_every_rank(ranks):
    for rank, each in told_by(ranks, OtherModel).items():
        assert "ModelMismatchError" in each.kinds
        assert f"[{rank}]: " in each.error
        assert "parameter 0: shape is [" in each.error
        assert each.said == ""
        assert each.steps == 0


def test_a_rank_that_has_not_started_is_told_while_the_others_wait(ranks):
    """14: long before the time-out."""
    for rank, said in enumerate(ranks(3, backend=None).run(starts_late)):
        assert said == (
            ""
            if rank == ODD
            else "rankstep: rank 1 did not arrive within 0.5 s; waiting for 59.5 s more\n"
        )


def starts_late(me):
    screen = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(screen):
        patch.setattr(sys.modules["rankstep.world.store"], "_NOTE_AFTER", timedelta(seconds=0.5))
        if me.rank == ODD:
            time.sleep(2.0)
        with rankstep.world(timeout=60.0):
            pass
    return screen.getvalue()


def test_a_rank_that_never_starts_is_named(ranks):
    outcomes = ranks(3, backend=None).outcomes(never_starts)
    for rank in (0, 2):
        assert outcomes[rank].error_type == "WorldError", str(outcomes[rank])
        assert f"rank {ODD} did not arrive" in outcomes[rank].error


def never_starts(me):
    if me.rank != ODD:
        with rankstep.world(timeout=1.0):
            raise AssertionError("the world has opened without a rank")


class SlowDisk(Quick):
    """16: rank 0 prepares data for long; the others are shown that it goes on."""

    def train(self, world):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules["rankstep.world.agree"], "_NOTE_EVERY", 1.0)
            with rankstep.rank_zero_first():
                if self.me.rank == 0:
                    time.sleep(2.5)
        super().train(world)


def test_a_slow_disk_on_rank_0_is_progress_and_no_alarm(ranks):
    told = told_by(ranks, SlowDisk)
    for rank, each in told.items():
        assert (each.steps, each.kinds) == (6, ())
        assert "cause" not in each.said
        if rank != 0:
            assert "waiting in rank_zero_first()" in each.said


class NotANumber(Plan):
    """17: the gradient of one rank is NaN."""

    def __init__(self, me):
        os.environ["RANKSTEP_REPORT_NONFINITE"] = "1"
        super().__init__(me)

    def data(self, step):
        odd = (self.me.rank, step) == (ODD, AT)
        return torch.full((2, WIDTH), float("nan")) if odd else super().data(step)

    def train(self, world):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            super().train(world)
        kind = rankstep.errors.NonFiniteGradientWarning
        self.extra = [str(w.message) for w in caught if w.category is kind]


def test_a_nan_is_told_by_every_rank(ranks):
    for each in told_by(ranks, NotANumber).values():
        assert len(each.extra) == 1
        assert f"step {AT}" in each.extra[0]
        assert f": rank {ODD} in '" in each.extra[0]


class Drifts(Plan):
    """18: the weights of one rank change silently."""

    def __init__(self, me):
        super().__init__(me, 40)

    def data(self, step):
        if (self.me.rank, step) == (ODD, AT):
            self.net[1].weight.data[0, 2] += 1e-6
        return super().data(step)


def test_weights_that_changed_silently_are_told_by_every_rank(ranks):
    for each in told_by(ranks, Drifts).values():
        assert "DriftError" in each.kinds
        assert "1.weight" in each.error
        assert f"rank {ODD}" in each.error


class ClockJumps(Sleeps):
    """22: the clock of the host jumps by hours, to and fro."""

    def train(self, world):
        times = iter(range(10**6))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", lambda: 1e9 + 7200.0 * (-1) ** next(times))
            patch.setattr(time, "time_ns", lambda: int(1e18) + 7200 * 10**9 * (-1) ** next(times))
            super().train(world)


class OnlyTheClock(ClockJumps):
    def data(self, step):
        return Plan.data(self, step)


def test_a_jump_of_the_clock_changes_nothing(ranks):
    for each in told_by(ranks, OnlyTheClock).values():
        assert (each.steps, each.kinds, each.said) == (6, (), "")
    told = told_by(ranks, ClockJumps)
    first, effect, *_ = same_verdict(told).splitlines()
    assert f"rank {ODD} has not come" in first
    assert re.match(r"rankstep: effect: ranks 0, 2 (wait|have waited \d{1,2} s): ", effect)
