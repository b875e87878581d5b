"""join: ranks that run out of inputs keep the others company, as under torch's wrapper."""

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from parity_models import CNN, build, grads_of, state_of
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as Torchs

from rankstep import DistributedDataParallel as Ours
from rankstep.testing import (
    assert_bitwise_equal,
    assert_close_to,
    assert_same_on_all,
    first_difference,
)

with warnings.catch_warnings():
    # torch decorates what it imports here with something that it calls deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

SMALL = 0.002
WIDTH = 12


def rows(rank, step, size=3):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, WIDTH, dtype=torch.float64, generator=generator)
    return x, torch.randint(5, (size,), generator=generator)


def loss_of(model, rank, step):
    x, y = rows(rank, step)
    return nn.functional.cross_entropy(model(x), y)


def by_hand(model, steps_of, *, initial, first=0, lr=0.1):
    """What join stands for, in one process: a rank that has run out gives zero, or does not count."""
    world = len(steps_of)
    model = copy.deepcopy(model)
    history = []
    for step in range(max(steps_of)):
        live = [rank for rank in range(world) if step < steps_of[rank]]
        model.zero_grad()
        for rank in live:
            (loss_of(model, rank, first + step) / (world if initial else len(live))).backward()
        history.append(grads_of(model))
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(lr * param.grad)
    return history, state_of(model)


# ---------------------------------------------------------------- values


def uneven(me, steps_of, initial, cap):
    model = build("MLP 1", torch.float64)
    results = []
    for kind in (Ours, Torchs):
        run = kind(copy.deepcopy(model), bucket_cap_mb=cap)
        stepper = torch.optim.SGD(run.parameters(), lr=0.1)
        history = []
        with run.join(divide_by_initial_world_size=initial):
            for step in range(steps_of[me.rank]):
                stepper.zero_grad()
                loss_of(run, me.rank, step).backward()
                history.append(grads_of(run))
                stepper.step()
        # After the context the wrapper is as it was: an even step means what it always means.
        run.zero_grad()
        loss_of(run, me.rank, 50).backward()
        results.append((history, state_of(run), grads_of(run)))
    return results


@pytest.mark.parametrize("cap", [SMALL, None])
@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("steps_of", [(2, 5), (5, 2), (0, 3), (3, 3)], ids=str)
def test_two_ranks_have_torchs_bits(ranks, steps_of, initial, cap):
    outcomes = ranks(2).run(uneven, steps_of, initial, cap)
    history, weights = by_hand(build("MLP 1", torch.float64), steps_of, initial=initial)
    for rank, (ours, torchs) in enumerate(outcomes):
        assert len(ours[0]) == steps_of[rank]
        assert_bitwise_equal(ours, torchs)
        for found, wanted in zip(ours[0], history, strict=False):
            assert_close_to(found, wanted, rel=1e-12)
        assert_close_to(ours[1], weights, rel=1e-12)
    assert_same_on_all([(ours[1], ours[2]) for ours, _ in outcomes])


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("steps_of", [(1, 4, 3), (3, 0, 0)], ids=str)
def test_three_ranks_are_what_one_process_does(ranks, steps_of, initial):
    outcomes = ranks(3).run(uneven, steps_of, initial, SMALL)
    history, weights = by_hand(build("MLP 1", torch.float64), steps_of, initial=initial)
    for rank, (ours, torchs) in enumerate(outcomes):
        for mine, theirs, wanted in zip(ours[0], torchs[0], history, strict=False):
            assert_close_to(mine, wanted, rel=1e-12)
            assert_close_to(mine, theirs, rel=1e-12)
        assert len(ours[0]) == steps_of[rank]
        assert_close_to(ours[1], weights, rel=1e-12)
    assert_same_on_all([(ours[1], ours[2]) for ours, _ in outcomes])
    # The twin: the two ways to divide are not the same.
    other, _ = by_hand(build("MLP 1", torch.float64), steps_of, initial=not initial)
    assert first_difference(other, history) is not None


def buffers(me, sync):
    """Running statistics: whose count while ranks run out, and whose are left at the end."""
    torch.manual_seed(11)
    model = CNN(batch_norm=True)
    results = []
    for kind in (Ours, Torchs):
        run = kind(copy.deepcopy(model), forward_sync_buffers=sync)
        stepper = torch.optim.SGD(run.parameters(), lr=0.05)
        grads = []
        with run.join():
            for step in range((2, 4)[me.rank]):
                stepper.zero_grad()
                generator = torch.Generator().manual_seed(10 * step + me.rank)
                x = torch.randn(4, 1, 8, 8, generator=generator)
                run(x).square().mean().backward()
                grads.append(grads_of(run))
                stepper.step()
        results.append((grads, dict(run.module.state_dict())))
    return results


@pytest.mark.parametrize("sync", [True, False])
def test_buffers_follow_a_rank_that_is_still_there(ranks, sync):
    outcomes = ranks(2).run(buffers, sync)
    for ours, torchs in outcomes:
        assert_bitwise_equal(ours[0], torchs[0])
        weights = {n: t for n, t in ours[1].items() if "running" not in n and "tracked" not in n}
        assert_bitwise_equal(weights, {n: torchs[1][n] for n in weights})
    states = [ours[1] for ours, _ in outcomes]
    if sync:
        # As after every backward of ours they are equal everywhere; torch's were last equal before a forward.
        assert_same_on_all(states)
        assert int(states[0]["norm1.num_batches_tracked"]) == 4
    else:
        assert [int(state["norm1.num_batches_tracked"]) for state in states] == [2, 4]


def windows(me, steps_of):
    """no_sync inside join: two micro-batches to a step."""
    results = []
    for kind in (Ours, Torchs):
        run = kind(build("MLP 1", torch.float64), bucket_cap_mb=SMALL)
        stepper = torch.optim.SGD(run.parameters(), lr=0.1)
        with run.join():
            for step in range(steps_of[me.rank]):
                quiet = step % 2 == 0
                with run.no_sync() if quiet else contextlib.nullcontext():
                    loss_of(run, me.rank, step).backward()
                if not quiet:
                    stepper.step()
                    stepper.zero_grad()
        results.append(state_of(run))
    return results


@pytest.mark.parametrize("steps_of", [(2, 6), (6, 4)], ids=str)
def test_no_sync_inside_join(ranks, steps_of):
    outcomes = ranks(2).run(windows, steps_of)
    for ours, torchs in outcomes:
        assert_bitwise_equal(ours, torchs)
    assert_same_on_all([ours for ours, _ in outcomes])


class Chooses(nn.Module):
    """Two heads, of which the caller chooses one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.stem = nn.Linear(WIDTH, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 5) for _ in range(2))

    def forward(self, x, head):
        return self.heads[head](self.stem(x).tanh())


def heads(me):
    results = []
    for kind in (Ours, Torchs):
        run = kind(Chooses().double(), find_unused_parameters=True, bucket_cap_mb=0.0001)
        stepper = torch.optim.SGD(run.parameters(), lr=0.1)
        history = []
        with run.join():
            for step in range((1, 4)[me.rank]):
                stepper.zero_grad()
                x, y = rows(me.rank, step)
                nn.functional.cross_entropy(run(x, (me.rank + step) % 2), y).backward()
                history.append(grads_of(run))
                stepper.step()
        results.append((history, state_of(run)))
    return results


def test_parameters_that_only_some_use_while_others_have_run_out(ranks):
    outcomes = ranks(2).run(heads)
    for ours, torchs in outcomes:
        for mine, theirs in zip(ours[0], torchs[0], strict=True):
            # What no rank used stays None here; torch makes zeros of it once a rank has run out.
            for name in [name for name, grad in mine.items() if grad is None]:
                assert not theirs[name].any()
                theirs[name] = None
        assert_bitwise_equal(ours, torchs)
    unused = [[n for n, grad in grads.items() if grad is None] for grads in outcomes[1][0][0]]
    # In the first step each rank used one head; later one rank alone chose.
    assert unused == [
        [],
        ["heads.1.weight", "heads.1.bias"],
        ["heads.0.weight", "heads.0.bias"],
        ["heads.1.weight", "heads.1.bias"],
    ]


def with_hook(me):
    """A communication hook is called by the ranks that have run out, too."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    results = []
    for kind in (Ours, Torchs):
        calls = []

        def hook(state, bucket, calls=calls):
            calls.append(bucket.index())
            return allreduce_hook(state, bucket)

        run = kind(build("MLP 1", torch.float64), bucket_cap_mb=None)
        run.register_comm_hook(None, hook)
        stepper = torch.optim.SGD(run.parameters(), lr=0.1)
        with run.join():
            for step in range((1, 3)[me.rank]):
                stepper.zero_grad()
                loss_of(run, me.rank, step).backward()
                stepper.step()
        results.append((state_of(run), calls))
    return results


def test_a_comm_hook_under_join(ranks):
    outcomes = ranks(2).run(with_hook)
    for ours, torchs in outcomes:
        assert_bitwise_equal(ours, torchs)
        assert ours[1] == [0, 0, 0]
    assert_same_on_all([ours[0] for ours, _ in outcomes])


def weighted(me):
    """A count under join: ranks that have run out have none."""
    run = Ours(build("MLP 1", torch.float64), bucket_cap_mb=SMALL)
    history = []
    with run.join():
        for step in range((1, 3)[me.rank]):
            run.zero_grad()
            x, y = rows(me.rank, step, size=2 + 3 * me.rank)
            run.backward(nn.functional.cross_entropy(run(x), y, reduction="sum"), count=len(x))
            history.append(grads_of(run))
    return history


def test_counts_under_join(ranks):
    outcomes = ranks(2).run(weighted)
    for step in range(3):
        model = build("MLP 1", torch.float64)
        parts = [rows(r, step, size=2 + 3 * r) for r in range(2) if step < (1, 3)[r]]
        x, y = (torch.cat([part[i] for part in parts]) for i in range(2))
        nn.functional.cross_entropy(model(x), y).backward()
        for history in outcomes:
            if step < len(history):
                assert_close_to(history[step], grads_of(model), rel=1e-12)


# ---------------------------------------------------------------- options and other joinables


def early(me):
    """throw_on_early_termination, with every wrapper, and a step on all ranks afterwards."""
    said = []
    for kind in (Ours, Torchs):
        run = kind(build("MLP 1", torch.float64))
        steps = 0
        try:
            with run.join(throw_on_early_termination=True):
                for step in range((1, 3)[me.rank]):
                    run.zero_grad()
                    loss_of(run, me.rank, step).backward()
                    steps += 1
        except RuntimeError as error:
            said.append((type(error).__name__, str(error), steps))
        if kind is Ours:
            run.zero_grad()
            loss_of(run, me.rank, 7).backward()
            said.append(grads_of(run))
    return said


def test_throwing_on_early_termination(ranks):
    for rank, (ours, grads, torchs) in enumerate(ranks(2).run(early)):
        assert ours == torchs
        assert ("exhausted all inputs" if rank == 0 else "Throwing across all ranks") in ours[1]
        model = build("MLP 1", torch.float64)
        for peer in range(2):
            (loss_of(model, peer, 7) / 2).backward()
        assert_close_to(grads, grads_of(model), rel=1e-12)


def disabled(me):
    run = Ours(build("MLP 1", torch.float64), bucket_cap_mb=SMALL)
    plain = Ours(build("MLP 1", torch.float64), bucket_cap_mb=SMALL)
    for step in range(2):
        run.zero_grad()
        plain.zero_grad()
        with run.join(enable=False):
            loss_of(run, me.rank, step).backward()
        loss_of(plain, me.rank, step).backward()
    return grads_of(run), grads_of(plain)


def test_a_context_that_is_off_changes_nothing(ranks):
    for inside, outside in ranks(2).run(disabled):
        assert_bitwise_equal(inside, outside)


def an_error_inside(me):
    """An exception of the user's leaves the context at once, on every rank that has it."""
    run = Ours(build("MLP 1", torch.float64))
    with contextlib.suppress(ZeroDivisionError), run.join():
        loss_of(run, me.rank, 0).backward()
        1 / 0  # noqa: B018 (as a mistake of the user's would)
    run.zero_grad()
    loss_of(run, me.rank, 1).backward()
    return grads_of(run)


def test_an_exception_inside_ends_the_context(ranks):
    assert_same_on_all(ranks(2).run(an_error_inside))


def two_wrappers(me, initial):
    """torch's Join with two wrappers, each with a loss of its own, beside torch's wrappers."""
    results = []
    for kind in (Ours, Torchs):
        runs = [
            kind(build(name, torch.float64), bucket_cap_mb=SMALL) for name in ("MLP 1", "MLP 2")
        ]
        steppers = [torch.optim.SGD(run.parameters(), lr=0.1) for run in runs]
        with Join(runs, divide_by_initial_world_size=initial):
            for step in range((1, 4)[me.rank]):
                for number, (run, stepper) in enumerate(zip(runs, steppers, strict=True)):
                    stepper.zero_grad()
                    loss_of(run, me.rank, 20 * number + step).backward()
                    stepper.step()
        results.append([state_of(run) for run in runs])
    return results


@pytest.mark.parametrize("initial", [True, False])
def test_join_with_two_wrappers(ranks, initial):
    outcomes = ranks(2).run(two_wrappers, initial)
    for ours, torchs in outcomes:
        for number, name in enumerate(("MLP 1", "MLP 2")):
            # torch divides the second wrapper's gradients by all ranks in either case.
            if initial or number == 0:
                assert_bitwise_equal(ours[number], torchs[number])
            model = build(name, torch.float64)
            _, weights = by_hand(model, (1, 4), initial=initial, first=20 * number)
            assert_close_to(ours[number], weights, rel=1e-12)
    assert_same_on_all([ours for ours, _ in outcomes])


def with_zero(me):
    """torch's Join with a wrapper and an optimizer whose state is dealt to the ranks, and one process."""
    # The rank that has run out goes on to step its share, with the gradients that it finds in the buckets.
    run = Ours(build("MLP 1", torch.float64), bucket_cap_mb=SMALL, gradient_as_bucket_view=True)
    stepper = ZeroRedundancyOptimizer(run.parameters(), torch.optim.Adam, lr=0.01)
    with Join([run, stepper]):
        for step in range((1, 4)[me.rank]):
            stepper.zero_grad()
            loss_of(run, me.rank, step).backward()
            stepper.step()
    # torch's own wrapper leaves the share of the rank that ran out without new gradients, so it is no oracle.
    model = build("MLP 1", torch.float64)
    stepper = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(4):
        stepper.zero_grad()
        for rank in range(2):
            if step < (1, 4)[rank]:
                (loss_of(model, rank, step) / 2).backward()
        stepper.step()
    assert_close_to(state_of(run), state_of(model), rel=1e-12)
    return state_of(run)


def test_join_with_a_sharded_optimizer(ranks):
    assert_same_on_all(ranks(2).run(with_zero))


def epochs(me, optimizer):
    """Several epochs, each in a context of its own, with an optimizer that remembers."""
    run = Ours(build("MLP 1", torch.float64))
    stepper = {
        "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
        "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    }[optimizer](run.parameters())
    for epoch in range(3):
        with run.join():
            for step in range((4, 6)[me.rank]):
                stepper.zero_grad()
                loss_of(run, me.rank, 10 * epoch + step).backward()
                stepper.step()
    return state_of(run)


def test_several_epochs(ranks):
    assert_same_on_all(ranks(2).run(epochs, "SGD"))


def test_an_optimizer_with_a_memory_of_its_own_is_noticed(ranks):
    """The rank that ran out missed steps of the momentum, so from then on the ranks differ: never in silence."""
    for outcome in ranks(2).outcomes(epochs, "momentum", reusable=True, timeout_s=30):
        assert outcome.error_type == "DriftError"
        assert "'layers.0.weight'" in outcome.error


def as_a_joinable(me):
    run = Ours(build("MLP 1"))
    hook = run.join_hook(divide_by_initial_world_size=True)
    return (
        str(run.join_device),
        run.join_process_group is dist.group.WORLD,
        all(callable(getattr(hook, name)) for name in ("main_hook", "post_hook")),
        run._join_config.enable,
    )


def test_it_is_a_joinable(ranks):
    assert ranks(2).run(as_a_joinable) == [("cpu", True, True, False)] * 2
