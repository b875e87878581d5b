"""What can be seen of this rank itself, from a thread beside the one that trains."""

from __future__ import annotations

import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rankstep.doctor.position import cpu_seconds, position_of
from rankstep.doctor.processes import Identity, note_memory_kills
from rankstep.doctor.pulse import (
    Beat,
    Pulse,
    collectives_so_far,
    last_collectives,
    oldest_on_gpu,
)
from rankstep.doctor.report import Report, Standing

if TYPE_CHECKING:
    from rankstep.doctor.position import Position

_TORCH = "torch."


class Self:
    """This rank.

    Args:
        rank: Its number.
        thread: The thread that trains.
        alarm_s: From when on a wait is long.

    Attributes:
        pulse: Of the thread.
    """

    def __init__(self, rank: int, thread: int, alarm_s: float) -> None:
        note_memory_kills()
        self.rank = rank
        self.thread = thread
        self.identity = Identity.own()
        self._models: tuple[weakref.ref[Any], ...] = ()
        self.pulse = Pulse(alarm_s)
        self._position: Position | None = None

    def add(self, model: Any) -> None:
        """A wrapper, for its steps."""
        # Replaced in one go: another thread may be reading.
        self._models = (*(known for known in self._models if known()), weakref.ref(model))

    @property
    def models(self) -> list[Any]:
        """The wrappers that are still there."""
        return [model for known in self._models if (model := known()) is not None]

    def card(self) -> dict[str, Any]:
        """Who this is, for the store."""
        identity = self.identity
        return {
            "pid": identity.pid,
            "started": identity.started,
            "namespace": identity.namespace,
            "host": identity.host,
        }

    def beat(self) -> Pulse:
        """Look at the thread; about once a second."""
        position = self._position = self._look(brief=True)
        collectives = ""
        if position is not None and position.standing is Standing.WAITING:
            collectives = collectives_so_far()
        cpu_s = 0.0 if position is None else cpu_seconds(self.thread)
        self.pulse.beat(Beat(time.monotonic(), position, self.steps(), cpu_s, collectives))
        return self.pulse

    @property
    def waits(self) -> bool:
        """Whether it waited for other ranks when it was last looked at."""
        return self._position is not None and self._position.standing is Standing.WAITING

    @property
    def waits_in_torch(self) -> bool:
        """Whether it waits in a collective of torch's own, or on a GPU, where no exception reaches it."""
        position = self._look()
        return position is not None and position.place.startswith(_TORCH)

    def steps(self) -> int:
        """Synced backwards of the wrapper that has made most."""
        return max((model.reducer.reductions for model in self.models), default=0)

    def report(self, *, brief: bool = False) -> Report:
        """Where this rank is now.

        Args:
            brief: Without its last collectives, which take milliseconds to find.
        """
        position = self._look()
        if position is None:
            detail = "the thread that trained has ended"
            return Report(self.rank, Standing.LEFT, detail=detail)
        waits = position.standing is not Standing.WORKING
        return Report(
            self.rank,
            position.standing,
            step=self.steps() if self.models else None,
            phase=position.phase or self._evaluation(),
            line=position.line,
            place=position.place,
            what=position.what,
            waited_s=self.pulse.waited_s if waits else 0.0,
            members=position.members,
            active=self.pulse.active,
            pid=self.identity.pid,
            host=self.identity.host,
            calls=() if brief else last_collectives(),
            stack=position.stack,
        )

    def _look(self, *, brief: bool = False) -> Position | None:
        position = position_of(self.thread, brief=brief)
        if (
            position is None
            or position.standing is not Standing.WORKING
            or not any(model.reducer.comm.name == "nccl" for model in self.models)
        ):
            return position
        # With NCCL the host does not wait in a collective but wherever it next needs a result.
        oldest = oldest_on_gpu()
        if not oldest:
            return position
        return replace(
            position,
            standing=Standing.WAITING,
            place=f"{_TORCH}{oldest}",
            what=f"{oldest} on the GPU",
        )

    def _evaluation(self) -> str:
        models = self.models
        return "evaluation" if models and not any(model.training for model in models) else ""
