"""A pool of living ranks: real processes with an open process group, started once and used by many tests.

In a test, through the ``ranks`` fixture::

    from rankstep.testing import Rank


    def sum_of_ranks(me: Rank, scale: int) -> torch.Tensor:
        tensor = torch.full((2,), float(me.rank * scale), device=me.device)
        torch.distributed.all_reduce(tensor)
        return tensor


    def test_all_ranks_see_the_sum(ranks):
        first, second = ranks(2).run(sum_of_ranks, scale=3)
        assert torch.equal(first, second)

The function must stand at the top level of a module or test file. It runs with warnings as errors, the same seed on all
ranks and one thread; what it returns comes back by rank, tensors as CPU copies. Errors, deaths and hangs of ranks come as
one `RankFailure`; a test that wants them asks for `RankPool.outcomes` instead::

    first, second = ranks(2).outcomes(raises_on_rank_1)
    assert second.is_a(ValueError)
    assert "names the cause" in second.error

To kill a rank in the middle: ``call = pool.start(...)``, ``pool.kill(1, signal.SIGKILL)``, ``call.outcomes()``.
Functions that open and close process groups themselves take a pool without one: ``ranks(2, backend=None)``; the
environment is torchrun's.
"""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rankstep.testing._member import Member
from rankstep.testing._rank_process import LOOPBACK, Rank, Request
from rankstep.testing._wire import pack
from rankstep.testing.outcomes import Outcome, RankFailure, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

P = ParamSpec("P")
R = TypeVar("R")

# After one rank failed the others mostly wait for it in a collective; this is long enough for those that fail too.
GRACE_S = 3.0
_END_S = 5.0
_KEPT_POOLS = 2

_started: weakref.WeakSet[RankPool] = weakref.WeakSet()
_kept: dict[tuple[int, str | None, str], RankPool] = {}


class RankPool:
    """Living ranks that run one function after the other.

    They start at the first use, and again after a failure, because a group that missed part of a collective cannot be
    trusted. Start a pool in a thread that outlives it (the main one): Linux ends the ranks with the thread that started
    them. A pool belongs to one thread.

    Args:
        world_size: How many ranks.
        backend: Of the default process group. None opens none, for functions that open their own by ``env://``.
        device: ``"cpu"``, or ``"cuda"`` to deal the GPUs to the ranks in turn (ranks may share one).
        env: Variables to set (or, if None, to unset) in every rank before it joins. What a library reads while torch
            is imported is read already.
        timeout_s: After how many seconds a call counts as hung.
        group_timeout_s: Timeout of the process group, in seconds. By default twice ``timeout_s``, so that a hang shows
            as the stacks of all ranks and not as the timeout of one.
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str | None = "gloo",
        device: str = "cpu",
        env: Mapping[str, str | None] | None = None,
        timeout_s: float = 60.0,
        group_timeout_s: float | None = None,
    ) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._backend = backend
        self._device = device
        self._env = dict(env or {})
        self._group_timeout_s = 2 * timeout_s if group_timeout_s is None else group_timeout_s
        self._members: list[Member] = []
        self._store: TCPStore | None = None
        self._call: Call[Any] | None = None

    def run(
        self, function: Callable[Concatenate[Rank, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Call ``function(rank, *args, **kwargs)`` on every rank and return the results by rank.

        Raises:
            RankFailure: A rank raised, died or hung. Once one has failed, the others get `GRACE_S` seconds to end.
            TypeError: The function or an argument cannot be found by name in another process.
        """
        return self.start(function, *args, **kwargs).results()

    def outcomes(
        self,
        function: Callable[Concatenate[Rank, ...], Any],
        *args: Any,
        reusable: bool = False,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> list[Outcome]:
        """Do as `run` but return what became of each rank and raise nothing, for tests of errors.

        Args:
            function: What to run.
            args: For the function.
            reusable: The ranks stay in step although some raise, so the pool can be kept as it is.
            timeout_s: Instead of the pool's, for this call.
            kwargs: For the function.
        """
        call = self.start(function, *args, **kwargs)
        return call.outcomes(reusable=reusable, timeout_s=timeout_s)

    def start(
        self, function: Callable[Concatenate[Rank, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Call[R]:
        """Do as `run` but return at once; between this and the call's results a test can `kill` a rank."""
        call_bytes = pack((function, args, kwargs))
        self._ensure_started()
        if self._backend is None or self._store is None:
            # Groups that functions open must not meet keys of earlier ones.
            self._store = _open_store()
        request = pack(Request(call_bytes, list(sys.path), self._store.port)).payload
        for member in self._members:
            member.send(request)
        self._call = Call(self, self._members)
        return self._call

    def kill(self, rank: int, signal: int) -> None:
        """Send a signal to a rank, to end it (SIGKILL), stop it (SIGSTOP) or let it go on (SIGCONT)."""
        self._members[rank].signal(signal)

    def close(self) -> None:
        """End all ranks and wait for them. A closed pool starts again at the next use."""
        self._end(_END_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        """Whether ranks are alive, waiting for the next call."""
        return bool(self._members)

    @property
    def port(self) -> int | None:
        """The port on which the pool's store listens in this process."""
        return None if self._store is None else self._store.port

    def _ensure_started(self) -> None:
        abandoned = self._call is not None
        if self._members and not abandoned and all(member.is_alive for member in self._members):
            return
        self._end(0.0)
        if not _started:
            atexit.register(_close_all)
        _started.add(self)
        self._store = _open_store()
        try:
            for rank in range(self.world_size):
                member = Member(
                    Rank(rank, self.world_size, _device(self._device, rank)),
                    backend=self._backend,
                    env=self._env,
                    store_port=self._store.port,
                    group_timeout_s=self._group_timeout_s,
                )
                self._members.append(member)
            Call[None](self, self._members).results()
        except BaseException:
            self._end(0.0)
            raise

    def _finished(self, *, usable: bool) -> None:
        self._call = None
        if not usable:
            self._end(0.0)

    def _end(self, within_s: float) -> None:
        members, self._members = self._members, []
        self._call = None
        for member in members:
            member.close()
        until = time.monotonic() + within_s
        for member in members:
            member.end(max(0.0, until - time.monotonic()))
        self._store = None


class Call(Generic[R]):
    """A function that the ranks are running; ask once for its `results` or `outcomes`."""

    def __init__(self, pool: RankPool, members: list[Member]) -> None:
        self._pool = pool
        self._members = members

    def results(self) -> list[R]:
        """Wait and return the results by rank, as `RankPool.run`."""
        outcomes = self._wait(self._pool.timeout_s, GRACE_S)
        failed = any(outcome.status is not Status.OK for outcome in outcomes)
        self._pool._finished(usable=not failed)
        if failed:
            raise RankFailure(outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(self, *, reusable: bool = False, timeout_s: float | None = None) -> list[Outcome]:
        """Wait and return what became of each rank, as `RankPool.outcomes`."""
        timeout_s = self._pool.timeout_s if timeout_s is None else timeout_s
        outcomes = self._wait(timeout_s, timeout_s)
        statuses = {outcome.status for outcome in outcomes}
        alive = statuses <= {Status.OK, Status.RAISED}
        self._pool._finished(usable=statuses == {Status.OK} or (reusable and alive))
        return outcomes

    def _wait(self, timeout_s: float, grace_s: float) -> list[Outcome]:
        began = time.monotonic()
        until = began + timeout_s
        waiting = {member.rank: member for member in self._members}
        outcomes: dict[int, Outcome] = {}
        while waiting and (left := until - time.monotonic()) > 0:
            handles = [(m.connection, m.sentinel) for m in waiting.values()]
            ready = set(wait([handle for pair in handles for handle in pair], left))
            for member in list(waiting.values()):
                if not ready.isdisjoint((member.connection, member.sentinel)):
                    outcome = outcomes[member.rank] = member.read()
                    del waiting[member.rank]
                    if outcome.status is not Status.OK:
                        until = min(until, time.monotonic() + grace_s)
        waited_s = time.monotonic() - began
        for member in waiting.values():
            outcomes[member.rank] = member.hung(waited_s)
        return [outcomes[rank] for rank in sorted(outcomes)]


def get_pool(world_size: int, *, backend: str | None = "gloo", device: str = "cpu") -> RankPool:
    """Return the shared pool of this kind; at most two are kept alive, the least recently used one is closed."""
    key = (world_size, backend, device)
    pool = _kept.pop(key, None) or RankPool(world_size, backend=backend, device=device)
    _kept[key] = pool
    while len(_kept) > _KEPT_POOLS:
        _kept.pop(next(iter(_kept))).close()
    return pool


def close_pools() -> None:
    """Close the shared pools."""
    while _kept:
        _kept.popitem()[1].close()


def kept_ports() -> frozenset[int]:
    """Name the ports on which the shared pools listen, for guards against leaked sockets."""
    return frozenset(pool.port for pool in _kept.values() if pool.port is not None)


def _close_all() -> None:
    for pool in list(_started):
        pool.close()


def _open_store() -> TCPStore:
    return TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)


def _device(kind: str, rank: int) -> torch.device:
    if kind == "cuda":
        return torch.device("cuda", rank % torch.cuda.device_count())
    return torch.device(kind)
