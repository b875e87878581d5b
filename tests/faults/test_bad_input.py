"""What users get wrong: a clear error on every rank, and a process group that is usable or closed, never stuck."""

from __future__ import annotations

import math
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rankstep
from rankstep import DistributedDataParallel
from rankstep.testing import assert_bitwise_equal, assert_close_to, assert_same_on_all

TINY = 0.0001
WIDTH = 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.b(self.a(x).tanh())


def net():
    torch.manual_seed(3)
    return Net().double()


def data(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)


def loss_of(model, rank, step):
    return model(data(rank, step)).square().mean()


def grads_of(model):
    return {
        name.removeprefix("module."): None if param.grad is None else param.grad.clone()
        for name, param in model.named_parameters()
    }


def exact(step, world=2):
    model = net()
    for rank in range(world):
        (loss_of(model, rank, step) / world).backward()
    return grads_of(model)


def attempt(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001 - looked at in the test
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    return None


def one_step(run, me, step):
    run.zero_grad()
    loss_of(run, me.rank, step).backward()
    return grads_of(run)


# ---------------------------------------------------------------- what is wrapped, and where


def wrapped_twice(me, how):
    """A wrapper in a wrapper, and two beside each other: the mean is still the mean, and nobody waits."""
    first = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    steps = []
    if how == "trained before":
        steps.append(one_step(first, me, 0))
    second = DistributedDataParallel(first if how == "nested" else first.module, bucket_cap_mb=TINY)
    for step in range(1, 4):
        run = second if step % 2 else first
        found = one_step(run, me, step)
        steps.append({name.removeprefix("module."): grad for name, grad in found.items()})
    return steps


@pytest.mark.parametrize("how", ["nested", "beside", "trained before"])
def test_wrapping_twice(ranks, how):
    outcomes = ranks(2).run(wrapped_twice, how)
    assert_same_on_all(outcomes)
    start = 0 if how == "trained before" else 1
    for step, grads in enumerate(outcomes[0], start):
        assert_close_to({step: grads}, {step: exact(step)}, rel=1e-13)


def without_a_group(me):
    said = [attempt(lambda: DistributedDataParallel(net()))]
    # A world opens one, and what is wrapped inside works.
    with rankstep.world():
        run = DistributedDataParallel(net())
        grads = one_step(run, me, 0)
    closed = run.process_group
    said.append(attempt(lambda: DistributedDataParallel(net())))
    # What held on to the group: torch lets gloo's go on while somebody holds it, so an error or the right gradient.
    with_closed = [
        attempt(lambda: one_step(run, me, 1)) or grads_of(run),
        attempt(lambda: DistributedDataParallel(net(), process_group=closed)),
    ]
    # A new world is a new start.
    with rankstep.world():
        again = one_step(DistributedDataParallel(net()), me, 2)
    return said, with_closed, grads, again


def test_without_a_process_group(ranks):
    outcomes = ranks(2, backend=None).run(without_a_group)
    for (before, after), (use, _), grads, again in outcomes:
        for said in (before, after):
            assert "ValueError" in said[0]
            assert "rankstep.world()" in said[1]
        if isinstance(use, dict):
            assert_close_to(use, exact(1), rel=1e-13)
        else:
            assert "RuntimeError" in use[0]
        assert_close_to(grads, exact(0), rel=1e-13)
        assert_close_to(again, exact(2), rel=1e-13)


def no_module(me):
    said = [
        attempt(lambda what=what: DistributedDataParallel(what))
        for what in (None, 3, net, nn.Parameter(torch.ones(2)), nn.ReLU(), nn.Module())
    ]
    on_meta = nn.Linear(2, 2, device="meta")
    said.append(attempt(lambda: DistributedDataParallel(on_meta)))
    return said, one_step(DistributedDataParallel(net()), me, 0)


def test_what_is_no_module_with_parameters(ranks):
    for said, grads in ranks(2).run(no_module):
        assert None not in said
        for kinds, text in said[4:6]:
            assert "RuntimeError" in kinds
            assert "doesn't have any parameter that requires a gradient" in text
        assert "meta" in said[6][1]
        assert_close_to(grads, exact(0), rel=1e-13)


# ---------------------------------------------------------------- backward


def no_graph(me, on_all):
    """A loss without a graph: torch's error at once where it happened; the others hear of it in the next step."""
    run = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    one_step(run, me, 0)
    said = []
    for step in (1, 2):
        run.zero_grad()
        loss = loss_of(run, me.rank, step)
        if step == 1 and (on_all or me.rank == 1):
            loss = loss.detach()
        said.append(attempt(loss.backward))
        if said[-1] and "SyncError" in said[-1][0]:
            break
    return said


def test_a_loss_without_a_graph_on_all_ranks(ranks):
    for bad, good in ranks(2).run(no_graph, True):
        assert "RuntimeError" in bad[0]
        assert "does not require grad" in bad[1]
        # Two forwards and one backward, as on the other rank: no skew.
        assert good is None


def test_a_loss_without_a_graph_on_one_rank(ranks):
    first, second = ranks(2).run(no_graph, False)
    bad, late = second
    assert "does not require grad" in bad[1]
    # Rank 1 ran two forwards for one backward, and both ranks say so.
    for kinds, text in (late, first[0]):
        assert "RankSkewError" in kinds
        assert "rank 1 ran 2 training forward(s)" in text


def twice_through_one_graph(me):
    """torch's error for a freed graph passes through, on one rank as on all."""
    run = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    loss = loss_of(run, me.rank, 0)
    loss.backward()
    said = attempt(loss.backward)
    grads = one_step(run, me, 1)
    return said, grads


def test_a_graph_that_was_freed(ranks):
    for said, grads in ranks(2).run(twice_through_one_graph):
        assert "second time" in said[1]
        assert_close_to(grads, exact(1), rel=1e-13)


class Poisoned(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("in the user's backward")


def forward_raises(me, where):
    """An exception of the user's in forward or in backward, on every rank: it passes, and the next step is right."""
    run = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    one_step(run, me, 0)
    run.zero_grad()
    if where == "forward":
        said = attempt(lambda: run(torch.ones(3, WIDTH + 1, dtype=torch.float64)))
    else:
        said = attempt(lambda: Poisoned.apply(run(data(me.rank, 1))).sum().backward())
    return said, one_step(run, me, 2)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_of_the_users_passes_through(ranks, where):
    for said, grads in ranks(2).run(forward_raises, where):
        assert ("RuntimeError" if where == "forward" else "ZeroDivisionError") in said[0]
        assert_close_to(grads, exact(2), rel=1e-13)


def wrong_shape_of_batch(me):
    """Batches of other sizes on the ranks are no error."""
    run = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    grads = []
    for step in range(2):
        run.zero_grad()
        x = torch.cat([data(me.rank, step)] * (1 + me.rank))
        run(x).square().mean().backward()
        grads.append(grads_of(run))
    return grads


def test_batches_of_other_sizes(ranks):
    outcomes = ranks(2).run(wrong_shape_of_batch)
    assert_same_on_all(outcomes)
    # A batch that is there twice has the same mean.
    assert_close_to(outcomes[0], [exact(0), exact(1)], rel=1e-13)


# ---------------------------------------------------------------- gradients that are no numbers


def not_finite(me, value, weighted):
    """NaN and infinity of one rank are on all ranks, where they belong and nowhere else."""
    run = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    steps = []
    for step in range(3):
        run.zero_grad()
        loss = loss_of(run, me.rank, step)
        if step == 1 and me.rank == 1:
            loss = loss + run.module.b.bias[2] * value
        if weighted:
            run.backward(loss * 2, count=2)
        else:
            loss.backward()
        steps.append(grads_of(run))
    return steps


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradients_that_are_not_finite_are_not_hidden(ranks, value, weighted):
    outcomes = ranks(2).run(not_finite, value, weighted)
    assert_same_on_all(outcomes)
    before, bad, after = outcomes[0]
    assert_close_to([before, after], [exact(0), exact(2)], rel=1e-13)
    wrong = {name: torch.nonzero(~grad.isfinite()).tolist() for name, grad in bad.items()}
    assert wrong == {"a.weight": [], "a.bias": [], "b.weight": [], "b.bias": [[2]]}
    bad["b.bias"][2] = exact(1)["b.bias"][2]
    assert_close_to(bad, exact(1), rel=1e-13)


def told_of_nan(me, how):
    """When asked, the first such gradient is told once, on every rank, with rank and parameter."""
    if how == "environment":
        os.environ["RANKSTEP_REPORT_NONFINITE"] = "1"
    run = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    if how == "method":
        run.report_nonfinite()
    texts = []
    for step in range(5):
        run.zero_grad()
        loss = loss_of(run, me.rank, step)
        if step in (2, 3) and me.rank == 1:
            loss = loss + run.module.a.bias[2] * math.nan
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss.backward()
        texts.append([(type(w.message).__name__, str(w.message)) for w in caught])
    return texts


@pytest.mark.parametrize("how", ["environment", "method", "not asked"])
def test_nan_is_told_once_when_asked(ranks, how):
    for rank, texts in enumerate(ranks(2).run(told_of_nan, how)):
        told = [len(each) for each in texts]
        if how == "not asked":
            assert told == [0] * 5
            continue
        assert told == [0, 0, 1, 0, 0]
        kind, text = texts[2][0]
        assert kind == "NonFiniteGradientWarning"
        assert f"rank {rank}:" in text
        assert "rank 1 in 'a.bias'" in text
        assert "step 2" in text


# ---------------------------------------------------------------- inputs of every form


class Echo(nn.Module):
    """Returns what it is given, in the form that is asked for."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, *args, form=None, **kwargs):
        y = self.weight * 2
        return {
            "tuple": (y, args),
            "dict": {"y": y, "kwargs": kwargs},
            "list": [y, None, 3],
            "none": None,
            "text": "nothing to differentiate",
            "tensor": y,
        }[form]


def forms(me):
    run = DistributedDataParallel(Echo())
    found = []
    marker = object()
    y, args = run(1, marker, form="tuple")
    assert args == (1, marker)
    answer = run(form="dict", a=[marker])
    assert answer["kwargs"] == {"a": [marker]}
    found.append(type(run(form="list")).__name__)
    # Forwards without a graph are forwards all the same.
    assert run(form="none") is None
    assert run(form="text") == "nothing to differentiate"
    (y.sum() * (me.rank + 1)).backward()
    return run.module.weight.grad, found


def test_arguments_and_results_of_every_form(ranks):
    for grad, found in ranks(2).run(forms):
        assert_bitwise_equal(grad, torch.full((2,), 3.0))
        assert found == ["list"]


def evaluation(me):
    """Forwards under no_grad and in eval mode, on one rank more often than on the other, are no steps."""
    run = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    one_step(run, me, 0)
    run.eval()
    for _ in range(1 + 3 * me.rank):
        with torch.no_grad():
            run(data(me.rank, 5))
    run.train()
    for _ in range(2 * me.rank):
        with torch.inference_mode():
            run(data(me.rank, 5))
    return one_step(run, me, 1)


def test_forwards_without_grad_are_no_steps(ranks):
    outcomes = ranks(2).run(evaluation)
    assert_same_on_all(outcomes)
    assert_close_to(outcomes[0], exact(1), rel=1e-13)


def closed_in_the_middle(me):
    """The group is closed while a graph waits for its backward."""
    with rankstep.world():
        run = DistributedDataParallel(net(), bucket_cap_mb=TINY)
        one_step(run, me, 0)
        run.zero_grad()
        loss = loss_of(run, me.rank, 1)
    assert not dist.is_initialized()
    return attempt(loss.backward) or grads_of(run)


def test_a_group_that_is_closed_before_backward(ranks):
    for found in ranks(2, backend=None).run(closed_in_the_middle):
        if isinstance(found, dict):
            assert_close_to(found, exact(1), rel=1e-13)
        else:
            assert "RuntimeError" in found[0]
