"""Recording under other people's launchers and loops: Accelerate, Lightning, forked ranks, and what they do, imitated."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import rankstep
from rankstep.trace import record
from rankstep.trace.files import load
from rankstep.trace.model import SpanKind

SCRIPTS = Path(__file__).parent / "scripts"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
PHASES = {SpanKind.DATA, SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.OPTIMIZER}


def needs(library):
    found = importlib.util.find_spec(library) is not None
    return pytest.mark.skipif(not found, reason=f"needs {library}: pip install {library}")


def run(*words, **env):
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def two_ranks_with_steps(folder, count, kinds=PHASES):
    """Both ranks have all steps, and in each all that a loop does."""
    trace = load(folder)
    assert trace.notices == ()
    assert [rank.rank for rank in trace.ranks] == [0, 1]
    for rank in trace.ranks:
        assert rank.complete
        assert [step.number for step in rank.steps] == list(range(count))
        for step in rank.steps:
            assert kinds <= {span.kind for span in step.spans}
            assert step.buckets
    return trace


@needs("accelerate")
@pytest.mark.parametrize("how", ["environment", "block"])
def test_accelerate(tmp_path, how):
    script, folder = SCRIPTS / "trace_accelerate.py", tmp_path / "traces"
    if how == "block":
        run(*TORCHRUN, script, folder, ACCELERATE_USE_CPU="true")
    else:
        run(*TORCHRUN, script, ACCELERATE_USE_CPU="true", RANKSTEP_TRACE=str(folder))
    two_ranks_with_steps(folder, 6)


@needs("lightning")
@pytest.mark.parametrize("how", ["environment", "block", "its own launcher"])
def test_lightning(tmp_path, how):
    script, folder = SCRIPTS / "trace_lightning.py", tmp_path / "traces"
    if how == "block":
        run(*TORCHRUN, script, folder)
    else:
        launcher = () if how == "its own launcher" else TORCHRUN
        run(*launcher, script, RANKSTEP_TRACE=str(folder))
    two_ranks_with_steps(folder, 6)


def test_ranks_that_are_forked(tmp_path):
    """What knows Rankstep before it forks has begun to record, and its ranks go on, each with its own file and its end."""
    folder = tmp_path / "traces"
    run(SCRIPTS / "trace_forked.py", tmp_path / "store", RANKSTEP_TRACE=str(folder))
    two_ranks_with_steps(folder, 4, {SpanKind.FORWARD, SpanKind.BACKWARD})


# ---------------------------------------------------------------- the same without the libraries


class Ahead:
    """A loader as Accelerate makes it: it holds one batch back, to know which is the last."""

    def __init__(self, loader):
        self._loader = loader

    def __iter__(self):
        batches = iter(self._loader)
        held = next(batches)
        for batch in batches:
            yield held
            held = batch
        yield held


class Passes:
    """An optimizer inside another object, as Accelerate and Lightning hand it out."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        return self.optimizer.step(closure)


class Redirected(torch.nn.Module):
    """Lightning's module: the wrapper's forward runs its training step, loss included."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)

    def forward(self, batch):
        return self.net(batch).square().mean()


def imitate(rank, folder, style):
    torch.manual_seed(0)
    model = rankstep.DistributedDataParallel(Redirected())
    model._is_accelerate_prepared = True
    optimizer = Passes(torch.optim.SGD(model.parameters(), lr=0.01))
    loader = Ahead(DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=3))

    def accelerate(batch, number):
        """Two micro-batches a step, switched as ``accumulate`` does."""
        model.require_backward_grad_sync = number % 2 == 1
        model(batch).backward()
        if number % 2:
            optimizer.step()
            optimizer.optimizer.zero_grad()

    def lightning(batch, number):
        """Forward and backward run in a closure that the optimizer calls."""

        def closure():
            loss = model(batch)
            optimizer.optimizer.zero_grad()
            loss.backward()
            return loss.detach()

        optimizer.step(closure)

    with record(folder):
        for number, (batch,) in enumerate(loader):
            (accelerate if style == "accelerate" else lightning)(batch, number)


@pytest.mark.parametrize(("style", "steps"), [("accelerate", 4), ("lightning", 8)])
def test_loops_of_this_kind(ranks, tmp_path, style, steps):
    ranks(2).run(imitate, tmp_path, style)
    first, _ = two_ranks_with_steps(tmp_path, steps, PHASES - {SpanKind.DATA}).ranks
    inside = [s.kind for s in first.steps[2].spans if s.kind is not SpanKind.OTHER]
    # The loader is one batch ahead, so the last step waits for none.
    assert all(step.spans[0].kind is SpanKind.DATA for step in first.steps[:-1])
    if style == "accelerate":
        assert inside.count(SpanKind.FORWARD) == 2
        assert inside.count(SpanKind.DATA) == 2
    else:
        # Each moment belongs to the innermost: the closure's backward, not the optimizer step around it.
        assert inside[1:3] == [SpanKind.OPTIMIZER, SpanKind.FORWARD]
        assert inside[-1] is SpanKind.OPTIMIZER
