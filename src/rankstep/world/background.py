"""Threads that work beside the training thread, and that have ended before the interpreter does.

A thread that wants the interpreter while that shuts down is ended by force. If it is inside a call of torch or of a store
then, C++ aborts the whole process ("terminate called without an active exception"), and a training that went well ends with
134. So each such thread is asked to end, and waited for, while all is still there.
"""

from __future__ import annotations

import atexit
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 2.0
"""So long the end of the process is held up at most: a thread may be stuck in a call that nobody answers any more."""

_ends: dict[threading.Thread, Callable[[], object]] = {}
"""The threads that have not ended, and what asks each to."""


def begin(
    name: str, target: Callable[..., object], args: tuple[Any, ...], end: Callable[[], object]
) -> threading.Thread:
    """Start a thread.

    Args:
        name: Of the thread, for people who look at a stuck process.
        target: What it does.
        args: With what.
        end: Asks it to end soon, called from another thread at the end of the process; must not raise.
    """
    if not _ends:
        # What is registered later runs earlier, so whoever still needs the thread at the end has it.
        atexit.unregister(end_all)
        atexit.register(end_all)
    thread = threading.Thread(target=_run, args=(target, args), name=name, daemon=True)
    _ends[thread] = end
    thread.start()
    return thread


def _run(target: Callable[..., object], args: tuple[Any, ...]) -> None:
    try:
        target(*args)
    finally:
        # It may be held by what it asks to end.
        _ends.pop(threading.current_thread(), None)


def end_all() -> None:
    """Ask all threads to end, and wait for them."""
    # After a fork none of them is alive.
    threads = {thread: end for thread, end in list(_ends.items()) if thread.is_alive()}
    for end in threads.values():
        end()
    until = time.monotonic() + LIMIT_S
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))
