"""A thread that carries collectives on while the rank computes."""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from rankstep.world import background

if TYPE_CHECKING:
    from collections.abc import Callable


class Courier:
    """Runs errands one after the other, in the order in which they were given; the first one starts the thread.

    An errand must not raise. The thread ends with ``owner``.

    Args:
        name: Of the thread, for people who look at a stuck process.
        owner: Whose errands these are.
    """

    def __init__(self, name: str, owner: Any) -> None:
        self._name = name
        self._errands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(owner, self._errands.put, None).atexit = False

    def send(self, errand: Callable[[], None]) -> None:
        """Run ``errand`` after all earlier ones."""
        # Another process after a fork has no such thread any more.
        if self._thread is None or not self._thread.is_alive():
            self._start()
        self._errands.put(errand)

    def _start(self) -> None:
        ready = threading.Event()
        # A thread that computes for the first time makes itself as many helpers as the process has threads. They would
        # take the cores from backward, so this one gets none; the setting is the process's, so it is put back.
        before = torch.get_num_threads()
        # What has been sent by then is still done.
        end = functools.partial(self._errands.put, None)
        self._thread = background.begin(self._name, _walk, (self._errands, ready), end)
        ready.wait()
        torch.set_num_threads(before)


def _walk(errands: queue.SimpleQueue[Callable[[], None] | None], ready: threading.Event) -> None:
    torch.set_num_threads(1)
    ready.set()
    while (errand := errands.get()) is not None:
        errand()
        del errand
