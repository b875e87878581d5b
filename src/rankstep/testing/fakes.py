"""Communicators without processes, for testing what drives them.

They have the attributes and methods of `rankstep.collectives` communicators and move nothing between processes:
`RecordingCommunicator` plays the other ranks, `DelayedCommunicator` decides when results arrive, and
`FailingCommunicator` breaks one call. The last two wrap another communicator::

    comm = DelayedCommunicator(RecordingCommunicator(world_size=2))
    ...  # drive the code under test
    comm.release(1)  # the second collective finishes before the first
    assert comm.events == ["start 0", "start 1", "finish 1", "wait 0", "finish 0"]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from rankstep.testing.asserts import first_difference

if TYPE_CHECKING:
    from collections.abc import Callable


_Tensors: TypeAlias = list[torch.Tensor]


class _Pending(Protocol):
    def wait(self) -> None: ...


class _Communicator(Protocol):
    """The shape of `rankstep.collectives.Communicator`, repeated because this folder imports nothing above it."""

    rank: int
    world_size: int
    averages: bool
    host_waits: bool
    name: str

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...
    def all_reduce(self, tensor: torch.Tensor) -> _Pending: ...
    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor]) -> _Pending: ...
    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> _Pending: ...
    def broadcast(self, tensor: torch.Tensor, src: int) -> _Pending: ...
    def shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None: ...
    def barrier(self) -> _Pending: ...
    def at(self, place: str, what: str) -> None: ...
    def absent(self) -> list[int]: ...


_Starter: TypeAlias = "Callable[[_Tensors, _Tensors], _Pending]"


@dataclass(frozen=True, slots=True)
class Collective:
    """One recorded call.

    Args:
        name: The method, such as ``"all_reduce"``.
        numel: Elements this rank put in (for ``reduce_scatter``: of one input).
        dtype: Their type.
        src: Of a ``broadcast``; None for all others.
    """

    name: str
    numel: int
    dtype: torch.dtype
    src: int | None = None


class RecordingCommunicator:
    """Records all calls and plays the other ranks; every collective is done when it is started.

    Args:
        world_size: How many ranks to play, this one included.
        rank: Which one this is.
        peers: From the index of a call (0 for the first) to the tensors that the other ranks put in, by rank without
            this one; for ``reduce_scatter`` the parts meant for this rank. By default they all put in zeros, also as
            the source of a broadcast.
        averages: ``all_reduce`` divides by the world size.
        host_waits: What the attribute of that name says.

    Attributes:
        calls: What was called, in order.
        events: ``"start i"`` and ``"wait i"`` in the order in which they happened.
    """

    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        peers: Callable[[int], list[torch.Tensor]] | None = None,
        *,
        averages: bool = False,
        host_waits: bool = True,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.averages = averages
        self.host_waits = host_waits
        self.name = "recording"
        self.calls: list[Collective] = []
        self.events: list[str] = []
        self._peers = peers

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a flat tensor of zeros."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: torch.Tensor) -> _Pending:
        """Add what the other ranks put in."""
        pending, everyone = self._start(
            Collective("all_reduce", tensor.numel(), tensor.dtype), tensor
        )
        tensor.copy_(_sum(everyone))
        if self.averages:
            tensor.div_(self.world_size)
        return pending

    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor]) -> _Pending:
        """Write the sum of the parts meant for this rank."""
        mine = inputs[self.rank]
        pending, everyone = self._start(
            Collective("reduce_scatter", mine.numel(), mine.dtype), mine
        )
        output.copy_(_sum(everyone))
        return pending

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> _Pending:
        """Write what every rank put in, in rank order."""
        pending, everyone = self._start(
            Collective("all_gather", tensor.numel(), tensor.dtype), tensor
        )
        for output, part in zip(outputs, everyone, strict=True):
            output.copy_(part)
        return pending

    def broadcast(self, tensor: torch.Tensor, src: int) -> _Pending:
        """Write what rank ``src`` put in."""
        call = Collective("broadcast", tensor.numel(), tensor.dtype, src)
        pending, everyone = self._start(call, tensor)
        tensor.copy_(everyone[src])
        return pending

    def shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:  # noqa: ARG002 - the protocol's
        """None: the other ranks are made up."""
        return None

    def barrier(self) -> _Pending:
        """Meet nobody."""
        return self._start(Collective("barrier", 0, torch.uint8), torch.empty(0))[0]

    def at(self, place: str, what: str) -> None:
        """Not kept: nobody waits here."""

    def absent(self) -> list[int]:
        """Nobody."""
        return []

    def _start(self, call: Collective, mine: torch.Tensor) -> tuple[_Pending, list[torch.Tensor]]:
        index = len(self.calls)
        self.calls.append(call)
        self.events.append(f"start {index}")
        if self._peers is None:
            others = [torch.zeros_like(mine) for _ in range(self.world_size - 1)]
        else:
            others = list(self._peers(index))
        if len(others) != self.world_size - 1:
            raise AssertionError(
                f"call {index}: peers gave {len(others)} tensors for {self.world_size - 1} other ranks"
            )
        everyone = [*others[: self.rank], mine.clone(), *others[self.rank :]]
        return _Action(lambda: self.events.append(f"wait {index}")), everyone


class _Wrapper:
    """What wrapping communicators share: the attributes of the inner one, and one place through which calls go."""

    def __init__(self, inner: _Communicator) -> None:
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.averages = inner.averages
        self.host_waits = inner.host_waits
        self.name = f"{type(self).__name__}({inner.name})"
        self._inner = inner

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate as the inner communicator."""
        return self._inner.allocate(numel, dtype, device)

    def all_reduce(self, tensor: torch.Tensor) -> _Pending:
        """Do as the inner communicator."""
        return self._call([], [tensor], lambda _, out: self._inner.all_reduce(out[0]))

    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor]) -> _Pending:
        """Do as the inner communicator."""
        return self._call(
            inputs, [output], lambda into, out: self._inner.reduce_scatter(out[0], into)
        )

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> _Pending:
        """Do as the inner communicator."""
        return self._call([tensor], outputs, lambda into, out: self._inner.all_gather(out, into[0]))

    def broadcast(self, tensor: torch.Tensor, src: int) -> _Pending:
        """Do as the inner communicator."""
        return self._call([], [tensor], lambda _, out: self._inner.broadcast(out[0], src))

    def shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Ask the inner one."""
        return self._inner.shared(numel, dtype)

    def barrier(self) -> _Pending:
        """Do as the inner communicator."""
        return self._call([], [], lambda _into, _out: self._inner.barrier())

    def at(self, place: str, what: str) -> None:
        """Pass it on."""
        self._inner.at(place, what)

    def absent(self) -> list[int]:
        """Ask the inner one."""
        return self._inner.absent()

    def _call(self, inputs: _Tensors, outputs: _Tensors, start: _Starter) -> _Pending:
        raise NotImplementedError


class FailingCommunicator(_Wrapper):
    """Fails once, as a backend does when a peer is gone.

    Args:
        inner: Takes all other calls.
        at_call: Index of the call that fails, 0 for the first collective.
        error: What it raises; by default a RuntimeError with the words of gloo.
        on_wait: The call starts well and fails in ``wait``, as gloo's mostly do.
    """

    def __init__(
        self,
        inner: _Communicator,
        at_call: int,
        error: BaseException | None = None,
        *,
        on_wait: bool = True,
    ) -> None:
        super().__init__(inner)
        self._at_call = at_call
        self._error = error or RuntimeError("Read error [127.0.0.1]:1: Connection reset by peer")
        self._on_wait = on_wait
        self._started = 0

    def _call(self, inputs: _Tensors, outputs: _Tensors, start: _Starter) -> _Pending:
        index, self._started = self._started, self._started + 1
        if index != self._at_call:
            return start(inputs, outputs)
        if self._on_wait:
            return _Action(self._fail)
        raise self._error

    def _fail(self) -> None:
        raise self._error


class DelayedCommunicator(_Wrapper):
    """Holds every result back until the test releases it or the code under test waits for it.

    The inner communicator gets copies taken at the start. So a result that is read too early is seen to be the old one,
    and a tensor that is written while it is in flight raises AssertionError when its collective finishes.

    Args:
        inner: Does the work.

    Attributes:
        events: ``"start i"``, ``"wait i"`` and ``"finish i"`` in the order in which they happened.
    """

    def __init__(self, inner: _Communicator) -> None:
        super().__init__(inner)
        self.events: list[str] = []
        self._finishers: dict[int, Callable[[], None]] = {}
        self._started = 0

    def release(self, index: int) -> None:
        """Let the collective of this index finish now."""
        self._finishers.pop(index)()
        self.events.append(f"finish {index}")

    def _call(self, inputs: _Tensors, outputs: _Tensors, start: _Starter) -> _Pending:
        index, self._started = self._started, self._started + 1
        before = [tensor.clone() for tensor in (*inputs, *outputs)]
        results = [tensor.clone() for tensor in outputs]
        self.events.append(f"start {index}")
        pending = start([tensor.clone() for tensor in inputs], results)

        def finish() -> None:
            pending.wait()
            difference = first_difference([*inputs, *outputs], before)
            if difference is not None:
                raise AssertionError(f"call {index}: a tensor was written in flight: {difference}")
            for output, result in zip(outputs, results, strict=True):
                output.copy_(result)

        def wait() -> None:
            self.events.append(f"wait {index}")
            if index in self._finishers:
                self.release(index)

        self._finishers[index] = finish
        return _Action(wait)


@dataclass(frozen=True, slots=True)
class _Action:
    """A pending collective whose ``wait`` calls a function."""

    action: Callable[[], Any]

    def wait(self) -> None:
        self.action()


def _sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total
