"""One rank: a run that ends anywhere and goes on is the run that did not end, to the last bit."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

import rankstep
from rankstep.checkpoint import Stopped
from rankstep.checkpoint.folder import MARKER, MODEL, STATE
from rankstep.errors import CheckpointError, CheckpointWarning

SAMPLES = 26


class Noisy:
    """A dataset that draws from all three libraries, as augmentations do."""

    def __init__(self, length=SAMPLES):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        noise = random.random() + np.random.rand() + torch.rand(()).item()  # noqa: NPY002
        return torch.full((4,), float(index) + noise), index


class Quiet(Noisy):
    """The same without chance, so that it does not matter who reads it."""

    def __getitem__(self, index):
        return torch.full((4,), float(index)), index


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.full((4,), float(i)) + random.random(), i) for i in range(SAMPLES)])


class Die(Exception):  # noqa: N818 - an end, not an error
    """Ends a run without warning."""


@dataclass
class Record:
    """What a run did, over all its lives."""

    samples: list = field(default_factory=list)
    losses: list = field(default_factory=list)
    weights: dict = field(default_factory=dict)
    optimizer: str = ""
    draws: tuple = ()
    resumed: int | None = None


def build():
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.4), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    return net, optimizer, scheduler


def train(
    directory, *, die=None, every=1, epochs=2, data=None, workers=0, window=1, replay=False, **more
):
    """Train to the end, or to the ``die``-th optimizer step, which is done and not saved."""
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    net, optimizer, scheduler = build()
    data = Noisy() if data is None else data
    sampler = None
    if not isinstance(data, IterableDataset) and not more.pop("foreign", False):
        sampler = rankstep.DistributedSampler(data, 1, 0)
    loader = DataLoader(
        data,
        batch_size=4,
        sampler=sampler or more.pop("sampler", None),
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
        generator=more.pop("generator", None),
    )
    record = Record()
    with rankstep.Checkpoint(
        directory,
        model=net,
        optimizer=optimizer,
        scheduler=scheduler,
        sampler=sampler,
        every=every,
        **more,
    ) as checkpoint:
        lives = checkpoint.extra.setdefault("record", {"samples": [], "losses": []})
        for _ in checkpoint.epochs(epochs):
            for number, (inputs, indices) in enumerate(checkpoint.batches(loader, replay=replay)):
                lives["samples"].append(indices.tolist())
                loss = net(inputs).square().mean()
                loss.backward()
                lives["losses"].append(loss.item())
                if (number + 1) % window:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                if checkpoint.steps + 1 == die:
                    raise Die
                checkpoint.step()
    record.samples, record.losses = lives["samples"], lives["losses"]
    record.weights = net.state_dict()
    record.optimizer = repr(optimizer.state_dict()) + repr(scheduler.state_dict())
    record.draws = (random.random(), np.random.rand(), torch.rand(3).tolist())  # noqa: NPY002
    record.resumed = None if checkpoint.resumed is None else checkpoint.resumed.step
    return record


def killed(directory, *deaths, **options):
    """Die at each of these steps in turn, then train to the end."""
    for death in deaths:
        with pytest.raises(Die):
            train(directory, die=death, **options)
    record = train(directory, **options)
    # Begun anew with the same seeds it would end with the same weights, too.
    assert (record.resumed is not None) == (deaths[-1] > options.get("every", 1))
    return record


def assert_equal(a, b):
    assert a.samples == b.samples
    assert a.losses == b.losses
    assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
    assert a.optimizer == b.optimizer
    assert a.draws == b.draws


@pytest.fixture(autouse=True)
def quiet_resume(capfd):
    yield
    errors = capfd.readouterr().err
    assert all(line.startswith("rankstep: resumed from ") for line in errors.splitlines()), errors


# ---------------------------------------------------------------- exact


@pytest.fixture(scope="module")
def uninterrupted():
    return train(None)


# The first step, the last two of an epoch, the first of the next, and the last of all.
@pytest.mark.parametrize("death", [1, 2, 6, 7, 8, 14])
def test_dead_at_any_step_it_goes_on_as_the_same_run(death, uninterrupted, tmp_path):
    assert_equal(killed(tmp_path, death), uninterrupted)


def test_dead_three_times_in_one_epoch(uninterrupted, tmp_path):
    assert_equal(killed(tmp_path, 2, 4, 5), uninterrupted)


def test_dead_between_two_checkpoints(uninterrupted, tmp_path):
    assert_equal(killed(tmp_path, 3, 6, 9, every=4), uninterrupted)


def test_without_the_checkpoint_s_random_numbers_it_is_another_run(uninterrupted, tmp_path):
    with pytest.raises(Die):
        train(tmp_path, die=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rankstep.checkpoint.rng.restore", lambda *_: None)
        other = train(tmp_path)
    assert other.samples == uninterrupted.samples
    assert other.losses != uninterrupted.losses


def test_a_run_that_was_at_its_end_does_nothing(uninterrupted, tmp_path):
    assert_equal(train(tmp_path), uninterrupted)
    again = train(tmp_path)
    assert again.samples == uninterrupted.samples
    assert all(torch.equal(again.weights[k], v) for k, v in uninterrupted.weights.items())


@pytest.mark.parametrize("death", [2, 8])
def test_with_workers_that_read_ahead(death, tmp_path):
    options = {"data": Quiet(), "workers": 2}
    assert_equal(killed(tmp_path, death, **options), train(None, **options))


@pytest.mark.parametrize("death", [9])
def test_replay_gives_the_numbers_that_workers_draw(death, tmp_path):
    options = {"workers": 2, "replay": True}
    assert_equal(killed(tmp_path, death, **options), train(None, **options))


def test_without_replay_workers_draw_others(tmp_path):
    options = {"workers": 2}
    whole, resumed = train(None, **options), killed(tmp_path, 3, **options)
    assert whole.samples == resumed.samples
    assert whole.losses != resumed.losses


@pytest.mark.parametrize("death", [1, 3])
@pytest.mark.parametrize("window", [2, 3])
def test_in_an_accumulation_window(death, window, tmp_path):
    # A window of 2 or 3 of 7 batches runs on into the next epoch.
    options = {"window": window}
    assert_equal(killed(tmp_path, death, **options), train(None, **options))


def test_with_a_generator_of_the_loader_s_own(tmp_path):
    def options():
        generator = torch.Generator().manual_seed(3)
        return {"workers": 1, "generator": generator, "replay": True}

    with pytest.raises(Die):
        train(tmp_path, die=9, **options())
    assert_equal(train(tmp_path, **options()), train(None, **options()))


def test_any_loader_can_be_replayed(tmp_path):
    options = {"foreign": True, "sampler": RandomSampler(Noisy()), "replay": True}
    assert_equal(killed(tmp_path, 3, 10, **options), train(None, **options))
    streaming = {"data": Stream(), "replay": True}
    assert_equal(killed(tmp_path / "stream", 3, 10, **streaming), train(None, **streaming))


def test_a_loader_whose_place_is_unknown_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"replay=True.* reads a pass from its beginning"):
        train(tmp_path, foreign=True, sampler=RandomSampler(Noisy()))


def test_asynchronous_checkpoints_are_the_same(uninterrupted, tmp_path):
    assert_equal(killed(tmp_path, 3, 6, 9, every=2, asynchronous=True), uninterrupted)


def test_an_asynchronous_checkpoint_has_the_moment_it_was_asked_for(tmp_path, monkeypatch):
    import threading

    from rankstep.checkpoint import folder

    go_on = threading.Event()
    write = folder.Folder.write

    def late(self, *args):
        assert go_on.wait(30)
        return write(self, *args)

    monkeypatch.setattr(folder.Folder, "write", late)
    net, optimizer, _ = build()
    with rankstep.Checkpoint(
        tmp_path, model=net, optimizer=optimizer, every=1, asynchronous=True
    ) as checkpoint:
        checkpoint.step()
        before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(1)
        go_on.set()
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "step-00000001" / MODEL)
    assert all(torch.equal(saved[name], before[name]) for name in before)
    assert not torch.equal(saved["0.weight"], net.state_dict()["0.weight"])


# ---------------------------------------------------------------- what is saved, and when


def steps_in(directory):
    return sorted(int(path.name[5:]) for path in directory.glob("step-*"))


def test_every_keep_and_the_end(tmp_path):
    train(tmp_path, every=4, keep=2)
    assert steps_in(tmp_path) == [12, 14]


def test_nothing_was_done_nothing_is_saved(tmp_path):
    net, optimizer, _ = build()
    with rankstep.Checkpoint(tmp_path, model=net, optimizer=optimizer) as checkpoint:
        assert (checkpoint.steps, checkpoint.epoch, checkpoint.resumed) == (0, 0, None)
    assert steps_in(tmp_path) == []


def test_a_save_inside_a_step_waits_for_its_end(tmp_path):
    net, optimizer, _ = build()
    sampler = rankstep.DistributedSampler(Quiet(8), 1, 0)
    loader = DataLoader(Quiet(8), batch_size=4, sampler=sampler)
    with rankstep.Checkpoint(
        tmp_path, model=net, optimizer=optimizer, sampler=sampler, best="max"
    ) as checkpoint:
        for _ in checkpoint.batches(loader):
            checkpoint.save(score=2)
            assert steps_in(tmp_path) == list(range(1, checkpoint.steps + 1))
            checkpoint.step()
        # Between steps it does not wait.
        checkpoint.step()
        checkpoint.save()
        assert steps_in(tmp_path) == [1, 2, 3]
    marker = json.loads((tmp_path / "step-00000002" / MARKER).read_text())
    assert marker["score"] == 2.0


def test_scores_choose_the_best(tmp_path):
    net, optimizer, _ = build()
    with rankstep.Checkpoint(
        tmp_path, model=net, optimizer=optimizer, keep=1, best="min"
    ) as checkpoint:
        for score in (3.0, 1.0, 2.0):
            checkpoint.step()
            checkpoint.save(score)
    assert steps_in(tmp_path) == [2, 3]


def test_everything_with_a_state_is_saved(tmp_path):
    class Average:
        def __init__(self):
            self.value = torch.zeros(2)

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    def objects():
        net, optimizer, _ = build()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        return net, optimizer, scaler, Average(), Average()

    net, optimizer, scaler, shared, own = objects()
    with rankstep.Checkpoint(
        tmp_path,
        model=net,
        optimizer=[optimizer],
        scaler=scaler,
        average=shared,
        per_rank={"own": own},
    ) as checkpoint:
        shared.value, own.value = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
        scaler.load_state_dict({**scaler.state_dict(), "scale": 32.0})
        checkpoint.extra["tokens"] = 7
        checkpoint.step()
    net, optimizer, scaler, shared, own = objects()
    with rankstep.Checkpoint(
        tmp_path,
        model=net,
        optimizer=[optimizer],
        scaler=scaler,
        average=shared,
        per_rank={"own": own},
    ) as checkpoint:
        assert checkpoint.resumed.step == 1
        assert shared.value.tolist() == [1.0, 2.0]
        assert own.value.tolist() == [3.0, 4.0]
        assert scaler.get_scale() == 32.0
        assert checkpoint.extra == {"tokens": 7}


OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "LBFGS": {"max_iter": 3},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adafactor": {},
    "NAdam": {},
    "Rprop": {},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_go_on(name, tmp_path):
    def steps(directory, begins, count):
        torch.manual_seed(0)
        net = nn.Conv2d(2, 3, 2)
        if name != "LBFGS":
            net = net.to(memory_format=torch.channels_last)
        optimizer = getattr(torch.optim, name)(net.parameters(), **OPTIMIZERS[name])
        with rankstep.Checkpoint(directory, model=net, optimizer=optimizer) as checkpoint:
            assert checkpoint.steps == begins
            while checkpoint.steps < count:

                def closure():
                    optimizer.zero_grad()
                    loss = net(torch.ones(1, 2, 4, 4)).square().mean()
                    loss.backward()
                    return loss

                optimizer.step(closure)
                checkpoint.step()
        return net.state_dict(), optimizer.state_dict()

    whole = steps(None, 0, 4)
    steps(tmp_path, 0, 2)
    resumed = steps(tmp_path, 2, 4)
    assert repr(whole) == repr(resumed)
    assert all(torch.equal(whole[0][key], resumed[0][key]) for key in whole[0])


SCHEDULERS = {
    "cosine": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 9),
    "lambda": lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step),
    "one cycle": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.3, total_steps=9),
    "cyclic": lambda opt: torch.optim.lr_scheduler.CyclicLR(opt, 0.01, 0.1, 3),
    "chained": lambda opt: torch.optim.lr_scheduler.SequentialLR(
        opt,
        [
            torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(opt, 0.9),
        ],
        [3],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on(name, tmp_path):
    def rates(directory, begins, count):
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)
        with rankstep.Checkpoint(
            directory, model=net, optimizer=optimizer, scheduler=scheduler
        ) as checkpoint:
            found = checkpoint.extra.setdefault("rates", [])
            assert checkpoint.steps == begins
            while checkpoint.steps < count:
                optimizer.step()
                scheduler.step()
                found.append([optimizer.param_groups[0]["lr"], scheduler.get_last_lr()[0]])
                checkpoint.step()
        return found

    whole = rates(None, 0, 6)
    rates(tmp_path, 0, 3)
    assert rates(tmp_path, 3, 6) == whole


def test_names_are_the_module_s_own(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(2, 2, bias=False)
            self.second = nn.Linear(2, 2, bias=False)
            self.second.weight = self.first.weight

        def forward(self, inputs):
            return self.second(self.first(inputs))

    from safetensors import safe_open

    net = Tied()
    compiled = torch.compile(net, backend="eager")
    optimizer = torch.optim.AdamW(net.parameters())
    with rankstep.Checkpoint(tmp_path, model=compiled, optimizer=optimizer) as checkpoint:
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        checkpoint.step()
        checkpoint.export(tmp_path / "weights.safetensors")
    with safe_open(tmp_path / "step-00000001" / "training.safetensors", framework="pt") as file:
        assert set(file.keys()) == {
            f"optimizer.first.weight.{name}" for name in ("step", "exp_avg", "exp_avg_sq")
        }
    for path in (tmp_path / "step-00000001" / MODEL, tmp_path / "weights.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert set(file.keys()) == {"first.weight"}
            assert torch.equal(file.get_tensor("first.weight"), net.first.weight)
    with safe_open(tmp_path / "weights.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "second.weight": "first.weight"}
    # It loads into the plain module.
    plain = Tied()
    with rankstep.Checkpoint(
        tmp_path, model=plain, optimizer=torch.optim.AdamW(plain.parameters())
    ):
        assert torch.equal(plain.second.weight, net.first.weight)
        assert plain.second.weight is plain.first.weight


def test_without_a_directory_only_the_loops_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    net, optimizer, _ = build()
    with rankstep.Checkpoint(None, model=net, optimizer=optimizer, every=1) as checkpoint:
        assert signal.getsignal(signal.SIGTERM) is before
        checkpoint.step()
        checkpoint.save(1.0)
        assert checkpoint.steps == 1
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- asked to end


def told_to_end(checkpoint, number, times=1):
    """Take steps, the fourth of which meets the signal."""
    for _ in range(100):
        for _ in range(times if checkpoint.steps == 3 else 0):
            os.kill(os.getpid(), number)
        checkpoint.step()


def test_sigterm_saves_and_ends_behind_the_step(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    net, optimizer, _ = build()
    run = rankstep.Checkpoint(tmp_path, model=net, optimizer=optimizer)
    with pytest.raises(Stopped) as stopped, run as checkpoint:
        told_to_end(checkpoint, signal.SIGTERM)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert steps_in(tmp_path) == [4]
    assert signal.getsignal(signal.SIGTERM) is before
    # Entered again, it has forgotten that.
    with run as checkpoint:
        for _ in range(3):
            checkpoint.step()
        assert checkpoint.steps == 7


def test_a_second_signal_has_its_old_effect(tmp_path):
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        run = rankstep.Checkpoint(tmp_path, model=build()[0], stop_signals=[signal.SIGUSR1])
        with pytest.raises(Stopped), run as checkpoint:
            told_to_end(checkpoint, signal.SIGUSR1, times=2)
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


# ---------------------------------------------------------------- bad input


def damage(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_the_newest_whole_one_is_taken_and_the_others_are_named(tmp_path, uninterrupted):
    with pytest.raises(Die):
        train(tmp_path, die=6)
    assert steps_in(tmp_path) == [3, 4, 5]
    damage(tmp_path / "step-00000005" / MODEL)
    (tmp_path / "step-00000004" / STATE).unlink()
    with pytest.warns(CheckpointWarning) as warned:
        resumed = train(tmp_path, every=100)
    texts = [str(warning.message) for warning in warned]
    assert len(texts) == 2
    assert "step-00000005 was passed over: model.safetensors is damaged: its checksum" in texts[0]
    assert "step-00000004 was passed over: state.json is missing; going on from" in texts[1]
    assert_equal(resumed, uninterrupted)
    # What was passed over is neither deleted nor counted.
    assert steps_in(tmp_path) == [3, 4, 5, 14]


def test_if_none_is_whole_nothing_is_begun_anew(tmp_path):
    with pytest.raises(Die):
        train(tmp_path, die=3)
    for step in (1, 2):
        damage(tmp_path / f"step-0000000{step}" / MODEL)
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints in .* is whole: step-00"):
        train(tmp_path)
    assert steps_in(tmp_path) == [1, 2]


def test_a_newer_format_is_not_passed_over(tmp_path):
    with pytest.raises(Die):
        train(tmp_path, die=3)
    marker = tmp_path / "step-00000002" / MARKER
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format": 7}))
    with pytest.raises(
        CheckpointError, match="step-00000002 is of a later Rankstep: it has format 7"
    ):
        train(tmp_path)


def open_with(directory, model, optimizer=(), **options):
    with rankstep.Checkpoint(directory, model=model, optimizer=optimizer, **options):
        pass


def test_a_foreign_checkpoint_is_named_and_changes_nothing(tmp_path):
    with pytest.raises(Die):
        train(tmp_path, die=2)
    net = nn.Sequential(nn.Linear(4, 7), nn.Dropout(), nn.Tanh(), nn.Linear(7, 2), nn.Linear(2, 2))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(CheckpointError) as raised:
        open_with(tmp_path, net)
    text = str(raised.value)
    assert "step-00000001: it is that of another model: " in text
    assert "'0.weight' is torch.float32 [6, 4] there and torch.float32 [7, 4] here" in text
    assert "only the model here has '4.bias'" in text
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    half = build()[0].bfloat16()
    with pytest.raises(CheckpointError, match=r"is torch\.float32 \[6\] there and torch\.bfloat16"):
        open_with(tmp_path, half)


def test_foreign_optimizers_and_schedulers_are_named(tmp_path):
    with pytest.raises(Die):
        train(tmp_path, die=2)
    net, optimizer, scheduler = build()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    step_lr = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    turned = torch.optim.AdamW(list(net.parameters())[::-1])
    for parts, named in (
        ((optimizer, ()), "it has 1 schedulers, and 0 were given"),
        (((), scheduler), "it has 1 optimizers, and 0 were given"),
        ((sgd, scheduler), "its optimizer is of another kind: only there it has .*betas"),
        ((optimizer, step_lr), "its scheduler is a MultiStepLR, and here it is a StepLR"),
        ((turned, scheduler), "another order: parameter 0 is '0.weight' there and '3.bias' here"),
    ):
        with pytest.raises(CheckpointError, match=named):
            open_with(tmp_path, net, parts[0], scheduler=parts[1])
    with pytest.raises(CheckpointError, match="it has nothing, and here there is ema"):
        open_with(tmp_path, net, optimizer, scheduler=scheduler, ema=scheduler)
    other = rankstep.DistributedSampler(Quiet(99), 1, 0)
    with pytest.raises(CheckpointError, match="dataset_len is 26 in the state and 99 here"):
        open_with(tmp_path, net, optimizer, scheduler=scheduler, sampler=other)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda state: state.pop("parts"), "malformed"),
        (lambda state: state["parts"].update(model=[]), "malformed"),
        (lambda state: state["parts"]["model"].pop("0.bias"), "only the model here has '0.bias'"),
        (lambda state: state.update(ranks=[]), "states of 0 ranks, and its marker says 1"),
        (lambda state: state["ranks"].__setitem__(0, {"$exec": "x"}), r"holds a '\$exec'"),
        (lambda state: state["ranks"].__setitem__(0, {}), "malformed"),
        (lambda state: state["progress"].update(handed="x"), "malformed"),
        (lambda state: state["progress"].update(sampler={"epoch": 1}), "sampler state lacks"),
        (lambda state: state["parts"].update(optimizers=[{}]), "malformed"),
    ],
)
def test_nonsense_with_right_checksums_is_refused(change, named, tmp_path):
    from rankstep.checkpoint.files import measure
    from rankstep.checkpoint.folder import _checksum

    with pytest.raises(Die):
        train(tmp_path, die=2)
    path = tmp_path / "step-00000001"
    state = json.loads((path / STATE).read_text())
    change(state)
    (path / STATE).write_text(json.dumps(state))
    marker = json.loads((path / MARKER).read_text())
    written = measure(path / STATE)
    marker["files"][STATE] = {"size_bytes": written.size_bytes, "crc32": written.crc32}
    del marker["crc32"]
    (path / MARKER).write_text(json.dumps(marker | {"crc32": _checksum(marker)}))
    with pytest.raises(CheckpointError, match=named):
        train(tmp_path)


def test_what_cannot_be_saved_is_named_and_the_run_may_go_on(tmp_path):
    net, optimizer, _ = build()
    with rankstep.Checkpoint(tmp_path, model=net, optimizer=optimizer, every=1) as checkpoint:
        checkpoint.extra["path"] = Path("x")
        with pytest.raises(CheckpointError, match=r"own state\.extra\.path is a pathlib"):
            checkpoint.step()
        checkpoint.extra.clear()
        checkpoint.step()
    assert steps_in(tmp_path) == [2]


def save_twice(checkpoint):
    for _ in range(2):
        checkpoint.step()
        checkpoint.save()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_told_and_the_run_may_go_on(asynchronous, tmp_path, monkeypatch):
    from rankstep.checkpoint import files

    def full(*_):
        raise OSError(28, os.strerror(28))

    net, optimizer, _ = build()
    with rankstep.Checkpoint(
        tmp_path, model=net, optimizer=optimizer, asynchronous=asynchronous
    ) as checkpoint:
        checkpoint.step()
        checkpoint.save()
        while steps_in(tmp_path) != [1]:
            time.sleep(0.01)
        monkeypatch.setattr(files, "sync", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            save_twice(checkpoint)
        monkeypatch.undo()
        assert steps_in(tmp_path) == [1]
        checkpoint.step()
    assert len(steps_in(tmp_path)) == 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"every": 0}, "every=0 must be"),
        ({"every": 2.5}, "every=2.5 must be"),
        ({"keep": 0}, "keep=0 must be"),
        ({"best": "high"}, "best='high' must be"),
        ({"sampler": RandomSampler([1])}, "sampler= takes a rankstep.DistributedSampler"),
    ],
)
def test_impossible_arguments_are_named(options, named, tmp_path):
    with pytest.raises(CheckpointError, match=named):
        rankstep.Checkpoint(tmp_path, model=nn.Linear(1, 1), **options)


def test_a_score_that_is_no_number_is_none(tmp_path):
    net, optimizer, _ = build()
    with rankstep.Checkpoint(tmp_path, model=net, optimizer=optimizer, best="max") as checkpoint:
        checkpoint.step()
        checkpoint.save(float("nan"))
    assert json.loads((tmp_path / "step-00000001" / MARKER).read_text())["score"] is None


def test_it_is_open_only_inside_its_block(tmp_path):
    checkpoint = rankstep.Checkpoint(tmp_path, model=nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="is not open"):
        checkpoint.step()
    with (
        checkpoint,
        pytest.raises(CheckpointError, match="open already"),
    ):
        checkpoint.__enter__()


def test_the_library_is_asked_for_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    with pytest.raises(CheckpointError, match=r"pip install 'rankstep\[checkpoint\]'"):
        open_with(tmp_path, nn.Linear(1, 1))


def test_a_loop_left_by_break_ends_when_the_next_begins(tmp_path):
    def run(limit, stop_at):
        net, optimizer, _ = build()
        sampler = rankstep.DistributedSampler(Quiet(), 1, 0)
        loader = DataLoader(Quiet(), batch_size=4, sampler=sampler)
        seen = []
        with rankstep.Checkpoint(
            tmp_path, model=net, optimizer=optimizer, sampler=sampler
        ) as checkpoint:
            for epoch in checkpoint.epochs(2):
                for number, (_, indices) in enumerate(checkpoint.batches(loader)):
                    if number == limit:
                        break
                    seen.append((epoch, indices.tolist()))
                    checkpoint.step()
                    if checkpoint.steps == stop_at:
                        return seen, checkpoint.epoch
        return seen, 2

    first, epoch = run(3, 5)
    assert [number for number, _ in first] == [0, 0, 0, 1, 1]
    assert epoch == 1
    # Stopped for today inside the second epoch, it goes on there.
    second, _ = run(100, None)
    assert [number for number, _ in second] == [1] * 5
    of_epoch = [index for number, batch in first + second if number == 1 for index in batch]
    assert sorted(of_epoch) == list(range(SAMPLES))
