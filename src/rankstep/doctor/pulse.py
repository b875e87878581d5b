"""How long this rank's thread has stood in one wait, and how long waits and steps usually take here."""

from __future__ import annotations

import collections
import json
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch._C import _distributed_c10d as c10d

from rankstep.doctor.report import Standing

if TYPE_CHECKING:
    from rankstep.doctor.position import Position

_STEPS = 16
_STEPS_FACTOR = 3.0
_WAITS_FACTOR = 2.0
_IDLE = 0.2
_CALLS = 3


@dataclass(frozen=True, slots=True)
class Beat:
    """What was seen of the thread at one moment.

    Attributes:
        at_s: When, by ``time.monotonic``.
        position: Where it stood; None: it has ended.
        steps: Synced backwards so far.
        cpu_s: CPU time that it has used.
        collectives: What torch's flight recorder counts; it changes with every collective.
    """

    at_s: float
    position: Position | None
    steps: int
    cpu_s: float
    collectives: str


class Pulse:
    """Follows one thread by beats, about one a second.

    Args:
        alarm_s: A wait is long from here on at the earliest.

    Attributes:
        waited_s: How long the thread has stood in its present wait; 0: it does not wait.
        active: Whether it used the CPU between the last two beats.
        ended_s: How long the wait took that has just ended; 0: none has.
    """

    def __init__(self, alarm_s: float) -> None:
        self.waited_s = 0.0
        self.active = False
        self.ended_s = 0.0
        self._alarm_s = alarm_s
        self._last: Beat | None = None
        self._since_s = 0.0
        self._stepped: tuple[int, float] | None = None
        self._durations: collections.deque[float] = collections.deque(maxlen=_STEPS)
        self._patience: dict[str, float] = {}

    @property
    def alarm_s(self) -> float:
        """From how long on the present wait is a long one: longer where steps, or waits in this line, are usually long."""
        usual_s = statistics.median(self._durations) if self._durations else 0.0
        site = "" if self._last is None or self._last.position is None else self._last.position.site
        return max(
            self._alarm_s, _STEPS_FACTOR * usual_s, _WAITS_FACTOR * self._patience.get(site, 0.0)
        )

    def beat(self, now: Beat) -> None:
        """Take in what is seen now."""
        last, self._last = self._last, now
        self._note_steps(now)
        self.ended_s = 0.0
        if last is not None:
            spent_s = now.at_s - last.at_s
            self.active = now.cpu_s - last.cpu_s > _IDLE * spent_s
        if last is not None and _same_wait(last, now):
            self.waited_s = now.at_s - self._since_s
            return
        if self.waited_s > self._alarm_s and last is not None and last.position is not None:
            # It came to a good end, so it may take as long again.
            site = last.position.site
            self.ended_s = now.at_s - self._since_s
            self._patience[site] = max(self._patience.get(site, 0.0), self.ended_s)
        self._since_s = now.at_s
        self.waited_s = 0.0

    def _note_steps(self, now: Beat) -> None:
        if self._stepped is None or now.steps < self._stepped[0]:
            self._stepped = (now.steps, now.at_s)
        elif now.steps > self._stepped[0]:
            steps, at_s = self._stepped
            # The first step compiles, reads its first data and so on.
            if steps:
                self._durations.append((now.at_s - at_s) / (now.steps - steps))
            self._stepped = (now.steps, now.at_s)


def _same_wait(last: Beat, now: Beat) -> bool:
    before, after = last.position, now.position
    if before is None or after is None or after.standing is Standing.WORKING:
        return False
    return (
        before.mark == after.mark
        and before.place == after.place
        and last.steps == now.steps
        and last.collectives == now.collectives
    )


def collectives_so_far() -> str:
    """A text that changes with every collective of torch's groups."""
    status: Any = json.loads(c10d._dump_fr_trace_json(includeCollectives=False))  # type: ignore[attr-defined]
    return json.dumps(status.get("pg_status", ""))


def last_collectives() -> tuple[str, ...]:
    """The last collectives of torch's groups in words, from torch's flight recorder."""
    trace: Any = json.loads(c10d._dump_fr_trace_json())  # type: ignore[attr-defined]
    return tuple(
        f"{entry['profiling_name']} number {entry['collective_seq_id']} of sizes {entry['input_sizes']}"
        for entry in trace.get("entries", [])[-_CALLS:]
    )


def oldest_on_gpu() -> str:
    """The oldest collective of NCCL that has not ended, by name and number; empty: there is none."""
    trace: Any = json.loads(c10d._dump_fr_trace_json(onlyActive=True))  # type: ignore[attr-defined]
    for entry in trace.get("entries", []):
        if entry["profiling_name"].startswith("nccl:") and entry["state"] != "completed":
            return f"{entry['profiling_name']} number {entry['collective_seq_id']}"
    return ""
