"""Construction: the ranks' models are compared, then rank 0's values are everywhere; and what wrapping leaves behind."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rankstep import DistributedDataParallel
from rankstep.collectives import C10dCommunicator
from rankstep.errors import ModelError, ModelMismatchError, ModelTypeError
from rankstep.parallel import replicate
from rankstep.testing import assert_bitwise_equal, assert_same_on_all

CHANNELS_LAST = torch.channels_last


class Everything(nn.Module):
    """State of every kind, with values of the rank's own."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.linear = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.images = nn.Parameter(torch.randn(2, 3, 4, 4).contiguous(memory_format=CHANNELS_LAST))
        self.gaps = nn.Parameter(torch.randn(4, 6)[:, ::2])
        self.pairs = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.brain = nn.Parameter(torch.randn(3).bfloat16())
        self.scalar = nn.Parameter(torch.randn((), dtype=torch.float64))
        self.empty = nn.Parameter(torch.randn(0, 2))
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("count", torch.randint(1000, (2, 2)))
        self.register_buffer("tiny", torch.randint(200, (5,), dtype=torch.uint8))
        self.register_buffer("hidden", torch.randn(2), persistent=False)
        self.register_buffer("turned", torch.randn(3, 2).t())
        self.register_buffer("none", None)

    def forward(self, x):
        return self.norm(self.linear(x))


def state_of(module):
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


# ---------------------------------------------------------------- values


def constructs(me, options):
    model = Everything(me.rank)
    before = state_of(model)
    layouts = [(t.data_ptr(), t.stride()) for t in (*model.parameters(), *model.buffers())]
    wrapped = DistributedDataParallel(model, **options)
    assert layouts == [(t.data_ptr(), t.stride()) for t in (*model.parameters(), *model.buffers())]
    assert wrapped.module is model
    return before, state_of(model)


@pytest.mark.parametrize("world", [2, 3])
def test_rank_0s_values_are_copied_to_all(ranks, world):
    results = ranks(world).run(constructs, {})
    first = results[0][0]
    assert len(first) == 19
    for before, after in results:
        assert_bitwise_equal(after, first)
        if before is not first:
            assert sum(torch.equal(before[name], first[name]) for name in first) < 8


def test_without_init_sync_nothing_is_copied(ranks):
    for before, after in ranks(2).run(constructs, {"init_sync": False}):
        assert_bitwise_equal(after, before)


def test_forward_sync_buffers_false_still_copies_at_construction(ranks):
    results = ranks(2).run(constructs, {"forward_sync_buffers": False})
    assert_same_on_all([after for _, after in results])


def old_option(me):
    model = Everything(me.rank)
    before = state_of(model)
    with pytest.warns(FutureWarning, match="forward_sync_buffers"):
        wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    assert wrapped.forward_sync_buffers is False
    assert wrapped.broadcast_buffers is False
    with pytest.warns(FutureWarning, match="not used"):
        both = DistributedDataParallel(
            copy.deepcopy(model), broadcast_buffers=False, forward_sync_buffers=True
        )
    return before, state_of(model), both.forward_sync_buffers


def test_the_old_option_leaves_buffers_alone_and_says_so(ranks):
    (before, first, both), (own, second, _) = ranks(2).run(old_option)
    assert_bitwise_equal(first, before)
    buffers = {"mask", "count", "tiny", "hidden", "turned"}
    assert_bitwise_equal({n: second[n] for n in buffers}, {n: own[n] for n in buffers})
    for name in ("linear.weight", "frozen", "pairs"):
        assert_bitwise_equal(second[name], first[name])
    assert both is True


def copies(me, src, chunk_bytes):
    torch.manual_seed(me.rank)
    tensors = [
        torch.randn(5),
        torch.randint(99, (3,)),
        torch.randn(4, 4).t(),
        torch.randn(0),
        torch.randn(20),
        torch.randn(3, requires_grad=True),
        torch.rand(7) > 0.5,
    ]
    before = [tensor.detach().clone() for tensor in tensors]
    versions = [tensor._version for tensor in tensors]
    replicate.copy_from(tensors, C10dCommunicator(), src=src, chunk_bytes=chunk_bytes)
    assert versions == [tensor._version for tensor in tensors]
    return before, [tensor.detach() for tensor in tensors]


def test_messages_of_any_size_from_any_rank(ranks):
    for src, chunk_bytes in itertools.product([0, 2], [1, 40, 10**9]):
        results = ranks(3).run(copies, src, chunk_bytes)
        for _, after in results:
            assert_bitwise_equal(after, results[src][0])


# ---------------------------------------------------------------- buffers in forward


class Keeps(nn.Module):
    """Shows the buffers it saw in forward; may put new ones in their place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("number", torch.zeros(3))
        self.register_buffer("flag", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.seen = None

    def forward(self, x):
        self.seen = [self.number.clone(), self.flag.clone(), self.steps.clone()]
        return self.linear(x)


def disturb(model, value):
    """Write values of this rank's own, one of them in a new tensor."""
    model.number = torch.full((3,), float(value))
    model.flag.fill_(bool(value % 2))
    model.steps.fill_(value)


def forwards(me, options, kinds):
    wrapped = DistributedDataParallel(Keeps(), **options)
    model = wrapped.module
    x = torch.ones(1, 2)
    seen = []
    for number, kind in enumerate(kinds):
        disturb(model, 10 * number + me.rank)
        if kind == "train":
            wrapped(x).sum().backward()
        elif kind == "eval":
            wrapped.eval()
            wrapped(x)
            wrapped.train()
        elif kind == "no_grad":
            with torch.no_grad():
                wrapped(x)
        elif kind == "inner":
            model(x)
        number_seen, flag, steps = model.seen
        assert [number_seen[0].item() % 2 == 1] * 2 == flag.tolist()
        assert number_seen[0].item() == steps.item()
        seen.append(int(steps) - 10 * number)
    return seen


def test_buffers_are_rank_0s_in_every_forward(ranks):
    kinds = ["train", "eval", "train", "inner", "train", "no_grad", "train", "train"]
    zeroth, first = ranks(2).run(forwards, {}, kinds)
    assert zeroth == [0] * 8
    # 1 is the rank's own value: around the wrapper, and after a forward without grad, as in torch.
    assert first == [0, 0, 0, 1, 0, 0, 1, 0]


def test_buffers_stay_the_ranks_own_when_asked(ranks):
    kinds = ["train", "eval", "train"]
    zeroth, first = ranks(2).run(forwards, {"forward_sync_buffers": False}, kinds)
    assert (zeroth, first) == ([0] * 3, [1] * 3)


def buffer_used_in_two_forwards(me):
    """A copy between a forward and its backward is no in-place change that autograd would refuse."""
    model = Keeps()
    model.number.fill_(2.0)

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return (self.inner.linear(x) * self.inner.number[:2]).sum()

    wrapped = DistributedDataParallel(Product())
    x = torch.ones(1, 2)
    loss = wrapped(x)
    loss = loss + wrapped(x)
    loss.backward()
    return model.linear.bias.grad


def test_buffers_may_be_copied_before_the_backward_that_needs_them(ranks):
    for grad in ranks(2).run(buffer_used_in_two_forwards):
        assert_bitwise_equal(grad, torch.tensor([4.0, 4.0]))


def statistics(me, options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    plain = copy.deepcopy(model)
    wrapped = DistributedDataParallel(model, **options)
    torch.manual_seed(me.rank)
    x = torch.randn(8, 3)
    wrapped(x).sum().backward()
    plain(x)
    statistics = [plain[1].running_mean, plain[1].running_var, plain[1].num_batches_tracked]
    return list(model[1].buffers()), statistics


def test_running_statistics_are_rank_0s_after_the_last_step_too(ranks):
    # So that whoever saves or evaluates the inner module finds the same on every rank.
    (at_0, own_0), (at_1, own_1) = ranks(2).run(statistics, {})
    assert not torch.equal(own_0[0], own_1[0])
    assert_bitwise_equal(at_0, own_0)
    assert_bitwise_equal(at_1, own_0)


def test_running_statistics_stay_the_ranks_own_when_asked(ranks):
    for at, own in ranks(2).run(statistics, {"forward_sync_buffers": False}):
        assert_bitwise_equal(at, own)


# ---------------------------------------------------------------- models that differ


def chain(*sizes):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def frozen(model, name):
    model.get_parameter(name).requires_grad_(False)
    return model


def named(names):
    module = nn.Module()
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.zeros(2)))
    return module


def turned(model):
    model[0].weight = nn.Parameter(torch.zeros(4, 4).t())
    return model


# Both sides, options of both sides, and what the error must show of the usual and of the odd side.
DIFFERENT = {
    "names": (
        lambda: named(["alpha", "beta"]),
        lambda: named(["alpha", "gamma"]),
        {},
        {},
        ["parameter 1", "name", "'beta'", "'gamma'"],
    ),
    "order": (
        lambda: named(["alpha", "beta"]),
        lambda: named(["beta", "alpha"]),
        {},
        {},
        ["parameter 0", "'alpha'", "'beta'", "another order"],
    ),
    "shapes": (
        lambda: chain(4, 4, 5),
        lambda: chain(4, 4, 6),
        {},
        {},
        ["parameter 2", "'1.weight'", "shape", "[5, 4]", "[6, 4]"],
    ),
    "dtypes": (
        lambda: chain(4, 4),
        lambda: chain(4, 4).double(),
        {},
        {},
        ["parameter 0", "'0.weight'", "dtype", "torch.float32", "torch.float64"],
    ),
    "strides": (
        lambda: chain(4, 4),
        lambda: turned(chain(4, 4)),
        {},
        {},
        ["parameter 0", "'0.weight'", "strides", "[4, 1]", "[1, 4]"],
    ),
    "requires_grad": (
        lambda: chain(4, 4, 4),
        lambda: frozen(chain(4, 4, 4), "1.bias"),
        {},
        {},
        ["parameter 3", "'1.bias'", "requires_grad", "True", "False"],
    ),
    "one more": (
        lambda: chain(4, 4),
        lambda: chain(4, 4, 5),
        {},
        {},
        ["'1.weight'", "[5, 4]", "2 params", "4 params"],
    ),
    "one less": (
        lambda: chain(4, 4, 5),
        lambda: chain(4, 4),
        {},
        {},
        ["'1.weight'", "[5, 4]", "2 params", "4 params"],
    ),
    "caps": (
        lambda: chain(4, 4),
        lambda: chain(4, 4),
        {"bucket_cap_mb": 1},
        {"bucket_cap_mb": 2},
        ["1048576", "2097152"],
    ),
    "cap lists": (
        lambda: chain(4, 4),
        lambda: chain(4, 4),
        {"bucket_cap_mb_list": [1, 2]},
        {"bucket_cap_mb_list": [1, 2, 3]},
        ["2097152", "3145728"],
    ),
}


def differs(me, what, odd):
    usual_model, odd_model, usual_options, odd_options, _ = DIFFERENT[what]
    model, options = (
        (odd_model(), odd_options) if me.rank == odd else (usual_model(), usual_options)
    )
    before = state_of(model)
    with pytest.raises(ModelMismatchError) as raised:
        DistributedDataParallel(model, **options)
    # Nothing was changed, no hook stays behind, and the group goes on working.
    assert_bitwise_equal(state_of(model), before)
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    total = torch.ones(1)
    dist.all_reduce(total)
    assert int(total) == me.world_size
    torch.manual_seed(me.rank)
    wrapped = DistributedDataParallel(usual_model(), **usual_options)
    params = list(wrapped.parameters())
    sum(param.sum() * (me.rank + 1) for param in params).backward()
    mean = sum(range(1, me.world_size + 1)) / me.world_size
    assert all(torch.all(param.grad == mean) for param in params)
    return str(raised.value)


@pytest.mark.parametrize("what", DIFFERENT)
def test_every_rank_names_the_first_difference_and_both_sides(ranks, what):
    for world, odd in [(2, 0), (2, 1), (3, 2)]:
        told = ranks(world).run(differs, what, odd)
        for rank, text in enumerate(told):
            for part in DIFFERENT[what][-1]:
                assert part in text
            assert f"[{rank}]" in text
            # Also a rank that equals most of the others names the odd one, and a rank that it is compared with.
            assert f"rank {odd}" in text.lower()
            other = rank if rank != odd else (0 if odd else 1)
            assert f"rank {other}" in text.lower()


def same_models(me):
    for usual, odd, options, odd_options, _ in DIFFERENT.values():
        DistributedDataParallel(usual(), **options)
        DistributedDataParallel(odd(), **odd_options)
    return True


def test_equal_models_are_accepted(ranks):
    assert ranks(2).run(same_models) == [True, True]


class WithBuffer(nn.Module):
    def __init__(self, name, buffer):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer(name, buffer)


OTHER_BUFFERS = {
    "size": ("steps", torch.zeros(5)),
    "dtype": ("steps", torch.zeros(4, dtype=torch.float64)),
    "name": ("count", torch.zeros(4)),
    "missing": ("steps", None),
}


def buffers_differ(me, what):
    usual = ("steps", torch.zeros(4))
    name, buffer = OTHER_BUFFERS[what] if me.rank else usual
    with pytest.raises(ModelMismatchError) as raised:
        DistributedDataParallel(WithBuffer(name, buffer))
    return str(raised.value)


@pytest.mark.parametrize("what", OTHER_BUFFERS)
def test_buffers_that_differ_are_named_too(ranks, what):
    # They travel in one message: copied unseen, a longer one would be cut off, or end the process.
    for text in ranks(2).run(buffers_differ, what):
        assert "'steps'" in text


# ---------------------------------------------------------------- models that cannot be trained


def refused(me, build, kind, options):
    model = REFUSED[build][0]()
    with pytest.raises(kind) as raised:
        DistributedDataParallel(model, **options)
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    return str(raised.value)


REFUSED = {
    "nothing to train": (
        lambda: chain(2, 2).requires_grad_(False),
        ModelError,
        {},
        "any parameter that requires a gradient",
    ),
    "no parameters": (nn.Tanh, ModelError, {}, "any parameter that requires a gradient"),
    "without memory": (lambda: chain(2, 2).to("meta"), ModelError, {}, "'0.weight'"),
    "no cap": (lambda: chain(2, 2), ModelTypeError, {"bucket_cap_mb": 0}, "positive"),
    "negative cap": (lambda: chain(2, 2), ModelTypeError, {"bucket_cap_mb_list": [1, -1]}, "-1"),
    "no caps": (lambda: chain(2, 2), ModelTypeError, {"bucket_cap_mb_list": []}, "positive"),
    "two devices": (lambda: chain(2, 2), ModelTypeError, {"device_ids": [0, 1]}, "single element"),
    "a device id on a CPU": (lambda: chain(2, 2), ModelTypeError, {"device_ids": [0]}, "cpu"),
}


@pytest.mark.parametrize("build", REFUSED)
def test_what_cannot_be_trained_is_refused_with_a_reason(ranks, build):
    _, kind, options, said = REFUSED[build]
    for text in ranks(2).run(refused, build, kind, options):
        assert said in text


# ---------------------------------------------------------------- what wrapping leaves behind


def hooks_on(model):
    return [len(param._post_accumulate_grad_hooks or ()) for param in model.parameters()]


def collected(me):
    model = chain(3, 3)
    with_hook = []
    model[0].bias.register_post_accumulate_grad_hook(lambda param: with_hook.append(1))
    counts = [hooks_on(model)]
    wrapped = DistributedDataParallel(model)
    counts.append(hooks_on(model))
    wrapped(torch.full((1, 3), me.rank + 1.0)).sum().backward()
    reducer = weakref.ref(wrapped.reducer)
    alive = weakref.ref(wrapped)
    gc.collect()
    gc.disable()
    try:
        # By reference count alone, so that the next wrapper of the same module does not meet the old hooks.
        del wrapped
        gone = alive() is None
        counts.append(hooks_on(model))
    finally:
        gc.enable()
    gc.collect()
    assert reducer() is None
    # Local again: the ranks' gradients differ.
    model.zero_grad()
    model(torch.full((1, 3), me.rank + 1.0)).sum().backward()
    own = model[0].weight.grad.clone()
    again = DistributedDataParallel(model)
    again.zero_grad()
    again(torch.full((1, 3), me.rank + 1.0)).sum().backward()
    return gone, counts, own, model[0].weight.grad.clone(), len(with_hook)


def test_a_wrapper_that_is_gone_leaves_no_hooks_and_the_module_can_be_wrapped_again(ranks):
    for rank, (gone, counts, own, grad, with_hook) in enumerate(ranks(2).run(collected)):
        assert gone
        assert counts == [[0, 1], [1, 2], [0, 1]]
        assert_bitwise_equal(own, torch.full((3, 3), rank + 1.0))
        assert_bitwise_equal(grad, torch.full((3, 3), 1.5))
        assert with_hook == 3


def dropped_in_the_middle(me):
    """A wrapper that dies between forward and backward leaves a plain module."""
    model = chain(3, 3)
    loss = DistributedDataParallel(model)(torch.full((1, 3), me.rank + 1.0)).sum()
    gc.collect()
    assert hooks_on(model) == [0, 0]
    loss.backward()
    return model[0].weight.grad


def test_a_wrapper_dropped_before_backward_reduces_nothing(ranks):
    for rank, grad in enumerate(ranks(2).run(dropped_in_the_middle)):
        assert_bitwise_equal(grad, torch.full((3, 3), rank + 1.0))


def wrapped_twice(me, nested):
    model = chain(3, 3, 3)
    outer = DistributedDataParallel(model, bucket_cap_mb=0.00001)
    other = DistributedDataParallel(outer if nested else model, bucket_cap_mb=0.00001)
    plain = copy.deepcopy(model)
    for _ in range(3):
        other.zero_grad()
        other(torch.full((1, 3), me.rank + 1.0)).sum().backward()
    total = {}
    for rank in range(me.world_size):
        plain(torch.full((1, 3), rank + 1.0)).sum().backward()
    total = {name: param.grad / me.world_size for name, param in plain.named_parameters()}
    # The mean of equal means is that mean.
    assert_bitwise_equal({name: p.grad for name, p in model.named_parameters()}, total)
    return outer.reducer.reductions, other.reducer.reductions


@pytest.mark.parametrize("nested", [False, True], ids=["side by side", "one in the other"])
def test_two_wrappers_around_one_module(ranks, nested):
    assert ranks(2).run(wrapped_twice, nested) == [(3, 3)] * 2


def copied_while_wrapped(me):
    """A copy of the inner module, as for a moving average of weights, has no hooks and no part in reductions."""
    wrapped = DistributedDataParallel(chain(3, 3))
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(torch.full((1, 3), me.rank + 1.0)).sum().backward()
    other = copy.deepcopy(wrapped.module)
    assert hooks_on(other) == [0, 0]
    if me.rank == 0:
        # Alone: if this were reduced, the other rank would be missed.
        other(torch.ones(1, 3)).sum().backward()
    return wrapped.reducer.reductions


def test_a_copy_of_the_inner_module_is_a_plain_module(ranks):
    assert ranks(2).run(copied_while_wrapped) == [2, 2]


def inside_a_group(me):
    """Ranks 1 and 2 of three train together; rank 0 is not asked."""
    group = dist.new_group([1, 2])
    try:
        if me.rank == 0:
            return None
        torch.manual_seed(me.rank)
        model = chain(3, 3)
        wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.00001)
        weights = [param.detach().clone() for param in model.parameters()]
        for _ in range(3):
            wrapped.zero_grad()
            wrapped(torch.full((1, 3), me.rank + 1.0)).sum().backward()
        return weights, model[0].weight.grad.clone()
    finally:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def test_a_group_of_some_ranks(ranks):
    outside, *inside = ranks(3).run(inside_a_group)
    assert outside is None
    assert_same_on_all(inside)
    torch.manual_seed(1)
    # The first rank of the group is the one whose weights count, and the mean is over the group.
    wanted = [param.detach() for param in chain(3, 3).parameters()]
    for weights, grad in inside:
        assert_bitwise_equal(weights, wanted)
        assert_bitwise_equal(grad, torch.full((3, 3), 2.5))
