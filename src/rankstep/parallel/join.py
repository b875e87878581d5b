"""Uneven inputs under torch's ``Join``: a rank that has run out shadows the collectives of the others.

Source: https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.algorithms.join import JoinHook

from rankstep.buckets.trailer import Mode
from rankstep.errors import ModelError

if TYPE_CHECKING:
    from rankstep.collectives import Communicator
    from rankstep.parallel.ddp import DistributedDataParallel


def highest(value: int, comm: Communicator, device: torch.device) -> int:
    """The highest of all ranks' values; a plain all-gather, so that every backend can do it."""
    mine = torch.tensor([value], dtype=torch.int64, device=device)
    parts = [torch.empty_like(mine) for _ in range(comm.world_size)]
    comm.all_gather(parts, mine).wait()
    return max(int(part.item()) for part in parts)


class ShadowHook(JoinHook):
    """What a rank does for the others once it has run out of inputs.

    Args:
        ddp: The wrapper.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        super().__init__()
        if ddp.reducer.sharding is not None:
            raise ModelError(
                "a rank that has run out under join takes no optimizer steps, and with a ShardedOptimizer its share of the "
                "parameters would stand still. Use rankstep.together(loader, model), with which all ranks take every step"
            )
        self._ddp = ddp

    def main_hook(self) -> None:
        """Shadow one iteration: buffers, the question whether gradients are synced, and the buckets with zeros."""
        ddp = self._ddp
        ddp._sync_buffers_before_forward(live=False)
        syncs = ddp._anyone_syncs(live=False)
        ddp.require_forward_param_sync = syncs
        if syncs:
            ddp.reducer.settle_nothing(Mode.JOINED)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give every rank the weights of one that was there to the end."""
        ddp = self._ddp
        comm = ddp.reducer.comm
        ddp._authoritative_rank = highest(comm.rank if is_last_joiner else -1, comm, ddp.device)
        ddp._copy_state_from(ddp._authoritative_rank)
        ddp.reducer.exchange.divides_by_live = False
