"""What the trailer's rows say about the ranks: in step, or who is not and why."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from rankstep.errors import AbandonedBackwardError, LateGradientError, RankSkewError

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
        RankSkewError: The ranks reduced different wrappers, or one skipped or repeated a step.
    """
    if all(row == rows[0] for row in rows):
        return
    died = [r for r, row in enumerate(rows) if row.abandoned]
    if died and len(died) < len(rows):
        raise AbandonedBackwardError(
            f"rank {rank}: {_ranks(died)} left backward by an exception in step {step} (counted from 0), so that step's "
            f"gradient lacks a part; its own traceback says why. Skip this step on all ranks, or stop."
        )
    _compare(
        rows,
        rank,
        step,
        "wrapper",
        lambda row: row.wrapper,
        "reduced wrapper number {}",
        "Wrapped models must be used in the same order on every rank.",
    )
    _compare(
        rows,
        rank,
        step,
        "reductions",
        lambda row: row.reductions,
        "is at reduction {}",
        "Some rank called backward more often than the others.",
    )
    _compare(
        rows,
        rank,
        step,
        "forwards",
        lambda row: row.forwards,
        "ran {} training forward(s) since the last reduction",
        "Some rank skipped a backward (a `continue` on a bad batch?), repeated one, or was in no_sync alone. "
        "Every rank must take the same steps.",
    )


def _compare(
    rows: Sequence[Row],
    rank: int,
    step: int,
    what: str,
    value: Callable[[Row], int],
    says: str,
    advice: str,
) -> None:
    counts = Counter(value(row) for row in rows)
    if len(counts) == 1:
        return
    usual = counts.most_common(1)[0][0]
    # With two ranks nobody is in the majority: show both. With more, those who differ from the most.
    several = counts[usual] > len(rows) - counts[usual]
    odd = [r for r, row in enumerate(rows) if not several or value(row) != usual]
    shown = "; ".join(f"rank {r} {says.format(value(rows[r]))}" for r in odd[:8])
    rest = f"; the others: {says.format(usual)}" if several else ""
    raise RankSkewError(
        f"rank {rank}: the ranks are out of step ({what}) in step {step} (counted from 0): {shown}{rest}. {advice}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


class Later:
    """Rows on their way from a GPU to the host, to be judged when the next step begins.

    Args:
        tail: The trailer, whose collective was started and ordered before the current stream.
        step: Which synced backward.
    """

    def __init__(self, tail: Trailer, step: int) -> None:
        rows = tail.rows_tensor()
        self._tail = tail
        self._step = step
        self._host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        self._host.copy_(rows, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def judge(self, rank: int) -> None:
        """Raise what the rows of the previous step ask for."""
        self._copied.synchronize()
        rows = self._tail.decode_rows(self._host.tolist())
        judge(rows, rank, self._step)
        late = [r for r, row in enumerate(rows) if row.late]
        if late:
            raise LateGradientError(
                f"rank {rank}: in step {self._step} (counted from 0) {_ranks(late)} got a gradient after its bucket "
                "had left; the weights of the ranks differ from then on. That rank's own error names the parameter."
            )
