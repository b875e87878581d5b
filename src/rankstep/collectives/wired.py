"""A communicator whose all-reduces send fewer bytes, and a report of what that loses and gains."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rankstep.collectives.wire import FULL_DTYPES, WireType, name_of, wire_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankstep.collectives.c10d import C10dCommunicator
    from rankstep.collectives.communicator import Communicator, Pending


@dataclass(slots=True)
class WireReport:
    """What one step's gradients lose on the wire, against the exact sum, and the time that it saves.

    Every all-reduce was run twice, one after the other and nothing else meanwhile: as it is, and with fewer bytes. The
    error is the same on every rank; the times are this rank's.

    Attributes:
        dtype: On the wire, or "packed".
        numel: How many elements were reduced.
        exact_bytes: What they take as they are.
        wire_bytes: What they take on the wire.
        exact_ms: How long their exact all-reduces took.
        wire_ms: How long those with fewer bytes took.
        largest_difference: Between an element of the result and that of the exact one.
        largest: Magnitude of an element of the exact result.
    """

    dtype: WireType
    numel: int = 0
    exact_bytes: int = 0
    wire_bytes: int = 0
    exact_ms: float = 0.0
    wire_ms: float = 0.0
    largest_difference: float = 0.0
    largest: float = 0.0
    _squares: list[float] = field(default_factory=lambda: [0.0, 0.0])

    @property
    def relative_l2(self) -> float:
        """The norm of the difference, as a share of that of the exact sum; 0 if both are 0."""
        off, exact = self._squares
        return math.sqrt(off / exact) if exact else 0.0

    @property
    def relative_largest(self) -> float:
        """The largest difference, as a share of the largest element; 0 if both are 0."""
        return self.largest_difference / self.largest if self.largest else 0.0

    def add(self, exact: torch.Tensor, rounded: torch.Tensor) -> None:
        """Take in the two results of one all-reduce."""
        self.numel += exact.numel()
        self.exact_bytes += exact.nbytes
        self.wire_bytes += wire_bytes(exact, self.dtype)
        if exact.numel():
            difference = (rounded.double() - exact.double()).abs()
            self._squares[0] += difference.square().sum().item()
            self._squares[1] += exact.double().square().sum().item()
            self.largest_difference = max(self.largest_difference, difference.max().item())
            self.largest = max(self.largest, exact.abs().max().item())

    def __str__(self) -> str:
        return (
            f"{name_of(self.dtype)} on the wire: relative L2 error {self.relative_l2:.2e}, largest difference "
            f"{self.relative_largest:.2e} of the largest gradient; {self.wire_bytes / 1e6:.1f} MB in {self.wire_ms:.1f} ms "
            f"instead of {self.exact_bytes / 1e6:.1f} MB in {self.exact_ms:.1f} ms"
        )


class WiredCommunicator:
    """Another communicator whose all-reduces of float32 and float64 CPU tensors travel in fewer bytes.

    Args:
        inner: Does everything else; its ranks must be able to exchange messages directly.
        dtype: On the wire, or "packed".

    Attributes:
        exact: Reduces what must arrive to the last bit.
    """

    def __init__(self, inner: C10dCommunicator, dtype: WireType) -> None:
        self.exact = inner
        self.dtype = dtype
        self._report: WireReport | None = None
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.averages = inner.averages
        self.host_waits = inner.host_waits
        self.name = inner.name
        self.allocate = inner.allocate
        self.reduce_scatter = inner.reduce_scatter
        self.all_gather = inner.all_gather
        self.broadcast = inner.broadcast
        self.shared = inner.shared
        self.barrier = inner.barrier
        self.absent = inner.absent
        self.at = inner.at

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start a sum over all ranks; the same bits on all of them, rounded to the wire's dtype."""
        flat = tensor.layout is torch.strided and tensor.is_contiguous()
        if tensor.dtype not in FULL_DTYPES or tensor.device.type != "cpu" or not flat:
            return self.exact.all_reduce(tensor)
        if self.exact.one_host:
            return self.exact.all_reduce(tensor)
        if self._report is not None:
            return self._measured(tensor, self._report)
        return self.exact.all_reduce_in(tensor, self.dtype)

    def connect(self) -> None:
        """Open the connections now, on all ranks, where no rank can be in the middle of something else."""
        if not self.exact.one_host:
            self.exact.all_reduce_in(torch.zeros(1), self.dtype).wait()

    @contextlib.contextmanager
    def measuring(self) -> Iterator[WireReport]:
        """Inside, run every all-reduce twice and compare. Every rank must do so at the same time."""
        report = self._report = WireReport(self.dtype)
        try:
            yield report
        finally:
            self._report = None

    def _measured(self, tensor: torch.Tensor, report: WireReport) -> Pending:
        exact = tensor.detach().clone()
        self.exact.barrier().wait()
        begun = time.perf_counter()
        self.exact.all_reduce(exact).wait()
        report.exact_ms += 1e3 * (time.perf_counter() - begun)
        self.exact.barrier().wait()
        begun = time.perf_counter()
        work = self.exact.all_reduce_in(tensor, self.dtype)
        work.wait()
        report.wire_ms += 1e3 * (time.perf_counter() - begun)
        report.add(exact, tensor.detach())
        return work

    def __repr__(self) -> str:
        return f"WiredCommunicator({name_of(self.dtype)} over {self.exact!r})"


def all_reduce_with_tail(
    comm: Communicator, flat: torch.Tensor, numel: int, *, tail_only: bool
) -> Pending:
    """Start the sum of a buffer whose end must arrive to the last bit; it goes apart where the rest is rounded.

    Args:
        comm: The ranks.
        flat: The buffer.
        numel: Where the end begins.
        tail_only: Leave out what is before it.
    """
    exact = exact_of(comm)
    if tail_only:
        return exact.all_reduce(flat[numel:])
    if exact is comm or numel == flat.numel():
        return comm.all_reduce(flat)
    if not numel:
        return exact.all_reduce(flat)
    return _Both(comm.all_reduce(flat[:numel]), exact.all_reduce(flat[numel:]))


class _Both:
    """Two collectives that were started together.

    Args:
        large: One.
        small: The other, which nobody follows on its way.
    """

    def __init__(self, large: Pending, small: Pending) -> None:
        self._large = large
        self._small = small

    def wait(self) -> None:
        """Wait for both."""
        self._large.wait()
        self._small.wait()

    @property
    def get_future(self) -> Any:
        """That of the large one; missing where it has none."""
        return self._large.get_future  # type: ignore[attr-defined]


def exact_of(comm: Communicator) -> Communicator:
    """What reduces to the last bit among the same ranks: the communicator itself, unless it rounds."""
    return comm.exact if isinstance(comm, WiredCommunicator) else comm
