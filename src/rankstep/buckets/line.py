"""All buckets of a wrapper in the order in which they leave: allocation, gathering, launching, waiting."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import weakref
from typing import TYPE_CHECKING

import torch

from rankstep.buckets import trailer
from rankstep.buckets.autoplan import AutoPlan
from rankstep.buckets.bucket import Bucket, BucketState
from rankstep.buckets.plan import make_plan
from rankstep.buckets.sparse import SparseBucket
from rankstep.collectives.failures import naming_failure
from rankstep.collectives.wired import exact_of
from rankstep.errors import ModelError
from rankstep.trace.events import (
    BucketFilled,
    BucketFinished,
    BucketLaunched,
    BucketWaited,
    WaitsEnded,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from rankstep.buckets.comm_hooks import CommHook
    from rankstep.buckets.plan import Caps, ParamSpec, Plan
    from rankstep.buckets.states import Sharding
    from rankstep.buckets.step import Step
    from rankstep.collectives import Communicator
    from rankstep.trace.events import Event


EAGER_BYTES = 16 * 1024
"""From 16 KiB on a CPU gradient is divided and copied as soon as it is ready: one pass, while it is in the cache."""


def agree_on_line(
    order: Sequence[int],
    specs: Sequence[ParamSpec],
    params: Sequence[torch.Tensor],
    comm: Communicator,
    caps: Caps | AutoPlan,
    delayed: Collection[str],
    sharding: Sharding | None = None,
) -> Line:
    """Adopt rank 0's order on all ranks, plan the buckets and allocate them.

    Args:
        order: In which this rank's parameters became ready; only rank 0's counts.
        specs: The parameters as the plan needs them.
        params: The parameters themselves.
        comm: The ranks.
        caps: When a bucket is full, or what knows it.
        delayed: Names of parameters that go last.
        sharding: Makes the buckets of an optimizer that is dealt to the ranks.
    """
    device = specs[0].device
    agreed = torch.tensor(order, dtype=torch.int64, device=device)
    with naming_failure(
        comm, "order", "agreeing on rank 0's bucket order at the end of the first backward"
    ):
        comm.broadcast(agreed, 0).wait()
    packed_below = EAGER_BYTES if device.type == "cpu" else sys.maxsize
    in_order = sorted(agreed.tolist(), key=lambda index: specs[index].name in delayed)
    if isinstance(caps, AutoPlan):
        plan = caps.plan(specs, in_order, packed_below)
    else:
        plan = make_plan(specs, in_order, caps, packed_below_bytes=packed_below)
    return Line(plan, params, comm, sharding)


class Line:
    """The buckets of one plan.

    A bucket leaves once all lower ones have left, whatever order they fill in, so that every rank starts the same
    collectives in the same order.

    Args:
        plan: The layout.
        params: The parameters, in the plan's order.
        comm: Allocates and reduces the buffers.
        sharding: Makes the buckets; None: ordinary ones.

    Attributes:
        buckets: In launch order.
        bucket_of: The bucket of each parameter.
        awaited: For each bucket, how many of its parameters must report before it is full.
        trailer: The tail of the last bucket.
        hook: A user's communication in place of ``comm``'s all-reduce.
        silent: Zeros leave in place of what is gathered.
        looks_for_nonfinite: Each rank looks for NaN and infinity in its own gradients.
        skips_unused: Buckets that no parameter of this rank reached are not reduced.
        number: Which synced backward is under way, for events and messages.
        name: Of the wrapper, equal on all ranks, for the store.
        recorder: Is told of launches and waits; None costs nothing.
        telling: Calls that a thread of the backend still holds, each to tell the recorder when a bucket has ended.
    """

    def __init__(
        self,
        plan: Plan,
        params: Sequence[torch.Tensor],
        comm: Communicator,
        sharding: Sharding | None = None,
    ) -> None:
        self.plan = plan
        self.comm = comm
        self._params = list(params)
        tail_numel = trailer.numel(len(params), comm.world_size)
        last = len(plan.buckets) - 1
        dense = Bucket if sharding is None else sharding.bucket
        self.buckets: list[Bucket] = [
            (SparseBucket if spec.sparse else dense)(
                spec, plan.params, params, comm, tail_numel if spec.index == last else 0
            )
            for spec in plan.buckets
        ]
        of = {i: bucket for bucket in self.buckets for i in bucket.spec.params}
        self.bucket_of = [of[i] for i in range(len(params))]
        self.awaited = [0] * len(self.buckets)
        self.trailer = self._new_trailer()
        self.hook: CommHook | None = None
        self._unwritten: Callable[[], None] = lambda: None
        self.skips_unused = False
        self.looks_for_nonfinite = False
        self.silent = False
        self.number = 0
        self.name = ""
        self.recorder: Callable[[Event], None] | None = None
        self.telling: list[weakref.ref[Callable[[], None]]] = []
        self.use_hook(None)

    @property
    def last(self) -> Bucket:
        """The bucket with the trailer; it leaves from the end of backward, never from a hook."""
        return self.buckets[-1]

    def _new_trailer(self) -> trailer.Trailer:
        return trailer.Trailer(
            self.last.flat[self.plan.buckets[-1].numel :],
            len(self._params),
            self.comm.rank,
            self.comm.world_size,
            averages=self.comm.averages,
        )

    def use_hook(self, hook: CommHook | None) -> None:
        """Let a user's function reduce the buckets; it gets gradients that nobody has divided."""
        self.hook = hook
        if hook is not None:
            for bucket in self.buckets:
                bucket.leave_shared_memory()
            self.trailer = self._new_trailer()
        # Averaging inside the collective needs no factor; otherwise each rank's part is divided before the sum, by
        # multiplication with the reciprocal as torch does: the same bits, and half types do not overflow.
        divides = hook is None and not self.comm.averages
        for bucket in self.buckets:
            bucket.scale = 1.0 / self.comm.world_size if divides else 1.0

    def expect(self, expected: Sequence[int]) -> None:
        """Take over how often each parameter fires."""
        self.awaited = [sum(1 for i in b.spec.params if expected[i]) for b in self.buckets]

    def begin_step(self, number: int) -> None:
        """Open all buckets for the next step."""
        self.number = number
        if self.telling:
            self.telling[:] = [call for call in self.telling if call() is not None]
        for bucket, awaited in zip(self.buckets, self.awaited, strict=True):
            bucket.begin_step(awaited)

    # ---------------------------------------------------------------- gathering and launching

    def gather(
        self, bucket: Bucket, step: Step, touched: Callable[[], list[int]], *, at_end: bool = False
    ) -> None:
        """Take in the gradients of a bucket that leaves soon.

        Args:
            bucket: Any that is filling.
            step: Notes the parameters that this rank did not use.
            touched: For each parameter, whether a gradient reached it since the last reduction.
            at_end: Backward has ended.
        """
        whole = bucket.left == 0 and len(bucket.params) == self.awaited[bucket.spec.index]
        if not (whole and bucket.gather(at_end=at_end)):
            unused = bucket.gather_with_gaps(touched())
            step.unused.update(unused)
            # A parameter that was frozen since it was wrapped: all ranks must have done so.
            step.changed |= any(not self._params[index].requires_grad for index in unused)
        bucket.move(BucketState.READY)
        if self.recorder is not None:
            self.recorder(BucketFilled(self.number, bucket.spec.index, time.perf_counter_ns()))
        if self.looks_for_nonfinite and step.nonfinite is None:
            step.nonfinite = bucket.first_nonfinite()

    def launch_full(self, step: Step, touched: Callable[[], list[int]]) -> None:
        """Launch full buckets up to the first that still lacks a gradient; never the last one."""
        for bucket in self.buckets[step.next_bucket : -1]:
            if bucket.left or (self.skips_unused and not self.awaited[bucket.spec.index]):
                return
            if bucket.state is BucketState.FILLING:
                self.gather(bucket, step, touched)
            still_open = any(b.left for b in self.buckets[bucket.spec.index + 1 :])
            self._launch(bucket, step, in_backward=still_open)

    def launch_rest(
        self, step: Step, touched: Callable[[], list[int]], write_trailer: Callable[[], None]
    ) -> None:
        """At the end of backward: launch every bucket that is still here, the last one with the trailer."""
        for bucket in self.buckets[step.next_bucket :]:
            if bucket.state is BucketState.FILLING:
                self.gather(bucket, step, touched, at_end=True)
            if bucket is self.last:
                self._write(write_trailer)
            self._launch(bucket, step, in_backward=False)
        if self.hook is None and not step.late:
            self._hand_back_early()

    def _hand_back_early(self) -> None:
        """Hand back while the last bucket travels: no gradient can come any more, and time is not lost then."""
        # What cannot be done is told after the wait, when no collective is under way.
        with contextlib.suppress(RuntimeError):
            for bucket in self.buckets:
                if not bucket.spec.sparse:
                    bucket.hand_back()

    def launch_zeros(
        self, step: Step, write_trailer: Callable[[], None], *, parts: bool = True
    ) -> None:
        """Give nothing in every bucket that has not left.

        Args:
            step: Under way.
            write_trailer: As in :meth:`launch_rest`.
            parts: Gradients that are there stay as they are; False: those that lie in the buckets show the result.
        """
        for bucket in self.buckets[step.next_bucket :]:
            if parts:
                bucket.part_from_gradients()
            bucket.zero()
            if bucket is self.last:
                self._write(write_trailer)
            self._launch(bucket, step, in_backward=False)

    def _write(self, write_trailer: Callable[[], None]) -> None:
        """Write the trailer now, or under a user's hook once that is done: batched PowerSGD pads its buffer in place."""
        if self.hook is None:
            write_trailer()
        else:
            self._unwritten = write_trailer

    def _launch(self, bucket: Bucket, step: Step, *, in_backward: bool) -> None:
        is_last = bucket is self.last
        idle = (
            self.skips_unused
            and bool(bucket.params)
            and all(i in step.unused for i in bucket.spec.params)
        )
        # Before the call: the other ranks may see the bucket finish before it returns here.
        launched_ns = time.perf_counter_ns() if self.recorder is not None else 0
        with self.naming_failures(step):
            if idle and not is_last:
                bucket.move(BucketState.IN_FLIGHT)
            else:
                if self.silent:
                    bucket.silence()
                bucket.launch(self.hook, is_last=is_last, tail_only=idle)
        step.next_bucket += 1
        step.all_reduces += not idle
        step.in_backward += in_backward
        if self.recorder is not None:
            self.recorder(BucketLaunched(self.number, bucket.spec.index, in_backward, launched_ns))
            tell = functools.partial(
                self._tell_finished, self.recorder, self.number, bucket.spec.index
            )
            self.telling.append(weakref.ref(tell))
            bucket.when_finished(tell)

    @staticmethod
    def _tell_finished(recorder: Callable[[Event], None], number: int, index: int) -> None:
        recorder(BucketFinished(number, index, time.perf_counter_ns()))

    # ---------------------------------------------------------------- waiting and handing back

    def wait(self, step: Step) -> None:
        """Wait for every bucket in turn, and for the trailer where a hook kept it out of the last bucket."""
        all_begun_ns = time.perf_counter_ns()
        cpu_ns = time.process_time_ns() if self.recorder is not None else 0
        for bucket in self.buckets:
            begun_ns = time.perf_counter_ns() if self.recorder is not None else 0
            try:
                with self.naming_failures(step):
                    bucket.wait()
            except BaseException:
                for early in self.buckets:
                    early.take_back()
                raise
            if self.recorder is not None:
                now = time.perf_counter_ns()
                self.recorder(BucketWaited(self.number, bucket.spec.index, begun_ns, now))
        if self.recorder is not None:
            now, cpu_ns = time.perf_counter_ns(), time.process_time_ns() - cpu_ns
            self.recorder(WaitsEnded(self.number, cpu_ns, all_begun_ns, now))
        if self.hook is not None:
            # A hook may start collectives of its own from its futures: nothing of ours may run among them.
            self._unwritten()
            with self.naming_failures(step):
                exact_of(self.comm).all_reduce(self.trailer.region).wait()

    def reduce_late(self, step: Step) -> None:
        """Add gradients that came after their bucket had left, on whichever rank, by a second round of all buckets."""
        factor = 1.0 if self.comm.averages else 1.0 / self.comm.world_size
        for bucket in self.buckets:
            with self.naming_failures(step):
                bucket.second_round(step.late, self.plan.params, factor)
            step.all_reduces += 1

    def multiply(self, factor: float | torch.Tensor) -> None:
        """Scale all reduced gradients."""
        if isinstance(factor, float) and factor == 1.0:
            return
        for bucket in self.buckets:
            bucket.multiply(factor)

    def hand_back(self, step: Step) -> None:
        """Give every parameter its reduced gradient; one that no rank used keeps what it had.

        Raises:
            ModelError: A parameter changed its dtype, shape or device after it was wrapped.
        """
        try:
            for bucket in self.buckets:
                bucket.hand_back()
        except RuntimeError as error:
            self._raise_converted(error)
            raise
        if step.unused:
            step.used = self.trailer.read_used()
            step.nowhere = tuple(sorted(i for i in step.unused if not step.used[i]))
            for index in step.nowhere:
                self.bucket_of[index].restore(index, step.unused[index])

    def _raise_converted(self, error: RuntimeError) -> None:
        for spec, param in zip(self.plan.params, self._params, strict=True):
            now = (tuple(param.shape), param.dtype, param.device)
            if now != (spec.shape, spec.dtype, spec.device):
                raise ModelError(
                    f"rank {self.comm.rank}: parameter {spec.name!r} was {spec.dtype} with shape {spec.shape} on "
                    f"{spec.device} when it was wrapped and is {now[1]} with shape {now[0]} on {now[2]} now. "
                    "Convert the module first, then wrap it"
                ) from error

    @contextlib.contextmanager
    def naming_failures(self, step: Step) -> Iterator[None]:
        """Say which step a collective failed in, and what to do; a user's hook keeps its own errors."""
        if self.hook is not None:
            yield
            return
        what = (
            f"the reduction of step {self.number} (counted from 0; {step.next_bucket} of {len(self.buckets)} buckets had "
            "left)"
        )
        with naming_failure(self.comm, f"{self.name}/{self.number}", what):
            yield
