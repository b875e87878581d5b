"""The world: this process's place among the ranks, and the process group, open while its block runs."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import distributed as dist

from rankstep.errors import DataError, WorldError
from rankstep.world import observers
from rankstep.world.cores import threads_per_rank
from rankstep.world.env import RankEnv, adopted_rank_env, read_rank_env
from rankstep.world.interface import gloo_interface
from rankstep.world.store import leave_store, open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

# How long ranks wait for each other at the start: containers and file systems of big jobs take their time.
_JOIN_TIMEOUT = timedelta(minutes=10)
# How long the rank that hosts the store lingers for ranks that are about to leave too.
_LEAVE_TIMEOUT = timedelta(seconds=30)


def world(
    *,
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout: float | timedelta | None = None,
) -> World:
    """Find out which rank this is, and open the process group for the length of a ``with`` block.

    The same script runs as ``rankstep run``, ``torchrun``, ``mpirun`` or ``srun`` starts it, and plainly with
    ``python train.py``, where it is a world of one. A process group that is open already (the script's own, or an
    outer ``world()``) is adopted and left open.

    Args:
        backend: ``"nccl"``, ``"gloo"`` or another backend of torch.distributed; by default nccl when the ranks
            have GPUs, else gloo.
        device: where this rank computes; ``"cuda"`` stands for the GPU of its local rank. By default that GPU if
            there is one and the backend uses it, else the CPU.
        timeout: how long a collective may take, in seconds or as a timedelta; by default torch's own limit. It
            also limits the wait for the other ranks at the start (10 minutes by default).

    Raises:
        WorldError: the variables contradict each other, a port is taken, a GPU is missing, ranks did not arrive.

    Source: https://docs.pytorch.org/docs/stable/distributed.html#initialization
    """
    limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
    if dist.is_initialized():
        env = adopted_rank_env(os.environ, dist.get_rank(), dist.get_world_size())
        present = str(dist.get_backend())
        if backend is not None and backend != present:
            raise WorldError(
                f"rank {env.rank} of {env.world_size}: a process group with the backend {present} is open already, and "
                f"world() was asked for {backend}. Next: leave backend out to use the open one, or close it first."
            )
        # Opened without naming a backend, a group has one for each kind of device: "cpu:gloo,cuda:nccl".
        return World(env, _choose_device(env, dist.get_backend_config(), device), present, limit)
    env = read_rank_env(os.environ)
    chosen = _choose_device(env, backend, device)
    return World(env, chosen, backend or ("nccl" if chosen.type == "cuda" else "gloo"), limit)


class World:
    """One rank's view of all ranks; made by `world`, used in a ``with`` statement.

    The facts (``rank``, ``local_rank``, ``world_size``, ``local_world_size``, ``node``, ``node_count``, ``device``,
    ``backend``) never change. Entering opens the process group, leaving closes it, whatever ends the block.
    """

    def __init__(
        self, env: RankEnv, device: torch.device, backend: str, timeout: timedelta | None
    ) -> None:
        self._env = env
        self._device = device
        self._backend = backend
        self._timeout = timeout
        self._closing: ExitStack | None = None

    @property
    def rank(self) -> int:
        """This process's number among all ranks, from 0."""
        return self._env.rank

    @property
    def local_rank(self) -> int:
        """This process's number among the ranks of its node, from 0."""
        return self._env.local_rank

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return self._env.world_size

    @property
    def local_world_size(self) -> int:
        """The number of ranks on this node."""
        return self._env.local_world_size

    @property
    def node(self) -> int:
        """This node's number, from 0."""
        return self._env.node

    @property
    def node_count(self) -> int:
        """The number of nodes."""
        return self._env.node_count

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._device

    @property
    def backend(self) -> str:
        """The backend of torch.distributed that carries the collectives."""
        return self._backend

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes for all."""
        return self.rank == 0

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group of all ranks; there only while the world is open."""
        if not dist.is_initialized():
            raise WorldError(
                f"rank {self.rank} of {self.world_size}: the process group is not open. "
                "Next: use it inside `with rankstep.world() as world:`."
            )
        return dist.distributed_c10d._get_default_group()

    def local_batch(self, global_batch: int) -> int:
        """Return this rank's share of a global batch, in samples.

        Args:
            global_batch: samples that all ranks together take in one step.

        Raises:
            DataError: the ranks cannot share it evenly; the nearest sizes that they can are named.
        """
        share, rest = divmod(global_batch, self.world_size)
        if rest or share < 1:
            below, above = share * self.world_size, (share + 1) * self.world_size
            nearest = f"{below} or {above}" if below > 0 else f"{max(above, self.world_size)}"
            raise DataError(
                f"rank {self.rank}: a global batch of {global_batch} cannot be shared evenly by {self.world_size} ranks. "
                f"Next: take {nearest}."
            )
        return share

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0 only.

        Args:
            *values: what to print.
            **options: as for the built-in ``print``.
        """
        if self.is_main:
            print(*values, **options)  # noqa: T201

    def __enter__(self) -> Self:
        if self._closing is not None:
            raise WorldError(
                f"rank {self.rank} of {self.world_size}: this world is open already. "
                "Next: call world() again for an inner block; it adopts the open process group."
            )
        with ExitStack() as stack:
            if not dist.is_initialized():
                self._open(stack)
            self._closing = stack.pop_all()
        for tell in observers.on_open:
            tell()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        closing, self._closing = self._closing, None
        if closing is not None:
            closing.__exit__(kind, error, traceback)

    def __repr__(self) -> str:
        return (
            f"World(rank {self.rank} of {self.world_size}, local rank {self.local_rank} of {self.local_world_size}, "
            f"node {self.node} of {self.node_count}, device {self.device}, backend {self.backend}, "
            f"variables of {self._env.source})"
        )

    def _open(self, stack: ExitStack) -> None:
        stack.enter_context(_thread_share(self.local_world_size))
        stack.enter_context(gloo_interface(self._env))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        store = open_store(self._env, self._timeout or _JOIN_TIMEOUT)
        hook = sys.excepthook
        try:
            dist.init_process_group(
                self.backend,
                store=store,
                rank=self.rank,
                world_size=self.world_size,
                timeout=self._timeout,
                device_id=self.device if self.backend == "nccl" else None,
            )
        except (dist.DistError, ValueError) as error:
            raise WorldError(
                f"rank {self.rank} of {self.world_size}: the process group ({self.backend} on {self.device}) did not "
                f"open: {error}. Next: if the ranks cannot reach each other, name the network interface they share in "
                "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME."
            ) from error

        def close(_: object, error: BaseException | None, __: object) -> None:
            # sys.exit(0) at the end of a script is a clean end too.
            clean = error is None or (isinstance(error, SystemExit) and not error.code)
            if error is not None:
                # Closing makes other ranks fail: the launcher must know that this rank failed before them.
                with suppress(AttributeError, TypeError):
                    error.rankstep_failed_ns = time.monotonic_ns()  # type: ignore[attr-defined]
            for tell in observers.on_close:
                tell(None if clean else error)
            if clean:
                leave_store(store, self._env, _LEAVE_TIMEOUT)
                # init_process_group wraps the hook to prefix the rank; a second world would wrap it twice.
                sys.excepthook = hook
            _close_group(aborted=not clean)

        stack.push(close)


def _close_group(*, aborted: bool) -> None:
    if not dist.is_initialized():
        return
    if aborted and dist.get_backend() == "nccl":
        # A rank that leaves by an exception must not wait for collectives that its peers will never join.
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def _choose_device(
    env: RankEnv, backend: str | None, device: str | torch.device | None
) -> torch.device:
    if device is None:
        on_gpu = torch.cuda.is_available() and (backend is None or "nccl" in backend)
        chosen = torch.device("cuda" if on_gpu else "cpu")
    else:
        chosen = torch.device(device)
    if chosen.type != "cuda":
        if backend == "nccl":
            raise WorldError(
                f"rank {env.rank} of {env.world_size}: nccl works on GPUs, and this rank computes on {chosen}. "
                "Next: leave backend out, or see why torch.cuda.is_available() is False."
            )
        return chosen
    count = torch.cuda.device_count()
    if chosen == torch.device("cuda"):
        # No index given. SLURM and MPI often show each task only its own GPU, which then is number 0 whatever the local rank.
        own = count == 1 and env.source in {"slurm", "mpi"}
        chosen = torch.device("cuda", 0 if own else env.local_rank)
    if chosen.index >= count:
        raise WorldError(
            f"rank {env.rank} of {env.world_size}: there is no GPU number {chosen.index}; {env.local_world_size} ranks on "
            f"this node see {count}. Next: start as many ranks per node as it has GPUs, widen CUDA_VISIBLE_DEVICES, or "
            'use world(device="cpu").'
        )
    return chosen


@contextmanager
def _thread_share(local_world_size: int) -> Iterator[None]:
    """Give each rank its share of the cores, unless OMP_NUM_THREADS has decided."""
    if local_world_size == 1 or os.environ.get("OMP_NUM_THREADS"):
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads_per_rank(local_world_size))
    try:
        yield
    finally:
        torch.set_num_threads(before)
