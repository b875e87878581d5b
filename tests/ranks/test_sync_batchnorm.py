"""SyncBatchNorm: ranks with any number of samples normalise as one process with all of them."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from rankstep import DistributedDataParallel
from rankstep.collectives import C10dCommunicator
from rankstep.errors import CommunicationError, DataError, ModelError
from rankstep.parallel import ddp, sync_batchnorm
from rankstep.parallel.sync_batchnorm import SyncBatchNorm
from rankstep.testing import assert_bitwise_equal, assert_close_to, assert_same_on_all

# About 100 bytes: every weight below is a bucket of its own, so buckets leave while backward runs.
TINY = 0.0001
EXACT = 1e-12
CHANNELS = 3
PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def batch(sizes, dims=4, step=0, dtype=torch.float64):
    """All ranks' samples, rank by rank; far from zero, so that careless sums of squares would show."""
    generator = torch.Generator().manual_seed(10 * step + dims)
    shape = (CHANNELS, 4, 3, 2)[: dims - 1]
    parts = [
        100 + 3 * rank + (1 + rank) * torch.randn(size, *shape, dtype=dtype, generator=generator)
        for rank, size in enumerate(sizes)
    ]
    weights = [torch.randn(part.shape, dtype=dtype, generator=generator) for part in parts]
    return parts, weights


def loss_sum(output, weight):
    return (output.tanh() * weight.to(output.dtype)).sum()


def state_of(model):
    return {name.removeprefix("module."): value for name, value in model.state_dict().items()}


def trained(model, parts, weights):
    """Gradients, input gradient and output of one backward of the given parts together."""
    x = torch.cat(parts).requires_grad_()
    y = model(x)
    loss_sum(y, torch.cat(weights)).backward()
    grads = {n.removeprefix("module."): p.grad.clone() for n, p in model.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, "grads": grads}


def mine(rank, sizes, tensor):
    start = sum(sizes[:rank])
    return tensor[start : start + sizes[rank]]


def near(actual, expected, rel):
    """As `assert_close_to`, for a rank without samples as well."""
    assert actual.shape == expected.shape
    if actual.numel():
        assert_close_to(actual.detach(), expected.detach(), rel)


def compare(me, plain, sizes, dims, rel=EXACT, kind=SyncBatchNorm):
    """Two steps on the ranks against one process with the whole batch, then an evaluation."""
    torch.manual_seed(1)
    if plain.affine:
        nn.init.normal_(plain.weight)
        nn.init.normal_(plain.bias)
    wrapped = kind.convert_sync_batchnorm(copy.deepcopy(plain)) if kind else copy.deepcopy(plain)
    if plain.affine:
        wrapped = DistributedDataParallel(wrapped, bucket_cap_mb=TINY)
    for step in range(2):
        plain.zero_grad()
        wrapped.zero_grad()
        parts, weights = batch(sizes, dims, step)
        ours = trained(wrapped, [parts[me.rank]], [weights[me.rank]])
        # One process' loss is the sum; the wrapper's gradients are means over the ranks.
        whole = trained(plain, parts, weights)
        for name in ("y", "dx"):
            near(ours[name], mine(me.rank, sizes, whole[name]), rel)
        for name, grad in ours["grads"].items():
            assert_close_to(grad * me.world_size, whole["grads"][name], rel)
        if state_of(plain):
            assert_close_to(state_of(wrapped), state_of(plain), rel)
    parts, _ = batch(sizes, dims, 9)
    near(wrapped.eval()(parts[me.rank]), plain.eval()(parts[me.rank]), rel)
    return state_of(wrapped)


def shapes_and_options(me):
    layers = [
        (make(CHANNELS), sizes, dims)
        for dims, make in PLAIN.items()
        for sizes in ((4, 2, 3), (5, 0, 1))
    ]
    options = (
        {"affine": False},
        {"momentum": None},
        {"momentum": 0.7, "eps": 0.1},
        {"affine": False, "track_running_stats": False},
        {"track_running_stats": False},
    )
    layers += [(nn.BatchNorm2d(CHANNELS, **each), (1, 4, 0), 4) for each in options]
    return [compare(me, layer.double(), sizes, dims) for layer, sizes, dims in layers]


def test_ranks_normalise_as_one_process_with_all_samples(ranks):
    assert_same_on_all(ranks(3).run(shapes_and_options))


def without_syncing(me):
    with pytest.raises(AssertionError, match="off"):
        compare(me, nn.BatchNorm2d(CHANNELS).double(), (4, 2, 3), 4, kind=None)


def test_plain_batch_norm_differs(ranks):
    ranks(3).run(without_syncing)


# ---------------------------------------------------------------- dtypes, memory formats, special batches


def half(me):
    for dtype, rel in ((torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        torch.manual_seed(2)
        plain = nn.BatchNorm2d(CHANNELS)
        layer = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
        parts, weights = batch((4, 2, 3), dtype=torch.float32)
        parts = [(part / 50).to(dtype) for part in parts]
        ours = trained(layer, [parts[me.rank]], [weights[me.rank]])
        whole = trained(plain, [part.float() for part in parts], weights)
        assert (ours["y"].dtype, ours["dx"].dtype) == (dtype, dtype)
        assert layer.running_var.dtype == torch.float32
        # The statistics have float32's precision though the samples do not.
        assert_close_to(layer.running_mean, plain.running_mean, 1e-6)
        assert_close_to(layer.running_var, plain.running_var, 1e-6)
        for name in ("y", "dx"):
            near(ours[name], mine(me.rank, (4, 2, 3), whole[name]), rel)
        # A module that is half throughout works, too, and so does autocast.
        assert layer.to(dtype)(parts[me.rank]).dtype == dtype
        with torch.autocast("cpu", dtype):
            layer.float()(parts[me.rank]).sum().backward()


def formats(me):
    sizes = (2, 0, 3)
    for dims, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        plain = PLAIN[dims](CHANNELS).double()
        layer = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
        parts, weights = batch(sizes, dims)
        x = parts[me.rank].to(memory_format=memory_format).requires_grad_()
        y = layer(x)
        loss_sum(y, weights[me.rank]).backward()
        whole = trained(plain, parts, weights)
        near(y, mine(me.rank, sizes, whole["y"]), EXACT)
        near(x.grad, mine(me.rank, sizes, whole["dx"]), EXACT)
        if sizes[me.rank]:
            assert y.is_contiguous(memory_format=memory_format)
            assert x.grad.is_contiguous(memory_format=memory_format)
    # Expanded and transposed tensors come as inputs and as gradients, too.
    x = parts[me.rank].transpose(2, 3).requires_grad_()
    layer(x).sum().backward()
    assert x.grad.shape == x.shape


def one_value_and_none(me):
    layer = SyncBatchNorm(CHANNELS).double()
    one = torch.randn(1, CHANNELS).double()
    with pytest.raises(DataError, match=rf"rank {me.rank}.*more than 1 value per channel.*3 ranks"):
        layer(one if me.rank == 1 else one[:0])
    layer(one)  # one value on each rank is enough, and nobody is out of step
    before = copy.deepcopy(layer.state_dict())
    empty = one[:0].requires_grad_()
    layer(empty).sum().backward()
    assert empty.grad.shape == (0, CHANNELS)
    assert_bitwise_equal(layer.state_dict(), before)
    with pytest.raises(ValueError, match="at least 2D"):
        layer(one[0])
    with pytest.raises(ValueError, match="channels should be non-zero"):
        layer(one[:, :0])


def large_counts(me):
    """float32 holds every integer up to 2**24 only; three ranks have one value more than that each."""
    count = 2**24 + 1
    layer = SyncBatchNorm(1, momentum=1.0)
    x = torch.zeros(count, 1)
    x[0] = 4096.0
    layer(x)
    n = 3 * count
    mean = 3 * 4096 / n
    assert_close_to(layer.running_var, [(3 * 4096**2 - n * mean**2) / (n - 1)], 1e-6)


def special(me):
    half(me)
    formats(me)
    one_value_and_none(me)
    large_counts(me)


def test_half_types_memory_formats_and_tiny_batches(ranks):
    ranks(3).run(special)


# ---------------------------------------------------------------- in a model, with buckets on their way


class Net(nn.Module):
    """Convolutions and normalisations, with branches that only some ranks take.

    A bias before a normalisation has no gradient but rounding, so there is none.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Tanh())
        self.second = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), nn.Tanh())
        self.side = nn.ModuleList(nn.Conv2d(4, 4, 1, bias=False) for _ in range(3))
        self.third = nn.Sequential(nn.Conv2d(4, 3, 1, bias=False), nn.BatchNorm2d(3), nn.Flatten(1))
        self.head = nn.Linear(12, 1)
        self.rechecks = False

    def forward(self, x, branches=(0, 1, 2)):
        x = self.first(x)
        x = checkpoint(self.second, x, use_reentrant=False) if self.rechecks else self.second(x)
        for branch in branches:
            x = x + self.side[branch](x)
        return self.head(self.third(x))


def net():
    torch.manual_seed(4)
    return Net().double()


def images(sizes, step):
    generator = torch.Generator().manual_seed(step)
    whole = torch.randn(sum(sizes), 2, 4, 4, dtype=torch.float64, generator=generator)
    return whole, list(whole.split(list(sizes)))


def by_branch(plain, parts, branches):
    """One process whose batch has samples that take different branches."""
    x = torch.cat([plain.first[0](part) for part in parts])
    x = plain.second(plain.first[2](plain.first[1](x))).split([len(part) for part in parts])
    taken = []
    for part, names in zip(x, branches, strict=True):
        for name in names:
            part = part + plain.side[name](part)  # noqa: PLW2901
        taken.append(part)
    return plain.head(plain.third(torch.cat(taken)))


def many_buckets(me, rechecks):
    plain = net()
    plain.rechecks = rechecks
    wrapped = DistributedDataParallel(
        SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)), bucket_cap_mb=TINY
    )
    plain_step = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    step_of = torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9)
    # Branches, and with them the moment at which a bucket is full, differ between ranks; one rank has no samples.
    plans = [
        ((3, 2, 4), [(0, 1, 2)] * 3),
        ((3, 2, 4), [(0, 1, 2)] * 3),
        ((3, 0, 4), [(0,), (1, 2), (2,)]),
        ((1, 2, 3), [(), (0, 1, 2), (1,)]),
        ((2, 2, 0), [(2,), (0,), ()]),
    ]
    for step, (sizes, branches) in enumerate(plans):
        whole, parts = images(sizes, step)
        step_of.zero_grad()
        out = wrapped(parts[me.rank], branches[me.rank])
        wrapped.backward(out.square().sum(), count=len(out))
        plain_step.zero_grad()
        (by_branch(plain, parts, branches).square().sum() / len(whole)).backward()
        if rechecks:
            # What is computed twice takes in its statistics twice, with ranks and without.
            plain.second(plain.first(whole))
            plain.first[1].load_state_dict(state_of(wrapped.module.first[1]))
        for name, param in plain.named_parameters():
            grad = wrapped.module.get_parameter(name).grad
            assert (grad is None) == (param.grad is None)
            if grad is not None:
                assert_close_to(grad, param.grad, 1e-11)
        plain_step.step()
        step_of.step()
        assert_close_to(state_of(wrapped), plain.state_dict(), 1e-11)
    assert len(wrapped.reducer.buckets) > 5
    assert wrapped.reducer.last_step.launched_in_backward > 0


def whole_models(me):
    many_buckets(me, rechecks=False)
    many_buckets(me, rechecks=True)


def test_buckets_and_statistics_do_not_meet(ranks):
    ranks(3).run(whole_models)


def in_the_buckets_group(me):
    before = sync_batchnorm.twin_of, ddp.communicator_for
    sync_batchnorm.twin_of = ddp.communicator_for = lambda group, *_: C10dCommunicator(group)
    try:
        many_buckets(me, rechecks=False)
    finally:
        sync_batchnorm.twin_of, ddp.communicator_for = before


def test_in_one_group_they_would_meet(ranks):
    outcomes = ranks(3).outcomes(in_the_buckets_group, timeout_s=3)
    assert not all(outcome.status == "ok" for outcome in outcomes)


def penalties(me):
    """A penalty on the input gradient, and a second derivative by the parameters."""
    sizes = (3, 0, 2)
    plain = nn.Sequential(
        nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1, bias=False)
    ).double()
    layer = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))

    def penalise(model, x):
        x = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        found = torch.autograd.grad(dx.square().sum(), [x, *model.parameters()])
        return dx.detach(), found

    whole = torch.randn(5, 4, dtype=torch.float64)
    parts = whole.split(list(sizes))
    (dx, (ddx, *grads)) = penalise(layer, parts[me.rank])
    (want_dx, (want_ddx, *wants)) = penalise(plain, whole)
    near(dx, mine(me.rank, sizes, want_dx), EXACT)
    near(ddx, mine(me.rank, sizes, want_ddx), 1e-11)
    for grad, want in zip(grads, wants, strict=True):
        total = grad.clone()
        dist.all_reduce(total)
        assert_close_to(total, want, 1e-11)
    if sizes[me.rank]:
        alone = copy.deepcopy(plain)
        with pytest.raises(AssertionError, match="off"):
            assert_close_to(penalise(alone, parts[me.rank])[0], dx, 1e-3)


def test_second_derivatives_go_over_all_ranks(ranks):
    ranks(3).run(penalties)


# ---------------------------------------------------------------- groups


def groups(me):
    pair = dist.new_group([0, 1])
    alone = [dist.new_group([rank]) for rank in range(3)][me.rank]
    plain = nn.BatchNorm1d(CHANNELS).double()
    parts, weights = batch((4, 2, 3), 2)
    lone = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain), alone)
    assert lone.process_group is alone
    whole = trained(copy.deepcopy(plain), [parts[me.rank]], [weights[me.rank]])
    assert_bitwise_equal(trained(lone, [parts[me.rank]], [weights[me.rank]]), whole)
    if me.rank < 2:
        layer = SyncBatchNorm.convert_sync_batchnorm(plain, pair)
        # Converting again without a group keeps the layer's own.
        assert SyncBatchNorm.convert_sync_batchnorm(layer).process_group is pair
        ours = trained(layer, [parts[me.rank]], [weights[me.rank]])
        whole = trained(nn.BatchNorm1d(CHANNELS).double(), parts[:2], weights[:2])
        near(ours["y"], mine(me.rank, (4, 2, 3), whole["y"]), EXACT)
        dist.destroy_process_group(pair)
    dist.destroy_process_group(alone)


def test_a_layer_can_have_its_own_ranks(ranks):
    ranks(3).run(groups)


def ends(me):
    layer = SyncBatchNorm(CHANNELS)
    layer(torch.randn(2, CHANNELS))
    if me.rank == 1:
        os._exit(3)
    layer(torch.randn(2, CHANNELS))


def test_a_rank_that_has_ended_is_an_error_that_says_what_to_do(ranks):
    first, second = ranks(2).outcomes(ends)
    assert first.is_a(CommunicationError)
    assert "rank 0: collective 1 of SyncBatchNorm, in forward" in first.error
    assert "with an empty batch, too" in first.error
    assert second.status == "died"


# ---------------------------------------------------------------- without other ranks


def test_alone_it_is_plain_batch_norm():
    plain = nn.BatchNorm2d(CHANNELS)
    layer = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    parts, weights = batch((4,), dtype=torch.float32)
    for mode in (True, False):
        wanted = trained(plain.train(mode), parts, weights)
        assert_bitwise_equal(trained(layer.train(mode), parts, weights), wanted)
    assert_bitwise_equal(layer.state_dict(), plain.state_dict())


def test_conversion_keeps_everything():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(4, eps=0.5, momentum=None)
            self.again = self.norm
            self.inner = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm3d(4, affine=False))
            self.torchs = nn.SyncBatchNorm(4)
            self.other = nn.GroupNorm(2, 4)
            self.nothing = None

    block = Block()
    block.register_module("absent", None)
    block.norm.weight.requires_grad_(False)
    block.inner[1].eval()
    seen = []
    block.norm.register_forward_hook(lambda *_: seen.append(1))
    before, params = block.state_dict(), list(block.parameters())
    old = dict(block.named_modules())
    new = SyncBatchNorm.convert_sync_batchnorm(block)
    assert new is block
    assert [id(param) for param in new.parameters()] == [id(param) for param in params]
    assert list(new.state_dict()) == list(before)
    assert_bitwise_equal(dict(new.state_dict()), dict(before))
    for name in ("norm", "inner.1", "torchs"):
        layer = new.get_submodule(name)
        assert type(layer) is SyncBatchNorm
        assert isinstance(layer, nn.SyncBatchNorm)
        for field in ("eps", "momentum", "affine", "track_running_stats", "training"):
            assert getattr(layer, field) == getattr(old[name], field)
    assert new.again is new.norm
    assert not new.norm.weight.requires_grad
    assert new.other is old["other"]
    new.norm(torch.randn(2, 4, 1, 1))
    assert seen
    assert type(SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2))) is SyncBatchNorm
    assert repr(new.norm).startswith("SyncBatchNorm(4, eps=0.5")
    copied = pickle.loads(pickle.dumps(new.torchs))  # noqa: S301
    assert_bitwise_equal(dict(copied.state_dict()), dict(new.torchs.state_dict()))


def test_conversion_refuses_what_it_would_change():
    class Activated(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x).relu()

    with pytest.raises(ModelError, match=r"0\.1 \(Activated\) has a forward of its own"):
        SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Sequential(nn.ReLU(), Activated(2))))
    with pytest.raises(ModelError, match=r"the module \(LazyBatchNorm1d\) is lazy"):
        SyncBatchNorm.convert_sync_batchnorm(nn.LazyBatchNorm1d())
