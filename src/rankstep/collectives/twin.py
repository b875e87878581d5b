"""A second group of the same ranks, so that collectives of different parts of a program never meet out of order.

Collectives of one group must start in the same order on every rank. Buckets leave when their gradients happen to be
ready, and that may differ between ranks (a branch that one of them did not take), so what else runs in forward and
backward must not share their group. A twin belongs to one purpose, is made when it is first needed, and is told apart
by a key in the group's own store: only its members take part in making it, whatever groups other ranks have.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rankstep.collectives.c10d import C10dCommunicator

if TYPE_CHECKING:
    from datetime import timedelta

_twins: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], C10dCommunicator]] = (
    weakref.WeakKeyDictionary()
)


def twin_of(group: Any, purpose: str, device: torch.device) -> C10dCommunicator:
    """The communicator of the same ranks that belongs to ``purpose``; the first call is collective and makes it.

    Args:
        group: The group whose ranks are meant.
        purpose: Each has a twin of its own.
        device: What it shall carry: tensors of a GPU go by NCCL if the group does that, all others by gloo.

    Returns:
        A communicator over a group that torch.distributed never hears of and that lives as long as ``group``. Over
        ``group`` itself where no twin can be made: it is written in Python, or its backend is another one.
    """
    kept = _twins.setdefault(group, {})
    key = (purpose, device.type)
    if key not in kept:
        twin = _made(group, purpose, device)
        if twin is None:
            return C10dCommunicator(group)
        kept[key] = C10dCommunicator(twin, known_as=group)
    return kept[key]


def store_of(group: Any) -> Any:
    """The group's own store; None if it has none (it is written in Python)."""
    try:
        return dist.distributed_c10d._get_process_group_store(group)
    except (KeyError, ValueError):
        return None


def _made(group: Any, purpose: str, device: torch.device) -> Any:
    store = store_of(group)
    if store is None:
        return None
    backends = {kind: backend_of(group, kind) for kind in ("cpu", "cuda")}
    mine = backends.get(device.type)
    kind = mine.name() if mine is not None else {"cpu": "gloo"}.get(device.type)
    if kind not in ("gloo", "nccl"):
        return None
    rank, size = group.rank(), group.size()
    place = f"rankstep/twin/{purpose}/{device.type}"
    # The number lives in the store, so that after a restart all ranks count from the same place.
    number = store.add(f"{place}/{rank}", 1)
    own = dist.PrefixStore(f"{place}/{number}", store)  # type: ignore[attr-defined]
    timeout = timeout_of(group)
    if kind == "gloo":
        return dist.ProcessGroupGloo(own, rank, size, timeout=timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(own, rank, size, options)


def backend_of(group: Any, kind: str) -> Any:
    """The group's backend for tensors on ``kind``; None if it has none."""
    try:
        return group._get_backend(torch.device(kind))
    except (RuntimeError, AttributeError):
        return None


def timeout_of(group: Any) -> timedelta:
    """How long a collective of the group may take; torch's default where the group does not say."""
    for backend in (backend_of(group, kind) for kind in ("cpu", "cuda")):
        limit: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
        if limit is not None:
            return limit
    return dist.default_pg_timeout
