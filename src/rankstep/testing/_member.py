"""The test's side of one rank: start its process, read its answers, show its stacks, end it."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankstep.testing._rank_process import FORKED_FOR, STACKS_SIGNAL, Rank, Start, serve
from rankstep.testing._wire import Packed, unpack
from rankstep.testing.outcomes import Outcome, Status

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection

_END_S = 5.0
_STACKS_S = 2.0


class Member:
    """One rank's process.

    Args:
        rank: Who it is.
        backend: Of its process group, or None.
        env: Changes to its environment.
        store_port: Where the test's store listens.
        group_timeout_s: Timeout of its process group, in seconds.
    """

    def __init__(
        self,
        rank: Rank,
        *,
        backend: str | None,
        env: Mapping[str, str | None],
        store_port: int,
        group_timeout_s: float,
    ) -> None:
        start_forkserver()
        self.rank = rank.rank
        context = multiprocessing.get_context("forkserver")
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        # Memory, not a file: nothing stays behind whoever is killed.
        self._stacks_fd = os.memfd_create(f"rankstep-stacks-{rank.rank}")
        start = Start(
            rank,
            backend,
            dict(env),
            store_port,
            f"/proc/{os.getpid()}/fd/{self._stacks_fd}",
            group_timeout_s,
        )
        self._process = context.Process(
            target=serve, args=(start, theirs), name=f"rankstep-rank-{rank.rank}"
        )
        self._process.start()
        theirs.close()

    @property
    def sentinel(self) -> int:
        """A handle that becomes ready when the process ends."""
        return self._process.sentinel

    @property
    def is_alive(self) -> bool:
        """Whether the process runs (a stopped one counts)."""
        return self._process.is_alive()

    def send(self, message: bytes) -> None:
        """Send a request; a dead rank is noticed when its answer is read."""
        try:
            self.connection.send_bytes(message)
        except OSError:
            self._process.join(_END_S)

    def signal(self, number: int) -> None:
        """Send a signal, and for one that ends the process wait until it has ended."""
        if self._process.pid is None:
            raise AssertionError("a member has been started")
        os.kill(self._process.pid, number)
        if number == signal.SIGKILL:
            self._process.join(_END_S)

    def read(self) -> Outcome:
        """Read the answer that is there, or tell how the process ended."""
        try:
            if self.connection.poll():
                outcome: Outcome = unpack(Packed(self.connection.recv_bytes(), {}))
                if isinstance(outcome.value, Packed):
                    return replace(outcome, value=unpack(outcome.value))
                return outcome
        except (EOFError, OSError):
            pass
        self._process.join(_END_S)
        code = self._process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}"
        return Outcome(
            self.rank,
            Status.DIED,
            error=f"its process ended by {how}",
            ended_ns=time.monotonic_ns(),
        )

    def hung(self, waited_s: float) -> Outcome:
        """Describe a rank that did not answer, with the stacks of all its threads."""
        state = self._state()
        return Outcome(
            self.rank,
            Status.HUNG,
            error=f"still running when the wait ended after {waited_s:.1f} s, process state {state}",
            # A stopped process runs no handler; asking it would only delay the test.
            traceback="" if state.startswith("T") else self._stacks(),
            ended_ns=time.monotonic_ns(),
        )

    def close(self) -> None:
        """Ask the process to end; `end` waits for it."""
        self.connection.close()

    def end(self, within_s: float) -> None:
        """Wait for the process to end by itself, then end it, and free all that was held for it."""
        self.connection.close()
        self._process.join(within_s)
        if self._process.is_alive():
            # SIGKILL also ends a stopped process, or one that holds SIGTERM back.
            self._process.kill()
            self._process.join()
        self._process.close()
        os.close(self._stacks_fd)

    def _state(self) -> str:
        try:
            lines = (
                Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8").split("\n")
            )
        except OSError:
            return "gone"
        return next(line.split("\t")[1] for line in lines if line.startswith("State:"))

    def _stacks(self) -> str:
        os.ftruncate(self._stacks_fd, 0)
        self.signal(STACKS_SIGNAL)
        until = time.monotonic() + _STACKS_S
        size, before = 0, -1
        # The handler writes line by line: take the text once it has stopped growing.
        while time.monotonic() < until and (size == 0 or size != before):
            time.sleep(0.05)
            before, size = size, os.fstat(self._stacks_fd).st_size
        text = os.pread(self._stacks_fd, size, 0).decode(errors="replace").strip("\0\n")
        return text or "(no stacks: the process did not answer the signal)"


def start_forkserver() -> None:
    """Start the process that forks the ranks, with all slow imports done, unless it runs already."""
    # pytest's own modules too, where they are used: test files import them.
    also = [name for name in ("pytest", "hypothesis") if name in sys.modules]
    multiprocessing.set_forkserver_preload(["rankstep.testing._preload", *also])
    ours = {FORKED_FOR: str(os.getpid()), "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def helper_pids() -> frozenset[int]:
    """Name the processes that multiprocessing keeps for the pools: they outlive them and end with this process."""
    server: Any = multiprocessing.forkserver._forkserver
    tracker: Any = multiprocessing.resource_tracker._resource_tracker
    return frozenset(pid for pid in (server._forkserver_pid, tracker._pid) if pid is not None)
