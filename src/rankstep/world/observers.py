"""Who wants to know of the world's beginning and end: the guard puts itself here, so that nothing below has to know it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

on_open: list[Callable[[], None]] = []
"""Called once the process group is open, whether ``world()`` has opened or adopted it; must not raise."""

on_close: list[Callable[[BaseException | None], None]] = []
"""Called before the group that ``world()`` opened is closed, with what ends the block; must not raise."""

in_wait: list[Callable[[], None]] = []
"""Called now and then by waits on the store; raises if the wait can never end."""
