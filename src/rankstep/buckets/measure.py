"""What an all-reduce of a group costs: measured once, in well under a second also where a mebibyte takes ten milliseconds.

All ranks call this together, and every decision in it (how often, how large, when to stop) is taken from numbers that
all ranks have, so that they start the same collectives.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING

import torch

from rankstep.buckets.predict import Link, as_charge, fit_link
from rankstep.collectives.failures import naming_failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankstep.collectives import Communicator

SIZES = 7
LEAST_BYTES = 4 * 1024
MOST_BYTES = 16 * 1024 * 1024
"""16 MiB: at 1 Gbit/s it takes a seventh of a second; a larger one would tell no more about the price of a byte."""

LADDER_NS = 450_000_000
"""What all sizes together may take."""

SIZE_NS = 60_000_000
TIMES = 8
"""Each size is sent so often, or for so long, and twice at least; the quickest counts."""

CHARGE_NS = 10_000_000
ROUNDS = 5
"""The charge is measured with the largest transfer below 10 ms, five times over."""


def measure_link(comm: Communicator, dtype: torch.dtype, device: torch.device, nbytes: int) -> Link:
    """Measure what an all-reduce costs, and how much computing is lost meanwhile.

    Collective. The charge is measured only where the host waits for results, on CPUs.

    Args:
        comm: The ranks, at least two.
        dtype: Of most gradients.
        device: Of the gradients.
        nbytes: Bytes of all gradients; nothing much larger is sent.

    Raises:
        CommunicationError: A collective failed.
    """
    with (
        torch.no_grad(),
        naming_failure(comm, "link", "measuring the group's latency and bandwidth"),
    ):
        return _Bench(comm, dtype, device, nbytes).run()


def gathered(comm: Communicator, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """Every rank's whole numbers, by rank.

    Args:
        comm: The ranks.
        numbers: Of this rank; as many on every rank.
        device: Where the communicator takes tensors from.
    """
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    parts = [torch.empty_like(mine) for _ in range(comm.world_size)]
    comm.all_gather(parts, mine).wait()
    return [part.tolist() for part in parts]


class _Bench:
    def __init__(
        self, comm: Communicator, dtype: torch.dtype, device: torch.device, nbytes: int
    ) -> None:
        self._comm = comm
        self._device = device
        top = min(max(nbytes, 64 * LEAST_BYTES), MOST_BYTES)
        ratio = (top / LEAST_BYTES) ** (1 / (SIZES - 1))
        self._sizes = [
            max(1, round(LEAST_BYTES * ratio**place) // dtype.itemsize) for place in range(SIZES)
        ]
        self._flat = comm.allocate(self._sizes[-1], dtype, device)
        self._place = 0

    def run(self) -> Link:
        points = self._ladder()
        if self._device.type != "cpu" or not self._comm.host_waits:
            return fit_link(points)
        within = [point for point in points if point[1] <= CHARGE_NS] or points[:1]
        size, flight = within[-1]
        return fit_link(points, self._charge(size // self._flat.itemsize, flight))

    def _ladder(self) -> list[tuple[int, float]]:
        """(bytes, time) of each size, from the smallest on, as long as there is time."""
        self._send(self._sizes[0])
        points: list[tuple[int, float]] = []
        spent, expected = 0.0, 1.0
        for numel in self._sizes:
            nbytes = numel * self._flat.itemsize
            if points:
                before, time_ns = points[-1]
                expected = max(1.0, time_ns * nbytes / before)
            # The small ones take next to nothing, and four sizes are the least that tell a line from a bend.
            times = TIMES if len(points) < 2 else int(min(max(2, SIZE_NS / expected), TIMES))
            if len(points) >= 2 and spent + times * expected > LADDER_NS:
                break
            quickest = min(self._send(numel) for _ in range(times))
            slowest_rank = max(row[0] for row in gathered(self._comm, [quickest], self._device))
            points.append((nbytes, float(slowest_rank)))
            spent += times * slowest_rank
        return points

    def _send(self, numel: int) -> int:
        """All-reduce so many elements and return how long it took; each time another part of the memory is used."""
        if self._place + numel > self._flat.numel():
            self._place = 0
        part = self._flat[self._place : self._place + numel]
        self._place += numel
        begin_ns = time.perf_counter_ns()
        self._comm.all_reduce(part).wait()
        if not self._comm.host_waits:
            part[:1].item()
        return time.perf_counter_ns() - begin_ns

    def _charge(self, numel: int, flight_ns: float) -> float:
        """Send while computing, and see how much longer it takes than computing alone.

        All ranks compute at once, so cores, caches and memory are as busy as in a step. A transport that moves bytes
        only while it is waited for hides nothing, and a network hides almost everything: the same measurement tells.
        """
        work = _Work()
        one = work.time_ns(1)
        slowest = max(row[0] for row in gathered(self._comm, [one], self._device))
        # The transfer must end before the work does.
        pieces = math.ceil(1.5 * flight_ns / max(1, slowest))
        rounds = ROUNDS if flight_ns <= CHARGE_NS else 2
        part = self._flat[:numel]
        lost = []
        for _ in range(rounds):
            # Both begin together on all ranks.
            self._send(1)
            alone = work.time_ns(pieces)
            self._send(1)
            begin_ns = time.perf_counter_ns()
            pending = self._comm.all_reduce(part)
            work.run(pieces)
            pending.wait()
            lost.append(time.perf_counter_ns() - begin_ns - alone)
        share = statistics.median(lost) / flight_ns
        told = gathered(self._comm, [round(1e6 * share)], self._device)
        return as_charge(statistics.fmean(row[0] for row in told) / 1e6)


class _Work:
    """Something like a backward's matrix products: a few milliseconds' worth, and more memory than a cache holds."""

    def __init__(self) -> None:
        self._left = torch.ones(64, 512)
        self._weights = [torch.ones(512, 512) for _ in range(8)]
        self._out = torch.empty(64, 512)

    def run(self, pieces: int) -> None:
        for place in range(pieces):
            torch.mm(self._left, self._weights[place % len(self._weights)], out=self._out)

    def time_ns(self, pieces: int) -> int:
        """How long so many pieces take: the quickest of three times."""
        return min(self._timed(pieces) for _ in range(3)) if pieces == 1 else self._timed(pieces)

    def _timed(self, pieces: int) -> int:
        begin_ns = time.perf_counter_ns()
        self.run(pieces)
        return time.perf_counter_ns() - begin_ns
