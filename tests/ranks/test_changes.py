"""A module that changes after it was wrapped: the exact gradient in the same step, or an error that names the parameter.

On all ranks alike, a change is adopted in the very step in which it is first used. On one rank alone it is an error on
every rank. What never happens is that a parameter goes on with this rank's own gradient and nobody says so.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rankstep import DistributedDataParallel
from rankstep.testing import assert_bitwise_equal, assert_close_to, assert_same_on_all

TINY = 0.0001
WIDTH = 5


class Net(nn.Module):
    """Three layers, of which each may be missing, and an extra one that may come."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.c = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for name in ("a", "b", "c", "extra"):
            layer = getattr(self, name, None)
            if layer is not None:
                x = layer(x).tanh()
        scale = getattr(self, "scale", None)
        return x if scale is None else x * scale


def net(frozen=()):
    torch.manual_seed(3)
    model = Net().double()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return model


def data(rank, step, size=3):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, WIDTH, dtype=torch.float64, generator=generator)


def grads_of(model):
    return {
        name.removeprefix("module."): None if param.grad is None else param.grad.clone()
        for name, param in model.named_parameters()
    }


def fresh(seed=9):
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, WIDTH).double()


def attempt(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001 - looked at in the test
        return type(error).__name__, str(error)
    return None


# ---------------------------------------------------------------- the changes


def thaw(model):
    model.a.weight.requires_grad_(True)


def thaw_two(model):
    model.a.requires_grad_(True)


def freeze(model):
    model.b.weight.requires_grad_(False)


def freeze_a_layer(model):
    model.b.requires_grad_(False)


def replace_a_layer(model):
    model.b = fresh()


def replace_a_parameter(model):
    model.b.weight = nn.Parameter(model.b.weight.detach() * 2)


def replace_all(model):
    for name in ("a", "b", "c"):
        setattr(model, name, fresh(ord(name)))


def add_a_layer(model):
    model.extra = fresh()


def add_a_parameter(model):
    model.scale = nn.Parameter(torch.full((WIDTH,), 1.5, dtype=torch.float64))


def add_inside(model):
    model.b.register_parameter("more", nn.Parameter(torch.ones(2, dtype=torch.float64)))


def remove_a_layer(model):
    model.b = None


def delete_a_layer(model):
    del model.b


def drop_a_bias(model):
    model.b.bias = None


def thaw_and_add(model):
    thaw(model)
    add_a_layer(model)


def thaw_and_freeze(model):
    thaw(model)
    freeze(model)


def assign(model):
    state = {name: tensor * 1.25 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def tie(model):
    model.b.weight = model.c.weight


FROZEN = ("a.weight", "a.bias")
CHANGES = {
    "thaw": (thaw, FROZEN),
    "thaw two": (thaw_two, FROZEN),
    "freeze": (freeze, ()),
    "freeze a layer": (freeze_a_layer, ()),
    "replace a layer": (replace_a_layer, ()),
    "replace a parameter": (replace_a_parameter, ()),
    "replace all": (replace_all, ()),
    "add a layer": (add_a_layer, ()),
    "add a parameter": (add_a_parameter, ()),
    "add inside a layer": (add_inside, ()),
    "remove a layer": (remove_a_layer, ()),
    "delete a layer": (delete_a_layer, ()),
    "drop a bias": (drop_a_bias, ()),
    "thaw and add": (thaw_and_add, FROZEN),
    "thaw and freeze": (thaw_and_freeze, FROZEN),
    "load with assign": (assign, ()),
    "tie": (tie, ()),
}


# ---------------------------------------------------------------- on all ranks


def plain_step(run, rank, step):
    run(data(rank, step)).square().mean().backward()


def exact(model, world, step):
    for rank in range(world):
        (model(data(rank, step)).square().mean() / world).backward()
    return grads_of(model)


def on_all_ranks(me, cap, when):
    """Each change, before the first step or later: the step in which it comes, and those after it, are exact."""
    found = {}
    for name, (change, frozen) in CHANGES.items():
        run = DistributedDataParallel(net(frozen), bucket_cap_mb=cap)
        model = net(frozen)
        for step in range(4):
            if step == when:
                change(run.module)
                change(model)
            run.zero_grad()
            model.zero_grad()
            plain_step(run, me.rank, step)
            found[name] = grads_of(run)
            assert_close_to(
                {name: drop_none(found[name])},
                {name: drop_none(exact(model, me.world_size, step))},
                rel=1e-14,
            )
            assert nones(found[name]) == nones(grads_of(model)), (name, step)
    return found


def drop_none(grads):
    return {name: grad for name, grad in grads.items() if grad is not None}


def nones(grads):
    return [name for name, grad in grads.items() if grad is None]


@pytest.mark.parametrize(("cap", "when"), [(TINY, 0), (TINY, 2), (None, 2)])
def test_a_change_on_all_ranks_is_exact_in_the_same_step(ranks, cap, when):
    assert_same_on_all(ranks(2).run(on_all_ranks, cap, when))


def test_also_on_three_ranks(ranks):
    assert_same_on_all(ranks(3).run(on_all_ranks, TINY, 1))


def changed_by_wrapper(me):
    """load_state_dict of the wrapper itself, in both forms, with assign; the optimizer comes after it."""
    found = []
    for prefix in ("", "module."):
        run = DistributedDataParallel(net(), bucket_cap_mb=TINY)
        plain_step(run, me.rank, 0)
        state = {f"{prefix}{n}": tensor * 1.25 for n, tensor in run.module.state_dict().items()}
        run.load_state_dict(state, assign=True)
        model = net()
        assign(model)
        steppers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (run, model)]
        for step in range(1, 4):
            for stepper in steppers:
                stepper.zero_grad()
            plain_step(run, me.rank, step)
            exact(model, 2, step)
            assert_close_to(grads_of(run), grads_of(model), rel=1e-14)
            for stepper in steppers:
                stepper.step()
        found.append(grads_of(run))
    return found


def test_load_state_dict_with_assign(ranks):
    assert_same_on_all(ranks(2).run(changed_by_wrapper))


def around_the_wrapper(me):
    """All parameters replaced, and then the inner module is called directly."""
    run = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    plain_step(run, me.rank, 0)
    replace_all(run.module)
    model = net()
    replace_all(model)
    for step in (1, 2):
        run.zero_grad()
        model.zero_grad()
        plain_step(run.module, me.rank, step)
        assert_close_to(grads_of(run), exact(model, 2, step), rel=1e-14)
    return grads_of(run)


def test_replaced_parameters_are_reduced_around_the_wrapper_too(ranks):
    assert_same_on_all(ranks(2).run(around_the_wrapper))


def from_rank_0(me):
    """A new layer starts from rank 0's values, as everything did at construction."""
    run = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    plain_step(run, me.rank, 0)
    run.module.extra = fresh(seed=20 + me.rank)
    run.zero_grad()
    plain_step(run, me.rank, 1)
    return run.module.extra.weight.detach().clone()


def test_a_new_layer_has_rank_0s_values_from_then_on(ranks):
    first, second = ranks(2).run(from_rank_0)
    assert_bitwise_equal(second, first)
    assert_bitwise_equal(first, fresh(seed=20).weight.detach())


# ---------------------------------------------------------------- with no_sync, counts and other ways


def under_no_sync(me, name, at):
    """The change comes before, between or at the end of the micro-batches of a window."""
    change, frozen = CHANGES[name]
    run, model = DistributedDataParallel(net(frozen), bucket_cap_mb=TINY), net(frozen)
    plain_step(run, me.rank, 0)
    run.zero_grad()
    for number in range(3):
        if number == at:
            change(run.module)
            change(model)
        with run.no_sync() if number < 2 else contextlib.nullcontext():
            plain_step(run, me.rank, 1 + number)
        exact(model, 2, 1 + number)
    assert_close_to(drop_none(grads_of(run)), drop_none(grads_of(model)), rel=1e-14)
    # And one more step.
    run.zero_grad()
    model.zero_grad()
    plain_step(run, me.rank, 9)
    assert_close_to(drop_none(grads_of(run)), drop_none(exact(model, 2, 9)), rel=1e-14)
    return grads_of(run)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("name", ["thaw", "add a layer", "freeze"])
def test_changes_inside_an_accumulation_window(ranks, name, at):
    assert_same_on_all(ranks(2).run(under_no_sync, name, at))


def weighted_step(run, rank, step):
    size = 1 + 2 * rank
    run.backward(run(data(rank, step, size)).square().sum(), count=size)


def with_counts(me):
    """A change in a step with counts: the new parameters are weighted as well."""
    found = {}
    for name, (change, frozen) in CHANGES.items():
        run, model = DistributedDataParallel(net(frozen), bucket_cap_mb=TINY), net(frozen)
        for step in range(4):
            if step == 2:
                change(run.module)
                change(model)
            run.zero_grad()
            model.zero_grad()
            with run.no_sync():
                weighted_step(run, me.rank, 10 + step)
            weighted_step(run, me.rank, step)
            for rank in range(me.world_size):
                for at in (10 + step, step):
                    model(data(rank, at, 1 + 2 * rank)).square().sum().backward()
            total = 2 * sum(1 + 2 * rank for rank in range(me.world_size))
            wanted = {n: grad / total for n, grad in drop_none(grads_of(model)).items()}
            found[name] = drop_none(grads_of(run))
            assert_close_to({name: found[name]}, {name: wanted}, rel=1e-14)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_changes_in_steps_with_counts(ranks, world):
    assert_same_on_all(ranks(world).run(with_counts))


def thawed_and_frozen_again(me):
    """Gradual unfreezing, freezing again, and both at once, over many steps."""
    run, model = DistributedDataParallel(net(FROZEN), bucket_cap_mb=TINY), net(FROZEN)
    steppers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (run, model)]
    trainable = [{"b", "c"}, {"a", "b", "c"}, {"c"}, {"a", "c"}, {"a", "b", "c"}, {"b"}, {"a"}]
    for step, names in enumerate(trainable):
        for each in (run.module, model):
            for name in ("a", "b", "c"):
                getattr(each, name).requires_grad_(name in names)
        for stepper in steppers:
            stepper.zero_grad()
        plain_step(run, me.rank, step)
        exact(model, 2, step)
        assert nones(grads_of(run)) == nones(grads_of(model)), step
        assert_close_to(drop_none(grads_of(run)), drop_none(grads_of(model)), rel=1e-13)
        for stepper in steppers:
            stepper.step()
    assert_close_to(
        {n: p.detach() for n, p in run.module.named_parameters()},
        {n: p.detach() for n, p in model.named_parameters()},
        rel=1e-13,
    )
    return grads_of(run)


def test_layers_thawed_and_frozen_in_turn(ranks):
    assert_same_on_all(ranks(2).run(thawed_and_frozen_again))


def between_forward_and_backward(me):
    """The module changes while its graph waits: the old parameters get what the graph gives them."""
    found = {}
    for name, (change, frozen) in CHANGES.items():
        run, model = DistributedDataParallel(net(frozen), bucket_cap_mb=TINY), net(frozen)
        plain_step(run, me.rank, 0)
        run.zero_grad()
        loss = run(data(me.rank, 1)).square().mean()
        losses = [model(data(rank, 1)).square().mean() / 2 for rank in range(2)]
        held = [dict(each.named_parameters()) for each in (run.module, model)]
        change(run.module)
        change(model)
        loss.backward()
        for each in losses:
            each.backward()
        assert_close_to(
            {name: {n: p.grad for n, p in held[0].items() if p.grad is not None}},
            {name: {n: p.grad for n, p in held[1].items() if p.grad is not None}},
            rel=1e-14,
        )
        # The next step is a step of the new module.
        run.zero_grad()
        model.zero_grad()
        plain_step(run, me.rank, 2)
        found[name] = drop_none(grads_of(run))
        assert_close_to({name: found[name]}, {name: drop_none(exact(model, 2, 2))}, rel=1e-14)
    return found


def test_a_module_that_changes_between_forward_and_backward(ranks):
    assert_same_on_all(ranks(2).run(between_forward_and_backward))


def overlap_returns(me):
    """One step to learn anew; then buckets leave during backward again, one all-reduce each."""
    run = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    facts = []
    for step in range(5):
        if step == 2:
            run.module.extra = fresh()
        run.zero_grad()
        plain_step(run, me.rank, step)
        last = run.reducer.last_step
        if last is not None:
            facts.append((last.all_reduces, last.launched_in_backward))
    names = [spec.name for spec in run.reducer.plan.params]
    return facts[-1], names


def test_after_a_change_buckets_leave_early_again(ranks):
    for facts, names in ranks(2).run(overlap_returns):
        assert facts == (4, 3)
        assert names[-2:] == ["extra.weight", "extra.bias"]


# ---------------------------------------------------------------- on one rank alone

NAMES = {
    "thaw": "a.weight",
    "freeze": "b.weight",
    "replace a layer": "b.weight",
    "replace a parameter": "b.weight",
    "replace all": "a.weight",
    "add a layer": "extra.weight",
    "add a parameter": "scale",
    "remove a layer": "b.weight",
    "delete a layer": "b.weight",
    "drop a bias": "b.bias",
    "load with assign": "a.weight",
}


def on_one_rank(me, name, when):
    """One rank changes its module; every rank hears of it, in this step and as long as it lasts."""
    change, frozen = CHANGES[name]
    run = DistributedDataParallel(net(frozen), bucket_cap_mb=TINY)
    said = []
    for step in range(4):
        if step == when and me.rank == 1:
            change(run.module)
        run.zero_grad()
        said.append(attempt(lambda step=step: plain_step(run, me.rank, step)))
    return said


@pytest.mark.parametrize("name", NAMES)
def test_a_change_on_one_rank_is_told_on_all(ranks, name):
    outcomes = ranks(2).outcomes(on_one_rank, name, 2, timeout_s=20)
    for outcome in outcomes:
        assert outcome.value is not None, outcome
        *before, at_once, later = outcome.value
        assert before == [None, None]
        assert at_once is not None, "another gradient on one rank, and nobody said so"
        assert NAMES[name] in at_once[1]
        assert "rank 1" in at_once[1].lower()
        # It does not become silent in the next step.
        assert later is not None


def one_of_three(me):
    """The two ranks that agree name the third."""
    run = DistributedDataParallel(net(FROZEN), bucket_cap_mb=TINY)
    plain_step(run, me.rank, 0)
    if me.rank == 2:
        thaw(run.module)
    run.zero_grad()
    return attempt(lambda: plain_step(run, me.rank, 1))


def test_one_of_three_ranks(ranks):
    for kind, text in ranks(3).run(one_of_three):
        assert kind == "ModelMismatchError"
        assert "'a.weight'" in text
        assert "rank 2" in text


def undone(me):
    """After the error the rank takes its change back, and all go on."""
    run = DistributedDataParallel(net(FROZEN), bucket_cap_mb=TINY)
    plain_step(run, me.rank, 0)
    if me.rank == 1:
        thaw(run.module)
    run.zero_grad()
    assert attempt(lambda: plain_step(run, me.rank, 1))[0] == "ModelMismatchError"
    if me.rank == 1:
        run.module.a.weight.requires_grad_(False)
    run.zero_grad()
    run.module.a.weight.grad = None
    plain_step(run, me.rank, 2)
    assert_close_to(drop_none(grads_of(run)), drop_none(exact(net(FROZEN), 2, 2)), rel=1e-14)
    return drop_none(grads_of(run))


def test_a_change_that_is_taken_back(ranks):
    assert_same_on_all(ranks(2).run(undone))


# ---------------------------------------------------------------- dtypes, and modules moved


def other_dtype(me, when, large):
    """The module is converted after wrapping: a clear error on all ranks, and wrapping it anew works."""
    width = 80 if large else 4
    model = nn.Linear(width, width).double()
    run = DistributedDataParallel(model, bucket_cap_mb=TINY)
    said = []
    for step in range(3):
        if step == when:
            model.float()
        run.zero_grad()
        x = torch.full((1, width), 1.0 + step, dtype=model.weight.dtype)
        said.append(attempt(lambda run=run, x=x: run(x).sum().backward()))
    del run
    again = DistributedDataParallel(model)
    again.zero_grad()
    again(torch.full((1, width), me.rank + 1.0)).sum().backward()
    return said, model.weight.grad[0, 0].item()


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("when", [0, 1])
def test_another_dtype_after_wrapping_is_an_error(ranks, when, large):
    for said, grad in ranks(2).run(other_dtype, when, large):
        assert said[:when] == [None] * when
        kind, text = said[when]
        assert kind == "ModelError"
        assert "'weight'" in text
        assert "torch.float64" in text
        assert "torch.float32" in text
        assert "wrap" in text
        assert grad == 1.5


def moved(me):
    """What ``.to`` of the same dtype and ``.data`` assignments do is no change."""
    run = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    model = net()
    for step in range(3):
        for each in (run, model):
            each.zero_grad()
            each.to(torch.float64)
            for param in each.parameters():
                param.data = param.data.clone() * 1.1
        plain_step(run, me.rank, step)
        assert_close_to(grads_of(run), exact(model, 2, step), rel=1e-14)
    assert run.reducer.last_step.all_reduces == 3
    return grads_of(run)


def test_assigning_data_is_no_change(ranks):
    assert_same_on_all(ranks(2).run(moved))


class Stateful(nn.Module):
    """Assigns buffers and plain attributes in each forward, and a submodule without parameters once."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + 1
        self.last = x.detach()
        if not hasattr(self, "act"):
            self.act = nn.Tanh()
        return self.act(self.layer(x))


def ordinary_assignments(me):
    torch.manual_seed(3)
    run = DistributedDataParallel(Stateful().double(), bucket_cap_mb=TINY)
    calls = []
    kept = vars(dist.ProcessGroup)["allgather"]
    call = dist.ProcessGroup.allgather
    dist.ProcessGroup.allgather = lambda *args, **kwargs: (calls.append(1), call(*args, **kwargs))[
        1
    ]
    try:
        for step in range(5):
            if step == 2:
                calls.clear()
            run.zero_grad()
            plain_step(run, me.rank, step)
    finally:
        dist.ProcessGroup.allgather = kept
    return len(calls), int(run.module.seen), grads_of(run)


def test_assigning_buffers_and_attributes_costs_nothing(ranks):
    outcomes = ranks(2).run(ordinary_assignments)
    assert_same_on_all([grads for _, _, grads in outcomes])
    for compared, seen, _ in outcomes:
        assert compared == 0
        assert seen == 5


def copied_after_a_change(me):
    """A copy of a changed wrapper has the changed parameters."""
    run = DistributedDataParallel(net(FROZEN), bucket_cap_mb=TINY)
    plain_step(run, me.rank, 0)
    thaw(run.module)
    add_a_layer(run.module)
    run.zero_grad()
    plain_step(run, me.rank, 1)
    twin = copy.deepcopy(run)
    twin.zero_grad()
    plain_step(twin, me.rank, 2)
    model = net(FROZEN)
    thaw(model)
    add_a_layer(model)
    assert_close_to(drop_none(grads_of(twin)), drop_none(exact(model, 2, 2)), rel=1e-14)
    return drop_none(grads_of(twin))


def test_a_copy_of_a_changed_wrapper(ranks):
    assert_same_on_all(ranks(2).run(copied_after_a_change))


def everything_frozen(me):
    """All parameters frozen after wrapping: forwards work, and nothing waits; thawed again, they are reduced."""
    run = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    plain_step(run, me.rank, 0)
    run.requires_grad_(False)
    for step in (1, 2):
        assert not run(data(me.rank, step)).requires_grad
    run.requires_grad_(True)
    run.zero_grad()
    plain_step(run, me.rank, 3)
    assert_close_to(grads_of(run), exact(net(), 2, 3), rel=1e-14)
    return grads_of(run)


def test_everything_frozen_for_a_while(ranks):
    assert_same_on_all(ranks(2).run(everything_frozen))
