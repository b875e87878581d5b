"""All communicators do what the protocol says, and the plain one is a fair oracle for the fast ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rankstep.collectives import C10dCommunicator, HostCommunicator, SendRecvCommunicator
from rankstep.testing import assert_bitwise_equal, assert_close_to, assert_same_on_all

KINDS = (C10dCommunicator, HostCommunicator, SendRecvCommunicator)
CPU = torch.device("cpu")


def value(rank, numel=5, dtype=torch.float32):
    """What a rank puts in; every rank can compute it."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def every_collective(me, kind):
    comm = kind()
    results = {"facts": (comm.rank, comm.world_size, comm.averages, comm.host_waits)}

    buffer = comm.allocate(7, torch.bfloat16, CPU)
    results["allocated"] = (buffer.clone(), buffer.storage_offset(), buffer.is_contiguous())

    tensor = value(me.rank)
    comm.all_reduce(tensor).wait()
    results["all_reduce"] = tensor

    gathered = [torch.empty(5) for _ in range(me.world_size)]
    mine = value(me.rank)
    comm.all_gather(gathered, mine).wait()
    results["all_gather"] = gathered
    assert_bitwise_equal(mine, value(me.rank))

    results["broadcast"] = []
    for src in range(me.world_size):
        tensor = value(me.rank)
        comm.broadcast(tensor, src).wait()
        results["broadcast"].append(tensor)

    # Part p of rank r, so that a wrong part and a wrong rank both show.
    parts = [value(10 * me.rank + part, 3) for part in range(me.world_size)]
    kept = [part.clone() for part in parts]
    output = torch.full((3,), 7.0)
    comm.reduce_scatter(output, parts).wait()
    results["reduce_scatter"] = output
    assert_bitwise_equal(parts, kept)
    return results


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3])
def test_every_collective_does_what_it_says(ranks, world, kind):
    results = ranks(world).run(every_collective, kind)
    values = [value(rank) for rank in range(world)]
    for rank, result in enumerate(results):
        assert result["facts"] == (rank, world, False, True)
        assert_bitwise_equal(result["allocated"], (torch.zeros(7, dtype=torch.bfloat16), 0, True))
        assert_close_to(result["all_reduce"], sum(values), rel=1e-6)
        assert_bitwise_equal(result["all_gather"], values)
        assert_bitwise_equal(result["broadcast"], values)
        part = sum(value(10 * other + rank, 3) for other in range(world))
        assert_close_to(result["reduce_scatter"], part, rel=1e-6)
    assert_same_on_all([result["all_reduce"] for result in results])


def sums(me, dtype):
    found = []
    for kind in KINDS:
        tensor = value(me.rank, 33, dtype)
        kind().all_reduce(tensor).wait()
        found.append(tensor)
    return found


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_two_ranks_sum_to_the_same_bits_both_ways(ranks, dtype):
    # a + b is b + a, so with two ranks any right sum has these bits.
    first, second = ranks(2).run(sums, dtype)
    expected = value(0, 33, dtype) + value(1, 33, dtype)
    for found in (*first, *second):
        assert_bitwise_equal(found, expected)


def test_the_plain_one_adds_in_rank_order_on_every_rank(ranks):
    # The order matters: 1e8 + 1 - 1e8 is 0 in fp32, 1e8 - 1e8 + 1 is 1.
    results = ranks(3).run(ordered_sum)
    assert results == [[0.0, 1.0]] * 3


def ordered_sum(me):
    tensor = torch.tensor([[1e8, 1e8], [1.0, -1e8], [-1e8, 1.0]])[me.rank]
    SendRecvCommunicator().all_reduce(tensor).wait()
    return tensor.tolist()


def several_in_flight(me, kind):
    """Start six sums before the first is waited for, then wait in another order on each rank."""
    comm = kind()
    tensors = [value(me.rank + 10 * i, 1 + 3 * i) for i in range(6)]
    pending = [comm.all_reduce(tensor) for tensor in tensors]
    order = reversed(range(6)) if me.rank % 2 else range(6)
    for i in order:
        pending[i].wait()
    return tensors


@pytest.mark.parametrize("kind", KINDS)
def test_collectives_in_flight_do_not_mix(ranks, kind):
    first, second = ranks(2).run(several_in_flight, kind)
    expected = [value(10 * i, 1 + 3 * i) + value(1 + 10 * i, 1 + 3 * i) for i in range(6)]
    assert_bitwise_equal(first, expected)
    assert_bitwise_equal(second, expected)


def waits_twice(me):
    tensor = torch.ones(3)
    pending = SendRecvCommunicator().all_reduce(tensor)
    pending.wait()
    tensor.add_(1.0)
    pending.wait()
    return tensor


def test_waiting_twice_adds_once(ranks):
    for tensor in ranks(2).run(waits_twice):
        assert_bitwise_equal(tensor, torch.full((3,), 3.0))


def within_a_group(me, kind):
    """Ranks 1 and 2 of three form a group in which they are 0 and 1."""
    group = dist.new_group([1, 2])
    try:
        if me.rank == 0:
            return None
        comm = kind(group)
        summed = torch.tensor([float(me.rank)])
        comm.all_reduce(summed).wait()
        told = torch.tensor([float(me.rank)])
        comm.broadcast(told, 1).wait()
        return comm.rank, comm.world_size, summed.item(), told.item()
    finally:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_count_inside_the_group(ranks, kind):
    outside, first, second = ranks(3).run(within_a_group, kind)
    assert outside is None
    # Source 1 of the group is global rank 2.
    assert first == (0, 2, 3.0, 2.0)
    assert second == (1, 2, 3.0, 2.0)


def one_rank(me, kind):
    comm = kind()
    tensor = torch.tensor([2.0])
    comm.all_reduce(tensor).wait()
    comm.broadcast(tensor, 0).wait()
    parts = [torch.empty(1)]
    comm.all_gather(parts, tensor).wait()
    return tensor.item(), parts[0].item()


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_alone_keeps_its_own(ranks, kind):
    assert ranks(1).run(one_rank, kind) == [(2.0, 2.0)]


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_process_group_the_error_is_torchs(kind):
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        kind()
