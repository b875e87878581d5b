"""The reducer against a communicator that plays the other ranks: no processes, no autograd, every order of events."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankstep.buckets import verdict
from rankstep.buckets.plan import Caps
from rankstep.buckets.reducer import Reducer, ReducerState
from rankstep.buckets.trailer import Row, Trailer, numel
from rankstep.errors import (
    AbandonedBackwardError,
    CommunicationError,
    LateGradientError,
    RankSkewError,
)
from rankstep.parallel.hooks import GradientHooks
from rankstep.testing import (
    DelayedCommunicator,
    FailingCommunicator,
    RecordingCommunicator,
    assert_bitwise_equal,
    assert_in_order,
)
from rankstep.trace.events import BucketLaunched, BucketWaited, GradReady, StepSettled

# Every parameter of two floats or more is a bucket of its own.
EACH = Caps((8,))
ALL = Caps((10**9,))
SIZE = 2
KINDS = (GradReady, BucketLaunched, BucketWaited, StepSettled)


def value(index, step=0, rank=0):
    """A gradient of its own for each parameter, step and rank; halves of it are exact."""
    return torch.tensor([2.0 * index + 16.0 * step, 100.0 + 2.0 * index + 1024.0 * rank])


class Peer:
    """The other one of two ranks: puts its own gradients and its own row into every all-reduce.

    Attributes:
        grads: What it has, by parameter; zeros for all others.
        late: What it puts into a second round, by parameter.
        row: What it says; by default what the reducer under test says of itself.
        used: Its flags; by default 1 for whatever has a gradient.
        order: What it broadcasts as rank 0.
        averages: The collective divides, so that it does not.
    """

    def __init__(self):
        self.reducer = None
        self.comm = None
        self.grads = {}
        self.late = {}
        self.row = {}
        self.used = None
        self.order = None
        self.averages = False
        self.launched = 0

    def __call__(self, call):
        collective = self.comm.calls[call]
        if collective.name == "broadcast":
            return [torch.tensor(self.order or [0] * collective.numel)]
        buckets = self.reducer.buckets
        bucket = buckets[self.launched % len(buckets)]
        grads = self.grads if self.launched < len(buckets) else self.late
        self.launched += 1
        part = torch.zeros(collective.numel, dtype=collective.dtype)
        for index, offset in zip(bucket.spec.params, bucket.spec.offsets, strict=True):
            if index in grads:
                part[offset : offset + SIZE] = grads[index] / (1 if self.averages else 2)
        if collective.numel > bucket.spec.numel:
            count = len(self.reducer.params)
            said = {"reductions": self.reducer.reductions, "forwards": self.reducer.forwards}
            me = 1 - self.comm.rank
            tail = Trailer(part[bucket.spec.numel :], count, me, 2, averages=False)
            used = self.used or [int(index in self.grads) for index in range(count)]
            tail.write(Row(**(said | {"wrapper": self.reducer.wrapper} | self.row)), used)
        return [part]

    def new_step(self):
        self.launched = 0


class Driver:
    """Plays autograd and its hooks for one reducer."""

    def __init__(self, count=4, caps=EACH, *, world=1, rank=0, wrap=None, wrapper=0, **options):
        self.params = [torch.nn.Parameter(torch.zeros(SIZE)) for _ in range(count)]
        self.peer = Peer() if world == 2 else None
        comm = RecordingCommunicator(world, rank, self.peer, **options)
        self.comm = wrap(comm) if wrap else comm
        # Nobody is missing, unless a test says so.
        self.absent = []
        self.comm.absent = lambda: self.absent
        names = [f"p{index}" for index in range(count)]
        self.reducer = Reducer(names, self.params, self.comm, caps, wrapper)
        if self.peer is not None:
            self.peer.reducer, self.peer.comm = self.reducer, comm
        self.events = []
        self.reducer.recorder = self._record
        # The hooks are the real ones; only the end of backward comes from the test and not from the engine.
        self.hooks = GradientHooks(self.reducer, self.params)
        self.hooks._queue_end = lambda: None

    def _record(self, event):
        if isinstance(event, KINDS):
            self.events.append(event)

    def fire(self, index, grad):
        """A gradient arrives: autograd accumulates, then calls the hooks."""
        param = self.params[index]
        param.grad = grad.clone() if param.grad is None else param.grad.add_(grad)
        with torch.no_grad():
            for hook in list(param._post_accumulate_grad_hooks.values()):
                hook(param)

    def backward(self, order, step=0):
        """Every parameter of ``order`` fires once, then the backward ends."""
        if self.peer is not None:
            self.peer.new_step()
        for index in order:
            self.fire(index, value(index, step))
        self.reducer.settle()

    def learn(self, order=None):
        """The first step, forgotten at once."""
        order = range(len(self.params)) if order is None else order
        if self.peer is not None:
            self.peer.grads = {index: value(index, 0, 1) for index in order}
        self.backward(order)
        self.zero_grad()
        self.events.clear()
        if self.peer is not None:
            self.peer.new_step()

    def zero_grad(self):
        for param in self.params:
            param.grad = None

    @property
    def grads(self):
        return [param.grad for param in self.params]

    @property
    def launched(self):
        return [event.bucket for event in self.events if isinstance(event, BucketLaunched)]


# ---------------------------------------------------------------- learning


def test_the_first_step_launches_nothing_before_its_end():
    driver = Driver(4)
    for index in (2, 0, 3, 1):
        driver.fire(index, value(index))
        assert driver.comm.calls == []
        assert driver.reducer.plan is None
    assert driver.reducer.buckets == []
    driver.reducer.settle()
    assert [call.name for call in driver.comm.calls] == ["broadcast", *["all_reduce"] * 4]
    assert driver.comm.calls[0].src == 0
    assert driver.reducer.plan.order == (2, 0, 3, 1)
    assert driver.launched == [0, 1, 2, 3]
    assert driver.reducer.firings.expected == [1, 1, 1, 1]
    for index, grad in enumerate(driver.grads):
        assert_bitwise_equal(grad, value(index))
    assert not any(isinstance(event, GradReady) for event in driver.events)


def test_another_rank_adopts_the_order_of_rank_0():
    driver = Driver(4, world=2, rank=1)
    driver.peer.order = [3, 1, 0, 2]
    driver.peer.grads = {index: value(index, 0, 1) for index in range(4)}
    driver.backward([0, 1, 2, 3])
    assert driver.reducer.plan.order == (3, 1, 0, 2)
    assert driver.reducer.firings.order() == [0, 1, 2, 3]
    for index, grad in enumerate(driver.grads):
        assert_bitwise_equal(grad, (value(index) + value(index, 0, 1)) / 2)


def test_a_parameter_that_does_not_fire_in_the_first_step_goes_last():
    driver = Driver(4)
    driver.backward([2, 1])
    assert driver.reducer.plan.order == (2, 1, 3, 0)
    assert driver.reducer.firings.expected == [0, 1, 1, 0]


# ---------------------------------------------------------------- launching


def test_a_full_bucket_leaves_at_once_and_the_last_one_never():
    driver = Driver(4)
    driver.learn()
    for index in range(4):
        driver.fire(index, value(index))
        assert driver.launched == list(range(min(index + 1, 3)))
        if index < 3:
            assert driver.params[index].grad is None
    driver.reducer.settle()
    assert driver.launched == [0, 1, 2, 3]
    in_backward = [e.in_backward for e in driver.events if isinstance(e, BucketLaunched)]
    assert in_backward == [True, True, True, False]
    assert driver.reducer.last_step.launched_in_backward == 3


def test_a_full_bucket_waits_for_all_lower_ones():
    driver = Driver(4)
    driver.learn()
    for index in (2, 1):
        driver.fire(index, value(index))
        assert driver.launched == []
    driver.fire(0, value(0))
    # The one that was missing takes the others along, in the order of the plan.
    assert driver.launched == [0, 1, 2]
    driver.fire(3, value(3))
    assert driver.launched == [0, 1, 2]
    driver.reducer.settle()
    assert driver.launched == [0, 1, 2, 3]
    for index, grad in enumerate(driver.grads):
        assert_bitwise_equal(grad, value(index))


@settings(max_examples=60)
@given(
    st.integers(2, 6).flatmap(lambda n: st.tuples(st.permutations(range(n)), st.integers(8, 20)))
)
def test_buckets_leave_by_index_whatever_becomes_ready_first(case):
    order, cap = case
    count = len(order)
    driver = Driver(count, Caps((cap,)))
    driver.learn()
    buckets = driver.reducer.plan.buckets
    fired = set()
    for index in order:
        driver.fire(index, value(index, 1))
        fired.add(index)
        full = [set(bucket.params) <= fired for bucket in buckets]
        # What has left by now: the longest run of full buckets from the first, without the last.
        expected = len(list(itertools.takewhile(bool, full[:-1])))
        assert driver.launched == list(range(expected))
    driver.reducer.settle()
    assert driver.launched == list(range(len(buckets)))
    for index, grad in enumerate(driver.grads):
        assert_bitwise_equal(grad, value(index, 1))
    events = [e for e in driver.events if isinstance(e, BucketLaunched)]
    assert sum(e.in_backward for e in events) == driver.reducer.last_step.launched_in_backward
    # One that leaves with the very last gradient overlaps with nothing.
    last_fired = driver.events.index([e for e in driver.events if isinstance(e, GradReady)][-1])
    for event in events:
        assert event.in_backward == (driver.events.index(event) < last_fired)


def test_the_only_bucket_leaves_at_the_end():
    driver = Driver(3, ALL)
    driver.learn()
    for index in range(3):
        driver.fire(index, value(index))
    assert driver.launched == []
    driver.reducer.settle()
    assert driver.reducer.last_step.launched_in_backward == 0
    assert driver.reducer.last_step.all_reduces == 1


def test_a_bucket_that_awaits_nobody_leaves_with_the_first_full_one_above():
    driver = Driver(4)
    # Parameter 1 is used in the first step and then not for long: nobody waits for it any more.
    driver.learn()
    for step in range(1, 20):
        driver.backward([0, 2, 3], step)
        driver.zero_grad()
    assert driver.reducer.firings.expected == [1, 0, 1, 1]
    driver.events.clear()
    driver.fire(2, value(2))
    assert driver.launched == []
    driver.fire(0, value(0))
    assert driver.launched == [0, 1, 2]


# ---------------------------------------------------------------- the end of a backward


def test_everything_is_waited_for_and_nothing_is_written_in_flight():
    comms = []

    def delay(comm):
        comms.append(DelayedCommunicator(comm))
        return comms[0]

    driver = Driver(3, world=2, wrap=delay)
    driver.learn()
    comms[0].events.clear()
    driver.peer.grads = {index: value(index, 1, 1) for index in range(3)}
    for index in range(3):
        driver.fire(index, value(index, 1))
    # Two have left and none has been waited for: the gradients are nowhere to be seen.
    assert comms[0].events == ["start 4", "start 5"]
    assert [grad is None for grad in driver.grads] == [True, True, False]
    driver.reducer.settle()
    # The third left before the first was waited for.
    assert_in_order(comms[0].events, "start 6", "wait 4", "wait 5", "wait 6")
    for index, grad in enumerate(driver.grads):
        assert_bitwise_equal(grad, value(index, 1) / 2 + value(index, 1, 1) / 2)


def grads_at_the_first_wait(driver, order):
    """Which parameters have their views when the settling rank begins to wait."""
    seen = []
    first = driver.reducer.buckets[0]
    wait = first.wait

    def look():
        views = [b.view_of[i] for i, b in enumerate(driver.reducer.line.bucket_of)]
        seen.append([grad is view for grad, view in zip(driver.grads, views, strict=True)])
        wait()

    first.wait = look
    driver.backward(order, 1)
    return seen


def test_gradients_are_handed_back_while_the_last_bucket_travels():
    driver = Driver(3)
    driver.learn()
    assert grads_at_the_first_wait(driver, range(3)) == [[True] * 3]
    for index, grad in enumerate(driver.grads):
        assert_bitwise_equal(grad, value(index, 1))


def test_late_gradients_keep_their_place_until_they_were_sent():
    driver = Driver(3)
    driver.learn()
    # Parameter 0 fires again after its bucket has left, and that gradient must not be lost.
    assert grads_at_the_first_wait(driver, [0, 1, 0, 2]) == [[False] * 3]
    assert driver.reducer.last_step.second_round
    assert_bitwise_equal(driver.params[0].grad, 2 * value(0, 1))


def test_events_and_facts_of_a_step():
    driver = Driver(3)
    driver.learn()
    driver.backward([0, 1, 2], 1)
    events = [
        (type(event).__name__, getattr(event, "param", getattr(event, "bucket", None)))
        for event in driver.events
    ]
    assert events == [
        ("GradReady", 0),
        ("BucketLaunched", 0),
        ("GradReady", 1),
        ("BucketLaunched", 1),
        ("GradReady", 2),
        ("BucketLaunched", 2),
        ("BucketWaited", 0),
        ("BucketWaited", 1),
        ("BucketWaited", 2),
        ("StepSettled", None),
    ]
    assert {event.step for event in driver.events} == {1}
    times = [event.at_ns for event in driver.events]
    assert times == sorted(times)
    for event in driver.events:
        if isinstance(event, BucketWaited):
            assert event.begun_ns <= event.at_ns
    facts = driver.reducer.last_step
    assert (facts.step, facts.buckets, facts.all_reduces) == (1, 3, 3)
    assert (facts.launched_in_backward, facts.unused, facts.second_round) == (2, (), False)


def test_without_a_recorder_the_facts_are_the_same():
    with_recorder, without = Driver(3), Driver(3)
    without.reducer.recorder = None
    for driver in (with_recorder, without):
        assert driver.reducer.last_step is None
        for step in range(2):
            driver.backward([0, 1, 2], step)
            driver.zero_grad()
    assert with_recorder.reducer.last_step == without.reducer.last_step
    assert without.events == []
    assert sum(isinstance(event, StepSettled) for event in with_recorder.events) == 2


def test_the_gradients_are_the_mean_of_both_ranks():
    driver = Driver(4, ALL, world=2)
    for step in range(3):
        driver.peer.grads = {index: value(index, step, 1) for index in range(4)}
        driver.backward(range(4), step)
        for index, grad in enumerate(driver.grads):
            assert_bitwise_equal(grad, (value(index, step) + value(index, step, 1)) / 2)
        driver.zero_grad()


def test_a_mean_inside_the_collective_is_not_divided_again():
    driver = Driver(3, ALL, world=2, averages=True)
    driver.peer.averages = True
    for step in range(2):
        driver.peer.grads = {index: value(index, step, 1) for index in range(3)}
        driver.backward(range(3), step)
        for index, grad in enumerate(driver.grads):
            assert_bitwise_equal(grad, (value(index, step) + value(index, step, 1)) / 2)
        driver.zero_grad()


# ---------------------------------------------------------------- unused parameters


def test_a_parameter_that_nobody_used_keeps_none_and_its_old_gradient():
    driver = Driver(4, world=2)
    driver.learn()
    old = torch.tensor([3.0, 5.0])
    driver.params[3].grad = old
    driver.peer.grads = {0: value(0, 1, 1)}
    driver.peer.new_step()
    for index in (0, 1):
        driver.fire(index, value(index, 1))
    driver.reducer.settle()
    assert driver.params[2].grad is None
    assert driver.params[3].grad is old
    assert_bitwise_equal(old, torch.tensor([3.0, 5.0]))
    assert driver.reducer.last_step.unused == ("p2", "p3")
    assert_bitwise_equal(driver.params[0].grad, (value(0, 1) + value(0, 1, 1)) / 2)
    assert_bitwise_equal(driver.params[1].grad, value(1, 1) / 2)


def test_a_parameter_that_another_rank_used_gets_its_gradient():
    driver = Driver(4, world=2)
    driver.learn()
    driver.peer.grads = {2: value(2, 1, 1)}
    driver.params[2].grad = torch.tensor([8.0, 8.0])
    driver.fire(0, value(0, 1))
    driver.reducer.settle()
    # What this rank had takes part, as the accumulated gradient it is.
    assert_bitwise_equal(driver.params[2].grad, value(2, 1, 1) / 2 + 4.0)
    assert driver.reducer.last_step.unused == ("p1", "p3")


def test_the_used_flags_that_are_sent():
    sent = capture(lambda driver: driver.backward([0, 2], 1))
    assert sent.used == [1, 0, 1, 0]
    sent = capture(lambda driver: driver.backward(range(4), 1))
    assert sent.used == [1, 1, 1, 1]


def test_no_sync_marks_count_as_use_once():
    def accumulated(driver):
        driver.params[1].grad = value(1)
        driver.reducer.firings.accumulated[1] = 1
        driver.backward([0, 2, 3], 1)

    assert capture(accumulated).used == [1, 1, 1, 1]

    def and_then_not(driver):
        accumulated(driver)
        driver.backward([0, 2, 3], 2)

    assert capture(and_then_not).used == [1, 0, 1, 1]


# ---------------------------------------------------------------- what the trailer says


class Sent:
    """The last trailer that a rank sent before others added to it."""

    def __init__(self, tail, count, world):
        self.used = [round(flag) for flag in tail[:count].tolist()]
        rows = tail[count:].view(world, -1)
        self.rows = [Row.from_digits(digits) for digits in rows.tolist()]


def capture(act, count=4, wrapper=0, before=None):
    """Run one rank of a world of one and read the last trailer it sent."""
    driver = Driver(count, wrapper=wrapper)
    driver.learn()
    sent = []
    send = driver.comm.all_reduce

    def all_reduce(tensor):
        if tensor.numel() > SIZE:
            sent.append(tensor.clone())
        return send(tensor)

    driver.comm.all_reduce = all_reduce
    act(driver)
    assert sent
    tail_numel = numel(count, 1)
    return Sent(sent[-1][-tail_numel:], count, 1)


def test_the_row_counts_reductions_and_training_forwards():
    def step(driver):
        driver.reducer.enter_forward(counts=True)
        driver.reducer.enter_forward(counts=False)
        driver.reducer.enter_forward(counts=True)
        driver.backward(range(4), 1)

    (row,) = capture(step, wrapper=5).rows
    assert (row.wrapper, row.reductions, row.forwards) == (5, 1, 2)
    assert (row.abandoned, row.late) == (0, 0)

    def next_step(driver):
        step(driver)
        driver.reducer.enter_forward(counts=True)
        driver.backward(range(4), 2)

    (row,) = capture(next_step).rows
    assert (row.reductions, row.forwards) == (2, 1)


def test_the_row_says_late_and_abandoned():
    def late(driver):
        driver.fire(0, value(0))
        driver.fire(0, value(0))
        driver.reducer.settle()

    (row,) = capture(late).rows
    assert (row.abandoned, row.late) == (0, 1)

    def dies(driver):
        driver.fire(0, value(0))
        driver.reducer.died()

    (row,) = capture(dies).rows
    assert (row.abandoned, row.late) == (1, 0)


@pytest.mark.parametrize(
    "said", [{"wrapper": 9}, {"reductions": 7}, {"forwards": 3}], ids=lambda said: next(iter(said))
)
def test_ranks_out_of_step_raise_after_the_step_is_closed(said):
    driver = Driver(3, world=2, wrapper=4)
    driver.learn()
    driver.peer.grads = {index: value(index, 1, 1) for index in range(3)}
    driver.peer.row = said
    with pytest.raises(RankSkewError, match="step 1"):
        driver.backward(range(3), 1)
    assert driver.reducer.state is ReducerState.IDLE
    assert driver.reducer.reductions == 2
    # The next step is an ordinary one.
    driver.peer.row = {}
    driver.zero_grad()
    driver.backward(range(3), 2)
    for index, grad in enumerate(driver.grads):
        assert_bitwise_equal(grad, (value(index, 2) + value(index, 1, 1)) / 2)


def test_a_peer_that_died_is_told_in_the_same_step():
    driver = Driver(3, world=2)
    driver.learn()
    driver.peer.row = {"abandoned": 1}
    driver.peer.used = [0, 0, 0]
    with pytest.raises(AbandonedBackwardError, match=r"rank 1 left backward .* in step 1"):
        driver.backward(range(3), 1)
    driver.peer.row = {}
    driver.zero_grad()
    driver.peer.used = None
    driver.backward(range(3), 2)
    assert driver.reducer.last_step.step == 2


# ---------------------------------------------------------------- late gradients


def test_a_late_gradient_is_added_in_a_second_round():
    driver = Driver(3, world=2)
    driver.learn()
    driver.peer.grads = {index: value(index, 1, 1) for index in range(3)}
    driver.peer.late = {2: torch.tensor([32.0, 64.0])}
    driver.peer.row = {"late": 1}
    for index in (0, 1, 0, 2):
        driver.fire(index, value(index, 1))
    # It landed beside the bucket that is in flight.
    assert_bitwise_equal(driver.params[0].grad, value(0, 1))
    driver.reducer.settle()
    both = [(value(index, 1) + value(index, 1, 1)) / 2 for index in range(3)]
    assert_bitwise_equal(driver.params[0].grad, both[0] + value(0, 1) / 2)
    assert_bitwise_equal(driver.params[1].grad, both[1])
    # Parameter 2 was late on the other rank only.
    assert_bitwise_equal(driver.params[2].grad, both[2] + torch.tensor([16.0, 32.0]))
    facts = driver.reducer.last_step
    assert facts.second_round
    assert facts.all_reduces == 6
    assert driver.reducer.firings.expected == [2, 1, 1]


def test_a_rank_without_late_gradients_joins_the_second_round():
    driver = Driver(3, world=2)
    driver.learn()
    driver.peer.grads = {index: value(index, 1, 1) for index in range(3)}
    driver.peer.late = {1: torch.tensor([8.0, 8.0])}
    driver.peer.row = {"late": 1}
    driver.backward(range(3), 1)
    assert driver.reducer.last_step.second_round
    for index, grad in enumerate(driver.grads):
        extra = 4.0 if index == 1 else 0.0
        assert_bitwise_equal(grad, (value(index, 1) + value(index, 1, 1)) / 2 + extra)


def test_the_bucket_waits_from_the_next_step_on():
    driver = Driver(3)
    driver.learn()
    for index in (0, 0, 1, 2):
        driver.fire(index, value(index, 1))
    driver.reducer.settle()
    assert driver.reducer.last_step.second_round
    assert_bitwise_equal(driver.params[0].grad, 2 * value(0, 1))
    driver.zero_grad()
    driver.events.clear()
    driver.fire(0, value(0, 2))
    assert driver.launched == []
    driver.fire(0, value(0, 2))
    assert driver.launched == [0]
    for index in (1, 2):
        driver.fire(index, value(index, 2))
    driver.reducer.settle()
    assert not driver.reducer.last_step.second_round
    assert_bitwise_equal(driver.params[0].grad, 2 * value(0, 2))


def test_a_gradient_for_a_full_bucket_that_is_held_back_is_added_where_it_lies():
    driver = Driver(3)
    driver.learn()
    for index in (1, 1, 1, 0, 2):
        driver.fire(index, value(index, 1))
    driver.reducer.settle()
    assert not driver.reducer.last_step.second_round
    assert_bitwise_equal(driver.params[1].grad, 3 * value(1, 1))


def test_a_first_gradient_for_a_full_bucket_that_is_held_back_counts_as_use():
    driver = Driver(4, Caps((8, 16)), world=2)
    driver.peer.grads = {index: value(index, 0, 1) for index in (0, 2, 3)}
    # Parameter 1 shares a bucket with 2 and does not fire in the first step.
    for index in (0, 1):
        driver.reducer.firings.note(index)
    driver.backward([2, 3])
    driver.zero_grad()
    assert [bucket.params for bucket in driver.reducer.plan.buckets] == [(0,), (1, 2), (3,)]
    driver.peer.new_step()
    driver.peer.grads = {0: value(0, 1, 1)}
    assert driver.reducer.firings.expected == [0, 0, 1, 1]
    driver.backward([0, 2, 3], 1)
    driver.zero_grad()
    driver.peer.new_step()
    # Its bucket is full without it, but bucket 0 still awaits a gradient.
    for index in (2, 1, 0, 3):
        driver.fire(index, value(index, 2))
    driver.reducer.settle()
    assert not driver.reducer.last_step.second_round
    assert driver.reducer.last_step.unused == ()
    # No other rank used it: without this rank's flag it would be taken for unused.
    assert_bitwise_equal(driver.params[1].grad, value(1, 2) / 2)


def test_a_users_hook_sees_a_gradient_that_comes_again_to_a_full_bucket():
    seen = []

    def look(param):
        seen.append(None if param.grad is None else param.grad.clone())

    # Parameter 2 completes the bucket, so that of parameter 1 goes with it; both wait for parameter 0.
    driver = Driver(4, Caps((8, 16)))
    driver.learn()
    driver.params[1].register_post_accumulate_grad_hook(look)
    for index in (1, 2, 1, 0, 3):
        driver.fire(index, value(index, 1))
    driver.reducer.settle()
    assert [grad is None for grad in seen] == [False, False]
    assert_bitwise_equal(driver.params[1].grad, 2 * value(1, 1))


def test_a_gradient_for_an_open_bucket_just_accumulates():
    driver = Driver(4, Caps((16,)))
    driver.learn()
    for index in (0, 0, 1, 3, 2, 3):
        driver.fire(index, value(index, 1))
    driver.reducer.settle()
    assert not driver.reducer.last_step.second_round
    for index, times in enumerate((2, 1, 1, 2)):
        assert_bitwise_equal(driver.params[index].grad, times * value(index, 1))


def test_a_late_gradient_of_a_parameter_that_was_not_expected_counts_as_use():
    driver = Driver(3, Caps((16, 8)), world=2)
    driver.peer.grads = {0: value(0, 0, 1), 2: value(2, 0, 1)}
    # Parameter 1 comes early in rank 0's order, but no gradient of it is expected.
    driver.reducer.firings.note(1)
    driver.backward([0, 2])
    assert [bucket.params for bucket in driver.reducer.plan.buckets] == [(1, 0), (2,)]
    assert driver.reducer.firings.expected == [1, 0, 1]
    assert driver.params[1].grad is None
    driver.zero_grad()
    driver.peer.new_step()
    driver.peer.grads = {0: value(0, 1, 1), 2: value(2, 1, 1)}
    driver.fire(0, value(0, 1))
    assert driver.launched[-1] == 0
    driver.fire(1, value(1, 1))
    driver.fire(2, value(2, 1))
    driver.reducer.settle()
    assert driver.reducer.last_step.second_round
    assert driver.reducer.last_step.unused == ()
    assert_bitwise_equal(driver.params[1].grad, value(1, 1) / 2)


# ---------------------------------------------------------------- a backward that died


def test_a_dead_backward_sends_zeros_for_what_is_missing():
    driver = Driver(4)
    driver.learn()
    sent = []
    send = driver.comm.all_reduce
    driver.comm.all_reduce = lambda tensor: sent.append(tensor.clone()) or send(tensor)
    driver.fire(0, value(0, 1))
    driver.fire(1, value(1, 1))
    driver.reducer.died()
    assert len(sent) == 4
    assert_bitwise_equal(sent[0], value(0, 1))
    assert_bitwise_equal(sent[1], value(1, 1))
    assert not sent[2].any()
    assert not sent[3][: SIZE + 4].any()
    assert driver.reducer.state is ReducerState.DIED
    # Nothing else may be reduced before that step has been waited for.
    driver.reducer.died()
    assert len(sent) == 4
    driver.zero_grad()
    driver.backward(range(4), 2)
    assert driver.reducer.last_step.step == 2
    for index, grad in enumerate(driver.grads):
        assert_bitwise_equal(grad, value(index, 2))


def test_a_backward_that_dies_while_learning_learns_at_the_next_opportunity():
    driver = Driver(3)
    driver.fire(2, value(2))
    driver.reducer.died()
    assert driver.comm.calls == []
    driver.zero_grad()
    driver.reducer.enter_forward(counts=True)
    # The dead step has been finished with zeros, so that the other ranks could leave it.
    assert [call.name for call in driver.comm.calls] == ["broadcast", *["all_reduce"] * 3]
    assert driver.reducer.reductions == 1
    driver.backward(range(3), 1)
    for index, grad in enumerate(driver.grads):
        assert_bitwise_equal(grad, value(index, 1))
    driver.zero_grad()
    driver.backward(range(3), 2)
    assert not driver.reducer.last_step.second_round


def test_a_forward_tells_of_a_death_that_nobody_reported():
    driver = Driver(3)
    driver.learn()
    driver.fire(0, value(0))
    driver.reducer.enter_forward(counts=True)
    assert driver.reducer.state is ReducerState.IDLE
    assert driver.reducer.reductions == 2
    assert len(driver.comm.calls) == 1 + 3 + 3


def test_death_outside_of_a_backward_means_nothing():
    driver = Driver(2)
    driver.reducer.died()
    assert driver.reducer.state is ReducerState.IDLE
    driver.learn()
    driver.reducer.died()
    assert driver.reducer.state is ReducerState.IDLE


# ---------------------------------------------------------------- collectives that fail


def failing(at_call, *, on_wait):
    return lambda comm: FailingCommunicator(comm, at_call, on_wait=on_wait)


def check_failure(error):
    assert "rank 0" in str(error)
    assert "step 1" in str(error)
    assert "Connection reset by peer" in str(error)
    assert isinstance(error.__cause__, RuntimeError)


def test_a_wait_that_fails_breaks_the_reducer_and_says_where():
    driver = Driver(3, wrap=failing(5, on_wait=True))
    driver.learn()
    with pytest.raises(CommunicationError) as raised:
        driver.backward(range(3), 1)
    check_failure(raised.value)
    assert driver.reducer.state is ReducerState.BROKEN
    # What was handed back while it travelled is no result.
    assert driver.grads == [None] * 3
    # Nobody knows what the buckets hold, so every use repeats why.
    for again in (
        driver.reducer.begin,
        lambda: driver.reducer.enter_forward(counts=True),
        driver.reducer.begin,
    ):
        with pytest.raises(CommunicationError, match="Connection reset by peer"):
            again()


def test_ranks_that_did_not_come_are_named():
    driver = Driver(3, wrap=failing(5, on_wait=True))
    driver.learn()
    driver.absent = [3, 7]
    with pytest.raises(CommunicationError, match="3, 7"):
        driver.backward(range(3), 1)


def test_a_launch_that_fails_in_a_hook_is_a_backward_that_died():
    inner = []

    def wrap(comm):
        inner.append(comm)
        return FailingCommunicator(comm, 5, on_wait=False)

    driver = Driver(3, wrap=wrap)
    driver.learn()
    with pytest.raises(CommunicationError) as raised:
        driver.backward(range(3), 1)
    check_failure(raised.value)
    assert driver.reducer.state is ReducerState.COLLECTING
    # Autograd drops its callback. The other ranks get zeros for the bucket that failed and for those after it.
    driver.reducer.died()
    assert driver.reducer.state is ReducerState.DIED
    assert len(inner[0].calls) == 4 + 1 + 2


@pytest.mark.parametrize("on_wait", [True, False], ids=["in wait", "at the start"])
def test_a_rank_that_is_gone_in_the_first_step_is_named_as_in_any_other(on_wait):
    # The first collective of all is the broadcast of the order.
    driver = Driver(3, wrap=failing(0, on_wait=on_wait))
    with pytest.raises(CommunicationError, match=r"rank 0: .*first backward.*Connection reset"):
        driver.backward(range(3))
    assert driver.reducer.state is ReducerState.BROKEN


@pytest.mark.parametrize("on_wait", [True, False], ids=["in wait", "at the start"])
def test_a_second_round_that_fails_is_named_too(on_wait):
    driver = Driver(2, wrap=failing(5, on_wait=on_wait))
    driver.learn()
    with pytest.raises(CommunicationError, match="step 1"):
        driver.backward([0, 0, 1], 1)


def test_a_death_never_raises_also_when_nothing_can_be_sent():
    driver = Driver(3, wrap=failing(5, on_wait=False))
    driver.learn()
    driver.fire(0, value(0))
    # Called while the user's own exception travels, which must stay what it is.
    driver.reducer.died()
    assert driver.reducer.state is ReducerState.BROKEN
    with pytest.raises(CommunicationError, match="Connection reset"):
        driver.reducer.enter_forward(counts=True)


def test_a_dead_step_whose_wait_fails_is_told_by_the_next_use():
    driver = Driver(3, wrap=failing(5, on_wait=True))
    driver.learn()
    driver.fire(0, value(0))
    driver.reducer.died()
    assert driver.reducer.state is ReducerState.DIED
    with pytest.raises(CommunicationError, match="step 1"):
        driver.reducer.enter_forward(counts=True)
    assert driver.reducer.state is ReducerState.BROKEN


# ---------------------------------------------------------------- states


def test_calls_out_of_turn_are_mistakes():
    driver = Driver(2)
    with pytest.raises(AssertionError, match="cannot become"):
        driver.reducer.settle()
    driver = Driver(2)
    driver.reducer.begin()
    with pytest.raises(AssertionError, match="cannot become"):
        driver.reducer.begin()


# ---------------------------------------------------------------- where the host must not wait


class FakeLater:
    """As ``verdict.Later``, without a GPU."""

    def __init__(self, tail, number):
        self.number = number
        self._rows = tail.read_rows()

    def rows(self):
        return self._rows


@pytest.fixture
def on_a_stream(monkeypatch):
    """Drivers whose communicator does not let the host wait."""
    monkeypatch.setattr(verdict, "Later", FakeLater)
    return lambda: Driver(3, world=2, host_waits=False)


def test_rows_are_judged_one_step_later(on_a_stream):
    driver = on_a_stream()
    driver.learn()
    driver.peer.grads = {index: value(index, 1, 1) for index in range(3)}
    driver.peer.row = {"forwards": 3}
    driver.backward(range(3), 1)
    driver.peer.row = {}
    with pytest.raises(RankSkewError, match="step 1"):
        driver.reducer.enter_forward(counts=True)
    # Told once.
    driver.reducer.enter_forward(counts=True)
    driver.peer.new_step()
    driver.backward(range(3), 2)
    driver.reducer.enter_forward(counts=True)


def test_a_late_gradient_raises_by_name_on_its_own_rank(on_a_stream):
    driver = on_a_stream()
    driver.learn()
    driver.peer.grads = {index: value(index, 1, 1) for index in range(3)}
    with pytest.raises(LateGradientError, match=r"rank 0: in step 1 .*p0"):
        driver.backward([0, 0, 1, 2], 1)
    assert driver.reducer.last_step.all_reduces == 3
    with pytest.raises(LateGradientError):
        driver.reducer.begin()


def test_a_late_gradient_of_another_rank_is_told_one_step_later(on_a_stream):
    driver = on_a_stream()
    driver.learn()
    driver.peer.row = {"late": 1}
    driver.backward(range(3), 1)
    with pytest.raises(LateGradientError, match="1"):
        driver.reducer.begin()
