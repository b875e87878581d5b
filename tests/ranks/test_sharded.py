"""The sharded optimizer around a step: who waits, what ``.grad`` answers, state, changes of the module, refusals."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from rankstep import DistributedDataParallel, ShardedOptimizer, together
from rankstep.errors import ModelError, ModelTypeError, ShardedGradientError
from rankstep.testing import assert_bitwise_equal, assert_close_to, first_difference

WIDTH = 12
SMALL = 0.001
OPTIONS = {"lr": 0.01, "weight_decay": 0.1}


class Net(nn.Module):
    """Two heads that may be left out, a scalar, and a parameter without elements."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WIDTH, 40)
        self.a = nn.Linear(40, 5)
        self.b = nn.Linear(40, 5)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.none = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x, heads="ab"):
        x = self.stem(x).tanh() * self.scale
        return sum(getattr(self, head)(x) for head in heads)


def net():
    torch.manual_seed(3)
    return Net().double()


def data(me, step, size=4):
    generator = torch.Generator().manual_seed(100 * step + me.rank)
    return torch.randn(size, WIDTH, dtype=torch.float64, generator=generator)


def wrapped(model=None):
    return DistributedDataParallel(model or net(), bucket_cap_mb=SMALL)


def pair(shared, kind=torch.optim.AdamW, model=None):
    plain, sharded = wrapped(copy.deepcopy(model)), wrapped(copy.deepcopy(model))
    return (
        (plain, kind(plain.parameters(), **OPTIONS)),
        (sharded, ShardedOptimizer(sharded, kind, share_parameters=shared, **OPTIONS)),
    )


def go(run, stepper, me, step, heads="ab"):
    stepper.zero_grad()
    run(data(me, step), heads).square().mean().backward()
    stepper.step()


def weights(run):
    return [param.detach().clone() for param in run.module.parameters()]


both_memories = pytest.mark.parametrize("shared", [True, False])


def reads(me, shared):
    """Everything that reads a parameter behind step() sees the new values; what reads none does not wait."""
    one, other = pair(shared)
    for step in range(2):
        go(*one, me, step)
        go(*other, me, step)
    run, stepper = other
    held = run.module.stem.weight
    assert type(held) is not nn.Parameter
    assert held.shape == (40, WIDTH)
    assert held.dtype is torch.float64
    assert type(held) is not nn.Parameter
    expected = weights(one[0])
    ways = {
        "detach": lambda: [p.detach().clone() for p in run.module.parameters()],
        "state_dict": lambda: list(copy.deepcopy(run.module.state_dict()).values()),
        "deepcopy": lambda: weights(_Holder(copy.deepcopy(run.module))),
        "pickle": lambda: weights(_Holder(pickle.loads(pickle.dumps(run.module)))),  # noqa: S301 - our own
        "vector": lambda: list(
            nn.utils.parameters_to_vector(run.module.parameters())
            .detach()
            .split([p.numel() for p in run.module.parameters()])
        ),
    }
    for name, way in ways.items():
        found = [value.view(like.shape) for value, like in zip(way(), expected, strict=True)]
        assert_bitwise_equal(found, expected)
        assert all(type(p) is nn.Parameter for p in copy.deepcopy(run.module).parameters()), name
        for run_, stepper_ in (one, other):
            go(run_, stepper_, me, 7)
        expected = weights(one[0])
    buffer = io.BytesIO()
    torch.save(held.detach(), buffer)
    # A parameter is saved without its neighbours in the bucket.
    assert len(buffer.getvalue()) < held.nbytes + 2000
    return stepper._shares.memory.what


class _Holder:
    def __init__(self, module):
        self.module = module


@both_memories
def test_whoever_reads_a_parameter_waits(ranks, shared):
    assert ranks(2).run(reads, shared) == ["shared" if shared else "gathered"] * 2


def edits(me, shared):
    """Parameters that a script writes to, on every rank, change once; ``.data`` and conversions included."""
    both = pair(shared)
    for step in range(6):
        for run, stepper in both:
            go(run, stepper, me, step)
            with torch.no_grad():
                for place, param in enumerate(run.parameters()):
                    param.mul_(0.9) if place % 2 else param.data.add_(0.01)
            if step == 3:
                run.load_state_dict({k: v * 1.01 for k, v in run.state_dict().items()})
            if step == 4:
                for param in run.parameters():
                    param.data = param.data.clone() * 0.99
    assert_bitwise_equal(weights(both[1][0]), weights(both[0][0]))
    return weights(both[1][0])


@both_memories
def test_edits_of_parameters_count_once(ranks, shared):
    first, second = ranks(2).run(edits, shared)
    assert_bitwise_equal(first, second)


def gradients(me):
    """What cannot be read is refused by name; gathered gradients are the plain wrapper's."""
    (plain, one), (sharded, other) = pair(True)
    sharded(data(me, 0)).square().mean().backward()
    plain(data(me, 0)).square().mean().backward()
    grad = sharded.module.stem.weight.grad
    assert "dealt to the ranks" in repr(grad)
    for use in (
        torch.sum,
        torch.clone,
        lambda g: g + 1,
        lambda g: g.mul_(torch.ones_like(plain.module.stem.weight)),
    ):
        with pytest.raises(
            ShardedGradientError, match=f"rank {me.rank}: .*'stem.weight'.*gather_gradients"
        ):
            use(grad)
    other.gather_gradients()
    for mine, theirs in zip(sharded.module.parameters(), plain.module.parameters(), strict=True):
        assert type(mine.grad) is torch.Tensor or mine.grad is None
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            assert_bitwise_equal(mine.grad, theirs.grad)
            mine.grad.mul_(0.5)
            theirs.grad.mul_(0.5)
    one.step()
    other.step()
    assert_bitwise_equal(weights(sharded), weights(plain))
    # A window that was not reduced cannot be stepped.
    other.zero_grad()
    with sharded.no_sync():
        sharded(data(me, 1)).square().mean().backward()
    with pytest.raises(ShardedGradientError, match="no_sync"):
        other.step()


def test_gradients_are_refused_or_gathered(ranks):
    ranks(2).run(gradients)


def branches(me, shared):
    """A parameter that no rank used is left alone, with its state; one that some rank used is stepped on all."""
    both = pair(shared)
    uses = ["a", "a", "ab" if me.rank else "a", "b", "ab", "b" if me.rank else "a", "a"]
    for step, heads in enumerate(uses):
        for run, stepper in both:
            stepper.zero_grad(set_to_none=step != 5)
            run(data(me, step), heads).square().mean().backward()
            stepper.step()
        assert_bitwise_equal(weights(both[1][0]), weights(both[0][0]))
    plain, whole = (stepper.state_dict()["state"] for _, stepper in both)
    assert sorted(plain) == sorted(whole)
    for key, entry in plain.items():
        assert_bitwise_equal(whole[key], entry)


@both_memories
def test_unused_parameters(ranks, shared):
    ranks(2).run(branches, shared)


def changes(me, shared):
    """A layer is thawed, one replaced and added to the optimizer, one frozen."""
    model = net()
    model.a.requires_grad_(False)
    both = pair(shared, model=model)
    for step in range(8):
        for run, stepper in both:
            if step == 2:
                run.module.a.requires_grad_(True)
            if step == 4:
                torch.manual_seed(5)
                run.module.b = nn.Linear(40, 5).double()
                stepper.add_param_group({"params": list(run.module.b.parameters()), "lr": 0.02})
            if step == 6:
                run.module.stem.requires_grad_(False)
            go(run, stepper, me, step)
        assert_bitwise_equal(weights(both[1][0]), weights(both[0][0]))
    plain, whole = (stepper.state_dict() for _, stepper in both)
    assert plain["param_groups"] == whole["param_groups"]
    assert sorted(plain["state"]) == sorted(whole["state"])


@both_memories
def test_changes_of_the_module(ranks, shared):
    ranks(2).run(changes, shared)


def saved(me):
    run = wrapped()
    stepper = ShardedOptimizer(run, torch.optim.AdamW, **OPTIONS)
    for step in range(3):
        go(run, stepper, me, step)
    return run.module.state_dict(), stepper.state_dict()


def resumed(me, module, state, sharded):
    """Equal data on all ranks, so that any number of them takes the same steps."""
    model = net()
    model.load_state_dict(module)
    run = DistributedDataParallel(model, bucket_cap_mb=2 * SMALL)
    kind = torch.optim.AdamW
    stepper = ShardedOptimizer(run, kind, lr=5.0) if sharded else kind(run.parameters(), lr=5.0)
    stepper.load_state_dict(state)
    assert_bitwise_equal(stepper.state_dict(), state)
    for step in range(3):
        go(run, stepper, me, step)
    return weights(run)


class _Me:
    rank = 0


def resumed_alike(me, module, state, sharded):
    return resumed(_Me(), module, copy.deepcopy(state), sharded)


def test_state_loads_at_any_number_of_ranks_and_in_the_plain_optimizer(ranks):
    module, state = ranks(2).run(saved)[0]
    plain = ranks(2).run(resumed_alike, module, state, False)[0]
    assert_bitwise_equal(ranks(2).run(resumed_alike, module, state, True)[0], plain)
    assert_close_to(ranks(3).run(resumed_alike, module, state, True)[0], plain, rel=1e-9)
    # The twin: without the state it goes elsewhere.
    state["state"].clear()
    assert first_difference(ranks(2).run(resumed_alike, module, state, True)[0], plain)


def uneven(me):
    both = pair(True)
    batches = [data(me, step) for step in range(2 + 2 * me.rank)]
    for run, stepper in both:
        for x in together(batches, run):
            stepper.zero_grad()
            run(x).square().mean().backward()
            stepper.step()
    assert_bitwise_equal(weights(both[1][0]), weights(both[0][0]))
    with pytest.raises(ModelError, match="together"), both[1][0].join():
        pass


def test_uneven_loops(ranks):
    ranks(2).run(uneven)


def refusals(me):
    run = wrapped()
    first = ShardedOptimizer(run, torch.optim.SGD, lr=0.1)
    with pytest.raises(ModelError, match="communication hook"):
        run.register_comm_hook(None, lambda _state, bucket: bucket)
    with pytest.raises(ModelError, match="state_dict"):
        copy.deepcopy(first)
    with pytest.raises(ModelTypeError, match="Wrap it first"):
        ShardedOptimizer(run.module, torch.optim.SGD, lr=0.1)
    with pytest.raises(ModelTypeError, match="none of the model's"):
        first.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    second = ShardedOptimizer(run, torch.optim.SGD, lr=0.1)
    with pytest.raises(ModelError, match="taken over"):
        first.step()
    go(run, second, me, 0)
    second.synchronize()
    with pytest.raises(ModelError, match="auto"):
        ShardedOptimizer(
            DistributedDataParallel(net(), bucket_cap_mb="auto"), torch.optim.SGD, lr=0.1
        )


def test_what_cannot_be_is_refused_by_name(ranks):
    ranks(2).run(refusals)


def skips(me, skipping):
    run = wrapped()
    stepper = ShardedOptimizer(run, torch.optim.SGD, lr=0.1)
    for step in range(3):
        stepper.zero_grad()
        run(data(me, step)).square().mean().backward()
        if not (skipping and step == 1 and me.rank == 1):
            stepper.step()
    stepper.synchronize()


def test_a_rank_that_skips_a_step_is_told_on_all(ranks):
    ranks(2).run(skips, False)
    for outcome in ranks(2).outcomes(skips, True, timeout_s=40):
        assert "every rank must take the same" in outcome.error
