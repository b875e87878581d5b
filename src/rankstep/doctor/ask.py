"""The other side of the desk: find the ranks of a job, ask one of them for all, or read what a dead job has left."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankstep.doctor.desk import NAME, user_of
from rankstep.doctor.paper import FILE
from rankstep.doctor.report import Report, Standing, name_ranks
from rankstep.doctor.verdict import Verdict, grouped, judge, whereabouts
from rankstep.errors import DoctorError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ANSWER_S = 15.0
_CHUNK = 1 << 16
_ERROR_FILE = "error.json"


@dataclass(frozen=True, slots=True)
class Place:
    """Where to ask.

    Attributes:
        pid: Of a rank with a guard; 0: there is none.
        directory: What a dead job has left; None: it lives.
    """

    pid: int = 0
    directory: Path | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found out about one job.

    Attributes:
        title: Which one.
        ranks: What is known of each of its ranks.
        verdict: What keeps them waiting, if anything does.
        lines: The same in words.
    """

    title: str
    ranks: tuple[Report, ...]
    verdict: Verdict | None
    lines: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "job": self.title,
            "ranks": [
                asdict(report) | {"standing": report.standing.value} for report in self.ranks
            ],
            "verdict": None if self.verdict is None else json.loads(self.verdict.as_json()),
        }


def find(job: str | None) -> list[Place]:
    """Find jobs.

    Args:
        job: A process's number, a directory, or None for all running jobs of this user on this host.

    Raises:
        DoctorError: There is none.
    """
    if job is not None and not job.isdecimal():
        directory = Path(job)
        if not directory.is_dir():
            raise DoctorError(
                f"there is no directory {job}, and it is no process's number either. Next: name a rank's or the "
                "launcher's pid, or what was given to `rankstep run --log-dir`."
            )
        return [Place(directory=directory)]
    guarded = list(_guarded())
    if job is None:
        if not guarded:
            raise DoctorError(
                "no rank with a guard runs on this host in your name. Next: for a job that has ended, name its "
                "`rankstep run --log-dir`."
            )
        # One rank answers for its whole job: the launcher is the parent of them all.
        return [Place(pid) for pid in {_parent(pid): pid for pid in reversed(guarded)}.values()]
    pid = int(job)
    ours = [each for each in guarded if pid in (each, _parent(each))]
    if not ours:
        raise DoctorError(
            f"process {pid} is no rank with a guard, and no launcher of one. Next: `rankstep doctor` without a number "
            "shows every job of yours on this host."
        )
    return [Place(ours[0])]


def ask(place: Place) -> Answer:
    """Ask a job, or read what it left.

    Raises:
        DoctorError: It does not answer, or has left nothing.
    """
    return _ask(place.pid) if place.directory is None else _read(place.directory)


def _ask(pid: int) -> Answer:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_ANSWER_S)
            connection.connect(f"\0{NAME}{pid}")
            if user_of(connection) != os.getuid():
                raise DoctorError(f"process {pid} belongs to somebody else")
            text = b"".join(iter(lambda: connection.recv(_CHUNK), b""))
    except OSError as error:
        raise DoctorError(
            f"the guard of process {pid} does not answer ({error}). Next: if the process is stopped, `kill -CONT {pid}` lets "
            "it go on; `py-spy dump` shows where it stands."
        ) from error
    try:
        answer = json.loads(text)
        if "error" in answer:
            raise DoctorError(f"process {pid}: {answer['error']}")
        reports = tuple(Report.from_json(json.dumps(each)) for each in answer["reports"])
    except (ValueError, KeyError, TypeError) as error:
        raise DoctorError(
            f"process {pid} answers in another language: it runs another version"
        ) from error
    verdict = judge(reports)
    title = f"job of process {_parent(pid)}: {len(reports)} ranks"
    return Answer(title, reports, verdict, _told(reports, verdict))


def _told(reports: Sequence[Report], verdict: Verdict | None) -> tuple[str, ...]:
    lines = list(grouped(reports, whereabouts_now))
    if verdict is not None:
        lines += ["", *verdict.lines]
    return tuple(lines)


def whereabouts_now(report: Report, several: bool, seconds: str) -> str:
    """Say where a rank is, whether anybody waits for it or not."""
    if report.standing is Standing.WORKING:
        doing = "computing" if report.active else "idle"
        step = "" if report.step is None else f"step {report.step}, "
        return f"{step}{report.phase or 'outside of the model'}: {report.line} ({doing})"
    if report.standing in (Standing.WAITING, Standing.YIELDING):
        step = "" if report.step is None else f"step {report.step}, "
        return f"{step}waiting{seconds}: {report.line}, in {report.what}"
    return whereabouts(report, several, seconds)


def _read(directory: Path) -> Answer:
    verdicts: list[Verdict] = []
    reports: dict[int, Report] = {}
    lines: list[str] = []
    for path in sorted(directory.rglob(FILE)):
        try:
            record = json.loads(path.read_text("utf-8"))
            verdicts.append(Verdict.from_json(json.dumps(record["verdict"])))
            report = Report.from_json(json.dumps(record["report"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            lines.append(f"{path} cannot be read: {error}")
            continue
        reports[report.rank] = report
    for path in sorted(directory.rglob(_ERROR_FILE)):
        lines += _exception(path)
    if not verdicts and not lines:
        raise DoctorError(
            f"{directory} holds nothing of a guard ({FILE}) and no exception ({_ERROR_FILE}). Next: name the directory that "
            "was given to `rankstep run --log-dir`; a job without one leaves nothing."
        )
    told = tuple(reports[rank] for rank in sorted(reports))
    known = list(dict.fromkeys(line for verdict in verdicts for line in verdict.lines))
    if told:
        known.append(f"told by {name_ranks([report.rank for report in told])}")
    return Answer(
        f"what is left in {directory}",
        told,
        verdicts[0] if verdicts else None,
        (*known, *lines),
    )


def _exception(path: Path) -> list[str]:
    try:
        message = json.loads(path.read_text("utf-8"))["message"]
        text = message["extraInfo"]["py_callstack"] or message["message"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{path} cannot be read: {error}"]
    return ["", f"{path.parent.name}, in {path.parent.parent.name}:", str(text).rstrip()]


def _guarded() -> Iterator[int]:
    """The processes of this user that have a desk, by their sockets."""
    try:
        lines = Path("/proc/net/unix").read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    pids = {
        int(name)
        for line in lines
        if (name := line.rpartition(f"@{NAME}")[2]) != line and name.isdecimal()
    }
    for pid in sorted(pids):
        try:
            if Path(f"/proc/{pid}").stat().st_uid == os.getuid():
                yield pid
        except OSError:
            continue


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(") ")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0
