"""Optimizers of every kind on top of the wrapper: inside backward, dealt to the ranks, scaled, clipped."""

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest
import torch
from parity_models import batch, build, grads_of, loss_of, share, state_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Torchs

from rankstep import DistributedDataParallel as Ours
from rankstep.testing import (
    assert_bitwise_equal,
    assert_close_to,
    assert_same_on_all,
    first_difference,
)

with warnings.catch_warnings():
    # torch decorates what it imports here with something that it calls deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import (
        ZeroRedundancyOptimizer,
        _apply_optimizer_in_backward,
    )

SMALL = 0.002
STEPS = 6


def part(me, step, dtype=torch.float64):
    return share(batch("MLP 1", me.world_size, step, dtype), me.rank)


def one_process(world, stepper_of, *, steps=STEPS, clip=None):
    """The same optimizer in one process on the whole batch."""
    model = build("MLP 1", torch.float64)
    stepper = stepper_of(model.parameters())
    norms = []
    for step in range(steps):
        stepper.zero_grad()
        loss_of(model, *batch("MLP 1", world, step, torch.float64)).backward()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
        stepper.step()
    return state_of(model), norms


# ---------------------------------------------------------------- inside backward

INSIDE = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
}


def inside_backward(me, name):
    """The optimizers step in backward on the global gradient, and take it away."""
    kind, options = INSIDE[name]
    model = build("MLP 1", torch.float64)
    _apply_optimizer_in_backward(kind, model.parameters(), options)
    run = Ours(model, bucket_cap_mb=SMALL)
    for step in range(STEPS):
        loss_of(run, *part(me, step)).backward()
        assert all(param.grad is None for param in run.parameters())
    # torch's own wrapper does this on GPUs only; ordinary optimizers and one process are the oracles.
    plain = Ours(build("MLP 1", torch.float64), bucket_cap_mb=SMALL)
    stepper = kind(plain.parameters(), **options)
    for step in range(STEPS):
        stepper.zero_grad()
        loss_of(plain, *part(me, step)).backward()
        stepper.step()
    assert_close_to(state_of(run), state_of(plain), rel=1e-12)
    weights, _ = one_process(me.world_size, lambda params: kind(params, **options))
    assert_close_to(state_of(run), weights, rel=1e-9)
    return state_of(run)


@pytest.mark.parametrize("name", INSIDE)
def test_optimizers_inside_backward(ranks, name):
    assert_same_on_all(ranks(2).run(inside_backward, name))


def some_inside(me):
    """Only the first layer steps in backward; no_sync, a layer left out, and a count keep their meaning."""
    model = build("MLP 1", torch.float64)
    _apply_optimizer_in_backward(torch.optim.SGD, model.layers[0].parameters(), {"lr": 0.1})
    run = Ours(model, bucket_cap_mb=SMALL)
    rest = [p for n, p in model.named_parameters() if not n.startswith("layers.0")]
    stepper = torch.optim.SGD(rest, lr=0.1)
    first = model.layers[0].weight.detach().clone()
    with run.no_sync():
        loss_of(run, *part(me, 0)).backward()
    # Nothing steps on a local gradient.
    assert torch.equal(model.layers[0].weight, first)
    loss_of(run, *part(me, 1)).backward()
    assert not torch.equal(model.layers[0].weight, first)
    assert model.layers[0].weight.grad is None
    assert all(param.grad is not None for param in rest)
    stepper.step()
    stepper.zero_grad()
    x, y = part(me, 2)
    run.backward(nn.functional.cross_entropy(run(x), y, reduction="sum"), count=len(x))
    stepper.step()
    return state_of(run)


def test_some_inside_backward_with_no_sync_and_counts(ranks):
    outcomes = ranks(2).run(some_inside)
    assert_same_on_all(outcomes)
    model = build("MLP 1", torch.float64)
    for steps in ((0, 1), (2,)):
        model.zero_grad()
        for step in steps:
            loss_of(model, *batch("MLP 1", 2, step, torch.float64)).backward()
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(0.1 * param.grad)
    assert_close_to(outcomes[0], state_of(model), rel=1e-13)


# ---------------------------------------------------------------- dealt to the ranks


def sharded(me, view):
    """ZeroRedundancyOptimizer beside a plain optimizer, and its state collected and loaded."""
    results = []
    for wrapper in (Ours, Torchs):
        run = wrapper(build("MLP 1", torch.float64), bucket_cap_mb=SMALL)
        stepper = ZeroRedundancyOptimizer(
            run.parameters(), torch.optim.AdamW, lr=0.01, parameters_as_bucket_view=view
        )
        for step in range(STEPS):
            stepper.zero_grad()
            loss_of(run, *part(me, step)).backward()
            stepper.step()
            if step == 2:
                stepper.consolidate_state_dict(to=0)
                if me.rank == 0:
                    kept = stepper.state_dict()
                    assert len(kept["state"]) == len(list(run.parameters()))
        results.append(state_of(run))
    return results


@pytest.mark.parametrize("view", [False, True])
def test_an_optimizer_dealt_to_the_ranks(ranks, view):
    outcomes = ranks(2).run(sharded, view)
    for ours, torchs in outcomes:
        assert_bitwise_equal(ours, torchs)
    assert_same_on_all([ours for ours, _ in outcomes])


def fused(me):
    run = Ours(build("MLP 1"))
    with pytest.raises(RuntimeError, match="_apply_optimizer_in_backward"):
        run._register_fused_optim(torch.optim.SGD, 0.1)


def test_the_fused_form_is_refused_with_a_way_out(ranks):
    ranks(2).run(fused)


# ---------------------------------------------------------------- scaled


def scaled(me, weighted, way):
    """A GradScaler on half types: the same scale on all ranks, infinities skip the step on all."""
    torch.manual_seed(1)
    results = []
    for wrapper in (Ours,) if weighted else (Ours, Torchs):
        model = build("MLP 1")
        run = wrapper(copy.deepcopy(model), bucket_cap_mb=SMALL)
        stepper = torch.optim.SGD(run.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        scales, moved = [], []
        for step in range(STEPS):
            stepper.zero_grad()
            before = state_of(run)
            x, y = part(me, step, torch.float32)
            if way == "infinity on one rank" and step == 3 and me.rank == 1:
                x = x * float("inf")
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = run(x)
                loss = nn.functional.cross_entropy(
                    out.float(), y, reduction="sum" if weighted else "mean"
                )
            if weighted:
                run.backward(scaler.scale(loss), count=len(x))
            else:
                scaler.scale(loss).backward()
            scaler.unscale_(stepper)
            nn.utils.clip_grad_norm_(run.parameters(), 1.0)
            scaler.step(stepper)
            scaler.update()
            scales.append(scaler.get_scale())
            moved.append(first_difference(state_of(run), before) is not None)
        results.append((state_of(run), scales, moved))
    return results


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("way", ["finite", "infinity on one rank"])
def test_a_grad_scaler(ranks, way, weighted):
    outcomes = ranks(2).run(scaled, weighted, way)
    for results in outcomes:
        for other in results[1:]:
            assert_bitwise_equal(results[0], other)
    assert_same_on_all([results[0] for results in outcomes])
    _, scales, moved = outcomes[0][0]
    if way == "finite":
        assert scales == [2.0**10, 2.0**11, 2.0**11, 2.0**12, 2.0**12, 2.0**13]
        assert all(moved)
    else:
        # The infinity of one rank stops the step of all, and halves the scale of all.
        assert scales == [2.0**10, 2.0**11, 2.0**11, 2.0**10, 2.0**10, 2.0**11]
        assert moved == [True, True, True, False, True, True]


# ---------------------------------------------------------------- clipped


def clipped(me, how):
    run = Ours(build("MLP 1", torch.float64), bucket_cap_mb=SMALL)
    stepper = torch.optim.AdamW(run.parameters(), lr=0.01)
    norms = []
    for step in range(STEPS):
        stepper.zero_grad()
        loss_of(run, *part(me, step)).backward()
        if how == "norm":
            norms.append(nn.utils.clip_grad_norm_(run.parameters(), 0.05))
        elif how == "norm without foreach":
            norms.append(nn.utils.clip_grad_norm_(run.parameters(), 0.05, foreach=False))
        elif how == "value":
            nn.utils.clip_grad_value_(run.parameters(), 0.005)
        elif how == "by hand":
            for param in run.parameters():
                param.grad = param.grad.clamp(-0.005, 0.005)
        stepper.step()
    return state_of(run), norms


def clipped_and_one_process(me):
    found = {how: clipped(me, how) for how in ("norm", "norm without foreach", "value", "by hand")}
    weights, norms = one_process(
        me.world_size, lambda params: torch.optim.AdamW(params, lr=0.01), clip=0.05
    )
    for how in ("norm", "norm without foreach"):
        assert_close_to(found[how][0], weights, rel=1e-9)
        assert_close_to(found[how][1], norms, rel=1e-11)
        assert all(norm > 0.05 for norm in norms)
    assert_bitwise_equal(found["value"][0], found["by hand"][0])
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_clipping(ranks, world):
    assert_same_on_all(ranks(world).run(clipped_and_one_process))


# ---------------------------------------------------------------- what loops do with gradients


def some_grads_dropped(me, cap, to_none):
    """Gradients set to None, replaced or changed between backward and step; the next step is right again."""
    run = Ours(build("MLP 1", torch.float64), bucket_cap_mb=cap)
    model = build("MLP 1", torch.float64)
    steppers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (run, model)]
    for step in range(STEPS):
        for stepper in steppers:
            stepper.zero_grad(set_to_none=to_none)
        loss_of(run, *part(me, step)).backward()
        loss_of(model, *batch("MLP 1", me.world_size, step, torch.float64)).backward()
        for each in (run.module, model):
            # Old loops write through ``.data``, which moves the tensor that is the gradient to other memory.
            each.layers[2].weight.grad.data = each.layers[2].weight.grad.data.clamp(-0.01, 0.01)
            each.layers[3].weight.grad.data = each.layers[3].weight.grad.data * 0.5
            if step == 1:
                each.layers[0].weight.grad = None
            elif step == 2:
                each.layers[1].weight.grad = each.layers[1].weight.grad * 2
            elif step == 3:
                each.layers[1].weight.grad.data.zero_()
            elif step == 4:
                each.layers[1].weight.grad.add_(1e-3)
        found, wanted = grads_of(run), grads_of(model)
        for name in [name for name, grad in wanted.items() if grad is None]:
            assert (found.pop(name), wanted.pop(name)) == (None, None)
        assert_close_to(found, wanted, rel=1e-11)
        for stepper in steppers:
            stepper.step()
    return state_of(run)


# With the larger cap some parameters are copied one by one, as they come, and others together.
@pytest.mark.parametrize("cap", [SMALL, None])
@pytest.mark.parametrize("to_none", [True, False])
def test_what_loops_do_with_gradients(ranks, cap, to_none):
    assert_same_on_all(ranks(2).run(some_grads_dropped, cap, to_none))


def large_and_moved(me, to_none):
    """The same with a parameter above 16 KiB, in a bucket with small ones."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)).double()
    run = Ours(copy.deepcopy(model))
    for step in range(4):
        for each in (run, model):
            each.zero_grad(set_to_none=to_none)
        x = torch.full((2, 64), 0.1 * (step + 1), dtype=torch.float64)
        run(x * (me.rank + 1)).square().sum().backward()
        for rank in range(2):
            (model(x * (rank + 1)).square().sum() / 2).backward()
        assert_close_to(grads_of(run), grads_of(model), rel=1e-13)
        for each in (run, model):
            for param in each.parameters():
                param.grad.data = param.grad.data * 3
    return grads_of(run)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_moved_through_data(ranks, to_none):
    assert_same_on_all(ranks(2).run(large_and_moved, to_none))


def several_losses_to_a_step(me):
    """LBFGS calls forward and backward several times in one step."""
    run = Ours(build("MLP 1", torch.float64), bucket_cap_mb=SMALL)
    stepper = torch.optim.LBFGS(run.parameters(), lr=0.1, max_iter=4)
    x, y = part(me, 0)

    def closure():
        stepper.zero_grad()
        loss = nn.functional.cross_entropy(run(x), y)
        loss.backward()
        # LBFGS decides by the loss how to go on, so it must be the same on all ranks.
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        return total / me.world_size

    for _ in range(2):
        stepper.step(closure)
    assert_close_to(state_of(run), lbfgs_alone(me, me.world_size), rel=1e-8)
    return state_of(run)


def lbfgs_alone(me, world):
    model = build("MLP 1", torch.float64)
    stepper = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure():
        stepper.zero_grad()
        loss = loss_of(model, *batch("MLP 1", world, 0, torch.float64))
        loss.backward()
        return loss.detach()

    for _ in range(2):
        stepper.step(closure)
    return state_of(model)


def test_an_optimizer_that_evaluates_several_times(ranks):
    assert_same_on_all(ranks(2).run(several_losses_to_a_step))


def two_optimizers(me):
    """Two optimizers over parts of one wrapper, stepped in different steps, with accumulation."""
    results = []
    for kind in (Ours, Torchs):
        run = kind(build("MLP 1", torch.float64), bucket_cap_mb=SMALL)
        params = list(run.parameters())
        first = torch.optim.SGD(params[: len(params) // 2], lr=0.1)
        second = torch.optim.Adam(params[len(params) // 2 :], lr=0.01)
        for step in range(STEPS):
            quiet = step % 2 == 0
            with run.no_sync() if quiet else contextlib.nullcontext():
                loss_of(run, *part(me, step)).backward()
            if not quiet:
                first.step()
                first.zero_grad()
            if step % 4 == 3:
                second.step()
                second.zero_grad()
        results.append(state_of(run))
    return results


def test_two_optimizers_over_one_wrapper(ranks):
    outcomes = ranks(2).run(two_optimizers)
    for ours, torchs in outcomes:
        assert_bitwise_equal(ours, torchs)
    assert_same_on_all([ours for ours, _ in outcomes])
