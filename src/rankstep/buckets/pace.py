"""How many batches this rank has drawn since the last reduction, where that can be known.

A rank that leaves out a whole step goes on like the others, one batch ahead: every count of forwards, backwards and steps
is theirs, the mean is one of as many batches as ever, and at the end it leaves a step before them. Only its DataLoader
has handed out one batch more.

Note [When a draw is evidence]
    Nothing must be said of loaders that ranks may rightly use on their own: one that only evaluates, one that is begun
    anew in this step, one that a thread draws from ahead of time. So a loader counts once it has been drawn from for two
    reductions running, and a step in which another one was drawn from, too, says nothing.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from typing import TYPE_CHECKING

from rankstep.buckets.trailer import Mode
from rankstep.errors import SkippedBatchWarning
from rankstep.world.draws import loaders

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankstep.buckets.trailer import Row

_MOST = 1000
"""As many digits travel; more batches in one step are no evidence."""


class Pace:
    """One wrapper's look at the loaders of this rank, made in the thread that trains.

    Args:
        world_size: Of the wrapper's ranks.
        rank: This one.
    """

    def __init__(self, world_size: int, rank: int) -> None:
        self._place = (world_size, rank)
        self._thread = threading.get_ident()
        # For each pass: what it had handed out at the last reduction, and whether it had grown since the one before.
        self._seen: dict[int, tuple[int, bool]] = {}
        self._told = False

    def drawn(self) -> int:
        """Batches drawn since the last reduction; 0: that is not known for sure."""
        if not loaders:
            self._seen = {}
            return 0
        total, sure = 0, True
        seen: dict[int, tuple[int, bool]] = {}
        for loader in loaders:
            if loader.place != self._place or (count := loader.drawn()) is None:
                continue
            before, steady = self._seen.get(loader.number, (0, False))
            grown = count - before
            seen[loader.number] = (count, grown > 0)
            if grown > 0:
                total += grown
                sure = sure and steady and loader.thread == self._thread
        self._seen = seen
        return total if sure and total <= _MOST else 0

    def compare(self, rows: Sequence[Row], rank: int, step: int) -> None:
        """Warn, once, if a rank has drawn more batches for this step than the others.

        Args:
            rows: What each rank said.
            rank: Of the reader, for the message.
            step: Which synced backward, counted from 0.
        """
        if self._told:
            return
        drawn = {r: row.drawn for r, row in enumerate(rows) if row.drawn and row.mode == Mode.SYNC}
        counts = Counter(drawn.values())
        if len(counts) < 2:
            return
        self._told = True
        usual, many = counts.most_common(1)[0]
        if 2 * many <= len(drawn):
            # As many on one side as on the other: leaving one out takes one more.
            usual = min(counts)
        odd = [r for r, count in drawn.items() if count != usual]
        shown = "; ".join(f"rank {r} drew {drawn[r]}" for r in odd[:8])
        warnings.warn(
            f"rank {rank}: the ranks have drawn different numbers of batches for step {step} (counted from 0): {shown}; the "
            f"others {usual}. A rank that leaves a batch out (`continue`?) without the others averages its next ones with "
            "their earlier ones, and runs out of data before them. Leave it out on all ranks together (rankstep.agree), "
            "or take the loop from rankstep.together. This is told once.",
            SkippedBatchWarning,
            stacklevel=2,
        )
