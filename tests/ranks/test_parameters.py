"""Every kind of parameter is reduced, and gradients live in the buckets and nowhere else."""

# ruff: noqa: B023 (what binds a loop variable here is called in the same turn of the loop)
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rankstep import DistributedDataParallel
from rankstep.testing import assert_bitwise_equal, assert_close_to, assert_same_on_all

TINY = 0.0001


def data(rank, step, *shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def one_process(model, loss_of, world):
    """The mean over the ranks of their gradients, divided before it is summed as a half type needs it."""
    total = {}
    for rank in range(world):
        plain = copy.deepcopy(model)
        loss_of(plain, rank).backward()
        for name, param in plain.named_parameters():
            if param.grad is not None:
                part = param.grad * (1.0 / world)
                total[name] = total[name] + part if name in total else part
    return {name: total.get(name) for name, _ in model.named_parameters()}


def grads_of(model):
    return {
        name.removeprefix("module."): None if param.grad is None else param.grad.clone()
        for name, param in model.named_parameters()
    }


def check_steps(me, model, loss_of, cap, steps=3):
    """Train nothing, but let three steps give the gradients of one process, bit for bit on two ranks."""
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=cap)
    for step in range(steps):
        wrapped.zero_grad()
        loss_of(wrapped, me.rank, step).backward()
        wanted = one_process(model, lambda plain, rank: loss_of(plain, rank, step), me.world_size)
        assert_bitwise_equal(grads_of(wrapped), wanted)
    for name, param in wrapped.module.named_parameters():
        if param.grad is not None:
            assert param.grad.dtype == param.dtype, name
            assert param.grad.shape == param.shape, name
    return wrapped


# ---------------------------------------------------------------- kinds


class Zoo(nn.Module):
    """One parameter of each kind; the loss reaches every one with a different gradient."""

    def __init__(self):
        super().__init__()
        memory_format = torch.channels_last
        self.matrix = nn.Parameter(torch.randn(4, 6))
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        self.gaps = nn.Parameter(torch.randn(4, 12)[:, ::2])
        self.images = nn.Parameter(torch.randn(2, 3, 4, 4).contiguous(memory_format=memory_format))
        self.ones = nn.Parameter(torch.randn(1, 3, 1, 5).contiguous(memory_format=memory_format))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.pairs = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.wide_pair = nn.Parameter(torch.randn((), dtype=torch.complex128))
        self.wide = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.brain_float16 = nn.Parameter(torch.randn(7).bfloat16())
        self.float16 = nn.Parameter(torch.randn(7).half())
        self.empty_double = nn.Parameter(torch.randn(2, 0, dtype=torch.float64))
        self.large = nn.Parameter(torch.randn(80, 80))

    def forward(self, x):
        total = torch.zeros((), dtype=torch.float64)
        for index, param in enumerate(self.parameters()):
            if param.numel() == 0:
                total = total + param.sum()
                continue
            numbers = x.new_ones(param.shape) * x[index % len(x)]
            numbers = (numbers + torch.arange(param.numel()).view(param.shape)).cos()
            kind = torch.view_as_real(param).sum(-1) if param.is_complex() else param
            total = total + (kind.double() * numbers).sum()
        return total


def zoo(me, cap):
    model = Zoo()
    wrapped = check_steps(
        me, model, lambda run, rank, step: run(data(rank, step, 11)).square(), cap
    )
    inner = wrapped.module
    for name in ("matrix", "turned", "images", "ones"):
        param = getattr(inner, name)
        assert param.grad.stride() == param.stride(), name
    assert inner.images.grad.is_contiguous(memory_format=torch.channels_last)
    assert inner.gaps.grad.is_contiguous()
    assert inner.frozen.grad is None
    kinds = {bucket.dtype for bucket in wrapped.reducer.plan.buckets}
    return grads_of(wrapped), kinds, len(wrapped.reducer.plan.params)


@pytest.mark.parametrize("cap", [TINY, None])
def test_every_kind_of_parameter(ranks, cap):
    results = ranks(2).run(zoo, cap)
    assert_same_on_all([grads for grads, _, _ in results])
    for grads, kinds, count in results:
        assert kinds == {torch.float32, torch.float64, torch.bfloat16, torch.float16}
        assert count == len(grads) - 1
        assert all(grad.any() for name, grad in grads.items() if grad is not None and grad.numel())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 5)
        self.hidden = nn.Linear(5, 5)
        self.head = nn.Linear(5, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.hidden(self.embedding(tokens)).tanh())


def tied(me, cap):
    torch.manual_seed(2)

    def loss_of(run, rank, step):
        tokens = (data(rank, step, 4).abs() * 100).long() % 9
        return run(tokens).square().mean()

    wrapped = check_steps(me, Tied().double(), loss_of, cap)
    assert wrapped.module.head.weight is wrapped.module.embedding.weight
    return wrapped.reducer.firings.expected, [spec.name for spec in wrapped.reducer.plan.params]


@pytest.mark.parametrize("cap", [TINY, None])
def test_a_shared_parameter_is_one_parameter(ranks, cap):
    for expected, names in ranks(2).run(tied, cap):
        assert names == ["embedding.weight", "hidden.weight", "hidden.bias"]
        # Autograd adds up both uses before it accumulates.
        assert expected == [1, 1, 1]


def only_empty_buckets(me, order):
    """Buckets without a single element travel too, wherever they are in the plan."""
    kinds = [torch.float64, torch.float32, torch.bfloat16]
    model = nn.Module()
    for index in order:
        size = (0, 3) if index != 1 else (2, 3)
        model.register_parameter(f"p{index}", nn.Parameter(torch.ones(size, dtype=kinds[index])))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=TINY)
    for step in range(3):
        wrapped.zero_grad()
        sum(p.double().sum() for p in model.parameters()).mul(me.rank + 1 + step).backward()
    assert all(p.grad.shape == p.shape for p in model.parameters())
    return model.p1.grad, len(wrapped.reducer.buckets)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1)], ids=str)
def test_buckets_without_elements(ranks, order):
    for grad, buckets in ranks(2).run(only_empty_buckets, order):
        assert_bitwise_equal(grad, torch.full((2, 3), 3.5))
        assert buckets == 3


def numbers_at_the_edge(me):
    """Values that a sum, a division or a trailer could spoil."""
    model = nn.Module()
    model.small = nn.Parameter(torch.ones(3, dtype=torch.float16))
    model.wide = nn.Parameter(torch.ones(6))
    wrapped = DistributedDataParallel(model)
    most = float(torch.finfo(torch.float16).max)
    nan, inf = float("nan"), float("inf")
    half = torch.tensor([most, most, -most], dtype=torch.float16)
    full = torch.tensor(
        [[1.0, nan, inf, inf, -0.0, 3e38], [2.0, 0.0, inf, -inf, -0.0, 3e38]][me.rank]
    )
    for _ in range(3):
        wrapped.zero_grad()
        torch.autograd.backward([model.small, model.wide], [half, full])
    return model.small.grad, model.wide.grad


def test_extreme_values_come_through(ranks):
    inf = float("inf")
    most = float(torch.finfo(torch.float16).max)
    for half, full in ranks(2).run(numbers_at_the_edge):
        assert_bitwise_equal(half, torch.tensor([most, most, -most], dtype=torch.float16))
        found = full.tolist()
        assert found[0] == 1.5
        assert found[1] != found[1]  # only a NaN differs from itself
        assert found[2] == inf
        assert found[3] != found[3]
        assert str(found[4]) == "-0.0"
        assert found[5] == pytest.approx(3e38)


def ignored(me):
    """Names that torch's own marker lists are neither copied nor reduced."""
    torch.manual_seed(me.rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = [param.detach().clone() for param in model.parameters()]
    model._ddp_params_and_buffers_to_ignore = ["1.weight"]
    wrapped = DistributedDataParallel(model)
    copied = [
        torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True)
    ]
    wrapped(data(me.rank, 0, 2, 3, dtype=torch.float32)).sum().backward()
    names = [spec.name for spec in wrapped.reducer.plan.params]
    return copied, names, grads_of(wrapped)


def test_ignored_parameters_stay_local(ranks):
    first, second = ranks(2).run(ignored)
    for _, names, _ in (first, second):
        assert names == ["0.weight", "0.bias", "1.bias"]
    assert first[0] == [True] * 4
    assert second[0] == [False, False, True, False]
    for name in ("0.bias", "1.bias"):
        assert_bitwise_equal(first[2][name], second[2][name])
    assert not torch.equal(first[2]["1.weight"], second[2]["1.weight"])


def frozen_later(me, cap):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=cap)
    old = None
    for step in range(6):
        frozen = step in (2, 3)
        for run in (model, wrapped.module):
            run[0].requires_grad_(not frozen)
        if frozen:
            wrapped.module[2].zero_grad()
        else:
            wrapped.zero_grad()

        def loss_of(run, rank, at=step):
            return run(data(rank, at, 3, 4)).sum()

        loss_of(wrapped, me.rank).backward()
        wanted = one_process(model, loss_of, me.world_size)
        got = grads_of(wrapped)
        if frozen:
            # What the layer had when it was frozen is still there, bit for bit.
            assert_bitwise_equal([got.pop("0.weight"), got.pop("0.bias")], old)
            wanted.pop("0.weight")
            wanted.pop("0.bias")
        else:
            old = [got["0.weight"], got["0.bias"]]
        assert_close_to(got, wanted, rel=1e-15)
    return got


@pytest.mark.parametrize("cap", [TINY, None])
@pytest.mark.parametrize("world", [2, 3])
def test_a_layer_may_be_frozen_for_a_while(ranks, world, cap):
    assert_same_on_all(ranks(world).run(frozen_later, cap))


# ---------------------------------------------------------------- memory


def bytes_held(tensors):
    """Bytes of all storages behind the tensors, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def memory(me, shapes):
    model = nn.Module()
    model.all = nn.ParameterList(torch.randn(*shape) for shape in shapes)
    wrapped = DistributedDataParallel(model)
    for step in range(3):
        wrapped.zero_grad()
        sum((param * (me.rank + step)).sum() for param in model.all).backward()
    grads = [param.grad for param in model.all]
    needed = sum(grad.nbytes for grad in grads)
    buckets = [bucket.flat for bucket in wrapped.reducer.buckets]
    with_copies = bytes_held([*buckets, *(grad.clone() for grad in grads)])
    return bytes_held([*buckets, *grads]) / needed, with_copies / needed, len(buckets)


@pytest.mark.parametrize(
    ("shapes", "buckets"),
    [
        # Many tiny ones, where the trailer weighs most; a few large ones in several buckets.
        ([(8, 8), (8,)] * 500, 1),
        ([(600, 600)] * 5 + [(1000,)] * 3, 2),
    ],
    ids=["tiny", "large"],
)
def test_gradients_are_held_once(ranks, shapes, buckets):
    for held, with_copies, count in ranks(2).run(memory, shapes):
        assert count == buckets
        assert 1.0 <= held <= 1.05
        # The twin: gradients of their own beside the buckets would show.
        assert with_copies >= 2.0


def views(me):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 70), nn.Linear(70, 70))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.01)
    addresses = []
    for step in range(3):
        wrapped.zero_grad()
        wrapped(data(me.rank, step, 3, 4, dtype=torch.float32)).sum().backward()
        addresses.append([param.grad.data_ptr() for param in model.parameters()])
    # The memory is the same in all steps, and each gradient lies inside its bucket.
    assert addresses[0] == addresses[1] == addresses[2]
    reducer = wrapped.reducer
    params = list(model.parameters())
    for bucket in reducer.buckets:
        start = bucket.flat.data_ptr()
        for index, offset in zip(bucket.spec.params, bucket.spec.offsets, strict=True):
            grad = params[index].grad
            assert grad.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()
            assert grad.data_ptr() == start + 4 * offset
            assert not grad._is_view()
            assert grad.grad_fn is None
            assert not grad.requires_grad
    # Writing a gradient writes the bucket, and two gradients never overlap.
    for number, param in enumerate(params, 1):
        param.grad.fill_(float(number))
    for number, param in enumerate(params, 1):
        assert torch.all(param.grad == number)
    total = sum(float(bucket.flat[: bucket.spec.numel].sum()) for bucket in reducer.buckets)
    assert total == sum(number * param.numel() for number, param in enumerate(params, 1))
    # What old training loops do with gradients.
    for param in params:
        param.grad.detach_()
        param.grad.zero_()
    assert not any(bucket.flat[: bucket.spec.numel].any() for bucket in reducer.buckets)
    return len(reducer.buckets)


def test_gradients_are_views_of_the_buckets(ranks):
    assert ranks(2).run(views) == [2, 2]


def clips_and_steps(me):
    """Optimizers and clipping work in place on the views; weights stay equal."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=TINY)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    before = [param.detach().clone() for param in model.parameters()]
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        wrapped(data(me.rank, step, 3, 4, dtype=torch.float32)).square().sum().backward()
        norms.append(float(nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)))
        optimizer.step()
    moved = [
        not torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True)
    ]
    return norms, [param.detach() for param in model.parameters()], moved


def test_clipping_and_stepping_keep_the_ranks_equal(ranks):
    results = ranks(2).run(clips_and_steps)
    assert_same_on_all(results)
    norms, _, moved = results[0]
    assert all(norm > 0.5 for norm in norms)
    assert all(moved)
