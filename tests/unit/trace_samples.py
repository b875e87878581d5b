"""Hand-made traces with known times, in whole milliseconds."""

from __future__ import annotations

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
D, F, B, W, S, X = (
    SpanKind.DATA,
    SpanKind.FORWARD,
    SpanKind.BACKWARD,
    SpanKind.WAIT,
    SpanKind.OPTIMIZER,
    SpanKind.OTHER,
)


def spans(begin, *pieces):
    """(kind, length) one after the other."""
    made = []
    for kind, length in pieces:
        made.append(Span(kind, begin * MS, (begin + length) * MS))
        begin += length
    return tuple(made)


def bucket(index, filled, launched, finished, wait_begin, wait_end, *, early=True):
    def ns(ms):
        return None if ms is None else ms * MS

    return BucketTrace(
        index, ns(filled), ns(launched), ns(finished), ns(wait_begin), ns(wait_end), early
    )


def step(number, begin, pieces, ready, buckets):
    made = spans(begin, *pieces)
    return StepTrace(
        number,
        begin * MS,
        made[-1].end_ns,
        made,
        tuple((param, at * MS) for param, at in ready),
        tuple(buckets),
        learns=number == 0,
    )


def rank(number, steps, *, error=0, complete=True, device="cpu"):
    return RankTrace(
        rank=number,
        host="here",
        device=device,
        clock_error_ns=error,
        params=("first.weight", "second.weight", "third.weight"),
        buckets=(BucketInfo(0, 2048, (2, 1)), BucketInfo(1, 4 * 2**20, (0,))),
        steps=tuple(steps),
        complete=complete,
    )


def quick(number=1, begin=0):
    """Loads for 2 ms, computes for 40 and waits for 38."""
    at = begin
    return step(
        number,
        begin,
        [(D, 2), (X, 1), (F, 10), (B, 20), (W, 38), (B, 1), (S, 9), (X, 3)],
        [(2, at + 15), (1, at + 20), (0, at + 33)],
        [
            bucket(0, at + 20, at + 21, at + 61, at + 33, at + 62),
            bucket(1, at + 33, at + 33, at + 71, at + 62, at + 71, early=False),
        ],
    )


def slow(number=1, begin=0):
    """Loads for 34 ms, computes for 40 and waits for 6."""
    at = begin
    return step(
        number,
        begin,
        [(D, 34), (X, 1), (F, 10), (B, 20), (W, 6), (B, 1), (S, 9), (X, 3)],
        [(2, at + 47), (1, at + 52), (0, at + 65)],
        [
            bucket(0, at + 52, at + 53, at + 61, at + 65, at + 65),
            bucket(1, at + 65, at + 65, at + 71, at + 65, at + 71, early=False),
        ],
    )


def two_ranks(*numbers):
    """Rank 1 is late in each of these steps, in data loading."""
    numbers = numbers or (1,)
    ranks = [
        rank(r, [of(number, 84 * place) for place, number in enumerate(numbers)])
        for r, of in enumerate((quick, slow))
    ]
    return Trace(tuple(ranks), 2, "train.py --epochs 3", {"rankstep": "1", "torch": "2"})
