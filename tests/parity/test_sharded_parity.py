"""The sharded optimizer against the plain one on the wrapped model: the same bits on two ranks, and close on three."""

from __future__ import annotations

import copy

import pytest
import torch
from parity_models import batch, build, loss_of, share, state_of
from torch import nn

from rankstep import DistributedDataParallel, ShardedOptimizer
from rankstep.testing import assert_bitwise_equal, assert_close_to, first_difference

SMALL = 0.01
KINDS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.003, "amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.003}),
    "fused": (torch.optim.AdamW, {"lr": 0.003, "fused": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.003, "centered": True, "momentum": 0.5}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.003}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.003}),
}


def pair(kind, options, model="MLP 1", dtype=torch.float64, shared=True):
    plain = DistributedDataParallel(build(model, dtype), bucket_cap_mb=SMALL)
    sharded = DistributedDataParallel(build(model, dtype), bucket_cap_mb=SMALL)
    stepper = ShardedOptimizer(sharded, kind, share_parameters=shared, **copy.deepcopy(options))
    return (plain, kind(plain.parameters(), **options)), (sharded, stepper)


def part(me, step, model="MLP 1", dtype=torch.float64):
    return share(batch(model, me.world_size, step, dtype), me.rank)


def train(me, name, model, dtype, shared):
    """Weights and states of both after some steps."""
    kind, options = KINDS[name]
    both = pair(kind, options, model, dtype, shared)
    for step in range(5):
        for run, stepper in both:
            stepper.zero_grad()
            loss_of(run, *part(me, step, model, dtype)).backward()
            stepper.step()
    (plain, one), (sharded, other) = both
    assert one.state_dict()["param_groups"] == other.state_dict()["param_groups"]
    return (
        state_of(plain),
        state_of(sharded),
        one.state_dict()["state"],
        other.state_dict()["state"],
    )


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_the_same_bits_on_two_ranks(ranks, name, shared):
    for plain, sharded, state, whole in ranks(2).run(train, name, "MLP 1", torch.float32, shared):
        assert_bitwise_equal(sharded, plain)
        assert sorted(whole) == sorted(state)
        assert_bitwise_equal(
            [whole[key] for key in sorted(whole)], [state[k] for k in sorted(state)]
        )


@pytest.mark.parametrize("model", ["GPT", "CNN"])
def test_the_same_bits_for_other_models(ranks, model):
    outcomes = ranks(2).run(train, "AdamW", model, torch.float32, True)
    for plain, sharded, _, _ in outcomes:
        assert_bitwise_equal(sharded, plain)
    # The twin: another optimizer does not get there.
    others = ranks(2).run(train, "SGD", model, torch.float32, True)
    assert first_difference(others[0][1], outcomes[0][1])


@pytest.mark.parametrize("shared", [True, False])
def test_close_on_three_ranks(ranks, shared):
    for plain, sharded, _, _ in ranks(3).run(train, "momentum", "GPT", torch.float64, shared):
        assert_close_to(sharded, plain, rel=1e-6)


def clipped(me, how, max_norm):
    both = pair(torch.optim.AdamW, {"lr": 0.01})
    norms = [[], []]
    for step in range(4):
        for kept, (run, stepper) in zip(norms, both, strict=True):
            stepper.zero_grad()
            loss_of(run, *part(me, step)).backward()
            if how == "own" and isinstance(stepper, ShardedOptimizer):
                kept.append(stepper.clip_grad_norm_(max_norm))
            elif how == "value":
                nn.utils.clip_grad_value_(run.parameters(), max_norm)
            else:
                kept.append(
                    nn.utils.clip_grad_norm_(run.parameters(), max_norm, foreach=how == "foreach")
                )
            stepper.step()
    assert_close_to(norms[1], norms[0], rel=1e-9) if norms[0] else None
    assert_close_to(state_of(both[1][0]), state_of(both[0][0]), rel=1e-9)
    return state_of(both[1][0])


@pytest.mark.parametrize("how", ["own", "torch's", "foreach", "value"])
def test_clipping(ranks, how):
    tight = ranks(2).run(clipped, how, 0.01)
    loose = ranks(2).run(clipped, how, 1e9)
    assert first_difference(tight[0], loose[0])


def scaled(me, breaks):
    """GradScaler and a scheduler; an infinity on one rank makes all ranks skip the step."""
    results = []
    for run, stepper in pair(torch.optim.AdamW, {"lr": 0.01}, dtype=torch.float32):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(stepper, max_lr=0.1, total_steps=10)
        for step in range(6):
            stepper.zero_grad()
            loss = loss_of(run, *part(me, step, dtype=torch.float32))
            if breaks and step == 2 and me.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(stepper)
            scaler.step(stepper)
            scaler.update()
            schedule.step()
        results.append((scaler.get_scale(), state_of(run)))
    assert_bitwise_equal(results[1], results[0])
    return results[1]


def test_grad_scaler_and_scheduler(ranks):
    skipped = ranks(2).run(scaled, True)
    assert first_difference(skipped[0], ranks(2).run(scaled, False)[0])


def accumulated(me):
    """no_sync, counts, and gradients that nobody zeroed."""
    both = pair(torch.optim.AdamW, {"lr": 0.01})
    for step in range(4):
        for run, stepper in both:
            if step != 2:
                stepper.zero_grad()
            x, y = part(me, step)
            mine = 1 + 2 * me.rank
            with run.no_sync():
                losses = nn.functional.cross_entropy(run(x[:mine]), y[:mine], reduction="sum")
                run.backward(losses, count=mine)
            losses = nn.functional.cross_entropy(run(x[:2]), y[:2], reduction="sum")
            run.backward(losses, count=2)
            stepper.step()
    assert_close_to(state_of(both[1][0]), state_of(both[0][0]), rel=1e-9)


def test_accumulation_windows(ranks):
    ranks(2).run(accumulated)
