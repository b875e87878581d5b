"""Ranks of one host sum in memory that all of them see: the bits, the layouts, and the ways out."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from terms import value
from torch import nn

from rankstep import DistributedDataParallel
from rankstep.collectives import HostCommunicator, communicator_for, neighbours, shm
from rankstep.collectives.hub import MAX_OPEN
from rankstep.collectives.posts import DTYPES
from rankstep.collectives.slices import CHUNK_BYTES, slices
from rankstep.errors import SharedMemoryWarning
from rankstep.testing import assert_bitwise_equal, assert_close_to, assert_same_on_all

CPU = torch.device("cpu")
LONG = 3 * CHUNK_BYTES // 4 + 11


@contextlib.contextmanager
def fresh(**variables):
    """A communicator over a group of its own, which meets anew under these environment variables."""
    group = dist.new_group()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        try:
            yield HostCommunicator(group)
        finally:
            dist.destroy_process_group(group)


def in_rank_order(world, numel, dtype):
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = value(0, numel, dtype).to(wide)
    for rank in range(1, world):
        total = total + value(rank, numel, dtype).to(wide)
    return total.to(dtype)


def sums(me):
    found = {}
    with fresh() as comm:
        for dtype in DTYPES:
            for numel in (1, 16, 17, 1000, LONG):
                mine = comm.allocate(numel, dtype, CPU)
                mine.copy_(value(me.rank, numel, dtype))
                # Memory of its own goes by way of a copy, in the shape that it has.
                other = value(me.rank, numel, dtype).view(1, numel)
                comm.all_reduce(mine).wait()
                comm.all_reduce(other).wait()
                assert_bitwise_equal(other.view(-1), mine)
                found[dtype, numel] = mine.clone()
        return comm.way, found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sums_are_taken_in_rank_order_in_every_dtype(ranks, world):
    for way, found in ranks(world).run(sums):
        assert way == "shared memory"
        for (dtype, numel), total in found.items():
            assert_bitwise_equal(total, in_rank_order(world, numel, dtype))
    # The twin: in another order these sums have other bits.
    backwards = sum(value(rank, LONG, torch.float32) for rank in reversed(range(3)))
    assert not torch.equal(backwards, in_rank_order(3, LONG, torch.float32))


def parts_of(me):
    with fresh() as comm:
        sizes = (5, 0, 40, 3)[: me.world_size]
        flat = comm.allocate(sum(sizes), torch.float32, CPU)
        parts = slices(flat, sizes)
        flat.copy_(value(me.rank, len(flat), torch.float32))
        started = comm._end.hub._next
        comm.reduce_scatter(parts[me.rank], parts).wait()
        reduced = parts[me.rank].clone()
        comm.all_gather(parts, parts[me.rank]).wait()
        assert comm._end.hub._next == started + 2
        return reduced, flat.clone()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_parts_of_any_size_are_scattered_and_gathered_in_place(ranks, world):
    sizes = (5, 0, 40, 3)[:world]
    total = in_rank_order(world, sum(sizes), torch.float32)
    for rank, (reduced, gathered) in enumerate(ranks(world).run(parts_of)):
        assert_bitwise_equal(reduced, slices(total, sizes)[rank])
        assert_bitwise_equal(gathered, total)


def shares(me):
    with fresh() as comm:
        memory = comm.shared(me.world_size, torch.float64)
        memory[me.rank] = me.rank + 1.0
        comm.barrier().wait()
        seen = memory.tolist()
        comm.barrier().wait()
        memory[me.rank] = 0.0
        return seen


def shares_and_drops(me):
    """Rank 0 drops it at once and goes on, while rank 1 comes late to what was said."""
    with fresh() as comm:
        for number in range(20):
            memory = comm.shared(100 + number, torch.uint8)
            assert memory.numel() == 100 + number
            del memory
        return True


def test_shared_memory_may_be_dropped_at_once(ranks):
    assert ranks(2).run(shares_and_drops) == [True] * 2


def test_shared_memory_is_one_for_all(ranks):
    assert ranks(3).run(shares) == [[1.0, 2.0, 3.0]] * 3


def broadcasts(me):
    """In memory once the ranks have met, by sockets before."""
    with fresh() as comm:
        found = []
        for src in (0, 1, 2, 1):
            tensor = value(me.rank, LONG, torch.float32).view(1, -1)
            before = comm._end.hub._next if src else None
            comm.broadcast(tensor, src).wait()
            assert not src or comm._end.hub._next == before + 1
            assert_bitwise_equal(tensor.view(-1), value(src, LONG, torch.float32))
            found.append(tensor)
        return found


def test_broadcasts_hand_out_one_ranks_tensor(ranks):
    assert_same_on_all(ranks(3).run(broadcasts))


def many_under_way(me):
    with fresh() as comm:
        tensors = [comm.allocate(5, torch.float32, CPU) for _ in range(MAX_OPEN + 40)]
        for number, tensor in enumerate(tensors):
            tensor.fill_(number + me.rank)
        pending = [comm.all_reduce(tensor) for tensor in tensors]
        for each in reversed(pending) if me.rank else pending:
            each.wait()
        return [tensor[4].item() for tensor in tensors]


def test_many_may_be_under_way(ranks):
    expected = [2.0 * number + 1 for number in range(MAX_OPEN + 40)]
    assert ranks(2).run(many_under_way) == [expected] * 2


def starts_and_sleeps(me, flag):
    """Rank 1 starts a sum and then does not come back to it while rank 0 waits."""
    with fresh() as comm:
        tensor = comm.allocate(1000, torch.float32, CPU).fill_(1.0)
        pending = comm.all_reduce(tensor)
        if me.rank == 0:
            pending.wait()
            Path(flag).touch()
        while not Path(flag).exists():
            time.sleep(0.01)
        return tensor[0].item()


def test_a_rank_that_does_not_come_back_keeps_nobody_waiting(ranks, tmp_path):
    assert ranks(2).run(starts_and_sleeps, str(tmp_path / "done")) == [2.0] * 2


def futures(me):
    with fresh() as comm:
        pending = comm.all_reduce(comm.allocate(5, torch.float32, CPU))
        seen = []
        pending.get_future().add_done_callback(lambda _: seen.append(me.rank))
        pending.wait()
        late = []
        pending.get_future().add_done_callback(lambda _: late.append(me.rank))
        return seen, late


def test_futures_tell_when_it_is_there(ranks):
    assert ranks(2).run(futures) == [([0], [0]), ([1], [1])]


# ---------------------------------------------------------------- several hosts


def hierarchical(me, hosts, piece_bytes=None):
    with fresh(RANKSTEP_HOST=hosts[me.rank]) as comm, pytest.MonkeyPatch.context() as patch:
        if piece_bytes is not None:
            patch.setattr(shm, "PIECE_BYTES", piece_bytes)
        found = {}
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for numel in (1, 33, LONG):
                tensor = comm.allocate(numel, dtype, CPU)
                tensor.copy_(value(me.rank, numel, dtype))
                pending, ended = comm.all_reduce(tensor), []
                pending.get_future().add_done_callback(lambda _, ended=ended: ended.append(1))
                pending.wait()
                assert len(ended) == 1
                found[dtype, numel] = tensor.clone()
        # There is no memory that both hosts see; parts travel the group's own way.
        assert comm.shared(4, torch.float32) is None
        parts = [torch.full((3,), float(me.rank + part)) for part in range(me.world_size)]
        comm.reduce_scatter(parts[me.rank], parts).wait()
        comm.barrier().wait()
        return comm.way, found, parts[me.rank].clone()


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aab", "abbb"])
def test_hosts_sum_inside_and_then_across(ranks, hosts):
    world = len(hosts)
    results = ranks(world).run(hierarchical, hosts)
    for rank, (way, found, part) in enumerate(results):
        assert way == "shared memory inside 2 hosts, sockets between them"
        for (dtype, numel), total in found.items():
            exact = sum(value(r, numel, dtype).double() for r in range(world))
            # Between hosts bfloat16 is summed as gloo does it, in bfloat16.
            assert_close_to(total.double(), exact, rel=1e-2 if dtype is torch.bfloat16 else 1e-6)
        assert part.tolist() == [float(sum(range(world)) + world * rank)] * 3
    assert_same_on_all([list(found.values()) for _, found, _ in results])


def test_a_long_tensor_goes_between_hosts_in_pieces(ranks):
    whole = ranks(4).run(hierarchical, "aabb")
    pieces = ranks(4).run(hierarchical, "aabb", 16384)
    assert_same_on_all([list(found.values()) for _, found, _ in whole + pieces])


def one_each(me):
    with fresh(RANKSTEP_HOST=str(me.rank)) as comm:
        tensor = torch.ones(3)
        comm.all_reduce(tensor).wait()
        return comm.way, tensor.tolist()


def test_hosts_of_one_rank_each_use_sockets_and_say_nothing(ranks):
    expected = ("sockets (no two ranks share a host)", [3.0] * 3)
    assert ranks(3).run(one_each) == [expected] * 3


# ---------------------------------------------------------------- the ways out


def switched_off(me):
    variables = {"RANKSTEP_SHARED_MEMORY": "0"} if me.rank == 1 else {}
    with fresh(**variables) as comm:
        tensor = comm.allocate(3, torch.float32, CPU).fill_(1.0)
        comm.all_reduce(tensor).wait()
        return comm.way, tensor.tolist()


def test_one_rank_turns_it_off_for_all(ranks):
    expected = ("sockets (rank 1: RANKSTEP_SHARED_MEMORY=0)", [2.0] * 3)
    assert ranks(2).run(switched_off) == [expected] * 2


def unreachable(me):
    """Rank 0's name leads nowhere, as from another machine with the same label."""
    listen = neighbours._listen
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        if me.rank == 0:
            patch.setattr(neighbours, "_listen", lambda size: (listen(size)[0], "nowhere"))
            patch.setattr(neighbours, "CONNECT_S", 0.2)
        with fresh(RANKSTEP_HOST="same") as comm:
            tensor = torch.ones(3)
            comm.all_reduce(tensor).wait()
            again = HostCommunicator(comm.group).way
            told = [str(w.message) for w in caught if w.category is SharedMemoryWarning]
            return comm.way == again, comm.way, tensor.tolist(), told


def test_a_label_alone_decides_nothing(ranks):
    first, second = ranks(2).run(unreachable)
    for same, way, tensor, _ in (first, second):
        assert same
        assert tensor == [2.0] * 3
        assert "rank 1: rank 0 has the same host label but cannot be reached" in way
    # Once, on one rank.
    assert len(first[3]) == 1
    assert "through sockets instead" in first[3][0]
    assert second[3] == []


def strangers(me):
    """Somebody else connects first, with a wrong word or none."""
    listen = neighbours._listen

    def and_disturb(size):
        listener, address = listen(size)
        for word in (b"{}", b"nonsense", b'{"rank": 1, "token": "guessed"}'):
            stranger = neighbours.socket.socket(
                neighbours.socket.AF_UNIX, neighbours.socket.SOCK_SEQPACKET
            )
            stranger.connect(f"\0{address}")
            stranger.send(word)
            stranger.close()
        return listener, address

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "_listen", and_disturb)
        with fresh() as comm:
            tensor = torch.ones(3)
            comm.all_reduce(tensor).wait()
            return comm.way, tensor.tolist()


def test_strangers_are_not_let_in(ranks):
    assert ranks(2).run(strangers) == [("shared memory", [2.0] * 3)] * 2


def kinds(_):
    group = dist.distributed_c10d._get_default_group()
    return [
        type(communicator_for(group, device)).__name__
        for device in (CPU, torch.device("meta"), torch.device("cuda"))
    ]


def test_only_cpu_tensors_of_several_ranks_use_it(ranks):
    assert ranks(2).run(kinds) == [["HostCommunicator", "C10dCommunicator", "C10dCommunicator"]] * 2
    assert ranks(1).run(kinds)[0][0] == "C10dCommunicator"


# ---------------------------------------------------------------- memory and processes


def withdraws(me):
    with fresh() as comm:
        hub = comm._end.hub
        seen = []
        for _ in range(3):
            tensor = comm.allocate(LONG, torch.float32, CPU)
            comm.all_reduce(tensor).wait()
            del tensor
            gc.collect()
            # A peer says that it has withdrawn a segment before its next word.
            comm.barrier().wait()
            seen.append([len(peer.segments) for peer in hub.peers])
            # Nobody makes a new one before all have looked.
            comm.barrier().wait()
        return seen, len(hub._works)


def test_memory_that_nobody_uses_is_given_back(ranks):
    assert ranks(2).run(withdraws) == [([[0]] * 3, 0)] * 2


def forks(me):
    with fresh() as comm:
        tensor = comm.allocate(4, torch.float32, CPU).fill_(1.0)
        comm.all_reduce(tensor).wait()
        child = os.fork()
        if child == 0:
            try:
                comm.all_reduce(tensor).wait()
            except RuntimeError as error:
                os._exit(7 if "has ended" in str(error) else 8)
            os._exit(9)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        comm.all_reduce(tensor).wait()
        return code, tensor.tolist()


def test_a_forked_child_has_no_part_in_it(ranks):
    assert ranks(2).run(forks) == [(7, [4.0] * 4)] * 2


def trains(me, shared):
    """The wrapper's gradients live there, and a hook that resizes the buffers gets memory of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 50), nn.Tanh(), nn.Linear(50, 3))
    with fresh(RANKSTEP_SHARED_MEMORY=shared) as comm:
        run = DistributedDataParallel(model, process_group=comm.group, bucket_cap_mb=0.0005)
        grads = []
        for step in range(3):
            run.zero_grad()
            torch.manual_seed(10 * step + me.rank)
            run(torch.randn(4, 7)).square().sum().backward()
            grads.append([param.grad.clone() for param in model.parameters()])
        inside = [b.flat.untyped_storage().resizable() for b in run.reducer.buckets]
        run.register_comm_hook(None, grows)
        run.zero_grad()
        torch.manual_seed(me.rank)
        run(torch.randn(4, 7)).square().sum().backward()
        grads.append([param.grad.clone() for param in model.parameters()])
        return inside, grads


def grows(_, bucket):
    buffer = bucket.buffer()
    numel = buffer.numel()
    buffer.resize_(2 * numel)
    buffer.resize_(numel)
    work = dist.all_reduce(buffer.div_(2), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def test_training_gives_the_bits_of_sockets(ranks):
    with_memory, without = ranks(2).run(trains, "1"), ranks(2).run(trains, "0")
    for (inside, grads), (outside, expected) in zip(with_memory, without, strict=True):
        assert len(inside) > 1
        assert not any(inside)
        assert all(outside)
        assert_bitwise_equal(grads, expected)


def after_the_group(me):
    def hubs():
        return sum(thread.name == "rankstep hub" for thread in threading.enumerate())

    gc.collect()
    before = hubs()
    with fresh() as comm:
        comm.at("here", "a test")
        comm.all_reduce(comm.allocate(8, torch.float32, CPU)).wait()
        during = hubs()
        group = weakref.ref(comm.group)
    del comm
    gc.collect()
    until = time.monotonic() + 10
    while hubs() > before and time.monotonic() < until:
        time.sleep(0.01)
    return group() is None, during - before, hubs() - before


def test_nothing_is_kept_of_a_group_that_is_gone(ranks):
    # What is kept for a group must not hold the group, or both stay for good.
    assert ranks(2).run(after_the_group) == [(True, 1, 0)] * 2
