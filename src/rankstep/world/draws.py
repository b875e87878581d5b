"""Who deals this rank its batches: samplers put their loaders here, so that reducers need not know of data.

A rank that leaves out a whole step is where the others are by every count of reductions. Its loader knows better: it has
been drawn from once more than theirs.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

_numbers = itertools.count()


class Loader:
    """One pass of a DataLoader over a sampler that deals to the ranks.

    Args:
        iterator: The DataLoader's own, which counts what it hands out.
        world_size: To so many ranks the sampler deals.
        rank: To this one of them.

    Attributes:
        number: Tells passes apart.
        thread: The thread that draws; 0: several do, in the background, so that counts at one moment mean little.
    """

    __slots__ = ("_iterator", "number", "place", "thread")

    def __init__(self, iterator: Any, world_size: int, rank: int) -> None:
        self._iterator = weakref.ref(iterator)
        self.place = (world_size, rank)
        self.number = next(_numbers)
        self.thread = threading.get_ident()

    def drawn(self) -> int | None:
        """Batches handed out so far; None: the pass is over."""
        iterator = self._iterator()
        return None if iterator is None else iterator._num_yielded

    def is_of(self, iterator: Any) -> bool:
        """Whether it is a pass of this iterator's; one that keeps its workers makes many."""
        return self._iterator() is iterator


loaders: list[Loader] = []
"""The passes under way, and some that are over."""


def keep(iterator: Any, world_size: int, rank: int) -> Loader:
    """Take in a pass that begins; the arguments are those of :class:`Loader`."""
    loader = Loader(iterator, world_size, rank)
    # Replaced in one go: a reducer in another thread may be reading.
    loaders[:] = [
        *(known for known in loaders if known.drawn() is not None and not known.is_of(iterator)),
        loader,
    ]
    return loader
