"""Reads the lines of one rank's file, whatever state it is in, into little memory.

A line that is damaged is left out and noted; one that was never finished, because its rank was killed, ends the file.
Numbers are kept eight bytes each, so a million gradients take 24 MB here.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from rankstep.errors import RankstepError
from rankstep.trace.journal import COLUMNS, FORMAT, SPANS, VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

LINE_BYTES: Final = 64 * 2**20
"""A recorder's longest line has some 6 MB; what is longer is none."""

_HEADER: Final = {
    "rank": int,
    "world_size": int,
    "host": str,
    "device": str,
    "versions": dict,
    "command": str,
    "run": str,
    "offset_ns": int,
    "perf_counter_ns": int,
    "time_ns": int,
}

_WRAPPER: Final = re.compile(rb'\{"wrapper":(\d+),')
_REDUCTIONS: Final = re.compile(rb'"(backward_began|step_settled)":\[([-\d,]*)\]')
_SETTLED: Final = re.compile(rb'"step_settled":\[(\d+),-?\d+(?:[-\d,]*,(\d+),-?\d+)?\]')


class TraceError(RankstepError, ValueError):
    """A trace cannot be recorded or read as asked."""


class Rows:
    """Rows of whole numbers.

    Args:
        width: How many numbers a row has.
        numbers: Row after row.

    Raises:
        TypeError, OverflowError, ValueError: They are no such rows.
    """

    __slots__ = ("_numbers", "width")

    def __init__(self, width: int, numbers: Iterable[int] = ()) -> None:
        self.width = width
        self._numbers = array("q", numbers)
        if len(self._numbers) % width:
            raise ValueError(f"{len(self._numbers)} numbers are no rows of {width}")

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return zip(*[iter(self._numbers)] * self.width, strict=True)

    def __len__(self) -> int:
        return len(self._numbers) // self.width

    def extend(self, other: Rows) -> None:
        """Take over the rows of another."""
        self._numbers.extend(other._numbers)

    def add(self, *row: int) -> None:
        """Take one row more."""
        self._numbers.extend(row)


@dataclass(slots=True)
class RankFile:
    """The lines of one file, times still on the rank's own clock.

    Attributes:
        header: Its first line.
        plans: Bucket plans in the order in which they were adopted.
        events: For each wrapper, rows of each kind of event, as ``COLUMNS`` has them.
        spans: Rows of what belongs to no wrapper, as ``SPANS`` has them.
        complete: It ends as a finished recording does.
        damaged: How many lines were left out.
        first_damage: Which was the first, and why.
        stopped: There is more in the file than was read.
        by_device: Times are those of the device; see ``ondevice.py``.
    """

    header: dict[str, Any]
    plans: list[dict[str, Any]] = field(default_factory=list)
    events: dict[int, dict[str, Rows]] = field(default_factory=dict)
    spans: dict[str, Rows] = field(default_factory=lambda: {n: Rows(w) for n, w in SPANS.items()})
    complete: bool = False
    damaged: int = 0
    first_damage: str = ""
    stopped: bool = False
    by_device: bool = False

    def take(self, line: Any, wanted: Wanted) -> bool:
        """Add one line and say whether anything of it was wanted.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: It is none of ours; nothing of it was added.
        """
        if not isinstance(line, dict):
            raise TypeError(f"{type(line).__name__} in place of an object")
        if "end" in line:
            self.complete = not line["lost"]
        elif "plan_from" in line:
            self.plans.append(_checked_plan(line))
        elif "wrapper" in line:
            return self._take_events(line, wanted)
        else:
            spans = {n: Rows(w, line[n]) for n, w in SPANS.items() if n in line}
            spans = {n: wanted.within(rows) for n, rows in spans.items()}
            for name, rows in spans.items():
                self.spans[name].extend(rows)
            return any(map(len, spans.values()))
        return True

    def _take_events(self, line: Mapping[str, Any], wanted: Wanted) -> bool:
        wrapper = line["wrapper"]
        if not isinstance(wrapper, int):
            raise TypeError(f"wrapper {wrapper!r}")
        rows = {n: Rows(len(c), line.get(n, ())) for n, c in COLUMNS.items()}
        rows = {n: wanted.of(wrapper, n, r) for n, r in rows.items()}
        kinds = self.events.setdefault(wrapper, {n: Rows(len(c)) for n, c in COLUMNS.items()})
        for name, more in rows.items():
            kinds[name].extend(more)
        return any(map(len, rows.values()))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of a file is to be kept.

    Attributes:
        limit_bytes: No more lines are read once those that hold something wanted have so many bytes; None: all.
        steps: For each wrapper the steps that are wanted; None: all.
        times: What ends after the first of these is wanted, and spans that begin before the second; None: all.
    """

    limit_bytes: int | None = None
    steps: Mapping[int, range] | None = None
    times: tuple[float, float] | None = None

    def passes_over(self, text: bytes) -> bool:
        """Whether a line can be seen to hold nothing that is wanted, without reading all of it."""
        wrapper = None if self.steps is None else _WRAPPER.match(text)
        settled = None if wrapper is None else _SETTLED.search(text)
        # Marks of a device are written when they are read, which may be some steps later.
        if self.steps is None or wrapper is None or settled is None or b'"device_' in text:
            return False
        steps = self.steps.get(int(wrapper[1]), range(0))
        # It may hold the begin of the step after its last one, too.
        first, last = int(settled[1]), int(settled[2] or settled[1]) + 1
        return not steps or last < steps.start or first >= steps.stop

    def within(self, rows: Rows) -> Rows:
        """Those of the spans that are wanted."""
        if self.times is None:
            return rows
        first, last = self.times
        kept = (row for row in rows if row[0] < last and row[-1] > first)
        return Rows(rows.width, (n for row in kept for n in row))

    def of(self, wrapper: int, kind: str, rows: Rows) -> Rows:
        """Those of the rows that are wanted."""
        if self.steps is None:
            return rows
        steps = self.steps.get(wrapper, range(0))
        first = -math.inf if self.times is None else self.times[0]
        # Of a mark the host's time stands before the device's.
        at = -2 if kind.startswith("device_") else -1
        kept = (row for row in rows if row[0] in steps and row[at] > first)
        return Rows(rows.width, (n for row in kept for n in row))


def read_header(path: Path) -> dict[str, Any]:
    """Read a file's first line.

    Raises:
        TraceError: Says, without a full stop, what is wrong with it.
    """
    try:
        with path.open("rb") as file:
            text = file.readline(LINE_BYTES)
    except OSError as error:
        raise TraceError(f"cannot be read ({error.strerror})") from error
    if not text.endswith(b"\n"):
        raise TraceError("is empty: its rank ended before its first line was written")
    try:
        header = json.loads(text)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise TraceError("was not written by Rankstep's recorder")
    if header.get("version") != VERSION:
        versions = header.get("versions")
        release = versions.get("rankstep") if isinstance(versions, dict) else None
        raise TraceError(
            f"has format version {header.get('version')}, and this Rankstep reads {VERSION}; read it with the release "
            f"that wrote it, rankstep {release or 'unknown'}"
        )
    for key, kind in _HEADER.items():
        if not isinstance(header.get(key), kind):
            raise TraceError(f"has no {key!r} in its first line")
    if not isinstance(header.setdefault("error_ns", None), int | None):
        raise TraceError("has no 'error_ns' in its first line")
    return header


def read(
    path: Path, header: dict[str, Any], wanted: Wanted, tell: Callable[[int], None]
) -> RankFile:
    """Read a file behind its first line.

    Args:
        path: The file.
        header: Its first line.
        wanted: What to keep.
        tell: Called with the number of bytes that were read since the last call.

    Raises:
        OSError: The file cannot be read.
    """
    found = RankFile(header)
    kept = 0
    with path.open("rb") as file:
        tell(len(file.readline(LINE_BYTES)))
        number = 1
        whole = True
        while text := file.readline(LINE_BYTES):
            number += whole
            whole = text.endswith(b"\n")
            tell(len(text))
            if not whole and len(text) < LINE_BYTES:
                break
            if _take(found, text, number, wanted):
                kept += len(text)
            if wanted.limit_bytes is not None and kept > wanted.limit_bytes:
                found.stopped = bool(file.peek(1))
                break
    if found.stopped:
        found.complete = ends_well(path)
    elif not whole:
        found.complete = False
    return found


def sketch(path: Path, header: dict[str, Any], tell: Callable[[int], None]) -> RankFile:
    """Find out which reductions a file has, and when they were, without reading the rest of it.

    Args:
        path: The file.
        header: Its first line.
        tell: As for :func:`read`.

    Raises:
        OSError: The file cannot be read.
    """
    found = RankFile(header)
    everything = Wanted()
    with path.open("rb") as file:
        while text := file.readline(LINE_BYTES):
            tell(len(text))
            lists = dict(_REDUCTIONS.findall(text))
            wrapper = _WRAPPER.match(text)
            if lists and wrapper:
                pieces = [b'"%b":[%b]' % each for each in lists.items()]
                _take(found, b'{"wrapper":%b,%b}' % (wrapper[1], b",".join(pieces)), 0, everything)
    return found


def _take(found: RankFile, text: bytes, number: int, wanted: Wanted) -> bool:
    if wanted.passes_over(text):
        return False
    try:
        return found.take(json.loads(text), wanted)
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        found.damaged += 1
        found.first_damage = found.first_damage or f"line {number}: {type(error).__name__}: {error}"
        return False


def ends_well(path: Path) -> bool:
    """Whether a file ends as a finished recording does."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 200))
        last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
    return last == b'{"end":true,"lost":false}'


def _checked_plan(line: Mapping[str, Any]) -> dict[str, Any]:
    """A plan whose numbers fit together.

    Raises:
        KeyError, TypeError, ValueError: It is none.
    """
    names = [str(name) for name in line["params"]]
    buckets = []
    for each in line["buckets"]:
        params = [int(i) for i in each["params"]]
        if any(not 0 <= i < len(names) for i in params):
            raise ValueError("a bucket holds parameters that the plan lacks")
        buckets.append({"nbytes": int(each["nbytes"]), "params": params})
    return {
        "wrapper": int(line["wrapper"]),
        "plan_from": int(line["plan_from"]),
        "module": str(line.get("module", "")),
        "all_reduced": bool(line.get("all_reduced", True)),
        "params": names,
        "param_bytes": _sizes(line.get("param_bytes"), len(names)),
        "buckets": buckets,
    }


def _sizes(told: Any, count: int) -> list[int]:
    """The bytes of each parameter; none where the recorder did not tell them.

    Raises:
        TypeError, ValueError: They do not fit the names.
    """
    sizes = [int(each) for each in told or ()]
    if sizes and len(sizes) != count:
        raise ValueError(f"sizes of {len(sizes)} parameters for {count} names")
    return sizes
