"""The first half of a step: gradients arrive, are counted, and full buckets leave.

This is the base of the reducer. It holds the parameters, what was learned about them, and the buckets.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rankstep.buckets.autoplan import AutoPlan
from rankstep.buckets.bucket import BucketState
from rankstep.buckets.learn import Firings
from rankstep.buckets.line import Line, agree_on_line
from rankstep.buckets.plan import ParamSpec
from rankstep.buckets.states import LEGAL, ReducerState
from rankstep.buckets.step import Step
from rankstep.collectives.wired import WiredCommunicator
from rankstep.errors import ModelError
from rankstep.trace.events import GradReady

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from rankstep.buckets.bucket import Bucket
    from rankstep.buckets.comm_hooks import CommHook
    from rankstep.buckets.plan import Caps, Plan
    from rankstep.buckets.states import Sharding
    from rankstep.buckets.step import StepFacts
    from rankstep.collectives import Communicator
    from rankstep.trace.events import Event


def _is_watched(param: torch.Tensor) -> bool:
    """Whether a user has a hook on the parameter, which runs after ours and wants to see the gradient."""
    return len(param._post_accumulate_grad_hooks or ()) > 1


class Collector:
    """Counts gradients and launches full buckets in plan order.

    Args:
        names: The parameters' names, for plans and messages.
        params: The trainable parameters, in the same order on every rank.
        comm: Moves the buckets.
        caps: When a bucket is full.
        wrapper: This wrapper's number in the process, equal on all ranks.
        sparse: Names of the parameters whose gradients are sparse.

    Attributes:
        state: What it is doing.
        reductions: Synced backwards so far.
        forwards: Training forwards of the wrapper since the last one.
        hook: A user's communication; None: the communicator's all-reduce.
        skips_unused: Buckets that no parameter of this rank reached are not reduced.
        looks_for_nonfinite: Each rank looks for NaN and infinity in its own gradients.
        delayed: Names of parameters that go last.
        spent: This rank has run out of inputs (``together``) and takes part with a batch that does not count.
        silent: It had none since the last reduction, so whatever its gradients are, zeros leave.
        auto: Finds the plan by measurement; None: the caps say it.
        sharding: An optimizer that is dealt to the ranks, which takes its share of each bucket; None: there is none.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[torch.Tensor],
        comm: Communicator,
        caps: Caps,
        wrapper: int,
        sparse: frozenset[str],
    ) -> None:
        self.comm = comm
        self.caps = caps
        self.wrapper = wrapper
        self.state = ReducerState.IDLE
        self.hook: CommHook | None = None
        self.reductions = 0
        self.forwards = 0
        self.skips_unused = False
        self.looks_for_nonfinite = False
        self.delayed: frozenset[str] = frozenset()
        self.spent = False
        self.silent = False
        self.sharding: Sharding | None = None
        self.auto = (
            AutoPlan(comm, params[0].device) if caps.measured and comm.world_size > 1 else None
        )
        self._watcher: Callable[[Event], None] | None = None
        self._recorder: Callable[[Event], None] | None = None
        self._sparse = sparse
        self._step = Step()
        self._last: Step | None = None
        self.relearn(names, params)

    def relearn(self, names: Sequence[str], params: Sequence[torch.Tensor]) -> None:
        """Start to learn anew with these parameters."""
        self.params = list(params)
        self.specs = [
            ParamSpec.of(n, p, sparse=n in self._sparse) for n, p in zip(names, params, strict=True)
        ]
        self.param_ids = {id(param) for param in params}
        self.firings = Firings(len(params))
        self._step.changed = False
        self.line: Line | None = None
        if self.auto is not None:
            self.auto.restart()

    def plan_anew(self) -> None:
        """Let this backward learn how often each parameter fires, and its end plan with what was measured."""
        self.line = None
        self.firings.expected[:] = [0] * len(self.params)

    # ---------------------------------------------------------------- called by hooks

    def ready(self, index: int, param: torch.Tensor) -> None:
        """A parameter has fired as often as learned: its gradient is whole.

        Hooks count small parameters down by themselves, all but the last of a bucket.
        """
        line = self._line
        if self._recorder is not None:
            self._recorder(GradReady(self.reductions, index, time.perf_counter_ns()))
        bucket = line.bucket_of[index]
        # Its gradient stays where it is, and its bucket goes with the next one.
        watched = _is_watched(param)
        if index in bucket.large and not watched:
            bucket.copy_in(index, param)
        bucket.left -= 1
        if bucket.left == 0 and not watched and bucket is not line.last:
            line.gather(bucket, self._step, self.firings.touched)
            line.launch_full(self._step, self.firings.touched)

    def again(self, index: int, param: torch.Tensor) -> None:
        """A parameter has fired more often than learned."""
        if self.line is None:
            self.firings.note(index)
            return
        bucket = self.line.bucket_of[index]
        gathered = bucket.state is BucketState.READY or index in bucket.copied
        if bucket.state is BucketState.IN_FLIGHT or (gathered and _is_watched(param)):
            self._step.late.append(index)
        elif gathered:
            bucket.add(index, param)
            self._step.unused.pop(index, None)

    def note_change(self) -> None:
        """A gradient reached a parameter that was not trainable when the module was wrapped, or the module changed."""
        self._step.changed = True

    # ---------------------------------------------------------------- the buckets

    @property
    def plan(self) -> Plan | None:
        """The layout in use; None before the first synced backward has ended."""
        return None if self.line is None else self.line.plan

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets in launch order; empty before the first synced backward has ended."""
        return [] if self.line is None else self.line.buckets

    @property
    def last_step(self) -> StepFacts | None:
        """Facts of the last settled backward; None before the first."""
        if self._last is None:
            return None
        return self._last.facts(self.reductions - 1, self.specs, len(self.buckets))

    @property
    def recorder(self) -> Callable[[Event], None] | None:
        """Is told of every event; None costs nothing."""
        return self._watcher

    @recorder.setter
    def recorder(self, recorder: Callable[[Event], None] | None) -> None:
        self._watcher = recorder
        self._listen()

    def _listen(self) -> None:
        self._recorder = self._watcher if self.auto is None else self.auto.beside(self._watcher)
        line = self.line
        if line is None:
            return
        line.recorder = self._recorder
        self.firings.home[:] = line.bucket_of
        self.firings.loud[:] = [
            self._recorder is not None or index in bucket.large
            for index, bucket in enumerate(line.bucket_of)
        ]

    def use_hook(self, hook: CommHook) -> None:
        """Let a user's function reduce the buckets from now on.

        Raises:
            ModelError: The buckets are to be chosen by measurement of the communicator's own all-reduce, or something else
                says already how gradients travel.
        """
        if self.auto is not None:
            raise ModelError(
                'bucket_cap_mb="auto" measures the all-reduce of the process group, and a comm hook communicates in '
                "another way. Give the caps in MiB to use a hook"
            )
        if self.sharding is not None:
            raise ModelError(
                "a communication hook reduces every gradient on every rank, and a ShardedOptimizer gives each rank its share. "
                "Use one or the other"
            )
        if isinstance(self.comm, WiredCommunicator):
            raise ModelError(
                f"wire_dtype={self.comm.dtype} and a communication hook both say how gradients travel. Use one or the other"
            )
        self.hook = hook
        if self.line is not None:
            self.line.use_hook(hook)

    @property
    def _line(self) -> Line:
        """The buckets; planned and allocated at the end of the first synced backward, in rank 0's order."""
        if self.line is None:
            self.use_line(
                agree_on_line(
                    self.firings.order(),
                    self.specs,
                    self.params,
                    self.comm,
                    self.caps if self.auto is None else self.auto,
                    self.delayed,
                    self.sharding,
                )
            )
        line = self.line
        assert line is not None  # noqa: S101 - use_line has set it
        return line

    def use_line(self, line: Line) -> None:
        """Take these buckets; all ranks must do so in the same step."""
        self.line = line
        line.number = self.reductions
        line.name = f"wrapper {self.wrapper}"
        self._listen()
        line.skips_unused = self.skips_unused
        line.looks_for_nonfinite = self.looks_for_nonfinite
        line.silent = self.silent
        line.use_hook(self.hook)
        if self.sharding is not None:
            self.sharding.laid_out(line)

    def _move(self, state: ReducerState) -> None:
        if state not in LEGAL[self.state]:
            raise AssertionError(f"reducer: {self.state} cannot become {state}")
        self.state = state
