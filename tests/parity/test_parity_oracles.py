"""Two more oracles: one process that sees the whole batch, and an all-reduce made of send and receive alone."""

from __future__ import annotations

import copy

import pytest
import torch
from parity_models import (
    MODELS,
    OPTIMIZERS,
    batch,
    build,
    grads_of,
    loss_of,
    share,
    state_of,
)

from rankstep import DistributedDataParallel
from rankstep.collectives import SendRecvCommunicator
from rankstep.testing import assert_bitwise_equal, assert_close_to, assert_same_on_all

STEPS = 20
SMALL = 0.002

# Batch norm sees one rank's samples only, as it does in torch's wrapper.
WITHOUT_BATCH_NORM = [name for name in MODELS if name != "CNN"]


def train(model, name, world, rank, optimizer, dtype):
    """Twenty steps; the gradients of the first and of the last, the losses and the weights."""
    stepper = OPTIMIZERS[optimizer](model.parameters())
    losses, grads = [], []
    for step in range(STEPS):
        tensors = batch(name, world, step, dtype)
        if rank is not None:
            tensors = share(tensors, rank)
        stepper.zero_grad()
        loss = loss_of(model, *tensors)
        loss.backward()
        losses.append(loss.detach())
        if step in (0, STEPS - 1):
            grads.append(grads_of(model))
        stepper.step()
    return losses, grads, state_of(model)


def on_ranks(me, name, optimizer, dtype, cap):
    wrapped = DistributedDataParallel(build(name, dtype), bucket_cap_mb=cap)
    return train(wrapped, name, me.world_size, me.rank, optimizer, dtype)


def as_one(me, name, world, optimizer, dtype):
    """What one process does with the batches of all ranks."""
    return train(build(name, dtype), name, world, None, optimizer, dtype)


@pytest.mark.parametrize("name", WITHOUT_BATCH_NORM)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_train_as_one_process_on_the_whole_batch(ranks, world, name):
    for optimizer in OPTIMIZERS:
        dtype = torch.float64
        results = ranks(world).run(on_ranks, name, optimizer, dtype, SMALL)
        (one,) = ranks(1).run(as_one, name, world, optimizer, dtype)
        losses, (first, last), weights = one
        assert_same_on_all([result[2] for result in results])
        for _, (rank_first, rank_last), rank_weights in results:
            assert_close_to(rank_first, first, rel=1e-13)
            assert_close_to(rank_last, last, rel=1e-8)
            assert_close_to(rank_weights, weights, rel=1e-8)
        means = torch.stack([torch.stack(result[0]) for result in results]).mean(0)
        assert_close_to(means, torch.stack(losses), rel=1e-8)
        # It learned something, so that equal curves say something.
        assert losses[-1] != losses[0]


@pytest.mark.parametrize("world", [2, 4])
def test_single_precision_stays_close_to_one_process(ranks, world):
    for name in ["MLP 1", "GPT"]:
        results = ranks(world).run(on_ranks, name, "SGD", torch.float32, None)
        (one,) = ranks(1).run(as_one, name, world, "SGD", torch.float32)
        losses, (first, _), weights = one
        for _, (rank_first, _), rank_weights in results:
            assert_close_to(rank_first, first, rel=2e-6)
            assert_close_to(rank_weights, weights, rel=1e-4)
        means = torch.stack([torch.stack(result[0]) for result in results]).mean(0)
        # The bar for loss curves: 1e-4 at every step.
        assert float((means - torch.stack(losses)).abs().max()) < 1e-4


def alone(me, name):
    """The twin: each rank trains by itself on its share."""
    return train(build(name), name, me.world_size, me.rank, "SGD", torch.float32)[2]


def test_without_the_wrapper_ranks_leave_each_other(ranks):
    results = ranks(2).run(alone, "MLP 1")
    with pytest.raises(AssertionError, match="ranks 0 and 1 differ"):
        assert_same_on_all(results)
    ((_, _, weights),) = ranks(1).run(as_one, "MLP 1", 2, "SGD", torch.float32)
    with pytest.raises(AssertionError, match="off by"):
        assert_close_to(results[0], weights, rel=1e-3)


def two_ways(me, name, optimizer, rel):
    """The same training over torch's collectives and over send and receive."""
    model = build(name)
    runs = [DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=SMALL) for _ in range(2)]
    # Buckets are made at the end of the first backward, so until then the communicator may be changed.
    assert runs[1].reducer.plan is None
    runs[1].reducer.comm = SendRecvCommunicator(runs[1].process_group)
    steppers = [OPTIMIZERS[optimizer](run.parameters()) for run in runs]
    for step in range(STEPS):
        part = share(batch(name, me.world_size, step), me.rank)
        for run, stepper in zip(runs, steppers, strict=True):
            stepper.zero_grad()
            loss_of(run, *part).backward()
        if rel is None:
            assert_bitwise_equal(grads_of(runs[0]), grads_of(runs[1]))
        else:
            assert_close_to(grads_of(runs[0]), grads_of(runs[1]), rel=rel)
        for stepper in steppers:
            stepper.step()
        if rel is None:
            assert_bitwise_equal(state_of(runs[0]), state_of(runs[1]))
        else:
            runs[1].load_state_dict(runs[0].state_dict())
    facts = [run.reducer.last_step for run in runs]
    assert facts[0] == facts[1]
    names = {type(bucket._comm).__name__ for bucket in runs[1].reducer.buckets}
    assert names == {"SendRecvCommunicator"}
    return state_of(runs[1])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["MLP 2", "CNN", "GPT"])
def test_send_and_receive_give_the_same_bits_on_two_ranks(ranks, name, optimizer):
    assert_same_on_all(ranks(2).run(two_ways, name, optimizer, None))


@pytest.mark.parametrize("world", [3, 4])
def test_send_and_receive_agree_within_rounding_on_more_ranks(ranks, world):
    assert_same_on_all(ranks(world).run(two_ways, "MLP 1", "SGD", 1e-6))
