"""Where the ranks of a loop over data meet once per iteration, and learn who has a batch and who is gone.

Note [Leaving]
    A rank that leaves its loop must not wait for the others, who may stand in the middle of a backward, and must not
    start a collective that nobody will join: a gloo group with an unfinished collective cannot be closed. So it leaves a
    note in the group's store. Whoever of the others waits for long, here or in any other collective of the group, looks
    for notes about the loops that it is in (``lookout.py``). If all ranks leave, nobody ever reads the notes.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from rankstep.collectives.failures import naming_failure
from rankstep.collectives.lookout import also_ask
from rankstep.collectives.twin import store_of, twin_of
from rankstep.errors import RankSkewError, SyncError

_ADVICE = (
    "Leave a loop on all ranks in the same step: rankstep.agree(flag) makes one decision of many."
)


class Seat(enum.IntEnum):
    """What a rank brings to an iteration: a batch, an empty one, nothing it could make one of, or its loader's error."""

    HAS = 1
    OUT = 2
    UNABLE = 3
    FAILED = 4


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands: in which loop of the program, counted from 1, before which step of it, counted from 0."""

    loop: int
    step: int

    def __str__(self) -> str:
        return f"step {self.step} of loop {self.loop}"


class RoundTable:
    """One process group's table; see :func:`table_of`.

    Args:
        group: The ranks.

    Attributes:
        rank: This process's number in the group.
        world_size: How many sit at the table.
    """

    def __init__(self, group: Any) -> None:
        self.rank: int = group.rank()
        self.world_size: int = group.size()
        # Always the host's: an agreement must not stall a GPU's stream.
        self._comm = twin_of(group, "together", torch.device("cpu"))
        self._store = store_of(group)
        self._loops = 0
        self._open: set[int] = set()
        self._notes: list[str] = []
        self._broken = ""
        also_ask(group, self)

    def open(self) -> int:
        """Begin a loop; returns its number, the same on all ranks.

        Raises:
            RankSkewError: An earlier loop has ended in disagreement.
        """
        if self._broken:
            raise RankSkewError(self._broken)
        self._loops += 1
        self._open.add(self._loops)
        return self._loops

    def close(self, loop: int) -> None:
        """End a loop, however it ended."""
        self._open.discard(loop)

    def meet(self, place: Place, seat: Seat) -> list[Seat]:
        """Say what this rank has for the coming step, and learn it of all.

        Raises:
            RankSkewError: Another rank has left the loop, or stands at another place; on every rank that waits.
            CommunicationError: A rank has ended.
        """
        mine = torch.tensor([seat, place.loop, place.step], dtype=torch.int64, device="cpu")
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        try:
            key = f"together/{place.loop}/{place.step}"
            with naming_failure(self._comm, key, f"the ranks' agreement before {place}"):
                self._comm.all_gather(rows, mine).wait()
            told = [row.tolist() for row in rows]
            self._compare([Place(loop, step) for _, loop, step in told])
        except SyncError as error:
            # Nobody can meet here any more.
            self._broken = str(error)
            raise
        while self._notes:  # of loops that all ranks have left
            self._store.delete_key(self._notes.pop())
        return [Seat(value) for value, _, _ in told]

    def leave(self, place: Place) -> None:
        """Tell whoever goes on to ``place`` that this rank does not. Never waits, never raises."""
        if self._broken or self._store is None:
            return  # where it is broken, another rank is the one to be named
        note = _note(place.loop, self.rank)
        # Where the store has gone, everybody who could read has, too.
        with contextlib.suppress(RuntimeError):
            self._store.set(note, str(place.step))
            self._notes.append(note)

    def look(self) -> None:
        """A wait takes long: look for notes about the loops that this rank is in.

        Raises:
            RankSkewError: There is one.
        """
        left = {}
        # Where the store has gone, what the collective says must do.
        with contextlib.suppress(RuntimeError):
            for loop in self._open if self._store is not None else ():
                for rank in range(self.world_size):
                    if self._store.check([_note(loop, rank)]):
                        left[rank] = Place(loop, int(self._store.get(_note(loop, rank))))
        if left:
            who = ", ".join(f"rank {rank} before {place}" for rank, place in left.items())
            raise RankSkewError(
                f"rank {self.rank}: {who} left the loop (break, return or an exception: its own output says which), while "
                f"this rank goes on with it. {_ADVICE}"
            )

    def heard(self, error: RankSkewError) -> None:
        """A wait has been given up: this rank leaves for that reason, and needs no note."""
        self._broken = str(error)

    def _compare(self, places: list[Place]) -> None:
        if len(set(places)) > 1:
            where = "; ".join(f"rank {rank} is at {place}" for rank, place in enumerate(places))
            raise RankSkewError(
                f"rank {self.rank}: the ranks meet at different places: {where}. {_ADVICE}"
            )


def _note(loop: int, rank: int) -> str:
    return f"rankstep/together/left/{loop}/{rank}"


_tables: weakref.WeakKeyDictionary[Any, RoundTable] = weakref.WeakKeyDictionary()


def table_of(group: Any) -> RoundTable:
    """The table of a process group; the first call is collective."""
    if group not in _tables:
        _tables[group] = RoundTable(group)
    return _tables[group]
