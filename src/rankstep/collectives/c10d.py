"""The communicator that trains: torch.distributed's process groups (gloo, NCCL and every other backend)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rankstep.collectives.lookout import Lookout, watched

if TYPE_CHECKING:
    from rankstep.collectives.communicator import Pending


class _Done:
    """A collective that has ended."""

    def wait(self) -> None:
        """Nothing to wait for."""


_DONE = _Done()


class C10dCommunicator:
    """Calls a process group's own methods, which also serve groups written in Python and never registered.

    Args:
        group: The process group; None takes the default one.
        known_as: The registered group whose twin ``group`` is: who waits where is told in its store.

    Raises:
        ValueError: No process group is open (torch's own error and text).

    Source: https://docs.pytorch.org/docs/stable/distributed.html
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, known_as: dist.ProcessGroup | None = None
    ) -> None:
        self.group = group if group is not None else dist.distributed_c10d._get_default_group()
        self.rank: int = self.group.rank()
        self.world_size: int = self.group.size()
        self.name: str = self.group.name()
        # Only NCCL is known to average in one pass without first rounding each rank's part.
        self.averages = self.name == "nccl"
        self.host_waits = self.name != "nccl"
        self._marks = Lookout(known_as or self.group, self.group)
        self._lookout = self._marks if self.host_waits and self.world_size > 1 else None
        self._sum = dist.AllreduceOptions()
        if self.averages:
            self._sum.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A zero-filled flat tensor in ordinary memory of ``device``."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start a sum (NCCL: a mean) over the group, in place; of one rank there is nothing to do."""
        if self.world_size == 1:
            return _DONE
        return watched(self.group.allreduce([tensor], self._sum), self._lookout)

    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor]) -> Pending:
        """Start a reduce-scatter of equal parts."""
        return watched(self.group.reduce_scatter(output, inputs), self._lookout)

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Pending:
        """Start an all-gather of equal parts."""
        return watched(self.group.allgather([outputs], [tensor]), self._lookout)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Pending:
        """Start a broadcast from group rank ``src``."""
        options = dist.BroadcastOptions()
        options.rootRank = src
        options.rootTensor = 0
        return watched(self.group.broadcast([tensor], options), self._lookout)

    def at(self, place: str, what: str) -> None:
        """Where this rank waits next, should it take long."""
        self._marks.at(place, what)

    def absent(self) -> list[int]:
        """After a failure: the group ranks that do not report one of their own soon after."""
        return self._marks.absent()

    def __repr__(self) -> str:
        return f"C10dCommunicator({self.name}, rank {self.rank} of {self.world_size})"
