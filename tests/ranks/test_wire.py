"""Gradients that travel as halves: rounded as told, summed in float32, the same bits everywhere, and nothing else rounded."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import math
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from rankstep import DistributedDataParallel
from rankstep.collectives import C10dCommunicator, communicator_for, wire
from rankstep.collectives.wire import Wire
from rankstep.collectives.wired import all_reduce_with_tail
from rankstep.errors import CommunicationError, ModelError, ModelMismatchError, ModelTypeError
from rankstep.testing import assert_bitwise_equal, assert_close_to, assert_same_on_all

HALVES = (torch.bfloat16, torch.float16)
NUMELS = (0, 1, 2, 63, 1000)
BITS = {torch.bfloat16: 8, torch.float16: 11}
"""Significant bits: a number is rounded by at most 2**-bits of itself."""


def values(rank, numel=1000, dtype=torch.float32):
    generator = torch.Generator().manual_seed(500 + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).mul_(1e-3).to(dtype)


@contextlib.contextmanager
def hosts_apart(me, ranks_per_host=1):
    """A group whose ranks believe that they have hosts of their own, so that gradients have a way to go."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANKSTEP_HOST", f"host {me.rank // ranks_per_host}")
        group = dist.new_group(list(range(me.world_size)))
        try:
            yield group
        finally:
            gc.collect()
            dist.destroy_process_group(group)


def wire_of(dtype):
    direct = C10dCommunicator().direct()
    return Wire(direct.lane, direct.lookout, dtype)


# ---------------------------------------------------------------- the all-reduce


def summed(me, wire_dtype, tensors, piece_numel=64):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "PIECE_NUMEL", piece_numel)
        mine = tensors[me.rank]
        wire_of(wire_dtype).all_reduce(mine).wait()
        return mine


def expected(tensors, wire_dtype):
    """The same sum in one process: each part's owner has its own terms unrounded."""
    n = len(tensors)
    full = tensors[0].dtype
    parts = []
    for owner in range(n):
        total = None
        for rank in range(n):
            term = tensors[rank].tensor_split(n)[owner]
            term = term if rank == owner else rounded(term, wire_dtype)
            total = term if total is None else total + term
        parts.append(rounded(total, wire_dtype))
    return torch.cat(parts).to(full)


def rounded(tensor, wire_dtype):
    """To and from the wire in pieces of 64."""
    pieces = []
    for piece in tensor.split(64) if tensor.numel() else ():
        scaled = wire_dtype is torch.float16 or tensor.dtype is torch.float64
        scale = wire.scale_of(piece) if scaled else 1.0
        pieces.append((piece * scale).to(wire_dtype).to(tensor.dtype) / scale)
    return torch.cat(pieces) if pieces else tensor


def every_size(me):
    """All sizes and both dtypes in one call, since starting four ranks takes longer than all of them."""
    found = {}
    for numel, wire_dtype in itertools.product(NUMELS, HALVES):
        tensors = [values(rank, numel) for rank in range(me.world_size)]
        found[numel, wire_dtype] = summed(me, wire_dtype, tensors)
    return found


def check_every_size(ranks, world):
    results = ranks(world).run(every_size)
    for numel, wire_dtype in results[0]:
        tensors = [values(rank, numel) for rank in range(world)]
        for result in results:
            assert_bitwise_equal(result[numel, wire_dtype], expected(tensors, wire_dtype))
        exact = sum(tensor.double() for tensor in tensors)
        off = (results[0][numel, wire_dtype].double() - exact).abs()
        # Each of the n - 1 foreign terms is rounded once, and so is the sum.
        terms = sum(tensor.double().abs() for tensor in tensors) + exact.abs()
        assert bool((off <= 1.01 * 2.0 ** -BITS[wire_dtype] * terms).all())
        # Twin: it is rounded at all.
        assert numel < 1000 or bool((off > 0).any())


@pytest.mark.parametrize("world", [2, 3])
def test_the_sum_is_the_one_that_the_docs_describe(ranks, world):
    check_every_size(ranks, world)


@pytest.mark.parametrize("wire_dtype", HALVES, ids=str)
def test_float64_keeps_its_range_and_other_dtypes_their_bits(ranks, wire_dtype):
    tensors = [values(rank, 300, torch.float64) * 1e200 for rank in range(3)]
    results = ranks(3).run(summed, wire_dtype, tensors)
    assert_same_on_all(results)
    assert_bitwise_equal(results[0], expected(tensors, wire_dtype))
    assert bool(torch.isfinite(results[0]).all())


def packed(me):
    """Sums of gradients, of numbers that no code makes shorter, and of what is no number."""
    generator = torch.Generator().manual_seed(me.rank)
    wild = torch.randint(1, 255, (700, 4), dtype=torch.uint8, generator=generator)
    wild[:, 3] = wild[:, 3] & 0xBF  # below 2, and of all orders of magnitude
    edge = torch.tensor([math.nan, math.inf, -0.0, 1e-45, 3e38])
    made = [values(me.rank, numel) for numel in NUMELS]
    made += [values(me.rank, 300, torch.float64), wild.view(torch.float32).flatten()]
    made.append(edge if me.rank == 0 else torch.zeros(5))
    terms = [tensor.clone() for tensor in made]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "PIECE_NUMEL", 256)
        works = [wire_of(wire.PACKED).all_reduce(tensor) for tensor in made]
        seconds = sum(len(work._rests) for work in works)
        for work in works:
            work.wait()
    return terms, made, seconds


@pytest.mark.parametrize("world", [2, 3])
def test_packed_sums_are_exact(ranks, world):
    results = ranks(world).run(packed)
    assert_same_on_all([made for _, made, _ in results])
    for i, result in enumerate(results[0][1]):
        total = results[0][0][i]
        for terms, _, _ in results[1:]:
            total = total + terms[i]
        assert_bitwise_equal(result, total)
    # The wild ones need second messages.
    assert all(seconds > 0 for _, _, seconds in results)


EDGES = {
    "beyond float16": [1e30, -65505.0, 7e4, 1.0],
    "the largest": [3.38e38, 1.0, -3.4e37, 0.0],
    "the smallest": [1e-45, 1e-40, 2e-38, 0.0],
    "nothing": [0.0, -0.0, 0.0, 0.0],
}


@pytest.mark.parametrize("numbers", EDGES.values(), ids=EDGES)
def test_no_finite_number_overflows_on_the_way(ranks, numbers):
    # The owner of a part keeps its own term, so the other rank has zeros: what arrives has been on the wire.
    mine = torch.tensor([0.0] * 4 + numbers)
    tensors = [mine, torch.zeros(8)]
    for wire_dtype in HALVES:
        first, second = ranks(2).run(summed, wire_dtype, tensors)
        assert_bitwise_equal(first, second)
        assert bool(torch.isfinite(first).all())
        largest = mine.abs().max().item()
        bits = 2.0 ** -BITS[wire_dtype]
        allowed = mine.abs() * bits + (largest * 2.0**-38 if wire_dtype is torch.float16 else 1e-40)
        assert bool(((first - mine).abs() <= allowed).all()), (first, mine)


def test_float16_without_a_scale_would_overflow():
    # The twin of the test above.
    assert torch.tensor([7e4]).half().isinf().all()
    assert not torch.tensor([7e4]).mul(wire.scale_of(torch.tensor([7e4]))).half().isinf().any()


@pytest.mark.parametrize("wire_dtype", HALVES, ids=str)
def test_nan_and_infinity_stay_and_touch_nobody(ranks, wire_dtype):
    tensors = [values(rank, 8) for rank in range(2)]
    tensors[0][5], tensors[0][6], tensors[1][7] = math.nan, math.inf, -math.inf
    tensors[0][4] = 7e4  # finite, next to what is not
    first, second = ranks(2).run(summed, wire_dtype, tensors)
    for result in (first, second):
        assert result.isnan().tolist() == [False] * 5 + [True, False, False]
        assert result[6].item() == math.inf
        assert result[7].item() == -math.inf
        assert math.isfinite(result[4].item())
        assert result[4].item() == pytest.approx(7e4, rel=0.01)


def ordered(me):
    """1e8 + 1 - 1e8: in rank order 0, in another order 1; all three are exact in bfloat16 with a float32 sum."""
    mine = torch.tensor([[2.0**27], [1.0], [-(2.0**27)]])[me.rank].repeat(3)
    wire_of(torch.bfloat16).all_reduce(mine).wait()
    return mine.tolist()


def test_sums_are_taken_in_rank_order(ranks):
    assert ranks(3).run(ordered) == [[0.0] * 3] * 3


def several(me):
    """Several under way, with gloo's own in between, waited for in another order on each rank."""
    way = wire_of(torch.float16)
    comm = C10dCommunicator()
    tensors = [values(me.rank + 10 * i, 200 * i + 1) for i in range(5)]
    sums = [torch.ones(3) for _ in tensors]
    pending = []
    for tensor, small in zip(tensors, sums, strict=True):
        pending += [way.all_reduce(tensor), comm.all_reduce(small)]
    for work in pending if me.rank else reversed(pending):
        work.wait()
    done = [work for work in pending if isinstance(work, wire.WireWork)]
    assert all(work.is_completed() for work in done)
    called = []
    done[0].get_future().add_done_callback(called.append)
    assert len(called) == 1
    return tensors, sums


def test_several_under_way_do_not_mix(ranks):
    results = ranks(2).run(several)
    assert_same_on_all([tensors for tensors, _ in results])
    for i, tensor in enumerate(results[0][0]):
        both = [values(rank + 10 * i, 200 * i + 1) for rank in range(2)]
        assert torch.allclose(tensor, both[0] + both[1], rtol=2e-3, atol=1e-6)
    assert all(small.eq(2.0).all() for _, sums in results for small in sums)


def memory_lent(me):
    """Addresses and sizes of what three all-reduces of one size borrow."""
    way, lent = wire_of(torch.bfloat16), []
    borrow = way.lane.borrow
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(way.lane, "borrow", lambda *what: lent.append(borrow(*what)) or lent[-1])
        for _ in range(3):
            way.all_reduce(torch.ones(5000)).wait()
    return {memory.data_ptr() for memory in lent}, sum(memory.nbytes for memory in lent)


def test_memory_is_used_again(ranks):
    # Of two ranks each sends one half of the tensor and takes in the other, in halves: half of its bytes, and two heads.
    for addresses, nbytes in ranks(2).run(memory_lent):
        assert len(addresses) == 2
        assert nbytes == 3 * (5000 * 2 + 2 * 8)


# ---------------------------------------------------------------- training with it


def net():
    torch.manual_seed(7)
    sizes = (6, 40, 40, 3)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 6, generator=generator)


def train(me, wire_dtype, steps=4, ranks_per_host=1):
    """Gradients and weights of a few steps, with small buckets; one parameter is used by nobody."""
    with hosts_apart(me, ranks_per_host) as group:
        model = net()
        model.register_parameter("idle", nn.Parameter(torch.ones(3)))
        wrapped = DistributedDataParallel(
            model, process_group=group, bucket_cap_mb=0.0005, wire_dtype=wire_dtype
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        grads = []
        for step in range(steps):
            wrapped.zero_grad()
            wrapped(batch(me.rank, step)).square().mean().backward()
            grads.append([p.grad.clone() for n, p in model.named_parameters() if n != "idle"])
            optimizer.step()
        assert model.idle.grad is None
        assert len(wrapped.reducer.line.buckets) > 2
        rows = wrapped.reducer.line.trailer.read_rows()
        counts = wrapped.reducer.line.trailer.read_used()
        return grads, model.state_dict(), [row.reductions for row in rows], counts


@pytest.mark.parametrize("wire_dtype", HALVES, ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_a_model_trains_and_its_replicas_stay_equal(ranks, world, wire_dtype):
    results = ranks(world).run(train, wire_dtype)
    plain = ranks(world).run(train, None)
    assert_same_on_all([(grads, weights) for grads, weights, _, _ in results])
    for ours, exact in zip(results[0][0], plain[0][0], strict=True):
        for mine, true in zip(ours, exact, strict=True):
            assert torch.allclose(mine, true, rtol=0.02, atol=1e-4)
    # Twin: something was rounded.
    assert any(not torch.equal(a, b) for a, b in zip(results[0][0][0], plain[0][0][0], strict=True))
    for _, _, reductions, counts in results:
        assert reductions == [3] * world
        assert counts == [0] + [world] * 6


@pytest.mark.parametrize("world", [2, 3])
def test_a_packed_model_trains_as_a_plain_one(ranks, world):
    # Of three ranks, gloo adds the terms of some parts in another order.
    results = ranks(world).run(train, wire.PACKED)
    plain = ranks(world).run(train, None)
    assert_same_on_all([(grads, weights) for grads, weights, _, _ in results])
    compare = assert_bitwise_equal if world == 2 else functools.partial(assert_close_to, rel=1e-6)
    compare(list(results[0][1].values()), list(plain[0][1].values()))
    for _, _, reductions, counts in results:
        assert reductions == [3] * world
        assert counts == [0] + [world] * 6


def packed_on_two_hosts_of_two(me):
    return (
        train(me, wire.PACKED, ranks_per_host=2)[1],
        train(me, None, ranks_per_host=2)[1],
        train(me, torch.bfloat16, ranks_per_host=2)[1],
    )


def behind_the_gradients(me):
    """A number that no half could hold, put where a flag of the trailer is summed."""
    with hosts_apart(me) as group:
        model = net()
        wrapped = DistributedDataParallel(model, process_group=group, wire_dtype=torch.bfloat16)
        wrapped(batch(me.rank, 0)).square().sum().backward()
        region = wrapped.reducer.line.trailer.region
        with torch.no_grad():
            region[0] = 2.0**-20 + 1
        last = wrapped.reducer.line.last
        all_reduce_with_tail(
            wrapped.reducer.comm, last.flat, last.spec.numel, tail_only=False
        ).wait()
        return region[0].item()


def test_the_trailer_is_not_rounded(ranks):
    assert ranks(2).run(behind_the_gradients) == [2 * (2.0**-20 + 1)] * 2


def weighted(me, wire_dtype):
    """Exact counts, though they do not fit into halves: rank 1 has ten million samples more."""
    with hosts_apart(me) as group:
        model = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        wrapped = DistributedDataParallel(model, process_group=group, wire_dtype=wire_dtype)
        counts = (257, 10_000_001)
        x = torch.full((1, 2), float(counts[me.rank]))
        wrapped.backward(wrapped(x).sum(), count=counts[me.rank])
        return model.weight.grad.clone()


def test_weights_of_the_mean_are_exact(ranks):
    for grad in ranks(2).run(weighted, torch.float16):
        # (257 + 10,000,001) / 10,000,258, with the sum rounded once to 11 bits.
        assert torch.allclose(grad, torch.ones(1, 2), rtol=2.0**-10)
    exact = ranks(2).run(weighted, None)
    assert torch.allclose(exact[0], torch.ones(1, 2), rtol=1e-6)


def measured(me, wire_dtype):
    with hosts_apart(me) as group:
        model = net()
        wrapped = DistributedDataParallel(model, process_group=group, wire_dtype=wire_dtype)
        for step in range(3):
            wrapped.zero_grad()
            wrapped(batch(me.rank, step)).square().mean().backward()
        wrapped.zero_grad()
        with wrapped.measure_wire() as report:
            wrapped(batch(me.rank, 9)).square().mean().backward()
        inside = [p.grad.clone() for p in model.parameters()]
        wrapped.zero_grad()
        wrapped(batch(me.rank, 9)).square().mean().backward()
        assert_bitwise_equal(inside, [p.grad for p in model.parameters()])
        numel = sum(p.numel() for p in model.parameters())
        return report.relative_l2, report.relative_largest, report.numel - numel, str(report)


def test_the_error_is_measured_against_the_exact_sum(ranks):
    results = ranks(2).run(measured, torch.float16)
    for l2, largest, extra, text in results:
        assert 1e-5 < l2 < 2**-10
        assert 1e-6 < largest < 2**-9
        assert extra == 0
        assert text.startswith("float16 on the wire: relative L2 error ")
        assert "0.0 MB in " in text
    assert results[0][:2] == results[1][:2]
    for l2, largest, _, text in ranks(2).run(measured, wire.PACKED):
        assert (l2, largest) == (0.0, 0.0)
        assert text.startswith("packed on the wire: relative L2 error 0.00e+00")


def shared_memory(me):
    """All ranks on this host: nothing travels, nothing is rounded."""
    model = net()
    wrapped = DistributedDataParallel(model, wire_dtype=torch.bfloat16)
    plain = DistributedDataParallel(copy.deepcopy(model))
    for wrapper in (wrapped, plain):
        for _ in range(2):
            wrapper.zero_grad()
            wrapper(batch(me.rank, 1)).square().mean().backward()
    with wrapped.measure_wire() as report:
        wrapped(batch(me.rank, 1)).square().mean().backward()
    assert report.numel == 0
    wrapped.zero_grad()
    wrapped(batch(me.rank, 1)).square().mean().backward()
    return [[p.grad.clone() for p in wrapper.module.parameters()] for wrapper in (wrapped, plain)]


def test_on_one_host_nothing_is_rounded(ranks):
    for wired, plain in ranks(2).run(shared_memory):
        assert_bitwise_equal(wired, plain)


def copied_on_one_rank(me):
    wrapped = DistributedDataParallel(net(), wire_dtype=torch.float16)
    twin = copy.deepcopy(wrapped) if me.rank == 0 else wrapped
    wrapped(batch(me.rank, 0)).sum().backward()
    return twin.wire_dtype


def test_a_copy_is_made_without_the_other_ranks(ranks):
    assert ranks(2).run(copied_on_one_rank) == [torch.float16] * 2


# ---------------------------------------------------------------- what is refused, and what fails


def refusals(me):
    told = {}

    def tell(name, call, *kinds):
        with pytest.raises(kinds) as caught:
            call()
        told[name] = str(caught.value)

    mixed = nn.parallel.distributed._MixedPrecision(reduce_dtype=torch.bfloat16)
    tell("dtype", lambda: DistributedDataParallel(net(), wire_dtype=torch.int8), ModelTypeError)
    tell("word", lambda: DistributedDataParallel(net(), wire_dtype="bf16"), ModelTypeError)
    tell(
        "mixed",
        lambda: DistributedDataParallel(net(), wire_dtype=torch.bfloat16, mixed_precision=mixed),
        ModelTypeError,
    )
    wrapped = DistributedDataParallel(net(), wire_dtype=torch.bfloat16)
    tell(
        "hook",
        lambda: wrapped.register_comm_hook(None, default_hooks.allreduce_hook),
        ModelError,
    )
    plain = DistributedDataParallel(net())
    tell("plain", lambda: plain.measure_wire().__enter__(), ModelError)
    wrapped(batch(me.rank, 0)).sum().backward()
    return told


def test_what_makes_no_sense_is_refused_by_name(ranks):
    for told in ranks(2).run(refusals):
        assert "wire_dtype=torch.int8" in told["dtype"]
        assert 'torch.bfloat16 or torch.float16, or without loss as "packed"' in told["dtype"]
        assert "wire_dtype='bf16'" in told["word"]
        assert "reduce_dtype=torch.bfloat16" in told["mixed"]
        assert "communication hook" in told["hook"]
        assert "wire_dtype=torch.bfloat16 or torch.float16" in told["plain"]


def disagree(me):
    DistributedDataParallel(net(), wire_dtype=HALVES[me.rank])


def test_ranks_that_disagree_are_told(ranks):
    for outcome in ranks(2).outcomes(disagree):
        assert outcome.is_a(ModelMismatchError)
        assert "torch.bfloat16" in outcome.error
        assert "torch.float16" in outcome.error


def dies_in_backward(me):
    with hosts_apart(me) as group:
        model = net()
        wrapped = DistributedDataParallel(model, process_group=group, wire_dtype=torch.bfloat16)
        for step in range(3):
            if me.rank == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            wrapped.zero_grad()
            wrapped(batch(me.rank, step)).square().mean().backward()


def test_a_dead_rank_is_named_on_all_others(ranks):
    first, dead, third = ranks(3).outcomes(dies_in_backward)
    for rank, outcome in ((0, first), (2, third)):
        assert outcome.is_a(CommunicationError), outcome
        assert f"rank {rank}: the reduction of step 2" in outcome.error
        assert "rank 1 did not come" in outcome.error
    assert not dead.is_a(CommunicationError)


def test_the_sum_on_four_ranks(ranks):
    # Last in this file: a third pool takes the place of another.
    check_every_size(ranks, 4)


def two_hosts_of_two(me):
    """Halves only between the hosts; and a training that uses them."""
    with hosts_apart(me, 2) as group:
        comm = communicator_for(group, torch.device("cpu"))
        sums = []
        for numel, wire_dtype in itertools.product((1, 999), HALVES):
            mine = values(me.rank, numel)
            comm.all_reduce_in(mine, wire_dtype).wait()
            exact = values(me.rank, numel)
            comm.all_reduce(exact).wait()
            sums.append((wire_dtype, mine, exact))
        del comm
    return (
        sums,
        train(me, torch.bfloat16, ranks_per_host=2)[1],
        train(me, None, ranks_per_host=2)[1],
    )


def test_only_what_leaves_the_host_is_rounded(ranks):
    results = ranks(4).run(two_hosts_of_two)
    assert_same_on_all([([mine for _, mine, _ in sums], weights) for sums, weights, _ in results])
    sums, weights, exact_weights = results[0]
    for wire_dtype, mine, exact in sums:
        total = sum(values(rank, exact.numel()).double() for rank in range(4))
        assert torch.allclose(exact.double(), total, rtol=1e-5, atol=1e-9)
        # One host's sum is rounded on its way to the owner, and the result on its way back.
        hosts = [
            sum(values(rank, exact.numel()).double() for rank in pair) for pair in ((0, 1), (2, 3))
        ]
        bound = 1.01 * 2.0 ** -BITS[wire_dtype] * (total.abs() + hosts[0].abs() + hosts[1].abs())
        assert bool(((mine.double() - total).abs() <= bound).all())
        assert exact.numel() == 1 or not torch.equal(mine, exact)
    for name, weight in weights.items():
        assert torch.allclose(weight, exact_weights[name], rtol=0.02, atol=1e-3)


def test_between_hosts_nothing_is_rounded_by_packing(ranks):
    results = ranks(4).run(packed_on_two_hosts_of_two)
    assert_same_on_all([weights for weights, _, _ in results])
    packed_weights, plain, halves = results[0]
    assert_bitwise_equal(packed_weights, plain)
    # Twin: bfloat16 goes the same way, and is rounded.
    assert any(not torch.equal(halves[name], plain[name]) for name in plain)
