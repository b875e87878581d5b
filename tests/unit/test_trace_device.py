"""Times of a device by marks in its streams, against a GPU that is made up and can foretell every one of them."""

from __future__ import annotations

import time
import warnings
from types import SimpleNamespace

import pytest
import torch
from gpu_fake import Gpu, SlowLink
from trace_samples import MS, B, D, F, S, W
from trace_writer import BIG, Run, header, plan

from rankstep.buckets.plan import Caps
from rankstep.buckets.reducer import Reducer
from rankstep.parallel.hooks import GradientHooks
from rankstep.trace import device, overlap, recorder
from rankstep.trace import events as ev
from rankstep.trace.device import DeviceMarks
from rankstep.trace.files import load
from rankstep.trace.journal import Journal, Queue
from rankstep.trace.ondevice import DeviceClock
from rankstep.trace.recorder import RecorderWarning, _plan_line, file_name
from rankstep.trace.summary import paragraph, summarize

GPU = torch.device("cuda", 0)


class Training:
    """One rank whose host queues work and runs ahead; recorded as the recorder does it, without its wrapper."""

    def __init__(self, folder, gpu, monkeypatch, takes_ms=10, **other):
        monkeypatch.setattr(time, "perf_counter_ns", gpu.clock)
        monkeypatch.setattr(time, "perf_counter", gpu.seconds)
        self.gpu, self.failures = gpu, []
        self.params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
        self.reducer = Reducer(["a", "b", "c"], self.params, SlowLink(gpu, takes_ms), Caps((8,)))
        self.hooks = GradientHooks(self.reducer, self.params)
        self.hooks._queue_end = lambda: None
        self.marks = DeviceMarks(GPU, self.failures.append, gpu)
        self.queue, self.spans = Queue(), Queue()
        self.marks.start()
        self.tell = self.marks.teller(0, self.queue, host_waits=False)
        self.reducer.recorder = self.tell
        self.journal = Journal(folder / file_name(0), header(device="cuda:0", **other), BIG)
        self.planned = False

    def step(self, number, data_ms=1):
        """Device: forward 7, three gradients of 6 each, whatever the link makes it wait, optimizer 5; host: next to nothing."""
        gpu = self.gpu
        begin = gpu.now
        gpu.host_ms(data_ms)
        self.spans.tell(("data", begin, gpu.now))
        self.tell(ev.ForwardBegan(number, gpu.now))
        gpu.run(7)
        self.tell(ev.ForwardEnded(number, gpu.now))
        mark, begin = self.marks.begins(), gpu.now
        for index in (2, 1, 0):
            gpu.run(6)
            self.params[index].grad = torch.ones(2)
            with torch.no_grad():
                for hook in self.params[index]._post_accumulate_grad_hooks.values():
                    hook(self.params[index])
        self.reducer.settle()
        self.spans.tell(("backward", begin, gpu.now))
        self.marks.ends("backward", mark)
        self.take()
        mark, begin = self.marks.begins(), gpu.now
        gpu.run(5)
        self.spans.tell(("optimizer", begin, gpu.now))
        self.marks.ends("optimizer", mark)

    def take(self):
        if not self.planned:
            self.planned = True
            self.journal.add(_plan_line(self.reducer, self.reducer.line))
        self.marks.read()
        self.journal.take(0, self.queue)
        self.journal.take_spans(self.spans)
        self.journal.take_rows(self.marks.drain())

    def close(self):
        self.gpu.host_ms(1000)  # until the device is through
        self.take()
        self.hooks.remove()
        self.journal.close()


def trained(folder, monkeypatch, gpu=None, steps=4, **options):
    """Train some steps and read what was recorded."""
    gpu = gpu or Gpu()
    with monkeypatch.context() as patch:
        run = Training(folder, gpu, patch)
        for number in range(steps):
            run.step(number, **options)
        run.close()
    assert run.failures == []
    (rank,) = load(folder).ranks
    assert rank.by_device
    return rank


def near(ms):
    """So many milliseconds but for the microseconds that the host takes to queue."""
    return pytest.approx(ms * MS, abs=0.1 * MS)


@pytest.mark.parametrize("skew_ms", [0, -3_000, 86_400_000])
def test_a_host_that_runs_ahead_is_seen_through(tmp_path, monkeypatch, skew_ms):
    rank = trained(tmp_path, monkeypatch, Gpu(skew_ms))
    step = rank.steps[2]
    # Gradients are in their buckets at 13, 19 and 25; the link takes 10 for each, one after the other.
    begin = step.begin_ns
    assert [b.launched_ns - begin for b in step.buckets] == [near(13), near(19), near(25)]
    assert [b.filled_ns - begin for b in step.buckets] == [near(13), near(19), near(25)]
    assert [b.finished_ns - begin for b in step.buckets] == [near(23), near(33), near(43)]
    assert [at - begin for _, at in step.ready] == [near(13), near(19), near(25)]
    long = [s for s in step.spans if s.end_ns - s.begin_ns > 0.1 * MS]
    assert [(s.kind, s.begin_ns - begin, s.end_ns - begin) for s in long] == [
        (F, near(0), near(7)),
        (B, near(7), near(25)),
        (W, near(25), near(43)),
        (S, near(43), near(48)),
    ]
    parts = overlap.parts(step, overlap.starts([step]))
    assert parts.hidden_ns == near(12)
    assert parts.exposed_ns == near(18)
    assert parts.compute_ns == near(7 + 18 + 5)
    # The host did wait for data, a millisecond, but the device had enough to do.
    assert parts.data_ns == 0
    assert parts.step_ns == step.end_ns - step.begin_ns == near(48)
    assert rank.clock_error_ns < 0.1 * MS
    told = paragraph(summarize(load(tmp_path)))
    assert "as the host sees it" not in told


def test_the_host_never_waits_and_reads_a_step_later(tmp_path, monkeypatch):
    gpu = Gpu()
    run = Training(tmp_path, gpu, monkeypatch)
    for number in range(3):
        run.step(number)
    # Three steps of 48 ms are queued, and the host has spent 3.3 ms on them. The fake has nothing to wait with.
    assert gpu.now < 1004 * MS
    assert load(tmp_path).ranks[0].steps == ()
    gpu.host_ms(100)  # the first two are through
    run.step(3)
    run.journal.write()
    assert [step.number for step in load(tmp_path).ranks[0].steps] == [0, 1]
    marks_of_a_step = gpu.made / 4
    for number in range(4, 40):
        gpu.host_ms(60)
        run.step(number)
    run.close()
    assert gpu.made < 6 * marks_of_a_step  # read ones are put anew


def test_data_that_the_device_has_to_wait_for_counts(tmp_path, monkeypatch):
    rank = trained(tmp_path, monkeypatch, data_ms=70)
    step = rank.steps[2]
    parts = overlap.parts(step, overlap.starts([step]))
    # The device takes 48 ms for a step and idles for the rest of the 70 that the host loads.
    assert parts.data_ns == near(22)
    assert parts.compute_ns == near(30)
    assert parts.step_ns == near(70)
    first = next(s for s in step.spans if s.kind is D)
    assert first.begin_ns == near_(step.begin_ns)


def near_(ns):
    return pytest.approx(ns, abs=0.1 * MS)


def test_a_device_that_is_busy_at_first_is_told(tmp_path, monkeypatch):
    gpu = Gpu(skew_ms=5000)
    gpu.run(300)
    rank = trained(tmp_path, monkeypatch, gpu)
    # Nobody saw it idle, so its clock is known only as far as the host was ahead of it.
    assert 100 * MS < rank.clock_error_ns < 1000 * MS
    assert rank.steps[2].end_ns - rank.steps[2].begin_ns == near(48)


def test_a_clock_that_drifts_is_followed(tmp_path, monkeypatch):
    """A hundredth of a percent: 7 ms in 70 s."""
    gpu = Gpu(drift=1e-4)
    with monkeypatch.context() as patch:
        run = Training(tmp_path, gpu, patch)
        began = []
        for number in range(1000):
            gpu.host_ms(70)
            began.append(gpu.now)
            run.step(number)
        run.close()
    (rank,) = load(tmp_path).ranks
    assert len(rank.steps) == 1000
    # The device idles before each step, so each mark says when it was.
    for step, at in zip(rank.steps, began, strict=True):
        forward = next(s for s in step.spans if s.kind is F)
        assert abs(forward.begin_ns - at - MS) < 0.2 * MS


def test_a_clock_without_contradiction_has_one_offset():
    clock = DeviceClock([(100, 10), (200, 105)], [(100, 10, 130), (200, 105, 230)])
    # Not before the host queued it: 95 at least. Not after it was seen: 120 at most.
    assert [clock.host(at) for at in (0, 10, 1000)] == [95, 105, 1095]
    assert clock.error_ns == 25


def test_a_clock_with_contradictions_follows_its_bounds():
    marks = [(100, 0), (220, 100), (340, 200)]
    clock = DeviceClock(marks, [(100, 0, 105), (340, 200, 350)])
    assert [clock.host(at) for at in (0, 50, 100, 200, 300)] == [100, 150, 220, 340, 440]
    assert clock.error_ns == 40


def test_steps_that_the_device_had_not_finished_are_left_out(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        gpu = Gpu()
        run = Training(tmp_path, gpu, patch)
        for number in range(4):
            run.step(number)
        gpu.host_ms(100)
        run.take()
        run.hooks.remove()
        run.journal.write()  # killed here
    trace = load(tmp_path)
    assert [step.number for step in trace.ranks[0].steps] == [0, 1]
    assert trace.notices == (
        "The device of rank 0 had not got to the end of 2 steps when the recording ended, so they are left out.",
    )


def test_what_is_captured_has_no_mark(tmp_path, monkeypatch):
    gpu = Gpu()
    run = Training(tmp_path, gpu, monkeypatch)
    gpu.capturing = True
    made = gpu.made
    run.step(0)
    assert gpu.made == made
    gpu.capturing = False
    run.step(1)
    assert gpu.made > made
    run.close()


def test_a_device_that_fails_leaves_the_times_of_the_host(tmp_path, monkeypatch):
    gpu = Gpu()
    gpu.broken = True
    with monkeypatch.context() as patch:
        run = Training(tmp_path, gpu, patch)
        for number in range(3):
            run.step(number)
        run.close()
    assert [str(error) for error in run.failures] == ["the device is gone"]
    trace = load(tmp_path)
    assert not trace.ranks[0].by_device
    assert [step.number for step in trace.ranks[0].steps] == [0, 1, 2]
    assert trace.ranks[0].steps[1].buckets[0].finished_ns is None


def test_marks_that_nobody_reads_are_bounded(monkeypatch):
    monkeypatch.setattr(device, "WAITING", 10)
    gpu = Gpu()
    monkeypatch.setattr(time, "perf_counter_ns", gpu.clock)
    monkeypatch.setattr(time, "perf_counter", gpu.seconds)
    marks = DeviceMarks(GPU, pytest.fail, gpu)
    marks.start()
    gpu.run(50)
    for _ in range(10):
        marks.begins()
    assert not marks.lost
    marks.begins()
    assert marks.lost


def test_at_the_end_the_rest_is_looked_for_for_a_moment(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(time, "perf_counter_ns", gpu.clock)
    monkeypatch.setattr(time, "perf_counter", gpu.seconds)
    marks = DeviceMarks(GPU, pytest.fail, gpu)
    marks.start()
    gpu.run(500)
    marks.ends("optimizer", marks.begins())
    monkeypatch.setattr(time, "monotonic", gpu.seconds)
    monkeypatch.setattr(time, "sleep", lambda seconds: gpu.host_ms(seconds * 1000))
    marks.finish()
    assert len(marks.drain()[None]["device_optimizer"]) == 4
    gpu.run(5000)
    marks.ends("optimizer", marks.begins())
    before = gpu.now
    marks.finish()
    assert gpu.now - before == near(1000)
    assert "device_optimizer" not in marks.drain().get(None, {})


def test_a_backend_whose_host_waits_tells_its_ends_itself(tmp_path, monkeypatch):
    """gloo on tensors of a GPU."""
    gpu = Gpu()
    monkeypatch.setattr(time, "perf_counter_ns", gpu.clock)
    monkeypatch.setattr(time, "perf_counter", gpu.seconds)
    marks, queue = DeviceMarks(GPU, pytest.fail, gpu), Queue()
    marks.start()
    made = gpu.made
    tell = marks.teller(0, queue, host_waits=True)
    tell(ev.BucketFinished(0, 0, 5))
    assert gpu.made == made
    marks.teller(0, queue, host_waits=False)(ev.BucketFinished(0, 1, 5))
    assert gpu.made == made + 1
    assert len(queue.drain()[0]) == 2


def test_a_file_whose_marks_are_of_one_wrapper_only_keeps_the_times_of_the_host(tmp_path):
    """A second wrapper on another device has none."""
    run = Run(tmp_path, device="cuda:0")
    for wrapper in (1, 2):
        run.journal.add(plan(wrapper=wrapper))
        run.step(0, 0) if wrapper == 1 else run.backward(0, 20, 26, wrapper)
    run.journal.take_rows({1: {"device_step_settled": [0, 5, 5]}})
    run.close()
    assert not load(tmp_path).ranks[0].by_device


# ---------------------------------------------------------------- the recorder


def wrapper(place, number=1):
    comm = SimpleNamespace(host_waits=False)
    return SimpleNamespace(
        device=torch.device(place), reducer=SimpleNamespace(wrapper=number, comm=comm)
    )


def test_the_recorder_marks_on_gpus_and_not_on_cpus(tmp_path, monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(device, "DeviceMarks", lambda *args: DeviceMarks(*args, module=gpu))
    recording = recorder.Recorder(tmp_path, range(10))
    queue = Queue()
    # On a CPU an event is one append, and taps look at one None.
    assert recording._teller(wrapper("cpu"), queue) == queue.tell
    recording._switch(on=True)
    assert recording._marks is recording._taps.marks is None
    recording._switch(on=False)
    assert recording._teller(wrapper("cuda:0"), queue) != queue.tell
    recording._switch(on=True)
    assert recording._taps.marks is recording._marks
    assert gpu.made == 1
    # One device is followed.
    assert recording._teller(wrapper("cuda:1"), queue) == queue.tell
    recording._switch(on=False)
    assert recording._taps.marks is None
    gpu.broken = True
    with pytest.warns(
        RecorderWarning, match="times of cuda:0 cannot be taken, so those of its host"
    ):
        recording._marks.begins()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recording._marks.begins()
