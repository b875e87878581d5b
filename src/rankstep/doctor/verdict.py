"""From what all ranks say about themselves to one verdict: who is missing, where it stands, who waits for it.

Nothing here knows how the reports came: it is arithmetic on them, and the same reports give the same verdict anywhere.
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from rankstep.doctor.report import Report, Standing, name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Cause(enum.Enum):
    """What keeps the ranks waiting."""

    FAILED = "failed"
    ENDED = "ended"
    LEFT = "left"
    UNREACHABLE = "unreachable"
    APART = "apart"
    """The ranks wait for each other in different places."""
    LATE = "late"
    """A rank is alive, and elsewhere."""
    NETWORK = "network"
    """All ranks wait in the same place."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What every rank prints.

    Attributes:
        cause: Of what kind.
        ranks: Who keeps the others waiting.
        reason: In one sentence.
        lines: All that is printed.
        hopeless: The wait can never end.
        waited_s: The longest wait.
    """

    cause: Cause
    ranks: tuple[int, ...]
    reason: str
    lines: tuple[str, ...]
    hopeless: bool
    waited_s: float

    def as_json(self) -> str:
        """For the store."""
        return json.dumps(asdict(self) | {"cause": self.cause.value})

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what :meth:`as_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        fields["cause"] = Cause(fields["cause"])
        fields |= {name: tuple(fields[name]) for name in ("ranks", "lines")}
        return cls(**fields)


_GONE = {
    Standing.FAILED: Cause.FAILED,
    Standing.ENDED: Cause.ENDED,
    Standing.LEFT: Cause.LEFT,
    Standing.UNREACHABLE: Cause.UNREACHABLE,
}
_WAY = 4
"""So many calls lead from any line to one that the user knows."""

_LATE = (Standing.STOPPED, Standing.HELD, Standing.UNGUARDED, Standing.WORKING)


def ended(odd: Sequence[Report], waiting: Sequence[Report] = ()) -> Verdict:
    """The verdict about ranks that are known to be gone.

    Args:
        odd: Who is gone; those that are so for the same reason as the first one count.
        waiting: Who waits for them.
    """
    first = odd[0].standing
    same = [report for report in odd if report.standing is first]
    return _verdict(_GONE[first], same, waiting, hopeless=True)


def judge(reports: Sequence[Report], steady_s: float = 1.0) -> Verdict | None:
    """Say what keeps the ranks waiting.

    Args:
        reports: One of every rank, in their order.
        steady_s: Ranks that wait in different places must have done so for this long: they may be passing by.

    Returns:
        None: nobody waits, or the ranks are still moving.
    """
    waiting = [report for report in reports if report.standing is Standing.WAITING]
    if not waiting:
        return None
    taking_part = _taking_part(waiting, len(reports))
    others = [r for r in reports if r.rank in taking_part and r.standing is not Standing.WAITING]
    for standing, cause in _GONE.items():
        gone = [report for report in others if report.standing is standing]
        if gone:
            hopeless = cause is not Cause.UNREACHABLE
            return _verdict(cause, gone, _without(reports, gone), hopeless=hopeless)
    late = [report for report in others if report.standing in _LATE]
    if late:
        return _verdict(Cause.LATE, late, _without(reports, late), hopeless=False)
    yielding = [report for report in others if report.standing is Standing.YIELDING]
    return _all_wait(waiting, yielding, steady_s)


def _taking_part(waiting: Sequence[Report], world_size: int) -> set[int]:
    ranks: set[int] = set()
    for report in waiting:
        ranks |= set(report.members or range(world_size))
    return ranks


def _without(reports: Sequence[Report], cause: Sequence[Report]) -> list[Report]:
    ranks = {report.rank for report in cause}
    return [
        report
        for report in reports
        if report.rank not in ranks and report.standing in (Standing.WAITING, Standing.YIELDING)
    ]


def _all_wait(
    waiting: Sequence[Report], yielding: Sequence[Report], steady_s: float
) -> Verdict | None:
    everybody = [*waiting, *yielding]
    places = Counter((report.place, report.members) for report in everybody)
    if len(places) == 1:
        return _verdict(Cause.NETWORK, [], everybody, hopeless=False)
    complete = [place for place in places if _is_complete(place, everybody)]
    if complete:
        # Nobody is missing there, so it goes on, however slowly, and the others' turn comes.
        busy = [report for report in everybody if (report.place, report.members) in complete]
        rest = [report for report in everybody if (report.place, report.members) not in complete]
        if not rest:
            return _verdict(Cause.NETWORK, [], everybody, hopeless=False)
        return _verdict(Cause.LATE, busy, rest, hopeless=False)
    if min(report.waited_s for report in everybody) < steady_s:
        return None
    most = max(places.values())
    leading = [place for place, count in places.items() if count == most]
    # With as many on one side as on the other, the side that is behind is to blame.
    usual = max(
        leading,
        key=lambda place: max(r.step or 0 for r in everybody if (r.place, r.members) == place),
    )
    odd = [report for report in everybody if (report.place, report.members) != usual]
    rest = [report for report in everybody if (report.place, report.members) == usual]
    return _verdict(Cause.APART, odd, rest, hopeless=True)


def _is_complete(place: tuple[str, tuple[int, ...]], reports: Sequence[Report]) -> bool:
    """Whether all who take part in what is waited for there have come."""
    name, members = place
    there = {report.rank for report in reports if (report.place, report.members) == place}
    return there >= set(members) if members else name != "first" and len(there) == len(reports)


def _verdict(
    cause: Cause, odd: Sequence[Report], waiting: Sequence[Report], *, hopeless: bool
) -> Verdict:
    if cause is Cause.NETWORK:
        reason = (
            "all ranks wait in the same place, so none of them is missing: their messages do not arrive (the network, a "
            "firewall), or they are very slow"
        )
        lines = [f"cause: {reason}"]
    else:
        told = grouped(odd, whereabouts)
        reason = "; ".join(told)
        lines = told if cause is Cause.FAILED else [f"cause: {line}" for line in told]
    effect = grouped(waiting, _wait)
    lines += [f"effect: {line}" for line in effect]
    if cause is Cause.APART:
        lines.append(
            "they wait for each other in different places, and would do so for ever: every rank must take the same steps "
            "and call the same collectives"
        )
        lines += [_way(report) for report in odd[:2] if len(report.stack) > 1]
    usual = {report.calls for report in waiting}
    lines += [
        f"last collectives of rank {report.rank} in torch's groups: {'; '.join(report.calls)}"
        for report in odd[:2]
        if report.calls and report.calls not in usual
    ]
    waited_s = max((report.waited_s for report in waiting), default=0.0)
    return Verdict(
        cause, tuple(report.rank for report in odd), reason, tuple(lines), hopeless, waited_s
    )


def grouped(reports: Sequence[Report], tell: Callable[[Report, bool, str], str]) -> list[str]:
    """One line for all ranks of which the same is to be told."""
    groups: dict[str, list[Report]] = {}
    for report in reports:
        groups.setdefault(tell(report, True, ""), []).append(report)
    lines = []
    for group in groups.values():
        ranks = name_ranks([report.rank for report in group])
        waited_s = max(report.waited_s for report in group)
        seconds = f" {waited_s:.0f} s" if waited_s >= 1 else ""
        lines.append(f"{ranks} {tell(group[0], len(group) > 1, seconds)}")
    return lines


def _way(report: Report) -> str:
    """The calls that led to where a rank stands; of the line itself the text is known."""
    calls = [line.partition(": `")[0] for line in report.stack[-2::-1]]
    return f"rank {report.rank} was called there from {', '.join(calls[:_WAY])}"


def _step(report: Report) -> str:
    return "" if report.step is None else f"step {report.step}, "


def _process(report: Report) -> str:
    where = f" on {report.host}" if report.host else ""
    return f" (process {report.pid}{where})" if report.pid else ""


def _wait(report: Report, several: bool, seconds: str) -> str:
    have = (
        ("have waited" if several else "has waited")
        if seconds
        else ("wait" if several else "waits")
    )
    step = "" if f"step {report.step}" in report.what else _step(report)
    return f"{have}{seconds}: {step}{report.line}, in {report.what}"


def whereabouts(report: Report, several: bool, seconds: str) -> str:
    """Say where a rank is that has not come."""
    standing = report.standing
    have = "have" if several else "has"
    if standing is Standing.FAILED:
        return f"failed: {report.detail}"
    if standing in (Standing.ENDED, Standing.LEFT):
        return f"did not come: {report.detail}{_process(report)}"
    if standing is Standing.UNGUARDED:
        return f"{have} not come: no model was wrapped and no world opened there"
    if standing in (Standing.STOPPED, Standing.HELD, Standing.UNREACHABLE):
        return f"{have} not come: {report.detail}{_process(report)}"
    if standing in (Standing.WAITING, Standing.YIELDING):
        since = f" for{seconds}" if seconds else ""
        return f"{have} stood elsewhere{since}: {_step(report)}{report.line}, in {report.what}"
    doing = (
        "computing" if report.active else "idle: asleep, or waiting for something else than ranks"
    )
    phase = report.phase or "outside of the model"
    return f"{have} not come: {_step(report)}{phase}, {report.line}, {doing}{_process(report)}"
