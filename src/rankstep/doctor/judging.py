"""The judge of a round: collects the ranks' reports, completes them, and finds the verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rankstep.doctor.channel import STORE_ERRORS
from rankstep.doctor.processes import Identity
from rankstep.doctor.report import Report, Standing
from rankstep.doctor.verdict import Cause, Verdict, ended, judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankstep.doctor.channel import Channel
    from rankstep.doctor.settings import Settings

_ANSWERS_S = 1.0
"""A guard answers within milliseconds, unless native code holds its interpreter or nothing is there to answer."""

_KINDS = {Standing.FAILED: "failed", Standing.LEFT: "left"}


class Bench:
    """Where verdicts are found.

    Args:
        channel: To the other ranks.
        world_size: Of the job.
        settings: What the user wants.
    """

    def __init__(self, channel: Channel, world_size: int, settings: Settings) -> None:
        self._channel = channel
        self._world_size = world_size
        self._settings = settings

    def judge(self, number: int) -> Verdict | None:
        """Find the verdict of a round that has been rung; None: the ranks are on their way."""
        steady_s = min(1.0, self._settings.alarm_s / 2)
        verdict = judge(self.reports(number), steady_s)
        if verdict is None or verdict.hopeless:
            return verdict
        unreachable = verdict.cause is Cause.UNREACHABLE
        limit_s = self._settings.lost_s if unreachable else self._settings.limit_s
        if limit_s is None or verdict.waited_s < limit_s:
            return verdict
        return replace(
            verdict,
            reason=f"{verdict.reason}; that was waited for longer than {limit_s:g} s",
            hopeless=True,
        )

    def reports(self, number: int) -> list[Report]:
        """What is known of all ranks."""
        answers = self._channel.answers(number, _ANSWERS_S)
        reports = {rank: Report.from_json(text) for rank, text in answers.items()}
        for rank in set(range(self._world_size)) - reports.keys():
            reports[rank] = self._silent(rank)
        # A rank that is on its way out may still have answered.
        for standing in (Standing.LEFT, Standing.FAILED):
            for end in self.posted(standing):
                reports[end.rank] = replace(end, step=reports[end.rank].step)
        return [reports[rank] for rank in range(self._world_size)]

    def posted(self, standing: Standing, but: int = -1) -> list[Report]:
        """Who has left word of its end, the first one first."""
        found: dict[int, Report] = {}
        for record in self._channel.posted(_KINDS[standing]):
            rank = int(record["rank"])
            if rank != but:
                found.setdefault(rank, Report(rank, standing, detail=str(record["detail"])))
        return list(found.values())

    def cut_off(self, own: Report, error: Exception, near: Sequence[Report]) -> Verdict | None:
        """The verdict where the store does not answer.

        Args:
            own: Where this rank is.
            error: Of the store.
            near: Ranks of this host that have ended.
        """
        waiting = [own] if own.standing is Standing.WAITING else []
        if near:
            return ended(near, waiting)
        if not waiting:
            return None
        hopeless = own.waited_s >= self._settings.lost_s
        first = str(error).partition("\n")[0][:200]
        reason = (
            f"the ranks' store does not answer ({first}): the host or process that keeps it has ended, or this host is cut "
            "off from it"
        )
        return Verdict(
            Cause.UNREACHABLE,
            (),
            reason,
            (
                f"cause: rank {own.rank}: {reason}",
                f"effect: rank {own.rank} has waited {own.waited_s:.0f} s: {own.line}, for {own.what}",
            ),
            hopeless=hopeless,
            waited_s=own.waited_s,
        )

    def _silent(self, rank: int) -> Report:
        try:
            card: dict[str, Any] | None = self._channel.card(rank)
        except STORE_ERRORS:
            card = None
        if card is None:
            return Report(rank, Standing.UNGUARDED)
        identity = Identity.of(card)
        standing, detail = identity.look()
        return Report(rank, standing, detail=detail, pid=identity.pid, host=identity.host)
