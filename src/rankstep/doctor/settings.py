"""What the environment says about the guard."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass

from rankstep.collectives.lookout import ALARM_VARIABLE, read_seconds
from rankstep.errors import WorldError

SWITCH_VARIABLE = "RANKSTEP_GUARD"
END_VARIABLE = "RANKSTEP_GUARD_END"
LIMIT_VARIABLE = "RANKSTEP_GUARD_LIMIT"

_ALARM_S = 5.0
_LOST_ALARMS = 12
"""A host that does not answer for so many alarms (a minute, by default) is gone, not slow."""


class End(enum.Enum):
    """What follows the verdict that a wait can never end."""

    RAISE = "raise"
    """Every rank that waits raises an error; so the job ends, and does not hang."""
    TELL = "tell"
    """Nothing: it is told, and the backend's own time-out ends the job."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How the guard behaves.

    Attributes:
        alarm_s: A wait of so many seconds is looked into, unless steps or waits of this job usually take long.
        limit_s: A wait for a rank that is alive ends after so many seconds; None: by the group's time-out.
        end: What follows when a wait can never end.
    """

    alarm_s: float = _ALARM_S
    limit_s: float | None = None
    end: End = End.RAISE

    @property
    def lost_s(self) -> float:
        """After so many seconds of silence another host counts as gone."""
        return min(self.limit_s or float("inf"), _LOST_ALARMS * self.alarm_s)

    @classmethod
    def from_environment(cls) -> Settings:
        """Read ``RANKSTEP_GUARD_ALARM``, ``RANKSTEP_GUARD_LIMIT`` and ``RANKSTEP_GUARD_END``.

        Raises:
            WorldError: One of them has no meaning.
        """
        end = os.environ.get(END_VARIABLE, "").strip() or End.RAISE.value
        known = [each.value for each in End]
        if end not in known:
            raise WorldError(
                f"{END_VARIABLE}={end}: it must be one of {', '.join(known)}. Next: correct it, or leave it out."
            )
        alarm_s = read_seconds(ALARM_VARIABLE, _ALARM_S) or _ALARM_S
        return cls(alarm_s, read_seconds(LIMIT_VARIABLE, None), End(end))


def switched_off() -> bool:
    """Whether ``RANKSTEP_GUARD=0``."""
    return os.environ.get(SWITCH_VARIABLE) == "0"
