"""What the tests of the fault table share: ranks with a quick alarm, and what each of them said."""

from __future__ import annotations

import contextlib
import io
import os
import re
import time
from dataclasses import dataclass

import torch
from torch import nn

import rankstep
from rankstep import DistributedDataParallel
from rankstep.doctor import current
from rankstep.testing import Status

QUICK_S = 0.6
WIDTH = 4


@dataclass(frozen=True)
class Told:
    """What a rank saw and said.

    Args:
        steps: The steps that it took.
        kinds: The classes of the error that ended it; empty: none.
        error: Its text.
        said: What its guard printed.
        extra: What the test asked for.
    """

    steps: int
    kinds: tuple[str, ...]
    error: str
    said: str
    extra: object = None

    @property
    def verdict(self):
        """The lines of the guard, without those about the rank itself or a late start."""
        lines = [line for line in self.said.splitlines() if line.startswith("rankstep: ")]
        return [line for line in lines if not re.search("came after all|did not arrive", line)]


class Plan:
    """One training, with something that one rank does in it.

    Args:
        me: The rank.
        steps: To take.

    Attributes:
        alarm_s: The default where nothing is waited for, so that a busy machine is no fault.
    """

    alarm_s = 5.0

    def __init__(self, me, steps=6):
        self.me = me
        self.steps = steps
        self.taken = 0
        self.extra = None
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def data(self, step):
        return torch.full((2, WIDTH), float(step + self.me.rank))

    def forward(self, model, x, step):
        return model(x).square().sum()

    def train(self, world):
        model = self.model = DistributedDataParallel(self.net)
        for step in range(self.steps):
            model.zero_grad()
            self.forward(model, self.data(step), step).backward()
            self.taken += 1


def follow(me, kind, *args):
    """Run a plan; say what became of it on this rank."""
    os.environ["RANKSTEP_GUARD_ALARM"] = str(kind.alarm_s)
    screen = io.StringIO()
    plan = kind(me, *args)
    kinds, text = (), ""
    with contextlib.redirect_stderr(screen):
        try:
            with rankstep.world() as world:
                plan.train(world)
        except BaseException as error:  # noqa: BLE001 - looked at in the test
            kinds = tuple(each.__name__ for each in type(error).__mro__)
            text = "\n".join([str(error), *getattr(error, "__notes__", [])])
            # The others' words may be on their way.
            until = time.monotonic() + 3.0
            while "rankstep: " not in screen.getvalue() and time.monotonic() < until:
                time.sleep(0.02)
            time.sleep(0.1)
            guard = current()
            if guard is not None:
                guard.close()
    return Told(plan.taken, kinds, text, screen.getvalue(), plan.extra)


def told_by(ranks, kind, *args, dead=()):
    """What three ranks said, but for those that died."""
    outcomes = ranks(3, backend=None).outcomes(follow, kind, *args)
    for rank, outcome in enumerate(outcomes):
        wanted = Status.DIED if rank in dead else Status.OK
        assert outcome.status is wanted, str(outcome)
    return {rank: outcome.value for rank, outcome in enumerate(outcomes) if rank not in dead}


def same_verdict(told):
    """The one verdict that all of them have printed, each of them once."""
    verdicts = {rank: each.verdict for rank, each in told.items()}
    first = next(iter(verdicts.values()))
    assert all(verdict == first for verdict in verdicts.values()), verdicts
    assert first, told
    assert len(set(first)) == len(first), first
    return "\n".join(first)


def forked(seconds, call):
    """Do something to this process from outside of it, a moment later."""
    pid = os.getpid()
    helper = os.fork()
    if helper == 0:
        with contextlib.suppress(BaseException):
            time.sleep(seconds)
            call(pid)
        os._exit(0)
    return helper
