"""Invented traces for the page: regular enough to foretell what is drawn, irregular enough to look like training."""

from __future__ import annotations

import random
from functools import cache

from rankstep.trace.model import (
    BucketInfo,
    BucketTrace,
    RankTrace,
    Span,
    SpanKind,
    StepTrace,
    Trace,
)

MS = 1_000_000
HOSTILE = "</script><img src=x onerror=alert(1)>"
VERSIONS = {"rankstep": "0.1.0", "torch": "2.13.0", "python": "3.11.7"}


def two_ranks():
    """Give two ranks and two steps of whole milliseconds, in which rank 1 loads its data for 6 ms longer.

    A step takes 40 ms: data (rank 0: 2, rank 1: 8), forward 10, backward 12, wait to 34, optimizer 4, other 2. Bucket 0
    is launched 7 ms before backward ends; bucket 1 leaves when backward ends.
    """
    params = ("head.weight", "head.bias", "body.weight")
    infos = (BucketInfo(0, 3 << 20, (0, 1)), BucketInfo(1, 24 << 20, (2,)))
    ranks = []
    for rank, data in enumerate((2, 8)):
        steps = []
        for number in range(2):
            begin = (1000 + 40 * number) * MS

            def at(ms, begin=begin):
                return begin + ms * MS

            edges = (0, data, data + 10, data + 22, 34, 38, 40)
            kinds = ("DATA", "FORWARD", "BACKWARD", "WAIT", "OPTIMIZER", "OTHER")
            spans = tuple(
                Span(SpanKind[kind], at(a), at(b))
                for kind, a, b in zip(kinds, edges, edges[1:], strict=False)
            )
            done = data + 22
            buckets = (
                BucketTrace(
                    0, at(done - 8), at(done - 7), at(29), at(done), at(max(29, done)), True
                ),
                BucketTrace(1, at(done), at(done), at(34), at(max(29, done)), at(34), False),
            )
            ready = ((0, at(done - 10)), (1, at(done - 9)), (2, at(done - 1)))
            learns = number == 0
            steps.append(StepTrace(number, at(0), at(40), spans, ready, buckets, learns=learns))
        ranks.append(RankTrace(rank, "alpha", "cpu", 1000, params, infos, tuple(steps), True))
    return Trace(tuple(ranks), 2, "rankstep run --nproc-per-node 2 train.py", VERSIONS)


def hostile():
    """Give one rank whose every text tries to get out of its place."""
    bucket = BucketTrace(0, None, 5 * MS, None, 6 * MS, 8 * MS, False)
    spans = (Span(SpanKind.BACKWARD, 0, 6 * MS), Span(SpanKind.WAIT, 6 * MS, 8 * MS))
    step = StepTrace(3, 0, 8 * MS, spans, ((0, 2 * MS), (1, 4 * MS)), (bucket,))
    names = (HOSTILE, "<!--<script>\u2028\u202e{{ 7*7 }}\ud800 & 'quoted\"")
    plan = (BucketInfo(0, 100, (0, 1)),)
    rank = RankTrace(0, HOSTILE, HOSTILE, None, names, plan, (step,), False)
    return Trace((rank,), 3, f"train.py --name {HOSTILE}", {HOSTILE: HOSTILE})


@cache
def big(ranks=64, steps=20, layers=500, per_bucket=50):
    """Give many ranks: two parameters a layer, buckets of ``per_bucket``, a rank that is often slow to load data."""
    chance = random.Random(64)
    params = tuple(
        f"transformer.layers.{layer}.attention.projection.{kind}"
        for layer in range(layers)
        for kind in ("weight", "bias")
    )
    order = list(range(len(params)))[::-1]
    plan = tuple(
        BucketInfo(i, 4 * 262_144 * per_bucket, tuple(order[i * per_bucket : (i + 1) * per_bucket]))
        for i in range(-(-len(params) // per_bucket))
    )
    begins, done = [5_000_000_000] * ranks, {rank: [] for rank in range(ranks)}
    for number in range(10, 10 + steps):
        drafts = [_draft(chance, begins[rank], order, plan, rank) for rank in range(ranks)]
        ends = _meet(drafts, chance)
        for rank, draft in enumerate(drafts):
            step = _finish(chance, number, draft, ends, first=number == 10)
            done[rank].append(step)
            begins[rank] = step.end_ns
    traces = tuple(
        RankTrace(
            r, f"node{r // 8:02}", f"cuda:{r % 8}", 20_000, params, plan, tuple(done[r]), True
        )
        for r in range(ranks)
    )
    return Trace(traces, ranks, "rankstep run --nnodes 8 --nproc-per-node 8 train.py", VERSIONS)


def _draft(chance, begin, order, plan, rank):
    """Make data, forward and backward of one step, and the launches of its buckets."""
    late = 38 * MS if rank == 3 and chance.random() < 0.9 else 0
    data = begin + int(chance.uniform(1.5, 3) * MS) + late
    forward = data + int(chance.uniform(58, 62) * MS)
    now, ready, filled = forward, [], []
    for place, param in enumerate(order):
        now += int(chance.expovariate(1 / 120_000)) + 1_000
        ready.append((param, now))
        if place + 1 == len(order) or (place + 1) % len(plan[0].params) == 0:
            filled.append(now + 9_000)
    return begin, data, forward, now + 50_000, tuple(ready), filled


def _meet(drafts, chance):
    """Say when each bucket's all-reduce ends: a while after the last rank launched it, and one after the other."""
    ends, line = [], 0
    for launches in zip(*(draft[5] for draft in drafts), strict=True):
        line = max(line, max(launches) + 200_000) + int(chance.uniform(4, 9) * MS)
        ends.append(line)
    return ends


def _finish(chance, number, draft, ends, *, first):
    begin, data, forward, backward, ready, filled = draft
    buckets, now = [], backward
    for index, (full, end) in enumerate(zip(filled, ends, strict=True)):
        waited, now = now, max(now, end) + 4_000
        buckets.append(
            BucketTrace(index, full, full + 6_000, end, waited, now, full < backward - 60_000)
        )
    optimizer = now + int(chance.uniform(11, 13) * MS)
    over = optimizer + int(chance.uniform(0.5, 2) * MS)
    edges = (begin, data, forward, backward, now, optimizer, over)
    spans = tuple(Span(kind, a, b) for kind, a, b in zip(SpanKind, edges, edges[1:], strict=False))
    return StepTrace(number, begin, over, spans, () if first else ready, tuple(buckets))
