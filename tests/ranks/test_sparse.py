"""Sparse gradients travel as rows; complex ones as pairs; gradients of gradients are refused by a warning.

The oracle is one process; beside it torch's wrapper, where torch can do the same.
"""

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rankstep import DistributedDataParallel as Ours
from rankstep.testing import (
    assert_close_to,
    assert_same_on_all,
    first_difference,
)

TINY = 0.0001
ROWS = 12
WIDTH = 4


class Words(nn.Module):
    """Two sparse tables and a dense layer; the order says whose gradient is ready last."""

    def __init__(self, order="table first", bag=False):
        super().__init__()
        torch.manual_seed(2)
        self.order = order
        kind = nn.EmbeddingBag if bag else nn.Embedding
        options = {"mode": "sum"} if bag else {}
        self.words = kind(ROWS, WIDTH, sparse=True, **options)
        self.places = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens, places, uses="wp"):
        rows = torch.ones(1, WIDTH, dtype=self.layer.weight.dtype)
        if "w" in uses:
            rows = rows + self.words(tokens)
        if "p" in uses:
            rows = rows + self.places(places)
        if self.order == "layer first":
            # The layer is scaled by the rows and not they by it, so that its gradient is there before theirs.
            return self.layer(rows.detach()) + rows
        return self.layer(rows).tanh()


def pick(rank, step, size=5, bag=False):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(ROWS, (size, 2) if bag else (size,), generator=generator)
    return tokens, torch.randint(ROWS, (size,), generator=generator)


def dense(grad):
    return grad.to_dense() if grad is not None and grad.layout == torch.sparse_coo else grad


def grads_of(model):
    return {
        n.removeprefix("module."): None if p.grad is None else dense(p.grad).clone()
        for n, p in model.named_parameters()
    }


def layouts_of(model):
    return {
        n.removeprefix("module."): str(p.grad.layout)
        for n, p in model.named_parameters()
        if p.grad is not None
    }


def drop_none(grads):
    return {name: grad for name, grad in grads.items() if grad is not None}


def exact(model, loss_of, world):
    for rank in range(world):
        loss = loss_of(model, rank)
        if loss is not None:
            (loss / world).backward()
    return grads_of(model)


# ---------------------------------------------------------------- who uses which table

# For each rank: the tables that it uses in a step.
USES = {
    "both by all": ["wp", "wp", "wp"],
    "one by nobody": ["w", "w", "w"],
    "one by rank 0 only": ["wp", "w", "w"],
    "one by the last rank only": ["w", "w", "wp"],
    "none by all": ["", "", ""],
    "different ones": ["w", "p", "w"],
}


def loss_of(model, rank, step, uses, bag=False):
    return model(*pick(rank, step, bag=bag), uses).square().sum()


def tables(me, order, bag, cap):
    found = {}
    for name, uses in USES.items():
        model = Words(order, bag).double()
        run = Ours(copy.deepcopy(model), bucket_cap_mb=cap)
        for step in range(3):
            run.zero_grad()
            model.zero_grad()
            if step == 0 and name != "none by all":
                # The first step is one of all tables, so that unused ones come as a surprise.
                mine, all_uses = "wp", ["wp"] * 3
            else:
                mine, all_uses = uses[me.rank], uses
            loss_of(run, me.rank, step, mine, bag).backward()
            wanted = exact(
                model, lambda m, r, s=step, a=all_uses: loss_of(m, r, s, a[r], bag), me.world_size
            )
            got = grads_of(run)
            assert [n for n, g in got.items() if g is None] == [
                n for n, g in wanted.items() if g is None
            ], name
            assert_close_to({name: drop_none(got)}, {name: drop_none(wanted)}, rel=1e-14)
        found[name] = drop_none(got), layouts_of(run)
        for table in ("words.weight", "places.weight"):
            assert found[name][1].get(table, "torch.sparse_coo") == "torch.sparse_coo", name
    return found


@pytest.mark.parametrize("cap", [TINY, None])
@pytest.mark.parametrize(
    ("order", "bag"), [("table first", False), ("layer first", False), ("table first", True)]
)
def test_tables_on_two_ranks(ranks, order, bag, cap):
    outcomes = ranks(2).run(tables, order, bag, cap)
    assert_same_on_all(outcomes)


def test_tables_on_three_ranks(ranks):
    outcomes = ranks(3).run(tables, "table first", False, TINY)
    assert_same_on_all(outcomes)


def trained_as_one(me, bag):
    """A few steps of SGD. torch's wrapper is no oracle here: it divides sparse gradients twice."""
    run, model = Ours(Words(bag=bag).double()), Words(bag=bag).double()
    steppers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (run, model)]
    for step in range(4):
        for stepper in steppers:
            stepper.zero_grad()
        loss_of(run, me.rank, step, "wp", bag).backward()
        exact(model, lambda m, r, s=step: loss_of(m, r, s, "wp", bag), me.world_size)
        for stepper in steppers:
            stepper.step()
    weights = [{n: p.detach() for n, p in each.named_parameters()} for each in (run.module, model)]
    assert_close_to(weights[0], weights[1], rel=1e-13)
    return weights[0], layouts_of(run)


@pytest.mark.parametrize("bag", [False, True])
def test_training_is_that_of_one_process(ranks, bag):
    outcomes = ranks(2).run(trained_as_one, bag)
    assert_same_on_all(outcomes)
    # The tables' gradients stay sparse, that is what they are for.
    assert outcomes[0][1]["words.weight"] == "torch.sparse_coo"
    assert outcomes[0][1]["layer.weight"] == "torch.strided"


def rows_travel(me):
    """What crosses the wire is as large as the rows in use, not as the table."""
    run = Ours(nn.Embedding(50_000, 8, sparse=True))
    sizes = []
    kept, call = vars(dist.ProcessGroup)["allreduce"], dist.ProcessGroup.allreduce

    def noting(group, tensors, *rest):
        sizes.extend(t._nnz() * 8 if t.is_sparse else t.numel() for t in tensors)
        return call(group, tensors, *rest)

    for step in range(2):
        if step == 1:
            dist.ProcessGroup.allreduce = noting
        try:
            run.zero_grad()
            run(torch.tensor([3 + me.rank, 7, 7])).sum().backward()
        finally:
            dist.ProcessGroup.allreduce = kept
    return sizes, run.module.weight.grad.coalesce().indices().flatten().tolist(), grads_of(run)


def test_only_rows_travel(ranks):
    outcomes = ranks(2).run(rows_travel)
    for sizes, indices, grads in outcomes:
        assert sum(sizes) < 200
        assert indices == [3, 4, 7]
        assert grads["weight"][[3, 4, 7, 0]].sum(1).tolist() == [4.0, 4.0, 16.0, 0.0]


# ---------------------------------------------------------------- dense and empty gradients


class Both(nn.Module):
    """A table that is looked up, multiplied with, or both."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True)

    def forward(self, tokens, way):
        if way == "rows":
            return self.table(tokens).square().sum()
        if way == "whole":
            return self.table.weight.square().sum()
        if way == "nothing":
            return self.table(tokens[:0]).sum()
        return self.table(tokens).square().sum() + self.table.weight.sum()


WAYS = [
    ("rows", "rows"),
    ("rows", "whole"),
    ("whole", "rows"),
    ("whole", "whole"),
    ("rows", "nothing"),
    ("nothing", "nothing"),
    ("both", "rows"),
    ("nothing", "whole"),
]


def dense_or_empty(me):
    run, model = Ours(Both().double()), Both().double()
    for step, ways in enumerate(WAYS):
        run.zero_grad()
        model.zero_grad()
        tokens, _ = pick(me.rank, step)
        run(tokens, ways[me.rank]).backward()
        for rank in range(2):
            (model(pick(rank, step)[0], ways[rank]) / 2).backward()
        assert_close_to({str(ways): grads_of(run)}, {str(ways): grads_of(model)}, rel=1e-14)
    return grads_of(run)


def test_dense_and_empty_gradients_of_a_sparse_table(ranks):
    assert_same_on_all(ranks(2).run(dense_or_empty))


# ---------------------------------------------------------------- accumulation, counts, hooks, optimizers


def accumulated(me, weighted, to_none):
    """no_sync, no zero_grad between steps, and counts."""
    run, model = Ours(Words().double(), bucket_cap_mb=TINY), Words().double()
    total = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for step in range(3):
        if to_none:
            run.zero_grad()
            total = {n: torch.zeros_like(p) for n, p in total.items()}
        sizes = [2 + rank + step for rank in range(me.world_size)]
        for number in range(2):
            with run.no_sync() if number == 0 else contextlib.nullcontext():
                out = run(*pick(me.rank, 10 * step + number, sizes[me.rank])).square().sum()
                if weighted:
                    run.backward(out, count=sizes[me.rank])
                else:
                    out.backward()
        model.zero_grad()
        for rank, size in enumerate(sizes):
            for number in range(2):
                model(*pick(rank, 10 * step + number, size)).square().sum().backward()
        divisor = 2 * sum(sizes) if weighted else me.world_size
        for name, grad in grads_of(model).items():
            total[name] += grad / divisor
        assert_close_to(grads_of(run), total, rel=1e-13)
    return grads_of(run)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
def test_accumulation_and_counts(ranks, weighted, to_none):
    assert_same_on_all(ranks(2).run(accumulated, weighted, to_none))


def with_a_hook(me):
    """A hook gets the rows, undivided, as a sparse buffer."""
    seen = []

    def hook(_, bucket):
        buffer = bucket.buffer()
        seen.append((bucket.index(), buffer.is_sparse, len(bucket.parameters())))
        if buffer.is_sparse:
            # Not divided: the row of a word that is looked up once has the loss's own gradient.
            buffer = buffer / dist.get_world_size()
        else:
            buffer.div_(dist.get_world_size())
        work = dist.all_reduce(buffer, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    run = Ours(Words().double(), bucket_cap_mb=TINY)
    run.register_comm_hook(None, hook)
    model = Words().double()
    for step in range(2):
        run.zero_grad()
        model.zero_grad()
        seen.clear()
        run(*pick(me.rank, step)).square().sum().backward()
        wanted = exact(model, lambda m, r, s=step: m(*pick(r, s)).square().sum(), 2)
        assert_close_to(grads_of(run), wanted, rel=1e-14)
    return seen


def test_a_hook_gets_sparse_buffers(ranks):
    for seen in ranks(2).run(with_a_hook):
        assert sum(sparse for _, sparse, _ in seen) == 2
        assert [index for index, _, _ in seen] == list(range(len(seen)))


def trained(me, name):
    """Optimizers for sparse gradients keep the ranks equal and equal to one process."""
    makes = {
        "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
        "SparseAdam": lambda params: torch.optim.SparseAdam(params, lr=0.05),
        "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    }
    run, model = Ours(Words().double(), bucket_cap_mb=TINY), Words().double()
    steppers = []
    for each in (run.module, model):
        tables_ = [each.words.weight, each.places.weight]
        steppers.append([makes[name](tables_), torch.optim.AdamW(each.layer.parameters(), lr=0.01)])
    for step in range(5):
        run.zero_grad()
        model.zero_grad()
        run(*pick(me.rank, step)).square().sum().backward()
        exact(model, lambda m, r, s=step: m(*pick(r, s)).square().sum(), 2)
        with warnings.catch_warnings():
            # torch's Adagrad makes sparse tensors without a word on whether they are to be checked.
            warnings.filterwarnings("ignore", "Sparse invariant checks")
            for pair in steppers:
                for stepper in pair:
                    stepper.step()
    weights = [{n: p.detach() for n, p in each.named_parameters()} for each in (run.module, model)]
    assert_close_to(weights[0], weights[1], rel=1e-9)
    return weights[0]


@pytest.mark.parametrize("name", ["SGD", "SparseAdam", "Adagrad"])
def test_optimizers_for_sparse_gradients(ranks, name):
    outcomes = ranks(2).run(trained, name)
    assert_same_on_all(outcomes)
    assert first_difference(
        outcomes[0], {n: p.detach() for n, p in Words().double().named_parameters()}
    )


def one_table_only(me):
    """A model that is nothing but a table: the trailer has a bucket of its own."""
    run = Ours(nn.Embedding(ROWS, WIDTH, sparse=True).double())
    grads = []
    for step in range(3):
        run.zero_grad()
        tokens, _ = pick(me.rank, step)
        if step == 2 and me.rank == 0:
            run.backward(None, count=0)
        elif step == 2:
            run.backward(run(tokens).square().sum(), count=3)
        else:
            run(tokens).square().sum().backward()
        grads.append(grads_of(run)["weight"])
    return grads, run.reducer.last_step.all_reduces


def test_a_model_of_one_table(ranks):
    outcomes = ranks(2).run(one_table_only)
    assert_same_on_all(outcomes)
    torch.manual_seed(0)
    assert outcomes[0][1] == 2
    assert all(grad.any() for grad in outcomes[0][0])


def joined(me):
    """A rank that has run out sends no rows."""
    run = Ours(Words().double(), bucket_cap_mb=TINY)
    grads = []
    with run.join():
        for step in range((1, 3)[me.rank]):
            run.zero_grad()
            run(*pick(me.rank, step)).square().sum().backward()
            grads.append(grads_of(run))
    return grads


def test_tables_under_join(ranks):
    outcomes = ranks(2).run(joined)
    for step in range(3):
        model = Words().double()
        for rank in range(2):
            if step < (1, 3)[rank]:
                (model(*pick(rank, step)).square().sum() / 2).backward()
        for grads in outcomes:
            if step < len(grads):
                assert_close_to(grads[step], grads_of(model), rel=1e-14)


# ---------------------------------------------------------------- complex


class Waves(nn.Module):
    """Complex weights beside real ones of the same width."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(6)
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype))
        self.phase = nn.Parameter(torch.randn((), dtype=dtype))
        self.layer = nn.Linear(2 * WIDTH, 3).to(torch.zeros((), dtype=dtype).real.dtype)
        self.unused = nn.Parameter(torch.randn(3, dtype=dtype))

    def forward(self, x):
        z = (x.to(self.mix.dtype) @ self.mix) * self.phase
        return self.layer(torch.view_as_real(z).flatten(1))


def waves(me, dtype, weighted):
    run, model = Ours(Waves(dtype), bucket_cap_mb=TINY), Waves(dtype)
    real = torch.zeros((), dtype=dtype).real.dtype
    for step in range(3):
        run.zero_grad()
        model.zero_grad()
        xs = [
            torch.randn(2 + r, WIDTH, generator=torch.Generator().manual_seed(10 * step + r)).to(
                real
            )
            for r in range(2)
        ]
        out = run(xs[me.rank]).square().sum()
        if weighted:
            run.backward(out, count=len(xs[me.rank]))
        else:
            out.backward()
        for x in xs:
            (model(x).square().sum() / (5 if weighted else 2)).backward()
        got, wanted = grads_of(run), grads_of(model)
        assert got.pop("unused") is None
        wanted.pop("unused")
        as_real = [
            {n: torch.view_as_real(g) if g.is_complex() else g for n, g in each.items()}
            for each in (got, wanted)
        ]
        assert_close_to(as_real[0], as_real[1], rel=1e-14 if real is torch.float64 else 1e-5)
        assert got["mix"].dtype == dtype
    return as_real[0]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters(ranks, dtype, weighted):
    assert_same_on_all(ranks(2).run(waves, dtype, weighted))


# ---------------------------------------------------------------- gradients of gradients


def second_order(me):
    """create_graph in backward: one warning that says what is exact; the gradient itself is reduced."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    run = Ours(copy.deepcopy(model), bucket_cap_mb=TINY)
    x = torch.full((2, 3), me.rank + 1.0, dtype=torch.float64)
    grads, texts = [], []
    for _ in range(2):
        run.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(x).sum().backward(create_graph=True)
        texts += [str(w.message) for w in caught if "DistributedDataParallel" in str(w.message)]
        grads.append({n: g.detach() for n, g in grads_of(run).items()})
    run.zero_grad()
    # A penalty on the gradient of the inputs by autograd.grad is exact.
    for each, rank_list in ((run, [me.rank]), (model, [0, 1])):
        for rank in rank_list:
            y = torch.full((2, 3), rank + 1.0, dtype=torch.float64, requires_grad=True)
            (slope,) = torch.autograd.grad(each(y).sum(), y, create_graph=True)
            (slope.square().sum() / len(rank_list)).backward()
    assert_close_to(drop_none(grads_of(run)), drop_none(grads_of(model)), rel=1e-14)
    return grads, texts


def test_second_order(ranks):
    outcomes = ranks(2).run(second_order)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    for rank in range(2):
        (model(torch.full((2, 3), rank + 1.0, dtype=torch.float64)).sum() / 2).backward()
    for grads, texts in outcomes:
        assert len(texts) == 1
        assert "create_graph" in texts[0]
        assert "autograd.grad" in texts[0]
        assert_close_to(grads[0], grads_of(model), rel=1e-14)
        assert_close_to(grads[1], grads_of(model), rel=1e-14)
