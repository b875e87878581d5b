"""Step by step beside torch's own wrapper: the same gradients and the same weights.

With two ranks there is only one way to add, so equality is bitwise whatever the bucket layout. With more the sums of
gloo depend on where an element lies in its message, so there they agree within rounding.
"""

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest
import torch
from parity_models import (
    MODELS,
    OPTIMIZERS,
    batch,
    buffers_of,
    build,
    grads_of,
    loss_of,
    share,
    state_of,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Torchs
from torch.utils.checkpoint import checkpoint

from rankstep import DistributedDataParallel as Ours
from rankstep.testing import assert_bitwise_equal, assert_close_to, assert_same_on_all

STEPS = 20
# About 2 KiB, so that every model here has more than one bucket.
SMALL = 0.002


def pair(model, ours, torchs):
    """Two wrappers around copies, torch's options for torch's only."""
    return Ours(copy.deepcopy(model), **ours), Torchs(copy.deepcopy(model), **torchs)


def beside(me, name, optimizer, cap, rel):
    model = build(name)
    ours, torchs = pair(model, {"bucket_cap_mb": cap}, {"bucket_cap_mb": cap})
    steppers = [OPTIMIZERS[optimizer](run.parameters()) for run in (ours, torchs)]
    for step in range(STEPS):
        part = share(batch(name, me.world_size, step), me.rank)
        losses = []
        for run, stepper in zip((ours, torchs), steppers, strict=True):
            stepper.zero_grad()
            loss = loss_of(run, *part)
            loss.backward()
            losses.append(loss.detach())
        if rel:
            assert_close_to(grads_of(ours), grads_of(torchs), rel=rel)
        else:
            assert_bitwise_equal(losses[0], losses[1])
            assert_bitwise_equal(grads_of(ours), grads_of(torchs))
        for stepper in steppers:
            stepper.step()
        if rel:
            # Rounding grows from step to step, so each begins at the same weights.
            ours.module.load_state_dict(torchs.module.state_dict())
            for mine, theirs in zip(
                steppers[0].state.values(), steppers[1].state.values(), strict=True
            ):
                for key, value in theirs.items():
                    mine[key].copy_(value)
        else:
            assert_bitwise_equal(state_of(ours), state_of(torchs))
            if me.rank == 0:
                # On the others torch's are copied from here in the next forward, ours are there already.
                assert_bitwise_equal(buffers_of(ours), buffers_of(torchs))
    moved = not torch.equal(next(ours.parameters()), next(model.parameters()))
    facts = ours.reducer.last_step
    return state_of(ours.module), moved, facts.buckets, facts.launched_in_backward


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_have_torchs_bits(ranks, name, optimizer):
    for cap in [SMALL, None]:
        results = ranks(2).run(beside, name, optimizer, cap, None)
        assert_same_on_all([state for state, *_ in results])
        for _, moved, buckets, launched in results:
            assert moved
            if cap == SMALL:
                assert buckets >= 2
                assert launched >= 1
            else:
                assert buckets == 1


@pytest.mark.parametrize("name", ["MLP 1", "CNN", "GPT"])
@pytest.mark.parametrize("world", [3, 4])
def test_more_ranks_agree_with_torch_within_rounding(ranks, world, name):
    for cap in [SMALL, None]:
        results = ranks(world).run(beside, name, "SGD", cap, 1e-6)
        assert all(moved for _, moved, _, _ in results)


def freely(me, name, optimizer):
    """Twenty steps without any correction, in float64."""
    model = build(name, torch.float64)
    ours, torchs = pair(model, {"bucket_cap_mb": SMALL}, {})
    for run in (ours, torchs):
        stepper = OPTIMIZERS[optimizer](run.parameters())
        for step in range(STEPS):
            stepper.zero_grad()
            part = share(batch(name, me.world_size, step, torch.float64), me.rank)
            loss_of(run, *part).backward()
            stepper.step()
    assert_close_to(grads_of(ours), grads_of(torchs), rel=1e-6)
    assert_close_to(state_of(ours), state_of(torchs), rel=1e-6)
    return list(ours.module.parameters())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world", [3, 4])
def test_more_ranks_train_as_torch_does(ranks, world, optimizer):
    assert_same_on_all(ranks(world).run(freely, "MLP 1", optimizer))


# ---------------------------------------------------------------- accumulation and no_sync


def window(me, name, quiet_ours, quiet_torchs):
    """Windows of three backwards; the first two quiet where asked."""
    ours, torchs = pair(build(name), {"bucket_cap_mb": SMALL}, {"bucket_cap_mb": SMALL})
    steppers = [OPTIMIZERS["SGD"](run.parameters()) for run in (ours, torchs)]
    found = []
    for start in range(0, 9, 3):
        for run, stepper, quiet in zip(
            (ours, torchs), steppers, (quiet_ours, quiet_torchs), strict=True
        ):
            stepper.zero_grad()
            for step in range(start, start + 3):
                part = share(batch(name, me.world_size, step), me.rank)
                silent = quiet and step < start + 2
                with run.no_sync() if silent else contextlib.nullcontext():
                    loss_of(run, *part).backward()
        found.append((grads_of(ours), grads_of(torchs)))
        for stepper in steppers:
            stepper.step()
    return found


@pytest.mark.parametrize("name", ["MLP 2", "CNN without buffers", "GPT"])
def test_accumulation_has_torchs_bits(ranks, name):
    for quiet in [False, True]:
        for found in ranks(2).run(window, name, quiet, quiet):
            for ours, torchs in found:
                assert_bitwise_equal(ours, torchs)


def test_inside_no_sync_the_wrappers_differ(ranks):
    results = ranks(2).run(stays_inside)
    for ours, torchs, local in results:
        assert_bitwise_equal(ours, local)
        with pytest.raises(AssertionError, match="differs"):
            assert_bitwise_equal(ours, torchs)
    with pytest.raises(AssertionError, match="ranks 0 and 1 differ"):
        assert_same_on_all([ours for ours, _, _ in results])


def stays_inside(me):
    model = build("MLP 1")
    ours, torchs = pair(model, {}, {})
    part = share(batch("MLP 1", me.world_size, 0), me.rank)
    with ours.no_sync():
        loss_of(ours, *part).backward()
    loss_of(torchs, *part).backward()
    loss_of(model, *part).backward()
    return grads_of(ours), grads_of(torchs), grads_of(model)


# ---------------------------------------------------------------- what torch needs a flag for


class Choosy(nn.Module):
    """Which layers take part depends on the step and on the rank."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(12, 20)
        self.branches = nn.ModuleList(nn.Linear(20, 20) for _ in range(3))
        self.head = nn.Linear(20, 5)

    def forward(self, x, chosen):
        x = self.stem(x).tanh()
        return self.head(sum(self.branches[i](x) for i in chosen).tanh())


CHOICES = {
    "by step": lambda rank, step: [step % 3],
    "by rank": lambda rank, step: [rank, 2],
    "by both": lambda rank, step: [(rank + step) % 3],
    "one never": lambda rank, step: [0, 1],
}


def chooses(me, choice, zero):
    torch.manual_seed(11)
    ours, torchs = pair(
        Choosy(),
        {"bucket_cap_mb": SMALL},
        {"bucket_cap_mb": SMALL, "find_unused_parameters": True},
    )
    # torch warns when a backward used everything.
    warnings.filterwarnings("ignore", ".*find_unused_parameters=True was specified")
    rounded = False
    for step in range(6):
        x, targets = share(batch("MLP 1", me.world_size, step), me.rank)
        for run in (ours, torchs):
            if zero:
                run.zero_grad()
            out = run(x, CHOICES[choice](me.rank, step))
            nn.functional.cross_entropy(out, targets).backward()
        # A gradient that came late is added to the mean of what was there: one rounding more than in one sum.
        rounded = not zero and (rounded or ours.reducer.last_step.second_round)
        if not rounded:
            assert_bitwise_equal(grads_of(ours), grads_of(torchs))
        else:
            assert_close_to(grads_of(ours), grads_of(torchs), rel=1e-6)
    assert not rounded or choice == "by both"
    return grads_of(ours), ours.reducer.last_step.unused


@pytest.mark.parametrize("choice", CHOICES)
def test_unused_parameters_without_a_flag(ranks, choice):
    for zero in [True, False]:
        results = ranks(2).run(chooses, choice, zero)
        assert_same_on_all(results)
        grads, unused = results[0]
        if choice == "one never":
            assert set(unused) == {"branches.2.weight", "branches.2.bias"}
            assert grads["branches.2.weight"] is None


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(12, 20)
        self.shared = nn.Linear(20, 20)
        self.head = nn.Linear(20, 5)

    def forward(self, x):
        x = self.stem(x).tanh()
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True).tanh()
        return self.head(x)


def checkpoints(me):
    torch.manual_seed(11)
    ours, torchs = pair(
        Twice(), {"bucket_cap_mb": SMALL}, {"bucket_cap_mb": SMALL, "static_graph": True}
    )
    for step in range(5):
        x, targets = share(batch("MLP 1", me.world_size, step), me.rank)
        for run in (ours, torchs):
            run.zero_grad()
            nn.functional.cross_entropy(run(x), targets).backward()
        assert_bitwise_equal(grads_of(ours), grads_of(torchs))
    return grads_of(ours)


def test_a_layer_checkpointed_twice_without_a_flag(ranks):
    assert_same_on_all(ranks(2).run(checkpoints))


def half_types(me, dtype):
    """Division comes before the sum, as in torch, and rounds the same."""
    ours, torchs = pair(build("MLP 2", dtype), {"bucket_cap_mb": SMALL}, {"bucket_cap_mb": SMALL})
    for step in range(4):
        x, targets = share(batch("MLP 2", me.world_size, step, dtype), me.rank)
        for run in (ours, torchs):
            run.zero_grad()
            (loss_of(run, x, targets) * 100).backward()
        assert_bitwise_equal(grads_of(ours), grads_of(torchs))
    return grads_of(ours)


def test_other_dtypes_have_torchs_bits(ranks):
    for dtype in [torch.bfloat16, torch.float16, torch.float64]:
        assert_same_on_all(ranks(2).run(half_types, dtype))


def views(me):
    """Also beside torch's own views of buckets, without setting gradients to None."""
    options = {"bucket_cap_mb": SMALL, "gradient_as_bucket_view": True}
    ours, torchs = pair(build("GPT"), options, options)
    steppers = [OPTIMIZERS["AdamW"](run.parameters()) for run in (ours, torchs)]
    for step in range(6):
        part = share(batch("GPT", me.world_size, step), me.rank)
        for run, stepper in zip((ours, torchs), steppers, strict=True):
            stepper.zero_grad(set_to_none=False)
            loss_of(run, *part).backward()
            stepper.step()
        assert_bitwise_equal(grads_of(ours), grads_of(torchs))
        assert_bitwise_equal(state_of(ours), state_of(torchs))
    return state_of(ours)


def test_views_have_torchs_bits(ranks):
    assert_same_on_all(ranks(2).run(views))
