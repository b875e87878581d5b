"""A trace in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open and HTA reads.

Every rank is a process. Its threads are its steps, its host, and as many lanes of buckets as let no two of them touch,
because slices of one thread must nest. Times are microseconds since the first step that is shown. An arrow leads from
each bucket to the wait for it.

Source: the "Trace Event Format" document of the Chromium project; https://github.com/facebookresearch/HolisticTraceAnalysis
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rankstep.trace import overlap
from rankstep.trace.files import TraceError
from rankstep.trace.kineto import merged
from rankstep.trace.model import SpanKind
from rankstep.trace.overlap import COMPUTE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from rankstep.trace.model import BucketTrace, RankTrace, StepTrace, Trace

STEPS, HOST, BUCKETS = 0, 1, 10
"""Thread numbers; bucket lanes count on from the last."""

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
    zero, starts = _zero(trace, only), _starts(trace)
    events = [
        event for rank in trace.ranks for event in _rank_events(trace, rank, only, zero, starts)
    ]
    for path in kineto:
        events += merged(trace, path, zero)
    if kineto:
        # A profile may begin before the first step, and viewers want no time below 0.
        first = min(event["ts"] for event in events if event["ph"] != "M")
        events = [e if e["ph"] == "M" else {**e, "ts": e["ts"] - first} for e in events]
    return _document(events, trace, trace.ranks[0])


def export_ranks(trace: Trace, only: int | None = None) -> dict[str, str]:
    """Write one file per rank, as HTA wants them: file names and texts.

    Args:
        trace: As it was read.
        only: This step alone; None: all.

    Raises:
        TraceError: There is no such step.
    """
    zero, starts = _zero(trace, only), _starts(trace)
    return {
        f"rank-{rank.rank:05}.json": _document(
            list(_rank_events(trace, rank, only, zero, starts)), trace, rank
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


def _starts(trace: Trace) -> dict[int, dict[int, int]]:
    """For each step when its buckets started."""
    peers: dict[int, list[StepTrace]] = {}
    for rank in trace.ranks:
        for step in rank.steps:
            peers.setdefault(step.number, []).append(step)
    return {number: overlap.starts(steps) for number, steps in peers.items()}


def _rank_events(
    trace: Trace,
    rank: RankTrace,
    only: int | None,
    zero: int,
    starts: Mapping[int, Mapping[int, int]],
) -> Iterator[_Event]:
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
    several = len(rank.wrappers) > 1
    for step in _shown(rank, only):
        started = starts[step.number]
        name = f"ProfilerStep#{step.number}"
        told = {"wrappers": [rank.wrappers[i] for i in step.wrappers]} if several else {}
        yield _slice(pid, STEPS, name, step.begin_ns, step.end_ns, zero, "step", told)
        yield from _host_events(rank, step, zero)
        for place, bucket in enumerate(step.buckets):
            start = started[bucket.index]
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
    title = f"bucket {bucket.index}"
    if len(rank.wrappers) > 1:
        told["wrapper"] = rank.wrappers[info.wrapper]
        title += f" of {told['wrapper']}"
    launched = bucket.launched_ns
    if start > launched:
        name = f"{title}: other ranks"
        yield _slice(rank.rank, tid, name, launched, start, zero, "bucket", told)
    told = {**told, "stream": tid, "correlation": -1}
    # HTA knows communication by these first words.
    name = f"ncclDevKernel_AllReduce {title}"
    yield _slice(rank.rank, tid, name, start, end, zero, "kernel", told)
    arrow = {"cat": "bucket", "name": title, "id": flow, "pid": rank.rank}
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
