from __future__ import annotations

import copy
import json
import pickle
import tracemalloc
import warnings
from itertools import islice

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from rankstep.data import DistributedSampler, RepeatedOrderWarning
from rankstep.errors import DataError

repeatable = settings(derandomize=True, database=None, deadline=None, max_examples=60)


class Sized:
    """A dataset that is nothing but a length, which may change."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length


def build(length=23, world_size=2, rank=0, **options):
    return DistributedSampler(Sized(length), world_size, rank, **options)


def deal(length, world_size, **options):
    """All indices of an epoch in the order in which they are dealt: rank 0, 1, ... and around again."""
    lists = [list(build(length, world_size, rank, **options)) for rank in range(world_size)]
    return interleave(lists)


def interleave(lists):
    rounds = max(map(len, lists), default=0)
    return [indices[turn] for turn in range(rounds) for indices in lists if turn < len(indices)]


# --- torch's sampler -----------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", range(1, 8))
def test_indices_equal_torchs_bit_for_bit(world_size):
    for length in range(1, 41):
        for drop_last in (False, True):
            if drop_last and length < world_size:
                with pytest.raises(DataError, match=f"{length} samples on {world_size} ranks"):
                    build(length, world_size, drop_last=True)
                continue
            for rank in range(world_size):
                for shuffle, seed, epoch in (
                    (False, 0, 0),
                    (True, 0, 0),
                    (True, 0, 3),
                    (True, 2**40, 1),
                ):
                    args = (Sized(length), world_size, rank, shuffle, seed, drop_last)
                    ours, theirs = DistributedSampler(*args), TorchSampler(*args)
                    ours.set_epoch(epoch)
                    theirs.set_epoch(epoch)
                    assert list(ours) == list(theirs), args
                    for name in ("num_samples", "total_size"):
                        assert getattr(ours, name) == getattr(theirs, name), (name, args)
                    assert len(ours) == len(theirs)


def test_it_is_torchs_sampler_by_class_and_by_attributes():
    dataset = Sized(10)
    sampler = DistributedSampler(dataset, 4, 2, False, 5, True)
    assert isinstance(sampler, TorchSampler)
    assert sampler.dataset is dataset
    names = ("num_replicas", "rank", "epoch", "num_samples", "total_size", "seed")
    assert [getattr(sampler, name) for name in names] == [4, 2, 0, 2, 8, 5]
    assert (sampler.shuffle, sampler.drop_last) == (False, True)
    assert (sampler.pad, sampler.order) == ("repeat", "torch")


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("later", [7, 9, 10, 11, 12, 13, 40])
def test_a_dataset_that_changed_its_length_is_dealt_as_torch_does_or_refused(later, drop_last):
    ours, theirs = (
        kind(Sized(10), 3, 1, seed=4, drop_last=drop_last)
        for kind in (DistributedSampler, TorchSampler)
    )
    ours.dataset.length = theirs.dataset.length = later
    try:
        expected = list(theirs)
    except AssertionError:
        with pytest.raises(DataError, match=f"had 10 samples .* and now has {later}"):
            iter(ours)
    else:
        assert list(ours) == expected


def test_a_shrunken_dataset_on_one_rank_repeats_all_of_its_samples():
    ours, theirs = (kind(Sized(10), 1, 0) for kind in (DistributedSampler, TorchSampler))
    ours.dataset.length = theirs.dataset.length = 3
    assert list(ours) == list(theirs)


@pytest.mark.parametrize("later", [0, 9, 11])
def test_a_dataset_that_changed_its_length_is_refused_where_nothing_may_repeat(later):
    sampler = build(10, 3, pad="none")
    sampler.dataset.length = later
    with pytest.raises(DataError, match=f"had 10 samples .* and now has {later}"):
        iter(sampler)


def test_a_dataset_that_became_empty_is_refused():
    sampler = build(10)
    sampler.dataset.length = 0
    with pytest.raises(DataError, match="now has 0"):
        iter(sampler)


def test_iterating_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    list(build())
    list(build(order="streaming"))
    assert torch.equal(torch.get_rng_state(), before)


def test_another_default_device_changes_nothing():
    with torch.device("meta"):
        indices = list(build())
    assert indices == list(build())


def test_it_works_in_a_loader():
    sampler = build(10, 3, 1, shuffle=False)
    batches = [batch.tolist() for batch in DataLoader(range(10), batch_size=3, sampler=sampler)]
    assert batches == [[1, 4, 7], [0]]
    assert list(BatchSampler(build(10, 3, 1, shuffle=False), 3, drop_last=True)) == [[1, 4, 7]]


@pytest.mark.parametrize("remake", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])  # noqa: S301
def test_a_copy_goes_on_alone(remake):
    sampler = build()
    iterator = iter(sampler)
    next(iterator)
    twin = remake(sampler)
    next(iterator)
    assert twin.state_dict()["global_consumed"] == 2
    assert sampler.state_dict()["global_consumed"] == 4


# --- where the world comes from ------------------------------------------------------------------


@pytest.fixture
def no_world(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture
def four_ranks(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)


def test_the_open_process_group_gives_the_defaults(four_ranks):
    sampler = DistributedSampler(Sized(10))
    assert (sampler.num_replicas, sampler.rank) == (4, 2)
    assert DistributedSampler(Sized(10), rank=0).num_replicas == 4
    assert DistributedSampler(Sized(10), 8).rank == 2
    with pytest.raises(DataError, match="Invalid rank 2"):
        DistributedSampler(Sized(10), 2)


def test_without_a_process_group_there_is_one_rank(no_world):
    sampler = DistributedSampler(Sized(10), shuffle=False)
    assert (sampler.num_replicas, sampler.rank) == (1, 0)
    assert list(sampler) == list(range(10))
    with pytest.raises(DataError, match=r"Invalid rank 3, .* \[0, 0\]"):
        DistributedSampler(Sized(10), rank=3)


def test_a_rank_that_cannot_be_known_is_asked_for(no_world):
    with pytest.raises(DataError, match="num_replicas=4 needs a rank"):
        DistributedSampler(Sized(10), 4)


def test_a_launched_script_without_a_process_group_is_not_taken_for_one_rank(no_world, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert DistributedSampler(Sized(10)).num_replicas == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(DataError, match=r"WORLD_SIZE=4 in the environment, but no process group"):
        DistributedSampler(Sized(10))
    assert DistributedSampler(Sized(10), 4, 1).rank == 1


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": 2}, r"Invalid rank 2, rank should be in the interval \[0, 1\]"),
        ({"rank": -1}, r"Invalid rank -1, rank should be in the interval \[0, 1\]"),
        ({"rank": "0"}, "rank must be a whole number, got '0'"),
        ({"world_size": 0}, "num_replicas must be at least 1, got 0"),
        ({"world_size": True}, "num_replicas must be a whole number, got True"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"seed": 1.5}, r"seed must be a whole number, got 1.5 \(float\)"),
        ({"seed": True}, r"seed must be a whole number, got True \(bool\)"),
        ({"seed": None}, "seed must be a whole number, got None"),
        ({"seed": 2**64}, "seed .* epoch must be in"),
        ({"pad": "zeros"}, "pad must be one of repeat, none, got 'zeros'"),
        ({"order": "random"}, "order must be one of torch, streaming, got 'random'"),
        ({"drop_last": True, "pad": "none"}, "ask for one of the two"),
        ({"length": 0}, "dataset is empty, so ranks 0 to 1"),
        ({"length": 0, "drop_last": True}, "dataset is empty, so ranks 0 to 1"),
        ({"length": 1, "drop_last": True}, "1 samples on 2 ranks leaves ranks 0 to 1 without"),
    ],
)
def test_bad_arguments_are_named(options, text):
    with pytest.raises(DataError, match=text):
        build(**options)
    assert issubclass(DataError, ValueError)  # what torch raises for a rank out of range


def test_a_dataset_without_a_length_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    with pytest.raises(DataError, match="needs a dataset with a length, got Stream"):
        DistributedSampler(Stream(), 2, 0)
    with pytest.raises(DataError, match="needs a dataset with a length, got int"):
        DistributedSampler(10, 2, 0)


def test_what_a_datasets_own_length_raises_comes_through():
    class Broken:
        def __len__(self):
            raise TypeError("not opened yet")

    with pytest.raises(TypeError, match="not opened yet"):
        DistributedSampler(Broken(), 2, 0)


def test_whole_numbers_of_other_libraries_are_taken_and_kept_as_plain_ints():
    sampler = build(10, np.int64(2), torch.tensor(1), seed=np.uint8(3))
    sampler.set_epoch(torch.tensor(2))
    theirs = TorchSampler(Sized(10), 2, 1, seed=3)
    theirs.set_epoch(2)
    assert list(sampler) == list(theirs)
    values = (sampler.num_replicas, sampler.rank, sampler.seed, sampler.epoch)
    assert values == (2, 1, 3, 2)
    assert {type(value) for value in values} == {int}
    json.dumps(sampler.state_dict())


@pytest.mark.parametrize("epoch", [1.0, "1", None, True, torch.tensor(1.0)])
def test_an_epoch_is_a_whole_number(epoch):
    sampler = build()
    with pytest.raises(DataError, match="epoch must be a whole number"):
        sampler.set_epoch(epoch)
    assert sampler.epoch == 0


def test_an_epoch_beyond_torchs_generator_is_refused_when_set():
    sampler = build(seed=2**64 - 1)
    list(sampler)
    with pytest.raises(DataError, match=r"seed \+ epoch must be in"):
        sampler.set_epoch(1)


# --- pad="none" and order="streaming" ------------------------------------------------------------


@repeatable
@given(
    st.integers(0, 60),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from(["torch", "streaming"]),
    st.integers(0, 2**64 - 100),
    st.integers(0, 99),
)
def test_pad_none_deals_every_index_exactly_once(length, world_size, shuffle, order, seed, epoch):
    counts, seen = [], []
    for rank in range(world_size):
        sampler = build(
            length, world_size, rank, shuffle=shuffle, seed=seed, pad="none", order=order
        )
        sampler.set_epoch(epoch)
        indices = list(sampler)
        assert len(sampler) == sampler.num_samples == len(indices)
        assert sampler.total_size == length
        counts.append(len(indices))
        seen += indices
    assert sorted(seen) == list(range(length))
    assert max(counts) - min(counts) <= 1


def test_pad_none_deals_torchs_order():
    padded, whole = deal(10, 4, seed=3), deal(10, 4, seed=3, pad="none")
    assert padded == whole + whole[:2]


@repeatable
@given(st.integers(1, 60), st.integers(1, 9), st.booleans(), st.integers(0, 2**63))
def test_streaming_covers_the_dataset_and_pads_from_its_front(length, world_size, drop_last, seed):
    if drop_last and length < world_size:
        return
    dealt = deal(length, world_size, order="streaming", seed=seed, drop_last=drop_last)
    front = dealt[:length]
    assert sorted(set(front)) == sorted(front)
    if not drop_last:
        assert sorted(front) == list(range(length))
        assert dealt[length:] == [front[i % length] for i in range(len(dealt) - length)]


def test_streaming_has_an_order_for_each_epoch_and_none_without_shuffle():
    sampler = build(50, 1, order="streaming")
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(build(50, 1, order="streaming", shuffle=False)) == list(range(50))


@pytest.mark.parametrize("options", [{"order": "streaming"}, {"shuffle": False}])
def test_a_billion_samples_need_less_than_a_mebibyte(options):
    build(10**9, 8, 3, **options)  # what is set up once per process does not count
    tracemalloc.start()
    try:
        sampler = build(10**9, 8, 3, **options)
        indices = list(islice(iter(sampler), 5000))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(set(indices)) == 5000
    assert peak_bytes < 2**20


def test_torchs_order_is_held_as_this_ranks_share_of_a_tensor():
    tracemalloc.start()
    try:
        sampler = build(400_000, 4, 1)
        indices = list(islice(iter(sampler), 10))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(indices) == 10
    # The share alone takes 0.8 MB; torch's list of all indices takes 3.2 MB and its ints 12.8 MB.
    assert peak_bytes < 1_500_000


# --- stop and go on ------------------------------------------------------------------------------

EPOCHS = [
    {"shuffle": False},
    {},
    {"drop_last": True},
    {"order": "streaming"},
    {"pad": "none"},
    {"pad": "none", "order": "streaming"},
]


@pytest.mark.parametrize("options", EPOCHS, ids=str)
def test_the_rest_of_an_epoch_follows_at_every_position(options):
    for rank in range(3):
        sampler = build(23, 3, rank, seed=7, **options)
        sampler.set_epoch(2)
        whole = list(sampler)
        for taken in range(len(whole) + 1):
            source = build(23, 3, rank, seed=7, **options)
            source.set_epoch(2)
            head = list(islice(iter(source), taken))
            state = json.loads(json.dumps(source.state_dict()))
            assert state == source.state_dict(consumed=taken)
            again = build(23, 3, rank, seed=7, **options)
            again.load_state_dict(state)
            assert again.epoch == 2
            assert head + list(again) == whole
            again.set_epoch(3)
            assert len(list(again)) == len(whole) == len(again)


def test_the_state_is_plain_and_global():
    sampler = build(23, 3, 1, seed=7, order="streaming")
    sampler.set_epoch(2)
    list(islice(iter(sampler), 4))
    assert sampler.state_dict() == {
        "version": 1,
        "seed": 7,
        "epoch": 2,
        "shuffle": True,
        "drop_last": False,
        "pad": "repeat",
        "order": "streaming",
        "dataset_len": 23,
        "global_consumed": 12,
        "world_size": 3,
    }


@pytest.mark.parametrize("options", EPOCHS, ids=str)
@pytest.mark.parametrize("sizes", [(4, 3), (3, 4), (1, 5), (5, 1), (2, 7)], ids=str)
def test_another_number_of_ranks_goes_on_with_the_remaining_samples(sizes, options):
    before, after = sizes
    line = deal(31, 1, seed=1, **{**options, "drop_last": False})
    for taken in range(31 // before + 1):
        state = build(31, before, 0, seed=1, **options).state_dict(consumed=taken)
        assert state["global_consumed"] == taken * before
        rest, lists = line[taken * before :], []
        for rank in range(after):
            sampler = build(31, after, rank, seed=1, **options)
            sampler.load_state_dict(state)
            lists.append(list(sampler))
        dealt = interleave(lists)
        if "drop_last" in options:
            assert dealt == rest[: len(rest) // after * after]
        elif "pad" in options:
            assert dealt == rest
        else:
            padding = -len(rest) % after
            assert dealt == rest + line[:padding]
            assert len({len(indices) for indices in lists}) == 1


def test_stops_on_three_numbers_of_ranks_in_one_epoch_lose_and_repeat_nothing():
    line = deal(50, 1, seed=1)
    seen, state = [], None
    for world_size, taken in ((4, 3), (3, 2), (5, 1), (2, None)):
        lists, states = [], []
        for rank in range(world_size):
            sampler = build(50, world_size, rank, seed=1)
            if state is not None:
                sampler.load_state_dict(state)
            lists.append(list(islice(iter(sampler), taken)))
            states.append(sampler.state_dict())
        assert all(one == states[0] for one in states)
        seen += interleave(lists)
        state = states[0]
    assert state["global_consumed"] == 51  # 12, 18, 23, and the odd rest on two ranks is padded
    assert seen == line + line[23 + 27 - 50 : 1]


def test_a_count_after_a_change_of_ranks_includes_what_was_done_before():
    first = build(50, 3, 0)
    state = first.state_dict(consumed=7)
    second = build(50, 2, 1)
    second.load_state_dict(state)
    # 21 samples were done, so 10 on each of two ranks count as done before.
    assert second.state_dict(consumed=10)["global_consumed"] == 21
    assert second.state_dict(consumed=13)["global_consumed"] == 27
    with pytest.raises(DataError, match=r"consumed=3 on rank 1, but 10 samples per rank"):
        second.state_dict(consumed=3)


def test_the_count_of_the_trainer_wins_over_what_a_loader_fetched_ahead():
    sampler = build(24, 2, 1)
    iterator = iter(sampler)
    fetched = [next(iterator) for _ in range(8)]
    assert sampler.state_dict()["global_consumed"] == 16
    again = build(24, 2, 1)
    again.load_state_dict(sampler.state_dict(consumed=3))
    assert list(again)[:5] == fetched[3:]
    assert again.state_dict(consumed=5)["global_consumed"] == 10


@pytest.mark.parametrize("consumed", [-1, 13, 1.0, "3", True])
def test_an_impossible_count_is_refused(consumed):
    sampler = build(24, 2, 1)
    with pytest.raises(DataError, match="consumed"):
        sampler.state_dict(consumed=consumed)
    assert sampler.state_dict(consumed=12)["global_consumed"] == 24


def test_the_loaded_place_is_kept_until_an_iteration_begins():
    source = build()
    list(islice(iter(source), 4))
    state = source.state_dict()
    sampler = build()
    sampler.load_state_dict(state)
    assert sampler.state_dict() == state
    iterator = iter(sampler)
    assert sampler.state_dict() == state
    next(iterator)
    assert sampler.state_dict()["global_consumed"] == state["global_consumed"] + 2


def test_the_loaded_place_is_kept_until_an_index_is_drawn():
    # A loader without batches and with workers begins to iterate twice.
    whole = list(build())
    sampler = build()
    sampler.load_state_dict(sampler.state_dict(consumed=4))
    loader = DataLoader(
        range(23), batch_size=None, sampler=sampler, num_workers=1, multiprocessing_context="fork"
    )
    assert [int(index) for index in loader] == whole[4:]
    assert list(sampler) == whole


def test_setting_the_loaded_epoch_keeps_the_place_and_another_drops_it():
    state = build().state_dict(consumed=4)
    whole = list(build())
    for epoch, expected in ((0, 8), (1, 12)):
        sampler = build()
        sampler.load_state_dict(state)
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == expected
    sampler = build()
    sampler.load_state_dict(state)
    assert list(sampler) == whole[4:]
    assert list(sampler) == whole


def test_the_state_of_an_epoch_that_was_set_but_not_begun_is_its_beginning():
    sampler = build()
    list(sampler)
    assert sampler.state_dict()["global_consumed"] == 24
    sampler.set_epoch(1)
    state = sampler.state_dict()
    assert (state["epoch"], state["global_consumed"]) == (1, 0)


def test_a_finished_epoch_has_no_rest():
    source = build(10, 4, 3, pad="none")
    list(source)
    state = source.state_dict()
    assert state["global_consumed"] == 10
    sampler = build(10, 3, 0, pad="none")
    sampler.load_state_dict(state)
    assert list(sampler) == []
    assert len(list(sampler)) == 4


# --- the iterator's own state, as torchdata asks for it --------------------------------------------


def test_the_iterator_saves_its_own_place_and_restores_it():
    sampler = build(23, 2, 1)
    sampler.set_epoch(5)
    iterator = iter(sampler)
    head = list(islice(iterator, 3))
    state = iterator.state_dict()
    sampler.set_epoch(6)
    assert iterator.state_dict() == state  # whatever the sampler does next
    assert sampler.state_dict()["epoch"] == 6

    other = build(23, 2, 1)
    fresh = iter(other)
    next(fresh)
    fresh.load_state_dict(state)
    assert other.epoch == 5
    expected = build(23, 2, 1)
    expected.set_epoch(5)
    assert head + list(fresh) == list(expected)
    assert len(list(other)) == 12  # the place was used up by the iterator


# --- states that do not fit --------------------------------------------------------------------------


def changed(**values):
    return {**build().state_dict(consumed=4), **values}


def without(key):
    state = changed()
    del state[key]
    return state


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (changed(dataset_len=40), "dataset_len is 40 in the state and 23 here"),
        (changed(seed=5), "seed is 5 in the state and 0 here"),
        (changed(shuffle=False), "shuffle is False in the state and True here"),
        (changed(drop_last=True), "drop_last is True in the state and False here"),
        (changed(pad="none"), "pad is 'none' in the state and 'repeat' here"),
        (changed(order="streaming"), "order is 'streaming' in the state and 'torch' here"),
        (changed(seed=5, shuffle=False), "seed is 5 .*; shuffle is False"),
        (changed(version=2), "has version 2, this Rankstep reads version 1"),
        (changed(version="1"), "has version '1'"),
        (changed(global_consumed=25), "25 samples were consumed, beyond the end .* 24 at most"),
        (changed(global_consumed=-1), "global_consumed .* must be at least 0, got -1"),
        (changed(global_consumed=4.0), "global_consumed .* must be int, got 4.0"),
        (changed(world_size=0), "world_size .* must be at least 1, got 0"),
        (changed(epoch=True), "epoch .* must be int, got True"),
        (changed(epoch=2**64), r"seed \+ epoch must be in"),
        (changed(shuffle=1), "shuffle .* must be bool, got 1"),
        (without("seed"), "lacks seed"),
        (without("version"), "lacks version"),
        ({"yielded": 3}, r"lacks dataset_len, .* \(it has: yielded\)"),
        ({}, "it has: nothing"),
        ([1, 2], r"is a dict, got \[1, 2\] \(list\)"),
    ],
    ids=repr,
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(state, text):
    sampler = build()
    sampler.set_epoch(1)
    iterator = iter(sampler)
    next(iterator)
    before = sampler.state_dict()
    with pytest.raises(DataError, match=text):
        sampler.load_state_dict(state)
    assert sampler.state_dict() == before
    with pytest.raises(DataError, match=text):
        iterator.load_state_dict(state)
    assert iterator.state_dict() == before
    assert len(list(iterator)) == 11


def test_a_count_beyond_the_end_is_judged_by_the_states_own_padding():
    sampler = build(10, 4, pad="none")
    with pytest.raises(DataError, match="10 at most"):
        sampler.load_state_dict({**sampler.state_dict(), "global_consumed": 11})
    padded = build(10, 3)
    padded.load_state_dict(build(10, 4).state_dict(consumed=3))
    assert list(padded) == []


def test_keys_of_later_writers_are_ignored():
    sampler = build()
    sampler.load_state_dict(changed(note="hello"))
    assert len(list(sampler)) == 8


# --- the warning -------------------------------------------------------------------------------------


def passes(sampler, count):
    for _ in range(count):
        list(sampler)


def test_a_repeated_order_is_warned_of_once():
    sampler = build(23, 2, 1, seed=9)
    list(sampler)
    with pytest.warns(RepeatedOrderWarning, match="rank 1: .* epoch 0 of seed 9; call") as caught:
        passes(sampler, 3)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_each_sampler_warns_for_itself():
    for sampler in (build(), build(order="streaming")):
        list(sampler)
        with pytest.warns(RepeatedOrderWarning):
            list(sampler)


def test_an_epoch_forgotten_later_is_warned_of_too():
    sampler = build()
    list(sampler)
    sampler.set_epoch(1)
    list(sampler)
    with pytest.warns(RepeatedOrderWarning, match="epoch 1"):
        list(sampler)


@pytest.mark.parametrize(
    "walk",
    [
        lambda s: [(s.set_epoch(epoch), list(s)) for epoch in range(3)],
        lambda s: [(s.set_epoch(4), list(s)) for _ in range(2)],
        lambda s: [(setattr(s, "epoch", epoch), list(s)) for epoch in range(3)],
        lambda s: [list(islice(iter(s), 5)) for _ in range(3)],
        lambda s: [list(islice(iter(s), 5)), list(s)],
        lambda s: [s.load_state_dict(changed()), list(s), list(s)],
        lambda s: [list(s), s.load_state_dict(changed()), list(s)],
    ],
    ids=["set", "set to the same", "assigned", "partial", "partial, full", "loaded", "reloaded"],
)
def test_no_warning_where_nothing_was_forgotten(walk):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        walk(build())


def test_no_warning_without_shuffle():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        passes(build(shuffle=False), 3)
