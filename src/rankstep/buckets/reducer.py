"""The reducer: settles every backward.

It knows parameters as tensors with a number, and nothing of modules or of autograd: ``parallel/hooks.py`` tells it when
a gradient arrived and when the backward ended. One step goes like this:

1. The first gradient of a backward calls :meth:`Reducer.begin`.
2. Every further one calls :meth:`Reducer.ready` when its parameter fired as often as learned, or :meth:`Reducer.again`
   when it fired more often. A full bucket leaves once all lower ones have left (``collector.py``, ``line.py``).
3. The end of the outermost backward calls :meth:`Reducer.settle`: the rest leaves, the last bucket with the trailer,
   everything is waited for, and the parameters get their views of the buckets.

The first synced backward only learns: how often each parameter fires, and in which order. Rank 0's order then becomes
the plan of all ranks.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rankstep.buckets import verdict
from rankstep.buckets.collector import Collector
from rankstep.buckets.exchange import Exchange
from rankstep.buckets.states import ReducerState
from rankstep.buckets.step import Step
from rankstep.buckets.trailer import Mode
from rankstep.buckets.window import Window
from rankstep.errors import CommunicationError, CountError, ModelError, NonFiniteGradientWarning
from rankstep.trace.events import BackwardBegan, StepSettled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import torch

    from rankstep.buckets.plan import Caps
    from rankstep.buckets.promise import StaticPromise
    from rankstep.buckets.states import Owner
    from rankstep.buckets.trailer import Row
    from rankstep.collectives import Communicator


class Reducer(Collector):
    """Turns the ranks' local gradients into the one global gradient, bucket by bucket.

    Arguments and most attributes are those of :class:`rankstep.buckets.collector.Collector`.

    Attributes:
        promise: Every backward uses the same parameters, or is an error; None: no such promise.
        owner: Returns who is asked when the module has changed and told when a step ends; a weak reference, so that
            the wrapper dies with its last reference and its hooks go.
        exchange: What the ranks tell each other, with the drift alarm.
        shows_joined: A rank that has run out under ``join`` sees the others' result in its gradients, as torch's does
            with gradient_as_bucket_view; optimizers whose state is dealt to the ranks need it.
        weighing: The backward that runs is one of ``model.backward``, whose count is known.
        looking_for_unused: Around the place where parameters without a gradient are found, for profilers.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[torch.Tensor],
        comm: Communicator,
        caps: Caps,
        wrapper: int = 0,
        sparse: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(names, params, comm, caps, wrapper, sparse)
        self.owner: Callable[[], Owner | None] = lambda: None
        self.exchange = Exchange(comm, wrapper)
        self.looking_for_unused: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        self.promise: StaticPromise | None = None
        self.weighing = False
        self.shows_joined = False
        self._window: Window | None = None
        self._broken = ""
        self._missing: frozenset[int] = frozenset()

    # ---------------------------------------------------------------- from outside

    def begin(self) -> None:
        """A synced backward has produced its first gradient.

        Raises:
            SyncError: The step before this one turned out wrong, or a collective failed earlier.
        """
        self._finish_earlier()
        self.check_plain()
        if self.auto is not None and self.auto.due:
            self.plan_anew()
        if self.sharding is not None:
            self.sharding.before_backward()
        if self.line is not None:
            self.line.silent = self.silent
        self.firings.open()
        self._move(ReducerState.COLLECTING)
        if self._recorder is not None:
            self._recorder(BackwardBegan(self.reductions, time.perf_counter_ns()))

    def settle(self, mode: Mode | None = None) -> None:
        """The outermost backward has ended: reduce what is open, wait, hand the gradients back.

        Args:
            mode: JOINED: this rank has nothing to give and wants nothing back. None: what the step says.

        Raises:
            SyncError: The ranks disagree about this step (the same error on every rank), or a collective failed.
        """
        owner = self.owner()
        try:
            gave = self._settle(mode)
        except BaseException as error:
            if owner is not None:
                owner.failed(error)
            raise
        if owner is not None:
            owner.settled(gave=gave)

    def _settle(self, mode: Mode | None) -> bool:
        self._move(ReducerState.SETTLING)
        step, window, exchange = self._step, self._window, self.exchange
        gives = mode is not Mode.JOINED
        if mode is None:
            mode = Mode.SPENT if self.spent else Mode.SYNC
            mode = mode if window is None else Mode.WEIGHTED
        no_count: CountError | None = None
        try:
            line = self._line
            if gives:
                with self.looking_for_unused():
                    line.launch_rest(step, self.firings.touched, lambda: self._write_trailer(mode))
            else:
                line.launch_zeros(
                    step,
                    lambda: self._write_trailer(mode, gives=False),
                    parts=not self.shows_joined,
                )
            line.wait(step)
            rows = exchange.read(line.trailer, mode, self.reductions)
            step.second_round = any(row.late for row in rows)
            if step.second_round:
                line.reduce_late(step)
            try:
                line.multiply(exchange.factor(line.trailer, rows, mode, self.reductions))
            except CountError as error:
                no_count = error
            if gives:
                line.hand_back(step)
        except BaseException as error:
            self._break(error)
            raise
        self._close_step(learns=gives)
        exchange.judge(rows, self.reductions - 1)
        if no_count is not None:
            raise no_count
        if any(row.changed for row in rows):
            self._adopt_change(mode, window)
        if self.looks_for_nonfinite:
            self._report_nonfinite(rows)
        self._raise_unsettled(step)
        return gives

    def settle_nothing(self, mode: Mode | None = None) -> None:
        """Take part in a step without a backward: zeros, or what ``no_sync`` has accumulated."""
        self.begin()
        self.settle(mode)

    def died(self) -> None:
        """A backward raised before its end. Never raises: it is called while an exception travels.

        What has not left yet leaves as zeros with a mark, at once, so that no rank waits for this one or sums other
        sizes. Waiting is left to the next call of anything else.
        """
        if self.state is not ReducerState.COLLECTING:
            return
        self._move(ReducerState.DIED)
        if self.line is not None:
            try:
                self._launch_abandoned()
            except Exception as error:  # noqa: BLE001 - kept, and raised by whatever this rank does next
                self._break(error)

    def abandon(self, mode: Mode | None = None) -> None:
        """Tell the other ranks that this one cannot take the step it is about to take.

        In the first step this waits for rank 0's order, without which nothing can be sent.
        """
        self._finish_earlier()
        if self.auto is not None and self.auto.due:
            self.plan_anew()
        if self.sharding is not None:
            self.sharding.before_backward()
        self._move(ReducerState.COLLECTING)
        self._move(ReducerState.DIED)
        try:
            self._launch_abandoned(mode)
        except BaseException as error:
            self._break(error)
            raise

    def check_plain(self) -> None:
        """A backward begins: it must be weighed if its window is.

        Raises:
            ModelError: Others in the window had counts, this one has none; the other ranks are told.
        """
        if self._window is not None and not self.weighing:
            self.abandon(Mode.MIXED)
            raise ModelError(
                f"rank {self.comm.rank}: a plain loss.backward() met model.backward(count=...) in one accumulation window; "
                "use model.backward for all of its micro-batches"
            )

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
            if self.promise is not None:
                self.promise.check_forward()
            self.forwards += 1

    def weigh(self, count: float) -> None:
        """The backward about to run is of a sum over ``count`` samples or tokens.

        Raises:
            ModelError: The window has begun with a plain backward under ``no_sync``, which has no count.
        """
        if self._window is None:
            if self.sharding is not None:
                self.sharding.before_backward()
            bucket_of = [] if self.line is None else self.line.bucket_of
            self._window = Window.opened(
                self.params, bucket_of, self.firings.accumulated, self.comm.rank
            )
        if not self.spent:
            self._window.count += count

    # ---------------------------------------------------------------- settling

    def _write_trailer(self, mode: Mode, *, gives: bool = True, abandoned: bool = False) -> None:
        if gives and self._step.unused:
            self._look_for_lost()
        self.exchange.write(
            self._line.trailer,
            self._step,
            mode,
            number=self.reductions,
            forwards=self.forwards,
            count=self._window.count if self._window is not None else 0.0,
            gives=gives,
            abandoned=abandoned,
        )

    def _look_for_lost(self) -> None:
        """Parameters that used to fire and did not: taken out of the module? Looked up once for each such set."""
        expected = self.firings.expected
        missing = frozenset(index for index in self._step.unused if expected[index])
        owner = self.owner()
        if missing and missing != self._missing and owner is not None:
            self._step.changed |= owner.has_lost([self.params[index] for index in missing])
        self._missing = missing

    def _adopt_change(self, mode: Mode, window: Window | None) -> None:
        """Some rank's module has other trainable parameters than were wrapped: agree, and reduce the new ones."""
        owner = self.owner()
        if owner is None:
            return
        names, params = zip(*owner.agreed_parameters(), strict=True)
        known = {id(param) for param in self.params}
        new = [(n, p) for n, p in zip(names, params, strict=True) if id(p) not in known]
        if new:
            new_names, new_params = zip(*new, strict=True)
            caps = replace(self.caps, measured=False)
            side = Reducer(new_names, new_params, self.comm, caps, self.wrapper, self._sparse)
            side.firings.accumulated[:] = [int(param.grad is not None) for param in new_params]
            side.spent, side._window, side.weighing = self.spent, window, window is not None
            side.exchange.divides_by_live = self.exchange.divides_by_live
            side.silent, side.exchange.live = self.silent, self.exchange.live
            side.settle_nothing(mode)
        self.relearn(names, params)
        owner.adopted(self.params)

    def _report_nonfinite(self, rows: Sequence[Row]) -> None:
        """Tell once, on every rank, whose gradient was NaN or infinite; it is in the global gradient, too."""
        found = {rank: row.nonfinite - 1 for rank, row in enumerate(rows) if row.nonfinite}
        if not found:
            return
        self.looks_for_nonfinite = self._line.looks_for_nonfinite = False
        where = "; ".join(
            f"rank {rank} in {self.specs[index].name!r}" for rank, index in found.items()
        )
        warnings.warn(
            f"rank {self.comm.rank}: gradients were NaN or infinite before they were summed, in step "
            f"{self.reductions - 1} (counted from 0): {where}. The global gradient has them, too. This is told once; "
            "call report_nonfinite() to look again.",
            NonFiniteGradientWarning,
            stacklevel=2,
        )

    def _raise_unsettled(self, step: Step) -> None:
        if self.promise is not None:
            self.promise.check_backward(self.firings, self.specs, self.reductions - 1)
        if not step.second_round and (step.late or (step.changed and not self.comm.host_waits)):
            names = [self.specs[i].name for i in step.late]
            raise verdict.late_here(names, self.comm.rank, self.reductions - 1)

    def _close_step(self, *, learns: bool) -> None:
        if self._recorder is not None:
            self._recorder(StepSettled(self.reductions, time.perf_counter_ns()))
        if self.auto is not None:
            self.auto.step_closed()
        self.reductions += 1
        self.forwards = 0
        self.silent = self.spent
        self._step.unused.clear()
        # A change that was not agreed on is told in every step until it is.
        self._last, self._step = self._step, Step(changed=self._step.changed)
        if self._window is not None:
            self._window.add_back(self.params)
            self._window = None
        if self.firings.close(learns=learns):
            self._line.expect(self.firings.expected)
        self._line.begin_step(self.reductions)
        self._move(ReducerState.IDLE)

    # ---------------------------------------------------------------- when something failed

    def _launch_abandoned(self, mode: Mode | None = None) -> None:
        mode = mode or (Mode.SYNC if self._window is None else Mode.WEIGHTED)
        self._line.launch_zeros(
            self._step, lambda: self._write_trailer(mode, gives=False, abandoned=True)
        )

    def _finish_earlier(self) -> None:
        """See the previous step to its end: one that died, one that a GPU had not judged yet."""
        if self.state is ReducerState.BROKEN:
            raise CommunicationError(self._broken)
        if self.state is ReducerState.DIED:
            self._finish_died()
        self.exchange.judge_earlier()

    def _finish_died(self) -> None:
        try:
            if self._step.next_bucket < len(self._line.buckets):
                self._launch_abandoned()
            self._line.wait(self._step)
        except BaseException as error:
            self._break(error)
            raise
        # No verdict here: the others raised theirs in that step and this rank its own, so all may go on together.
        self._close_step(learns=False)

    def _break(self, error: BaseException) -> None:
        """Nothing can be said of the buckets any more: from now on every use repeats why."""
        self._broken = str(error) or type(error).__name__
        self._move(ReducerState.BROKEN)
