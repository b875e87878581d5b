"""The small parts of a checkpoint: kept bucket plans, random numbers of newcomers, when ranks ask each other, workers apart."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from torch import nn

from rankstep.buckets import Caps, Reducer
from rankstep.buckets.kept import adopt_plan, kept_plan
from rankstep.checkpoint import rng, stopping
from rankstep.checkpoint.own import merge, pack, unpack
from rankstep.checkpoint.stopping import Looks, workers_apart
from rankstep.errors import CheckpointError
from rankstep.testing import RecordingCommunicator


def reducer_of(net, cap_bytes=(64, 128)):
    named = dict(net.named_parameters())
    return Reducer(list(named), list(named.values()), RecordingCommunicator(), Caps(cap_bytes))


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))


def learned():
    """A reducer that has settled a step in which the parameters came in an unusual order."""
    model = net()
    reducer = reducer_of(model)
    reducer.begin()
    for index in (2, 3, 0, 1, 5, 4):
        reducer.params[index].grad = torch.ones_like(reducer.params[index])
        reducer.firings.fired[index] += 1
        reducer.again(index, reducer.params[index])
    reducer.settle()
    return reducer


def test_a_kept_plan_is_taken_over_before_the_first_step():
    old = learned()
    kept = kept_plan(old)
    assert [index for bucket in kept["buckets"] for index in bucket] == [2, 3, 0, 1, 5, 4]
    new = reducer_of(net())
    assert kept_plan(new) is None
    assert adopt_plan(new, kept) == ""
    assert new.plan.fingerprint() == old.plan.fingerprint()
    assert new.firings.expected == old.firings.expected
    # The twin: without it there is no plan yet, and the usual order would make another one.
    assert reducer_of(net()).plan is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"params": [["0.weight", 4, 4]]}, "it is that of other trainable parameters"),
        ({"buckets": [[0, 1, 2], [3, 4]]}, "it does not name each parameter once"),
        ({"buckets": [[0, 1, 2], [3, 4, 4, 5]]}, "it does not name each parameter once"),
        ({"cap_bytes": []}, "its caps are impossible"),
        ({"cap_bytes": [0]}, "its caps are impossible"),
        ({"firings": {"expected": [1], "first": [1], "highest": [1]}}, "that of other parameters"),
    ],
)
def test_a_plan_that_cannot_be_is_not_taken_over(change, named):
    reducer = reducer_of(net())
    assert named in adopt_plan(reducer, kept_plan(learned()) | change)
    assert reducer.plan is None


def test_a_plan_that_is_in_use_stays():
    kept = kept_plan(learned())
    assert adopt_plan(learned(), kept) == ""
    turned = kept | {"buckets": kept["buckets"][::-1]}
    assert adopt_plan(learned(), turned) == "a step was reduced with another one already"


def test_parameters_of_two_kinds_share_no_bucket():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    reducer = reducer_of(model)
    kept = {
        "params": [[spec.name, *spec.shape] for spec in reducer.specs],
        "buckets": [[0, 1, 2, 3]],
        "cap_bytes": [64],
        "firings": reducer.firings.learned(),
    }
    assert "cannot share a bucket" in adopt_plan(reducer, kept)


def draws():
    return random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002


def test_random_states_come_back():
    state = rng.capture(set())
    first = draws()
    assert draws() != first
    rng.restore(state, set())
    assert draws() == first


def test_newcomers_draw_numbers_of_their_own_and_the_same_each_time():
    state = rng.capture(set())
    found = {}
    for rank, step in ((1, 5), (2, 5), (1, 6), (1, 5)):
        rng.seed_newcomer(state, rank, step)
        found.setdefault((rank, step), set()).add(draws())
    assert [len(values) for values in found.values()] == [1, 1, 1]
    assert len(set.union(*found.values())) == 3


def test_each_rank_finds_its_own_state():
    packed = [pack({"rank": rank, "noise": torch.full((2,), float(rank))}) for rank in range(3)]
    trees, tensors = merge(packed)
    assert set(tensors) == {f"{rank}/this rank's own state.noise" for rank in range(3)}
    from safetensors.torch import save

    for rank in range(3):
        state = unpack(trees, save(tensors), rank)
        assert (state["rank"], state["noise"].tolist()) == (rank, [rank, rank])
    with pytest.raises(CheckpointError, match="which is in none of its files"):
        unpack(trees, save({}), 0)


def test_ranks_ask_in_steps_a_fraction_of_a_second_apart(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    looks = Looks()
    # A run that goes on at a high step has not taken its time for those.
    assert looks.due(1_000_000)
    assert looks.proposal(1_000_000) == 1
    looks.agreed(1_000_000, 1)
    assert not looks.due(1_000_000)
    now[0] += 0.0078125
    assert looks.proposal(1_000_001) == 32
    looks.agreed(1_000_001, 32)
    assert next(step for step in range(1_000_001, 1_000_040) if looks.due(step)) == 1_000_033
    now[0] += 3600
    assert looks.proposal(1_000_033) == 1
    assert looks.proposal(1_000_034) == 1000


def child(leave):
    """Fork, and return whether the child is in this process's group."""
    read, write = os.pipe()
    context = workers_apart() if leave else None
    if context:
        context.__enter__()
    pid = os.fork()
    if pid == 0:
        os.write(write, str(os.getpgrp()).encode())
        os._exit(0)
    if context:
        context.__exit__(None, None, None)
    os.waitpid(pid, 0)
    os.close(write)
    group = int(os.read(read, 20))
    os.close(read)
    return group == os.getpgrp()


# Forking with threads is what loaders do, too.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_workers_leave_the_process_group_and_others_do_not():
    assert child(leave=False)
    assert not child(leave=True)
    assert child(leave=False)
