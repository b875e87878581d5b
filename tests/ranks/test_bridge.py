"""Reduce-scatter and all-gather over several hosts: sums inside first, each part over a link once, and the ways out."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from terms import value

from rankstep import DistributedDataParallel, ShardedOptimizer
from rankstep.collectives import HostCommunicator, direct
from rankstep.collectives.bridge import Bridge
from rankstep.collectives.failures import naming_failure
from rankstep.collectives.slices import slices
from rankstep.errors import CommunicationError, RankSkewError
from rankstep.testing import (
    assert_bitwise_equal,
    assert_close_to,
    assert_same_on_all,
    first_difference,
)

CPU = torch.device("cpu")
HALF = torch.bfloat16
SIZES = ((5, 0, 40, 3), (7000, 301, 5, 9000), (0, 0, 7, 0))


@contextlib.contextmanager
def on_hosts(me, hosts):
    """A communicator over a group of its own, whose ranks are on these hosts: a letter for each."""
    group = dist.new_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANKSTEP_HOST", hosts[me.rank])
        patch.setattr(direct, "CHUNK_BYTES", 4096)
        try:
            yield HostCommunicator(group)
        finally:
            dist.destroy_process_group(group)


def in_order(hosts, numel, dtype):
    """Ranks of a host in their order, then hosts in theirs."""
    wide = torch.float32 if dtype is HALF else dtype
    by_host = []
    for host in dict.fromkeys(hosts):
        own = [value(r, numel, dtype).to(wide) for r, of in enumerate(hosts) if of == host]
        # What leaves a host is rounded.
        by_host.append(sum(own[1:], own[0]).to(dtype).to(wide))
    return sum(by_host[1:], by_host[0]).to(dtype)


def both(me, hosts):
    """Each collective twice, since the second run finds everything prepared; and how much leaves the host."""
    found = {}
    with on_hosts(me, hosts) as comm:
        for dtype in (torch.float32, torch.int64, HALF):
            for sizes in (each[: len(hosts)] for each in SIZES):
                flat = comm.allocate(sum(sizes), dtype, CPU)
                parts = slices(flat, sizes)
                for _ in range(2):
                    flat.copy_(value(me.rank, len(flat), dtype))
                    comm.reduce_scatter(parts[me.rank], parts).wait()
                    reduced = parts[me.rank].clone()
                    comm.all_gather(parts, parts[me.rank]).wait()
                    found[dtype, sizes] = reduced, flat.clone()
    return found


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aab", "abbb", "abca"])
def test_parts_are_summed_inside_hosts_and_then_between_them(ranks, hosts):
    results = ranks(len(hosts)).run(both, hosts)
    for rank, found in enumerate(results):
        for (dtype, sizes), (reduced, gathered) in found.items():
            total = in_order(hosts, sum(sizes), dtype)
            assert_bitwise_equal(gathered, total)
            assert_bitwise_equal(reduced, slices(total, sizes)[rank])
    # The twin: with the hosts in another order some sums have other bits.
    assert first_difference(
        in_order("abca", 9000, torch.float32), in_order("aabc", 9000, torch.float32)
    )


def counted(me, hosts, sizes):
    """How many elements this rank sends to other hosts, in each collective."""
    with on_hosts(me, hosts) as comm:
        flat = comm.allocate(sum(sizes), torch.float32, CPU)
        parts = slices(flat, sizes)
        comm.reduce_scatter(parts[me.rank], parts).wait()
        lane = comm._end.hub.bridge.lane
        if lane is None:
            comm.reduce_scatter(parts[me.rank], parts).wait()
            comm.all_gather(parts, parts[me.rank]).wait()
            return 0, 0
        sent = []
        send = lane.send
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lane, "send", lambda t, *to: sent.append(t.numel()) or send(t, *to))
            comm.reduce_scatter(parts[me.rank], parts).wait()
            reduced = sum(sent)
            comm.all_gather(parts, parts[me.rank]).wait()
        return reduced, sum(sent) - reduced


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        # Flat, rank 0 alone would send 300 + 4000 in the first and twice its 10 in the second.
        ("aabb", [(300, 10), (4000, 2000), (10, 300), (2000, 4000)]),
        ("aab", [(300, 2010), (0, 0), (2010, 300)]),
    ],
)
def test_each_part_crosses_a_link_once(ranks, hosts, expected):
    sizes = (10, 2000, 300, 4000)[: len(hosts)]
    assert ranks(len(hosts)).run(counted, hosts, sizes) == expected


def under_way_at_once(me):
    """Waited for in another order on each rank, with small sums between them."""
    with on_hosts(me, "aab") as comm:
        flats, pending, sums = [], [], []
        for number in range(6):
            flat = comm.allocate(3000 + number, torch.float32, CPU).fill_(me.rank + number)
            parts = slices(flat, (1000, 1000, 1000 + number))
            flats.append((flat, parts))
            pending.append(comm.reduce_scatter(parts[me.rank], parts))
            sums.append(torch.full((3,), float(me.rank + number)))
            pending.append(comm.all_reduce(sums[-1]))
        for each in reversed(pending) if me.rank == 1 else pending:
            each.wait()
        pending = [comm.all_gather(parts, parts[me.rank]) for _, parts in flats]
        for each in reversed(pending) if me.rank == 2 else pending:
            each.wait()
        return [flat.unique().tolist() for flat, _ in flats], [s.tolist() for s in sums]


def test_many_under_way_do_not_mix(ranks):
    totals = [3.0 + 3.0 * number for number in range(6)]
    expected = ([[total] for total in totals], [[total] * 3 for total in totals])
    assert ranks(3).run(under_way_at_once) == [expected] * 3


def starts_and_sleeps(me, flag):
    """Rank 1 starts both and does not come back to them while the others wait."""
    with on_hosts(me, "aab") as comm:
        flat = comm.allocate(30, torch.float32, CPU).fill_(1.0)
        parts = slices(flat, (10, 10, 10))
        works = [comm.reduce_scatter(parts[me.rank], parts)]
        if me.rank != 1:
            works.pop().wait()
        works.append(comm.all_gather(parts, parts[me.rank]))
        if me.rank != 1:
            works.pop().wait()
            Path(flag + str(me.rank)).touch()
        while not (Path(flag + "0").exists() and Path(flag + "2").exists()):
            time.sleep(0.01)
        return flat.unique().tolist()


def test_a_rank_that_does_not_come_back_keeps_nobody_waiting(ranks, tmp_path):
    assert ranks(3).run(starts_and_sleeps, str(tmp_path / "done")) == [[3.0]] * 3


# ---------------------------------------------------------------- the ways out


@contextlib.contextmanager
def alarm_soon():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rankstep.collectives.lookout.ALARM_S", 0.5)
        patch.setattr("rankstep.collectives.lookout.CONFIRM_S", 0.2)
        patch.setattr("rankstep.collectives.hub.LOOK_MS", 100)
        yield


def dies(me, collective, dead):
    """A rank is killed while the others wait for it, in the second of two runs."""
    with on_hosts(me, "aab") as comm:
        flat = comm.allocate(3000, torch.float32, CPU)
        parts = slices(flat, (1000, 1000, 1000))

        def run():
            if collective == "reduce_scatter":
                return comm.reduce_scatter(parts[me.rank], parts)
            return comm.all_gather(parts, parts[me.rank])

        run().wait()
        if me.rank == dead:
            os.kill(os.getpid(), signal.SIGKILL)
        with naming_failure(comm, "test", "the exchange of the test"):
            run().wait()


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather"])
@pytest.mark.parametrize("dead", [1, 2])
def test_a_dead_rank_is_named_on_all_others(ranks, collective, dead):
    for rank, outcome in enumerate(ranks(3).outcomes(dies, collective, dead, timeout_s=40)):
        if rank == dead:
            assert outcome.status == "died"
            continue
        assert outcome.is_a(CommunicationError), outcome
        assert f"rank {rank}: the exchange of the test failed" in outcome.error
        assert f"rank {dead}" in outcome.error.partition("failed")[2]


def disagrees(me):
    """The hosts differ in the size of a part."""
    with on_hosts(me, "aab") as comm, alarm_soon():
        sizes = (10, 10, 10 + (me.rank == 2))
        parts = slices(comm.allocate(sum(sizes), torch.float32, CPU), sizes)
        comm.at("a", "the same place")
        comm.reduce_scatter(parts[me.rank], parts).wait()


def test_hosts_that_disagree_on_sizes_are_told(ranks):
    told = [each.error for each in ranks(3).outcomes(disagrees, timeout_s=40)]
    for rank in (0, 2):
        assert f"rank {rank}: " in told[rank]
        assert "the ranks exchange different things: " in told[rank]
        for sizes in ("10, 10, 10 elements", "10, 10, 11 elements"):
            assert f"reduce-scatter of {sizes} of float32" in told[rank]
    # It waits for rank 0 alone.
    assert "rank 0" in told[1]


def waits_elsewhere(me):
    with on_hosts(me, "aab") as comm, alarm_soon():
        parts = slices(comm.allocate(30, torch.float32, CPU), (10, 10, 10))
        other_host = me.rank == 2
        comm.at(*(("b", "the second place") if other_host else ("a", "the first place")))
        if other_host:
            comm.all_gather(parts, parts[me.rank]).wait()
        else:
            comm.reduce_scatter(parts[me.rank], parts).wait()


def test_hosts_that_wait_in_different_places_are_told(ranks):
    for rank, outcome in enumerate(ranks(3).outcomes(waits_elsewhere, timeout_s=40)):
        assert outcome.is_a(RankSkewError), outcome
        assert f"rank {rank}: " in outcome.error
        assert "rank 2 in the second place" in outcome.error


# ---------------------------------------------------------------- the sharded step


def net():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 70), torch.nn.Tanh(), torch.nn.Linear(70, 9)
    ).double()


def trains(me, hosts):
    """Both optimizers side by side; also how many of the collectives crossed by the bridge."""
    prepared = []
    prepare = Bridge.prepare
    with on_hosts(me, hosts) as comm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Bridge, "prepare", lambda *args: prepared.append(args[1].name) or prepare(*args)
        )
        both_runs = []
        for kind in (None, ShardedOptimizer):
            run = DistributedDataParallel(net(), process_group=comm.group, bucket_cap_mb=0.001)
            options = {"lr": 0.01, "weight_decay": 0.1}
            stepper = (
                torch.optim.AdamW(run.parameters(), **options)
                if kind is None
                else kind(run, torch.optim.AdamW, **options)
            )
            both_runs.append((run, stepper))
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + me.rank)
            x = torch.randn(6, 12, dtype=torch.float64, generator=generator)
            for run, stepper in both_runs:
                stepper.zero_grad()
                run(x).square().mean().backward()
                if step == 2 and isinstance(stepper, ShardedOptimizer):
                    stepper.gather_gradients()
                stepper.step()
        (plain, one), (sharded, other) = both_runs
        weights = [param.detach().clone() for param in sharded.parameters()]
        assert_close_to(weights, [param.detach() for param in plain.parameters()], rel=1e-9)
        assert_close_to(
            [each["exp_avg"] for each in other.state_dict()["state"].values()],
            [each["exp_avg"] for each in one.state_dict()["state"].values()],
            rel=1e-6,
        )
        assert {"REDUCE_SCATTER", "ALL_GATHER"} == set(prepared)
        return other._shares.memory.what, weights


@pytest.mark.parametrize("hosts", ["aabb", "aab"])
def test_the_sharded_step_on_two_hosts(ranks, hosts):
    results = ranks(len(hosts)).run(trains, hosts)
    assert [what for what, _ in results] == ["gathered"] * len(hosts)
    assert_same_on_all([weights for _, weights in results])
