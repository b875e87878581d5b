"""The reducer: counts gradients, launches buckets in plan order, and settles every backward.

It knows parameters as tensors with a number, and nothing of modules or of autograd: ``parallel/hooks.py`` tells it when
a gradient arrived and when the backward ended. One step goes like this:

1. The first gradient of a backward calls :meth:`Reducer.begin`.
2. Every further one calls :meth:`Reducer.ready` when its parameter fired as often as learned, or :meth:`Reducer.again`
   when it fired more often. A full bucket leaves once all lower ones have left, whatever order they fill in.
3. The end of the outermost backward calls :meth:`Reducer.settle`: the rest leaves, the last bucket with the trailer,
   everything is waited for, and the parameters get their views of the buckets.

The first synced backward only learns: how often each parameter fires, and in which order. Rank 0's order then becomes
the plan of all ranks.
"""

from __future__ import annotations

import contextlib
import enum
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from rankstep.buckets import trailer, verdict
from rankstep.buckets.bucket import Bucket, BucketState
from rankstep.buckets.learn import Firings
from rankstep.buckets.plan import Caps, ParamSpec, Plan, make_plan
from rankstep.errors import CommunicationError, LateGradientError
from rankstep.trace.events import BucketLaunched, BucketWaited, GradReady, StepSettled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rankstep.buckets.bucket import Kept
    from rankstep.collectives import Communicator
    from rankstep.trace.events import Event

EAGER_BYTES = 16 * 1024
"""From 16 KiB on a CPU gradient is divided and copied as soon as it is ready: one pass, while it is in the cache."""


class ReducerState(enum.Enum):
    """What a reducer is doing; ``_LEGAL`` has the moves."""

    IDLE = "idle"
    COLLECTING = "collecting gradients"
    SETTLING = "settling"
    DIED = "left by a backward that died"
    BROKEN = "broken"


_LEGAL = {
    ReducerState.IDLE: (ReducerState.COLLECTING, ReducerState.BROKEN),
    ReducerState.COLLECTING: (ReducerState.SETTLING, ReducerState.DIED, ReducerState.BROKEN),
    ReducerState.SETTLING: (ReducerState.IDLE, ReducerState.BROKEN),
    ReducerState.DIED: (ReducerState.IDLE, ReducerState.BROKEN),
    ReducerState.BROKEN: (),
}


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the last settled backward did.

    Attributes:
        step: Its number, counted from 0.
        buckets: How many buckets there are.
        all_reduces: How many all-reduces it took; a broadcast of the order in the first step is not counted.
        launched_in_backward: Buckets that left while other buckets still lacked gradients.
        unused: Names of the parameters that no rank used.
        second_round: Whether late gradients made a second round necessary.
    """

    step: int
    buckets: int
    all_reduces: int
    launched_in_backward: int
    unused: tuple[str, ...]
    second_round: bool


@dataclass(slots=True)
class _Step:
    """What has happened in the step under way."""

    next_bucket: int = 0
    in_backward: int = 0
    all_reduces: int = 0
    unused: dict[int, Kept] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)
    nowhere: tuple[int, ...] = ()
    second_round: bool = False


class Reducer:
    """Turns the ranks' local gradients into the one global gradient, bucket by bucket.

    Args:
        names: The parameters' names, for plans and messages.
        params: The trainable parameters, in the same order on every rank.
        comm: Moves the buckets.
        caps: When a bucket is full.
        wrapper: This wrapper's number in the process, equal on all ranks.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[torch.Tensor],
        comm: Communicator,
        caps: Caps,
        wrapper: int = 0,
    ) -> None:
        self.params = list(params)
        self.specs = [ParamSpec.of(n, p) for n, p in zip(names, params, strict=True)]
        self.comm = comm
        self.caps = caps
        self.wrapper = wrapper
        self.plan: Plan | None = None
        self.buckets: list[Bucket] = []
        self.state = ReducerState.IDLE
        self.firings = Firings(len(params))
        self.recorder: Callable[[Event], None] | None = None
        self.reductions = 0
        self.forwards = 0
        self._bucket_of: list[Bucket] = []
        self._awaited: list[int] = []
        self._step = _Step()
        self._last: _Step | None = None
        self._tail: trailer.Trailer | None = None
        self._later: verdict.Later | None = None
        self._broken = ""

    # ---------------------------------------------------------------- called during backward

    def begin(self) -> None:
        """A synced backward has produced its first gradient.

        Raises:
            SyncError: The step before this one turned out wrong, or a collective failed earlier.
        """
        self._finish_earlier()
        self._move(ReducerState.COLLECTING)

    def ready(self, index: int, param: torch.Tensor) -> None:
        """A parameter has fired as often as learned: its gradient is whole."""
        if self.recorder is not None:
            self.recorder(GradReady(self.reductions, index, time.perf_counter_ns()))
        bucket = self._bucket_of[index]
        # A user's hook on this parameter runs after ours and wants to see the gradient: leave it where it is, and
        # let its bucket go with the next one.
        watched = len(param._post_accumulate_grad_hooks or ()) > 1
        if index in bucket.large and not watched:
            bucket.copy_in(index, param)
        bucket.left -= 1
        if bucket.left == 0 and not watched and bucket is not self.buckets[-1]:
            self._gather(bucket)
            self._launch_full()

    def again(self, index: int, param: torch.Tensor) -> None:
        """A parameter has fired more often than learned."""
        if self.plan is None:
            self.firings.note(index)
            return
        bucket = self._bucket_of[index]
        if bucket.state is BucketState.IN_FLIGHT:
            self._step.late.append(index)
        elif bucket.state is BucketState.READY or index in bucket.copied:
            bucket.add(index, param)
            self._step.unused.pop(index, None)

    def settle(self) -> None:
        """The outermost backward has ended: reduce what is open, wait, hand the gradients back.

        Raises:
            SyncError: The ranks disagree about this step (the same error on every rank), or a collective failed.
        """
        self._move(ReducerState.SETTLING)
        step = self._step
        rows: list[trailer.Row] = []
        try:
            if self.plan is None:
                self._adopt_plan()
            self._launch_rest()
            self._wait()
            if self.comm.world_size > 1:
                if self.comm.host_waits:
                    rows = self._trailer.read_rows()
                else:
                    self._later = verdict.Later(self._trailer, self.reductions)
            step.second_round = any(row.late for row in rows) or (
                bool(step.late) and self.comm.world_size == 1
            )
            if step.second_round:
                self._reduce_late()
            self._hand_back()
        except BaseException as error:
            self._break(error)
            raise
        self._close_step()
        if rows:
            verdict.judge(rows, self.comm.rank, self.reductions - 1)
        if step.late and not step.second_round:
            names = ", ".join(self.specs[i].name for i in step.late[:8])
            raise LateGradientError(
                f"rank {self.comm.rank}: in step {self.reductions - 1} (counted from 0) a gradient of {names} arrived "
                "after its bucket had left. From the next step on its bucket waits for it; restore the weights and "
                "repeat this step on all ranks."
            )

    def died(self) -> None:
        """A backward raised before its end. Never raises: it is called while an exception travels.

        What has not left yet leaves as zeros with a mark, at once, so that no rank waits for this one or sums other
        sizes. Waiting is left to the next call of anything else.
        """
        if self.state is not ReducerState.COLLECTING:
            return
        self._move(ReducerState.DIED)
        if self.plan is not None:
            try:
                self._launch_zeros()
            except Exception as error:  # noqa: BLE001 - kept, and raised by whatever this rank does next
                self._break(error)

    def enter_forward(self, *, counts: bool) -> None:
        """The wrapper is called outside any backward.

        Args:
            counts: It is a training forward whose backward will be synced.

        Raises:
            SyncError: The step before this one turned out wrong, or a collective failed earlier.
        """
        if self.state is ReducerState.COLLECTING:
            self.died()
        self._finish_earlier()
        if counts:
            self.forwards += 1

    @property
    def last_step(self) -> StepFacts | None:
        """Facts of the last settled backward; None before the first."""
        if self._last is None:
            return None
        return StepFacts(
            step=self.reductions - 1,
            buckets=len(self.buckets),
            all_reduces=self._last.all_reduces,
            launched_in_backward=self._last.in_backward,
            unused=tuple(self.specs[i].name for i in self._last.nowhere),
            second_round=self._last.second_round,
        )

    # ---------------------------------------------------------------- launching

    def _gather(self, bucket: Bucket) -> None:
        """Take in the gradients of a bucket that leaves soon."""
        whole = bucket.left == 0 and len(bucket.params) == self._awaited[bucket.spec.index]
        if not (whole and bucket.gather()):
            self._step.unused.update(bucket.gather_with_gaps(self.firings.touched))
        bucket.move(BucketState.READY)

    def _launch_full(self) -> None:
        """Launch full buckets in plan order up to the first that still lacks a gradient; never the last one."""
        for bucket in self.buckets[self._step.next_bucket : -1]:
            if bucket.left:
                return
            if bucket.state is BucketState.FILLING:
                self._gather(bucket)
            still_open = any(b.left for b in self.buckets[bucket.spec.index + 1 :])
            self._launch(bucket, in_backward=still_open)

    def _launch_rest(self) -> None:
        """At the end of backward: launch every bucket that is still here, the last one with the trailer."""
        for bucket in self.buckets[self._step.next_bucket :]:
            if bucket.state is BucketState.FILLING:
                self._gather(bucket)
            if bucket is self.buckets[-1]:
                self._write_trailer()
            self._launch(bucket, in_backward=False)

    def _launch_zeros(self) -> None:
        for bucket in self.buckets[self._step.next_bucket :]:
            bucket.zero()
            if bucket is self.buckets[-1]:
                self._trailer.write(self._row(abandoned=True), [0] * len(self.params))
            self._launch(bucket, in_backward=False)

    def _launch(self, bucket: Bucket, *, in_backward: bool) -> None:
        with self._naming_failures():
            bucket.launch()
        step = self._step
        step.next_bucket += 1
        step.all_reduces += 1
        step.in_backward += in_backward
        if self.recorder is not None:
            self.recorder(
                BucketLaunched(
                    self.reductions, bucket.spec.index, in_backward, time.perf_counter_ns()
                )
            )

    def _write_trailer(self) -> None:
        used: list[int] | None = None
        if self._step.unused:
            used = [1] * len(self.params)
            for index in self._step.unused:
                used[index] = 0
            for index in self._step.late:
                used[index] = 1
        self._trailer.write(self._row(abandoned=False), used)

    def _row(self, *, abandoned: bool) -> trailer.Row:
        return trailer.Row(
            wrapper=self.wrapper,
            reductions=self.reductions,
            forwards=self.forwards,
            abandoned=int(abandoned),
            late=int(bool(self._step.late) and not abandoned),
        )

    # ---------------------------------------------------------------- settling

    def _wait(self) -> None:
        for bucket in self.buckets:
            begun_ns = time.perf_counter_ns() if self.recorder is not None else 0
            with self._naming_failures():
                bucket.wait()
            if self.recorder is not None:
                self.recorder(
                    BucketWaited(
                        self.reductions, bucket.spec.index, begun_ns, time.perf_counter_ns()
                    )
                )

    def _reduce_late(self) -> None:
        for bucket in self.buckets:
            bucket.second_round(self._step.late, self.specs)
            self._step.all_reduces += 1

    def _hand_back(self) -> None:
        for bucket in self.buckets:
            bucket.hand_back()
        unused = self._step.unused
        if unused:
            used = self._trailer.read_used()
            self._step.nowhere = tuple(sorted(i for i in unused if not used[i]))
            for index in self._step.nowhere:
                self._bucket_of[index].restore(index, unused[index])

    def _close_step(self) -> None:
        if self.recorder is not None:
            self.recorder(StepSettled(self.reductions, time.perf_counter_ns()))
        self.reductions += 1
        self.forwards = 0
        self._step.unused.clear()
        self._last, self._step = self._step, _Step()
        if self.firings.close():
            self._count_awaited()
        for bucket, awaited in zip(self.buckets, self._awaited, strict=True):
            bucket.begin_step(awaited)
        self._move(ReducerState.IDLE)

    # ---------------------------------------------------------------- plan

    def _adopt_plan(self) -> None:
        """Agree on rank 0's order, plan the buckets and allocate them; once, at the end of the first backward."""
        device = self.specs[0].device
        order = torch.tensor(self.firings.order(), dtype=torch.int64, device=device)
        self.comm.broadcast(order, 0).wait()
        packed_below = EAGER_BYTES if device.type == "cpu" else sys.maxsize
        plan = make_plan(self.specs, order.tolist(), self.caps, packed_below_bytes=packed_below)
        tail_numel = trailer.numel(len(self.params), self.comm.world_size)
        last = len(plan.buckets) - 1
        self.buckets = [
            Bucket(
                spec, self.specs, self.params, self.comm, tail_numel if spec.index == last else 0
            )
            for spec in plan.buckets
        ]
        bucket_of = {i: bucket for bucket in self.buckets for i in bucket.spec.params}
        self._bucket_of = [bucket_of[i] for i in range(len(self.params))]
        self._tail = trailer.Trailer(
            self.buckets[-1].flat[plan.buckets[-1].numel :],
            len(self.params),
            self.comm.rank,
            self.comm.world_size,
            averages=self.comm.averages,
        )
        self._awaited = [0] * len(self.buckets)
        self.plan = plan

    @property
    def _trailer(self) -> trailer.Trailer:
        assert self._tail is not None, "no trailer before the plan"  # noqa: S101
        return self._tail

    def _count_awaited(self) -> None:
        expected = self.firings.expected
        self._awaited = [sum(1 for i in b.spec.params if expected[i]) for b in self.buckets]

    # ---------------------------------------------------------------- when something failed

    def _finish_earlier(self) -> None:
        """See the previous step to its end: one that died, one that a GPU had not judged yet."""
        if self.state is ReducerState.BROKEN:
            raise CommunicationError(self._broken)
        if self.state is ReducerState.DIED:
            self._finish_died()
        if self._later is not None:
            later, self._later = self._later, None
            later.judge(self.comm.rank)

    def _finish_died(self) -> None:
        try:
            if self.plan is None:
                self._adopt_plan()
                self._launch_zeros()
            self._wait()
        except BaseException as error:
            self._break(error)
            raise
        # No verdict here: the others raised theirs in that step and this rank its own, so all may go on together.
        self._close_step()

    @contextlib.contextmanager
    def _naming_failures(self) -> Iterator[None]:
        """Say which step a collective failed in, and what to do."""
        try:
            yield
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self.comm.rank}: a collective of step {self.reductions} (counted from 0) failed; "
                f"{self._step.next_bucket} of {len(self.buckets)} buckets had left: {error}. A rank has probably ended "
                "or cannot be reached: look for the first error among the ranks' outputs, then start them again."
            ) from error

    def _break(self, error: BaseException) -> None:
        """Nothing can be said of the buckets any more: from now on every use repeats why."""
        self._broken = str(error) or type(error).__name__
        self._move(ReducerState.BROKEN)

    def _move(self, state: ReducerState) -> None:
        if state not in _LEGAL[self.state]:
            raise AssertionError(f"reducer: {self.state} cannot become {state}")
        self.state = state
