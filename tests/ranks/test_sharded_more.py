"""The sharded optimizer with complex parameters, with compiled code, and with a rank that is killed in its collectives."""

from __future__ import annotations

import copy
import os
import signal
import warnings

import pytest
import torch
from torch import nn

from rankstep import DistributedDataParallel, ShardedOptimizer
from rankstep.errors import CommunicationError
from rankstep.testing import assert_bitwise_equal, assert_close_to, first_difference
from trip import Trip

SMALL = 0.001
both_memories = pytest.mark.parametrize("shared", [True, False])


# ---------------------------------------------------------------- complex parameters


class Waves(nn.Module):
    """Complex weights of two precisions between real ones; one is cut between the ranks, small ones are not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.mix = nn.Parameter(torch.randn(40, 7, dtype=torch.complex64))
        self.real = nn.Linear(7, 9)
        self.turned = nn.Parameter(torch.randn(9, 30, dtype=torch.complex128).t())
        self.phase = nn.Parameter(torch.randn((), dtype=torch.complex64))

    def forward(self, x):
        x = (x.to(torch.complex64) @ self.mix) * self.phase
        x = self.real(torch.view_as_real(x).sum(-1)).to(torch.complex128)
        return (x @ self.turned.t()).abs()


def waves(me, step):
    generator = torch.Generator().manual_seed(10 * step + me.rank)
    return torch.randn(4, 40, generator=generator)


def values(run):
    return [param.detach().clone() for param in run.module.parameters()]


KINDS = {
    "momentum": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.003, "centered": True}),
}


def complex_steps(me, name, shared):
    kind, options = KINDS[name]
    runs = [DistributedDataParallel(Waves(), bucket_cap_mb=SMALL) for _ in range(2)]
    plain = kind(runs[0].parameters(), **options)
    dealt = ShardedOptimizer(runs[1], kind, share_parameters=shared, **options)
    for step in range(5):
        for run, stepper in zip(runs, (plain, dealt), strict=True):
            stepper.zero_grad()
            run(waves(me, step)).mean().backward()
            if step == 2 and stepper is dealt:
                dealt.gather_gradients()
                grads = [[param.grad.clone() for param in run.parameters()] for run in runs]
                assert_bitwise_equal(grads[1], grads[0])
            stepper.step()
        if step == 3:
            state = dealt.state_dict()
            expected = plain.state_dict()
            assert_bitwise_equal(state, expected)
            # A new one loads from the plain one's.
            dealt = ShardedOptimizer(runs[1], kind, share_parameters=shared, **options)
            dealt.load_state_dict(copy.deepcopy(expected))
    assert_bitwise_equal(values(runs[1]), values(runs[0]))
    dtypes = {param.dtype for param in runs[1].parameters()}
    assert dtypes == {torch.complex64, torch.complex128, torch.float32}
    return values(runs[1])


@both_memories
@pytest.mark.parametrize("name", KINDS)
def test_complex_parameters_have_the_plain_ones_bits(ranks, name, shared):
    first, second = ranks(2).run(complex_steps, name, shared)
    assert_bitwise_equal(first, second)
    # The twin: the steps have moved both parts of the numbers.
    before = values_of(Waves())
    assert all(first_difference([new], [old]) for new, old in zip(first, before, strict=True))
    assert first_difference([first[0].imag], [before[0].imag])


def values_of(model):
    return [param.detach() for param in model.parameters()]


def complex_norms(me, order):
    runs = [DistributedDataParallel(Waves(), bucket_cap_mb=SMALL) for _ in range(2)]
    dealt = ShardedOptimizer(runs[1], torch.optim.SGD, lr=0.1)
    for run in runs:
        run(waves(me, 0)).mean().backward()
    expected = nn.utils.clip_grad_norm_(runs[0].parameters(), 1e9, order)
    assert_close_to(nn.utils.clip_grad_norm_(runs[1].parameters(), 1e9, order), expected, rel=1e-6)
    assert_close_to(dealt.clip_grad_norm_(1e9, order), expected, rel=1e-6)
    # What works on numbers sees complex ones.
    runs[0].module.mix.grad.mul_(1j)
    runs[1].module.mix.grad.mul_(1j)
    dealt.gather_gradients()
    assert_bitwise_equal(runs[1].module.mix.grad, runs[0].module.mix.grad)
    return expected.item()


def test_norms_of_complex_gradients(ranks):
    found = [ranks(2).run(complex_norms, order) for order in (1.0, 2.0, 3.0, float("inf"))]
    assert all(first == second for first, second in found)
    assert len({first for first, _ in found}) == 4


def clamps(me):
    """Complex numbers have no order: torch refuses, and so does the share."""
    run = DistributedDataParallel(Waves(), bucket_cap_mb=SMALL)
    ShardedOptimizer(run, torch.optim.SGD, lr=0.1)
    run(waves(me, 0)).mean().backward()
    whole = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises((RuntimeError, NotImplementedError)) as expected:
        whole.clamp_(-1, 1)
    with pytest.raises(expected.type):
        run.module.mix.grad.clamp_(-1, 1)


def test_complex_gradients_are_not_clamped_by_parts(ranks):
    ranks(2).run(clamps)


# ---------------------------------------------------------------- parameters in no bucket yet


def gaps():
    """A model that is frozen but for one layer; the other weight has holes between its elements."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    torch.manual_seed(2)
    for layer in model:
        nn.init.normal_(layer.weight)
        nn.init.zeros_(layer.bias)
    wide = model[0].weight.detach().repeat_interleave(2, 1)
    model[0].weight = nn.Parameter(wide[:, ::2])
    model[0].requires_grad_(False)
    return model


def thaws(me):
    runs = [DistributedDataParallel(gaps(), bucket_cap_mb=SMALL) for _ in range(2)]
    steppers = [
        torch.optim.SGD(runs[0].parameters(), lr=0.1, momentum=0.9),
        ShardedOptimizer(runs[1], torch.optim.SGD, lr=0.1, momentum=0.9),
    ]
    for step in range(4):
        for run, stepper in zip(runs, steppers, strict=True):
            stepper.zero_grad()
            if step == 1:
                run.module[0].requires_grad_(True)
            x = torch.full((2, 6), 0.1 + step + me.rank, dtype=torch.float64)
            run(x).square().mean().backward()
            if step == 1:
                # Its gradient is there before it has a bucket.
                assert run.module[0].weight.stride() != (6, 1)
                assert run.module[0].weight.grad is not None
            stepper.step()
        # Products with a matrix that has holes are rounded in another order.
        assert_close_to(values(runs[1]), values(runs[0]), rel=1e-12)
    return values(runs[1])[0]


def test_a_thawed_parameter_with_holes_is_stepped_at_once(ranks):
    first, second = ranks(2).run(thaws)
    assert_bitwise_equal(first, second)
    assert first_difference([first], [gaps()[0].weight.detach()])


# ---------------------------------------------------------------- a rank that is killed


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(4))

    def forward(self, x, action=None):
        for place, layer in enumerate(self.layers):
            x = layer(Trip.apply(x, action) if place == 1 else x).tanh()
        return x


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


ROADS = {
    "memory": ({}, True),
    "gathered": ({}, False),
    "sockets": ({"RANKSTEP_SHARED_MEMORY": "0"}, True),
    "two hosts": ({"RANKSTEP_HOST": "aab"}, True),
}


def killed(me, road, where, dead):
    """The rank ends in the middle of backward, or between its step and its values' departure."""
    variables, shared = ROADS[road]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value[me.rank] if name == "RANKSTEP_HOST" else value)
        group = torch.distributed.new_group()
        run = DistributedDataParallel(Deep(), process_group=group, bucket_cap_mb=0.001)
        stepper = ShardedOptimizer(run, torch.optim.SGD, share_parameters=shared, lr=0.1)
        for step in range(4):
            dies = me.rank == dead and step == 2
            stepper.zero_grad()
            loss = run(torch.ones(2, 20), kill if dies and where == "reduce" else None).sum()
            loss.backward()
            if dies and where == "gather":
                patch.setattr(stepper._shares, "publish", lambda **_: kill())
            stepper.step()
            if where == "gather":
                stepper.synchronize()
        return "came through"


@pytest.mark.parametrize("where", ["reduce", "gather"])
@pytest.mark.parametrize("road", ROADS)
def test_a_killed_rank_is_named_on_all_others(ranks, road, where):
    dead = 2 if road == "two hosts" else 1
    for rank, outcome in enumerate(ranks(3).outcomes(killed, road, where, dead, timeout_s=40)):
        if rank == dead:
            assert outcome.status == "died"
            continue
        assert outcome.is_a(CommunicationError), outcome
        assert f"rank {rank}: " in outcome.error
        assert "step 2 " in outcome.error or "number 2 " in outcome.error
        assert f"rank {dead}" in outcome.error.partition("failed")[2]


def test_nobody_is_named_where_nobody_is_killed(ranks):
    assert ranks(3).run(killed, "gathered", "reduce", None) == ["came through"] * 3


# ---------------------------------------------------------------- compiled code


WIDTH = 512
CAP = 1


class Stack(nn.Module):
    """One weight is 1 MiB, which is the smallest cap that torch's splitting of graphs takes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


graphs = []


def eagerly(graph, inputs):
    """What the compiler makes of a graph, without a compiler for machine code."""
    graphs.append(sum(node.op != "placeholder" for node in graph.graph.nodes))
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    return aot_autograd(fw_compiler=boxed_nop)(graph, inputs)


def in_place(model):
    model.compile(backend=eagerly)
    return model


WAYS = {
    "outside": lambda model: torch.compile(
        DistributedDataParallel(model, bucket_cap_mb=CAP), backend=eagerly
    ),
    "inside": lambda model: DistributedDataParallel(
        torch.compile(model, backend=eagerly), bucket_cap_mb=CAP
    ),
    "a layer": lambda model: DistributedDataParallel(_with_layer(model), bucket_cap_mb=CAP),
    "inside, by its method": lambda model: DistributedDataParallel(
        in_place(model), bucket_cap_mb=CAP
    ),
    "outside, by its method": lambda model: in_place(
        DistributedDataParallel(model, bucket_cap_mb=CAP)
    ),
}


def _with_layer(model):
    model.layers[1] = torch.compile(model.layers[1], backend=eagerly)
    return model


def compiled(me, way, shared):
    """The compiled sharded step against the same compiled model with the plain optimizer, after each step and in eval."""
    torch._dynamo.reset()
    # torch's own, about the inputs of a compiled layer.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
    try:
        plain, dealt = WAYS[way](Stack()), WAYS[way](Stack())
        options = {"lr": 0.05, "momentum": 0.9}
        runs = (
            (plain, torch.optim.SGD(plain.parameters(), **options)),
            (dealt, ShardedOptimizer(dealt, torch.optim.SGD, share_parameters=shared, **options)),
        )
        compiles = []
        for step in range(5):
            generator = torch.Generator().manual_seed(10 * step + me.rank)
            x = torch.randn(2, WIDTH, generator=generator)
            outs = []
            for run, stepper in runs:
                stepper.zero_grad()
                out = run(x)
                out.square().mean().backward()
                stepper.step()
                outs.append(out.detach())
            assert_bitwise_equal(outs[1], outs[0])
            with torch.no_grad():
                assert_bitwise_equal(dealt(x), plain(x))
            compiles.append(len(graphs))
        assert compiles[0] > 0
        # Nothing is compiled anew for a parameter whose class changes.
        assert compiles[-1] == compiles[-2]
        found = [param.detach().clone() for param in dealt.parameters()]
        assert_bitwise_equal(found, [param.detach() for param in plain.parameters()])
        return found
    finally:
        torch._dynamo.reset()
        graphs.clear()


@both_memories
@pytest.mark.parametrize("way", WAYS)
def test_compiled_models_see_new_values(ranks, way, shared):
    first, second = ranks(2).run(compiled, way, shared)
    assert_bitwise_equal(first, second)
    assert first_difference(first, values_of(Stack()))


LATER = {
    "outside": lambda run: torch.compile(run, backend=eagerly),
    "outside, by its method": in_place,
    "inside, by its method": lambda run: in_place(run.module) and run,
}


def compiled_later(me, way):
    """Compiled between two steps, while values are on their way."""
    torch._dynamo.reset()
    # torch's own, about hooks on all modules, which are there while values are on their way.
    warnings.filterwarnings("ignore", "Using `torch.compile")
    try:
        runs = [DistributedDataParallel(Stack(), bucket_cap_mb=CAP) for _ in range(2)]
        plain = torch.optim.SGD(runs[0].parameters(), lr=0.05)
        dealt = ShardedOptimizer(runs[1], torch.optim.SGD, lr=0.05, share_parameters=False)
        forwards = list(runs)
        for step in range(4):
            if step == 2:
                assert dealt._shares._ways
                forwards = [LATER[way](run) for run in runs]
            x = torch.full((2, WIDTH), 0.1 + step + me.rank)
            # The dealt one first: it is the one that the compiler finds in the middle of something.
            for forward, stepper in reversed(list(zip(forwards, (plain, dealt), strict=True))):
                stepper.zero_grad()
                forward(x).square().mean().backward()
                stepper.step()
            if step > 1:
                # Nothing is on its way to compiled code.
                assert not dealt._shares._ways
        assert_bitwise_equal(values(runs[1]), values(runs[0]))
    finally:
        torch._dynamo.reset()
        graphs.clear()


@pytest.mark.parametrize("way", LATER)
def test_a_model_that_is_compiled_later(ranks, way):
    ranks(2).run(compiled_later, way)


# ---------------------------------------------------------------- gradients by hand


def norm_of_gradients_by_hand(_):
    """Before the first plan nothing is dealt, and only rank 0 counts what all have."""
    model = DistributedDataParallel(nn.Linear(300, 3))
    dealt = ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e4)
    norm = dealt.clip_grad_norm_(1.0)
    return norm, [param.grad for param in model.parameters()]


def test_a_norm_of_gradients_by_hand_is_the_same_on_all_ranks(ranks):
    first, second = ranks(2).run(norm_of_gradients_by_hand)
    assert_bitwise_equal(first, second)
    # Larger than float16 holds, which a rank without a count of its own once took.
    assert first[0].dtype is torch.float32
    assert first[0].item() == pytest.approx(1e4 * 903**0.5)
