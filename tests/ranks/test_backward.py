"""Backward on real ranks: whatever the graph does, every rank ends with the gradients of one process.

The oracle is always the same: plain copies of the model, one per rank's data, in one process without any wrapper, and
the mean of their gradients. In float64 with two ranks the mean has no rounding of its own, so equality is bitwise
wherever a parameter's gradient is reduced once.
"""

# ruff: noqa: B023 (what binds a loop variable here is called in the same turn of the loop)
from __future__ import annotations

import copy
import itertools
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rankstep import DistributedDataParallel
from rankstep.testing import (
    assert_bitwise_equal,
    assert_close_to,
    assert_in_order,
    assert_same_on_all,
)
from rankstep.trace.events import BucketLaunched, BucketWaited, GradReady, StepSettled

# About 100 bytes: every weight below is a bucket of its own, so buckets leave while backward runs.
TINY = 0.0001
WIDTH = 6


def inputs(rank, step=0):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)


def one_process(model, loss_of, world, steps=1):
    """The mean over the ranks of what each rank's losses give, on plain copies of the model."""
    copies = [copy.deepcopy(model) for _ in range(world)]
    for step in range(steps):
        for rank, plain in enumerate(copies):
            loss_of(plain, rank, step)
    return {
        name: mean([dict(plain.named_parameters())[name].grad for plain in copies])
        for name, _ in model.named_parameters()
    }


def mean(grads):
    present = [grad for grad in grads if grad is not None]
    if not present:
        return None
    return sum(grad / len(grads) for grad in present)


def grads_of(model):
    return {
        name.removeprefix("module."): None if param.grad is None else param.grad.clone()
        for name, param in model.named_parameters()
    }


def built(kind, *args):
    """The same float64 model on every rank and in the test."""
    torch.manual_seed(7)
    return kind(*args).double()


KINDS = (GradReady, BucketLaunched, BucketWaited, StepSettled)


def record(reducer):
    """The list that gets the reducer's events of these kinds from now on."""
    events = []
    reducer.recorder = lambda event: events.append(event) if isinstance(event, KINDS) else None
    return events


class Counting:
    """A communicator that counts what goes through it."""

    def __init__(self, comm):
        self.comm = comm
        self.called = []

    def __getattr__(self, name):
        if name in ("all_reduce", "broadcast", "all_gather", "reduce_scatter"):
            self.called.append(name)
        return getattr(self.comm, name)


class Chain(nn.Module):
    def __init__(self, count=4, width=WIDTH):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


# ---------------------------------------------------------------- the steps of one training


def named(event):
    kind = type(event).__name__
    if isinstance(event, GradReady):
        return kind, event.param
    if isinstance(event, StepSettled):
        return kind, event.step
    return kind, event.bucket


def first_steps(me):
    model = built(Chain)
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=TINY)
    comm = wrapped.reducer.comm = Counting(wrapped.reducer.comm)
    before = wrapped.reducer.plan, wrapped.reducer.last_step
    steps = []
    for step in range(3):
        events = record(wrapped.reducer)
        wrapped.zero_grad()
        comm.called.clear()
        wrapped(inputs(me.rank, step)).sum().backward()
        wanted = one_process(
            model, lambda plain, rank, _: plain(inputs(rank, step)).sum().backward(), me.world_size
        )
        assert_bitwise_equal(grads_of(wrapped), wanted)
        steps.append((events, wrapped.reducer.last_step, list(comm.called)))
    return before, steps, wrapped.reducer.plan


def test_the_first_step_learns_and_the_next_ones_overlap(ranks):
    results = ranks(2).run(first_steps)
    assert_same_on_all([plan.fingerprint() for _, _, plan in results])
    for before, steps, plan in results:
        assert before == (None, None)
        count = len(plan.buckets)
        assert count == 4
        for step, (events, facts, called) in enumerate(steps):
            launched = [e for e in events if isinstance(e, BucketLaunched)]
            assert [e.bucket for e in launched] == list(range(count))
            assert [e.bucket for e in events if isinstance(e, BucketWaited)] == list(range(count))
            assert {e.step for e in events} == {step}
            assert isinstance(events[-1], StepSettled)
            assert facts.step == step
            assert (facts.buckets, facts.all_reduces) == (count, count)
            assert (facts.unused, facts.second_round) == ((), False)
            # Learning costs one broadcast; after that nothing but one all-reduce per bucket.
            assert called == [*(["broadcast"] if step == 0 else []), *["all_reduce"] * count]
        events, facts, _ = steps[0]
        assert facts.launched_in_backward == 0
        assert not any(isinstance(e, GradReady) for e in events)
        for events, facts, _ in steps[1:]:
            assert facts.launched_in_backward == count - 1
            ready = [e.param for e in events if isinstance(e, GradReady)]
            assert sorted(ready) == list(range(8))
            assert sum(e.in_backward for e in events if isinstance(e, BucketLaunched)) == count - 1
            names = [named(e) for e in events]
            for bucket in plan.buckets[:-1]:
                # A bucket leaves once its own gradients are there, and does not wait for those of the next.
                for param in bucket.params:
                    assert_in_order(names, ("GradReady", param), ("BucketLaunched", bucket.index))
                after = plan.buckets[bucket.index + 1].params[-1]
                assert_in_order(names, ("BucketLaunched", bucket.index), ("GradReady", after))
            last = count - 1
            assert_in_order(names, ("GradReady", ready[-1]), ("BucketLaunched", last))


class Fan(nn.Module):
    """Branches that meet in a sum; backward visits them in the reverse order of forward."""

    def __init__(self, count=4):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x, order):
        return sum(self.branches[i](x).tanh() for i in order)


def own_order(me):
    model = built(Fan)
    order = range(4) if me.rank == 0 else (3, 0, 2, 1)
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=TINY)
    for step in range(3):
        events = record(wrapped.reducer)
        wrapped.zero_grad()
        wrapped(inputs(me.rank, step), order).sum().backward()
        wanted = one_process(
            model,
            lambda plain, rank, _: plain(inputs(rank, step), range(4)).sum().backward(),
            me.world_size,
        )
        assert_close_to(grads_of(wrapped), wanted, rel=1e-15)
    reducer = wrapped.reducer
    ready = [e.param for e in events if isinstance(e, GradReady)]
    launched = [e.bucket for e in events if isinstance(e, BucketLaunched)]
    return reducer.firings.order(), ready, reducer.plan.order, launched, reducer.last_step


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_fire_in_different_orders_adopt_that_of_rank_0(ranks, world):
    results = ranks(world).run(own_order)
    (learned, ready, adopted, launched, _), *others = results
    assert list(adopted) == learned
    assert launched == [0, 1, 2, 3]
    for other_learned, other_ready, other_adopted, other_launched, facts in others:
        assert other_learned != learned
        assert other_ready != ready
        assert other_adopted == adopted
        # Whatever fills first, buckets leave in the order of the plan.
        assert other_launched == launched
        assert facts.all_reduces == 4
    assert results[0][-1].launched_in_backward == 3


def one_rank_alone(me):
    model = built(Chain)
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=TINY)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(inputs(0, step)).sum().backward()
        wanted = one_process(
            model, lambda plain, rank, _: plain(inputs(rank, step)).sum().backward(), 1
        )
        assert_bitwise_equal(grads_of(wrapped), wanted)
    return wrapped.reducer.last_step.launched_in_backward


def test_one_rank_is_a_world_too(ranks):
    assert ranks(1).run(one_rank_alone) == [3]


def not_wrapped(me):
    """The twin of all tests here: without the wrapper the ranks' gradients differ."""
    model = built(Chain)
    model(inputs(me.rank)).sum().backward()
    return grads_of(model)


def test_without_the_wrapper_the_gradients_differ(ranks):
    with pytest.raises(AssertionError, match="ranks 0 and 1 differ"):
        assert_same_on_all(ranks(2).run(not_wrapped))


# ---------------------------------------------------------------- unused parameters


class Branches(nn.Module):
    """Only the named branches take part."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.c = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, names):
        x = self.stem(x)
        return sum(getattr(self, name)(x).tanh() for name in names)


SCHEDULES = {
    "never": lambda rank, step: "ab",
    "at first not": lambda rank, step: "ab" if step == 0 else "abc",
    "only at first": lambda rank, step: "abc" if step == 0 else "ab",
    "every other step": lambda rank, step: "ac" if step % 2 else "ab",
    "by rank": lambda rank, step: ("ab", "ac", "b")[rank],
    "by rank and step": lambda rank, step: "abc"[(rank + step) % 3],
    "on one rank once": lambda rank, step: "abc" if (rank, step) == (1, 2) else "ab",
    "at first on rank 0 only": lambda rank, step: "abc" if rank == 0 or step else "ab",
    "at first on rank 1 only": lambda rank, step: "abc" if rank == 1 or step else "a",
}


def branch_step(plain, rank, step, schedule):
    plain(inputs(rank, step), SCHEDULES[schedule](rank, step)).sum().backward()


def scheduled(me, schedule, cap, steps):
    model = built(Branches)
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=cap)
    unused, found = [], []
    for step in range(steps):
        wrapped.zero_grad()
        wrapped(inputs(me.rank, step), SCHEDULES[schedule](me.rank, step)).sum().backward()
        wanted = one_process(
            model, lambda plain, rank, _: branch_step(plain, rank, step, schedule), me.world_size
        )
        got = grads_of(wrapped)
        # None stays None where no rank has a gradient, and only there.
        assert {n: g is None for n, g in got.items()} == {n: g is None for n, g in wanted.items()}
        present = {name: grad for name, grad in wanted.items() if grad is not None}
        assert_close_to({name: got[name] for name in present}, present, rel=1e-14)
        unused.append(wrapped.reducer.last_step.unused)
        found.append(got)
    return unused, found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world", [2, 3])
def test_unused_parameters(ranks, world, schedule):
    for cap in [TINY, None]:
        steps = 5
        results = ranks(world).run(scheduled, schedule, cap, steps)
        assert_same_on_all([found for _, found in results])
        for unused, _ in results:
            for step in range(steps):
                used = {name for rank in range(world) for name in SCHEDULES[schedule](rank, step)}
                wanted = [
                    f"{n}.{kind}" for n in "abc" if n not in used for kind in ("weight", "bias")
                ]
                # A rank that used all its parameters need not read which ones others did not.
                assert sorted(unused[step]) == sorted(wanted)


def returns_after_long(me):
    """Rank 1 leaves a branch out until nobody waits for it any more, then takes it again."""
    model = built(Branches)
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=TINY)

    def names(rank, step):
        # The branch is first in backward when the order is learned, and last when it returns.
        if rank == 0 or step == 0:
            return "acb"
        return "bac" if step > 19 else "ac"

    found = []
    for step in range(22):
        wrapped.zero_grad()
        wrapped(inputs(me.rank, step), names(me.rank, step)).sum().backward()
        wanted = one_process(
            model,
            lambda plain, rank, _: plain(inputs(rank, step), names(rank, step)).sum().backward(),
            me.world_size,
        )
        assert_close_to(grads_of(wrapped), wanted, rel=1e-14)
        found.append((wrapped.reducer.firings.expected[4], wrapped.reducer.last_step.second_round))
    return grads_of(wrapped), found


def test_a_branch_that_returns_after_long_is_late_once(ranks):
    results = ranks(2).run(returns_after_long)
    assert_same_on_all([grads for grads, _ in results])
    (_, zeroth), (_, first) = results
    assert [expected for expected, _ in zeroth] == [1] * 22
    assert [expected for expected, _ in first][-4:] == [0, 0, 1, 1]
    for found in (zeroth, first):
        assert [step for step, (_, second_round) in enumerate(found) if second_round] == [20]


def keeps_old(me, cap):
    """Old gradients of a branch that no rank uses: given by hand, or left by a step that used it."""
    wrapped = DistributedDataParallel(built(Branches), bucket_cap_mb=cap)
    given = {}
    for index, (name, param) in enumerate(wrapped.module.named_parameters()):
        if name.startswith("c."):
            param.grad = torch.randn(param.shape, dtype=torch.float64) + index + me.rank
            given[name] = param.grad
    kept_before = {name: grad.clone() for name, grad in given.items()}
    for step in range(2):
        wrapped(inputs(me.rank, step), "ab").sum().backward()
    params = dict(wrapped.module.named_parameters())
    assert all(params[name].grad is grad for name, grad in given.items())
    assert_bitwise_equal(given, kept_before)

    # Now they are views of buckets, equal on all ranks, and go through further averages.
    wrapped.zero_grad()
    wrapped(inputs(me.rank, 2), "abc").sum().backward()
    before = grads_of(wrapped)
    for step in range(3, 6):
        wrapped(inputs(me.rank, step), "ab").sum().backward()
    after = grads_of(wrapped)
    # The last step is seen by one rank's branch only: then the old gradient is part of the sum.
    names = "abc" if me.rank == 1 else "ab"
    wrapped(inputs(me.rank, 6), names).sum().backward()
    last = grads_of(wrapped)
    return before, after, last


@pytest.mark.parametrize("world", [2, 3])
def test_an_old_gradient_that_no_rank_touched_stays_bit_for_bit(ranks, world):
    for cap in [TINY, None]:
        results = ranks(world).run(keeps_old, cap)
        assert_same_on_all(results)
        before, after, last = results[0]
        for name in before:
            if name.startswith("c."):
                assert_bitwise_equal(after[name], before[name])
                assert not torch.equal(last[name], after[name])
            else:
                # The twin: what took part has changed.
                assert not torch.equal(after[name], before[name])


class NoGradient(torch.autograd.Function):
    """Says of its input that it has no gradient, so that hooks fire with an undefined one."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def undefined(me, cap):
    wrapped = DistributedDataParallel(built(Branches), bucket_cap_mb=cap)
    model = wrapped.module
    for step in range(3):
        wrapped.zero_grad()
        hidden = NoGradient.apply(model.c.weight).sum()
        (wrapped(inputs(me.rank, step), "a").sum() + hidden).backward()
    none = model.c.weight.grad
    old = torch.randn(WIDTH, WIDTH, dtype=torch.float64)
    model.c.weight.grad = old.clone()
    hidden = NoGradient.apply(model.c.weight).sum()
    (wrapped(inputs(me.rank, step), "a").sum() + hidden).backward()
    return none, old, model.c.weight.grad, model.a.weight.grad


# At 2 ranks only: where the world size is no power of two, such an old gradient may move by its last bit, since neither
# the hook nor ``.grad`` tells that nothing was added (docs/concepts/unused-parameters.md).
@pytest.mark.parametrize("world", [2])
def test_a_hook_that_fires_without_a_gradient_is_no_use(ranks, world):
    for cap in [TINY, None]:
        results = ranks(world).run(undefined, cap)
        assert_same_on_all(results)
        none, old, kept, used = results[0]
        assert none is None
        assert_bitwise_equal(kept, old)
        assert used is not None


# ---------------------------------------------------------------- several backwards and forwards


def summed(model, rank, step):
    return model(inputs(rank, step)).sum()


def retained(model, rank, step):
    loss = summed(model, rank, step)
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses(model, rank, step):
    out = model(inputs(rank, step))
    out[:, :2].sum().backward(retain_graph=True)
    (out[:, 2:] ** 2).sum().backward()


def two_forwards_two_backwards(model, rank, step):
    first, second = summed(model, rank, step), summed(model, rank, step + 50)
    first.backward()
    second.backward()


def backwards_in_other_order(model, rank, step):
    first, second = summed(model, rank, step), summed(model, rank, step + 50)
    second.backward()
    first.backward()


def sum_of_two(model, rank, step):
    (summed(model, rank, step) + summed(model, rank, step + 50)).backward()


def inner_module(model, rank, step):
    """Around the wrapper."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    inner(inputs(rank, step)).sum().backward()


def inner_layer(model, rank, step):
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    inner.layers[2](inputs(rank, step)).tanh().sum().backward()


def both_ways(model, rank, step):
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    (summed(model, rank, step) + inner(inputs(rank, step + 9)).sum()).backward()


def penalty(model, rank, step):
    """A gradient penalty: the loss contains a gradient with respect to the inputs."""
    x = inputs(rank, step).requires_grad_()
    out = model(x).sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    (out + (slope.norm(dim=1) - 1).square().sum()).backward()


def penalty_on_weights(model, rank, step):
    out = summed(model, rank, step)
    slopes = torch.autograd.grad(out, list(model.parameters()), create_graph=True)
    sum(slope.square().sum() for slope in slopes).backward()


def looks_first(model, rank, step):
    """`autograd.grad` before backward reaches no `.grad`, so it sets off nothing."""
    loss = summed(model, rank, step)
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()


def some_inputs(model, rank, step):
    """Backward for two parameters only."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    loss = summed(model, rank, step)
    loss.backward(inputs=[inner.layers[1].weight, inner.layers[2].bias])


def in_a_thread(model, rank, step):
    loss = summed(model, rank, step)
    failures = []

    def run():
        try:
            loss.backward()
        except BaseException as error:  # noqa: BLE001 (told to the main thread)
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failures


def without_grad_before(model, rank, step):
    with torch.no_grad():
        summed(model, rank, step + 3)
    with torch.inference_mode():
        summed(model, rank, step + 3)
    summed(model, rank, step).backward()


WAYS = {
    one_process_way.__name__: (one_process_way, reductions)
    for one_process_way, reductions in (
        (retained, 2),
        (two_losses, 2),
        (two_forwards_two_backwards, 2),
        (backwards_in_other_order, 2),
        (sum_of_two, 1),
        (inner_module, 1),
        (inner_layer, 1),
        (both_ways, 1),
        (penalty, 1),
        (penalty_on_weights, 1),
        (looks_first, 1),
        (some_inputs, 1),
        (in_a_thread, 1),
        (without_grad_before, 1),
    )
}


def several_ways(me, cap):
    """Every way in turn on one wrapper, so that each also meets what the one before it left."""
    model = built(Chain)
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=cap)
    found = {}
    for name, (way, reductions) in WAYS.items():
        for step in range(2):
            wrapped.zero_grad()
            before = wrapped.reducer.reductions
            way(wrapped, me.rank, step)
            assert wrapped.reducer.reductions - before == reductions, name
            wanted = one_process(
                model, lambda plain, rank, _: way(plain, rank, step), me.world_size
            )
            found[name, step] = grads_of(wrapped), wanted
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_whatever_reaches_a_parameter_is_reduced(ranks, world):
    for cap in [TINY, None]:
        results = ranks(world).run(several_ways, cap)
        assert_same_on_all([{key: got for key, (got, _) in found.items()} for found in results])
        for key, (got, wanted) in results[0].items():
            assert {n: g is None for n, g in got.items()} == {
                n: g is None for n, g in wanted.items()
            }
            names = [name for name, grad in wanted.items() if grad is not None]
            assert names
            if world == 2 and WAYS[key[0]][1] == 1:
                assert_bitwise_equal({n: got[n] for n in names}, {n: wanted[n] for n in names})
            else:
                assert_close_to(
                    {n: got[n] for n in names}, {n: wanted[n] for n in names}, rel=1e-13
                )


def only_looks(me):
    """`autograd.grad` alone, on one rank alone: nothing may start, or the other rank would be missed."""
    wrapped = DistributedDataParallel(built(Chain), bucket_cap_mb=TINY)
    comm = wrapped.reducer.comm = Counting(wrapped.reducer.comm)
    if me.rank == 0:
        found = torch.autograd.grad(
            wrapped.module(inputs(0)).sum(), list(wrapped.parameters()), create_graph=False
        )
        assert all(grad is not None for grad in found)
    nothing = list(comm.called), wrapped.reducer.reductions
    assert all(param.grad is None for param in wrapped.parameters())
    summed(wrapped, me.rank, 0).backward()
    return nothing, len(comm.called)


def test_autograd_grad_sets_off_no_reduction(ranks):
    for nothing, called in ranks(2).run(only_looks):
        assert nothing == ([], 0)
        assert called == 5


def two_models(me):
    """A generator's step through a critic: both wrappers' parameters are reached by one backward."""
    generator, critic = built(Chain, 2), built(Chain, 3)
    one, other = (
        DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=TINY)
        for model in (generator, critic)
    )
    for step in range(3):
        for model in (one, other):
            model.zero_grad()
        other(one(inputs(me.rank, step))).sum().backward()
    both = nn.Sequential(generator, critic)
    wanted = one_process(
        both, lambda plain, rank, _: plain(inputs(rank, 2)).sum().backward(), me.world_size
    )
    got = {f"0.{n}": g for n, g in grads_of(one).items()}
    got |= {f"1.{n}": g for n, g in grads_of(other).items()}
    assert_bitwise_equal(got, wanted)
    # Each wrapper has its own count; in the critic's own step only the critic is reduced.
    other(inputs(me.rank)).sum().backward()
    return one.reducer.reductions, other.reducer.reductions


def test_one_backward_through_two_wrappers(ranks):
    assert ranks(2).run(two_models) == [(3, 4)] * 2


# ---------------------------------------------------------------- accumulation


def accumulates(me, cap, to_none):
    model = built(Chain)
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=cap)
    rounds = []
    for start in (0, 10):
        wrapped.zero_grad(set_to_none=to_none)
        for step in range(start, start + 3):
            summed(wrapped, me.rank, step).backward()
        wanted = one_process(
            model,
            lambda plain, rank, step: summed(plain, rank, start + step).backward(),
            me.world_size,
            steps=3,
        )
        rounds.append((grads_of(wrapped), wanted))
    return rounds


@pytest.mark.parametrize("world", [2, 3])
def test_without_zero_grad_gradients_add_up(ranks, world):
    for cap, to_none in itertools.product([TINY, None], [True, False]):
        results = ranks(world).run(accumulates, cap, to_none)
        assert_same_on_all(results)
        for got, wanted in results[0]:
            assert_close_to(got, wanted, rel=1e-13)
        (first, _), (second, _) = results[0]
        assert not torch.equal(first["layers.0.weight"], second["layers.0.weight"])


def zeroes_in_place(me):
    model = built(Chain)
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=TINY)
    summed(wrapped, me.rank, 0).backward()
    before = [param.grad for param in wrapped.parameters()]
    wrapped.zero_grad(set_to_none=False)
    assert all(not grad.any() for grad in before)
    summed(wrapped, me.rank, 1).backward()
    same = [param.grad is grad for param, grad in zip(wrapped.parameters(), before, strict=True)]
    wanted = one_process(
        model, lambda plain, rank, _: summed(plain, rank, 1).backward(), me.world_size
    )
    assert_bitwise_equal(grads_of(wrapped), wanted)
    return same


def test_zeroing_in_place_keeps_the_views(ranks):
    assert ranks(2).run(zeroes_in_place) == [[True] * 8] * 2


def own_gradients_put_in(me):
    """A user may put a tensor of its own in `.grad` at any time."""
    model = built(Chain)
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=TINY)
    for step in range(3):
        for index, param in enumerate(wrapped.parameters()):
            param.grad = torch.full_like(param, float(index))
        summed(wrapped, me.rank, step).backward()

    def loss_of(plain, rank, _):
        for index, param in enumerate(plain.parameters()):
            param.grad = torch.full_like(param, float(index))
        summed(plain, rank, 2).backward()

    assert_close_to(grads_of(wrapped), one_process(model, loss_of, me.world_size), rel=1e-15)


def test_gradients_that_a_user_put_in_are_added_to(ranks):
    ranks(2).run(own_gradients_put_in)


# ---------------------------------------------------------------- checkpoints


class Checkpointed(nn.Module):
    """Layers run through checkpoints in several ways."""

    def __init__(self, way, reentrant):
        super().__init__()
        self.way = way
        self.reentrant = reentrant
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def again(self, function, x):
        return checkpoint(function, x, use_reentrant=self.reentrant)

    def inner(self, x):
        return self.again(self.middle, self.middle(x).tanh()).tanh()

    def forward(self, x):
        x = self.first(x).tanh()
        if self.way == "once":
            x = self.again(self.middle, x)
        elif self.way == "twice":
            x = self.again(self.middle, self.again(self.middle, x).tanh())
        elif self.way == "nested":
            x = self.again(self.inner, x)
        elif self.way == "nested twice":
            x = self.again(self.inner, self.again(self.inner, x))
        elif self.way == "all layers":
            x = self.again(self.middle, self.again(self.first, x).tanh())
            return self.again(self.last, x.tanh())
        elif self.way == "plain and again":
            x = self.again(self.middle, self.middle(x).tanh())
        return self.last(x.tanh())


def no_warning_of_the_outer_checkpoint():
    """Torch warns of a checkpoint inside another: in its first run nothing requires grad, as it should be."""
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True", UserWarning)


def leaf_inputs(rank, step):
    return inputs(rank, step).requires_grad_()


def checkpointed(me, way, reentrant, cap):
    no_warning_of_the_outer_checkpoint()
    model = built(Checkpointed, way, reentrant)
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=cap)
    facts = []
    for step in range(3):
        wrapped.zero_grad()
        wrapped(leaf_inputs(me.rank, step)).sum().backward()
        wanted = one_process(
            model,
            lambda plain, rank, _: plain(leaf_inputs(rank, step)).sum().backward(),
            me.world_size,
        )
        assert_bitwise_equal(grads_of(wrapped), wanted)
        facts.append(wrapped.reducer.last_step)
    return facts, wrapped.reducer.firings.expected, wrapped.reducer.reductions


CHECKPOINTS = {
    # Firings of (first, middle, last) in one backward where checkpoints are reentrant.
    "once": (1, 1, 1),
    "twice": (1, 2, 1),
    "nested": (1, 2, 1),
    "nested twice": (1, 4, 1),
    "all layers": (2, 1, 1),
    "plain and again": (1, 2, 1),
}


@pytest.mark.parametrize("way", CHECKPOINTS)
def test_reentrant_checkpoints_settle_with_the_outermost_backward(ranks, way):
    for cap in [TINY, None]:
        for facts, expected, reductions in ranks(2).run(checkpointed, way, True, cap):
            assert reductions == 3
            assert expected == [n for n in CHECKPOINTS[way] for _ in range(2)]
            for step in facts:
                assert step.all_reduces == step.buckets
                assert not step.second_round


@pytest.mark.parametrize("way", CHECKPOINTS)
def test_checkpoints_that_are_not_reentrant_fire_once(ranks, way):
    for facts, expected, reductions in ranks(2).run(checkpointed, way, False, TINY):
        assert reductions == 3
        assert expected == [1] * 6
        assert not any(step.second_round for step in facts)
        assert facts[-1].launched_in_backward > 0


def whole_model(me, reentrant, nested):
    no_warning_of_the_outer_checkpoint()
    model = built(Checkpointed, "nested" if nested else "once", reentrant)
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=TINY)

    def loss_of(run, rank, step):
        out = checkpoint(run, leaf_inputs(rank, step), use_reentrant=reentrant)
        out.sum().backward()

    for step in range(3):
        wrapped.zero_grad()
        loss_of(wrapped, me.rank, step)
        wanted = one_process(
            model, lambda plain, rank, _: loss_of(plain, rank, step), me.world_size
        )
        assert_bitwise_equal(grads_of(wrapped), wanted)
    return wrapped.reducer.reductions, wrapped.reducer.last_step.second_round


def test_a_checkpoint_around_the_whole_wrapped_model(ranks):
    for reentrant, nested in itertools.product([False, True], [False, True]):
        assert ranks(2).run(whole_model, reentrant, nested) == [(3, False)] * 2


def two_backwards_in_one_node(me):
    """A backward inside a backward inside a backward, by hand and not by a checkpoint."""
    model = built(Chain)
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=TINY)

    def loss_of(run, rank, step):
        x = leaf_inputs(rank, step)
        (Nested.apply(x, run, 2) * 3).sum().backward()

    for step in range(2):
        wrapped.zero_grad()
        loss_of(wrapped, me.rank, step)
        wanted = one_process(
            model, lambda plain, rank, _: loss_of(plain, rank, step), me.world_size
        )
        assert_close_to(grads_of(wrapped), wanted, rel=1e-14)
    return wrapped.reducer.reductions


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, run, depth):
        ctx.x, ctx.run, ctx.depth = x.detach().clone(), run, depth
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            out = (
                ctx.run(x)
                if ctx.depth == 0
                else Nested.apply(x, ctx.run, ctx.depth - 1) + ctx.run(x)
            )
        out.backward(grad)
        return x.grad, None, None


def test_backwards_nested_three_deep_are_one_reduction(ranks):
    assert ranks(2).run(two_backwards_in_one_node) == [2, 2]


# ---------------------------------------------------------------- late gradients


class Late(nn.Module):
    """The top layer, first in backward, fires as often as asked; its bucket leaves after the first."""

    def __init__(self):
        super().__init__()
        self.low = nn.Linear(WIDTH, WIDTH)
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.top = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, times):
        x = self.mid(self.low(x).tanh()).tanh()
        for _ in range(times):
            x = checkpoint(self.top, x, use_reentrant=True).tanh()
        return x


# Firings of the top layer by rank and step, after a first step that learned one.
LATE = {
    "on all ranks": lambda rank, step: 2,
    "on rank 0 only": lambda rank, step: 2 if rank == 0 else 1,
    "on rank 1 only": lambda rank, step: 2 if rank == 1 else 1,
    "more each time": lambda rank, step: 1 + step,
    "in turn": lambda rank, step: 1 + (rank + step) % 2,
    "now and then": lambda rank, step: 3 if step in (1, 4) and rank == 0 else 1,
}


def late(me, when, cap, keep):
    model = built(Late)
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=cap)

    def times(rank, step):
        return 1 if step == 0 else LATE[when](rank, step)

    facts = []
    steps = 6
    for step in range(steps):
        if not keep:
            wrapped.zero_grad()
        wrapped(inputs(me.rank, step), times(me.rank, step)).sum().backward()
        first = 0 if keep else step
        wanted = one_process(
            model,
            lambda plain, rank, i: (
                plain(inputs(rank, first + i), times(rank, first + i)).sum().backward()
            ),
            me.world_size,
            steps=step - first + 1,
        )
        assert_close_to(grads_of(wrapped), wanted, rel=1e-13)
        facts.append(wrapped.reducer.last_step)
    return grads_of(wrapped), facts, wrapped.reducer.firings.expected


@pytest.mark.parametrize("when", LATE)
@pytest.mark.parametrize("world", [2, 3])
def test_late_gradients_are_added_exactly_on_all_ranks(ranks, world, when):
    for keep in [False, True]:
        results = ranks(world).run(late, when, TINY, keep)
        assert_same_on_all([grads for grads, _, _ in results])
        for rank, (_, facts, expected) in enumerate(results):
            assert [step.second_round for step in facts] == [
                step.second_round for step in results[0][1]
            ]
            # The first late gradient needs a second round on every rank, also on those that had none.
            assert facts[1].second_round
            assert facts[1].all_reduces == 2 * facts[1].buckets
            assert not facts[0].second_round
            counts = [1, *(LATE[when](rank, step) for step in range(1, 6))]
            assert expected[-1] == max(counts)
        second_rounds = [step.second_round for step in results[0][1]]
        seen, learned = [], [1] * world
        for step in range(6):
            now = [1 if step == 0 else LATE[when](rank, step) for rank in range(world)]
            seen.append(any(n > k for n, k in zip(now, learned, strict=True)))
            learned = [max(pair) for pair in zip(now, learned, strict=True)]
        # Once learned the bucket waits, so that it is late no more.
        assert second_rounds == seen


def test_a_bucket_that_has_not_left_takes_further_gradients(ranks):
    for when in ["on all ranks", "on rank 1 only"]:
        # With the default caps the only bucket leaves at the end: nothing can be late.
        results = ranks(2).run(late, when, None, False)
        assert_same_on_all([grads for grads, _, _ in results])
        for _, facts, _ in results:
            assert not any(step.second_round for step in facts)


def late_while_ready(me):
    """On rank 1 the early bucket is full but held back by a lower one when its gradient comes again."""
    model = built(Fan, 3)
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=TINY)

    def loss_of(run, rank, step):
        inner = run.module if isinstance(run, DistributedDataParallel) else run
        x = leaf_inputs(rank, step)
        out = run(x, range(3))
        if rank == 1 and step:
            # These come later in forward, so earlier in backward: branch 0 fires twice before branch 2 does.
            for _ in range(2):
                out = out + checkpoint(inner.branches[0], x, use_reentrant=True).tanh()
        out.sum().backward()

    for step in range(4):
        wrapped.zero_grad()
        loss_of(wrapped, me.rank, step)
        wanted = one_process(
            model, lambda plain, rank, _: loss_of(plain, rank, step), me.world_size
        )
        assert_close_to(grads_of(wrapped), wanted, rel=1e-14)
    return grads_of(wrapped)


def test_a_gradient_for_a_full_bucket_that_waits_for_a_lower_one_is_added(ranks):
    assert_same_on_all(ranks(2).run(late_while_ready))


class Large(Late):
    """Weights above 16 KiB are divided and copied as soon as they are ready."""

    def __init__(self):
        super().__init__()
        self.low = nn.Linear(WIDTH, 64)
        self.mid = nn.Linear(64, 64)
        self.top = nn.Linear(64, 64)


def late_and_large(me, cap):
    model = built(Large)
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=cap)
    facts = []
    for step, times in enumerate((1, 2, 2, 1, 3)):
        wrapped.zero_grad(set_to_none=step % 2 == 0)
        own = times if me.rank == 1 else 1
        wrapped(inputs(me.rank, step), own).sum().backward()
        wanted = one_process(
            model,
            lambda plain, rank, _: (
                plain(inputs(rank, step), times if rank == 1 else 1).sum().backward()
            ),
            me.world_size,
        )
        assert_close_to(grads_of(wrapped), wanted, rel=1e-13)
        facts.append(wrapped.reducer.last_step.second_round)
    return grads_of(wrapped), facts


def test_large_gradients_that_fire_again_are_added_too(ranks):
    for cap in [TINY, None]:
        results = ranks(2).run(late_and_large, cap)
        assert_same_on_all(results)
        late_steps = [False, True, False, False, True] if cap == TINY else [False] * 5
        assert results[0][1] == late_steps


# ---------------------------------------------------------------- hooks of the user


def seen_by_hooks(me, width, which, cap):
    """What a user's post-accumulate hooks read from `.grad`, in all steps."""
    model = built(Chain, 3, width)
    local = copy.deepcopy(model)
    seen = {}

    def watch(tag, index):
        def hook(param):
            assert param.grad is not None, (tag, index)
            seen[tag, index] = param.grad.clone()

        return hook

    params = list(model.parameters())
    for index in which:
        params[index].register_post_accumulate_grad_hook(watch("before", index))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=cap)
    for index in which:
        params[index].register_post_accumulate_grad_hook(watch("after", index))

    def data(rank, step):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return torch.randn(3, width, dtype=torch.float64, generator=generator)

    for step in range(3):
        seen.clear()
        wrapped.zero_grad()
        local.zero_grad()
        wrapped(data(me.rank, step)).sum().backward()
        local(data(me.rank, step)).sum().backward()
        own = [param.grad for param in local.parameters()]
        # The whole gradient of this rank, not yet averaged.
        assert len(seen) == 2 * len(which)
        for (_, index), grad in seen.items():
            assert_bitwise_equal(grad, own[index])
        wanted = one_process(
            local, lambda plain, rank, _: plain(data(rank, step)).sum().backward(), me.world_size
        )
        assert_bitwise_equal(grads_of(wrapped), wanted)
    return grads_of(wrapped)


@pytest.mark.parametrize("width", [WIDTH, 64])
def test_a_users_hook_sees_the_gradient(ranks, width):
    for cap, which in itertools.product([TINY, 0.02, None], [range(6), (0,), (3,), (4, 5)]):
        assert_same_on_all(ranks(2).run(seen_by_hooks, width, list(which), cap))


def changed_by_hooks(me):
    model = built(Chain)
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=TINY)

    def halve(param):
        param.grad.mul_(0.5)

    def sign(grad):
        return grad * -1

    wanted_model = copy.deepcopy(model)
    for run in (wrapped.module, wanted_model):
        run.layers[1].weight.register_hook(sign)
        run.layers[2].weight.register_post_accumulate_grad_hook(halve)
    for step in range(3):
        wrapped.zero_grad()
        summed(wrapped, me.rank, step).backward()
    plain = []
    for rank in range(me.world_size):
        wanted_model.zero_grad()
        summed(wanted_model, rank, 2).backward()
        plain.append(grads_of(wanted_model))
    wanted = {name: mean([grads[name] for grads in plain]) for name in plain[0]}
    assert_bitwise_equal(grads_of(wrapped), wanted)
    untouched = one_process(
        model, lambda run, rank, _: summed(run, rank, 2).backward(), me.world_size
    )
    return [
        torch.equal(wanted[f"layers.{i}.weight"], untouched[f"layers.{i}.weight"]) for i in range(4)
    ]


def test_what_a_users_hook_changes_is_what_is_reduced(ranks):
    assert ranks(2).run(changed_by_hooks) == [[True, False, False, True]] * 2


def watched_and_late(me):
    """A user's hook on a parameter that fires again, while its bucket is open, full or gone."""
    model = built(Late)
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=TINY)
    seen = []
    wrapped.module.top.weight.register_post_accumulate_grad_hook(
        lambda param: seen.append(param.grad is not None)
    )
    for step, times in enumerate((1, 2, 3, 3, 1)):
        wrapped.zero_grad()
        wrapped(inputs(me.rank, step), times).sum().backward()
        wanted = one_process(
            model,
            lambda plain, rank, _: plain(inputs(rank, step), times).sum().backward(),
            me.world_size,
        )
        assert_close_to(grads_of(wrapped), wanted, rel=1e-14)
    return seen


def test_a_users_hook_sees_late_gradients_too(ranks):
    assert ranks(2).run(watched_and_late) == [[True] * 10] * 2
