"""What one rank says about itself when the ranks are asked where they are."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass
from typing import Any, Self


class Standing(enum.Enum):
    """How a rank is."""

    WAITING = "waiting"
    """In a collective, for other ranks."""
    YIELDING = "yielding"
    """For something that may take its time by intention: ``rank_zero_first``."""
    WORKING = "working"
    """Alive, and in no collective."""
    FAILED = "failed"
    """An exception ends it."""
    LEFT = "left"
    """Its work is done: it has closed its world, or its program has come to its end."""
    ENDED = "ended"
    """Its process is gone without a word."""
    STOPPED = "stopped"
    """A signal has stopped its process."""
    HELD = "held"
    """Its process is there, but its interpreter does not run: native code keeps it."""
    UNREACHABLE = "unreachable"
    """Nothing is heard from its host."""
    UNGUARDED = "unguarded"
    """It has never had a guard: it has neither opened a world nor wrapped a model."""


@dataclass(frozen=True, slots=True)
class Report:
    """Where a rank is.

    Attributes:
        rank: Among all ranks.
        standing: How it is.
        step: Synced backwards so far, which is the number of the step under way, counted from 0; None: no wrapper.
        phase: Of the step: "backward", "data loading" and so on.
        line: Of the user's program, as ``train.py:41 in load: `time.sleep(60)` ``.
        place: WAITING: the same text on all ranks that wait there.
        what: WAITING: for what, for people.
        waited_s: WAITING: for how long, in seconds.
        members: WAITING: the ranks that take part; empty: all.
        active: WORKING: whether it computes, as against sleeping or waiting for a device.
        detail: How it ended, or what was raised.
        pid: Its process; 0: not known.
        host: Where it runs.
        calls: Its last collectives through torch's groups, the latest last.
        stack: The user's lines that led to where it is, the innermost last.
    """

    rank: int
    standing: Standing
    step: int | None = None
    phase: str = ""
    line: str = ""
    place: str = ""
    what: str = ""
    waited_s: float = 0.0
    members: tuple[int, ...] = ()
    active: bool = False
    detail: str = ""
    pid: int = 0
    host: str = ""
    calls: tuple[str, ...] = ()
    stack: tuple[str, ...] = ()

    def as_json(self) -> str:
        """For the store, and for ``rankstep doctor``."""
        return json.dumps(asdict(self) | {"standing": self.standing.value})

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what :meth:`as_json` wrote.

        Raises:
            ValueError: It is something else.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            fields["standing"] = Standing(fields["standing"])
            fields |= {name: tuple(fields[name]) for name in ("members", "calls", "stack")}
            return cls(**fields)
        except (TypeError, KeyError) as error:
            raise ValueError(f"no report of a rank: {error}") from error


def name_ranks(ranks: list[int]) -> str:
    """Write ranks as ``rank 3`` or ``ranks 0, 2-5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts)
