"""The recorder and its taps in one process: what they note, when they end, and that they never end a training."""

from __future__ import annotations

import functools
import gc
import os
import threading
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

import rankstep
from rankstep.parallel import observers
from rankstep.trace import record, recorder
from rankstep.trace.clock import Alignment, identity
from rankstep.trace.files import TraceError, load
from rankstep.trace.model import SpanKind
from rankstep.trace.recorder import RecorderWarning, install_from_environment
from rankstep.trace.steps import read_steps
from rankstep.trace.taps import Taps

# torch reads its compiler's settings, and sets a variable, when the first optimizer of a process steps.
torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1).step()

ORIGINALS = (DataLoader.__iter__, _BaseDataLoaderIter.__next__, torch.autograd.backward)


def replaced():
    """What is not as it was before the first recording; others may listen for wrappers, too."""
    now = (DataLoader.__iter__, _BaseDataLoaderIter.__next__, torch.autograd.backward)
    patched = [one for one, before in zip(now, ORIGINALS, strict=True) if one is not before]
    return [*patched, *(one for one in observers.on_wrap if hasattr(one, "__self__"))]


@pytest.fixture(autouse=True)
def everything_is_put_back():
    yield
    assert replaced() == []
    assert recorder._active is None


@pytest.fixture
def group(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    gc.collect()  # wrappers of other tests, which a recorder would find
    yield
    dist.destroy_process_group()


def model():
    layers = [torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)]
    return rankstep.DistributedDataParallel(torch.nn.Sequential(*layers))


def train(wrapper, steps, optimizer=None):
    for _ in range(steps):
        wrapper.zero_grad()
        wrapper(torch.ones(3, 4)).sum().backward()
        if optimizer is not None:
            optimizer.step()


# ---------------------------------------------------------------- taps


class Heard(list):
    """What taps tell, while they are open."""

    def __init__(self):
        super().__init__()
        self.taps = Taps(
            lambda span: self.append(span[0]),
            lambda: self.append("before"),
            lambda: self.append("after"),
        )

    def __enter__(self):
        self.taps.open()
        return self

    def __exit__(self, *_):
        self.taps.close()


def test_batches_are_noted():
    loader = DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2)
    with Heard() as heard:
        batches = list(loader)
    assert len(batches) == 2
    assert heard == ["data"] * 4  # making the iterator, two batches, and finding its end
    list(loader)
    assert len(heard) == 4


def test_another_threads_loading_is_nobodys_wait():
    loader = DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2)
    with Heard() as heard:
        thread = threading.Thread(target=lambda: list(loader))
        thread.start()
        thread.join()
    assert heard == []


class Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            torch.autograd.backward((x.detach().requires_grad_() ** 2).sum())
        return grad


def test_the_outermost_backward_is_noted():
    with Heard() as heard:
        Inner.apply(torch.ones(1, requires_grad=True)).sum().backward()
        assert heard == ["before", "backward", "after"]
        heard.clear()
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones(1).sum().backward()
    assert heard == ["before", "backward", "after"]


def test_optimizer_steps_are_noted_whether_nested_or_after_one_that_raised():
    weight = torch.ones(1, requires_grad=True)
    inner = torch.optim.SGD([weight], lr=0.1)

    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            inner.step()
            return super().step(closure)

    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("no")

    outer, failing = Outer([weight], lr=0.1), Failing([weight], lr=0.1)
    with Heard() as heard:
        outer.step()
        assert heard == ["optimizer"] * 2
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                failing.step()
        outer.step()
    assert heard == ["optimizer"] * 4


def test_a_patch_of_somebody_else_stays():
    try:
        with Heard() as heard:
            ours = torch.autograd.backward
            theirs = torch.autograd.backward = functools.partial(ours)
        assert torch.autograd.backward is theirs
        torch.ones(1, requires_grad=True).sum().backward()
        assert heard == []
    finally:
        torch.autograd.backward = ORIGINALS[2]


# ---------------------------------------------------------------- recording


def test_a_wrapper_made_before_or_inside_the_block_is_recorded(group, tmp_path):
    early = model()
    with record(tmp_path) as recording:
        late = model()
        train(early, 2)
        train(late, 2)
    assert recording.path == tmp_path / "rank-00000.jsonl"
    assert early.reducer.recorder is None
    trace = load(tmp_path)
    (rank,) = trace.ranks
    assert rank.complete
    assert trace.world_size == 1
    assert len(rank.params) == 8
    assert {s.kind for s in rank.steps[0].spans} >= {SpanKind.FORWARD, SpanKind.BACKWARD}
    # Each trained by itself, one after the other.
    assert [(step.number, step.wrappers) for step in rank.steps] == [
        (0, (0,)),
        (1, (0,)),
        (2, (1,)),
        (3, (1,)),
    ]
    assert [step.learns for step in rank.steps] == [True, False, True, False]
    assert [w.split()[0] for w in rank.wrappers] == ["Sequential", "Sequential"]


def test_a_whole_loop(group, tmp_path):
    wrapper = model()
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(12, 4)), batch_size=3)
    with record(tmp_path):
        for (batch,) in loader:
            wrapper(batch).sum().backward()
            optimizer.step()
    (rank,) = load(tmp_path).ranks
    assert [step.number for step in rank.steps] == [0, 1, 2, 3]
    assert rank.steps[0].ready == ()
    for step in rank.steps[1:]:
        kinds = [s.kind for s in step.spans if s.kind is not SpanKind.OTHER]
        assert kinds[:3] == [SpanKind.DATA, SpanKind.FORWARD, SpanKind.BACKWARD]
        assert SpanKind.OPTIMIZER in kinds
        assert {param for param, _ in step.ready} == {0, 1, 2, 3}
        assert [b.index for b in step.buckets] == [0]
        assert step.spans[0].begin_ns == step.begin_ns
        assert step.spans[-1].end_ns == step.end_ns
        for one, after in zip(step.spans, step.spans[1:], strict=False):
            assert one.begin_ns < one.end_ns == after.begin_ns
            assert one.kind is not after.kind


def test_only_the_steps_that_are_wanted(group, tmp_path):
    wrapper = model()
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    listening = []
    with record(tmp_path, "2:4"):
        for _ in range(6):
            listening.append(wrapper.reducer.recorder is not None)
            train(wrapper, 1, optimizer)
        assert torch.autograd.backward is ORIGINALS[2]
    assert listening == [False, False, True, True, True, False]
    (rank,) = load(tmp_path).ranks
    assert [step.number for step in rank.steps] == [2, 3]
    assert rank.complete
    assert rank.steps[-1].spans[-1].kind in (SpanKind.OPTIMIZER, SpanKind.OTHER)


def test_what_was_written_stays_when_the_process_is_gone(group, tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "WRITE_STEPS", 3)
    monkeypatch.setattr(recorder, "WRITE_S", 1000)
    wrapper = model()
    with record(tmp_path):
        train(wrapper, 8)
        (rank,) = load(tmp_path).ranks  # as it is on the disk now
        assert [step.number for step in rank.steps] == [0, 1, 2, 3, 4, 5]
        assert not rank.complete


def test_a_full_file_ends_the_recording(group, tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "WRITE_STEPS", 1)
    monkeypatch.setattr(recorder, "LIMIT_BYTES", 3000)
    wrapper = model()
    with record(tmp_path), pytest.warns(RecorderWarning, match="limit of 3000 bytes and ends"):
        train(wrapper, 20)
    (rank,) = load(tmp_path).ranks
    assert 1 <= len(rank.steps) < 20


def test_a_recorder_that_fails_is_switched_off(group, tmp_path, monkeypatch):
    wrapper = model()
    with record(tmp_path):
        train(wrapper, 1)
        monkeypatch.setattr(recorder.Journal, "take", lambda *_: 1 / 0)
        with pytest.warns(RecorderWarning, match="training goes on: ZeroDivisionError"):
            torch.ones(1, requires_grad=True).sum().backward()
        assert wrapper.reducer.recorder is None
        assert replaced() == []


def test_a_place_that_cannot_be_written_is_told_once(group, tmp_path):
    (tmp_path / "file").write_text("")
    with record(tmp_path / "file"):
        with pytest.warns(RecorderWarning, match="training goes on: (FileExists|NotADirectory)"):
            wrapper = model()
        train(wrapper, 2)


def test_a_second_recording_adds_nothing(group, tmp_path):
    with record(tmp_path / "a"):
        inner = record(tmp_path / "b")
        with pytest.warns(RecorderWarning, match="goes on, so nothing is recorded into"):
            inner.__enter__()
        wrapper = model()
        inner.__exit__(None, None, None)
        train(wrapper, 2)
    assert len(load(tmp_path / "a").ranks[0].steps) == 2
    assert not (tmp_path / "b").exists()


def test_a_forked_child_writes_nothing(group, tmp_path):
    with record(tmp_path) as recording:
        wrapper = model()
        train(wrapper, 1)
        size = recording.path.stat().st_size
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pid = os.fork()
        if pid == 0:
            try:
                recording._after_backward()
                recording.close()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert recording.path.stat().st_size == size


def test_nothing_is_written_without_a_wrapper(tmp_path):
    with record(tmp_path / "a") as recording:
        torch.ones(1, requires_grad=True).sum().backward()
    assert recording.path is None
    assert not (tmp_path / "a").exists()


def test_the_environment_switches_it_on(group, tmp_path, monkeypatch):
    assert install_from_environment() is None
    monkeypatch.setenv("RANKSTEP_TRACE", str(tmp_path))
    monkeypatch.setenv("RANKSTEP_TRACE_STEPS", "1:3")
    recording = install_from_environment()
    assert install_from_environment() is None  # once is enough
    train(model(), 4)
    recording.close()
    assert [step.number for step in load(tmp_path).ranks[0].steps] == [1, 2]


def test_a_model_that_is_let_go_is_not_kept(group, tmp_path):
    with record(tmp_path):
        wrapper = model()
        train(wrapper, 2)
        reducer, line = weakref.ref(wrapper.reducer), weakref.ref(wrapper.reducer.line)
        del wrapper
        gc.collect()
        assert (reducer(), line()) == (None, None)
        torch.ones(1, requires_grad=True).sum().backward()
    assert len(load(tmp_path).ranks[0].steps) == 2


@pytest.mark.parametrize(
    ("text", "steps"),
    [("10:20", (10, 20)), (":5", (0, 5)), ("7:", (7, None)), (None, (0, None)), (":", (0, None))],
)
def test_steps_are_read(text, steps):
    read = read_steps(text)
    assert (read.start, read.stop if steps[1] else None) == steps


@pytest.mark.parametrize("text", ["10", "a:b", "5:5", "9:3", "-1:4", "1:2:3", " 1:2"])
def test_steps_that_are_none_are_told(text, tmp_path):
    with pytest.raises(TraceError, match="FIRST:LAST"), record(tmp_path, text):
        pass


# ---------------------------------------------------------------- clocks


def test_one_rank_is_its_own_clock(group):
    from rankstep.trace.clock import align

    alignment = align(dist.distributed_c10d._get_default_group(), "0")
    assert alignment == Alignment(0, 0, alignment.run)
    assert len(alignment.run) == 32
    assert identity() == identity() != ""
