"""Decisions that must come out the same on every rank, and work that one rank does before the others."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch import distributed as dist

from rankstep.errors import WorldError
from rankstep.world import observers
from rankstep.world.env import adopted_rank_env

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._C._distributed_c10d import Store

# Seconds between looks at the store while waiting, and between notes that the wait goes on.
_LOOK_EVERY = 0.05
_NOTE_EVERY = 30.0


def agree(flag: bool, how: Literal["any", "all"] = "any") -> bool:
    """Return one decision for all ranks: whether any, or every, rank's flag is true.

    For early stopping, stop requests and the like, where ranks that decide alone drift apart and then wait for each
    other for ever. Every rank must call it. Without a process group it returns the flag.

    Args:
        flag: what this rank would decide.
        how: ``"any"``: one rank's true is enough; ``"all"``: every rank must say true.

    Raises:
        WorldError: ``how`` is neither.
    """
    if how not in ("any", "all"):
        raise WorldError(
            f'agree() knows how="any" and how="all", not {how!r}. Next: choose one of them.'
        )
    if not dist.is_initialized():
        return bool(flag)
    device = dist.distributed_c10d._get_object_coll_device()
    # nccl's group knows only "cuda": the GPU that this rank has made current.
    vote = torch.tensor([int(flag)], dtype=torch.int32, device=device)
    dist.all_reduce(vote, op=dist.ReduceOp.MAX if how == "any" else dist.ReduceOp.MIN)
    return bool(vote.item())


@contextmanager
def rank_zero_first(*, local: bool = False) -> Iterator[None]:
    """Run a block on rank 0 first, and on the other ranks when it has succeeded there.

    For downloads, preprocessing and compilation that one rank does and all then use. The wait is on the store, not in
    a collective, so no time-out ends it; a note on stderr every 30 seconds says that it goes on. Every rank must
    enter the block. Without a process group it runs at once.

    Args:
        local: let the first rank of each node go first, for files on disks that nodes do not share.

    Raises:
        WorldError: on the waiting ranks, when the block failed on the first one; names that rank and its exception.
        SyncError: the guard has found that this wait can never end; says why.
    """
    if not dist.is_initialized():
        yield
        return
    env = adopted_rank_env(os.environ, dist.get_rank(), dist.get_world_size())
    store = dist.distributed_c10d._get_default_store()
    # The number of this call lives in the store, so that a new group starts anew on all ranks.
    call = store.add(f"rankstep/first/calls/{env.rank}", 1)
    place = f"node {env.node}" if local else "all"
    key = f"rankstep/first/{call}/{place}"
    waiting = (env.local_world_size if local else env.world_size) - 1
    if (env.local_rank if local else env.rank) == 0:
        outcome = {"rank": env.rank, "error": ""}
        try:
            yield
        except BaseException as error:
            outcome["error"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            if waiting:
                store.set(key, json.dumps(outcome))
        return
    outcome = _wait(store, key, env.rank)
    if store.add(f"{key}/read", 1) == waiting:
        store.delete_key(key)
        store.delete_key(f"{key}/read")
    if outcome["error"]:
        raise WorldError(
            f"rank {env.rank}: rank {outcome['rank']} went first in rank_zero_first() and failed there with "
            f"{outcome['error']}. Next: see the traceback of rank {outcome['rank']}."
        )
    yield


def _wait(store: Store, key: str, rank: int) -> dict[str, object]:
    start = noted = time.monotonic()
    try:
        while not store.check([key]):
            time.sleep(_LOOK_EVERY)
            for ask in observers.in_wait:
                ask()
            now = time.monotonic()
            if now - noted >= _NOTE_EVERY:
                noted = now
                note = f"rank {rank}: waiting in rank_zero_first() for {now - start:.0f} s\n"
                sys.stderr.write(note)
                sys.stderr.flush()
        outcome: dict[str, object] = json.loads(store.get(key))
    except dist.DistError as error:
        raise WorldError(
            f"rank {rank}: the ranks' store went away while this rank waited in rank_zero_first() "
            f"({str(error).partition(chr(10))[0]}). Next: see why the rank or launcher that hosts it has ended."
        ) from error
    return outcome
