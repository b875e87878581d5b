"""Ranks that do not take the same steps: named on every rank, never averaged into each other, never a hang."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rankstep import DistributedDataParallel
from rankstep.errors import RankSkewError
from rankstep.testing import Status, assert_bitwise_equal, assert_same_on_all

TINY = 0.0001
WIDTH = 4


def net(*sizes):
    torch.manual_seed(4)
    sizes = sizes or (WIDTH, WIDTH, WIDTH)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*layers).double()


def data(rank, step, width=WIDTH):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(3, width, dtype=torch.float64, generator=generator)


def mean_of(model, parts):
    """The mean of the gradients of several inputs, one from each rank."""
    total = {}
    for x in parts:
        plain = copy.deepcopy(model)
        plain(x).square().sum().backward()
        for name, param in plain.named_parameters():
            part = param.grad / len(parts)
            total[name] = total[name] + part if name in total else part
    return total


def grads_of(model):
    return {
        name.removeprefix("module."): param.grad.clone() for name, param in model.named_parameters()
    }


# What one rank does differently in one step.


def skips(wrapped, step, rank):
    """`continue` on a bad batch, seen after forward."""
    wrapped(data(rank, step))


def only_accumulates(wrapped, step, rank):
    with wrapped.no_sync():
        wrapped(data(rank, step)).square().sum().backward()


def does_not_touch_the_model(wrapped, step, rank):
    wrapped(data(rank, step))
    torch.ones(1, requires_grad=True).sum().backward()


def only_looks(wrapped, step, rank):
    out = wrapped(data(rank, step)).square().sum()
    torch.autograd.grad(out, list(wrapped.parameters()))


def goes_twice(wrapped, step, rank):
    loss = wrapped(data(rank, step)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def one_more_forward(wrapped, step, rank):
    wrapped(data(rank, step))
    wrapped(data(rank, step)).square().sum().backward()


def fails_in_forward(wrapped, step, rank):
    """An exception that the loop catches before there is anything to go backward through."""
    with pytest.raises(RuntimeError, match="shapes"):
        wrapped(torch.zeros(3, WIDTH + 1, dtype=torch.float64))


DIFFERENT = {
    way.__name__: way
    for way in (
        skips,
        only_accumulates,
        does_not_touch_the_model,
        only_looks,
        fails_in_forward,
        goes_twice,
        one_more_forward,
    )
}

# Ways that leave the odd rank one reduction behind, or ahead.
BEHIND = (
    "skips",
    "only_accumulates",
    "does_not_touch_the_model",
    "only_looks",
    "fails_in_forward",
)


def until_told(me, way, odd, at, recover):
    """Train until an error; the odd rank does something else in step ``at``."""
    model = net()
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=TINY)
    told = None
    for step in range(at + 3):
        wrapped.zero_grad()
        try:
            if me.rank == odd and step == at:
                DIFFERENT[way](wrapped, step, me.rank)
            else:
                wrapped(data(me.rank, step)).square().sum().backward()
        except RankSkewError as error:
            told = step, str(error), wrapped.reducer.reductions
            break
        if step < at:
            parts = [data(rank, step) for rank in range(me.world_size)]
            wanted = mean_of(model, parts)
            if me.world_size == 2:
                assert_bitwise_equal(grads_of(wrapped), wanted)
    if recover:
        # Every rank has been told in the same reduction, so they may go on together.
        for step in range(50, 53):
            wrapped.zero_grad()
            wrapped(data(me.rank, step)).square().sum().backward()
            assert_bitwise_equal(
                grads_of(wrapped), mean_of(model, [data(r, step) for r in range(me.world_size)])
            )
    return told


def answers(pool, function, *args):
    """What every rank returned; a rank that hangs or ends is shown after a few seconds."""
    outcomes = pool.outcomes(function, *args, timeout_s=10.0)
    assert all(outcome.status is Status.OK for outcome in outcomes), "\n\n".join(map(str, outcomes))
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("way", DIFFERENT)
@pytest.mark.parametrize("odd", [0, 1])
def test_one_of_two_ranks_out_of_step_is_told_on_both(ranks, way, odd):
    told = answers(ranks(2), until_told, way, odd, 2, True)
    assert all(each is not None for each in told)
    # The same reduction on both, whatever the number of the batch.
    assert len({reductions for _, _, reductions in told}) == 1
    for rank, (_, text, reductions) in enumerate(told):
        assert text.startswith(f"rank {rank}: ")
        assert "rank 0" in text
        assert "rank 1" in text
        assert f"step {reductions - 1} " in text
    if way in BEHIND:
        # The first reduction that the odd rank missed is the one that is told.
        assert told[1 - odd][0] == 2
        assert told[odd][0] == 3


@pytest.mark.parametrize("way", DIFFERENT)
def test_the_odd_one_of_three_is_named(ranks, way):
    told = answers(ranks(3), until_told, way, 2, 1, False)
    for rank, each in enumerate(told):
        assert each is not None
        _, text, _ = each
        assert text.startswith(f"rank {rank}: ")
        assert ": rank 2 " in text
        assert "the others" in text
        assert "rank 1 ran" not in text


def test_also_in_the_very_first_step(ranks):
    told = answers(ranks(2), until_told, "skips", 1, 0, True)
    assert all(each is not None and each[2] == 1 for each in told)


def allowed(me):
    """What one rank may do alone: nothing of it is a training step."""
    model = net()
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=TINY)
    for step in range(3):
        wrapped.zero_grad()
        if me.rank == 1:
            with torch.no_grad():
                wrapped(data(1, 70))
            wrapped.eval()
            wrapped(data(1, 71))
            wrapped.train()
            wrapped.module(data(1, 72))
            torch.autograd.grad(wrapped.module(data(1, 73)).sum(), list(wrapped.parameters()))
        wrapped(data(me.rank, step)).square().sum().backward()
        parts = [data(rank, step) for rank in range(me.world_size)]
        assert_bitwise_equal(grads_of(wrapped), mean_of(model, parts))
    return grads_of(wrapped)


def test_evaluating_on_one_rank_is_no_step(ranks):
    assert_same_on_all(ranks(2).run(allowed))


# ---------------------------------------------------------------- where another collective would come in between


def skips_with_buffers(me):
    """The skipping rank's next forward copies buffers while the other rank waits in backward."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).double()
    # A group of its own: it is of no use afterwards.
    wrapped = DistributedDataParallel(model, process_group=dist.new_group())
    for step in range(4):
        try:
            out = wrapped(data(me.rank, step)).square().sum()
            if (me.rank, step) != (1, 2):
                out.backward()
        except RankSkewError as error:
            return str(error)
    return None


def test_a_skipped_step_of_a_model_with_buffers_is_told(ranks):
    for text in answers(ranks(2), skips_with_buffers):
        assert text is not None
        assert "rank 1" in text


# ---------------------------------------------------------------- two wrappers


def two_wrappers(me, sizes, turned, warm, ends_at_once=False):
    """Two models in one step; one rank uses them the other way round."""
    models = [net(*sizes[0]), net(*sizes[1])]
    group = dist.new_group() if ends_at_once else None
    wrapped = [
        DistributedDataParallel(copy.deepcopy(m), bucket_cap_mb=TINY, process_group=group)
        for m in models
    ]
    numbers = [each.reducer.wrapper for each in wrapped]
    told = []
    for step in range(3):
        order = [0, 1]
        if me.rank == 1 and turned and step >= int(warm):
            order.reverse()
        for index in order:
            wrapped[index].zero_grad()
            try:
                x = data(me.rank, step, sizes[index][0])
                wrapped[index](x).square().sum().backward()
            except RankSkewError as error:
                told.append((step, str(error)))
                if ends_at_once:
                    break
        if told:
            return numbers, told, None, None
    got = [grads_of(each) for each in wrapped]
    wanted = [
        mean_of(model, [data(rank, step, size[0]) for rank in range(me.world_size)])
        for model, size in zip(models, sizes, strict=True)
    ]
    return numbers, told, got, wanted


SAME = ((WIDTH, WIDTH, WIDTH), (WIDTH, WIDTH, WIDTH))


@pytest.mark.parametrize("warm", [False, True], ids=["at once", "after a step"])
def test_wrappers_used_in_another_order_are_told_apart(ranks, warm):
    results = answers(ranks(2), two_wrappers, SAME, True, warm)
    for numbers, told, _, _ in results:
        first, second = numbers
        assert second == first + 1
        # Both reductions of that step are wrong, and both are told.
        assert [step for step, _ in told] == [int(warm)] * 2
        for rank, number in ((0, first), (1, second)):
            assert f"rank {rank} reduced wrapper number {number}" in told[0][1]
    assert results[0][0] == results[1][0]


def test_wrappers_used_in_the_same_order_are_right(ranks):
    results = ranks(2).run(two_wrappers, SAME, False, False)
    assert_same_on_all([got for _, _, got, _ in results])
    for _, told, got, wanted in results:
        assert told == []
        assert_bitwise_equal(got, wanted)


@pytest.mark.parametrize("warm", [False, True], ids=["at once", "after a step"])
def test_wrappers_of_other_sizes_are_told_apart(ranks, warm):
    # In shared memory. Through sockets gloo ends a process that gets a message of another size, without a Python error.
    sizes = ((WIDTH, WIDTH, WIDTH), (WIDTH, 30, 7))
    first, second = answers(ranks(2), two_wrappers, sizes, True, warm, True)
    for _, told, _, _ in (first, second):
        assert {step for step, _ in told} == {int(warm)}
        assert "the ranks want different things at once: rank 0" in told[0][1]
