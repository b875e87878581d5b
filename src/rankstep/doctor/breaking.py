"""Break waits that no exception can reach: those inside torch's own collectives."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

_NEVER_SENT = 2**31 - 3
"""A tag that nobody sends with; another one than that of ``collectives/direct.py``."""


def break_groups() -> None:
    """Make every wait in torch's process groups fail, on this rank and on those that wait for it.

    A receive of gloo that runs into its limit closes all connections of its group. NCCL has a call for it.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        for kind in ("cpu", "cuda"):
            with contextlib.suppress(RuntimeError, ValueError, AttributeError):
                _break(group, group._get_backend(torch.device(kind)))


def _break(group: Any, backend: Any) -> None:
    if backend.name() == "nccl":
        backend.abort()
    elif backend.name() == "gloo" and group.size() > 1:
        peer = (group.rank() + 1) % group.size()
        backend.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
