"""Puts what torch.profiler exported in the same run beside a trace: on the same clock, and so that slices nest.

The profiler writes Unix time; each rank's file has both clocks at one moment. It draws a collective on the thread that
started it, where it ends long after what it began in; viewers lose such slices, so they get a thread of their own.
"""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any, Final

from rankstep.trace.files import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rankstep.trace.model import Trace

# Its processes get numbers above all ranks, its arrows above all of ours, and its further threads above its own.
_PIDS: Final = 1_000_000
_IDS: Final = 1 << 40
_TIDS: Final = 1 << 30

_Event = dict[str, Any]
_Thread = tuple[int, Any]


def merged(trace: Trace, path: Path, zero: int) -> Iterator[_Event]:
    """Read a profile of one rank.

    Args:
        trace: Of the same run.
        path: What ``prof.export_chrome_trace`` wrote; may be packed by gzip.
        zero: The trace's time that becomes 0.

    Raises:
        TraceError: It is no such file, or of a rank that the trace lacks.
    """
    base_ns, events, number = _read(trace, path)
    rank = next((rank for rank in trace.ranks if rank.rank == number), None)
    if rank is None:
        raise TraceError(f"{path} is of rank {number}, which this trace lacks. Next: leave it out.")
    # Its times are microseconds after a Unix time; ours become Unix time by adding unix_ns.
    shift = (base_ns - rank.unix_ns - zero) / 1000
    pids: dict[Any, int] = {}
    moved = []
    for event in events:
        pid = pids.setdefault(event.get("pid"), _PIDS * (number + 1) + len(pids))
        moved.append(_moved(event, pid, number, shift))
    yield from _nested(moved)


def _read(trace: Trace, path: Path) -> tuple[int, list[_Event], int]:
    try:
        data = path.read_bytes()
        profile = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        events = [dict(event) for event in profile["traceEvents"]]
        number = int(profile["distributedInfo"]["rank"]) if trace.world_size > 1 else 0
        return int(profile.get("baseTimeNanoseconds", 0)), events, number
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(
            f"{path} is no trace of torch.profiler that names its rank ({type(error).__name__}: {error}). Next: give a "
            "file that prof.export_chrome_trace wrote while the process group was open."
        ) from error


def _moved(event: _Event, pid: int, number: int, shift: float) -> _Event:
    """The event on our clock, with numbers that no other rank has."""
    moved = {**event, "pid": pid}
    # In whole nanoseconds, so that what nests does so whoever rounds it.
    if "ts" in event and event.get("ph") != "M":
        moved["ts"] = _ns(float(event["ts"]) + shift) / 1000
    if "dur" in event:
        end_ns = _ns(float(event["ts"]) + shift + float(event["dur"]))
        moved["dur"] = (end_ns - _ns(moved["ts"])) / 1000
    if "id" in event and event.get("ph") in ("s", "t", "f"):
        moved["id"] = _IDS * (number + 1) + int(event["id"])
    args = event.get("args")
    if isinstance(args, dict):
        moved["args"] = dict(args)
        if isinstance(args.get("correlation"), int):
            moved["args"]["correlation"] = _IDS * (number + 1) + args["correlation"]
        if event.get("name") == "process_name":
            moved["args"]["name"] = f"rank {number} profile: {args.get('name')}"
    return moved


def _nested(events: list[_Event]) -> Iterator[_Event]:
    """The same events; slices that reach out of those around them are on threads of their own."""
    names = {
        (e["pid"], e.get("tid")): e["args"].get("name")
        for e in events
        if e.get("name") == "thread_name" and isinstance(e.get("args"), dict)
    }
    open_until: dict[_Thread, list[list[int]]] = {}
    tids: dict[tuple[_Thread, int], int] = {}
    slices = [e for e in events if e.get("ph") == "X"]
    for event in sorted(slices, key=lambda e: (_ns(e["ts"]), -_ns(e.get("dur", 0)))):
        thread = event["pid"], event.get("tid")
        begin = _ns(event["ts"])
        lane = _lane(open_until.setdefault(thread, []), begin, begin + _ns(event.get("dur", 0)))
        if lane:
            if (thread, lane) not in tids:
                tids[thread, lane] = _TIDS + len(tids)
                name = f"{names.get(thread, thread[1])}: beside, {lane}"
                told = {"pid": thread[0], "tid": tids[thread, lane], "args": {"name": name}}
                yield {"ph": "M", "name": "thread_name", **told}
            event["tid"] = tids[thread, lane]
    yield from events


def _lane(lanes: list[list[int]], begin: int, end: int) -> int:
    """The first lane in which a slice lies inside the open ones or after them."""
    for number, until in enumerate(lanes):
        while until and until[-1] <= begin:
            until.pop()
        if not until or end <= until[-1]:
            until.append(end)
            return number
    lanes.append([end])
    return len(lanes) - 1


def _ns(us: float) -> int:
    return round(float(us) * 1000)
