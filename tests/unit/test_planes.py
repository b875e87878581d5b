"""Numbers packed for the way come back bit for bit, in fewer bytes if they are like gradients."""

import itertools

import pytest
import torch

from rankstep.collectives.planes import PackedPiece
from rankstep.collectives.wire import PACKED, wire_bytes

DTYPES = (torch.float32, torch.float64)
NUMELS = (1, 2, 3, 7, 64, 1001)


def gradients(numel, dtype):
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel), dtype=dtype) * 1e-4


def bits(numel, dtype):
    """Whatever bytes there are: NaN with payloads, denormal numbers, infinities."""
    generator = torch.Generator().manual_seed(numel)
    size = (numel * dtype.itemsize,)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype)


def edges(numel, dtype):
    found = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45], dtype=dtype)
    return found.repeat(numel)[:numel].clone()


def piece_of(numel, dtype):
    room = PackedPiece.room_bytes(numel, dtype)
    return PackedPiece(torch.empty(room, dtype=torch.uint8), numel, dtype)


def sent(piece, numel, dtype):
    """The piece on another rank: what the messages carry, and nothing else."""
    there = piece_of(numel, dtype)
    there.message.copy_(piece.message)
    missing = there.missing()
    assert (missing is None) == (piece.rest is None)
    if missing is not None:
        missing.copy_(piece.rest)
    return there


@pytest.mark.parametrize("make", [gradients, bits, edges])
def test_every_bit_comes_back(make):
    for numel, dtype in itertools.product(NUMELS, DTYPES):
        full = make(numel, dtype)
        piece = piece_of(numel, dtype)
        piece.pack(full)
        there = sent(piece, numel, dtype)
        result = torch.empty(numel, dtype=dtype)
        there.unpack(result)
        assert torch.equal(result.view(torch.uint8), full.view(torch.uint8))
        # Packed anew, as a sum is into the memory of a term.
        there.pack(gradients(numel, dtype))
        sent(there, numel, dtype).unpack(result)
        assert torch.equal(result, gradients(numel, dtype))


def test_a_term_is_added():
    piece = piece_of(64, torch.float32)
    piece.pack(gradients(64, torch.float32))
    total = torch.ones(64)
    piece.add_to(total)
    assert torch.equal(total, torch.ones(64) + gradients(64, torch.float32))


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 0.86), (torch.float64, 0.93)])
def test_gradients_take_fewer_bytes(dtype, share):
    full = gradients(300_000, dtype)
    assert wire_bytes(full, PACKED) / full.nbytes == pytest.approx(share, abs=0.001)
    assert wire_bytes(full, torch.bfloat16) == 600_000


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_without_order_take_no_more_than_their_own_and_a_head(dtype):
    full = bits(1 << 17, dtype)
    piece = piece_of(1 << 17, dtype)
    piece.pack(full)
    assert piece.rest is not None
    assert full.nbytes < wire_bytes(full, PACKED) <= full.nbytes + 16


def test_nothing_takes_nothing():
    assert wire_bytes(torch.empty(0), PACKED) == 0
