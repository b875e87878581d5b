"""The ranks of this host: the kernel tells at once when the process of one of them has ended."""

from __future__ import annotations

import os
import selectors
import signal
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from rankstep.doctor.channel import STORE_ERRORS
from rankstep.doctor.processes import Identity
from rankstep.doctor.report import Report, Standing

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankstep.doctor.channel import Channel

_TRIES = 10
_ASKED_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals by which a job is stopped: what a rank does then is no news."""


class Neighbours:
    """Watches the processes of the other ranks of this host.

    Args:
        channel: To learn who they are.
        selector: Calls this object when one ends.
        tell: Called with the report of a rank that has ended on its own, without a word, and not well.
    """

    def __init__(
        self,
        channel: Channel,
        selector: selectors.BaseSelector,
        tell: Callable[[Report], None],
    ) -> None:
        self._channel = channel
        self._selector = selector
        self._tell = tell
        self._unmet = _local_ranks(channel.rank, channel.world_size)
        self._tries = 0
        self._lock = threading.Lock()
        self._known: dict[int, Identity] = {}
        self._handles: dict[int, int] = {}
        self._reports: dict[int, Report] = {}

    @property
    def all_met(self) -> bool:
        """Whether there is nobody left to get to know."""
        return not self._unmet or self._tries >= _TRIES

    def meet(self) -> None:
        """Get to know those that have come by now; does nothing once all are known."""
        if not self.all_met:
            self._tries += 1
            for rank in self._get_to_know():
                self._watch(rank)

    def _get_to_know(self) -> list[int]:
        known = []
        with suppress(*STORE_ERRORS), self._lock:
            for rank in list(self._unmet):
                card = self._channel.card(rank)
                if card is not None:
                    self._unmet.remove(rank)
                    identity = Identity.of(card)
                    if identity.is_near and hasattr(os, "pidfd_open"):
                        self._known[rank] = identity
                        known.append(rank)
        return known

    def ended(self) -> list[Report]:
        """Those whose process has ended without success; for any thread."""
        self._get_to_know()
        for rank, identity in list(self._known.items()):
            if rank not in self._reports:
                self._note(rank, identity)
        return [self._reports[rank] for rank in sorted(self._reports)]

    def close(self) -> None:
        """Watch no more."""
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def _watch(self, rank: int) -> None:
        try:
            handle = os.pidfd_open(self._known[rank].pid)
        except OSError:
            self._heard(rank)
            return
        self._handles[rank] = handle
        self._selector.register(handle, selectors.EVENT_READ, partial(self._heard, rank))

    def _heard(self, rank: int) -> None:
        handle = self._handles.pop(rank, None)
        if handle is not None:
            self._selector.unregister(handle)
            os.close(handle)
        report = self._note(rank, self._known[rank])
        code = self._known[rank].end_code()
        if report is not None and (code is None or code not in _ASKED_TO_END):
            self._tell(report)

    def _note(self, rank: int, identity: Identity) -> Report | None:
        standing, detail = identity.look()
        if standing is not Standing.ENDED or identity.end_code() == 0:
            return None
        report = Report(rank, standing, detail=detail, pid=identity.pid, host=identity.host)
        return self._reports.setdefault(rank, report)


def _local_ranks(rank: int, world_size: int) -> set[int]:
    """Who is on this host, as launchers number their ranks; who is elsewhere is found out from its card."""
    try:
        local = int(os.environ["LOCAL_RANK"])
        size = int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return set()
    first = rank - local
    return {each for each in range(first, first + size) if 0 <= each < world_size} - {rank}
