"""What happened in a step: the recorder, the arithmetic, and the reports.

``events.py`` is spoken by all folders below; the rest of this folder is loaded only when something is recorded or read.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rankstep._callable import make_callable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

    from rankstep.trace.recorder import Recorder


@contextmanager
def record(directory: str | PathLike[str], steps: str | None = None) -> Iterator[Recorder]:
    """Record what every wrapper does inside the ``with`` block; read it with ``rankstep trace DIRECTORY``.

    ``rankstep.trace(DIRECTORY)`` is the same.

    All ranks enter and leave together. Wrappers made before and inside the block are recorded. If recording fails, it
    is switched off with a warning and training goes on. When ``RANKSTEP_TRACE`` records already, the block adds nothing.

    Args:
        directory: Gets one file per rank; made if it is not there.
        steps: Which synced backwards to record, ``"FIRST:LAST"`` counted from 0 and without LAST, as in a Python slice;
            None: all.

    Raises:
        TraceError: ``steps`` is no such text.
    """
    from rankstep.trace import recorder

    own = recorder.start(directory, steps)
    try:
        yield own
    finally:
        own.close()


make_callable(__name__, record)
