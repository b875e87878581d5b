"""Measuring a group: on a clock that only moves when something is sent or computed, the answer is known."""

from __future__ import annotations

import itertools
import time
from unittest import mock

import pytest
import torch

from rankstep.buckets import measure
from rankstep.buckets.autoplan import MEASURED, WARM_UP, AutoPlan, DeviceClock, Phase
from rankstep.buckets.measure import measure_link
from rankstep.buckets.plan import ParamSpec
from rankstep.buckets.predict import MIB, Link
from rankstep.trace import events as ev

CPU = torch.device("cpu")
SECOND = 1_000_000_000


class Time:
    """A clock, a link and a processor: what is computed while something is under way takes longer by the charge."""

    def __init__(self, link):
        self.link = link
        self.now_ns = 0.0
        self.until_ns = 0.0
        self.sent = []

    def perf_counter_ns(self):
        return round(self.now_ns)

    def send(self, nbytes):
        self.until_ns = max(self.until_ns, self.now_ns) + self.link.flight_ns(nbytes)
        self.sent.append(nbytes)

    def compute(self, work_ns):
        rest = max(0.0, self.until_ns - self.now_ns)
        done = (1 - self.link.charge) * rest
        if self.link.charge == 1.0:
            # Nothing is computed before the transfer has ended.
            self.now_ns += rest + work_ns
        elif work_ns <= done:
            self.now_ns += work_ns / (1 - self.link.charge)
        else:
            self.now_ns += rest + work_ns - done

    def wait(self):
        self.now_ns = max(self.now_ns, self.until_ns)


class Comm:
    """Rank 0 of two ranks that are always together."""

    rank, world_size, averages, host_waits, name = 0, 2, False, True, "made up"

    def __init__(self, clock, *, moves_in_wait=False):
        self.clock = clock
        self.moves_in_wait = moves_in_wait
        self.calls = []

    def allocate(self, numel, dtype, device):
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor):
        self.calls.append("all_reduce")
        if self.moves_in_wait:
            return mock.Mock(wait=lambda: (self.clock.send(tensor.nbytes), self.clock.wait()))
        self.clock.send(tensor.nbytes)
        return self.clock

    def all_gather(self, outputs, tensor):
        self.calls.append("all_gather")
        for output in outputs:
            output.copy_(tensor)
        return mock.Mock()

    def broadcast(self, _tensor, _src):
        self.calls.append("broadcast")
        return mock.Mock()

    def at(self, _place, _what):
        pass


class Work:
    """Each piece takes half a millisecond."""

    def __init__(self, clock):
        self.clock = clock

    def run(self, pieces):
        self.clock.compute(500_000 * pieces)

    def time_ns(self, pieces):
        begin = self.clock.now_ns
        self.run(pieces)
        return round(self.clock.now_ns - begin)


def measured(link, nbytes=100 * MIB, *, dtype=torch.float32, comm=Comm, **how):
    clock = Time(link)
    talks = comm(clock, **how)
    with (
        mock.patch.object(time, "perf_counter_ns", clock.perf_counter_ns),
        mock.patch.object(measure, "_Work", return_value=Work(clock)),
    ):
        found = measure_link(talks, dtype, CPU, nbytes)
    return found, clock, talks


LOOPBACK = Link(150_000, 0.5, 1.0)
NETWORK = Link(200_000, 8.4, 0.2)
SHARED = Link(30_000, 0.08, 1.0)


@pytest.mark.parametrize("link", [LOOPBACK, NETWORK, SHARED, Link(1_000_000, 80.0, 0.0)])
def test_the_link_is_found_in_less_than_a_second(link):
    found, clock, _ = measured(link)
    assert found.start_ns == pytest.approx(link.start_ns, rel=0.01)
    assert found.byte_ns == pytest.approx(link.byte_ns, rel=0.01)
    assert found.charge == pytest.approx(link.charge, abs=0.02)
    assert clock.now_ns < SECOND


def test_a_very_slow_link_is_not_flooded():
    # 1 Mbit/s: a sixteenth of a megabyte takes half a second.
    found, clock, _ = measured(Link(5_000_000, 8_000.0, 0.0))
    assert found.byte_ns == pytest.approx(8_000, rel=0.01)
    assert max(clock.sent) < MIB // 4
    assert clock.now_ns < 3 * SECOND


def test_nothing_much_larger_than_the_model_is_sent():
    _, clock, _ = measured(SHARED, nbytes=600_000)
    assert max(clock.sent) == 600_000
    _, clock, _ = measured(SHARED, nbytes=0)
    assert max(clock.sent) == 256 * 1024
    _, clock, _ = measured(SHARED, nbytes=10**9, dtype=torch.bfloat16)
    assert max(clock.sent) == 16 * MIB


def test_a_transport_that_moves_while_it_is_waited_for_hides_nothing():
    found, _, _ = measured(Link(100_000, 0.3, 0.0), moves_in_wait=True)
    assert found.charge == pytest.approx(1.0, abs=0.02)


def test_a_small_charge_is_noise():
    assert measured(Link(200_000, 8.4, 0.04))[0].charge == 0.0
    assert measured(Link(200_000, 8.4, 0.06))[0].charge > 0.0


def test_no_charge_is_measured_where_the_host_does_not_wait():
    class Streams(Comm):
        host_waits = False

    found, _, _ = measured(LOOPBACK, comm=Streams)
    assert found.charge == 0.0


class Slower(Comm):
    """The other rank takes twice as long for everything."""

    def all_gather(self, outputs, tensor):
        super().all_gather(outputs, tensor)
        outputs[1].mul_(2)
        return mock.Mock()


def test_the_slowest_rank_counts():
    found, _, _ = measured(NETWORK, comm=Slower)
    assert found.byte_ns == pytest.approx(2 * NETWORK.byte_ns, rel=0.01)


def test_the_real_work_takes_time():
    work = measure._Work()
    assert work.time_ns(1) > 0
    assert float(work._out.sum()) == 64 * 512 * 512


# ---------------------------------------------------------------- the search


def specs_of(*numels):
    return [ParamSpec(f"p{i}", (n,), (1,), torch.float32, CPU) for i, n in enumerate(numels)]


def told(auto, step, *, ready, left, through, settled, offset=0):
    """One step as the reducer tells it; times in microseconds."""
    for param, at in ready.items():
        auto.tell(ev.GradReady(step, param, offset + 1000 * at))
    auto.tell(ev.BucketFilled(step, 0, offset + 1000 * left))
    auto.tell(ev.BucketLaunched(step, 0, False, offset + 1000 * left))
    auto.tell(ev.BucketWaited(step, 0, offset + 1000 * left, offset + 1000 * through))
    auto.tell(ev.StepSettled(step, offset + 1000 * settled))
    auto.step_closed()


def searching():
    link = Link(10_000, 99.0)
    auto = AutoPlan(Comm(Time(link)), CPU)
    with mock.patch("rankstep.buckets.autoplan.measure_link", return_value=link):
        plan = auto.plan(specs_of(1000, 1000, 1000), [2, 1, 0], 0)
    return auto, plan


def test_a_search_from_the_first_step_to_the_plan():
    auto, whole = searching()
    assert [bucket.params for bucket in whole.buckets] == [(2, 1, 0)]
    assert auto.phase is Phase.MEASURING
    assert auto.beside(None) == auto.tell
    step_us = 300
    for step in range(WARM_UP + MEASURED):
        assert not auto.due
        # The first two do not count, and neither does what one of the others shows.
        odd = 10 if step in (0, 1, 5) else 1
        times = {2: 40 * odd, 1: 90 * odd, 0: 140 * odd}
        told(
            auto,
            step,
            ready=times,
            left=150 * odd,
            through=210 * odd,
            settled=220 * odd,
            offset=1000 * step_us * step,
        )
        # Times count from the settlement before: 300 - 220 = 80 later.
    assert auto.due
    plan = auto.plan(specs_of(1000, 1000, 1000), [0, 1, 2], 0)
    assert auto.phase is Phase.SETTLED
    assert auto.beside(None) is None
    forecast = plan.forecast
    # 60 us for one start and 12,000 bytes.
    assert forecast.link == Link(10_000, pytest.approx(50_000 / 12_000))
    assert forecast.compute_ns == 240_000
    # The order stays that of the first step. 2 until 150, 1 from 170 to 197, 0 from 230 on: 13 and a half sooner.
    assert plan.order == (2, 1, 0)
    assert [other.step_ns for other in forecast.others] == [300_000] * 4
    assert len(plan.buckets) == 2
    assert forecast.plan.step_ns == pytest.approx(300_000 - 100_000 / 3)


def test_steps_without_gradients_are_no_steps():
    auto, _ = searching()
    for step in range(WARM_UP + MEASURED):
        told(auto, step, ready={}, left=150, through=210, settled=220, offset=300_000 * step)
    plan = auto.plan(specs_of(1000, 1000, 1000), [0, 1, 2], 0)
    assert auto.phase is Phase.MEASURING
    assert plan.order == (2, 1, 0)
    assert plan.forecast is None
    assert not auto.due


def test_other_parameters_begin_anew():
    auto, _ = searching()
    for step in range(WARM_UP + 1):
        told(auto, step, ready={0: 10}, left=150, through=210, settled=220, offset=300_000 * step)
    auto.restart()
    assert auto.phase is Phase.LEARNING
    assert auto.beside(None) is None
    with mock.patch("rankstep.buckets.autoplan.measure_link") as again:
        plan = auto.plan(specs_of(10, 10), [1, 0], 0)
    again.assert_not_called()
    assert plan.order == (1, 0)
    for _ in range(WARM_UP + MEASURED):
        assert not auto.due
        auto.step_closed()
    assert auto.due


class Event:
    """A device that gets to each mark a second after it was queued."""

    made = itertools.count(1)

    def __init__(self, device, *, enable_timing):
        assert enable_timing
        self.synchronized = False

    def record(self):
        self.at_s = next(self.made)

    def synchronize(self):
        self.synchronized = True

    def elapsed_time(self, later):
        assert later.synchronized
        return 1000.0 * (later.at_s - self.at_s)


def test_on_a_device_its_own_times_count():
    with mock.patch("torch.Event", Event):
        clock = DeviceClock(torch.device("cuda", 0))
        first, second, third = (clock.mark(at) for at in (7, 8, 9))
        assert not third.synchronized
        assert clock.between_ns(first, third) == 2 * SECOND
        assert clock.between_ns(first, second) == SECOND


def test_which_clock_is_used():
    streams = Comm(Time(NETWORK))
    assert not isinstance(AutoPlan(streams, CPU)._clock, DeviceClock)
    streams.host_waits = False
    assert not isinstance(AutoPlan(streams, CPU)._clock, DeviceClock)
    assert isinstance(AutoPlan(streams, torch.device("cuda", 0))._clock, DeviceClock)
