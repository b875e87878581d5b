"""Reduce-scatter and all-gather by direct exchange: equal to the plain ones, whatever the sizes, and never mixed up."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time

import pytest
import torch

from rankstep.collectives import C10dCommunicator, SendRecvCommunicator, direct
from rankstep.collectives.failures import naming_failure
from rankstep.errors import CommunicationError, RankSkewError
from rankstep.testing import assert_bitwise_equal, assert_close_to

SIZES = {
    "equal": (5, 5, 5, 5),
    "unequal": (3, 0, 700, 41),
    "many chunks": (1000, 64, 65, 3000),
    "only one": (0, 0, 90, 0),
    "nothing": (0, 0, 0, 0),
}
CHUNK_BYTES = 256
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.uint8)


def flat(rank, numel, dtype=torch.float32):
    """What a rank puts in; every rank can compute it."""
    generator = torch.Generator().manual_seed(100 + rank)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 60, (numel,), generator=generator).to(dtype)


def parts_of(tensor, sizes):
    return list(tensor.split(list(sizes)))


def in_place(me, monkey, sizes, dtype):
    """Both collectives on slices of one flat buffer, and the plain ones' answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "CHUNK_BYTES", monkey)
        sizes = sizes[: me.world_size]
        comm, plain = C10dCommunicator(), SendRecvCommunicator()
        mine = flat(me.rank, sum(sizes), dtype)
        parts = parts_of(mine, sizes)
        wanted = torch.empty_like(parts[me.rank])
        plain.reduce_scatter(wanted, [part.clone() for part in parts]).wait()
        before = [part.clone() for part in parts]
        comm.direct().reduce_scatter(parts).wait()
        others = [parts[p] for p in range(me.world_size) if p != me.rank]
        kept = [before[p] for p in range(me.world_size) if p != me.rank]
        assert_bitwise_equal(others, kept)
        summed = parts[me.rank].clone()
        comm.direct().all_gather(parts).wait()
        return summed, wanted, mine


def every_size(me):
    """All sizes in one call, since starting four ranks takes longer than all of them."""
    return [in_place(me, CHUNK_BYTES, sizes, torch.float32) for sizes in SIZES.values()]


def check_every_size(ranks, world):
    for results in zip(*ranks(world).run(every_size), strict=True):
        whole = torch.cat([summed for summed, _, _ in results])
        for summed, wanted, gathered in results:
            assert_bitwise_equal(summed, wanted)
            assert_bitwise_equal(gathered, whole)


@pytest.mark.parametrize("world", [2, 3])
def test_slices_of_one_buffer_in_place(ranks, world):
    check_every_size(ranks, world)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS], ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_all_dtypes(ranks, world, dtype):
    results = ranks(world).run(in_place, CHUNK_BYTES, SIZES["many chunks"], dtype)
    for rank, (summed, wanted, gathered) in enumerate(results):
        if dtype in (torch.bfloat16, torch.float16):
            # The plain one rounds after every addition, this one once, after the last.
            sizes = SIZES["many chunks"][:world]
            terms = [
                parts_of(flat(r, sum(sizes), dtype), sizes)[rank].float() for r in range(world)
            ]
            wanted = sum(terms[1:], terms[0]).to(dtype)  # noqa: PLW2901
        assert_bitwise_equal(summed, wanted)
        assert_bitwise_equal(gathered, torch.cat([each[0] for each in results]))


def half_sum(me):
    """Of 1 + 3/1024 + 3/1024 bfloat16 loses each small term, but not both together."""
    parts = [
        torch.full((1,), 1.0 if me.rank == 0 else 3 / 1024, dtype=torch.bfloat16)
    ] * me.world_size
    found = torch.empty(1, dtype=torch.bfloat16)
    C10dCommunicator().reduce_scatter(found, parts).wait()
    plain = torch.empty(1, dtype=torch.bfloat16)
    SendRecvCommunicator().reduce_scatter(plain, parts).wait()
    return found.item(), plain.item()


def test_half_types_are_summed_in_float32(ranks):
    # Twin: rounded after each addition, the small terms are lost.
    for found, plain in ranks(3).run(half_sum):
        assert found == torch.tensor(1 + 6 / 1024).bfloat16().item()
        assert plain == 1.0 < found


def rank_order(me):
    """1e8 + 1 - 1e8 is 0 in fp32, in another order 1."""
    parts = [torch.tensor([(1e8, 1.0, -1e8)[me.rank], (1.0, -1e8, 1e8)[me.rank]]) for _ in range(3)]
    output = torch.empty(2)
    C10dCommunicator().reduce_scatter(output, parts).wait()
    return output.tolist()


def test_sums_are_taken_in_rank_order(ranks):
    assert ranks(3).run(rank_order) == [[0.0, 0.0]] * 3


def through_the_protocol(me, how):
    """Unequal parts, with and without aliasing."""
    comm = C10dCommunicator()
    sizes = (4, 0, 9)[: me.world_size]
    inputs = parts_of(flat(me.rank, sum(sizes)), sizes)
    kept = [part.clone() for part in inputs]
    output = inputs[me.rank] if how == "aliased" else torch.full((sizes[me.rank],), 7.0)
    comm.reduce_scatter(output, inputs).wait()
    assert (how == "aliased") or all(map(torch.equal, inputs, kept))
    outputs = [torch.full((size,), 8.0) for size in sizes]
    mine = outputs[me.rank].fill_(me.rank) if how == "aliased" else torch.full_like(output, me.rank)
    comm.all_gather(outputs, mine).wait()
    return output, outputs


@pytest.mark.parametrize("how", ["aliased", "apart"])
def test_the_protocol_takes_unequal_and_aliased_parts(ranks, how):
    for rank, (output, outputs) in enumerate(ranks(3).run(through_the_protocol, how)):
        terms = [parts_of(flat(r, 13), (4, 0, 9))[rank] for r in range(3)]
        assert_bitwise_equal(output, terms[0] + terms[1] + terms[2])
        assert_bitwise_equal(outputs, [torch.full((s,), float(r)) for r, s in enumerate((4, 0, 9))])


def under_way_at_once(me):
    """Reduce-scatters, all-gathers and gloo's own all-reduces, waited for in another order on each rank."""
    comm = C10dCommunicator()
    pending, results = [], []
    for number in range(4):
        sizes = [number * 30 + 1 + part for part in range(me.world_size)]
        parts = parts_of(flat(me.rank + 10 * number, sum(sizes)), sizes)
        output = torch.empty(sizes[me.rank])
        pending.append(comm.direct().reduce_scatter(parts, output))
        summed = flat(me.rank + 10 * number, 50)
        pending.append(comm.all_reduce(summed))
        gathered = [torch.empty(size) for size in sizes]
        gathered[me.rank].fill_(me.rank + 10 * number)
        pending.append(comm.direct().all_gather(gathered))
        results.append((output, summed, gathered))
    order = range(len(pending)) if me.rank % 2 else reversed(range(len(pending)))
    for place in order:
        pending[place].wait()
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_collectives_under_way_at_once_do_not_mix(ranks, world):
    for rank, results in enumerate(ranks(world).run(under_way_at_once)):
        for number, (output, summed, gathered) in enumerate(results):
            sizes = [number * 30 + 1 + part for part in range(world)]
            whole = [flat(r + 10 * number, sum(sizes)) for r in range(world)]
            assert_bitwise_equal(output, sum_of([parts_of(each, sizes)[rank] for each in whole]))
            assert_close_to(
                summed, sum_of([flat(r + 10 * number, 50) for r in range(world)]), rel=1e-6
            )
            values = [torch.full((s,), float(r + 10 * number)) for r, s in enumerate(sizes)]
            assert_bitwise_equal(gathered, values)


def sum_of(terms):
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def waits_twice(me):
    parts = [torch.ones(3) for _ in range(me.world_size)]
    pending = C10dCommunicator().direct().reduce_scatter(parts)
    pending.wait()
    parts[me.rank].add_(1.0)
    pending.wait()
    return parts[me.rank]


def test_waiting_twice_adds_once(ranks):
    for tensor in ranks(2).run(waits_twice):
        assert_bitwise_equal(tensor, torch.full((3,), 3.0))


def memory_of_two_steps(me):
    """The addresses of the scratch memory that two collectives one after the other use."""
    comm = C10dCommunicator()
    used = []
    lane = comm.direct().lane
    borrow = lane.borrow
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane, "borrow", lambda *what: used.append(borrow(*what)) or used[-1])
        for _ in range(3):
            comm.direct().reduce_scatter([torch.ones(7) for _ in range(me.world_size)]).wait()
    return len({tensor.data_ptr() for tensor in used}), len(used)


def test_scratch_memory_is_used_again(ranks):
    assert ranks(3).run(memory_of_two_steps) == [(2, 6)] * 3


def dies(me, collective):
    """Rank 1 is killed while the others wait for its part."""
    comm = C10dCommunicator()
    comm.direct()
    parts = [torch.ones(200_000) for _ in range(me.world_size)]
    comm.direct().all_gather(parts).wait()
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with naming_failure(comm, "test", "the exchange of the test"):
        getattr(comm.direct(), collective)(parts).wait()


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather"])
def test_a_dead_peer_is_named_on_all_others(ranks, collective):
    first, dead, third = ranks(3).outcomes(dies, collective)
    for rank, outcome in ((0, first), (2, third)):
        assert outcome.is_a(CommunicationError), outcome
        assert f"rank {rank}: the exchange of the test failed" in outcome.error
        assert "rank 1 did not come" in outcome.error
    assert not dead.is_a(CommunicationError)


@contextlib.contextmanager
def alarm_soon():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rankstep.collectives.lookout.ALARM_S", 0.5)
        patch.setattr("rankstep.collectives.lookout.CONFIRM_S", 0.2)
        patch.setattr("rankstep.collectives.patrol.LOOK_S", 0.1)
        yield


def waits_elsewhere(me):
    """Each rank in another collective and, for all it says, in another place of the program."""
    comm = C10dCommunicator()
    mine, parts = comm.direct(), [torch.ones(5), torch.ones(5)]
    with alarm_soon():
        comm.at(*(("a", "the first place"), ("b", "the second place"))[me.rank])
        (mine.all_gather if me.rank else mine.reduce_scatter)(parts).wait()


def test_ranks_that_wait_in_different_places_are_told(ranks):
    for rank, outcome in enumerate(ranks(2).outcomes(waits_elsewhere)):
        assert outcome.is_a(RankSkewError), outcome
        assert f"rank {rank}: " in outcome.error
        assert "rank 0 in the first place; rank 1 in the second place" in outcome.error


def disagrees(me, collective):
    """The same place, but a part of another size; gloo itself would end the process."""
    comm = C10dCommunicator()
    with alarm_soon():
        comm.at("a", "the same place")
        getattr(comm.direct(), collective)([torch.ones(5), torch.ones(5 + me.rank)]).wait()


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather"])
def test_ranks_that_disagree_on_sizes_are_told(ranks, collective):
    for rank, outcome in enumerate(ranks(2).outcomes(disagrees, collective)):
        assert outcome.is_a(RankSkewError), outcome
        assert f"rank {rank}: " in outcome.error
        assert "the ranks exchange different things: " in outcome.error
        for told in ("of 5, 5 elements of float32", "of 5, 6 elements of float32"):
            assert told in outcome.error


def slow_but_in_step(me):
    """The same alarm, and a rank that only takes its time."""
    comm = C10dCommunicator()
    mine = comm.direct()
    with alarm_soon():
        comm.at("a", "the same place")
        if me.rank == 1:
            time.sleep(1.5)
        parts = [torch.full((5,), float(me.rank)) for _ in range(2)]
        mine.all_gather(parts).wait()
        return parts


def test_a_slow_rank_is_waited_for(ranks):
    for parts in ranks(2).run(slow_but_in_step):
        assert_bitwise_equal(parts, [torch.zeros(5), torch.ones(5)])


def test_slices_of_one_buffer_on_four_ranks(ranks):
    # Last in this file: a third pool takes the place of another.
    check_every_size(ranks, 4)


def dropped(me):
    """Nobody waits, and nobody holds what was started."""
    before = set(direct._under_way)
    comm = C10dCommunicator()
    parts = [torch.full((3,), float(me.rank + part)) for part in range(me.world_size)]
    comm.reduce_scatter(parts[me.rank], parts)
    gc.collect()
    kept = direct._under_way - before
    for exchange in kept:
        exchange.wait()
    return len(kept), direct._under_way - before == set(), parts[me.rank].tolist()


def test_memory_of_messages_under_way_outlives_whoever_started_them(ranks):
    assert ranks(2).run(dropped) == [(1, True, [1.0] * 3), (1, True, [3.0] * 3)]
