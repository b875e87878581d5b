"""What the ranks tell each other in a step: writes this rank's row, reads all rows, and draws the consequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankstep.buckets import verdict
from rankstep.buckets.pace import Pace
from rankstep.buckets.trailer import Mode, Row, Trailer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rankstep.buckets.drift import DriftAlarm
    from rankstep.buckets.step import Step
    from rankstep.collectives import Communicator


class Exchange:
    """One wrapper's side of the trailer.

    Args:
        comm: The ranks.
        wrapper: The wrapper's number.

    Attributes:
        alarm: Compares weights over the ranks; None: off.
        divides_by_live: Ranks that ran out under ``join`` do not count in the mean.
        pace: Counts the batches that this rank draws.
        live: How many ranks' worth of inputs the mean goes over (``together``); None: all ranks'.
    """

    def __init__(self, comm: Communicator, wrapper: int) -> None:
        self.alarm: DriftAlarm | None = None
        self.divides_by_live = False
        self.live: float | None = None
        self.pace = Pace(comm.world_size, comm.rank)
        self._comm = comm
        self._wrapper = wrapper
        self._later: verdict.Later | None = None

    def write(
        self,
        tail: Trailer,
        step: Step,
        mode: Mode,
        *,
        number: int,
        forwards: int,
        count: float,
        gives: bool,
        abandoned: bool,
    ) -> None:
        """Put this rank's row and used flags in.

        Args:
            tail: Where.
            step: What happened on this rank.
            mode: What it was doing.
            number: Which synced backward.
            forwards: Training forwards since the last one.
            count: Samples or tokens of its window.
            gives: It has a part in the gradients.
            abandoned: Its backward died.
        """
        alarm = self.alarm
        writes = 0 if alarm is None else alarm.writes()
        checksum = None if alarm is None else alarm.sample()
        drift = 0
        if checksum is not None and self._comm.host_waits:
            drift, checksum = int(checksum), None
        row = Row(
            mode=mode,
            wrapper=self._wrapper,
            reductions=number,
            forwards=forwards,
            abandoned=int(abandoned),
            late=int(bool(step.late) and gives),
            changed=int(step.changed and gives),
            nonfinite=0 if step.nonfinite is None else step.nonfinite + 1,
            drawn=self.pace.drawn(),
            writes=writes,
            count=count,
            drift=drift,
        )
        tail.write(row, step.used_flags(tail.param_count, gives=gives), checksum)

    def read(self, tail: Trailer, mode: Mode, number: int) -> list[Row]:
        """Every rank's row; none where reading would stall a GPU, then they are judged one step later."""
        if self._comm.host_waits or self._comm.world_size == 1 or mode is Mode.JOINED:
            return tail.read_rows()
        self._later = verdict.Later(tail, number)
        return []

    def factor(
        self, tail: Trailer, rows: Sequence[Row], mode: Mode, number: int
    ) -> float | torch.Tensor:
        """What turns the mean of the ranks' parts into what the step asked for.

        Raises:
            CountError: All ranks' counts are 0.
        """
        of_live = 1.0 if self.live is None else self._comm.world_size / self.live
        if not rows:
            if mode is Mode.SYNC:
                return of_live
            by_count = self._comm.world_size / tail.read_total_count()
            # A spent rank may have called plain backward where the others passed counts.
            return by_count if mode is Mode.WEIGHTED else by_count.nan_to_num(posinf=of_live)
        if any(row.abandoned for row in rows):
            return 1.0
        if self.live is not None and not any(row.mode == Mode.WEIGHTED for row in rows):
            return of_live
        return verdict.factor(rows, self._comm.rank, number, divides_by_live=self.divides_by_live)

    def judge(self, rows: Sequence[Row], number: int) -> None:
        """Raise on every rank if the ranks are out of step or their weights differ.

        Raises:
            SyncError: Says what is wrong.
        """
        verdict.judge(rows, self._comm.rank, number)
        # Equal rows are one object, in almost every step.
        unlike = any(row is not rows[0] for row in rows)
        if unlike:
            self.pace.compare(rows, self._comm.rank, number)
        if self.alarm is None:
            return
        if unlike:
            self.alarm.suspect(rows, number)
        live = [row.drift for row in rows if row.mode != Mode.JOINED and row.drift]
        if not live:
            return
        if all(drift == live[0] for drift in live):
            self.alarm.agreed(number)
        else:
            self.alarm.raise_difference(self._comm, number)

    def judge_earlier(self) -> None:
        """Judge the step that a GPU had not told when it ended.

        Raises:
            SyncError: Says what is wrong.
        """
        if self._later is not None:
            later, self._later = self._later, None
            rows = later.rows()
            self.judge(rows, later.number)
            verdict.judge_unsettled(rows, self._comm.rank, later.number)
