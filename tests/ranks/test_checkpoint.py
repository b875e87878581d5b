"""Several ranks: a run that ends and goes on is the same run, on as many ranks or on others; one rank's failure is everybody's."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import rankstep
from rankstep.checkpoint import Stopped, files, loading, ranks, session
from rankstep.checkpoint.folder import MODEL
from rankstep.errors import CheckpointError, CheckpointWarning
from rankstep.testing import Rank  # noqa: TC001 - the pool looks it up

SAMPLES = 50


class Data:
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), index


class Died(Exception):  # noqa: N818 - stands for a kill, not for an error
    """Ends a rank without a word."""


def die_if(now):
    if now:
        raise Died


class Branches(nn.Module):
    """Two branches that swap places in every forward, so that gradients become ready in another order."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 40), nn.Linear(6, 40)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(40, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        turned = int(self.calls) % 2
        self.calls += 1
        first, second = (self.right, self.left) if turned else (self.left, self.right)
        return self.head(self.drop(torch.tanh(second(inputs)) + torch.tanh(first(inputs))))


def train(me: Rank, directory, *, die=None, epochs=2, keep_plan=True, sharded=False):
    """Train, or die behind the optimizer's step of this number; return what can be compared."""
    rankstep.seed_everything(11)
    net = Branches()
    # Small buckets, so that where a gradient lies depends on the order.
    model = rankstep.DistributedDataParallel(net, bucket_cap_mb=0.0005, forward_sync_buffers=False)
    if sharded:
        optimizer = rankstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = rankstep.DistributedSampler(Data(), seed=3)
    loader = DataLoader(Data(), batch_size=5, sampler=sampler)
    with pytest.MonkeyPatch.context() as patch:
        if not keep_plan:
            patch.setattr(session, "adopt_plan", lambda *_: "")
        try:
            with rankstep.Checkpoint(
                directory, model=model, optimizer=optimizer, sampler=sampler, every=1
            ) as checkpoint:
                told = checkpoint.extra.setdefault("told", {"losses": [], "samples": []})
                for _ in checkpoint.epochs(epochs):
                    for inputs, indices in checkpoint.batches(loader):
                        told["samples"].append(indices.tolist())
                        loss = model(inputs + 0.1 * random.random()).square().mean()
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                        told["losses"].append(loss.item())
                        die_if(checkpoint.steps + 1 == die)
                        checkpoint.step()
        except Died:
            return None
    plan = [bucket.spec.params for bucket in model.reducer.buckets]
    return {
        "weights": {name: tensor.clone() for name, tensor in net.state_dict().items()},
        "optimizer": repr(optimizer.state_dict()),
        "draws": (random.random(), np.random.rand(), torch.rand(2).tolist()),  # noqa: NPY002
        "plan": plan,
        **told,
    }


def assert_equal(some, others):
    for one, other in zip(some, others, strict=True):
        for name, value in one.items():
            if name == "weights":
                assert all(torch.equal(value[k], other["weights"][k]) for k in value)
            else:
                assert value == other[name], name


# ---------------------------------------------------------------- as many ranks


@pytest.mark.parametrize(
    ("count", "deaths"), [(2, (1, 5, 6)), (3, (2, 3, 6))], ids=["2 ranks", "3 ranks"]
)
def test_dead_and_resumed_it_is_the_same_run(count, deaths, ranks, tmp_path):
    whole = ranks(count).run(train, None)
    # Dropout, noise and buffers are each rank's own.
    assert whole[0]["losses"] != whole[1]["losses"]
    assert whole[0]["draws"] != whole[1]["draws"]
    for death in deaths:
        assert ranks(count).run(train, tmp_path, die=death) == [None] * count
    assert_equal(whole, ranks(count).run(train, tmp_path))


def test_the_bucket_plan_goes_on(ranks, tmp_path):
    # After an odd number of steps the branches become ready in the other order.
    whole = ranks(3).run(train, None)
    ranks(3).run(train, tmp_path, die=4)
    resumed = ranks(3).run(train, tmp_path)
    assert resumed[0]["plan"] == whole[0]["plan"]
    assert_equal(whole, resumed)


def test_without_its_bucket_plan_it_sums_in_another_order(ranks, tmp_path):
    whole = ranks(3).run(train, None)
    ranks(3).run(train, tmp_path, die=4)
    other = ranks(3).run(train, tmp_path, keep_plan=False)
    assert other[0]["plan"] != whole[0]["plan"]


def test_a_sharded_optimizer_goes_on(ranks, tmp_path):
    whole = ranks(2).run(train, None, sharded=True)
    ranks(2).run(train, tmp_path, die=4, sharded=True)
    assert_equal(whole, ranks(2).run(train, tmp_path, sharded=True))
    # Its state has the plain optimizer's form.
    plain = ranks(2).run(train, tmp_path, epochs=2)
    assert [rank["losses"] for rank in plain] == [rank["losses"] for rank in whole]


# ---------------------------------------------------------------- other numbers of ranks

GLOBAL_BATCH = 12
MICRO_BATCH = 3


def train_windows(me: Rank, directory, stop_at):
    """Train by global batches until so many steps are done; return the samples of each step, and each rank's draws."""
    rankstep.seed_everything(11)
    net = nn.Linear(6, 2)
    model = rankstep.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = rankstep.GlobalBatchSampler(Data(), GLOBAL_BATCH, MICRO_BATCH, seed=3)
    loader = DataLoader(Data(), batch_sampler=sampler)
    steps, sizes = {}, []
    with rankstep.Checkpoint(
        directory, model=model, optimizer=optimizer, sampler=sampler
    ) as checkpoint:
        draw = torch.rand(1).item()
        for _ in checkpoint.epochs(2):
            for window in checkpoint.windows(loader):
                optimizer.zero_grad()
                mine = []
                for inputs, indices in window:
                    loss = functional.cross_entropy(model(inputs), indices % 2, reduction="sum")
                    model.backward(loss, count=len(indices))
                    mine += indices.tolist()
                    sizes.append(len(indices))
                optimizer.step()
                checkpoint.step()
                steps[checkpoint.steps] = mine
                if checkpoint.steps == stop_at:
                    return steps, sizes, draw, dict(net.state_dict())
    return steps, sizes, draw, dict(net.state_dict())


def joined(of_ranks):
    """The samples of each step, over all ranks."""
    steps = of_ranks[0][0]
    return {step: sorted(itertools.chain(*(rank[0][step] for rank in of_ranks))) for step in steps}


def test_four_ranks_then_two_then_three_take_the_same_steps(ranks, tmp_path):
    alone = ranks(1).run(train_windows, None, None)
    parts = [
        ranks(4).run(train_windows, tmp_path, 2),
        ranks(2).run(train_windows, tmp_path, 6),
        ranks(3).run(train_windows, tmp_path, None),
    ]
    steps = {}
    for part in parts:
        assert not steps.keys() & joined(part).keys()
        steps |= joined(part)
    # Every step has the samples that one rank alone would take, so each sample comes once in each epoch.
    assert steps == joined(alone)
    per_epoch = len(steps) // 2
    for epoch in range(2):
        of_epoch = [steps[1 + epoch * per_epoch + index] for index in range(per_epoch)]
        assert sorted(itertools.chain(*of_epoch)) == list(range(SAMPLES))
        assert [len(samples) for samples in of_epoch] == [12, 12, 12, 12, 2]
    for part in parts:
        assert all(size <= MICRO_BATCH for _, sizes, _, _ in part for size in sizes)
        # Accumulated where there are fewer ranks, and the weights are equal on all.
        assert all(torch.equal(part[0][3]["weight"], rank[3]["weight"]) for rank in part)
    torch.testing.assert_close(parts[-1][0][3], alone[0][3], rtol=1e-5, atol=1e-6)
    # A rank that was not there before draws numbers of its own.
    draws = [rank[2] for rank in parts[-1]]
    assert len(set(draws)) == 3


def test_the_sampler_s_place_holds_for_any_number_of_ranks(ranks, tmp_path):
    ranks(2).run(train, tmp_path, die=3, epochs=1)
    first = ranks(2).run(samples_before, tmp_path)
    rest = ranks(4).run(train_rest, tmp_path)
    taken = sorted(itertools.chain(*first, *rest))
    # 30 are left for four ranks, which pad them to 32.
    assert sorted(set(taken)) == list(range(SAMPLES))
    assert len(taken) == SAMPLES + 2


def samples_before(me: Rank, directory):
    """Read what the checkpoint says was trained on before."""
    net = Branches()
    model = rankstep.DistributedDataParallel(net, bucket_cap_mb=0.0005, forward_sync_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with rankstep.Checkpoint(directory, model=model, optimizer=optimizer) as checkpoint:
        return list(itertools.chain(*checkpoint.extra["told"]["samples"]))


def train_rest(me: Rank, directory):
    """Return the samples that are left of the epoch on this rank."""
    net = Branches()
    model = rankstep.DistributedDataParallel(net, bucket_cap_mb=0.0005, forward_sync_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = rankstep.DistributedSampler(Data(), seed=3)
    loader = DataLoader(Data(), batch_size=5, sampler=sampler)
    rest = []
    with rankstep.Checkpoint(
        directory, model=model, optimizer=optimizer, sampler=sampler
    ) as checkpoint:
        for _ in checkpoint.epochs(1):
            for _, indices in checkpoint.batches(loader):
                rest += indices.tolist()
    return rest


# ---------------------------------------------------------------- all or none


def opened(directory, **options):
    torch.manual_seed(0)
    model = rankstep.DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, rankstep.Checkpoint(directory, model=model, optimizer=optimizer, **options)


def step(model, checkpoint):
    model(torch.ones(1, 3)).sum().backward()
    with torch.no_grad():
        model.module.weight.add_(1.0)
    checkpoint.step()


def weight_after(steps):
    torch.manual_seed(0)
    return nn.Linear(3, 2).weight.detach() + steps


def steps_in(directory):
    return sorted(int(path.name[5:]) for path in Path(directory).glob("step-*"))


def fail_on_one_rank(me: Rank, directory):
    """Rank 1 cannot save; then it can."""
    model, checkpoint = opened(directory, every=1)
    with checkpoint:
        step(model, checkpoint)
        if me.rank == 1:
            checkpoint.extra["bad"] = Path("x")
        with pytest.raises(CheckpointError) as raised:
            step(model, checkpoint)
        during = steps_in(directory)
        checkpoint.extra.clear()
        step(model, checkpoint)
    return str(raised.value), during, steps_in(directory)


def test_one_rank_s_failure_is_an_error_on_all(ranks, tmp_path):
    for rank, (text, during, after) in enumerate(ranks(2).run(fail_on_one_rank, tmp_path)):
        if rank == 0:
            assert text.startswith("rank 0: telling each other what to save failed. rank 1: ")
        assert "own state.extra.bad is a pathlib" in text
        assert (during, after) == ([1], [1, 3])


def full(_):
    raise OSError(28, os.strerror(28))


def many_steps(model, checkpoint):
    for _ in range(50):
        step(model, checkpoint)


def fail_on_the_disk(me: Rank, directory, asynchronous):
    model, checkpoint = opened(directory, every=1, asynchronous=asynchronous)
    with checkpoint:
        step(model, checkpoint)
        checkpoint.save()
        while asynchronous and me.rank == 0 and not steps_in(directory):
            time.sleep(0.01)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "sync", full)
            with pytest.raises(CheckpointError) as raised:
                many_steps(model, checkpoint)
        failed_after = checkpoint.steps
        step(model, checkpoint)
    return str(raised.value), failed_after


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_an_error_on_all(asynchronous, ranks, tmp_path):
    (first, at), (second, other) = ranks(2).run(fail_on_the_disk, tmp_path, asynchronous)
    assert at == other
    assert "No space left on device" in first
    assert second.startswith("rank 1: writing a checkpoint failed on rank 0: the checkpoint of")
    assert "No space left on device" in second
    assert steps_in(tmp_path) in ([1, at, at + 1], [1, at + 1])


def open_a_foreign_one(me: Rank, directory):
    model = rankstep.DistributedDataParallel(nn.Linear(3, 4))
    with pytest.raises(CheckpointError) as raised, rankstep.Checkpoint(directory, model=model):
        pass
    return str(raised.value)


def test_a_foreign_checkpoint_is_an_error_on_all(ranks, tmp_path):
    ranks(2).run(fail_on_one_rank, tmp_path)
    for text in ranks(2).run(open_a_foreign_one, tmp_path):
        assert "it is that of another model: 'bias' is torch.float32 [2] there" in text


def read_with_damage(me: Rank, directory):
    """Return what each rank was warned of and read, and from where it went on."""
    reads = []
    real = loading.TensorFile.read
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr(
            loading.TensorFile, "read", lambda self, on: reads.append(1) or real(self, on)
        )
        model, checkpoint = opened(directory)
        with checkpoint:
            resumed = checkpoint.resumed
            weight = model.module.weight.clone()
            checkpoint.step()
    texts = [str(w.message) for w in warned if w.category is CheckpointWarning]
    return texts, len(reads), resumed.step, [str(path) for path, _ in resumed.ignored], weight


def test_one_rank_reads_and_names_what_it_passes_over(ranks, tmp_path):
    ranks(2).run(fail_on_one_rank, tmp_path)
    data = bytearray((tmp_path / "step-00000003" / MODEL).read_bytes())
    data[-1] ^= 1
    (tmp_path / "step-00000003" / MODEL).write_bytes(data)
    first, second = ranks(2).run(read_with_damage, tmp_path)
    assert [len(texts) for texts, *_ in (first, second)] == [1, 0]
    assert "step-00000003 was passed over: model.safetensors is damaged" in first[0][0]
    # Two files of tensors, by one rank.
    assert (first[1], second[1]) == (2, 0)
    for _, _, number, ignored, weight in (first, second):
        assert (number, ignored) == (1, [str(tmp_path / "step-00000003")])
        torch.testing.assert_close(weight, weight_after(1))


def open_where_only_rank_1_sees_it(me: Rank, directory):
    """Each rank looks in a directory of its own, as ranks of hosts without a common disk do."""
    with pytest.MonkeyPatch.context() as patch:
        lead = ranks.Ranks.__init__

        def leads(self):
            lead(self)
            self.leads_host = True

        patch.setattr(ranks.Ranks, "__init__", leads)
        model, checkpoint = opened(Path(directory, f"host{me.rank}"))
        with checkpoint:
            return checkpoint.resumed.step, model.module.weight.clone()


def test_the_host_that_has_the_newest_one_reads_it(ranks, tmp_path):
    ranks(2).run(fail_on_one_rank, tmp_path / "host1")
    (number, weight), (other, same) = ranks(2).run(open_where_only_rank_1_sees_it, tmp_path)
    assert number == other == 3
    assert torch.equal(weight, same)
    torch.testing.assert_close(weight.detach(), weight_after(3))


# ---------------------------------------------------------------- asked to end


def steps_with_a_signal(me, model, checkpoint):
    for number in range(2000):
        if number == 3 and me.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        step(model, checkpoint)


def told_to_end(me: Rank, directory):
    """Only one rank gets the signal."""
    model, checkpoint = opened(directory)
    with pytest.raises(Stopped) as stopped, checkpoint:
        steps_with_a_signal(me, model, checkpoint)
    dist.barrier()
    return stopped.value.code, checkpoint.extra, steps_in(directory)


def test_one_rank_s_signal_ends_all_ranks_behind_the_same_step(ranks, tmp_path):
    first, second = ranks(2).run(told_to_end, tmp_path)
    assert first == second
    code, _, (saved,) = first
    assert code == 143
    assert saved >= 4


# ---------------------------------------------------------------- with the rest of the wrapper


def windows_and_parts(me: Rank, directory):
    """A window under no_sync is no step; models in a dict, each wrapped, keep their own names."""
    parts = nn.ModuleDict({"g": nn.Linear(3, 2), "d": nn.Linear(2, 1)})
    wrapped = nn.ModuleDict(
        {name: rankstep.DistributedDataParallel(part) for name, part in parts.items()}
    )
    with rankstep.Checkpoint(directory, model=wrapped, every=1) as checkpoint:
        with wrapped["g"].no_sync():
            wrapped["g"](torch.ones(1, 3)).sum().backward()
            checkpoint.step()
            checkpoint.save()
        inside = checkpoint.steps, steps_in(directory)
        wrapped["g"](torch.ones(1, 3)).sum().backward()
        checkpoint.step()
        behind = checkpoint.steps, steps_in(directory)
    plain = nn.ModuleDict({"g": nn.Linear(3, 2), "d": nn.Linear(2, 1)})
    with rankstep.Checkpoint(directory, model=plain):
        same = torch.equal(plain["g"].weight, parts["g"].weight)
    return inside, behind, same


def test_a_window_is_no_step_and_parts_keep_their_names(ranks, tmp_path):
    for inside, behind, same in ranks(2).run(windows_and_parts, tmp_path):
        assert inside == (0, [])
        assert behind == (1, [1])
        assert same
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "step-00000001" / MODEL)
    assert set(saved) == {"g.weight", "g.bias", "d.weight", "d.bias"}


def uneven(me: Rank, directory, die):
    """Ranks with 4 and 3 batches, in one loop together."""
    torch.manual_seed(0)
    model = rankstep.DistributedDataParallel(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = rankstep.DistributedSampler(range(13), pad="none", shuffle=False)
    loader = DataLoader([Data()[i] for i in range(13)], batch_size=2, sampler=sampler)
    seen = []
    try:
        with rankstep.Checkpoint(
            directory, model=model, optimizer=optimizer, sampler=sampler, every=1
        ) as checkpoint:
            for _ in checkpoint.epochs(1):
                for inputs, indices in rankstep.together(checkpoint.batches(loader), model):
                    optimizer.zero_grad()
                    model.backward(model(inputs).square().sum(), count=len(indices))
                    optimizer.step()
                    seen.append(indices.tolist())
                    die_if(checkpoint.steps + 1 == die)
                    checkpoint.step()
    except Died:
        pass
    return seen, model.module.weight.clone()


def test_in_a_loop_of_uneven_ranks(ranks, tmp_path):
    whole = ranks(2).run(uneven, None, None)
    assert [len(seen) for seen, _ in whole] == [4, 4]
    ranks(2).run(uneven, tmp_path, 3)
    rest = ranks(2).run(uneven, tmp_path, None)
    assert [seen for seen, _ in rest] == [seen[2:] for seen, _ in whole]
    assert all(torch.equal(a[1], b[1]) for a, b in zip(whole, rest, strict=True))


def test_the_benchmark_runs_to_its_end(tmp_path):
    file = tmp_path / "result.json"
    sizes = ["--gigabytes=0.02", "--async-gigabytes=0.02", "--turn=0.1", "--rounds=2"]
    done = subprocess.run(
        [
            *(sys.executable, Path(__file__).parents[2] / "benchmarks" / "checkpoint.py"),
            *(*sizes, "--allow-busy", "--folder", tmp_path, "--json", file),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text(encoding="utf-8"))
    disk, behind = (result["tables"][name]["variants"] for name in ("disk", "async"))
    spread = {"min", "q25", "median", "q75"}
    assert disk["checkpoint"]["ratio_to_plain"].keys() == disk["plain"]["seconds"].keys() == spread
    blocked, whole = (behind["with"][name]["median"] for name in ("blocked_seconds", "seconds"))
    assert 0 < blocked < whole
    assert [bar["limit"] for bar in result["bars"]] == [1.2, 1.02]
    assert list(tmp_path.iterdir()) == [file]
