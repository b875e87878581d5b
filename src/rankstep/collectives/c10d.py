"""The communicator that trains: torch.distributed's process groups (gloo, NCCL and every other backend)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from rankstep.collectives.communicator import Pending

PATIENCE_S = 1.5
"""Ranks that wait for the same dead one see their own failure within a fraction of this."""


class C10dCommunicator:
    """Calls a process group's own methods, which also serve groups written in Python and never registered.

    Args:
        group: The process group; None takes the default one.

    Raises:
        ValueError: No process group is open (torch's own error and text).

    Source: https://docs.pytorch.org/docs/stable/distributed.html
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group if group is not None else dist.distributed_c10d._get_default_group()
        self.rank: int = self.group.rank()
        self.world_size: int = self.group.size()
        self.name: str = self.group.name()
        # Only NCCL is known to average in one pass without first rounding each rank's part.
        self.averages = self.name == "nccl"
        self.host_waits = self.name != "nccl"
        self._sum = dist.AllreduceOptions()
        if self.averages:
            self._sum.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A zero-filled flat tensor in ordinary memory of ``device``."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start a sum (NCCL: a mean) over the group, in place."""
        return self.group.allreduce([tensor], self._sum)

    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor]) -> Pending:
        """Start a reduce-scatter of equal parts."""
        return self.group.reduce_scatter(output, inputs)

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Pending:
        """Start an all-gather of equal parts."""
        return self.group.allgather([outputs], [tensor])

    def broadcast(self, tensor: torch.Tensor, src: int) -> Pending:
        """Start a broadcast from group rank ``src``."""
        options = dist.BroadcastOptions()
        options.rootRank = src
        options.rootTensor = 0
        return self.group.broadcast([tensor], options)

    def absent(self, place: str) -> list[int]:
        """Leave a mark in the group's store and look for those of the others; nothing is read or written before.

        Args:
            place: The same text on every rank that waits in the same collective.

        Returns:
            The group ranks whose mark did not appear within ``PATIENCE_S``; none if the store is gone, too.
        """
        try:
            store = dist.distributed_c10d._get_process_group_store(self.group)
            prefix = f"rankstep/{place}/"
            store.set(f"{prefix}{self.rank}", "here")
            until = time.monotonic() + PATIENCE_S
            missing = list(range(self.world_size))
            while missing and time.monotonic() < until:
                missing = [rank for rank in missing if not store.check([f"{prefix}{rank}"])]
                time.sleep(0.05)
        except (RuntimeError, KeyError, ValueError):
            return []
        return missing

    def __repr__(self) -> str:
        return f"C10dCommunicator({self.name}, rank {self.rank} of {self.world_size})"
