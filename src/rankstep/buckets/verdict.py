"""What the trailer's rows say about the ranks: in step, or who is not and why."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import torch

from rankstep.buckets.trailer import Mode
from rankstep.errors import AbandonedBackwardError, CountError, LateGradientError, RankSkewError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankstep.buckets.trailer import Row, Trailer


def judge(rows: Sequence[Row], rank: int, step: int) -> None:
    """Return if all ranks did the same step, else raise the same error on every rank.

    Args:
        rows: What each rank said, in rank order.
        rank: Of the reader, for the message.
        step: Which synced backward of this wrapper, counted from 0.

    Raises:
        AbandonedBackwardError: Some ranks' backward died, others' did not.
        RankSkewError: The ranks reduced different wrappers, mixed two kinds of backward, or one skipped or repeated a
            step.
    """
    if not rows or all(row == rows[0] for row in rows):
        return
    mixed = [r for r, row in enumerate(rows) if row.mode == Mode.MIXED]
    if mixed and len(mixed) < len(rows):
        raise RankSkewError(
            f"rank {rank}: {_ranks(mixed)} mixed plain loss.backward() and model.backward(count=...) in the accumulation "
            f"window of step {step} (counted from 0); use model.backward for all of its micro-batches, on every rank."
        )
    died = [r for r, row in enumerate(rows) if row.abandoned]
    if died and len(died) < len(rows):
        raise AbandonedBackwardError(
            f"rank {rank}: {_ranks(died)} left backward by an exception in step {step} (counted from 0), so that step's "
            "gradient lacks a part; its own traceback says why. Skip this step on all ranks, or stop."
        )
    skew = _Comparison(rank, step, dict(enumerate(rows)))
    skew.compare(
        "wrapper",
        lambda row: row.wrapper,
        "reduced wrapper number {}",
        "Wrapped models must be used in the same order on every rank.",
    )
    skew.compare(
        "reductions",
        lambda row: row.reductions,
        "is at reduction {}",
        "Some rank called backward more often than the others.",
    )
    live = {r: row for r, row in enumerate(rows) if row.mode not in (Mode.JOINED, Mode.SPENT)}
    skew = _Comparison(rank, step, live)
    skew.compare(
        "kind of backward",
        lambda row: row.mode == Mode.WEIGHTED,
        "called model.backward with a count: {}",
        "Every rank must pass a count, or none; a rank with nothing passes count=0.",
    )
    if any(row.mode == Mode.WEIGHTED for row in live.values()):
        return  # Ranks may have different numbers of micro-batches then.
    skew.compare(
        "forwards",
        lambda row: row.forwards,
        "ran {} training forward(s) since the last reduction",
        "Some rank skipped a backward (a `continue` on a bad batch?), repeated one, was in no_sync alone, or had another "
        "number of micro-batches, which only model.backward(loss_sum, count=n) can weigh. "
        "Every rank must take the same steps.",
    )


def factor(rows: Sequence[Row], rank: int, step: int, *, divides_by_live: bool) -> float:
    """What the mean over all ranks must be multiplied with to be the gradient that was asked for.

    Args:
        rows: What each rank said.
        rank: Of the reader, for the message.
        step: Which synced backward, for the message.
        divides_by_live: Ranks under ``join`` that ran out do not count in the mean.

    Raises:
        CountError: All counts are zero.
    """
    weighted = [row for row in rows if row.mode == Mode.WEIGHTED]
    others = [row for row in rows if row.mode == Mode.SYNC]
    if weighted and not others:
        total = sum(row.count for row in rows)
        if total == 0:
            raise CountError(
                f"rank {rank}: the counts of all ranks are 0 in step {step} (counted from 0), so there is no mean. "
                "Skip such a step on every rank."
            )
        if not 0 < len(rows) / total < math.inf:
            raise CountError(
                f"rank {rank}: the counts of all ranks make {total} in step {step} (counted from 0), by which no "
                "gradient can be divided."
            )
        return len(rows) / total
    spent = sum(
        row.mode == Mode.SPENT or (row.mode == Mode.JOINED and divides_by_live) for row in rows
    )
    return len(rows) / (len(rows) - spent) if spent < len(rows) else 1.0


class _Comparison:
    """Compares one value over the ranks and raises if it differs."""

    def __init__(self, rank: int, step: int, rows: dict[int, Row]) -> None:
        self._rank = rank
        self._step = step
        self._rows = rows

    def compare(self, what: str, value: Callable[[Row], int], says: str, advice: str) -> None:
        counts = Counter(value(row) for row in self._rows.values())
        if len(counts) <= 1:
            return
        usual, many = counts.most_common(1)[0]
        # Without a majority nobody is the odd one out: show all. Otherwise those who differ from the most.
        majority = 2 * many > len(self._rows)
        odd = [r for r, row in self._rows.items() if not majority or value(row) != usual]
        shown = "; ".join(f"rank {r} {says.format(value(self._rows[r]))}" for r in odd[:8])
        rest = f"; the others: {says.format(usual)}" if majority else ""
        raise RankSkewError(
            f"rank {self._rank}: the ranks are out of step ({what}) in step {self._step} (counted from 0): {shown}{rest}. "
            f"{advice}"
        )


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


class Later:
    """Rows on their way from a GPU to the host, to be judged when the next step begins.

    Args:
        tail: The trailer, whose collective was started and ordered before the current stream.
        number: Which synced backward.
    """

    def __init__(self, tail: Trailer, number: int) -> None:
        rows = tail.rows_tensor()
        self.number = number
        self._tail = tail
        self._host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        self._host.copy_(rows, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def rows(self) -> list[Row]:
        """What each rank said; the copy is a step old and waits for nothing."""
        self._copied.synchronize()
        return self._tail.decode_rows(self._host.tolist())


def judge_unsettled(rows: Sequence[Row], rank: int, step: int) -> None:
    """Raise if a rank had something to add to an earlier step that could not be added any more.

    Raises:
        LateGradientError: Names the ranks.
    """
    wrong = [r for r, row in enumerate(rows) if row.late or row.changed]
    if wrong:
        raise LateGradientError(
            f"rank {rank}: in step {step} (counted from 0) {_ranks(wrong)} got a gradient after its bucket had left; the "
            "weights of the ranks differ from then on. That rank's own error names the parameter."
        )


def late_here(names: Sequence[str], rank: int, step: int) -> LateGradientError:
    """The error of the rank whose gradients came too late to be added."""
    what = ", ".join(names[:8]) or "a parameter that was not wrapped"
    return LateGradientError(
        f"rank {rank}: in step {step} (counted from 0) a gradient of {what} arrived after its bucket had left. Wrap the "
        "module again if it has changed; otherwise its bucket waits for it from the next step on: restore the weights "
        "and repeat this step on all ranks."
    )
