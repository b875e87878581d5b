"""The right gradient where PyTorch's own tests demand an error; see deliberate.md, which lists those tests."""

# ruff: noqa: B023 (what binds a loop variable here is called in the same turn of the loop)
from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from rankstep import DistributedDataParallel
from rankstep.testing import assert_bitwise_equal, assert_close_to, assert_same_on_all

BATCH, WIDTH = 20, 10
TINY = 0.0001


def grads_of(model):
    return {
        name.removeprefix("module."): None if param.grad is None else param.grad.clone()
        for name, param in model.named_parameters()
    }


def one_process(model, losses):
    """The mean over the ranks of what each rank's loss gives; None where none reaches a parameter."""
    model = copy.deepcopy(model)
    model.zero_grad()
    for loss_of in losses:
        (loss_of(model) / len(losses)).backward()
    return grads_of(model)


def check(found, wanted):
    assert [n for n, g in found.items() if g is None] == [n for n, g in wanted.items() if g is None]
    assert_close_to(
        {n: g for n, g in found.items() if g is not None},
        {n: g for n, g in wanted.items() if g is not None},
        rel=1e-14,
    )


# ---------------------------------------------------------------- control flow


class Branches(nn.Module):
    """PyTorch's model: the second layer is used for inputs of ones, and if ``only`` is given, on that rank only."""

    def __init__(self, only=None):
        super().__init__()
        torch.manual_seed(0)
        self.only = only
        self.lin1 = nn.Linear(WIDTH, WIDTH, bias=False)
        self.lin2 = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, rank):
        x1 = functional.relu(self.lin1(x))
        ones = torch.equal(x, torch.ones_like(x))
        return self.lin2(x1) if ones and self.only in (None, rank) else x1


def inputs(step):
    if step % 2:
        return torch.ones(BATCH, WIDTH, dtype=torch.float64)
    draw = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=draw)


def branching(me, only, flag, zero):
    """Six steps in turn with and without the second layer."""
    model = Branches(only).double()
    run = DistributedDataParallel(
        copy.deepcopy(model), bucket_cap_mb=TINY, find_unused_parameters=flag
    )
    used, old = [], None
    for step in range(6):
        before = grads_of(run)["lin2.weight"]
        if zero:
            run.zero_grad()
        run(inputs(step), me.rank).sum().backward()
        found = grads_of(run)
        wanted = one_process(
            model, [lambda m, r=rank: m(inputs(step), r).sum() for rank in range(me.world_size)]
        )
        if zero:
            check(found, wanted)
        elif wanted["lin2.weight"] is None:
            # Not zeroed and not used by any rank: as it was, bit for bit.
            assert_bitwise_equal(found["lin2.weight"], before)
        else:
            total = wanted["lin2.weight"] + (0 if before is None else before)
            assert_close_to(found["lin2.weight"], total, rel=1e-14)
        used.append(run.reducer._get_local_used_map().tolist())
        old = found
    return old, used, run.reducer.last_step.all_reduces


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("flag", [True, False])
def test_a_layer_left_out_on_all_ranks(ranks, flag, zero):
    outcomes = ranks(2).run(branching, None, flag, zero)
    assert_same_on_all([grads for grads, _, _ in outcomes])
    for _, used, all_reduces in outcomes:
        # PyTorch's test asks for this map where the flag is set; here it is kept in any case.
        assert used == [[2, 0], [2, 2]] * 3
        assert all_reduces == 2


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("flag", [True, False])
def test_a_layer_that_only_rank_1_uses(ranks, flag, zero):
    outcomes = ranks(2).run(branching, 1, flag, zero)
    assert_same_on_all([grads for grads, _, _ in outcomes])
    for _, used, all_reduces in outcomes:
        assert used == [[2, 0], [2, 1]] * 3
        assert all_reduces == 2


def test_on_three_ranks(ranks):
    outcomes = ranks(3).run(branching, 1, False, True)
    assert_same_on_all([grads for grads, _, _ in outcomes])
    assert [used for _, used, _ in outcomes] == [[[3, 0], [3, 1]] * 3] * 3


# ---------------------------------------------------------------- nested parts without a gradient


class Part(nn.Module):
    """PyTorch's nested model: an embedding net and half of another one are never used."""

    def __init__(self):
        super().__init__()
        self.embedding_net = nn.ModuleDict(
            {"embedding": nn.Embedding(10, 10), "lin": nn.Linear(10, 1)}
        )
        self.lin = nn.ModuleDict(
            {"a": nn.Linear(10, 10, bias=False), "b": nn.Linear(10, 1, bias=False)}
        )
        self.bn = nn.Sequential(
            nn.Linear(2, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)
        )
        self.lin_layer = nn.Linear(4, 10, bias=False)

    def forward(self, x):
        return self.lin["a"](self.lin_layer(self.bn(x)))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.sub_module = Part()

    def forward(self, x):
        return self.sub_module(x)


IGNORED = "sub_module.embedding_net.embedding.weight"
LEFT_OUT = [
    IGNORED,
    "sub_module.embedding_net.lin.weight",
    "sub_module.embedding_net.lin.bias",
    "sub_module.lin.b.weight",
]


def rows(rank, step):
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 2, dtype=torch.float64, generator=draw)


def nested(me, ignored):
    model = Nested().double()
    if ignored:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [IGNORED])
    run = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=TINY)
    for step in range(3):
        run.zero_grad()
        run(rows(me.rank, step)).square().sum().backward()
        wanted = one_process(
            model,
            [lambda m, r=rank: m(rows(r, step)).square().sum() for rank in range(me.world_size)],
        )
        check(grads_of(run), wanted)
    return grads_of(run), run.reducer.last_step.unused, run._get_ddp_logging_data()["has_error"]


@pytest.mark.parametrize("ignored", [False, True], ids=["all handled", "embedding ignored"])
def test_nested_parts_left_out(ranks, ignored):
    outcomes = ranks(2).run(nested, ignored)
    assert_same_on_all([grads for grads, _, _ in outcomes])
    for _, unused, has_error in outcomes:
        # What torch's error would list.
        assert list(unused) == (LEFT_OUT[1:] if ignored else LEFT_OUT)
        assert not has_error


class Dead(nn.Module):
    """PyTorch's model: the second net is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.net1 = nn.Linear(10, 10, bias=False)
        self.net2 = nn.Linear(10, 10, bias=False)

    def forward(self, x):
        return self.net1(x)


def dead(me, cap):
    model = Dead().double()
    run = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=cap)
    stepper = torch.optim.SGD(run.parameters(), lr=0.1, momentum=0.9)
    before = run.module.net2.weight.detach().clone()
    for step in range(4):
        stepper.zero_grad()
        draw = torch.Generator().manual_seed(100 * step + me.rank)
        run(torch.rand(1, 10, dtype=torch.float64, generator=draw)).sum().backward()
        wanted = one_process(
            model,
            [
                lambda m, r=rank, s=step: m(
                    torch.rand(
                        1,
                        10,
                        dtype=torch.float64,
                        generator=torch.Generator().manual_seed(100 * s + r),
                    )
                ).sum()
                for rank in range(me.world_size)
            ],
        )
        check(grads_of(run), wanted)
        stepper.step()
    # An optimizer that finds None leaves the weight alone; one that found zeros would do so only without decay.
    assert torch.equal(run.module.net2.weight, before)
    assert not torch.equal(run.module.net1.weight, model.net1.weight)
    return grads_of(run), run.reducer.last_step.unused


@pytest.mark.parametrize("cap", [TINY, None])
def test_a_part_that_is_never_used(ranks, cap):
    outcomes = ranks(2).run(dead, cap)
    assert_same_on_all(outcomes)
    assert outcomes[0][1] == ("net2.weight",)


# ---------------------------------------------------------------- the list itself


def test_the_list_names_tests_that_exist():
    here = Path(__file__).parent
    tests = here.parent
    text = (here / "deliberate.md").read_text(encoding="utf-8")
    sources = {
        path.relative_to(tests).as_posix(): path.read_text(encoding="utf-8")
        for path in tests.glob("*/test_*.py")
    }
    named = [
        cell.strip().strip("`").removeprefix("tests/")
        for line in text.splitlines()
        if line.startswith("| ") and not line.startswith(("| PyTorch", "| what", "| ---"))
        for cell in [line.rstrip(" |").rpartition("|")[2]]
    ]
    assert len(named) == 16
    for name in named:
        path, _, test = name.rpartition("::") if ".py" in name else ("test_deliberate.py", "", name)
        if name.endswith(".py"):
            path, test = name, ""
        path = path if "/" in path else f"parity/{path}"
        assert path in sources, name
        assert not test or f"def {test.partition('[')[0]}(" in sources[path], name
