"""together: ranks with different numbers of batches take the same steps, with the gradients of one process."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import os
import time
import warnings
from collections import UserDict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, TensorDataset

from rankstep import DistributedDataParallel
from rankstep.collectives import lookout
from rankstep.errors import CommunicationError, DataError, ModelError, RankSkewError
from rankstep.parallel.batches import cut
from rankstep.parallel.sync_batchnorm import SyncBatchNorm
from rankstep.parallel.together import together
from rankstep.testing import assert_close_to

# About 100 bytes: every weight below is a bucket of its own, so buckets leave while backward runs.
TINY = 0.0001
EXACT = 1e-12
WIDTH = 3
# Samples in each batch of each rank, epoch by epoch: one rank never has any, and another lasts longest each time.
UNEVEN = (((2,), (3, 2, 4, 2), ()), ((3, 2, 2), (), (2, 3)))


def batches_of(rank, epoch=0, sizes=UNEVEN):
    """One rank's batches: inputs, targets and names."""
    generator = torch.Generator().manual_seed(100 * epoch + rank)
    made = []
    for number, size in enumerate(sizes[epoch][rank]):
        x = torch.randn(size, WIDTH, dtype=torch.float64, generator=generator)
        y = torch.randn(size, 1, dtype=torch.float64, generator=generator)
        made.append([x, y, [f"{rank}.{number}.{i}" for i in range(size)]])
    return made


def steps_of(epoch, sizes=UNEVEN):
    """For each step, what the ranks that still have data hold."""
    every = [batches_of(rank, epoch, sizes) for rank in range(len(sizes[epoch]))]
    rows = itertools.zip_longest(*every)
    return [[batch for batch in row if batch is not None] for row in rows]


class Loader:
    """A rank's batches with something like a DataLoader's dataset to look at."""

    def __init__(self, batches):
        self.batches = batches
        self.dataset = [(torch.ones(WIDTH, dtype=torch.float64), torch.ones(1).double(), "name")]

    def __iter__(self):
        return iter(self.batches)

    @staticmethod
    def collate_fn(samples):
        x, y, names = zip(*samples, strict=True)
        return [torch.stack(x), torch.stack(y), list(names)]


def model_of(norm=nn.Identity):
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(WIDTH, 4, bias=False), norm(4), nn.Tanh(), nn.Linear(4, 1)
    ).double()


def wrap(plain, **options):
    inner = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    return DistributedDataParallel(inner, bucket_cap_mb=TINY, **options)


def state_of(model):
    return {name.removeprefix("module."): value for name, value in model.state_dict().items()}


def same_gradients(wrapped, plain):
    for name, param in plain.named_parameters():
        assert_close_to(wrapped.module.get_parameter(name).grad, param.grad, EXACT)


def optimizer_of(kind, model):
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    return torch.optim.AdamW(model.parameters(), 0.05)


def square(model, batch):
    return (model(batch[0]) - batch[1]).square()


# ---------------------------------------------------------------- against one process


def one_process(plain, kind, weighted):
    """Train on all ranks' data; ``weighted``: every sample counts the same, else every rank's batch does."""
    step_of = optimizer_of(kind, plain)
    for live in itertools.chain(*map(steps_of, range(2))):
        step_of.zero_grad()
        losses = square(plain, [torch.cat(column) for column in list(zip(*live, strict=True))[:2]])
        if weighted:
            losses.mean().backward()
        else:
            parts = losses.split([len(batch[0]) for batch in live])
            sum(part.mean() / len(live) for part in parts).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        step_of.step()


def train(me, wrapped, kind, weighted, wrong=""):
    step_of = optimizer_of(kind, wrapped)
    seen = []
    for epoch in range(2):
        for batch in together(Loader(batches_of(me.rank, epoch)), wrapped):
            if wrong == "unspent":
                wrapped.reducer.spent, wrapped.reducer.exchange.live = False, None
            seen.append((len(batch[0]), tuple(batch[1].shape), len(batch[2])))
            step_of.zero_grad()
            losses = square(wrapped, batch)
            if weighted:
                wrapped.backward(losses.sum(), count=len(batch[0]))
            else:
                losses.mean().backward()
            nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
            step_of.step()
    return seen


def exact(me):
    for norm, kind, weighted in itertools.product(
        (nn.Identity, nn.BatchNorm1d), ("sgd", "adamw"), (True, False)
    ):
        plain = model_of(norm)
        wrapped = wrap(plain)
        seen = train(me, wrapped, kind, weighted)
        one_process(plain, kind, weighted)
        assert_close_to(state_of(wrapped), plain.state_dict(), 1e-10 if kind == "adamw" else EXACT)
    # After the loop the wrapper is as it was.
    reducer = wrapped.reducer
    assert (reducer.spent, reducer.exchange.live, reducer.silent) == (False, None, False)
    assert not wrapped.module[1].silent
    return seen


def test_weights_are_those_of_one_process(ranks):
    results = ranks(3).run(exact)
    for rank, seen in enumerate(results):
        sizes = [(*UNEVEN[0][rank], 0, 0, 0, 0)[:4], (*UNEVEN[1][rank], 0, 0, 0)[:3]]
        assert seen == [(n, (n, 1), n) for n in itertools.chain(*sizes)]


def without_it(me):
    """Without its weights, and with torch's join, where a finished rank's momentum stands still."""
    plain = model_of()
    one_process(plain, "sgd", weighted=False)
    unweighted = wrap(model_of())
    train(me, unweighted, "sgd", weighted=False, wrong="unspent")
    joined = wrap(model_of())
    step_of = optimizer_of("sgd", joined)
    for epoch in range(2):
        with joined.join(divide_by_initial_world_size=False):
            for batch in batches_of(me.rank, epoch):
                step_of.zero_grad()
                square(joined, batch).mean().backward()
                nn.utils.clip_grad_norm_(joined.parameters(), 1.0)
                step_of.step()
    for other in (unweighted, joined):
        with pytest.raises(AssertionError, match="off by"):
            assert_close_to(state_of(other), plain.state_dict(), 1e-3)


def test_without_it_weights_differ(ranks):
    ranks(3).run(without_it)


# ---------------------------------------------------------------- windows of several micro-batches

# Windows of two: one straddles the epochs, and ranks run out in the middle of others.
LONG = (((2, 1, 3, 1, 2), (2,), (1, 2, 2)), ((2, 2, 1), (), (1, 1, 3, 2, 2)))


class Scaled(nn.Module):
    """Its loss has a penalty on the weights, and a learned scale whose gradient on an empty batch is NaN."""

    def __init__(self):
        super().__init__()
        self.net = model_of()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return self.net(x)


def scaled_loss(model, batch):
    inner = getattr(model, "module", model)
    penalty = sum(param.square().sum() for param in inner.net.parameters())
    return square(model, batch).mean() * inner.scale.exp() + 0.3 * penalty


def one_window(plain, window, weighted):
    plain.zero_grad()
    if weighted:
        total = sum(square(plain, batch).sum() for batch in window)
        (total / sum(len(batch[0]) for batch in window)).backward()
    else:
        (sum(scaled_loss(plain, batch) for batch in window) / len(window)).backward()


def micro_batches(me):
    for weighted in (True, False):
        plain = model_of() if weighted else Scaled()
        wrapped = wrap(plain)
        wrapped.report_nonfinite()
        plain_step, step_of = optimizer_of("sgd", plain), optimizer_of("sgd", wrapped)
        every = [live for epoch in range(2) for live in steps_of(epoch, LONG)]
        done = 0
        for epoch in range(2):
            for batch in together(Loader(batches_of(me.rank, epoch, LONG)), wrapped):
                syncs = done % 2 == 1
                with contextlib.nullcontext() if syncs else wrapped.no_sync():
                    if weighted:
                        wrapped.backward(square(wrapped, batch).sum(), count=len(batch[0]))
                    else:
                        (scaled_loss(wrapped, batch) / 2).backward()
                if syncs:
                    one_window(plain, [*every[done - 1], *every[done]], weighted)
                    same_gradients(wrapped, plain)
                    plain_step.step()
                    step_of.step()
                    step_of.zero_grad()
                done += 1
        assert_close_to(state_of(wrapped), plain.state_dict(), EXACT)
        facts = wrapped.reducer.last_step
        assert (facts.all_reduces, facts.second_round) == (facts.buckets, False)


def test_micro_batches_weigh_the_same_in_whatever_window(ranks):
    ranks(3).run(micro_batches)


def two_backwards(me):
    """Two losses of one batch reduced one after the other, and old gradients that nobody has zeroed."""
    plain = Scaled()
    wrapped = wrap(plain)
    for step, batch in enumerate(together(Loader(batches_of(me.rank)), wrapped)):
        scaled_loss(wrapped, batch).backward()
        square(wrapped, batch).mean().backward()
        live = steps_of(0)[step]
        (sum(scaled_loss(plain, b) + square(plain, b).mean() for b in live) / len(live)).backward()
        same_gradients(wrapped, plain)


def other_ways(me):
    """A communication hook, and an embedding whose gradient is sparse."""
    plain = model_of()
    wrapped = wrap(plain)
    wrapped.register_comm_hook(None, allreduce_hook)
    train(me, wrapped, "sgd", weighted=False)
    one_process(plain, "sgd", weighted=False)
    assert_close_to(state_of(wrapped), plain.state_dict(), EXACT)

    torch.manual_seed(6)
    table = nn.Embedding(5, 2, sparse=True).double()
    wrapped = DistributedDataParallel(copy.deepcopy(table))
    words = [[torch.tensor([1, 2])], [torch.tensor([2]), torch.tensor([4, 4, 1])], []]
    loader = Loader(words[me.rank])
    for step, batch in enumerate(together(loader, wrapped, empty=lambda _: torch.tensor([3]))):
        wrapped.zero_grad()
        wrapped(batch).square().mean().backward()
        table.zero_grad()
        live = [each[step] for each in words if step < len(each)]
        (sum(table(each).square().mean() for each in live) / len(live)).backward()
        assert wrapped.module.weight.grad.is_sparse
        assert_close_to(wrapped.module.weight.grad.to_dense(), table.weight.grad.to_dense(), EXACT)


def several_ways(me):
    two_backwards(me)
    other_ways(me)


def test_several_backwards_hooks_and_sparse_gradients(ranks):
    ranks(3).run(several_ways)


# ---------------------------------------------------------------- buffers


class Average(nn.Module):
    """A running mean of its own, which an empty batch turns into NaN."""

    def __init__(self, _=None):
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean()
        self.calls += 1
        return x


def buffers(me):
    for norm in (nn.BatchNorm1d, Average):
        plain = model_of(norm)
        alone = copy.deepcopy(plain)
        wrapped = DistributedDataParallel(copy.deepcopy(plain))
        for epoch in range(2):
            for batch in together(Loader(batches_of(me.rank, epoch)), wrapped):
                wrapped.zero_grad()
                both = square(wrapped, batch).mean() + square(wrapped, batch).mean()
                both.backward()
            for live in steps_of(epoch):
                plain(live[0][0])
                plain(live[0][0])
        assert_close_to(dict(wrapped.module.named_buffers()), dict(plain.named_buffers()), EXACT)
        # Without any syncing of buffers each rank keeps those of its own batches.
        own = DistributedDataParallel(copy.deepcopy(alone), forward_sync_buffers=False)
        for batch in together(Loader(batches_of(me.rank)), own):
            square(own, batch).mean().backward()
            if len(batch[0]):
                alone(batch[0])
        assert_close_to(dict(own.module.named_buffers()), dict(alone.named_buffers()), EXACT)
    # What the empty batch does where nobody minds it.
    assert own.module(torch.empty(0, WIDTH, dtype=torch.float64)).shape == (0, 1)
    assert own.module[1].mean.isnan()


def test_buffers_are_those_of_ranks_with_data(ranks):
    ranks(3).run(buffers)


# ---------------------------------------------------------------- stand-ins, several models, several loops


def stand_ins(me):
    """A batch with samples in the empty one's place, for models that cannot do without, changes nothing."""
    plain = model_of(nn.BatchNorm1d)
    wrapped = wrap(plain)
    step_of = optimizer_of("sgd", wrapped)
    asked = []

    def last_or_ones(last):
        asked.append(last)
        return (
            [torch.ones(7, WIDTH).double(), torch.ones(7, 1).double(), []] if last is None else last
        )

    for epoch in range(2):
        batches = batches_of(me.rank, epoch)
        for step, batch in enumerate(together(batches, wrapped, empty=last_or_ones)):
            assert batch[0].numel() > 0
            step_of.zero_grad()
            # A count that goes on saying what the stand-in has is not believed.
            wrapped.backward(square(wrapped, batch).sum(), count=len(batch[0]))
            nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
            step_of.step()
            if step >= len(batches):
                assert asked[-1] is (batches[-1] if batches else None)
    one_process(plain, "sgd", weighted=True)
    assert_close_to(state_of(wrapped), plain.state_dict(), EXACT)


def two_models(me):
    """One model trained in every step, the other in every second, whose window has idle steps."""
    plain = [model_of(), model_of()]
    wrapped = [wrap(each) for each in plain]
    step_of = [optimizer_of("sgd", each) for each in (*plain, *wrapped)]
    for step, batch in enumerate(together(Loader(batches_of(me.rank)), wrapped)):
        for number in range(2 if step % 2 else 1):
            for each in step_of:
                each.zero_grad()
            live = steps_of(0)[step]
            square(wrapped[number], batch).mean().backward()
            (sum(square(plain[number], b).mean() for b in live) / len(live)).backward()
            step_of[number].step()
            step_of[2 + number].step()
    for number in range(2):
        assert_close_to(state_of(wrapped[number]), plain[number].state_dict(), EXACT)


def loops_in_loops(me):
    """An evaluation inside the training loop, models in a container, one for a group of one rank."""
    plain = model_of()
    wrapped = wrap(plain)
    inside, outside = [], 0
    for batch in together(Loader(batches_of(me.rank)), nn.ModuleList([wrapped])):
        with torch.no_grad():
            inside.append(sum(len(b[0]) for b in together(Loader(batches_of(me.rank, 1)), wrapped)))
        wrapped.zero_grad()
        square(wrapped, batch).mean().backward()
        plain.zero_grad()
        live = steps_of(0)[outside]
        (sum(square(plain, b).mean() for b in live) / len(live)).backward()
        same_gradients(wrapped, plain)
        outside += 1
    assert (inside, outside) == ([sum(UNEVEN[1][me.rank])] * 4, 4)
    loop = together(Loader(batches_of(me.rank)), wrapped)
    # The same object serves every epoch, and leaving on all ranks at once is nobody's error.
    for _ in range(2):
        assert [len(b[0]) for b in itertools.islice(loop, 2)] == [*UNEVEN[0][me.rank], 0, 0][:2]
    assert len(list(loop)) == 4
    with pytest.raises(TypeError):
        len(loop)
    assert list(together([], wrapped)) == []
    alone = [torch.distributed.new_group([rank]) for rank in range(3)][me.rank]
    single = DistributedDataParallel(model_of(), process_group=alone)
    numbers = [1, 2, 3][: me.rank]
    assert list(together(numbers, single)) == numbers
    with pytest.raises(ModelError, match=r"train on \[1, 3\] ranks"):
        together(numbers, [single, wrapped])
    with pytest.raises(ModelError, match=rf"rank {me.rank}: together\(\) needs .* none in Linear"):
        together(numbers, nn.Linear(2, 2))
    torch.distributed.destroy_process_group(alone)


def skipped(me):
    """No backward for the empty batch: a hint, since the others would wait; here they skip as well."""
    wrapped = wrap(model_of())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step, batch in enumerate(together(Loader(batches_of(me.rank)), wrapped)):
            if step < 2:
                square(wrapped, batch).mean().backward()
    texts = [str(each.message) for each in told]
    if me.rank == 1:
        assert texts == []
    else:
        assert len(texts) == 1
        assert f"rank {me.rank}: no backward was made for the empty batch of step 2" in texts[0]


def many_loops(me):
    stand_ins(me)
    two_models(me)
    loops_in_loops(me)
    skipped(me)


def test_stand_ins_several_models_and_loops(ranks):
    ranks(3).run(many_loops)


def test_without_a_group_it_is_the_loader_itself():
    loader = DataLoader(TensorDataset(torch.arange(5)), batch_size=2)
    loop = together(loader, nn.Linear(1, 1))
    for _ in range(2):
        assert [batch[0].tolist() for batch in loop] == [[0, 1], [2, 3], [4]]
    assert loop.loader is loader


# ---------------------------------------------------------------- what an empty batch is


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str


class Pair(NamedTuple):
    first: torch.Tensor
    second: dict


def test_empty_batches_keep_their_structure():
    x = torch.zeros(4, 2, dtype=torch.float16)
    batch = {
        "list": [x, x.numpy()],
        "tuple": (x, ("a", "b", "c", "d")),
        "pair": Pair(x, {"deep": [x]}),
        "data": Frozen(x, "kept"),
        "user": UserDict(x=x, n=4),
        "names": ["a", "b", "c", "d"],
        "scalar": torch.tensor(3),
        "kept": "text",
    }
    new, found = cut(batch)
    assert found == 7
    assert list(new) == list(batch)
    assert [type(value) for value in new.values()] == [type(value) for value in batch.values()]
    tensors = [*new["list"], new["tuple"][0], new["pair"].first, new["pair"].second["deep"][0]]
    tensors += [new["data"].x, new["user"]["x"]]
    assert {tuple(tensor.shape) for tensor in tensors} == {(0, 2)}
    assert new["list"][0].dtype == torch.float16
    assert new["list"][0].untyped_storage().nbytes() == 0
    assert isinstance(new["list"][1], np.ndarray)
    assert (new["tuple"][1], new["names"]) == ((), [])
    assert (new["data"].name, new["user"]["n"], new["kept"]) == ("kept", 4, "text")
    assert new["scalar"] is batch["scalar"]
    assert batch["user"]["x"] is x
    assert batch["data"].x is x


# ---------------------------------------------------------------- ranks that cannot, leave, fail or end


def cannot(me):
    wrapped = wrap(model_of())
    with pytest.raises(
        DataError, match=rf"rank {me.rank}: rank 2 ran out of batches before step 0"
    ):
        list(together(batches_of(me.rank), wrapped))
    with pytest.raises(DataError, match=r"ranks 0, 2 ran out of batches before step 1 of loop \d+"):
        list(together(["no tensor"] * (me.rank % 2 + 1), wrapped))
    assert list(together([], wrapped)) == []
    # The ranks are in step after all of this.
    assert len(list(together(Loader(batches_of(me.rank)), wrapped))) == 4


def fails(me):
    wrapped = wrap(model_of())

    def broken():
        yield from batches_of(1)[:2]
        raise OSError("disk on fire")

    loader = broken() if me.rank == 1 else Loader(batches_of(me.rank))
    error, text = OSError, "disk on fire"
    if me.rank != 1:
        error, text = RankSkewError, rf"rank {me.rank}: the loader of rank 1 raised before step 2"
    with pytest.raises(error, match=text):
        list(together(loader, wrapped))
    assert len(list(together(Loader(batches_of(me.rank)), wrapped))) == 4


def cannot_and_fail(me):
    cannot(me)
    fails(me)


def test_what_happens_to_one_rank_is_told_to_all(ranks):
    ranks(3).run(cannot_and_fail)


@contextlib.contextmanager
def quick_alarm():
    before = lookout.ALARM_S, lookout.CONFIRM_S
    lookout.ALARM_S = lookout.CONFIRM_S = 0.4
    try:
        yield
    finally:
        lookout.ALARM_S, lookout.CONFIRM_S = before


def loop_of(me, wrapped, leaves_at):
    """Rank 1 leaves its third step before forward, before backward or at its end; or rank 2 makes no backward."""
    for step, batch in enumerate(together(Loader(batches_of(me.rank)), wrapped)):
        leaves = step == 2 and me.rank == 1
        if leaves and leaves_at == "start":
            break
        if step == 2 and me.rank == 2 and leaves_at == "continue":
            continue
        loss = square(wrapped, batch).mean()
        if leaves and leaves_at == "middle":
            raise KeyError("inside")
        loss.backward()
        if leaves and leaves_at == "end":
            break


def leaves_alone(me, norm, *ways):
    """Each time in a group of its own, for nobody can loop together in it afterwards."""
    for leaves_at in ways:
        group = torch.distributed.new_group([0, 1, 2])
        plain = SyncBatchNorm.convert_sync_batchnorm(model_of(norm), group)
        wrapped = DistributedDataParallel(plain, process_group=group)
        error, text = (
            RankSkewError,
            rf"rank {me.rank}: rank 1 before step 3 of loop 1 left the loop",
        )
        if leaves_at == "continue":
            text = r"wait for each other in different places: .*rank 2 in the ranks' agreement before step 3"
        elif leaves_at == "middle" and me.rank == 1:
            error, text = KeyError, "inside"
        with quick_alarm(), warnings.catch_warnings():
            # The hint about a missing backward of an empty batch has its own test.
            warnings.simplefilter("ignore")
            begun = time.monotonic()
            if me.rank == 1 and leaves_at in ("start", "end"):
                loop_of(me, wrapped, leaves_at)
            else:
                with pytest.raises(error, match=text):
                    loop_of(me, wrapped, leaves_at)
            assert time.monotonic() - begun < 5
            if leaves_at == "end":
                if me.rank == 1:
                    time.sleep(1.5)
                    text = "meet at different places: rank 0 is at step 3 of loop 1; rank 1 is at step 0"
                # Whoever loops again is told, too.
                with pytest.raises(RankSkewError, match=text):
                    loop_of(me, wrapped, leaves_at)
        # Who closes a group ends the waiting of the others by another error.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group(group)


def test_a_rank_that_leaves_alone_is_named(ranks):
    ranks(3).run(leaves_alone, nn.Identity, "start", "middle", "end", "continue")
    # The others wait in SyncBatchNorm.
    ranks(3).run(leaves_alone, nn.BatchNorm1d, "start")


def ends(me):
    wrapped = wrap(model_of())
    batches = (os._exit(3) if me.rank == 1 and n == 2 else b for n, b in enumerate(batches_of(1)))
    list(together(batches, wrapped))


def test_a_rank_that_ends_is_told(ranks):
    first, second, third = ranks(3).outcomes(ends)
    assert second.status == "died"
    for outcome in (first, third):
        assert outcome.is_a(CommunicationError)
        assert "the ranks' agreement before step 2 of loop" in outcome.error
