"""The ranks' shares of parameters and gradients: what the reducer asks for, and what the optimizer steps.

One step goes like this. Backward starts a reduce-scatter for each bucket that is full, and waits for the trailer at its
end; each ``.grad`` is a :class:`rankstep.parallel.sharded_gradient.ShardedGradient` then. ``step()`` waits for one bucket
after the other, steps this rank's share of it, and lets the new values travel. Whoever uses a parameter next waits for its
bucket: as a rule that is the next forward, module by module.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from rankstep.collectives.failures import naming_failure
from rankstep.errors import ModelError
from rankstep.parallel.sharded_bucket import ShardedBucket
from rankstep.parallel.sharded_home import Classes, Home, Way
from rankstep.parallel.sharded_memory import Memory, in_order, memory_for, numbers
from rankstep.parallel.sharded_norms import Norms
from rankstep.parallel.sharded_params import Doorkeeper, set_slot

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager

    from rankstep.buckets import Reducer
    from rankstep.buckets.line import Line
    from rankstep.buckets.plan import BucketSpec, ParamSpec
    from rankstep.collectives import Communicator

_address = torch.Tensor.data_ptr


class Shares:
    """The sharded side of one reducer.

    Args:
        reducer: Its buckets are dealt to the ranks from its next plan on.
        may_share: Ranks of one host may keep their parameters in common memory. Then this is collective.

    Attributes:
        homes: Where each parameter lives, by its ``id``.
        buckets: In launch order; empty before the first backward has ended.
        memory: The parameters' values; None before that.
        layout: Counts the plans, so that the optimizer sees that there is another one.
        retired: Another optimizer has taken the reducer over.
    """

    def __init__(self, reducer: Reducer, *, may_share: bool) -> None:
        self.comm = reducer.comm
        self.homes: dict[int, Home] = {}
        self.classes = Classes(self.homes)
        self.buckets: list[ShardedBucket] = []
        self.memory: Memory | None = None
        self.layout = 0
        self.retired = False
        self.norms = Norms(self)
        self._reducer = reducer
        # Kept, because a rank may still be about to look at it.
        self._probe = reducer.comm.shared(1, torch.uint8) if may_share else None
        self._values: list[tuple[Home, int, torch.Tensor]] = []
        self._params: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._ways: list[Way] = []
        self._doorkeeper = Doorkeeper()
        self._steps = 0

    @property
    def on_one_host(self) -> bool:
        """Whether the ranks may keep their parameters in common memory."""
        return self._probe is not None and self.comm.world_size > 1

    # ---------------------------------------------------------------- asked by the reducer

    @staticmethod
    def bucket(
        spec: BucketSpec,
        specs: Sequence[ParamSpec],
        tensors: Sequence[torch.Tensor],
        comm: Communicator,
        extra_numel: int,
    ) -> ShardedBucket:
        """A bucket whose sum is dealt to the ranks."""
        return ShardedBucket(spec, specs, tensors, comm, extra_numel)

    def laid_out(self, line: Line) -> None:
        """There is a new plan: move the parameters to where they lie like their gradients; collective."""
        buckets: Any = line.buckets
        self.buckets = buckets
        self.homes.clear()
        for bucket in self.buckets:
            # A reduce-scatter sums, whatever the communicator's all-reduce does.
            bucket.scale = 1.0 / self.comm.world_size
            bucket.homes = [
                Home(self, bucket, place, line.plan.params[index])
                for place, index in enumerate(bucket.spec.params)
            ]
            self.homes.update((id(home.param), home) for home in bucket.homes)
        self.memory = memory_for(self.comm, self.buckets, shared=self.on_one_host)
        self._values = [
            (home, number, self.memory.view(number, home.begin, home.spec))
            for number, bucket in enumerate(self.buckets)
            for home in bucket.homes
        ]
        self._params = [home.param for home, _, _ in self._values]
        self._addresses = [values.data_ptr() for _, _, values in self._values]
        self._move_in(self._values, whole=self.memory.whole)
        self.layout += 1

    def before_backward(self) -> None:
        """A backward that will be reduced has begun: free the buffers, and set aside what it will be added to."""
        self.synchronize()
        self.reduced()
        if any(home.has_grad for home in self.homes.values()):
            if self._reducer.line is None:
                # There will be other shares; whole gradients fit any.
                self.gather_gradients()
            self.finish()
            for home in self.homes.values():
                home.set_aside()
        self.norms.forget()

    def retire(self) -> None:
        """Another optimizer takes the reducer over."""
        self.synchronize()
        self.reduced()
        for home in self.homes.values():
            home.take_back()
        self.retired = True

    # ---------------------------------------------------------------- values

    def synchronize(self) -> None:
        """Return when all values are here."""
        for way in list(self._ways):
            way.wait()

    def open(self) -> None:
        """Return when this rank may write its share of the values; collective."""
        self.synchronize()
        if self.memory is None:
            return
        self.memory.open()
        self._steps += 1
        if list(map(_address, self._params)) != self._addresses:
            moved = [
                each for each in self._values if each[0].param.data_ptr() != each[2].data_ptr()
            ]
            self._move_in(moved, whole=False)

    def publish(self, *, defers: bool) -> None:
        """This rank's share is written: let all values come to where they are needed; collective.

        Args:
            defers: They may come after this has returned.
        """
        if self.memory is None:
            return
        for pending, places in self.memory.publish():
            homes = [home for place in places for home in self.buckets[place].homes]
            self._ways.append(Way(pending, homes, self._naming_way, self._came))
        if not self._ways:
            return
        if defers:
            self._doorkeeper.watch()
        else:
            self.synchronize()

    def _came(self, way: Way) -> None:
        self._ways.remove(way)
        if not self._ways:
            self._doorkeeper.leave()

    def _naming_way(self) -> AbstractContextManager[None]:
        step = self._steps - 1
        return naming_failure(
            self.comm,
            f"sharded/{self._reducer.wrapper}/values/{step}",
            f"waiting for the values of ShardedOptimizer.step() number {step} (counted from 0)",
        )

    def _move_in(self, moving: Sequence[tuple[Home, int, torch.Tensor]], *, whole: bool) -> None:
        """Take over values from where they are, and let the parameters show ours.

        Args:
            moving: Whose values, the number of their bucket, and their place there.
            whole: Write all of them; else this rank's share alone.
        """
        memory = self.memory
        if memory is None:
            return
        for home, number, _ in moving:
            param, spec = home.param, home.spec
            if (tuple(param.shape), param.dtype, param.device) != (
                spec.shape,
                spec.dtype,
                spec.device,
            ):
                raise ModelError(
                    f"rank {self.comm.rank}: parameter {home.name!r} was {spec.dtype} with shape {spec.shape} on {spec.device} "
                    f"when its gradients were planned, and is {param.dtype} with shape {tuple(param.shape)} on "
                    f"{param.device} now. Convert the module first, then wrap it"
                )
            start, end = (
                (home.begin, home.begin + spec.buffer_numel) if whole else (home.start, home.end)
            )
            with torch.no_grad():
                source = in_order(param, spec)[start - home.begin : end - home.begin]
                memory.flats[number][start:end].copy_(source)
        if moving and moving is self._values:
            memory.settle_in()
        for home, _, values in moving:
            home.param.data = values

    # ---------------------------------------------------------------- gradients

    def reduced(self) -> None:
        """Return when every reduce-scatter has ended."""
        with self.naming_reduction():
            for bucket in self.buckets:
                bucket.reduced()

    def finish(self) -> None:
        """Return when this rank's share of every gradient is what the step asked for."""
        with self.naming_reduction():
            for bucket in self.buckets:
                bucket.finish()
                bucket.flush()

    def naming_reduction(self) -> AbstractContextManager[None]:
        """For waits for reduce-scatters."""
        step = self._reducer.reductions - 1
        return naming_failure(
            self.comm,
            f"sharded/{self._reducer.wrapper}/reduced/{step}",
            f"the reduce-scatters of step {step} (counted from 0)",
        )

    def region_of(self, home: Home) -> torch.Tensor:
        """This rank's share of one gradient, about to be changed."""
        self.finish()
        self.norms.forget()
        return home.numbers

    def clip(
        self,
        params: Sequence[torch.Tensor],
        max_norm: float,
        order: float,
        error_if_nonfinite: bool,
    ) -> torch.Tensor:
        """See :meth:`rankstep.ShardedOptimizer.clip_grad_norm_`."""
        self.finish()
        dealt: list[Home] = []
        whole: list[torch.Tensor] = []
        regions: list[torch.Tensor] = []
        for param in params:
            home = self.homes.get(id(param))
            if home is not None and home.has_grad:
                dealt.append(home)
                regions.append(home.numbers)
                continue
            grad = param.grad
            if grad is None:
                continue
            whole.append(grad)
            if home is not None:
                start, end = home.start - home.begin, home.end - home.begin
                regions.append(numbers(in_order(grad, home.spec)[start:end], grad.dtype))
            elif self.comm.rank == 0:
                regions.append(grad.detach().reshape(-1))
        norm = self.norms.total(regions, order, params[0].device)
        # From what every rank knows: a gradient that is whole on all of them is counted by one.
        kinds = {home.region.dtype for home in dealt} | {grad.dtype.to_real() for grad in whole}
        if kinds:
            norm = norm.to(functools.reduce(torch.promote_types, kinds))
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"The total norm of order {order} for gradients from `parameters` is non-finite, so it cannot be clipped. To "
                "disable this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
            )
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        self._scale(dealt, factor)
        for grad in whole:
            grad.detach().mul_(factor)
        return norm

    def _scale(self, homes: Sequence[Home], factor: torch.Tensor) -> None:
        self.norms.forget()
        chosen = set(map(id, homes))
        for bucket in self.buckets:
            inside = [home for home in bucket.homes if id(home) in chosen]
            if len(inside) == len(bucket.homes):
                bucket.multiply(factor)
                continue
            for home in inside:
                home.region.mul_(factor)

    def gather_gradients(self) -> None:
        """Make every ``.grad`` that is dealt a whole one; collective."""
        self.finish()
        self.norms.forget()
        with naming_failure(
            self.comm,
            f"sharded/{self._reducer.wrapper}/gradients/{self._reducer.reductions}",
            "gather_gradients() of a ShardedOptimizer",
        ):
            works = [
                self.comm.all_gather(bucket.parts, bucket.share)
                for bucket in self.buckets
                if bucket.spec.numel and self.comm.world_size > 1
            ]
            for work in works:
                work.wait()
        for home in self.homes.values():
            if home.has_grad:
                home.take_back()
                set_slot(home.param, home.bucket.views[home.place])

    def drop(self, params: Iterable[torch.Tensor], *, set_to_none: bool) -> None:
        """What ``zero_grad`` does."""
        finished = set_to_none
        for param in params:
            home = self.homes.get(id(param))
            if home is not None and home.has_grad and not set_to_none:
                if not finished:
                    self.finish()
                    self.norms.forget()
                    finished = True
                home.region.zero_()
                continue
            if home is not None and home.has_grad:
                home.take_back()
            _drop_slot(param, set_to_none=set_to_none)


def _drop_slot(param: torch.Tensor, *, set_to_none: bool) -> None:
    grad = param.grad
    if grad is None:
        return
    if set_to_none:
        param.grad = None
        return
    if grad.grad_fn is not None:
        grad.detach_()
    else:
        grad.requires_grad_(False)
    grad.zero_()
