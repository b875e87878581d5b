"""`bucket_cap_mb="auto"`: the ranks measure, adopt one plan at one step, keep it, and nothing else changes."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

from rankstep import DistributedDataParallel, together
from rankstep.buckets import autoplan, measure
from rankstep.buckets.autoplan import MEASURED, WARM_UP, Phase
from rankstep.buckets.predict import Link
from rankstep.collectives.hub import Hub
from rankstep.errors import (
    AbandonedBackwardError,
    ModelError,
    ModelMismatchError,
    ModelTypeError,
)
from rankstep.testing import assert_bitwise_equal, assert_same_on_all, noted_collectives
from rankstep.trace.events import GradReady

WIDTH = 16
AGREES = WARM_UP + MEASURED
"""The step at whose end the plan is adopted."""

EAGER = Link(1.0, 1.0)
"""Starts cost nothing and nothing is lost for computing: more than one bucket is best, whatever is measured in steps."""


class Chain(nn.Module):
    def __init__(self, count=5):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *, spare=False, breaks=False):
        for place, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if breaks and place == 1:
                x = Broken.apply(x)
        return self.spare(x) if spare else x


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, _grad):
        raise ZeroDivisionError


def wrapped(cap="auto", model=Chain, **options):
    torch.manual_seed(7)
    return DistributedDataParallel(model().double(), bucket_cap_mb=cap, **options)


def inputs(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)


def step_of(run, me, step, **how):
    run.zero_grad()
    run(inputs(me.rank, step), **how).square().sum().backward()


def grads_of(run):
    return {
        name.removeprefix("module."): None if param.grad is None else param.grad.clone().to_dense()
        for name, param in run.named_parameters()
    }


def quick():
    """Do not measure the link: the tests are about everything else."""
    return mock.patch.object(autoplan, "measure_link", return_value=EAGER)


# ---------------------------------------------------------------- adopting a plan


def phases(me):
    run = wrapped()
    told = []
    with quick():
        for step in range(AGREES + 3):
            with noted_collectives(Hub) as called:
                step_of(run, me, step)
            plan = run.reducer.plan
            told.append(
                (
                    run.reducer.auto.phase.name,
                    len(plan.buckets),
                    [each.name for each in called],
                    plan.fingerprint(),
                    run.reducer.last_step.all_reduces,
                )
            )
    assert run.reducer.auto.phase is Phase.SETTLED
    # Nobody listens any more, so hooks are as cheap as without.
    return told, run.reducer._recorder, plan.describe(), sum(run.reducer.firings.loud)


def test_one_plan_is_adopted_at_one_step_and_kept(ranks):
    (first, heard, text, loud), (second, *_) = ranks(2).run(phases)
    assert [each[3] for each in first] == [each[3] for each in second]
    assert [each[:2] for each in first[:AGREES]] == [("MEASURING", 1)] * AGREES
    kinds = [each[0] for each in first]
    assert kinds[AGREES:] == ["SETTLED"] * 3
    buckets = first[AGREES][1]
    assert buckets > 1
    assert len({each[3] for each in first[AGREES:]}) == 1
    # As many collectives as buckets, before and after.
    for step in (*range(1, AGREES), AGREES + 1, AGREES + 2):
        count = first[step][1]
        assert first[step][2] == ["allreduce"] * count
        assert first[step][4] == count
    assert first[AGREES][2].count("allreduce") == buckets
    assert len(first[AGREES][2]) > buckets  # what they agreed by
    assert heard is None
    assert loud == 0
    assert "this plan:" in text
    assert "25 MiB:" in text
    assert "bucket_cap_mb_list=[" in text


def link(me):
    run = wrapped()
    with mock.patch.object(measure, "LADDER_NS", 50_000_000):
        for step in range(AGREES + 1):
            step_of(run, me, step)
    forecast = run.reducer.plan.forecast
    return forecast.link, forecast.plan.step_ns, [other.step_ns for other in forecast.others]


def test_the_group_is_really_measured(ranks):
    for found, own, others in ranks(2).run(link):
        assert found.start_ns > 0
        assert 0 <= found.charge <= 1
        # The plan is the best of this model; times themselves are the machine's affair.
        assert own <= min(others) * (1 + 1e-9)


def equal(me, model, cap, how):
    auto, fixed = wrapped(model=model), wrapped(cap, model=model)
    optimizers = [torch.optim.SGD(run.parameters(), lr=0.1, momentum=0.9) for run in (auto, fixed)]
    layouts = set()
    with quick():
        for step in range(AGREES + 3):
            for run, optimizer in zip((auto, fixed), optimizers, strict=True):
                how(run, me, step)
                optimizer.step()
            assert_bitwise_equal(grads_of(auto), grads_of(fixed))
            layouts.add(auto.reducer.plan.fingerprint() != fixed.reducer.plan.fingerprint())
    return auto.state_dict(), layouts


def plainly(run, me, step):
    step_of(run, me, step)


def in_windows(run, me, step):
    """Two micro-batches, the gradients of the step before still there, now and then accumulated on."""
    if step % 3:
        run.zero_grad(set_to_none=step % 2 == 0)
    with run.no_sync():
        run(inputs(me.rank, 100 + step)).square().sum().backward()
    run(inputs(me.rank, step)).square().sum().backward()


def weighted(run, me, step):
    run.zero_grad()
    run.backward(run(inputs(me.rank, step)).square().sum(), count=1 + 2 * me.rank)


def sometimes_more(run, me, step):
    """A layer that only one rank uses, and only now and then."""
    step_of(run, me, step, spare=me.rank == 1 and step in (2, AGREES, AGREES + 2))


@pytest.mark.parametrize("how", [plainly, in_windows, weighted, sometimes_more])
def test_gradients_are_bit_for_bit_those_of_any_other_plan(ranks, how):
    for cap in (0.001, 25):
        told = ranks(2).run(equal, Chain, cap, how)
        assert_same_on_all([state for state, _ in told])
        # At some time the two were not laid out alike, or nothing was tested.
        assert all(True in layouts for _, layouts in told)


class Mixed(nn.Module):
    """Two dtypes in turns, and an embedding with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, WIDTH, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def double(self):
        super().double()
        for layer in self.layers[::2]:
            layer.float()
        return self

    def forward(self, x):
        x = x + self.words(torch.arange(3))
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x.double()


def test_several_dtypes_and_sparse_gradients_are_planned_too(ranks):
    told = ranks(2).run(equal, Mixed, 25, plainly)
    assert_same_on_all([state for state, _ in told])


def listening(me):
    run, events = wrapped(), []
    run.reducer.recorder = events.append
    ready = []
    with quick():
        for step in range(AGREES + 2):
            step_of(run, me, step)
            ready.append(sum(isinstance(event, GradReady) for event in events))
            events.clear()
    ours = run.reducer.recorder == events.append
    run.reducer.recorder = None
    return ready, ours, run.reducer._recorder


def test_a_recorder_hears_the_same_as_ever(ranks):
    used = 10  # the spare layer never is
    for ready, ours, after in ranks(2).run(listening):
        # The step that learns tells of no gradient, as the first one.
        assert ready == [0, *[used] * (AGREES - 1), 0, used]
        assert ours
        assert after is None


# ---------------------------------------------------------------- whatever happens in between


def dying(me, dies_at):
    run = wrapped()
    raised = []
    with quick():
        for step in range(AGREES + 3):
            try:
                step_of(run, me, step, breaks=me.rank == 1 and step == dies_at)
            except (AbandonedBackwardError, ZeroDivisionError) as error:
                raised.append((step, type(error).__name__))
    return raised, run.reducer.plan.fingerprint(), len(run.reducer.plan.buckets), grads_of(run)


@pytest.mark.parametrize("dies_at", [0, 1, WARM_UP, AGREES - 1, AGREES, AGREES + 1])
def test_a_backward_that_dies_keeps_nobody_from_the_plan(ranks, dies_at):
    first, second = ranks(2).run(dying, dies_at)
    assert first[0] == [(dies_at, "AbandonedBackwardError")]
    assert second[0] == [(dies_at, "ZeroDivisionError")]
    assert first[1] == second[1]
    assert first[2] > 1
    assert_bitwise_equal(first[3], second[3])


def without_a_measurement(me):
    run = wrapped()
    told = []
    with (
        quick(),
        mock.patch.object(autoplan.Measured, "of", side_effect=[None, *[mock.DEFAULT] * 9]),
    ):
        for step in range(AGREES + 1):
            step_of(run, me, step)
        told.append((run.reducer.auto.phase.name, len(run.reducer.plan.buckets)))
    with quick():
        for step in range(AGREES + 1):
            step_of(run, me, step)
    told.append((run.reducer.auto.phase.name, len(run.reducer.plan.buckets) > 1))
    return told


def test_where_nothing_could_be_measured_measuring_goes_on(ranks):
    for told in ranks(2).run(without_a_measurement):
        assert told == [("MEASURING", 1), ("SETTLED", True)]


def changing(me, changes_at):
    run = wrapped()
    plain = [copy.deepcopy(run.module) for _ in range(2)]
    told = []
    with quick():
        for step in range(2 * AGREES + 4):
            if step == changes_at:
                for module in (run.module, *plain):
                    torch.manual_seed(9)
                    module.layers.append(nn.Linear(WIDTH, WIDTH).double())
            step_of(run, me, step)
            told.append(run.reducer.auto.phase.name)
            for rank, module in enumerate(plain):
                module.zero_grad()
                module(inputs(rank, step)).square().sum().backward()
            wanted = [
                None if a.grad is None else (a.grad / 2 + b.grad / 2)
                for a, b in zip(*(module.parameters() for module in plain), strict=True)
            ]
            assert_bitwise_equal(list(grads_of(run).values()), wanted)
    return told, run.reducer.plan.fingerprint(), len(run.reducer.plan.params)


@pytest.mark.parametrize("changes_at", [WARM_UP + 1, AGREES, AGREES + 2])
def test_a_module_that_changes_is_measured_anew(ranks, changes_at):
    (told, first, count), (_, second, _) = ranks(2).run(changing, changes_at)
    assert first == second
    assert count == 14
    assert told[changes_at] == "LEARNING"
    settled = changes_at + 1 + AGREES
    assert told[changes_at + 1 : settled] == ["MEASURING"] * AGREES
    assert set(told[settled:]) == {"SETTLED"}


def uneven(me, count_of):
    run = wrapped()
    with quick():
        for epoch in range(2):
            batches = [inputs(me.rank, 50 * epoch + i) for i in range(count_of[me.rank])]
            for batch in together(batches, run):
                run.zero_grad()
                run(batch).square().sum().backward()
    return run.reducer.auto.phase.name, run.reducer.plan.fingerprint(), grads_of(run)


@pytest.mark.parametrize("count_of", [(AGREES + 3, 4), (2, AGREES)])
def test_ranks_that_run_out_take_part(ranks, count_of):
    told = ranks(2).run(uneven, count_of)
    assert [each[0] for each in told] == ["SETTLED"] * 2
    assert told[0][1] == told[1][1]
    assert_bitwise_equal(told[0][2], told[1][2])


def joined(me):
    run = wrapped()
    with quick(), run.join():
        for step in range(3 if me.rank else AGREES + 3):
            step_of(run, me, step)
    return run.reducer.auto.phase.name, run.reducer.plan.fingerprint(), len(run.reducer.buckets)


def test_ranks_that_have_joined_take_part(ranks):
    first, second = ranks(2).run(joined)
    assert first == second
    assert first[0] == "SETTLED"
    assert first[2] > 1


def static(me):
    run = wrapped(static_graph=True)
    with quick():
        for step in range(AGREES + 2):
            step_of(run, me, step)
    return run.reducer.firings.always_same, run.reducer.firings.expected


def test_what_was_learned_is_learned_again(ranks):
    for same, expected in ranks(2).run(static):
        assert same
        assert sum(expected) == 10


# ---------------------------------------------------------------- around it


def copies(me):
    run = wrapped()
    with quick():
        for step in range(AGREES + 1):
            step_of(run, me, step)
        buffer = io.BytesIO()
        torch.save(run, buffer)
        buffer.seek(0)
        pickled = torch.load(buffer, weights_only=False)
        told = []
        for other in (copy.deepcopy(run), pickled):
            begins = other.reducer.auto.phase
            for step in range(AGREES + 1):
                step_of(other, me, step)
                step_of(run, me, step)
            assert_bitwise_equal(grads_of(other), grads_of(run))
            told.append((begins.name, other.reducer.auto.phase.name))
    return told


def test_copies_measure_for_themselves(ranks):
    for told in ranks(2).run(copies):
        assert told == [("LEARNING", "SETTLED")] * 2


def differing(me):
    with pytest.raises(ModelMismatchError, match=r"caps is .*auto.* on rank"):
        wrapped("auto" if me.rank else 25)


def test_all_ranks_must_ask_for_it(ranks):
    ranks(2).run(differing)


def hooked(me):
    run = wrapped()
    with pytest.raises(ModelError, match=r"Give the caps in MiB to use a hook"):
        run.register_comm_hook(None, noop_hook)
    with quick():
        step_of(run, me, 0)
    run = wrapped(25)
    run.register_comm_hook(None, noop_hook)


def test_a_comm_hook_is_refused(ranks):
    ranks(2).run(hooked)


def alone(me):
    run = wrapped()
    step_of(run, me, 0)
    plan = run.reducer.plan
    with pytest.raises(ModelTypeError, match="positive numbers of MiB, not"):
        wrapped("Auto")
    for wrong in (0, -1, float("nan"), float("inf"), True, "25", [25]):
        with pytest.raises(ModelTypeError, match="positive numbers of MiB, not"):
            wrapped(wrong)
    with pytest.raises(ModelTypeError, match="give one of the two"):
        wrapped("auto", bucket_cap_mb_list=[1, 25])
    return run.reducer.auto, plan.caps.cap_bytes, plan.forecast


def test_one_rank_has_nothing_to_measure_and_wrong_caps_are_refused(ranks):
    ((auto, caps, forecast),) = ranks(1).run(alone)
    assert auto is None
    assert caps == (2**20, 25 * 2**20)
    assert forecast is None


def replaced(me):
    run = wrapped(0.001)
    step_of(run, me, 0)
    plan = run.reducer.plan
    return replace(plan, forecast=None) == plan


def test_plans_of_caps_have_no_forecast(ranks):
    assert ranks(2).run(replaced) == [True, True]
