"""What became of a function on each rank, and the error that shows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rankstep.errors import RankstepError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Status(StrEnum):
    """How a rank's call ended."""

    OK = "ok"
    RAISED = "raised"
    DIED = "died"
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one call on one rank.

    Args:
        rank: The rank.
        status: How it ended.
        value: What the function returned; None unless the status is ``OK``.
        error_type: The bare name of the exception's class, such as ``"SyncError"``.
        error: The exception's message, or for ``DIED`` and ``HUNG`` one line on how it was found.
        traceback: The full traceback, or for ``HUNG`` the stacks of all threads.
        error_bases: Dotted names of the exception's class and all its bases.
        ended_ns: When it ended, in ns of the machine's monotonic clock, comparable between ranks.
    """

    rank: int
    status: Status
    value: Any = None
    error_type: str = ""
    error: str = ""
    traceback: str = ""
    error_bases: tuple[str, ...] = ()
    ended_ns: int = 0

    def is_a(self, error: type[BaseException]) -> bool:
        """Tell whether the exception would have been caught by ``except error``."""
        return dotted_name(error) in self.error_bases

    def __str__(self) -> str:
        head = f"rank {self.rank} {self.status}"
        if self.status is Status.OK:
            return f"{head}: {self.value!r}"
        named = f"{self.error_type}: {self.error}" if self.error_type else self.error
        return f"{head}: {named}\n{self.traceback}".rstrip()


class RankFailure(RankstepError):  # noqa: N818 (a failure is what pytest calls it too)
    """At least one rank failed; shows every failing rank, the likely cause first.

    Deaths come first, because the peers of a dead rank raise as a consequence and may be heard earlier; then the errors
    in order of time; then the ranks that were left waiting.

    Args:
        outcomes: What became of every rank, by rank.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = tuple(outcomes)
        failed = [outcome for outcome in self.outcomes if outcome.status is not Status.OK]
        order = (Status.DIED, Status.RAISED, Status.HUNG)
        failed.sort(key=lambda outcome: (order.index(outcome.status), outcome.ended_ns))
        ranks = ", ".join(str(outcome.rank) for outcome in failed)
        count = f"{len(failed)} of {len(self.outcomes)} ranks failed (likely cause first: {ranks})"
        super().__init__("\n\n".join([count, *map(str, failed)]))


def dotted_name(kind: type) -> str:
    """Name a class so that two processes agree on it."""
    return f"{kind.__module__}.{kind.__qualname__}"
