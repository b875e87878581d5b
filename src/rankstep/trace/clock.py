"""One clock for all ranks: how far this rank's ``time.perf_counter_ns`` is from rank 0's, and how sure that is.

On one Linux host all processes read the same monotonic clock, so the offset is 0 exactly; a host is known by its boot
and its time namespace. Between hosts one rank of each asks rank 0 for its time over the group's store, some times. The
answer was given between question and answer, so each round bounds the offset from both sides, and so do all rounds
together; the middle is taken, and half the width is the error. (Cristian, "Probabilistic clock synchronization", 1989.)

No collective is used: a rank that does not record answers no question, and the others give up after ``PATIENCE_S``
instead of hanging.
"""

from __future__ import annotations

import os
import platform
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 16
PATIENCE_S = 10.0
_LIMIT = timedelta(seconds=PATIENCE_S)


@dataclass(frozen=True, slots=True)
class Alignment:
    """This rank's clock against rank 0's.

    Attributes:
        offset_ns: To be subtracted from this rank's times.
        error_ns: The offset may be wrong by so much; None: the ranks could not compare their clocks.
        run: The same text on all ranks that record together; empty if they could not agree.
    """

    offset_ns: int
    error_ns: int | None
    run: str


def identity() -> str:
    """Name the clock that this process reads: equal texts, equal clocks."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return f"{platform.node()} {os.getpid()}"


def align(
    group: dist.ProcessGroup, session: str, now: Callable[[], int] = time.perf_counter_ns
) -> Alignment:
    """Compare this rank's clock with that of the group's rank 0; all ranks of the group call it.

    Args:
        group: The ranks that record together.
        session: Tells this comparison from earlier ones in the same store; the same on all ranks.
        now: The clock, in nanoseconds.
    """
    token = uuid.uuid4().hex
    if group.size() == 1:
        return Alignment(0, 0, token)
    try:
        store = dist.distributed_c10d._get_process_group_store(group)
        return _Comparison(store, group.rank(), group.size(), session, now).align(token)
    except (RuntimeError, KeyError, ValueError):
        # A group without a store, a rank that does not record, a store that is gone.
        return Alignment(0, None, "")


class _Comparison:
    """One comparison over a store; keys are below ``rankstep/trace/SESSION``."""

    def __init__(
        self, store: Any, rank: int, size: int, session: str, now: Callable[[], int]
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._prefix = f"rankstep/trace/{session}"
        self._now = now

    def align(self, token: str) -> Alignment:
        if self._rank == 0:
            self._set("run", token)
        self._set(f"clock/{self._rank}", identity())
        run, *clocks = self._get("run", *(f"clock/{rank}" for rank in range(self._size)))
        leaders = sorted({clocks.index(clock) for clock in clocks} - {0})
        own = clocks.index(clocks[self._rank])
        if self._rank == 0:
            for leader in leaders:
                self._answer(leader)
        if own == 0:
            return Alignment(0, 0, run)
        if own == self._rank:
            low, high = self._ask()
            self._set(f"offset/{own}", f"{(low + high) // 2} {(high - low + 1) // 2}")
        offset, error = map(int, self._get(f"offset/{own}")[0].split())
        return Alignment(offset, error, run)

    def _answer(self, leader: int) -> None:
        for number in range(ROUNDS):
            self._get(f"ask/{leader}/{number}")
            self._set(f"answer/{leader}/{number}", str(self._now()))

    def _ask(self) -> tuple[int, int]:
        """Bounds of this clock minus rank 0's."""
        lows, highs = [], []
        for number in range(ROUNDS):
            asked = self._now()
            self._set(f"ask/{self._rank}/{number}", "")
            theirs = int(self._get(f"answer/{self._rank}/{number}")[0])
            lows.append(asked - theirs)
            highs.append(self._now() - theirs)
        return max(lows), min(highs)

    def _set(self, key: str, value: str) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def _get(self, *keys: str) -> list[str]:
        full = [f"{self._prefix}/{key}" for key in keys]
        self._store.wait(full, _LIMIT)
        return [value.decode() for value in self._store.multi_get(full)]
