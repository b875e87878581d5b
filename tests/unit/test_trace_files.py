"""From recorded events to a file and back: what the ranks tell comes out as steps, whatever state the files are in."""

from __future__ import annotations

import json
import time

import pytest
import torch
from trace_samples import MS, B, D, F, S, W, X
from trace_writer import BIG, Run, header, plan

from rankstep.buckets.plan import Caps
from rankstep.buckets.reducer import Reducer
from rankstep.parallel.hooks import GradientHooks
from rankstep.testing import DelayedCommunicator, RecordingCommunicator
from rankstep.trace import events as ev
from rankstep.trace import overlap
from rankstep.trace.assemble import innermost
from rankstep.trace.files import load
from rankstep.trace.journal import COLUMNS, QUEUE_LIMIT, Journal, Queue
from rankstep.trace.recorder import _plan_line, file_name


def shown(step):
    return [(s.kind, s.begin_ns / MS, s.end_ns / MS) for s in step.spans]


@pytest.fixture
def plain(tmp_path):
    """Two steps: data, forward, backward, optimizer."""
    run = Run(tmp_path)
    run.journal.add(plan())
    for number in range(2):
        run.step(number, 20 * number)
    run.close()
    return tmp_path


# ---------------------------------------------------------------- steps


def test_a_run_comes_back(plain):
    trace = load(plain)
    (rank,) = trace.ranks
    assert (trace.world_size, trace.command) == (1, "train.py")
    assert trace.versions == {"rankstep": "1", "torch": "2", "python": "3"}
    assert (rank.rank, rank.host, rank.device, rank.clock_error_ns) == (0, "here", "cpu", 0)
    assert rank.complete
    assert rank.unix_ns == 1000
    assert rank.params == ("a", "b")
    assert [(b.index, b.nbytes, b.params) for b in rank.buckets] == [(0, 4, (1,)), (1, 4, (0,))]
    first, second = rank.steps
    assert (first.number, first.begin_ns, first.end_ns) == (0, 0, 20 * MS)
    # The last step ends with the last thing that is known of it.
    assert (second.number, second.begin_ns, second.end_ns) == (1, 20 * MS, 36 * MS)
    assert shown(first) == [
        (D, 0, 2),
        (X, 2, 3),
        (F, 3, 6),
        (X, 6, 7),
        (B, 7, 11),
        (W, 11, 13),
        (X, 13, 14),
        (S, 14, 16),
        (X, 16, 20),
    ]
    assert first.ready == ((1, 9 * MS), (0, 11 * MS))
    early, late = first.buckets
    assert (early.index, early.filled_ns, early.launched_ns) == (0, 9 * MS, 9 * MS)
    assert (early.finished_ns, early.in_backward) == (11 * MS, True)
    assert (late.finished_ns, late.in_backward) == (None, False)
    assert (late.wait_begin_ns, late.wait_end_ns) == (11 * MS, 13 * MS)


def test_times_come_out_on_the_clock_of_rank_0(tmp_path):
    for rank, offset in ((0, 0), (1, 50 * MS)):
        run = Run(tmp_path, rank=rank, world_size=2, offset_ns=offset, error_ns=7)
        run.journal.add(plan())
        at = offset // MS
        run.forward(0, at, at + 3)
        run.backward(0, at + 3, at + 9)
        run.close()
    first, second = load(tmp_path).ranks
    assert first.steps == second.steps
    assert second.clock_error_ns == 7
    assert second.unix_ns == first.unix_ns + 50 * MS


def test_micro_batches_belong_to_the_backward_they_lead_to(tmp_path):
    run = Run(tmp_path)
    run.journal.add(plan())
    for number, at in enumerate((0, 40)):
        run.span("data", at, at + 1)
        run.forward(number, at + 1, at + 4)
        run.span("backward", at + 4, at + 9)  # under no_sync
        run.span("data", at + 10, at + 11)
        run.forward(number, at + 11, at + 14)
        run.backward(number, at + 14, at + 20)
    run.close()
    (rank,) = load(tmp_path).ranks
    assert [(s.number, s.begin_ns // MS, s.end_ns // MS) for s in rank.steps] == [
        (0, 0, 40),
        (1, 40, 60),
    ]
    kinds = [s.kind for s in rank.steps[0].spans]
    assert kinds == [D, F, B, X, D, F, B, W, X]


def test_an_optimizer_closure_is_split_into_what_runs_inside(tmp_path):
    run = Run(tmp_path)
    run.journal.add(plan())
    run.span("data", 0, 1)
    run.forward(0, 3, 6)
    run.backward(0, 6, 12)
    run.span("optimizer", 2, 15)
    run.close()
    (rank,) = load(tmp_path).ranks
    assert shown(rank.steps[0]) == [
        (D, 0, 1),
        (X, 1, 2),
        (S, 2, 3),
        (F, 3, 6),
        (B, 6, 10),
        (W, 10, 12),
        (S, 12, 15),
    ]


def test_a_new_plan_has_buckets_of_its_own(tmp_path):
    run = Run(tmp_path)
    run.journal.add(plan())
    run.journal.add(plan(plan_from=1, names=("b", "c"), buckets=((0,), (1,))))
    for number, at in enumerate((0, 20)):
        run.forward(number, at, at + 3)
        run.backward(number, at + 3, at + 9)
    run.close()
    (rank,) = load(tmp_path).ranks
    assert rank.params == ("a", "b", "c")
    assert [b.params for b in rank.buckets] == [(1,), (0,), (1,), (2,)]
    assert [[b.index for b in s.buckets] for s in rank.steps] == [[0, 1], [2, 3]]
    assert [param for param, _ in rank.steps[1].ready] == [2, 1]


def test_a_step_that_never_settled_is_left_out(tmp_path):
    run = Run(tmp_path)
    run.journal.add(plan())
    run.forward(0, 0, 3)
    run.backward(0, 3, 9)
    run.forward(1, 10, 13)
    run.tell(ev.BucketLaunched(1, 0, True, 15 * MS))
    run.close(end=False)
    (rank,) = load(tmp_path).ranks
    assert [s.number for s in rank.steps] == [0]
    assert rank.steps[0].end_ns == 10 * MS
    assert not rank.complete


def test_a_backward_that_no_tap_saw_begins_with_its_first_gradient(tmp_path):
    run = Run(tmp_path)
    run.journal.add(plan())
    run.forward(0, 0, 3)
    run.backward(0, 3, 9, call=False)
    run.close()
    (rank,) = load(tmp_path).ranks
    assert shown(rank.steps[0]) == [(F, 0, 3), (X, 3, 5), (B, 5, 7), (W, 7, 9)]


def test_backwards_without_a_forward_between_them_are_steps(tmp_path):
    run = Run(tmp_path)
    run.journal.add(plan())
    run.forward(0, 0, 3)
    run.backward(0, 3, 9)
    run.backward(1, 10, 16)
    run.forward(2, 20, 21)
    run.backward(2, 21, 27)
    run.close()
    (rank,) = load(tmp_path).ranks
    cuts = [(s.begin_ns // MS, s.end_ns // MS) for s in rank.steps]
    assert cuts == [(0, 9), (9, 20), (20, 27)]


def test_on_a_gpu_nobody_knows_when_a_bucket_ended(tmp_path):
    run = Run(tmp_path, device="cuda:0")
    run.journal.add(plan())
    run.forward(0, 0, 3)
    run.backward(0, 3, 9)
    run.close()
    (rank,) = load(tmp_path).ranks
    assert [b.finished_ns for b in rank.steps[0].buckets] == [None, None]


def test_each_moment_belongs_to_the_innermost_span():
    spans = [(F, 2, 9), (B, 4, 6), (D, 12, 15), (W, 12, 13)]
    assert innermost(spans, 0, 16) == [
        (X, 0, 2),
        (F, 2, 4),
        (B, 4, 6),
        (F, 6, 9),
        (X, 9, 12),
        (W, 12, 13),
        (D, 13, 15),
        (X, 15, 16),
    ]


# ---------------------------------------------------------------- a reducer with a known clock


class Clock:
    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now

    def pass_ms(self, ms):
        self.now += ms * MS


class SlowLink(DelayedCommunicator):
    """Every all-reduce takes the same time, and only the clock of the test passes."""

    def __init__(self, inner, clock, takes_ms):
        super().__init__(inner)
        self.clock, self.takes_ns = clock, takes_ms * MS

    def _call(self, inputs, outputs, start):
        pending = super()._call(inputs, outputs, start)
        clock = self.clock
        ends = clock.now + self.takes_ns

        class Timed:
            def wait(self):
                clock.now = max(clock.now, ends)
                pending.wait()

        return Timed()


def test_a_link_with_a_known_delay_is_measured_exactly(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter_ns", clock)
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    comm = SlowLink(RecordingCommunicator(1), clock, takes_ms=10)
    reducer = Reducer(["a", "b", "c"], params, comm, Caps((8,)))
    hooks = GradientHooks(reducer, params)
    hooks._queue_end = lambda: None
    queue = Queue()
    reducer.recorder = queue.tell
    for number in range(2):
        queue.tell(ev.ForwardBegan(number, clock.now))
        clock.pass_ms(7)
        queue.tell(ev.ForwardEnded(number, clock.now))
        for index in (2, 1, 0):
            clock.pass_ms(6)
            params[index].grad = torch.ones(2)
            with torch.no_grad():
                for hook in params[index]._post_accumulate_grad_hooks.values():
                    hook(params[index])
        reducer.settle()
    hooks.remove()
    monkeypatch.undo()
    journal = Journal(tmp_path / file_name(0), header(), BIG)
    journal.add(_plan_line(reducer, reducer.line))
    journal.take(0, queue)
    journal.close()

    (rank,) = load(tmp_path).ranks
    _, step = rank.steps
    started = overlap.starts([step])
    parts = overlap.parts(step, started)
    figures = overlap.bucket_figures(step, started, [b.params for b in rank.buckets])
    begin = step.begin_ns
    # Forward ends at 7; gradients arrive at 13, 19 and 25; the buckets end at 23, 29 and 35.
    assert [(p, at - begin) for p, at in step.ready] == [(2, 13 * MS), (1, 19 * MS), (0, 25 * MS)]
    assert [b.launched_ns - begin for b in step.buckets] == [13 * MS, 19 * MS, 25 * MS]
    assert [b.in_backward for b in step.buckets] == [True, True, False]
    assert parts.exposed_ns == 10 * MS
    assert parts.hidden_ns == (25 - 13) * MS
    assert parts.hidden_share == 12 / 22
    # Before the first gradient nobody can know that backward runs.
    assert parts.compute_ns == (7 + 12) * MS
    assert parts.other_ns == 6 * MS
    assert parts.step_ns == 35 * MS
    # Without a future the end of the first bucket is not known before it is waited for, at 25.
    assert [f.flight_ns for f in figures] == [12 * MS, 10 * MS, 10 * MS]
    assert [f.exposed_ns for f in figures] == [0, 4 * MS, 6 * MS]
    assert [(f.fill_ns, f.delay_ns) for f in figures] == [(0, 0)] * 3


# ---------------------------------------------------------------- the file


def test_lost_events_are_told(tmp_path):
    run = Run(tmp_path)
    for number in range(QUEUE_LIMIT + 5):
        run.spans.tell(("data", number, number))
    run.close()
    (rank,) = load(tmp_path).ranks
    assert not rank.complete
    assert rank.steps == ()


def test_all_events_of_the_language_are_written():
    told = {
        ev.ForwardBegan: (1, 2),
        ev.ForwardEnded: (1, 2),
        ev.BackwardBegan: (1, 2),
        ev.GradReady: (1, 2, 3),
        ev.BucketFilled: (1, 2, 3),
        ev.BucketLaunched: (1, 2, True, 3),
        ev.BucketFinished: (1, 2, 3),
        ev.BucketWaited: (1, 2, 3, 4),
        ev.WaitsEnded: (1, 2, 3, 4),
        ev.StepSettled: (1, 2),
    }
    assert set(told) == set(ev.Event.__args__)
    from rankstep.trace.journal import _TAKE

    for kind, numbers in told.items():
        name, take = _TAKE[kind]
        event = kind(*numbers)
        assert take(event) == tuple(getattr(event, column) for column in COLUMNS[name])
        assert sorted(take(event)) == sorted(numbers)


def test_a_file_is_private_and_replaces_an_older_one(tmp_path):
    folder = tmp_path / "new" / "folder"
    for command in ("one", "two"):
        Journal(folder / file_name(3), header(command=command), BIG).close()
    path = folder / "rank-00003.jsonl"
    assert json.loads(path.read_text().splitlines()[0])["command"] == "two"
    assert path.stat().st_mode & 0o077 == 0
    assert folder.stat().st_mode & 0o077 == 0
