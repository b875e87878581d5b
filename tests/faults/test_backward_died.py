"""A backward that dies on some ranks: the others are told in the same step, and all go on together."""

from __future__ import annotations

import copy
import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rankstep import DistributedDataParallel
from rankstep.errors import AbandonedBackwardError, CommunicationError, SyncError
from rankstep.testing import RankPool, Status, assert_bitwise_equal, assert_same_on_all
from trip import Trip

TINY = 0.0001
WIDTH = 4
STEPS = 6


class Stop(Exception):  # noqa: N818 (thrown on purpose)
    pass


def stop():
    raise Stop("on purpose")


class Net(nn.Module):
    """Three layers with a trap below each; backward meets that of the top layer first."""

    def __init__(self, buffers=False):
        super().__init__()
        self.low = nn.Linear(WIDTH, WIDTH)
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.top = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if buffers else nn.Identity()

    def forward(self, x, where=None, action=None):
        # So that backward also goes through the trap below the lowest layer.
        x = x.detach().requires_grad_() if not x.requires_grad else x
        for name in ("low", "mid", "top"):
            x = getattr(self, name)(Trip.apply(x, action if name == where else None)).tanh()
        return self.norm(x)


def net(*args):
    torch.manual_seed(4)
    return Net(*args).double()


def data(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)


def mean_of(model, world, step):
    """What one process gets for this step."""
    total = {}
    for rank in range(world):
        plain = copy.deepcopy(model)
        plain(data(rank, step)).square().sum().backward()
        for name, param in plain.named_parameters():
            part = param.grad / world
            total[name] = total[name] + part if name in total else part
    return total


def describe(error):
    # The user's own exception must come with nothing of ours around it.
    inside = error.__cause__ or error.__context__
    return type(error).__name__, str(error) + (f" (from {inside!r})" if inside else "")


def train(me, deaths, where="mid", cap=TINY, buffers=False, to_none=True):
    """Six steps with SGD; ``deaths`` maps a step to the ranks that die in it. Returns what each step raised."""
    wrapped = DistributedDataParallel(net(buffers), bucket_cap_mb=cap)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    told = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=to_none)
        action = stop if me.rank in deaths.get(step, ()) else None
        try:
            wrapped(data(me.rank, step), where, action).square().sum().backward()
        except (Stop, SyncError) as error:
            told.append(describe(error))
        else:
            told.append(None)
            assert wrapped.reducer.reductions == step + 1
            if not buffers:
                got = {name: param.grad for name, param in wrapped.module.named_parameters()}
                assert_bitwise_equal(got, mean_of(wrapped.module, me.world_size, step))
            optimizer.step()
    return told, [param.detach().clone() for param in wrapped.parameters()]


def check(results, deaths):
    """Who died sees its own exception; everyone else the same step's AbandonedBackwardError; nobody anything else."""
    world = len(results)
    assert_same_on_all([weights for _, weights in results])
    for rank, (told, _) in enumerate(results):
        for step in range(STEPS):
            dead = deaths.get(step, ())
            if rank in dead:
                assert told[step] == ("Stop", "on purpose")
            elif dead:
                kind, text = told[step]
                assert kind == AbandonedBackwardError.__name__
                named = ("rank " if len(dead) == 1 else "ranks ") + ", ".join(map(str, dead))
                assert f"{named} left backward" in text
                assert f"step {step} " in text
                assert text.startswith(f"rank {rank}: ")
            else:
                assert told[step] is None, (rank, step, told[step])
    assert any(len(dead) < world for dead in deaths.values()) or all(
        kind in (None, ("Stop", "on purpose")) for told, _ in results for kind in told
    )


ONE_DEATH = {
    "rank 0 in the first step": {0: (0,)},
    "rank 1 in the first step": {0: (1,)},
    "all in the first step": {0: (0, 1)},
    "rank 0 in the second step": {1: (0,)},
    "rank 1 later": {3: (1,)},
    "all later": {3: (0, 1)},
    "one after the other": {0: (1,), 1: (0,), 3: (0, 1), 4: (1,)},
}


@pytest.mark.parametrize("cap", [TINY, None], ids=["many buckets", "one bucket"])
@pytest.mark.parametrize("deaths", ONE_DEATH.values(), ids=ONE_DEATH)
def test_two_ranks(ranks, deaths, cap):
    check(ranks(2).run(train, deaths, cap=cap), deaths)


THREE = {
    "rank 1 in the first step": {0: (1,)},
    "rank 0 and 2 in the first step": {0: (0, 2)},
    "rank 2 later": {2: (2,)},
    "rank 0 and 1 later": {2: (0, 1)},
    "all in the first step, then one": {0: (0, 1, 2), 1: (0,)},
}


def train_three(me, deaths):
    """As `train`, but equal to one process only within rounding, which is not looked at here."""
    wrapped = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    told = []
    for step in range(STEPS):
        wrapped.zero_grad()
        action = stop if me.rank in deaths.get(step, ()) else None
        try:
            wrapped(data(me.rank, step), "mid", action).square().sum().backward()
        except (Stop, SyncError) as error:
            told.append(describe(error))
        else:
            told.append(None)
    return told, [param.grad.clone() for param in wrapped.parameters()]


@pytest.mark.parametrize("deaths", THREE.values(), ids=THREE)
def test_three_ranks(ranks, deaths):
    check(ranks(3).run(train_three, deaths), deaths)


@pytest.mark.parametrize("where", ["low", "mid"])
def test_wherever_it_dies(ranks, where):
    # Below the lowest layer everything but its own gradients has left already.
    deaths = {0: (1,), 2: (0,), 4: (1,)}
    check(ranks(2).run(train, deaths, where), deaths)


def test_buffers_do_not_get_out_of_step(ranks):
    deaths = {0: (1,), 2: (0,), 4: (0, 1)}
    check(ranks(2).run(train, deaths, buffers=True), deaths)


def test_gradients_that_are_zeroed_in_place(ranks):
    deaths = {1: (1,), 3: (0,)}
    check(ranks(2).run(train, deaths, to_none=False), deaths)


def nobody_dies(me):
    return train(me, {})


def test_without_a_death_nothing_is_raised(ranks):
    check(ranks(2).run(nobody_dies), {})


# ---------------------------------------------------------------- other ways to die


def dies_in(me, way):
    """One rank dies in step 1 in some other way; both then take an ordinary step."""
    model = net()
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=TINY)
    inner = wrapped.module
    told = []
    for step in range(4):
        wrapped.zero_grad()
        dies = me.rank == 1 and step == 1
        handles = []
        x = data(me.rank, step)
        try:
            if dies and way == "a hook of a tensor":
                handles.append(inner.low.weight.register_hook(lambda grad: stop()))
            if dies and way == "a hook after accumulation":
                param = inner.low.weight
                handles.append(param.register_post_accumulate_grad_hook(lambda param: stop()))
            if way == "a checkpoint":
                run = checkpoint(
                    wrapped, x.requires_grad_(), "mid", stop if dies else None, use_reentrant=True
                )
            elif dies and way == "between two nested backwards":
                # The inner backward has ended well; the outer one dies below it.
                run = checkpoint(wrapped, Trip.apply(x.requires_grad_(), stop), use_reentrant=True)
            elif way == "between two nested backwards":
                run = checkpoint(wrapped, x.requires_grad_(), use_reentrant=True)
            else:
                run = wrapped(x)
            run.square().sum().backward()
        except (Stop, SyncError) as error:
            told.append(type(error).__name__)
        else:
            told.append(None)
            got = {name: param.grad for name, param in inner.named_parameters()}
            assert_bitwise_equal(got, mean_of(model, me.world_size, step))
        for handle in handles:
            handle.remove()
    return told


WAYS = [
    "a hook of a tensor",
    "a hook after accumulation",
    "a checkpoint",
    "between two nested backwards",
]


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_to_die(ranks, way):
    zeroth, first = ranks(2).run(dies_in, way)
    assert first == [None, "Stop", None, None]
    assert zeroth == [None, "AbandonedBackwardError", None, None]


def ends_after_dying(me):
    """The rank that died does nothing more with the wrapper, as a program that ends; the other is not left waiting."""
    wrapped = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    for step in range(3):
        action = stop if (me.rank, step) == (1, 2) else None
        try:
            wrapped(data(me.rank, step), "mid", action).sum().backward()
        except (Stop, SyncError) as error:
            return step, type(error).__name__
    return None


def test_a_rank_that_died_need_not_do_anything_more(ranks):
    assert ranks(2).run(ends_after_dying) == [(2, "AbandonedBackwardError"), (2, "Stop")]


def dies_before_any_gradient(me):
    """No hook has fired, so nobody knows of the death until the next step, which names it as a skipped one."""
    wrapped = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    told = []
    for step in range(4):
        wrapped.zero_grad()
        out = wrapped(data(me.rank, step)).square().sum()
        if (me.rank, step) == (1, 1):
            out = Trip.apply(out, stop)
        try:
            out.backward()
        except (Stop, SyncError) as error:
            told.append((step, type(error).__name__, str(error)))
            if isinstance(error, SyncError):
                break
    return told


def test_a_death_before_the_first_gradient_is_told_in_the_next_step(ranks):
    zeroth, first = ranks(2).run(dies_before_any_gradient)
    # Rank 1's third step met rank 0's second one.
    assert first[0][:2] == (1, "Stop")
    for told in (zeroth[0], first[1]):
        assert told[1] == "RankSkewError"
        assert "rank 1" in told[2]


# ---------------------------------------------------------------- processes that end


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def killed(me, dead, step_of_death, between):
    wrapped = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    for step in range(4):
        dies = me.rank == dead and step == step_of_death
        if dies and between:
            kill()
        try:
            wrapped(data(me.rank, step), "mid", kill if dies else None).sum().backward()
        except CommunicationError as error:
            again = []
            for use in (
                lambda: wrapped(data(me.rank, 9)),
                lambda: wrapped.module(data(me.rank, 9)).sum().backward(),
            ):
                # From now on every use repeats why, at once.
                try:
                    use()
                except SyncError as second:
                    again.append(type(second).__name__)
            return step, str(error), again
    return None


@pytest.mark.parametrize(
    ("world", "dead", "step", "between"),
    [(2, 1, 0, False), (2, 0, 2, False), (3, 1, 2, True), (3, 2, 0, False)],
)
def test_a_killed_rank_is_an_error_on_the_others_and_no_hang(world, dead, step, between):
    # In a pool of its own: it does not outlive the death. A survivor that waits for another survivor, which has raised
    # and is not ended by that as a program would be, is released by the group's own timeout.
    with RankPool(world, timeout_s=30.0, group_timeout_s=8.0) as pool:
        outcomes = pool.outcomes(killed, dead, step, between)
    for rank, outcome in enumerate(outcomes):
        if rank == dead:
            assert outcome.status is Status.DIED
            continue
        assert outcome.status is Status.OK, str(outcome)
        failed_in, text, again = outcome.value
        assert failed_in == step
        assert f"rank {rank}: " in text
        # In the first step a rank may still get rank 0's order before it notices.
        assert f"step {step} " in text or (step == 0 and "first backward" in text)
        # Who is missing is known from who came, not from the connection that broke.
        assert f"rank {dead} did not come" in text
        assert again == ["CommunicationError"] * 2
