"""What the ranks say to each other around a checkpoint; of one rank alone, nothing."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rankstep.collectives import C10dCommunicator
from rankstep.collectives.failures import naming_failure
from rankstep.collectives.twin import twin_of
from rankstep.errors import CheckpointError
from rankstep.parallel.replicate import copy_from
from rankstep.world.env import adopted_rank_env

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

    from rankstep.collectives import Communicator

_SLOWEST_PACE = 0.1
_NOTE_EVERY = 30.0


class Ranks:
    """All ranks of the default process group; without one, a world of one.

    They talk through a group of their own (``collectives/twin.py``), so that nothing here ever meets a bucket. Making
    one is collective.

    Attributes:
        rank: This process's number.
        world_size: How many there are.
        leads_host: It is the first rank of its host, which looks at the disk for the others.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.world_size = 1
        self.leads_host = True
        self._comm: Communicator | None = None
        self._calls = 0
        if not (dist.is_available() and dist.is_initialized()):
            return
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        env = adopted_rank_env(os.environ, self.rank, self.world_size)
        self.leads_host = env.local_rank == 0
        if self.world_size > 1:
            self._group: Any = dist.distributed_c10d._get_default_group()
            self._comm = twin_of(self._group, "checkpoint", torch.device("cpu"))

    def exchange(self, mine: bytes, what: str) -> list[bytes]:
        """Give all ranks these bytes, and return everybody's, by rank.

        Args:
            mine: May differ in length from rank to rank.
            what: What it is for, should a rank not come.

        Raises:
            CommunicationError: A rank has ended.
        """
        if self._comm is None:
            return [mine]
        lengths = self._gather(torch.tensor([len(mine)], dtype=torch.int64, device="cpu"), what)
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(max(longest, 1), dtype=torch.uint8, device="cpu")
        padded[: len(mine)] = torch.frombuffer(bytearray(mine or b"\0"), dtype=torch.uint8)[
            : len(mine)
        ]
        parts = self._gather(padded, what)
        return [
            part[: int(length)].numpy().tobytes()
            for part, length in zip(parts, lengths, strict=True)
        ]

    def tell(self, data: bytes | None, src: int, what: str) -> bytes:
        """Return the bytes of rank ``src`` on every rank.

        Args:
            data: What to tell; only that of ``src`` counts.
            src: Who tells.
            what: What it is for.
        """
        if self._comm is None:
            return data or b""
        data = data if self.rank == src else None
        length = torch.tensor([len(data or b"")], dtype=torch.int64, device="cpu")
        with self._named(what):
            self._comm.broadcast(length, src).wait()
        told = torch.zeros(max(int(length), 1), dtype=torch.uint8, device="cpu")
        if data:
            told[:] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with self._named(what):
            self._comm.broadcast(told, src).wait()
        return told[: int(length)].numpy().tobytes()

    def add(self, numbers: list[int], what: str) -> list[int]:
        """Return the sums over the ranks."""
        if self._comm is None:
            return numbers
        sums = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        with self._named(what):
            self._comm.all_reduce(sums).wait()
        return [int(number) for number in sums]

    def copy(self, tensors: Iterable[torch.Tensor], src: int) -> None:
        """Overwrite every rank's tensors, CPU or GPU, with those of rank ``src``."""
        if self._comm is None:
            return
        tensors = list(tensors)
        copy_from((tensor for tensor in tensors if tensor.device.type == "cpu"), self._comm, src)
        others = [tensor for tensor in tensors if tensor.device.type != "cpu"]
        if others:
            copy_from(others, C10dCommunicator(self._group), src)

    def on(self, src: int, function: Callable[[], Any], what: str) -> Any:
        """Call a function on one rank while the others wait; what fails there fails everywhere.

        Args:
            src: Which rank.
            function: What to call.
            what: For messages, as "writing a checkpoint".

        Returns:
            What it returned; None on the others.

        Raises:
            CheckpointError: Says on every rank what that one has met.
        """
        with ThreadPoolExecutor(1, "rankstep-checkpoint") as pool:
            work = pool.submit(function) if self.rank == src else None
            self.wait_for(work, what, src)
            return None if work is None else work.result()

    def wait_for(self, work: Future[Any] | None, what: str, src: int = 0) -> None:
        """Wait for something that one rank does in a thread; what fails there fails everywhere.

        The ranks keep exchanging a word meanwhile, so it may take as long as it likes, and a rank that ends in between is
        noticed at once.

        Args:
            work: What that rank waits for; None on all others, or where there is nothing.
            what: For messages, as "writing a checkpoint".
            src: Which rank.

        Raises:
            CheckpointError: It has failed.
            CommunicationError: A rank has ended.
        """
        if self._comm is None:
            if work is not None:
                work.result()
            return
        pace = 0.001
        began = noted = time.monotonic()
        while True:
            done = work is None or _is_done(work, pace)
            pace = min(2 * pace, _SLOWEST_PACE)
            if not done and time.monotonic() - noted >= _NOTE_EVERY:
                noted = time.monotonic()
                sys.stderr.write(f"rankstep: still {what}, for {noted - began:.0f} s\n")
                sys.stderr.flush()
            mine = [int(done and self.rank == src)]
            if self.add(mine, f"waiting for rank {src}, which is {what}")[0]:
                break
        error = None if work is None else work.exception()
        text = "" if error is None else str(error) or type(error).__name__
        told = self.tell(text.encode(), src, what)
        if error is not None:
            raise error
        if told:
            raise CheckpointError(f"rank {self.rank}: {what} failed on rank {src}: {told.decode()}")

    def _gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        assert self._comm is not None  # noqa: S101 - for the type checker
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self._named(what):
            self._comm.all_gather(parts, tensor).wait()
        return parts

    def _named(self, what: str) -> AbstractContextManager[None]:
        assert self._comm is not None  # noqa: S101 - for the type checker
        self._calls += 1
        return naming_failure(self._comm, f"checkpoint/{self._calls}", what)


def _is_done(work: Future[Any], seconds: float) -> bool:
    return bool(wait([work], seconds).done)
