"""The communicator that trains: torch.distributed's process groups (gloo, NCCL and every other backend)."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rankstep.collectives.lookout import Lookout, watched

if TYPE_CHECKING:
    from rankstep.collectives.communicator import Pending
    from rankstep.collectives.direct import Direct
    from rankstep.collectives.wire import WireType

SMALL_BYTES = 64 * 1024
"""An all-gather of less is left to gloo: it is one message for each rank either way."""

_CPU = torch.device("cpu")


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
        # Weak, because a twin's communicator is kept as long as the group that it is known as.
        self._known_as = weakref.ref(known_as or self.group)
        self._direct: Direct | None = None
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
        """Start a sum of part r on rank r; by direct exchange on gloo, which has only an emulation."""
        direct = self.direct() if output.device.type == "cpu" else None
        if direct is not None:
            own = inputs[self.rank]
            return direct.reduce_scatter(inputs, None if _same(output, own) else output)
        if self.world_size == 1:
            output.copy_(inputs[0])
            return _DONE
        return watched(self.group.reduce_scatter(output, inputs), self._lookout)

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Pending:
        """Start an all-gather; a big one, or one of unequal parts, by direct exchange on gloo."""
        equal = all(output.numel() == tensor.numel() for output in outputs)
        small = equal and self.world_size * tensor.nbytes < SMALL_BYTES
        direct = self.direct() if tensor.device.type == "cpu" and not small else None
        if direct is not None:
            if not _same(outputs[self.rank], tensor):
                outputs[self.rank].copy_(tensor)
            return direct.all_gather(outputs)
        return watched(self.group.allgather([outputs], [tensor]), self._lookout)

    def direct(self) -> Direct | None:
        """Direct exchange among these ranks; None where it cannot be had. The first call is collective."""
        if self._direct is None and self.world_size > 1 and self.can_go_direct(_CPU):
            from rankstep.collectives.direct import Direct, lane_of

            self._direct = Direct(lane_of(self._known_as()), self._marks)
        return self._direct

    def all_reduce_in(self, tensor: torch.Tensor, dtype: WireType) -> Pending:
        """Start a sum that travels in a half type or packed, in place; the same bits on all ranks. See ``wire.py``.

        Args:
            tensor: Of float32 or float64, on the CPU, contiguous; :meth:`can_go_direct`.
            dtype: On the way.
        """
        direct = self.direct()
        if direct is None:
            return self.all_reduce(tensor)
        from rankstep.collectives.wire import Wire

        return Wire(direct.lane, direct.lookout, dtype).all_reduce(tensor)

    def can_go_direct(self, device: torch.device) -> bool:
        """Whether tensors of ``device`` can be sent by direct exchange: from CPU to CPU, by gloo."""
        from rankstep.collectives.twin import backend_of, store_of

        group = self._known_as()
        if device.type != "cpu" or store_of(group) is None:
            return False
        backend = backend_of(group, "cpu")
        return backend is not None and backend.name() == "gloo"

    @property
    def one_host(self) -> bool:
        """Whether nothing has to be sent, since there is one rank or all share memory; collective as the first use is."""
        return self.world_size == 1

    def broadcast(self, tensor: torch.Tensor, src: int) -> Pending:
        """Start a broadcast from group rank ``src``."""
        options = dist.BroadcastOptions()
        options.rootRank = src
        options.rootTensor = 0
        return watched(self.group.broadcast([tensor], options), self._lookout)

    def shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:  # noqa: ARG002 - the protocol's
        """None: a process group has no memory that all its ranks see."""
        return None

    def barrier(self) -> Pending:
        """Start to meet."""
        return _DONE if self.world_size == 1 else watched(self.group.barrier(), self._lookout)

    def at(self, place: str, what: str) -> None:
        """Where this rank waits next, should it take long."""
        self._marks.at(place, what)

    def absent(self) -> list[int]:
        """After a failure: the group ranks that do not report one of their own soon after."""
        return self._marks.absent()

    def __repr__(self) -> str:
        return f"C10dCommunicator({self.name}, rank {self.rank} of {self.world_size})"


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr()
