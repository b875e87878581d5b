"""Global batches: a step has the same samples on any number of ranks, and each sample of an epoch comes once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from rankstep import DistributedSampler, GlobalBatchSampler
from rankstep.errors import DataError


def samplers(ranks, length=23, global_batch=8, micro_batch=None, **options):
    return [
        GlobalBatchSampler(
            range(length), global_batch, micro_batch, num_replicas=ranks, rank=rank, **options
        )
        for rank in range(ranks)
    ]


def steps_of(sampler):
    """This rank's micro-batches of each step that is left."""
    windows = list(sampler.windows())
    batches = iter(sampler)
    steps = [[next(batches) for _ in sizes] for sizes in windows]
    assert [[len(batch) for batch in step] for step in steps] == windows
    assert next(batches, None) is None
    return steps


def joined(of_ranks):
    """The samples of each step over all ranks, in the order of the epoch's positions."""
    joined = []
    for step in zip(*of_ranks, strict=True):
        shares = [list(itertools.chain(*batches)) for batches in step]
        dealt = itertools.chain(*itertools.zip_longest(*shares))
        joined.append([sample for sample in dealt if sample is not None])
    return joined


@given(
    length=st.integers(1, 60),
    global_batch=st.integers(1, 20),
    micro_batch=st.one_of(st.none(), st.integers(1, 6)),
    ranks=st.integers(1, 6),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_steps_do_not_depend_on_the_ranks(
    length, global_batch, micro_batch, ranks, drop_last, epoch
):
    whole = length // global_batch
    if ranks > global_batch or (drop_last and not whole):
        return
    made = samplers(ranks, length, global_batch, micro_batch, drop_last=drop_last)
    for sampler in made:
        sampler.set_epoch(epoch)
    of_ranks = [steps_of(sampler) for sampler in made]
    reference = DistributedSampler(range(length), 1, 0)
    reference.set_epoch(epoch)
    order = list(reference)
    expected = [order[i : i + global_batch] for i in range(0, length, global_batch)]
    if drop_last:
        expected = expected[:whole]
    assert joined(of_ranks) == expected
    assert made[0].steps == len(expected)
    for steps, sampler in zip(of_ranks, made, strict=True):
        assert len(sampler) == sum(map(len, steps))
        for batches in steps:
            assert all(0 < len(batch) <= (micro_batch or length) for batch in batches)
            assert max(map(len, batches), default=0) - min(map(len, batches), default=0) <= 1
    for step in zip(*of_ranks, strict=True):
        shares = [sum(map(len, batches)) for batches in step]
        assert max(shares) - min(shares) <= 1


def test_with_equal_shares_it_is_the_distributed_sampler():
    for rank, sampler in enumerate(samplers(4, 24, 8)):
        plain = DistributedSampler(range(24), 4, rank)
        assert list(itertools.chain(*itertools.chain(*steps_of(sampler)))) == list(plain)


@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_the_rest_of_an_epoch_is_that_of_any_number_of_ranks(done):
    whole = joined([steps_of(sampler) for sampler in samplers(1)])
    (first, *_) = samplers(4)
    iter(first)
    state = first.state_dict(done)
    rest = samplers(3, micro_batch=2)
    for sampler in rest:
        sampler.load_state_dict(state)
        assert sampler.state_dict() == state
    assert joined([steps_of(sampler) for sampler in rest]) == whole[done:]
    # And once more, from the middle of the rest.
    further = min(done + 1, 3)
    state = rest[0].state_dict(further - done)
    again = samplers(2)
    for sampler in again:
        sampler.load_state_dict(state)
    assert joined([steps_of(sampler) for sampler in again]) == whole[further:]


def test_the_epoch_behind_a_rest_is_whole():
    (sampler,) = samplers(1)
    iter(sampler)
    sampler.load_state_dict(sampler.state_dict(2))
    assert len(steps_of(sampler)) == 1
    sampler.set_epoch(1)
    assert sampler.state_dict(0)["global_consumed"] == 0
    assert len(steps_of(sampler)) == 3


def test_in_a_loader_with_workers():
    (sampler, other) = samplers(2, micro_batch=2)
    loader = DataLoader(
        list(range(23)), batch_sampler=sampler, num_workers=1, multiprocessing_context="fork"
    )
    batches = [batch.tolist() for batch in loader]
    (again, _) = samplers(2, micro_batch=2)
    assert batches == list(itertools.chain(*steps_of(again)))
    assert batches != list(itertools.chain(*steps_of(other)))


def test_a_loader_with_workers_goes_on_from_a_loaded_place():
    # torch begins to iterate over a batch sampler twice there, and throws the first iterator away.
    (sampler,) = samplers(1)
    state = sampler.state_dict(1)
    sampler.load_state_dict(state)
    rest = list(itertools.chain(*steps_of(sampler)))
    sampler.load_state_dict(state)
    loader = DataLoader(
        list(range(23)), batch_sampler=sampler, num_workers=1, multiprocessing_context="fork"
    )
    assert [batch.tolist() for batch in loader] == rest
    whole = [batch.tolist() for batch in loader]
    assert whole[-len(rest) :] == rest
    assert len(whole) > len(rest)


def test_the_epoch_behind_an_empty_rest_is_whole():
    (sampler,) = samplers(1)
    sampler.load_state_dict(sampler.state_dict(99))
    assert list(sampler) == []
    assert len(list(sampler)) == len(sampler)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"global_batch": 0}, "global_batch must be at least 1"),
        ({"micro_batch": 0}, "micro_batch must be at least 1"),
        ({"global_batch": 2}, r"global_batch=2 leaves some of 3 ranks without a sample"),
        ({"global_batch": 30, "drop_last": True}, r"no step of 30 can be made of them"),
    ],
)
def test_impossible_arguments_are_named(options, named):
    with pytest.raises(DataError, match=named):
        samplers(3, **options)


def test_a_rank_that_is_none_is_named():
    with pytest.raises(DataError, match="Invalid rank 3"):
        GlobalBatchSampler(range(9), 9, num_replicas=3, rank=3)
