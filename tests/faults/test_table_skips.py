"""The fault table, row 10: one rank leaves out a step. Told where it can be known, and nothing is said where all is well."""

from __future__ import annotations

import contextlib
import queue
import threading
import warnings
from itertools import count, islice

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader, TensorDataset

from rankstep import DistributedDataParallel, DistributedSampler, together
from rankstep.buckets.drift import DriftAlarm
from rankstep.buckets.trailer import Mode, Row
from rankstep.errors import DriftError, SkippedBatchWarning

WIDTH = 4
ODD, AT, STEPS = 1, 3, 9


def wrapped(layers=2):
    torch.manual_seed(4)
    return DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))))


def loader(me, batches=STEPS, *, pad="repeat", samples=None, **options):
    """This rank's loader: ``batches`` of two samples each."""
    size = 2 * batches * me.world_size if samples is None else samples
    rows = TensorDataset(torch.arange(float(size)).view(-1, 1).expand(-1, WIDTH) / size)
    sampler = DistributedSampler(rows, me.world_size, me.rank, shuffle=False, pad=pad)
    return DataLoader(rows, batch_size=2, sampler=sampler, **options)


def update(model):
    with torch.no_grad():
        for param in model.parameters():
            param.sub_(param.grad, alpha=0.01)


def step(model, batch, optimizer=None):
    model.zero_grad()
    model(batch).square().mean().backward()
    update(model) if optimizer is None else optimizer.step()


@contextlib.contextmanager
def heard(said):
    """Keep the warnings about batches; everything else stays an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error")
        warnings.simplefilter("always", SkippedBatchWarning)
        yield
    said += [str(warning.message) for warning in caught]


# ---------------------------------------------------------------- told


def leaves_one_out(me, workers):
    """`continue` on a bad batch; the others would wait for the last step, so nobody takes it."""
    model, said = wrapped(), []
    options = {"num_workers": workers, "prefetch_factor": 2} if workers else {}
    batches = loader(me, **options)
    with heard(said):
        taken = 0
        for number, (batch,) in enumerate(batches):
            if (me.rank, number) == (ODD, AT):
                continue
            if taken == STEPS - 1:
                break
            step(model, batch)
            taken += 1
    weights = [param.detach().clone() for param in model.parameters()]
    return said, weights


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_left_out_is_told_by_every_rank_once(ranks, workers):
    results = ranks(3).run(leaves_one_out, workers)
    for rank, (said, weights) in enumerate(results):
        (text,) = said
        assert text.startswith(f"rank {rank}: the ranks have drawn different numbers of batches")
        assert f"for step {AT} (counted from 0): rank {ODD} drew 2; the others 1." in text
        # It is told, not repaired: the mean is one of three batches, and the replicas stay equal.
        assert all(torch.equal(a, b) for a, b in zip(weights, results[0][1], strict=True))


def steps_alone(me, layers):
    """One rank updates its weights in a step whose backward it leaves out."""
    model = wrapped(layers)
    for number in range(8 * 2 * layers + 8):
        x = torch.full((2, WIDTH), float(number + me.rank))
        try:
            if (me.rank, number) == (ODD, AT):
                update(model)
                continue
            step(model, x)
        except DriftError as error:
            return model.reducer.reductions - 1, str(error)
    return None


def edits_alone(me, layers):
    """The same, past autograd's counters: only the rotation of the checksum finds it."""
    model = wrapped(layers)
    for number in range(8 * 2 * layers + 8):
        if (me.rank, number) == (ODD, AT):
            for param in model.parameters():
                param.data.sub_(0.01)
        try:
            step(model, torch.full((2, WIDTH), float(number + me.rank)))
        except DriftError as error:
            return model.reducer.reductions - 1, str(error)
    return None


def test_an_update_of_one_rank_alone_is_found_in_the_next_step(ranks):
    for rank, (found_in, text) in enumerate(ranks(3).run(steps_alone, 2)):
        assert text.startswith(f"rank {rank}: the ranks' weights have drifted apart")
        assert f"rank {ODD} differs from the others" in text
        assert f"reduction and that of step {AT} the weights were not written equally" in text
        assert f": rank {ODD}: 2; the others: 1." in text
        # Reduction 3 shows the uneven count, and the one after it the weights.
        assert found_in == AT + 1
    for found_in, text in ranks(3).run(edits_alone, 2):
        assert "written equally" not in text
        assert found_in == 7


# ---------------------------------------------------------------- not told


def evaluates(me):
    """Rank 0 looks at its loss on a part of its own, through a sampler that deals to all ranks."""
    model = wrapped()
    held = iter(loader(me))
    for number, (batch,) in enumerate(loader(me)):
        step(model, batch)
        if me.rank == 0 and number % 3 == 2:
            with torch.no_grad():
                for (other,) in islice(held, 2):
                    model.module(other)


def reads_ahead(me):
    """Every rank has another number of workers, which fetch another number of batches ahead."""
    options = {"num_workers": me.rank, "prefetch_factor": 1 + me.rank} if me.rank else {}
    model = wrapped()
    for (batch,) in loader(me, **options):
        step(model, batch)


def fetched(me, batches):
    """Batches from a thread of the user's, which gets one ahead of the others' on one rank."""
    wanted, ahead = queue.Queue(), queue.Queue()

    def draw():
        while times := wanted.get():
            for _ in range(times):
                ahead.put(next(batches))
            wanted.task_done()

    thread = threading.Thread(target=draw)
    thread.start()
    for number in range(STEPS - 1):
        wanted.put(2 if (me.rank, number) == (ODD, AT) else 1)
        wanted.join()
        yield ahead.get()
    wanted.put(0)
    thread.join()


def draws_in_a_thread(me):
    model = wrapped()
    for (batch,) in fetched(me, iter(loader(me))):
        step(model, batch)


def draws_on_in_a_thread(me):
    """The workers have been fed from this thread at first."""
    model = wrapped()
    for (batch,) in fetched(me, iter(loader(me, num_workers=1))):
        step(model, batch)


def accumulates(me):
    model = wrapped()
    for number, (batch,) in enumerate(loader(me, 12)):
        with contextlib.ExitStack() as stack:
            if number % 3 != 2:
                stack.enter_context(model.no_sync())
            model(batch).sum().backward()
        if number % 3 == 2:
            update(model)
            model.zero_grad()


def accumulates_unevenly(me):
    """Rank 1 has twice as many micro-batches in each step, which counts allow."""
    model = wrapped()
    each = 2 if me.rank == ODD else 1
    batches = iter(loader(me, 6 * each, samples=2 * 6 * each * me.world_size))
    for _ in range(6):
        for _ in range(each - 1):
            (batch,) = next(batches)
            with model.no_sync():
                model.backward(model(batch).sum(), count=2)
        (batch,) = next(batches)
        model.backward(model(batch).sum(), count=2)
        update(model)
        model.zero_grad()


def begins_anew(me):
    """Shares of unlike lengths, taken over and over: one rank begins anew a step before the others."""
    model = wrapped()
    again = (batch for _ in count() for (batch,) in loader(me, samples=19, pad="none"))
    for batch in islice(again, 4 * STEPS):
        step(model, batch)


def takes_two(me):
    """Two loaders in each step, the shorter one begun anew when it is at its end."""
    model = wrapped()
    short = (batch for _ in count() for (batch,) in loader(me, samples=13, pad="none"))
    for (batch,), other in zip(loader(me), short, strict=False):
        step(model, batch + other.mean())


def peeks(me):
    model = wrapped()
    batches = loader(me)
    for number, (batch,) in enumerate(batches):
        step(model, batch)
        if (me.rank, number) == (ODD, AT):
            next(iter(batches))


def joins(me):
    model = wrapped()
    with Join([model]):
        for (batch,) in loader(me, STEPS if me.rank else AT, samples=None if me.rank else 40):
            step(model, batch)
    for (batch,) in loader(me):
        step(model, batch)


def goes_together(me):
    model = wrapped()
    mine = loader(me) if me.rank else loader(me, AT)
    for (batch,) in together(mine, model):
        step(model, batch)


def skips_infinities(me):
    """A GradScaler leaves a step out on all ranks."""
    model = wrapped()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, (batch,) in enumerate(loader(me)):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        if (me.rank, number) == (ODD, AT):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def has_two_optimizers(me):
    """One of them steps in every third step only."""
    model = wrapped()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in model.module]
    for number, (batch,) in enumerate(loader(me)):
        model.zero_grad()
        model(batch).square().mean().backward()
        optimizers[1].step()
        if number % 3 == 0:
            optimizers[0].step()


def swaps_weights(me):
    """Rank 0 evaluates with averaged weights, and puts the others back."""
    model = wrapped()
    for (batch,) in loader(me):
        step(model, batch)
        if me.rank == 0:
            kept = [param.detach().clone() for param in model.parameters()]
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.5)
                model.module(batch)
                for param, value in zip(model.parameters(), kept, strict=True):
                    param.copy_(value)


QUIET = (
    evaluates,
    reads_ahead,
    draws_in_a_thread,
    draws_on_in_a_thread,
    accumulates,
    accumulates_unevenly,
    begins_anew,
    takes_two,
    peeks,
    joins,
    goes_together,
    skips_infinities,
    has_two_optimizers,
    swaps_weights,
)


def quietly(me, run):
    said = []
    with heard(said):
        run(me)
    return said


@pytest.mark.parametrize("run", QUIET, ids=lambda run: run.__name__)
def test_what_ranks_may_do_alone_is_not_told(ranks, run):
    assert ranks(3).run(quietly, run) == [[], [], []]


# ---------------------------------------------------------------- the arithmetic of the suspicion


def written(*counts, mode=Mode.SYNC):
    return [Row(mode=mode, writes=count) for count in counts]


def alarm():
    net = nn.Linear(WIDTH, WIDTH)
    return net, DriftAlarm(list(net.named_parameters()), [None, None])


def test_all_weights_are_looked_at_once_the_counts_differ():
    net, watching = alarm()
    assert watching.sample() is None
    watching.suspect(written(1, 1, 1), 0)
    assert watching.sample() is None
    watching.suspect(written(1, 2, 1), 1)
    before = watching.sample()
    assert before is not None
    # All of them: a change of any is seen.
    for param in net.parameters():
        watching = alarm()[1]
        watching._tensors = list(net.parameters())
        param.data[..., -1] += 1.0
        watching.suspect(written(1, 2, 1), 1)
        after = watching.sample()
        assert after != before
        before = after


def test_a_suspicion_that_comes_to_nothing_is_looked_into_ever_less_often():
    _, watching = alarm()
    looked = []
    for step_number in range(40):
        watching._steps = 0
        if watching.sample() is not None:
            looked.append(step_number)
        watching.suspect(written(1, 3, 1), step_number)
    assert looked == [1, 3, 7, 15, 31]


def test_ranks_that_have_run_out_under_join_write_nothing():
    _, watching = alarm()
    watching.suspect([*written(1, 1), *written(0, mode=Mode.JOINED)], 0)
    assert watching.sample() is None


def test_writes_are_counted_by_the_first_trained_parameter():
    net = nn.Linear(WIDTH, WIDTH)
    net.weight.requires_grad_(False)
    watching = DriftAlarm(list(net.named_parameters()), [None, None])
    assert watching.writes() == 0
    with torch.no_grad():
        net.weight.add_(1.0)
        assert watching.writes() == 0
        net.bias.add_(1.0)
        assert watching.writes() == 1
        for _ in range(100):
            net.bias.add_(1.0)
    assert watching.writes() == 31
    assert watching.writes() == 0
