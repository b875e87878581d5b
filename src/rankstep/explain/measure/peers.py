"""Comparing vectors across the ranks, a piece at a time, so that no rank ever holds all of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankstep.collectives import Communicator

_PIECE = 1 << 20


class Peers:
    """All ranks as one rank sees them; every method is a collective that all must call.

    Args:
        comm: Moves the tensors.
        device: Where they have to be for that.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self.comm = comm
        self.device = device
        self.rank = comm.rank
        self.size = comm.world_size

    def wait(self) -> None:
        """Return when all ranks have come here."""
        self.comm.all_reduce(torch.zeros(1, device=self.device)).wait()

    def mean(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the mean of the ranks' vectors, by one all-reduce, the same bits on every rank."""
        result = vector.clone() if self.comm.averages else vector / self.size
        self.comm.all_reduce(result).wait()
        return result

    def totals(self, counts: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' integers."""
        parts = [torch.empty_like(counts) for _ in range(self.size)]
        self.comm.all_gather(parts, counts).wait()
        return torch.stack(parts).sum(0)

    def table(self, values: list[float]) -> list[list[float]]:
        """Return each rank's list of numbers; the lists are equally long."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        self.comm.all_gather(rows, mine).wait()
        return [row.tolist() for row in rows]

    def digests(self, digest: bytes) -> list[str]:
        """Return each rank's digest, as hexadecimal digits."""
        return [bytes(map(int, row)).hex() for row in self.table(list(digest))]

    def from_first(self, vector: torch.Tensor) -> torch.Tensor:
        """Return rank 0's vector; the others give one of the same size."""
        result = vector.clone()
        self.comm.broadcast(result, 0).wait()
        return result

    def farthest(self, vector: torch.Tensor) -> float:
        """Return the largest distance of a rank's vector from that of rank 0."""
        squares = [0.0] * self.size
        for first, *others in self._pieces(vector):
            for rank, other in enumerate(others, start=1):
                squares[rank] += float((other.double() - first.double()).square().sum())
        return math.sqrt(max(squares))

    def products(self, vector: torch.Tensor) -> list[list[float]]:
        """Return the inner products of all pairs of ranks' vectors."""
        total = torch.zeros(self.size, self.size, dtype=torch.float64, device=self.device)
        for pieces in self._pieces(vector):
            stacked = torch.stack(pieces).double()
            total += stacked @ stacked.T
        rows: list[list[float]] = total.tolist()
        return rows

    def _pieces(self, vector: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        for piece in vector.split(_PIECE):
            mine = piece.contiguous()
            pieces = [torch.empty_like(mine) for _ in range(self.size)]
            self.comm.all_gather(pieces, mine).wait()
            yield pieces


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the Euclidean distance of two vectors, summed in double precision."""
    return math.sqrt(
        sum(
            float((x.double() - y.double()).square().sum())
            for x, y in zip(a.split(_PIECE), b.split(_PIECE), strict=True)
        )
    )


def length(vector: torch.Tensor) -> float:
    """Return a vector's Euclidean length, summed in double precision."""
    return math.sqrt(sum(float(piece.double().square().sum()) for piece in vector.split(_PIECE)))


def ratio(part: float, whole: float) -> float:
    """Return part / whole; 0 / 0 is 0, and anything else over 0 is infinite."""
    if whole:
        return part / whole
    return 0.0 if part == 0.0 else math.inf
