"""A collective that failed, told as people need it: what it was for, who is missing, what to do."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from rankstep.errors import CommunicationError, SyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rankstep.collectives.communicator import Communicator

explain: list[Callable[[], str]] = []
"""Who may know, at once, why a collective has failed: asked in turn until one returns more than an empty text."""


@contextlib.contextmanager
def naming_failure(comm: Communicator, place: str, what: str) -> Iterator[None]:
    """Turn a backend's error into one that names this rank, the work, and the ranks that did not come.

    Args:
        comm: The ranks.
        place: The same on all ranks that take part, and different for each step; a key in the group's store.
        what: For the message, as "the all-reduces of step 3".

    Raises:
        CommunicationError: In place of a RuntimeError of the backend.
        RankSkewError: Another rank waits elsewhere.
    """
    comm.at(place, what)
    try:
        yield
    except SyncError:
        raise
    except RuntimeError as error:
        who = next((text for ask in explain if (text := ask())), "")
        if not who:
            who = f"{_missing(comm)}. The first error among the ranks' outputs says why"
        raise CommunicationError(f"rank {comm.rank}: {what} failed: {error}. {who}.") from error


def _missing(comm: Communicator) -> str:
    absent = comm.absent()
    if not absent:
        return "A rank has ended or cannot be reached"
    ranks = ("rank " if len(absent) == 1 else "ranks ") + ", ".join(map(str, absent))
    return f"{ranks} did not come: ended, or standing elsewhere"
