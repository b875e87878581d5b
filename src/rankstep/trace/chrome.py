"""A trace in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open and HTA reads.

Every rank is a process. Its threads are its steps, its host, and as many lanes of buckets as let no two of them touch,
because slices of one thread must nest. Times are microseconds since the first step that is shown. An arrow leads from
each bucket to the wait for it.

Source: the "Trace Event Format" document of the Chromium project; https://github.com/facebookresearch/HolisticTraceAnalysis
"""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

from rankstep.trace import overlap
from rankstep.trace.files import TraceError
from rankstep.trace.model import SpanKind
from rankstep.trace.overlap import COMPUTE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from rankstep.trace.model import BucketTrace, RankTrace, StepTrace, Trace

STEPS, HOST, BUCKETS = 0, 1, 10
"""Thread numbers; bucket lanes count on from the last."""

# A merged profile brings processes of its own; each gets a number above all ranks.
_FOREIGN_PIDS = 1_000_000
_FOREIGN_IDS = 1 << 40
_Event = dict[str, Any]


def export(trace: Trace, only: int | None = None, kineto: Sequence[Path] = ()) -> str:
    """Write all ranks into one file for a viewer.

    Args:
        trace: As it was read.
        only: This step alone; None: all.
        kineto: Traces that torch.profiler exported on ranks of the same run; they are moved onto the same clock.

    Raises:
        TraceError: There is no such step, or a file is no such trace.
    """
    zero = _zero(trace, only)
    events = [event for rank in trace.ranks for event in _rank_events(trace, rank, only, zero)]
    for path in kineto:
        events += _merged(trace, path, zero)
    return _document(events, trace, trace.ranks[0])


def export_ranks(trace: Trace, only: int | None = None) -> dict[str, str]:
    """Write one file per rank, as HTA wants them: file names and texts.

    Args:
        trace: As it was read.
        only: This step alone; None: all.

    Raises:
        TraceError: There is no such step.
    """
    zero = _zero(trace, only)
    return {
        f"rank-{rank.rank:05}.json": _document(
            list(_rank_events(trace, rank, only, zero)), trace, rank
        )
        for rank in trace.ranks
    }


def _document(events: list[_Event], trace: Trace, rank: RankTrace) -> str:
    document = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        # HTA looks for the characters `"rank": N`, with that space.
        "distributedInfo": {
            "backend": "rankstep",
            "rank": rank.rank,
            "world_size": trace.world_size,
        },
        "traceName": trace.command,
        "traceEvents": events,
    }
    return json.dumps(document)


def _zero(trace: Trace, only: int | None) -> int:
    begins = [step.begin_ns for rank in trace.ranks for step in _shown(rank, only)]
    if not begins:
        raise TraceError(
            "there is no step to export"
            + ("" if only is None else f" with the number {only}")
            + ". Next: see `rankstep trace DIR` for the steps that were recorded."
        )
    return min(begins)


def _shown(rank: RankTrace, only: int | None) -> Iterable[StepTrace]:
    return (step for step in rank.steps if only is None or step.number == only)


def _rank_events(trace: Trace, rank: RankTrace, only: int | None, zero: int) -> Iterator[_Event]:
    pid = rank.rank
    yield _named(pid, 0, "process_name", f"rank {rank.rank} ({rank.host}, {rank.device})")
    yield {
        "ph": "M",
        "pid": pid,
        "tid": 0,
        "name": "process_sort_index",
        "args": {"sort_index": rank.rank},
    }
    yield _named(pid, STEPS, "thread_name", "steps")
    yield _named(pid, HOST, "thread_name", "host")
    lanes: list[int] = []
    for step in _shown(rank, only):
        peers = [s for r in trace.ranks for s in r.steps if s.number == step.number]
        started = overlap.starts(peers)
        yield _slice(
            pid, STEPS, f"ProfilerStep#{step.number}", step.begin_ns, step.end_ns, zero, "step"
        )
        yield from _host_events(rank, step, zero)
        for place, (bucket, start) in enumerate(zip(step.buckets, started, strict=False)):
            end = overlap.end_of_flight(bucket.finished_ns, bucket.wait_end_ns, start)
            known = len(lanes)
            lane = _free_lane(lanes, bucket.launched_ns, end)
            if lane == known:
                yield _named(pid, BUCKETS + lane, "thread_name", f"buckets {lane}")
            flow = (step.number * trace.world_size + rank.rank) * 100_000 + place
            yield from _bucket_events(rank, bucket, (start, end), BUCKETS + lane, flow, zero)


def _free_lane(lanes: list[int], begin: int, end: int) -> int:
    for lane, until in enumerate(lanes):
        if until <= begin:
            lanes[lane] = end
            return lane
    lanes.append(end)
    return len(lanes) - 1


def _host_events(rank: RankTrace, step: StepTrace, zero: int) -> Iterator[_Event]:
    for span in step.spans:
        if span.kind is SpanKind.OTHER:
            continue
        # HTA counts what has a stream and is called a kernel; the host's computing is all there is on a CPU.
        kernel = {"stream": HOST, "correlation": -1} if span.kind in COMPUTE else {}
        category = "kernel" if kernel else "host"
        yield _slice(
            rank.rank, HOST, span.kind.value, span.begin_ns, span.end_ns, zero, category, kernel
        )
    for param, at_ns in step.ready:
        yield {
            "ph": "i",
            "s": "t",
            "pid": rank.rank,
            "tid": HOST,
            "cat": "gradient",
            "name": rank.params[param],
            "ts": _us(at_ns - zero),
        }


def _bucket_events(
    rank: RankTrace, bucket: BucketTrace, flight: tuple[int, int], tid: int, flow: int, zero: int
) -> Iterator[_Event]:
    info = rank.buckets[bucket.index]
    start, end = flight
    names = [rank.params[i] for i in info.params]
    told = {"bytes": info.nbytes, "parameters": names, "in_backward": bucket.in_backward}
    launched = bucket.launched_ns
    if start > launched:
        name = f"bucket {bucket.index}: other ranks"
        yield _slice(rank.rank, tid, name, launched, start, zero, "bucket", told)
    told = {**told, "stream": tid, "correlation": -1}
    # HTA knows communication by these first words.
    name = f"ncclDevKernel_AllReduce bucket {bucket.index}"
    yield _slice(rank.rank, tid, name, start, end, zero, "kernel", told)
    arrow = {"cat": "bucket", "name": f"bucket {bucket.index}", "id": flow, "pid": rank.rank}
    yield {**arrow, "ph": "s", "tid": tid, "ts": _us(launched - zero)}
    waited = min(bucket.wait_end_ns, max(bucket.wait_begin_ns, launched))
    yield {**arrow, "ph": "f", "bp": "e", "tid": HOST, "ts": _us(waited - zero)}


def _slice(
    pid: int,
    tid: int,
    name: str,
    begin_ns: int,
    end_ns: int,
    zero: int,
    category: str,
    args: dict[str, Any] | None = None,
) -> _Event:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "cat": category,
        "name": name,
        "ts": _us(begin_ns - zero),
        "dur": _us(end_ns - begin_ns),
        "args": args or {},
    }


def _named(pid: int, tid: int, what: str, name: str) -> _Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}


def _us(ns: int) -> float:
    return ns / 1000


# ---------------------------------------------------------------- torch.profiler's traces


def _merged(trace: Trace, path: Path, zero: int) -> Iterator[_Event]:
    try:
        data = path.read_bytes()
        profile = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        base_ns = int(profile.get("baseTimeNanoseconds", 0))
        events = profile["traceEvents"]
        number = int(profile["distributedInfo"]["rank"]) if trace.world_size > 1 else 0
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(
            f"{path} is no trace of torch.profiler that names its rank ({type(error).__name__}: {error}). Next: give a "
            "file that prof.export_chrome_trace wrote while the process group was open."
        ) from error
    rank = next((rank for rank in trace.ranks if rank.rank == number), None)
    if rank is None:
        raise TraceError(f"{path} is of rank {number}, which this trace lacks. Next: leave it out.")
    # Its times are microseconds after a Unix time; ours become Unix time by adding unix_ns.
    shift = (base_ns - rank.unix_ns - zero) / 1000
    pids: dict[Any, int] = {}
    for event in events:
        pid = pids.setdefault(event.get("pid"), _FOREIGN_PIDS * (number + 1) + len(pids))
        moved = {**event, "pid": pid}
        if "ts" in event and event.get("ph") != "M":
            moved["ts"] = float(event["ts"]) + shift
        if "id" in event and event.get("ph") in ("s", "t", "f"):
            moved["id"] = _FOREIGN_IDS * (number + 1) + int(event["id"])
        args = event.get("args")
        if isinstance(args, dict):
            moved["args"] = dict(args)
            if isinstance(args.get("correlation"), int):
                moved["args"]["correlation"] = _FOREIGN_IDS * (number + 1) + args["correlation"]
            if event.get("name") == "process_name":
                moved["args"]["name"] = f"rank {number} profile: {args.get('name')}"
        yield moved
