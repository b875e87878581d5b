"""How many CPU cores this process may use, and each rank's share of them."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def threads_per_rank(local_world_size: int) -> int:
    """Return how many CPU threads one rank should use so that the ranks of a host do not crowd each other.

    Args:
        local_world_size: the number of ranks on this host.
    """
    return max(1, usable_cores() // local_world_size)


def usable_cores() -> int:
    """Count the cores this process may run on, by its affinity and by its container's quota.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html (``cpu.max``)
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    with suppress(OSError, ValueError):
        quota, period = _QUOTA.read_text().split()
        # "max" instead of a quota means no limit, and is no number.
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)
