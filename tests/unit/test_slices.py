"""Slices cover a tensor once, hosts are told apart by their labels, and memory is found again."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankstep.collectives.neighbours import Layout
from rankstep.collectives.segments import ALIGN_BYTES, OWN_SEGMENTS, Memory, Place, map_segment
from rankstep.collectives.slices import (
    CHUNK_BYTES,
    GRAIN_NUMEL,
    Spreading,
    Summing,
    scratch_for,
    slice_sizes,
    slices,
)

DESCRIPTORS = Path("/proc/self/fd")


@given(st.integers(0, 5000), st.integers(1, 9))
def test_slices_cover_everything_once(numel, count):
    sizes = slice_sizes(numel, count)
    assert len(sizes) == count
    assert sum(sizes) == numel
    # All but the last that has anything begin and end at whole grains, and none is longer than the first.
    used = [size for size in sizes if size]
    assert all(size % GRAIN_NUMEL == 0 for size in used[:-1])
    assert max(sizes) - min(sizes) <= 2 * GRAIN_NUMEL or numel < count * GRAIN_NUMEL
    assert max(sizes) == sizes[0]


def test_slices_of_a_tensor_share_its_memory():
    flat = torch.arange(40)
    parts = slices(flat, slice_sizes(40, 2))
    assert [len(part) for part in parts] == [32, 8]
    parts[1].zero_()
    assert flat.tolist() == [*range(32), *[0] * 8]


LONG = CHUNK_BYTES // 4 + 7


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_a_sum_is_taken_in_rank_order_and_written_everywhere(count, dtype):
    parts = [(torch.randn(LONG) * 100).to(dtype) for _ in range(count)]
    kept = [part.clone() for part in parts]
    into = [parts[1], parts[0], *parts[2:]]
    Summing(parts, into, scratch_for(dtype))()
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    total = kept[0].to(wide)
    for part in kept[1:]:
        total = total + part.to(wide)
    for part in parts:
        assert torch.equal(part, total.to(dtype))


def test_half_types_are_rounded_once():
    # One by one in bfloat16 nothing that small would ever change 256.
    parts = [torch.tensor([value]).bfloat16() for value in (256.0, 0.6, 0.6, 0.6)]
    Summing(parts, parts, scratch_for(torch.bfloat16))()
    assert parts[0].item() == 258.0
    assert (torch.tensor([256.0]).bfloat16() + torch.tensor([0.6]).bfloat16()).item() == 256.0


def test_spreading_copies_to_all():
    source, first, second = torch.randn(LONG), torch.zeros(LONG), torch.zeros(LONG)
    Spreading(source, [first, second])()
    assert torch.equal(first, source)
    assert torch.equal(second, source)


def test_equal_labels_are_one_host():
    layout = Layout.of({0: "a", 1: "b", 2: "a", 3: "c"}, 2)
    assert layout.hosts == ((0, 2), (1,), (3,))
    assert layout.host == 0
    assert layout.local == (0, 2)
    assert layout.several_share
    assert not Layout.of({0: "a", 1: "b"}, 0).several_share


class Recorder:
    """Takes a memory's words."""

    def __init__(self):
        self.announced = []
        self.withdrawn = []
        self.memory = Memory(3, self.announce, self.withdrawn.append)

    def announce(self, number, fd, nbytes):
        """Map it as a peer would."""
        self.announced.append((number, map_segment(fd, nbytes)))


def test_a_peer_sees_what_is_written():
    told = Recorder()
    tensor = told.memory.allocate(10, torch.float32)
    assert tensor.tolist() == [0.0] * 10
    tensor.fill_(2.0)
    ((number, bytes_seen),) = told.announced
    assert told.memory.place_of(tensor) == Place(number, 0)
    assert told.memory.place_of(tensor[4:]) == Place(number, 16)
    assert bytes_seen.view(torch.float32)[:10].tolist() == [2.0] * 10
    # The twin: memory of its own is not found.
    assert told.memory.place_of(tensor.clone()) is None
    assert told.memory.place_of(tensor[::2]) is None


def test_many_small_tensors_share_segments():
    told = Recorder()
    tensors = [told.memory.allocate(3, torch.float64) for _ in range(OWN_SEGMENTS + 5)]
    assert len(told.announced) == OWN_SEGMENTS + 1
    places = [told.memory.place_of(tensor) for tensor in tensors[OWN_SEGMENTS:]]
    assert [place.offset_bytes for place in places] == [ALIGN_BYTES * i for i in range(5)]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert [tensor[2].item() for tensor in tensors] == list(range(OWN_SEGMENTS + 5))


def test_a_segment_is_withdrawn_when_nothing_lives_in_it():
    told = Recorder()
    tensor = told.memory.allocate(10, torch.float32)
    part = torch.empty(0).set_(tensor.untyped_storage(), 2, (3,))
    tensor.fill_(1.0)
    assert told.withdrawn == []
    del tensor
    gc.collect()
    assert told.withdrawn == [0]
    # What still refers to it keeps its values, but peers are not told of it any more.
    assert part.tolist() == [1.0] * 3
    assert told.memory.place_of(part) is None


def test_segments_hold_no_descriptors():
    told = Recorder()
    before = len(list(DESCRIPTORS.iterdir()))
    tensors = [told.memory.allocate(1 << 16, torch.float32) for _ in range(20)]
    assert len(list(DESCRIPTORS.iterdir())) == before
    assert len(tensors) == 20
