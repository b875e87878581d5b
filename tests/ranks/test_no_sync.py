"""no_sync: gradients pile up on each rank, and the next synced backward reduces all of them."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from rankstep import DistributedDataParallel
from rankstep.testing import assert_bitwise_equal, assert_close_to, assert_same_on_all

TINY = 0.0001
WIDTH = 5


class Net(nn.Module):
    """A stem and three branches; only the named ones take part."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.c = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, names="abc"):
        x = self.stem(x).tanh()
        return sum(getattr(self, name)(x).tanh() for name in names)


def net():
    torch.manual_seed(3)
    return Net().double()


def data(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(2, WIDTH, dtype=torch.float64, generator=generator)


def loss(model, rank, step, names="abc"):
    return model(data(rank, step), names).sum()


def grads_of(model):
    return {
        name.removeprefix("module."): None if param.grad is None else param.grad.clone()
        for name, param in model.named_parameters()
    }


def local(model, rank, steps, names=lambda rank, step: "abc"):
    """What one rank accumulates by itself."""
    plain = copy.deepcopy(model)
    for step in steps:
        loss(plain, rank, step, names(rank, step)).backward()
    return grads_of(plain)


def averaged(model, world, steps, names=lambda rank, step: "abc"):
    """The mean over the ranks of what each accumulates; None where none has a gradient."""
    every = [local(model, rank, steps, names) for rank in range(world)]
    wanted = {}
    for name in every[0]:
        grads = [grads[name] for grads in every]
        present = [grad for grad in grads if grad is not None]
        wanted[name] = sum(grad / world for grad in present) if present else None
    return wanted


# ---------------------------------------------------------------- where it is put


def around_both(wrapped, rank, step):
    with wrapped.no_sync():
        loss(wrapped, rank, step).backward()


def around_backward(wrapped, rank, step):
    out = loss(wrapped, rank, step)
    with wrapped.no_sync():
        out.backward()


def around_forward(wrapped, rank, step):
    with wrapped.no_sync():
        out = loss(wrapped, rank, step)
    out.backward()


def written(wrapped, rank, step):
    wrapped.require_backward_grad_sync = False
    loss(wrapped, rank, step).backward()
    wrapped.require_backward_grad_sync = True


def written_between(wrapped, rank, step):
    out = loss(wrapped, rank, step)
    wrapped.require_backward_grad_sync = False
    out.backward()
    wrapped.require_backward_grad_sync = True


def nested(wrapped, rank, step):
    with wrapped.no_sync():
        with wrapped.no_sync():
            pass
        loss(wrapped, rank, step).backward()


def inner_module(wrapped, rank, step):
    with wrapped.no_sync():
        loss(wrapped.module, rank, step).backward()


WAYS = {
    way.__name__: (way, synced)
    for way, synced in (
        (around_both, False),
        (around_backward, False),
        (around_forward, True),
        (written, False),
        (written_between, False),
        (nested, False),
        (inner_module, False),
    )
}


class Counting:
    """A communicator that counts all-reduces."""

    def __init__(self, comm):
        self.comm = comm
        self.all_reduces = 0

    def all_reduce(self, tensor):
        self.all_reduces += 1
        return self.comm.all_reduce(tensor)

    def __getattr__(self, name):
        return getattr(self.comm, name)


def one_way(me, name, warm):
    way, synced = WAYS[name]
    model = net()
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=TINY)
    comm = wrapped.reducer.comm = Counting(wrapped.reducer.comm)
    if warm:
        # The second step overlaps and leaves views of buckets behind.
        for step in (90, 91):
            wrapped.zero_grad()
            loss(wrapped, me.rank, step).backward()
        wrapped.zero_grad(set_to_none=False)
        comm.all_reduces = 0
    before = wrapped.reducer.reductions
    way(wrapped, me.rank, 0)
    assert wrapped.require_backward_grad_sync
    own = local(model, me.rank, [0])
    mean = averaged(model, me.world_size, [0])
    # The twin: what is right for one way is wrong for the other.
    assert not torch.equal(own["stem.weight"], mean["stem.weight"])
    assert_bitwise_equal(grads_of(wrapped), mean if synced else own)
    assert bool(comm.all_reduces) is synced
    assert wrapped.reducer.reductions - before == int(synced)
    if not synced:
        loss(wrapped, me.rank, 1).backward()
        assert wrapped.reducer.reductions - before == 1
        assert_close_to(grads_of(wrapped), averaged(model, me.world_size, [0, 1]), rel=1e-15)
    return grads_of(wrapped)


@pytest.mark.parametrize("way", WAYS)
def test_what_counts_is_where_backward_runs(ranks, way):
    for warm in [False, True]:
        assert_same_on_all(ranks(2).run(one_way, way, warm))


def stays_local(me):
    wrapped = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    around_both(wrapped, me.rank, 0)
    return grads_of(wrapped)


def test_inside_the_ranks_differ(ranks):
    with pytest.raises(AssertionError, match="ranks 0 and 1 differ"):
        assert_same_on_all(ranks(2).run(stays_local))


# ---------------------------------------------------------------- the state it leaves


def states(me):
    wrapped = DistributedDataParallel(net())
    other = DistributedDataParallel(net())
    seen = [wrapped.require_backward_grad_sync]
    with wrapped.no_sync():
        seen.append(wrapped.require_backward_grad_sync)
        with wrapped.no_sync():
            seen.append(wrapped.require_backward_grad_sync)
        seen.append(wrapped.require_backward_grad_sync)
        seen.append(other.require_backward_grad_sync)
    seen.append(wrapped.require_backward_grad_sync)
    return seen


def test_it_nests_and_concerns_one_wrapper(ranks):
    assert ranks(2).run(states) == [[True, False, False, False, True, True]] * 2


class Stop(Exception):  # noqa: N818 (thrown on purpose)
    pass


def leaves_by_an_exception(wrapped, rank):
    with wrapped.no_sync():
        loss(wrapped, rank, 0)
        raise Stop


def raises_inside(me):
    model = net()
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=TINY)
    for _ in range(2):
        with pytest.raises(Stop):
            leaves_by_an_exception(wrapped, me.rank)
        assert wrapped.require_backward_grad_sync
        with wrapped.no_sync():
            with pytest.raises(Stop), wrapped.no_sync():
                raise Stop
            assert not wrapped.require_backward_grad_sync
        # What was written before stays written.
        wrapped.require_backward_grad_sync = False
        with pytest.raises(Stop), wrapped.no_sync():
            raise Stop
        assert not wrapped.require_backward_grad_sync
        wrapped.require_backward_grad_sync = True
    wrapped.zero_grad()
    loss(wrapped, me.rank, 0).backward()
    assert_bitwise_equal(grads_of(wrapped), averaged(model, me.world_size, [0]))
    return grads_of(wrapped)


def test_an_exception_restores_what_was_before(ranks):
    assert_same_on_all(ranks(2).run(raises_inside))


def backward_dies_inside(me):
    """A backward that dies under no_sync concerns no other rank."""
    model = net()
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=TINY)
    for step in range(3):
        wrapped.zero_grad()
        if me.rank == 1:

            def bad(grad):
                raise Stop

            out = wrapped.module.stem(data(1, step))
            out.register_hook(bad)
            with pytest.raises(Stop), wrapped.no_sync():
                wrapped.module.a(out).sum().backward()
            wrapped.zero_grad()
        loss(wrapped, me.rank, step).backward()
        assert_bitwise_equal(grads_of(wrapped), averaged(model, me.world_size, [step]))
    return grads_of(wrapped)


def test_a_backward_that_dies_inside_disturbs_nobody(ranks):
    assert_same_on_all(ranks(2).run(backward_dies_inside))


# ---------------------------------------------------------------- windows


def windows(me, cap, length, to_none):
    model = net()
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=cap)
    found = []
    for start in (0, 10, 20):
        wrapped.zero_grad(set_to_none=to_none)
        steps = range(start, start + length)
        for step in steps:
            if step == steps[-1]:
                loss(wrapped, me.rank, step).backward()
            else:
                around_both(wrapped, me.rank, step)
        assert_close_to(grads_of(wrapped), averaged(model, me.world_size, steps), rel=1e-14)
        found.append(grads_of(wrapped))
    return found, wrapped.reducer.reductions


@pytest.mark.parametrize("world", [2, 3])
def test_a_window_is_reduced_once_at_its_end(ranks, world):
    for cap, length, to_none in itertools.product([TINY, None], [2, 4], [True, False]):
        results = ranks(world).run(windows, cap, length, to_none)
        assert_same_on_all([found for found, _ in results])
        assert [reductions for _, reductions in results] == [3] * world


# Branches by rank and step; step 3 is the synced one.
USES = {
    "only inside": lambda rank, step: "abc" if step == 1 else "ab",
    "only inside on one rank": lambda rank, step: "abc" if (rank, step) == (1, 0) else "ab",
    "inside by rank": lambda rank, step: ("ab", "ac", "bc")[rank] if step < 3 else "a",
    "never": lambda rank, step: "ab",
    "only in the synced one": lambda rank, step: "ab" if step < 3 else "abc",
    "first inside, then the other": lambda rank, step: "a" if step < 3 else "b",
}


def used_inside(me, use, cap, warm):
    names = USES[use]
    model = net()
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=cap)
    if warm:
        for step in (90, 91):
            wrapped.zero_grad()
            loss(wrapped, me.rank, step).backward()
    wrapped.zero_grad()
    for step in range(4):
        if step == 3:
            loss(wrapped, me.rank, step, names(me.rank, step)).backward()
        else:
            with wrapped.no_sync():
                loss(wrapped, me.rank, step, names(me.rank, step)).backward()
    got, wanted = grads_of(wrapped), averaged(model, me.world_size, range(4), names)
    assert {n: g is None for n, g in got.items()} == {n: g is None for n, g in wanted.items()}
    present = [name for name, grad in wanted.items() if grad is not None]
    assert_close_to({n: got[n] for n in present}, {n: wanted[n] for n in present}, rel=1e-14)
    # The marks of this window are gone in the next: a branch that now goes unused keeps what it has.
    before = grads_of(wrapped)
    loss(wrapped, me.rank, 50, "b").backward()
    after = grads_of(wrapped)
    for name in before:
        if name[0] in "ac" and before[name] is not None:
            assert_bitwise_equal(after[name], before[name])
    return after


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("world", [2, 3])
def test_used_once_in_the_window_is_used(ranks, world, use):
    for cap, warm in itertools.product([TINY, None], [False, True]):
        assert_same_on_all(ranks(world).run(used_inside, use, cap, warm))


def different_lengths(me):
    """Every rank may put its own number of backwards into a window, as long as it runs no forward for them."""
    model = net()
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=TINY)
    for step in range(2):
        wrapped.zero_grad()
        with wrapped.no_sync():
            for extra in range(me.rank):
                loss(wrapped.module, me.rank, 100 + 10 * step + extra).backward()
        loss(wrapped, me.rank, step).backward()
    every = [local(model, rank, [*range(110, 110 + rank), 1]) for rank in range(me.world_size)]
    wanted = {n: sum(grads[n] / me.world_size for grads in every) for n in every[0]}
    assert_close_to(grads_of(wrapped), wanted, rel=1e-14)
    return grads_of(wrapped)


@pytest.mark.parametrize("world", [2, 3])
def test_the_inner_module_may_run_more_often_on_one_rank(ranks, world):
    assert_same_on_all(ranks(world).run(different_lengths))


def buffers(me):
    """A forward under no_sync switches off the copy of buffers in the next one, as in torch."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).double()
    wrapped = DistributedDataParallel(model)
    steps = []
    for synced in (True, False, False, True, True):
        steps.append(wrapped.will_sync_module_buffers())
        if synced:
            wrapped(data(me.rank, 0)).sum().backward()
        else:
            with wrapped.no_sync():
                wrapped(data(me.rank, 0)).sum().backward()
    return steps


def test_buffers_rest_after_a_forward_inside(ranks):
    assert ranks(2).run(buffers) == [[True, True, False, False, True]] * 2
