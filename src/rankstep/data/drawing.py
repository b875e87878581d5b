"""Finds the DataLoader behind a sampler, so that what it hands out can be counted."""

from __future__ import annotations

import sys

from torch.utils.data.dataloader import _BaseDataLoaderIter

from rankstep.world.draws import Loader, keep

_FRAMES = 10
"""Between a DataLoader and its sampler stand a batch sampler and one or two methods of the loader."""


def note_loader(world_size: int, rank: int) -> Loader | None:
    """A sampler is asked for its first index: keep the pass of the DataLoader that asks.

    Args:
        world_size: To so many ranks the sampler deals.
        rank: To this one of them.

    Returns:
        None: something else asks.
    """
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        if frame.f_code.co_varnames[:1] == ("self",):
            asking = frame.f_locals.get("self")
            if isinstance(asking, _BaseDataLoaderIter):
                return keep(asking, world_size, rank)
    return None
