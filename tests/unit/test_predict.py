"""The model of a backward and its communication, and the buckets that it finds best."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankstep.buckets.forecast import Forecast, Outlook, simplest
from rankstep.buckets.measured import NONE, Measured, StepModel, cut
from rankstep.buckets.plan import Caps, ParamSpec, lay_out, make_plan
from rankstep.buckets.predict import (
    MIB,
    Gradients,
    Link,
    best_ends,
    cap_list,
    ends_of_caps,
    finish_ns,
    fit_link,
    tells_start,
)

CPU = torch.device("cpu")


def cuts(count):
    """Every way to cut a row of things into pieces."""
    for chosen in range(count):
        for inner in itertools.combinations(range(1, count), chosen):
            yield (*inner, count)


def fits(ends, nbytes, cap):
    return all(
        end - begin == 1 or sum(nbytes[begin:end]) <= cap
        for begin, end in itertools.pairwise([0, *ends])
    )


# ---------------------------------------------------------------- how long it takes


def test_buckets_follow_each_other_on_the_link():
    link = Link(start_ns=2, byte_ns=1)
    # Ready at 10 and through at 10 + 2 + 5; the next has to wait from 12 to 17; the last begins when it is ready.
    assert finish_ns([(10, 5)], link) == 17
    assert finish_ns([(10, 5), (12, 3)], link) == 22
    assert finish_ns([(10, 5), (12, 3), (40, 1)], link) == 43


def test_the_last_bucket_leaves_when_backward_has_ended():
    gradients = Gradients((1.0, 2.0, 3.0), (4, 4, 4), 10.0)
    assert gradients.buckets([3]) == [(10.0, 12)]
    assert gradients.buckets([1, 3]) == [(1.0, 4), (10.0, 8)]


def test_a_bucket_does_not_leave_before_the_one_in_front_of_it():
    assert Gradients((5.0, 2.0, 6.0), (1, 1, 1), 6.0).buckets([1, 2, 3]) == [
        (5.0, 1),
        (5.0, 1),
        (6.0, 1),
    ]


def test_compute_comes_later_by_what_communication_takes_from_it():
    # Half of each flight is lost: the second gradient, ready at 20, comes at 20 + 0.5 * 10.
    assert finish_ns([(0, 10), (20, 10)], Link(0, 1, 0.5)) == 35
    assert finish_ns([(0, 10), (20, 10)], Link(0, 1, 0.0)) == 30
    # With all of it lost nothing is hidden: the sum, whatever the buckets.
    whole = finish_ns([(20, 20)], Link(0, 1, 1.0))
    assert whole == finish_ns([(0, 10), (20, 10)], Link(0, 1, 1.0)) == 40


def fluid(buckets, link):
    """The same in small steps of time: computing goes on at a rate of 1 - charge while the link is busy."""
    tick, now, computed, sent = 1 / 64, 0.0, 0.0, 0
    left = None
    while sent < len(buckets):
        if left is None and computed >= buckets[sent][0] - 1e-9:
            left = link.flight_ns(buckets[sent][1])
        computed += tick * (1.0 if left is None else 1 - link.charge)
        now += tick
        if left is not None:
            left -= tick
            if left <= 1e-9:
                left, sent = None, sent + 1
    return now


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.25, 0.5, 0.75]),
    st.integers(0, 3),
)
def test_it_is_what_happens_when_time_passes_step_by_step(buckets, charge, start):
    buckets = sorted(buckets)
    link = Link(start, 1.0, charge)
    # Each bucket may be seen one tick late.
    late = len(buckets) / 64 / (1 - charge) + 1 / 16
    assert fluid(buckets, link) == pytest.approx(finish_ns(buckets, link), abs=late)


# ---------------------------------------------------------------- the best buckets


def backwards(max_size):
    gradient = st.tuples(st.sampled_from([0, 1, 3, 20, 100]), st.sampled_from([0, 1, 2, 10, 100]))
    return st.lists(gradient, min_size=1, max_size=max_size)


@given(
    backwards(9),
    st.sampled_from([0, 5]),
    st.sampled_from([0, 1, 5, 30]),
    st.sampled_from([0, 0.1, 1, 3]),
    st.sampled_from([0, 0.3, 0.9, 1]),
    st.sampled_from([1, 10, 50, 10**9]),
)
def test_no_other_partition_ends_earlier(gradients, rest, start, byte, charge, cap):
    gaps, nbytes = zip(*gradients, strict=True)
    ready = tuple(itertools.accumulate(gaps))
    backward = Gradients(ready, nbytes, ready[-1] + rest)
    link = Link(start, byte, charge)
    found = best_ends(backward, link, cap_bytes=cap)
    every = [ends for ends in cuts(len(nbytes)) if fits(ends, nbytes, cap)]
    times = {ends: finish_ns(backward.buckets(ends), link) for ends in every}
    assert times[found] == pytest.approx(min(times.values()), abs=1e-6)
    equal = [ends for ends in every if times[ends] <= times[found] + 1e-6]
    assert len(found) == min(map(len, equal))


def test_the_order_stays_where_a_later_gradient_is_ready_earlier():
    backward = Gradients((30.0, 10.0, 20.0, 40.0), (9, 9, 9, 9), 40.0)
    link = Link(1, 1)
    best = min(finish_ns(backward.buckets(ends), link) for ends in cuts(4))
    assert finish_ns(backward.buckets(best_ends(backward, link)), link) == best


EVEN = Gradients(tuple(range(10, 110, 10)), (8,) * 10, 100.0)


@pytest.mark.parametrize(
    ("link", "buckets"),
    [
        # Nothing can be hidden: one bucket at the end.
        (Link(1, 1, 1.0), 1),
        # A start costs more than all that could be hidden.
        (Link(1000, 1), 1),
        # Sending is quick and starts are free: all but the last gradient travel while there is time.
        (Link(0, 0.1), 2),
    ],
)
def test_plans_that_can_be_told_beforehand(link, buckets):
    assert len(best_ends(EVEN, link)) == buckets


def test_a_slow_link_is_kept_busy_from_the_first_gradient_on():
    link = Link(1, 5)
    ends = best_ends(EVEN, link)
    through = finish_ns(EVEN.buckets(ends), link)
    assert ends[0] == 1
    # From the first gradient on without a pause: 80 bytes, and one start for each bucket.
    assert through == 10 + 5 * 80 + len(ends)
    assert len(ends) < 5


def test_the_search_does_not_grow_with_the_square():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(40, 200_000, (20_000,), generator=generator).tolist()
    backward = Gradients(tuple(20e3 * i for i in range(20_000)), tuple(sizes), 400e6)
    # A tenth of a second; one that does takes longer than a test may.
    ends = best_ends(backward, Link(100e3, 0.5, 0.1))
    assert ends[-1] == 20_000


# ---------------------------------------------------------------- caps


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=12),
    st.lists(st.integers(1, 100), min_size=1, max_size=4),
)
def test_caps_cut_as_the_plan_does(numels, caps):
    specs = [ParamSpec(f"p{i}", (n,), (1,), torch.float32, CPU) for i, n in enumerate(numels)]
    plan = make_plan(specs, range(len(specs)), Caps(tuple(caps)), packed_below_bytes=0)
    ends = itertools.accumulate(len(bucket.params) for bucket in plan.buckets)
    assert ends_of_caps([spec.nbytes for spec in specs], caps) == tuple(ends)


@given(st.data(), st.lists(st.sampled_from([40, 4096, MIB, 5 * MIB + 12]), min_size=1, max_size=9))
def test_a_list_of_caps_that_can_be_pasted_makes_the_same_buckets(data, nbytes):
    ends = data.draw(st.sampled_from(list(cuts(len(nbytes)))))
    caps = cap_list(nbytes, ends)
    assert ends_of_caps(nbytes, [max(1, int(cap * MIB)) for cap in caps]) == ends


def test_such_a_list_has_few_digits():
    assert cap_list([MIB, 3 * MIB, 3 * MIB, 100], [1, 3, 4]) == (1, 6, 1)
    assert cap_list([MIB, 3 * MIB, 3 * MIB], [3]) == (7,)
    assert cap_list([1000, 3 * MIB], [1, 2]) == (0.0009, 3.0)
    assert cap_list([2 * MIB] * 6, [1, 2, 3, 4, 5, 6]) == (2,)


# ---------------------------------------------------------------- the link


SIZES = (4096, 16384, 65536, 262144, 1048576, 4194304, 16777216)


@given(st.integers(0, 10**6), st.floats(0.01, 100), st.sets(st.sampled_from(range(7)), max_size=1))
def test_the_line_is_found_whatever_one_point_says(start, byte, spoiled):
    points = [
        (size, (start + byte * size) * (4.0 if place in spoiled else 1.0))
        for place, size in enumerate(SIZES)
    ]
    link = fit_link(points, 0.5)
    for size in SIZES:
        assert link.flight_ns(size) == pytest.approx(start + byte * size, rel=1e-6, abs=1e-3)
    assert link.charge == 0.5


def test_neither_price_falls_below_zero():
    # Small ones that take longer than large ones, and a rate that grows with size.
    assert fit_link([(1000, 500.0), (2000, 400.0), (4000, 300.0)]).byte_ns == 0
    assert fit_link([(1000, 10.0), (2000, 40.0), (4000, 160.0)]).start_ns == 0


def test_one_size_tells_only_the_rate():
    assert fit_link([(1000, 2000.0), (1000, 3000.0), (1000, 4000.0)]) == Link(0.0, 3.0)
    assert not tells_start([1000, 1500])
    assert not tells_start([])
    assert tells_start([1000, 2000])


def test_many_points_are_taken_together():
    points = [(1000.0 * i, 5e4 + 3 * 1000.0 * i) for i in range(1, 400)]
    link = fit_link(points)
    assert (link.start_ns, link.byte_ns) == (pytest.approx(5e4), pytest.approx(3.0))


# ---------------------------------------------------------------- measured steps


def spec(name, numel, dtype=torch.float32, *, sparse=False):
    return ParamSpec(name, (numel,), (1,), dtype, CPU, sparse)


def test_what_ranks_saw_is_put_together_by_the_slowest():
    # Two steps each, (end, sending, step), then two parameters.
    rows = [
        [100, 30, 140, 100, 26, 150, 40, NONE],
        [120, 10, 150, 110, 20, 160, 60, NONE],
    ]
    assert Measured.of(rows, 2) == Measured(115.0, 15.0, 155.0, (60.0, None))


def test_steps_that_a_rank_lacks_are_those_of_the_others():
    rows = [[NONE, NONE, NONE, 100, 26, 150, 40], [120, 10, 150, NONE, NONE, NONE, 60]]
    assert Measured.of(rows, 2) == Measured(120.0, 18.0, 150.0, (60.0,))
    assert Measured.of([[NONE] * 4, [NONE] * 4], 1) is None


SPECS = [spec(name, 250) for name in "abcd"]
ORDER = [3, 2, 1, 0]


def model(link, measured, specs=SPECS, order=ORDER):
    whole = make_plan(specs, order, Caps((1 << 62,)), packed_below_bytes=0)
    return StepModel(link, measured, specs, order, whole), whole


def test_the_measured_plan_is_predicted_as_it_was_measured():
    measured = Measured(10_000.0, 5_000.0, 17_000.0, (9_000.0, 7_000.0, 5_000.0, 3_000.0))
    steps, whole = model(Link(1_000.0, 99.0), measured)
    # One start, and 4,000 bytes in the rest.
    assert steps.link == Link(1_000.0, 1.0)
    assert steps.step_ns(whole) == 17_000.0
    assert steps.compute_ns == 12_000.0
    # Two halves: the first is through at 5,000 + 1,000 + 2,000, so only the second follows the end of backward.
    halves = make_plan(SPECS, ORDER, Caps((2_000,)), packed_below_bytes=0)
    assert steps.step_ns(halves) == 17_000.0 - 2_000.0
    # d until 5,000, b and c from 7,000 to 10,000, a from there to 12,000.
    assert steps.best_ends() == (1, 3, 4)


def test_a_start_cannot_cost_more_than_all_sending_did():
    steps, _ = model(Link(9_000.0, 1.0, 0.5), Measured(10.0, 5_000.0, 6_000.0, (1.0,) * 4))
    assert steps.link == Link(5_000.0, 0.0, 0.5)


def test_a_parameter_that_nobody_used_is_not_waited_for():
    measured = Measured(10_000.0, 5_000.0, 17_000.0, (None, None, 5_000.0, 3_000.0))
    steps, _ = model(Link(1_000.0, 1.0), measured)
    early = make_plan(SPECS, ORDER, Caps((3_000,)), packed_below_bytes=0)
    # The first bucket leaves at 5,000 although one of its three is never ready.
    assert steps.step_ns(early) == max(5_000 + 4_000, 10_000) + 2_000 + 2_000


def test_pieces_are_buckets_for_each_dtype_and_sparse_ones_stand_alone():
    specs = [
        spec("a", 10),
        spec("b", 10, torch.bfloat16),
        spec("c", 10, sparse=True),
        spec("d", 10),
        spec("e", 10, torch.bfloat16),
    ]
    order = [0, 1, 2, 3, 4]
    groups = cut(specs, order, [0, 1, 3, 4], [2, 4])
    assert groups == [[0], [1], [2], [3], [4]]
    assert cut(specs, order, [0, 1, 3, 4], [4]) == [[2], [0, 3], [1, 4]]
    plan = lay_out(specs, groups, Caps(), 0)
    assert [bucket.params for bucket in plan.buckets] == [(0,), (1,), (2,), (3,), (4,)]
    measured = Measured(10.0, 5.0, 17.0, (1.0, 2.0, 3.0, 4.0, 5.0))
    steps, _ = model(Link(0.0, 0.0), measured, specs, order)
    assert steps.dense == [0, 1, 3, 4]
    assert not steps.of_one_kind
    assert steps.step_ns(plan) > 0


def test_sparse_gradients_alone_leave_nothing_to_cut():
    specs = [spec("a", 10, sparse=True), spec("b", 10, sparse=True)]
    steps, _ = model(Link(1.0, 1.0), Measured(10.0, 5.0, 17.0, (1.0, 2.0)), specs, [0, 1])
    assert steps.best_ends() == ()
    assert cut(specs, [0, 1], [], ()) == [[0], [1]]


# ---------------------------------------------------------------- words


OTHERS = tuple(Outlook((float(cap),), 10, 1e6 * (50 + cap)) for cap in (1, 5, 25, 100))


def test_a_forecast_is_a_table():
    forecast = Forecast(Link(2e5, 8e-3, 0.25), 40e6, Outlook((0.5, 4.0), 1, 48e6), OTHERS)
    assert forecast.lines() == [
        "an all-reduce takes 0.200 ms + 0.008 ms per MiB; 25% of that is lost for computing",
        "a step without communication takes 40.00 ms; predicted:",
        "   this plan:    1 bucket       48.00 ms",
        "       1 MiB:   10 buckets      51.00 ms",
        "       5 MiB:   10 buckets      55.00 ms",
        "      25 MiB:   10 buckets      75.00 ms",
        "     100 MiB:   10 buckets     150.00 ms",
        "the same without measuring: bucket_cap_mb_list=[0.5, 4]",
    ]
    assert "lost" not in Forecast(Link(1, 1), 1, Outlook((), 1, 1), ()).lines()[0]
    assert len(Forecast(Link(1, 1), 1, Outlook((), 1, 1), ()).lines()) == 3


def test_a_plan_shows_its_forecast():
    plan = make_plan(SPECS, ORDER, Caps(), packed_below_bytes=0)
    assert "predicted" not in plan.describe()
    forecast = Forecast(Link(2e5, 8e-3), 40e6, Outlook((0.5,), 1, 48e6), OTHERS)
    told = lay_out(SPECS, [ORDER], Caps(), 0)
    assert told.fingerprint() == plan.fingerprint()
    told = type(told)(told.params, told.buckets, told.caps, forecast)
    assert told.describe().startswith(plan.describe())
    assert "the same without measuring: bucket_cap_mb=0.5" in told.describe()
    assert told.fingerprint() == plan.fingerprint()


def test_caps_that_are_easy_to_write_are_preferred_where_they_cost_little():
    best = Outlook((0.1, 0.7, 3.0), 3, 50.8e6)
    assert simplest(best, OTHERS, 0.01) is OTHERS[0]
    assert simplest(best, OTHERS, 0.001) is best
    assert simplest(Outlook((1.5,), 2, 40e6), OTHERS, 0.01).argument == "bucket_cap_mb=1.5"
    assert math.isclose(simplest(best, (), 0.5).step_ns, 50.8e6)
