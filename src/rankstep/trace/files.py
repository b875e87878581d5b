"""Reads a directory of recorded files into a :class:`rankstep.trace.model.Trace`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankstep.errors import RankstepError
from rankstep.trace import align
from rankstep.trace.assemble import Names, assemble
from rankstep.trace.journal import COLUMNS, FORMAT, VERSION
from rankstep.trace.model import RankTrace, Trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from os import PathLike

PATTERN = "rank-*.jsonl"
_HEADER = (
    *("rank", "world_size", "host", "device", "versions", "command", "run"),
    *("offset_ns", "perf_counter_ns", "time_ns"),
)


class TraceError(RankstepError, ValueError):
    """A trace cannot be recorded or read as asked."""


@dataclass(slots=True)
class RankFile:
    """The lines of one file, times still on the rank's own clock.

    Attributes:
        header: Its first line.
        plans: Bucket plans in the order in which they were adopted.
        events: For each wrapper, rows of each kind of event, as ``COLUMNS`` has them.
        spans: (begin, end) of data waits, backward calls and optimizer steps.
        complete: It ends as a finished recording does.
    """

    header: dict[str, Any]
    plans: list[dict[str, Any]] = field(default_factory=list)
    events: dict[int, dict[str, list[tuple[int, ...]]]] = field(default_factory=dict)
    spans: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    complete: bool = False

    def take(self, line: Mapping[str, Any]) -> None:
        """Add one line.

        Raises:
            KeyError, TypeError, ValueError: It is none of ours.
        """
        if "end" in line:
            self.complete = not line["lost"]
        elif "plan_from" in line:
            self.plans.append(dict(line))
        elif "wrapper" in line:
            kinds = self.events.setdefault(line["wrapper"], {})
            for name, columns in COLUMNS.items():
                kinds.setdefault(name, []).extend(_rows(line.get(name, []), len(columns)))
        else:
            for name, numbers in line.items():
                begins = self.spans.setdefault(name, [])
                begins.extend((begin, end) for begin, end in _rows(numbers, 2))


def _rows(numbers: list[int], width: int) -> Iterator[tuple[int, ...]]:
    return zip(*[iter(numbers)] * width, strict=True)


def load(directory: str | PathLike[str]) -> Trace:
    """Read what the ranks of one run recorded; times come out on rank 0's clock.

    A file that ends in the middle of a line, because its rank was killed, is read up to there.

    Args:
        directory: What was given to ``rankstep run --trace``, ``RANKSTEP_TRACE`` or :func:`rankstep.trace.record`.

    Raises:
        TraceError: It is no trace, of another version, or of several runs.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise TraceError(
            f"there is no directory {folder}. Next: record one with `rankstep run --trace {folder} train.py`."
        )
    files = [_read(path) for path in sorted(folder.glob(PATTERN))]
    if not files:
        raise TraceError(
            f"{folder} holds no trace (no {PATTERN}): it is another directory, or the run made no "
            "rankstep.DistributedDataParallel. Next: record one with `rankstep run --trace DIR train.py`."
        )
    _check_one_run(folder, [file.header for file in files])
    files.sort(key=lambda file: file.header["rank"])
    names = [Names(file.plans) for file in files]
    ranks = tuple(
        RankTrace(
            rank=file.header["rank"],
            host=str(file.header["host"]),
            device=str(file.header["device"]),
            clock_error_ns=file.header["error_ns"],
            params=tuple(name.params),
            buckets=tuple(name.buckets),
            steps=assemble(file, name),
            complete=file.complete,
            unix_ns=_unix_ns(file.header),
        )
        for file, name in zip(files, names, strict=True)
    )
    first = files[0].header
    return Trace(
        ranks=align.by_collectives(ranks),
        world_size=first["world_size"],
        command=str(first["command"]),
        versions={str(k): str(v) for k, v in first["versions"].items()},
    )


def _read(path: Path) -> RankFile:
    file: RankFile | None = None
    lines = path.read_bytes().split(b"\n")
    torn = lines.pop()  # empty, where the last line is whole
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            if file is None:
                file = RankFile(_checked_header(path, line))
            else:
                file.take(line)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, TraceError):
                raise
            raise TraceError(
                f"{path}, line {number}, is damaged ({type(error).__name__}: {error}). Next: leave that file out, "
                "or record again."
            ) from error
    if file is None:
        raise TraceError(
            f"{path} is empty. Next: leave that file out, or record again; a rank writes its first line when its "
            "first wrapper is made."
        )
    file.complete = file.complete and not torn
    return file


def _checked_header(path: Path, line: Any) -> dict[str, Any]:
    if not isinstance(line, dict) or line.get("format") != FORMAT:
        raise TraceError(f"{path} was not written by Rankstep's recorder. Next: name a trace.")
    if line["version"] != VERSION:
        raise TraceError(
            f"{path} has format version {line['version']}, and this Rankstep reads {VERSION}. Next: read it with the "
            f"release that wrote it, rankstep {line.get('versions', {}).get('rankstep', 'unknown')}."
        )
    for key in _HEADER:
        if key not in line:
            raise TraceError(f"{path} has no {key!r} in its first line. Next: record again.")
    line.setdefault("error_ns", None)
    return line


def _unix_ns(header: Mapping[str, Any]) -> int:
    own: int = header["time_ns"] - header["perf_counter_ns"]
    return own + int(header["offset_ns"])


def _check_one_run(folder: Path, headers: list[dict[str, Any]]) -> None:
    for key in ("world_size", "run"):
        found: dict[Any, list[int]] = {}
        for header in headers:
            # Empty: the ranks could not agree on a name for their run.
            if header[key]:
                found.setdefault(header[key], []).append(header["rank"])
        if len(found) > 1:
            sets = "; ".join(f"ranks {', '.join(map(str, ranks))}" for ranks in found.values())
            raise TraceError(
                f"{folder} holds files of {len(found)} runs ({sets}). Next: delete those of the older run, and give "
                "each run a directory of its own."
            )
