"""What this rank has started in a lane, to be held against what the others have when a wait takes long.

Messages that do not belong together never meet, because their tags depend on what they are part of. So ranks that exchange
different things wait for each other, and find out here.
"""

from __future__ import annotations

import collections
import json
import zlib
from typing import TYPE_CHECKING, Any

from rankstep.collectives.twin import store_of
from rankstep.errors import RankSkewError

if TYPE_CHECKING:
    from collections.abc import Sequence

KEPT = 64
"""So many collectives back: more are hardly ever under way."""

_MARKS = 2**14 - 1


class Ledger:
    """One rank's list of what it started in a lane.

    Args:
        group: The process group in whose store the ranks compare.
        name: Of the lane, different for each lane of the group.
        members: The group ranks that share the lane, in the lane's order.
        rank: This rank's place among them.
    """

    def __init__(self, group: Any, name: str, members: Sequence[int], rank: int) -> None:
        self._store = store_of(group)
        self._members = list(members)
        self._rank = rank
        self._started: collections.deque[tuple[int, str]] = collections.deque(maxlen=KEPT)
        self._count = 0
        place = f"rankstep/lane/{name}"
        # The number lives in the store, so that after a restart nobody reads what was left there.
        self._place = f"{place}/{self._store.add(f'{place}/{members[rank]}', 1)}"

    def enter(self, what: str) -> int:
        """Note a collective that starts, and return a mark of 14 bits that depends on what it is.

        Args:
            what: For people, with everything that must be equal on all ranks.
        """
        self._started.append((self._count, what))
        self._count += 1
        return zlib.crc32(what.encode()) % _MARKS

    def compare(self) -> None:
        """A wait takes long: tell what this rank has started, and look what the others have.

        Raises:
            RankSkewError: Two ranks have started different things in the same place.
        """
        mine = {str(number): what for number, what in list(self._started)}
        try:
            self._store.set(self._key(self._rank), json.dumps(mine))
            told = {
                other: json.loads(self._store.get(self._key(other)))
                for other in range(len(self._members))
                if other != self._rank and self._store.check([self._key(other)])
            }
        except RuntimeError:
            return  # where the store has gone, the connections break, too
        for other, theirs in told.items():
            for number, what in mine.items():
                if theirs.get(number, what) != what:
                    me, peer = self._members[self._rank], self._members[other]
                    raise RankSkewError(
                        f"rank {me}: the ranks exchange different things: this rank {what}, rank {peer} {theirs[number]}. "
                        "Some rank skipped, repeated or reordered a collective, or has tensors of other sizes; every rank "
                        "must take the same."
                    )

    def _key(self, rank: int) -> str:
        return f"{self._place}/{self._members[rank]}"
