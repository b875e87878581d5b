from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankstep.data.shard import (
    CHUNK_POSITIONS,
    SORTED_UP_TO,
    Shard,
    StreamingOrder,
    index_lists,
    select,
)
from rankstep.errors import DataError

repeatable = settings(derandomize=True, database=None, deadline=None, max_examples=60)
lengths = st.integers(0, 300)
world_sizes = st.integers(1, 9)
seeds = st.integers(0, 2**64 - 1)
long_lengths = st.one_of(st.integers(SORTED_UP_TO - 2, SORTED_UP_TO + 2), st.integers(5000, 20000))


def shards(length, world_size, **options):
    return [Shard(length, world_size, rank, **options) for rank in range(world_size)]


def dealt(ranks):
    return sorted(position for shard in ranks for position in shard.positions)


# --- Shard -------------------------------------------------------------------------------------


@repeatable
@given(lengths, world_sizes, st.integers(0, 400))
def test_pad_none_deals_every_position_once_and_evenly_to_one(length, world_size, start):
    ranks = shards(length, world_size, pad="none", start=start)
    assert dealt(ranks) == list(range(start, length))
    counts = [shard.count for shard in ranks]
    assert max(counts) - min(counts) <= 1
    assert {shard.rounds for shard in ranks} == {max(counts)}


@repeatable
@given(lengths, world_sizes, st.integers(0, 400))
def test_pad_repeat_gives_all_ranks_equally_many_and_the_least_that_covers_all(
    length, world_size, start
):
    ranks = shards(length, world_size, start=start)
    positions = dealt(ranks)
    assert positions == list(range(start, start + len(positions)))
    assert len({shard.count for shard in ranks}) == 1
    assert 0 <= len(positions) - max(length - start, 0) < world_size


@repeatable
@given(lengths, world_sizes, st.integers(0, 400))
def test_drop_last_gives_all_ranks_equally_many_and_the_most_without_padding(
    length, world_size, start
):
    ranks = shards(length, world_size, drop_last=True, start=start)
    positions = dealt(ranks)
    assert positions == list(range(start, start + len(positions)))
    assert len({shard.count for shard in ranks}) == 1
    assert 0 <= max(length - start, 0) - len(positions) < world_size


def test_reached_counts_all_ranks_and_stays_inside_the_epoch():
    assert [Shard(10, 4, 1).reached(taken) for taken in range(4)] == [0, 4, 8, 12]
    assert [Shard(10, 4, 1, pad="none").reached(taken) for taken in range(4)] == [0, 4, 8, 10]
    assert Shard(10, 4, 1, start=7).reached(1) == 11


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((10, 4, 4), r"Invalid rank 4, rank should be in the interval \[0, 3\]"),
        ((10, 4, -1), r"Invalid rank -1, rank should be in the interval \[0, 3\]"),
        ((10, 0, 0), "num_replicas must be at least 1, got 0"),
        ((-1, 1, 0), "length must be at least 0, got -1"),
        ((10, 2.0, 0), r"num_replicas must be a whole number, got 2.0 \(float\)"),
        ((10, 2, "1"), r"rank must be a whole number, got '1' \(str\)"),
    ],
)
def test_values_out_of_range_are_named(arguments, text):
    with pytest.raises(DataError, match=text):
        Shard(*arguments)


def test_unknown_padding_and_contradictions_are_named():
    with pytest.raises(DataError, match="pad must be one of repeat, none, got 'zero'"):
        Shard(10, 2, 0, pad="zero")
    with pytest.raises(DataError, match='drop_last=True leaves samples out and pad="none"'):
        Shard(10, 2, 0, drop_last=True, pad="none")
    with pytest.raises(DataError, match="consumed must be at least 0, got -3"):
        Shard(10, 2, 0, start=-3)


def test_ranks_without_a_sample_are_refused_by_name():
    with pytest.raises(DataError, match="3 samples on 4 ranks leaves ranks 0 to 3 without"):
        Shard(3, 4, 1, drop_last=True).refuse_empty_ranks()
    with pytest.raises(DataError, match="dataset is empty, so ranks 0 to 1 would"):
        Shard(0, 2, 0).refuse_empty_ranks()
    with pytest.raises(DataError, match="dataset is empty, so rank 0 would"):
        Shard(0, 1, 0).refuse_empty_ranks()
    Shard(3, 4, 3, pad="none").refuse_empty_ranks()
    Shard(0, 4, 3, pad="none").refuse_empty_ranks()
    Shard(3, 4, 3).refuse_empty_ranks()
    Shard(4, 4, 3, drop_last=True).refuse_empty_ranks()


# --- index lists -------------------------------------------------------------------------------


def test_index_lists_wrap_around_and_keep_the_order_of_positions():
    assert list(index_lists(range(1, 8, 3), 5, None)) == [[1, 4, 2]]
    assert list(index_lists(range(0, 4, 2), 4, lambda p: 10 * p)) == [[0, 20]]
    assert list(index_lists(range(0), 5, None)) == []


def test_index_lists_are_cut_into_chunks_without_a_seam():
    lists = list(index_lists(range(0, 3 * CHUNK_POSITIONS, 2), 10**9, None))
    assert [len(part) for part in lists] == [CHUNK_POSITIONS, CHUNK_POSITIONS // 2]
    assert [i for part in lists for i in part] == list(range(0, 3 * CHUNK_POSITIONS, 2))


@repeatable
@given(st.integers(1, 50), st.integers(0, 120), st.integers(0, 60), world_sizes)
def test_select_takes_the_positions_wrapped_around(length, start, span, step):
    permutation = np.random.default_rng(length).permutation(length)
    positions = range(start, start + span, step)
    expected = [permutation[p % length] for p in positions]
    assert select(permutation, positions).tolist() == expected


# --- StreamingOrder ----------------------------------------------------------------------------


@repeatable
@given(st.integers(1, 200), seeds, st.integers(-5, 2**40))
def test_streaming_order_of_few_is_a_permutation(length, seed, epoch):
    order = StreamingOrder.keyed(length, seed, epoch)
    assert sorted(order.take(np.arange(length)).tolist()) == list(range(length))


@settings(repeatable, max_examples=30)
@given(long_lengths, seeds, st.integers(0, 1000))
def test_streaming_order_of_many_is_a_permutation(length, seed, epoch):
    order = StreamingOrder.keyed(length, seed, epoch)
    seen = order.take(np.arange(length))
    assert np.array_equal(np.sort(seen), np.arange(length))


@settings(repeatable, max_examples=30)
@given(st.integers(10**6, 2**63 - 1), seeds)
def test_streaming_order_of_any_length_stays_inside_and_never_collides(length, seed):
    order = StreamingOrder.keyed(length, seed, 0)
    spread = np.unique(np.linspace(0, length - 1, 3000).astype(np.uint64).astype(np.int64))
    positions = spread[(spread >= 0) & (spread < length)]
    samples = order.take(positions)
    assert samples.dtype == np.int64
    assert samples.min() >= 0
    assert samples.max() < length
    assert len(np.unique(samples)) == len(positions)


@pytest.mark.parametrize("length", [10, SORTED_UP_TO, SORTED_UP_TO + 1, 10**9, 2**63 - 1])
def test_one_position_looked_up_equals_the_same_among_many(length):
    order = StreamingOrder.keyed(length, 3, 4)
    positions = [0, 1, length // 2, length - 1]
    assert [order.at(p) for p in positions] == order.take(np.array(positions)).tolist()


def test_streaming_order_never_changes():
    """A checkpoint of today must go on with the same samples in years; so these numbers may not be edited."""
    assert [StreamingOrder.keyed(10, 1, 2).at(p) for p in range(10)] == [
        7,
        8,
        0,
        3,
        5,
        6,
        1,
        9,
        2,
        4,
    ]
    assert [StreamingOrder.keyed(10**9, 1, 2).at(p) for p in range(5)] == [
        314475282,
        386986072,
        804719469,
        503688251,
        276804203,
    ]


def test_every_seed_and_epoch_has_its_own_order():
    orders = {
        tuple(StreamingOrder.keyed(10**9, seed, epoch).take(np.arange(4)).tolist())
        for seed in (0, 1, 2, 2**32, 2**64 - 1)
        for epoch in (-1, 0, 1, 2, 2**32)
    }
    assert len(orders) == 25


def deviations(counts, expected):
    """How many standard deviations a chi-squared statistic lies above what chance gives."""
    freedom = counts.size - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_all_orders_of_five_samples_are_equally_likely():
    drawn = Counter(
        tuple(StreamingOrder.keyed(5, seed, 0).take(np.arange(5)).tolist()) for seed in range(6000)
    )
    counts = np.array([drawn[order] for order in permutations(range(5))])
    assert deviations(counts, 6000 / 120) < 4


@pytest.mark.parametrize("length", [SORTED_UP_TO, SORTED_UP_TO + 1, 9999])
def test_samples_and_their_neighbours_are_spread_evenly(length):
    places, steps = np.zeros(64), np.zeros(64)
    for seed in range(40):
        samples = StreamingOrder.keyed(length, seed, 0).take(np.arange(length))
        # The first tenth of the epoch, and the distance between one sample and the next.
        head = samples[: length // 10]
        places += np.bincount(head * 64 // length, minlength=64)
        steps += np.bincount(np.diff(samples) % length * 64 // length, minlength=64)
    shares = np.bincount(np.arange(length) * 64 // length, minlength=64) / length
    assert abs(deviations(places, places.sum() * shares)) < 4
    assert abs(deviations(steps, steps.sum() * shares)) < 4


def test_consecutive_samples_of_a_huge_order_do_not_run_on():
    samples = StreamingOrder.keyed(10**9, 0, 0).take(np.arange(2000)).tolist()
    rising = sum(a < b for a, b in pairwise(samples))
    assert 900 < rising < 1100
    assert all(abs(a - b) > 1 for a, b in pairwise(samples))


def test_streaming_order_of_a_billion_needs_less_than_a_mebibyte():
    order = StreamingOrder.keyed(10**9, 0, 0)
    tracemalloc.start()
    try:
        taken = sum(
            len(part) for part in index_lists(range(8 * CHUNK_POSITIONS), 10**9, order.take)
        )
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken == 8 * CHUNK_POSITIONS
    assert peak_bytes < 2**20


@pytest.mark.parametrize("position", [-1, 10])
def test_positions_outside_are_refused(position):
    with pytest.raises(DataError, match="this order has 0 to 9"):
        StreamingOrder.keyed(10, 0, 0).at(position)


def test_streaming_order_of_nothing_takes_nothing():
    empty = np.array([], dtype=np.int64)
    assert StreamingOrder.keyed(0, 0, 0).take(empty).size == 0
    with pytest.raises(DataError, match="positions 0 to 0 were asked for"):
        StreamingOrder.keyed(0, 0, 0).at(0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((-1, 0, 0), "length must be at least 0"),
        ((10, -1, 0), "seed must be at least 0"),
        ((10, 0.5, 0), "seed must be a whole number"),
        ((10, 0, None), "epoch must be a whole number"),
    ],
)
def test_keys_are_checked(arguments, text):
    with pytest.raises(DataError, match=text):
        StreamingOrder.keyed(*arguments)
