"""Who wants to know of new wrappers: the recorder puts itself here, so that nothing below has to know it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankstep.parallel.ddp import DistributedDataParallel

on_wrap: list[Callable[[DistributedDataParallel], None]] = []
"""Called with each wrapper once it is connected."""
