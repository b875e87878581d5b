"""An all-reduce made of send and receive alone: plain, slow, and the oracle for the fast ones.

Every rank sends its whole tensor to every other rank and adds what it got in rank order, so the result is the same bits
on all ranks whatever their number. One can check it by reading it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankstep.collectives.communicator import Pending


@dataclass(slots=True)
class _Exchange:
    """Sends and receives under way, and what to do once they are through."""

    works: list[dist.Work]
    finish: Callable[[], None]
    keep: list[torch.Tensor] = field(default_factory=list)
    waited: bool = False

    def wait(self) -> None:
        if self.waited:
            return
        for work in self.works:
            work.wait()
        self.waited = True
        self.finish()


class SendRecvCommunicator:
    """Every collective as point-to-point messages over a gloo group; for tests and for reading.

    Args:
        group: The process group; None takes the default one.
    """

    averages = False
    host_waits = True
    name = "send/recv"

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group if group is not None else dist.distributed_c10d._get_default_group()
        self.rank: int = self.group.rank()
        self.world_size: int = self.group.size()
        # Messages of two collectives under way at once must not meet: each gets its own tag.
        self._tag = 0

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A zero-filled flat tensor in ordinary memory."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Sum over all ranks in rank order, in place."""
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        parts[self.rank] = tensor.clone()

        def add_up() -> None:
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            tensor.copy_(total)

        return self._exchange([parts[self.rank]] * self.world_size, parts, add_up)

    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor]) -> Pending:
        """Sum part r of every rank, in rank order, on rank r."""
        parts = [torch.empty_like(output) for _ in range(self.world_size)]
        parts[self.rank] = inputs[self.rank].clone()

        def add_up() -> None:
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            output.copy_(total)

        return self._exchange(inputs, parts, add_up)

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Pending:
        """Copy every rank's tensor to every rank."""
        outputs[self.rank].copy_(tensor)
        return self._exchange([tensor] * self.world_size, outputs, lambda: None)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Pending:
        """Send ``src``'s tensor to every other rank."""
        self._tag += 1
        if self.rank == src:
            peers = [r for r in range(self.world_size) if r != src]
            works = [self.group.send([tensor], r, self._tag) for r in peers]
        else:
            works = [self.group.recv([tensor], src, self._tag)]
        return _Exchange(works, lambda: None, [tensor])

    def shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:  # noqa: ARG002 - the protocol's
        """None: messages share no memory."""
        return None

    def barrier(self) -> Pending:
        """Everybody sends everybody a word."""
        return self.all_reduce(torch.zeros(1))

    def at(self, place: str, what: str) -> None:
        """Not kept: this communicator looks for nobody."""

    def absent(self) -> list[int]:
        """Unknown: this communicator keeps no store."""
        return []

    def _exchange(
        self, outgoing: list[torch.Tensor], incoming: list[torch.Tensor], finish: Callable[[], None]
    ) -> Pending:
        self._tag += 1
        works = []
        for peer in range(self.world_size):
            if peer != self.rank:
                works.append(self.group.send([outgoing[peer].contiguous()], peer, self._tag))
                works.append(self.group.recv([incoming[peer]], peer, self._tag))
        return _Exchange(works, finish, [*outgoing, *incoming])
