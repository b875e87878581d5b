"""The protocol between the reducer and whatever moves its bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Pending(Protocol):
    """A collective that was started and not yet waited for."""

    def wait(self) -> object:
        """Return once the result may be used: on the host (CPU), or in stream order (GPU).

        Raises:
            RuntimeError: The collective failed; the text comes from the backend.
        """


class Communicator(Protocol):
    """Starts collectives on flat tensors; every rank of the group calls the same ones in the same order.

    Attributes:
        rank: This process's number inside the group, 0 to ``world_size - 1``.
        world_size: How many processes take part.
        averages: ``all_reduce`` divides by the world size inside the collective; otherwise it sums and the caller
            divides before it, which keeps half types from overflowing.
        host_waits: ``Pending.wait`` blocks the host until the result is there, so that reading it is free. False on
            GPU streams, where a read would stall the queue.
        name: For messages and ``repr``: the backend behind it.
    """

    rank: int
    world_size: int
    averages: bool
    host_waits: bool
    name: str

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat, zero-filled tensor of ``numel`` elements where this communicator likes its buffers to be."""

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start summing (or averaging, see ``averages``) ``tensor`` over all ranks, in place."""

    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor]) -> Pending:
        """Start summing (never averaging) ``inputs[r]`` over all ranks into rank r's ``output``.

        Parts may differ in size, and ``output`` may be this rank's own input.
        """

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Pending:
        """Start copying every rank's ``tensor`` into ``outputs``, in rank order.

        Parts may differ in size, and ``tensor`` may be this rank's own output.
        """

    def broadcast(self, tensor: torch.Tensor, src: int) -> Pending:
        """Start overwriting ``tensor`` with that of group rank ``src``."""

    def shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Zero-filled memory that all ranks read and write; None where there is none. Collective."""

    def barrier(self) -> Pending:
        """Start to meet: the wait ends when all ranks have come here."""

    def at(self, place: str, what: str) -> None:
        """Say where this rank waits next: ``place``, equal on all ranks that wait there, for ``what``, for people."""

    def absent(self) -> list[int]:
        """After a failure: the ranks that do not report one of their own soon after."""
