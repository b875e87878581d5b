"""The drift alarm: weights that differ between ranks are an error on all of them, and nothing else is."""

from __future__ import annotations

import copy
import itertools
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rankstep import DistributedDataParallel
from rankstep.buckets.drift import DriftAlarm, bit_sum
from rankstep.collectives.hub import Hub
from rankstep.testing import assert_bitwise_equal, assert_same_on_all, noted_collectives

WIDTH = 6
# Small models are sampled in every eighth step, one tensor at a time: long enough to see all of them.
ROUND = 8 * 6 + 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.c = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.c(self.b(self.a(x).tanh()).tanh())


def net(dtype=torch.float32):
    torch.manual_seed(3)
    return Net().to(dtype)


def data(rank, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator).to(dtype)


def train(run, me, steps, stepper=None, each=None, dtype=torch.float32):
    """Steps until an error comes, which is returned with the step in which it came."""
    for step in steps:
        run.zero_grad()
        try:
            run(data(me.rank, step, dtype)).square().mean().backward()
        except RuntimeError as error:
            return step, type(error).__name__, str(error)
        if stepper is not None:
            stepper.step()
        if each is not None:
            each(step)
    return None


# ---------------------------------------------------------------- what is noticed


def one_ulp(param):
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    param.view(kinds[param.element_size()]).view(-1)[3].bitwise_xor_(1)


def swap_rows(param):
    param.copy_(param.flip(0))


def two_that_cancel(param):
    # One up and one down by the same number of bits: the plain sum of all bits stays.
    bits = param.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[param.element_size()]).view(
        -1
    )
    bits[0] += 1
    bits[1] -= 1


EDITS = {
    "one ulp": one_ulp,
    "one sign": lambda param: param.view(-1)[2].neg_(),
    "all signs": lambda param: param.neg_(),
    "doubled": lambda param: param.mul_(2),
    "one zeroed": lambda param: param.view(-1)[1].zero_(),
    "rows swapped": swap_rows,
    "two that cancel": two_that_cancel,
    "NaN": lambda param: param.view(-1)[0].fill_(float("nan")),
}


def edited(me, dtype, names, edits):
    """Rank 1 changes a tensor in silence; every rank hears of it within a round."""
    said = {}
    for name in names:
        for edit in edits:
            run = DistributedDataParallel(net(dtype))
            # In every step, to be done sooner.
            run.reducer.exchange.alarm._every = 1
            assert train(run, me, range(7), dtype=dtype) is None
            if me.rank == 1:
                with torch.no_grad():
                    EDITS[edit](run.module.get_parameter(name))
            said[name, edit] = train(run, me, range(7, 20), dtype=dtype)
    return said


@pytest.mark.parametrize(
    ("world", "dtype"), [(3, torch.float32), (2, torch.float64), (2, torch.bfloat16)]
)
def test_a_silent_edit_on_one_rank_is_told_on_all(ranks, world, dtype):
    outcomes = ranks(world).run(edited, dtype, ["b.weight"], list(EDITS))
    for rank, said in enumerate(outcomes):
        for key, found in said.items():
            assert found is not None, key
            step, kind, text = found
            assert kind == "DriftError"
            assert f"rank {rank}:" in text
            if world == 3:
                assert "rank 1 differs from the others" in text
            assert "'b.weight', the first of 1" in text
            # All hear of it in the same step, within a round.
            assert step == outcomes[0][key][0]
            assert 7 <= step < 13
            # This tensor's last agreement, not that of another one that was looked at since.
            assert f"they last agreed in step {step - 6}." in text


def test_every_tensor_is_looked_at(ranks):
    names = [name for name, _ in Net().named_parameters()]
    for said in ranks(2).run(edited, torch.float32, names, ["one ulp"]):
        for (name, _), found in said.items():
            assert found is not None, name
            assert f"'{name}', the first of 1" in found[2]
            assert "ranks 0, 1 hold different values" in found[2]


def several(me):
    """The first of several tensors is named, and how many there are."""
    run = DistributedDataParallel(net())
    if me.rank == 2:
        with torch.no_grad():
            run.module.a.bias.add_(1.0)
            run.module.c.weight.add_(1.0)
    return train(run, me, range(2 * ROUND))


def test_the_first_of_several_is_named(ranks):
    for found in ranks(3).run(several):
        assert "rank 2 differs from the others in 'a.bias', the first of 2 that differ" in found[2]


def never_equal(me):
    """Models that are wrapped as they are, and are not equal."""
    torch.manual_seed(me.rank)
    run = DistributedDataParallel(Net(), init_sync=False)
    return train(run, me, range(2 * ROUND))


def test_ranks_that_never_agreed(ranks):
    for found in ranks(2).run(never_equal):
        assert found[1] == "DriftError"
        assert "they never agreed" in found[2]
        assert "'a.weight', the first of 6" in found[2]


def skipped_optimizer(me):
    """What happens in practice: one rank leaves out one optimizer step."""
    run = DistributedDataParallel(net())
    stepper = torch.optim.SGD(run.parameters(), lr=0.1)
    for step in range(2 * ROUND):
        run.zero_grad()
        try:
            run(data(me.rank, step)).square().mean().backward()
        except RuntimeError as error:
            return step, type(error).__name__, str(error)
        if step != 20 or me.rank != 1:
            stepper.step()
    return None


def test_a_skipped_optimizer_step_is_noticed(ranks):
    for found in ranks(3).run(skipped_optimizer):
        step, kind, text = found
        assert kind == "DriftError"
        assert "rank 1 differs" in text
        assert step > 20
        agreed = int(text.partition("they last agreed in step ")[2].partition(".")[0])
        assert agreed <= 20


def after_the_error(me):
    """The error does not repair anything: with equal weights again all go on, and nothing is stuck."""
    run = DistributedDataParallel(net())
    if me.rank == 1:
        with torch.no_grad():
            run.module.a.weight.add_(1.0)
    first = train(run, me, range(2 * ROUND))
    with torch.no_grad():
        for param in run.parameters():
            dist.broadcast(param.data, 0)
    return first, train(run, me, range(200, 200 + 2 * ROUND))


def test_after_the_error_equal_weights_go_on(ranks):
    for first, then in ranks(2).run(after_the_error):
        assert first[1] == "DriftError"
        assert then is None


# ---------------------------------------------------------------- what is no drift


class Normed(nn.Module):
    """Batch norm, a frozen part, and a counter."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(float(WIDTH)))

    def forward(self, x):
        self.calls += 1
        return self.norm(self.layer(self.frozen(x))) + self.table


def quiet(me, sync):
    """Running statistics, frozen parts, averages, rank 0's writes into buffers, and no_sync."""
    torch.manual_seed(1)
    run = DistributedDataParallel(Normed(), forward_sync_buffers=sync)
    stepper = torch.optim.AdamW(
        [param for param in run.parameters() if param.requires_grad], lr=0.01
    )
    ema = AveragedModel(run.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    only_here = copy.deepcopy(run.module) if me.rank == 0 else None

    def each(step):
        ema.update_parameters(run.module)
        if me.rank == 0:
            # rank 0 writes to a buffer of its own accord; the others get it, or it is theirs alone.
            run.module.table.add_(1.0)
            only_here.layer.weight.data.add_(1.0)
        with run.no_sync():
            run(data(me.rank, 5000 + step)).square().mean().backward()

    said = train(run, me, range(2 * ROUND), stepper, each)
    statistics = run.module.norm.running_mean.clone()
    return said, statistics, run.module.layer.weight.detach().clone(), int(run.module.calls)


@pytest.mark.parametrize("sync", [True, False])
def test_what_may_differ_is_no_drift(ranks, sync):
    outcomes = ranks(2).run(quiet, sync)
    assert [said for said, *_ in outcomes] == [None, None]
    assert_same_on_all([weight for _, _, weight, _ in outcomes])
    # Statistics did differ, so the alarm had something to be wrong about.
    assert not torch.equal(outcomes[0][1], outcomes[1][1])


def frozen_part(me):
    """A frozen part that is moved along on all ranks alike, through ``.data``, as momentum encoders are."""
    torch.manual_seed(1)
    run = DistributedDataParallel(Normed())
    stepper = torch.optim.SGD(run.module.layer.parameters(), lr=0.1)

    def each(step):
        frozen, layer = run.module.frozen, run.module.layer
        frozen.weight.data = frozen.weight.data * 0.9 + layer.weight.data * 0.1

    said = train(run, me, range(ROUND), stepper, each)
    if me.rank == 1:
        run.module.frozen.bias.data = run.module.frozen.bias.data + 1
    return said, train(run, me, range(ROUND, 3 * ROUND), stepper, each)


def test_frozen_parts_are_watched_and_may_move_together(ranks):
    for together, alone in ranks(2).run(frozen_part):
        assert together is None
        assert alone[1] == "DriftError"
        assert "'frozen.bias'" in alone[2]


def unwritten_buffer(me):
    """A constant buffer that nobody copies from rank 0 is watched until somebody writes it."""
    torch.manual_seed(1)
    run = DistributedDataParallel(Normed(), forward_sync_buffers=False)
    before = train(run, me, range(ROUND))
    if me.rank == 1:
        run.module.table.data = run.module.table.data * 2
    return before, train(run, me, range(ROUND, 3 * ROUND))


def test_constant_buffers_are_watched(ranks):
    for before, after in ranks(2).run(unwritten_buffer):
        assert before is None
        assert after[1] == "DriftError"
        assert "'table'" in after[2]


def several_ways_to_step(me):
    """Optimizers, schedules, clipping, counts, join and unused layers keep the ranks equal to the bit."""
    run = DistributedDataParallel(net())
    stepper = torch.optim.Adam(run.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(stepper, 20)
    for step in range(2 * ROUND):
        stepper.zero_grad()
        out = run(data(me.rank, step)).square()
        if step % 3 == 0:
            run.backward(out.sum(), count=out.numel() + me.rank)
        elif step % 3 == 1:
            with run.no_sync():
                out.mean().backward()
            run(data(me.rank, 900 + step)).square().mean().backward()
        else:
            torch.autograd.backward(out.mean(), inputs=list(run.module.c.parameters()))
        nn.utils.clip_grad_norm_(run.parameters(), 0.5)
        stepper.step()
        schedule.step()
    return {name: param.detach() for name, param in run.named_parameters()}


def test_ordinary_training_is_no_drift(ranks):
    assert_same_on_all(ranks(2).run(several_ways_to_step))


# ---------------------------------------------------------------- switches


def switched_off(me, how):
    """Off by the environment, by a hook (which may leave ranks apart), or because there is one rank."""
    if how == "environment":
        os.environ["RANKSTEP_DRIFT_ALARM"] = "0"
    run = DistributedDataParallel(net())
    if how == "hook":
        run.register_comm_hook(None, keep)
    if me.rank == 1 or me.world_size == 1:
        with torch.no_grad():
            run.module.a.weight.add_(1.0)
    return train(run, me, range(2 * ROUND)), run.reducer.exchange.alarm is None


def keep(_, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.parametrize(("how", "world"), [("environment", 2), ("hook", 2), ("alone", 1)])
def test_it_can_be_off(ranks, how, world):
    assert ranks(world).run(switched_off, how) == [(None, True)] * world


def test_the_switch_left_nothing_behind(ranks):
    for found, off in ranks(2).run(switched_off, "on"):
        assert found[1] == "DriftError"
        assert off is False


def no_collective(me):
    """The checksum rides with the last bucket."""
    run = DistributedDataParallel(net())
    assert train(run, me, range(1)) is None
    with noted_collectives(Hub) as called:
        assert train(run, me, range(1, 1 + ROUND)) is None
    return [each.name for each in called]


def test_it_takes_no_collective(ranks):
    assert ranks(2).run(no_collective) == [["allreduce"] * ROUND] * 2


# ---------------------------------------------------------------- the arithmetic, without ranks


def test_slices_visit_every_element():
    """Large tensors are looked at in slices: an edit anywhere is seen within a round, and only there."""
    torch.manual_seed(0)
    named = [
        ("large", torch.randn(3_000_017)),
        ("empty", torch.randn(0)),
        ("half", torch.randn(700_001).bfloat16()),
        ("small", torch.randn(5)),
    ]
    places = [
        ("large", 0),
        ("large", 262_144),
        ("large", 3_000_016),
        ("half", 524_288),
        ("half", 700_000),
        ("small", 4),
    ]
    edits = [None, *places]
    alarms = []
    for edit in edits:
        own = [(name, tensor.clone()) for name, tensor in named]
        if edit is not None:
            tensor = dict(own)[edit[0]]
            tensor.view({4: torch.int32, 2: torch.int16}[tensor.element_size()])[edit[1]] ^= 1
        alarms.append(DriftAlarm(own, [None] * len(own)))
    rounds = [[int(alarm.sample()) for _ in range(60)] for alarm in alarms]
    for edit, other in zip(places, rounds[1:], strict=True):
        differing = [
            step
            for step, pair in enumerate(zip(rounds[0], other, strict=True))
            if pair[0] != pair[1]
        ]
        # About 13 MiB in slices of 1 MiB: an edit comes round again and again, and most steps do not see it.
        assert 2 <= len(differing) <= 8, edit
        assert differing[0] < 20, edit
        gaps = {b - a for a, b in itertools.pairwise(differing)}
        assert len(gaps) == 1, edit


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.uint8,
        torch.bool,
    ],
)
def test_every_single_bit_counts(dtype):
    torch.manual_seed(0)
    base = (torch.randn(4, 3) * 3).to(dtype)
    usual = DriftAlarm([("x", base)], [None])
    usual._every = 1
    expected = int(usual.sample())
    bits = 1 if dtype is torch.bool else 8
    for place in range(base.view(torch.uint8).numel()):
        for bit in range(bits):
            other = base.clone()
            other.view(torch.uint8).view(-1)[place] ^= 1 << bit
            alarm = DriftAlarm([("x", other)], [None])
            alarm._every = 1
            assert int(alarm.sample()) != expected, (place, bit)


def test_strides_do_not_matter_where_memory_is_the_same():
    torch.manual_seed(0)
    plain = torch.randn(2, 3, 4, 4)
    last = plain.clone(memory_format=torch.channels_last)
    assert int(bit_sum(last)) == int(bit_sum(last.clone(memory_format=torch.channels_last)))
    turned = torch.randn(5, 7).t()
    assert int(bit_sum(turned)) == int(bit_sum(turned.clone()))
    gaps = torch.randn(5, 14)[:, ::2]
    assert int(bit_sum(gaps)) == int(bit_sum(gaps.contiguous()))
    assert_bitwise_equal(bit_sum(torch.zeros(0)), torch.zeros((), dtype=torch.int64))
