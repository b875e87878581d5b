"""The arithmetic of a step against traces whose figures can be worked out by hand."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_samples import MS, B, D, F, S, W, X, bucket, quick, slow, step

from rankstep.trace import overlap
from rankstep.trace.overlap import BucketFigures, Last, Parts


def in_ms(thing):
    """Every time of a record, in milliseconds."""
    return {
        field.name: getattr(thing, field.name) / MS
        for field in fields(thing)
        if field.name.endswith("_ns") and getattr(thing, field.name) is not None
    }


STARTED = overlap.starts([quick(), slow()])


def test_a_bucket_starts_when_the_last_rank_launches_it():
    assert STARTED == {0: 53 * MS, 1: 65 * MS}


def test_the_parts_of_a_rank_that_waits():
    assert in_ms(overlap.parts(quick(), STARTED)) == {
        "compute_ns": 40,
        # Both buckets start and end while this rank waits.
        "hidden_ns": 0,
        # It waits from 33 to 71. Bucket 0 starts at 53 and is waited for until 62; then bucket 1 is not there before 65.
        "waiting_ns": (53 - 33) + (65 - 62),
        "exposed_ns": (62 - 53) + (71 - 65),
        "data_ns": 2,
        "other_ns": 4,
    }


def test_the_parts_of_the_rank_that_is_waited_for():
    parts = overlap.parts(slow(), STARTED)
    assert in_ms(parts) == {
        "compute_ns": 40,
        "hidden_ns": 61 - 53,
        "waiting_ns": 0,
        "exposed_ns": 6,
        "data_ns": 34,
        "other_ns": 4,
    }
    assert parts.hidden_share == 8 / 14


def test_communication_under_two_buckets_at_once_counts_once():
    alone = step(
        1,
        0,
        [(B, 20), (W, 2)],
        [],
        [bucket(0, 4, 5, 15, 20, 20), bucket(1, 8, 10, 22, 20, 22, early=False)],
    )
    parts = overlap.parts(alone, overlap.starts([alone]))
    assert in_ms(parts)["hidden_ns"] == 15
    assert in_ms(parts)["exposed_ns"] == 2


def test_an_end_that_nobody_tells_is_that_of_the_wait():
    alone = step(1, 0, [(B, 20), (W, 2)], [], [bucket(0, 4, 5, None, 20, 22)])
    assert in_ms(overlap.parts(alone, {0: 5 * MS}))["hidden_ns"] == 15


def test_without_communication_there_is_no_share():
    assert overlap.parts(step(1, 0, [(F, 3)], [], []), {}).hidden_share is None


def test_the_figures_of_buckets():
    figures = overlap.bucket_figures(quick(), STARTED, [(2, 1), (0,)])
    assert figures == [
        BucketFigures(0, 5 * MS, 1 * MS, 32 * MS, 8 * MS, 8 * MS),
        BucketFigures(1, 0, 0, 32 * MS, 6 * MS, 6 * MS),
    ]
    assert [in_ms(f)["exposed_ns"] for f in overlap.bucket_figures(slow(), STARTED, [(), ()])] == [
        0,
        6,
    ]


def test_what_was_not_recorded_is_none():
    alone = step(0, 0, [(B, 20), (W, 2)], [], [bucket(0, None, 5, None, 20, 22)])
    (figures,) = overlap.bucket_figures(alone, {0: 5 * MS}, [(0,)])
    assert (figures.fill_ns, figures.delay_ns) == (None, None)


def test_who_is_last_how_late_and_why():
    assert overlap.last({0: quick(), 1: slow(), 2: quick()}, {}) == Last(1, 32 * MS, D)
    assert overlap.last({0: quick()}, {}) is None
    assert overlap.last({0: step(1, 0, [(F, 1)], [], []), 1: quick()}, {}) is None


def test_time_lost_after_the_last_settlement_counts():
    # Rank 0 spends 30 ms in its optimizer at the end of step 1, and is late in step 2.
    lazy = step(1, 0, [(B, 10), (W, 5), (S, 30)], [], [bucket(0, 9, 9, 14, 10, 15)])
    brisk = step(1, 0, [(B, 10), (W, 5), (S, 2)], [], [bucket(0, 9, 9, 14, 10, 15)])
    lazy_next = step(2, 45, [(F, 5), (W, 1)], [], [bucket(0, 50, 50, 51, 50, 51)])
    brisk_next = step(2, 17, [(F, 5), (W, 29)], [], [bucket(0, 22, 22, 51, 22, 51)])
    steps = {0: lazy_next, 1: brisk_next}
    assert overlap.last(steps, {0: lazy, 1: brisk}) == Last(0, 28 * MS, S)


@pytest.mark.parametrize("kind", [D, F, B, S, X])
def test_each_phase_can_be_the_one(kind):
    def of(length):
        pieces = [(each, length if each is kind else 2) for each in (D, X, F, B, S)]
        end = sum(n for _, n in pieces)
        return step(1, 0, [*pieces, (W, 1)], [], [bucket(0, end, end, end + 1, end, end + 1)])

    assert overlap.last({0: of(2), 1: of(2), 2: of(9)}, {}) == Last(2, 7 * MS, kind)


intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


@given(intervals, intervals)
def test_sets_of_time_are_those_of_single_moments(some, others):
    def moments(pairs):
        return {at for begin, end in pairs for at in range(begin, end)}

    merged = overlap.merged(some)
    assert moments(merged) == moments(some)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(merged))
    both = moments(some) & moments(others)
    assert overlap.overlap(merged, overlap.merged(others)) == len(both)


@given(
    st.lists(st.tuples(st.sampled_from([D, F, B, W, S, X]), st.integers(0, 9)), min_size=1),
    intervals,
)
def test_the_parts_add_up_to_the_step(pieces, flights):
    buckets = [bucket(i, None, min(f), max(f), min(f), max(f)) for i, f in enumerate(flights)]
    one = step(1, 0, pieces, [], buckets)
    started = {i: (min(f) + max(f)) // 2 * MS for i, f in enumerate(flights)}
    parts = overlap.parts(one, started)
    assert parts.step_ns == one.end_ns - one.begin_ns
    assert 0 <= parts.hidden_ns <= parts.compute_ns
    assert min(parts.exposed_ns, parts.waiting_ns) >= 0


def test_means_add_up_too():
    some = [overlap.parts(s, STARTED) for s in (quick(), slow())]
    mean = Parts.mean(some)
    assert mean.step_ns == sum(parts.step_ns for parts in some) / 2
    assert mean == replace(mean)
