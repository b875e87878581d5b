"""One bucket: a flat buffer, a view of it for each parameter, and the life it leads in a step."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rankstep.buckets.comm_hooks import CommHook, GradBucket, HookWork
from rankstep.buckets.packed import Packed
from rankstep.collectives.wired import all_reduce_with_tail

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankstep.buckets.plan import BucketSpec, ParamSpec
    from rankstep.collectives import Communicator, Pending


_address = torch.Tensor.data_ptr


class BucketState(enum.Enum):
    """The life of a bucket in one step; see ``Bucket.move`` for the legal moves."""

    FILLING = "filling"
    READY = "ready"
    IN_FLIGHT = "in flight"
    REDUCED = "reduced"


_LEGAL = {
    BucketState.FILLING: (BucketState.READY, BucketState.IN_FLIGHT),
    BucketState.READY: (BucketState.IN_FLIGHT,),
    BucketState.IN_FLIGHT: (BucketState.REDUCED,),
    BucketState.REDUCED: (BucketState.FILLING,),
}


@dataclass(frozen=True, slots=True)
class Kept:
    """The ``.grad`` of a parameter that this rank did not use, kept in case that no rank did.

    Averaging equal values may move their last bit, so the old gradient is put back and not computed again.

    Attributes:
        grad: The old gradient; None if there was none.
        in_bucket: It lay in the bucket itself, and ``grad`` is a copy.
    """

    grad: torch.Tensor | None
    in_bucket: bool = False


def grad_view(flat: torch.Tensor, offset: int, spec: ParamSpec) -> torch.Tensor:
    """A tensor of the parameter's shape and strides over part of a flat buffer.

    It shares the storage but is no autograd view, so that ``detach_()``, which old training loops call on gradients,
    works on it.

    Args:
        flat: The buffer, of ``spec.buffer_dtype``.
        offset: Where the parameter begins, in elements of the buffer.
        spec: The parameter.
    """
    start = int(flat.storage_offset()) + offset
    if spec.dtype != flat.dtype:
        start //= 2
    empty = torch.empty(0, dtype=spec.dtype, device=flat.device)
    return empty.set_(flat.untyped_storage(), start, spec.shape, spec.view_stride)


class Bucket:
    """The gradients of a few parameters on their way to the other ranks.

    Small parameters are copied in together by :meth:`gather`, large ones one by one by :meth:`copy_in` while their
    gradient is still in the cache. From then until :meth:`hand_back` their ``.grad`` is None, so that a gradient which
    comes too late lands beside the buffer and never in the middle of a transfer.

    Args:
        spec: The planned layout.
        specs: All parameters of the plan.
        tensors: The parameters themselves, in the same order.
        comm: Allocates the buffer and reduces it.
        extra_numel: Elements behind the gradients, for the trailer of the last bucket.

    Attributes:
        scale: What a gradient is multiplied with on its way into the buffer.
        state: See :class:`BucketState`.
        copied: Large parameters that are in the buffer already.
        left: How many parameters must still report before it is full.
    """

    def __init__(
        self,
        spec: BucketSpec,
        specs: Sequence[ParamSpec],
        tensors: Sequence[torch.Tensor],
        comm: Communicator,
        extra_numel: int,
    ) -> None:
        self.spec = spec
        self.params = [tensors[i] for i in spec.params]
        self._specs = [specs[i] for i in spec.params]
        packed = [place for place, o in enumerate(spec.offsets) if o < spec.packed_numel]
        packed.sort(key=lambda place: (spec.offsets[place], self._specs[place].numel))
        self._packed_places = packed
        self._lay_out(comm.allocate(spec.numel + extra_numel, spec.dtype, spec.device))
        in_pack = set(packed)
        self.large = {i for place, i in enumerate(spec.params) if place not in in_pack}
        self._dtype = specs[spec.params[0]].dtype if spec.params else spec.dtype
        self.scale = 1.0
        self._comm = comm
        self._work: Pending | None = None
        self.state = BucketState.FILLING
        self.copied: set[int] = set()
        self.left = 0
        self._in_place = False
        self._handed_back = False

    def _lay_out(self, flat: torch.Tensor) -> None:
        spec, packed = self.spec, self._packed_places
        self.flat = flat
        self.views = [
            grad_view(flat, offset, param)
            for param, offset in zip(self._specs, spec.offsets, strict=True)
            if not spec.sparse
        ]
        self.view_of = dict(zip(spec.params, self.views, strict=False))
        self._addresses = list(map(_address, self.views))
        self._packed = Packed(
            flat,
            [self.params[place] for place in packed],
            [self._specs[place] for place in packed],
            [spec.offsets[place] for place in packed],
        )
        self._packed_views = [self.views[place] for place in packed]
        self._packed_part = flat[: spec.packed_numel]

    def leave_shared_memory(self) -> None:
        """A user's hook may resize the buffer, which memory that other ranks see does not allow."""
        if not (self.spec.sparse or self.flat.untyped_storage().resizable()):
            self._lay_out(self.flat.clone())

    def move(self, state: BucketState) -> None:
        """Change the state; anything but a legal move is a mistake of ours."""
        if state not in _LEGAL[self.state]:
            raise AssertionError(f"bucket {self.spec.index}: {self.state} cannot become {state}")
        self.state = state

    def mend(self) -> bool:
        """Make views anew that no longer lie in the buffer; say whether there were any.

        A view is also a parameter's ``.grad``, and ``grad.data = ...`` or a conversion of the module moves it elsewhere.
        """
        if list(map(_address, self.views)) == self._addresses:
            return False
        for place, (view, address) in enumerate(zip(self.views, self._addresses, strict=True)):
            if view.data_ptr() != address:
                new = grad_view(self.flat, self.spec.offsets[place], self._specs[place])
                self.views[place] = self.view_of[self.spec.params[place]] = new
        self._packed_views = [self.views[place] for place in self._packed_places]
        # A hook that grew the buffer has moved all of it.
        self._addresses = list(map(_address, self.views))
        return True

    def put(self, grad: torch.Tensor, view: torch.Tensor) -> None:
        """Write one gradient, divided as the collective needs it, into its view."""
        if grad.is_sparse:
            grad = grad.to_dense()
        if self.scale == 1.0:
            view.copy_(grad)
        else:
            torch.mul(grad, self.scale, out=view)

    def copy_in(self, index: int, param: torch.Tensor) -> None:
        """Take a large parameter's gradient now; no gradient yet (None) is left to :meth:`gather_with_gaps`."""
        grad = param.grad
        if grad is not None:
            if self.view_of[index].data_ptr() != self._addresses[self.spec.params.index(index)]:
                self.mend()
            with torch.no_grad():
                self.put(grad.detach(), self.view_of[index])
            param.grad = None
            self.copied.add(index)

    def add(self, index: int, param: torch.Tensor) -> None:
        """A further gradient of a parameter that was copied in and has not left: add it where it lies."""
        grad = param.grad
        if grad is not None:
            with torch.no_grad():
                self.view_of[index].add_(grad.detach(), alpha=self.scale)
            param.grad = None

    def gather(self, *, at_end: bool) -> bool:
        """Take all small gradients at once. False, with every ``.grad`` as it was, if some parameter has none.

        Args:
            at_end: Backward has ended, so no late gradient can come and ``.grad`` may stay until it is overwritten.
        """
        if len(self.copied) != len(self.large):
            return False
        params = self._packed.params
        if not params:
            return True
        grads = self._packed.grads()
        # A gradient that was moved out of the buffer is no longer in place, although it is its view.
        in_place = self._packed.in_place(grads, self._packed_views) and not self.mend()
        with torch.no_grad():
            try:
                if not in_place:
                    self._copy_packed(grads)
            except TypeError:  # one of them is None
                return False
            except RuntimeError:
                if any(grad is not None and grad.is_sparse for grad in grads):
                    return False
                raise
            if self.scale != 1.0:
                self._packed_part.mul_(self.scale)
        if not at_end:
            for param in params:
                param.grad = None
        self._in_place = in_place and at_end
        return True

    def _copy_packed(self, grads: list[torch.Tensor | None]) -> None:
        if self._packed.copies_views:
            self.mend()
        try:
            self._packed.copy(grads, self._packed_views)
        except RuntimeError:
            # One lies in the buffer already, or is to be refused: view by view, what is possible is done.
            self.mend()
            torch._foreach_copy_(self._packed_views, grads)  # type: ignore[arg-type]

    def gather_with_gaps(self, touched: Sequence[int]) -> dict[int, Kept]:
        """Take what is there, parameter by parameter; zeros where nothing is.

        Args:
            touched: For each parameter of the plan, whether any gradient reached it since the last reduction.

        Returns:
            The parameters that this rank did not use, with what they had before.
        """
        unused: dict[int, Kept] = {}
        self.mend()
        with torch.no_grad():
            for index, param, view in zip(self.spec.params, self.params, self.views, strict=True):
                if index in self.copied:
                    continue
                grad = param.grad
                if grad is None:
                    unused[index] = Kept(None)
                    view.zero_()
                    continue
                if not touched[index]:
                    unused[index] = Kept(grad.clone(), True) if grad is view else Kept(grad)
                self.put(grad.detach(), view)
                param.grad = None
        return unused

    def first_nonfinite(self) -> int | None:
        """The number of the first parameter whose gradient here is NaN or infinite."""
        if bool(torch.isfinite(self.flat[: self.spec.numel]).all()):
            return None
        for index, view in zip(self.spec.params, self.views, strict=True):
            if not bool(torch.isfinite(view).all()):
                return index
        return None

    def part_from_gradients(self) -> None:
        """Move gradients that still lie in the buffer into memory of their own."""
        for param, view in zip(self.params, self.views, strict=True):
            if param.grad is view:
                param.grad = view.clone()

    def silence(self) -> None:
        """Contribute nothing in place of what was gathered; a trailer stays."""
        self.flat[: self.spec.numel].zero_()

    def zero(self) -> None:
        """Contribute nothing."""
        self.flat.zero_()

    def launch(self, hook: CommHook | None, *, is_last: bool, tail_only: bool) -> None:
        """Start the all-reduce of the whole buffer, or hand the gradients to a communication hook.

        Args:
            hook: The user's communication; the trailer is then left to the caller.
            is_last: Whether this is the plan's last bucket.
            tail_only: Reduce nothing but the trailer: no rank used these parameters.
        """
        gradients = self.flat[: self.spec.numel]
        if hook is None:
            self._work = all_reduce_with_tail(
                self._comm, self.flat, self.spec.numel, tail_only=tail_only
            )
        elif not tail_only:
            self._in_place = False  # The hook may do anything to the parameters.
            bucket = GradBucket(
                self.spec.index, gradients, self.views, self.params, is_last=is_last
            )
            with torch.no_grad():
                self._work = HookWork(hook.function(hook.state, bucket), gradients)
        self.move(BucketState.IN_FLIGHT)

    def when_finished(self, call: Callable[[], None]) -> None:
        """Call when the all-reduce has ended, from whatever thread ends it; never, where the backend cannot tell."""
        future = getattr(self._work, "get_future", None)
        if future is not None:
            future().add_done_callback(lambda _: call())

    def wait(self) -> None:
        """Return when the result may be used."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        self.move(BucketState.REDUCED)

    def second_round(self, late: Sequence[int], specs: Sequence[ParamSpec], factor: float) -> None:
        """Reduce gradients that came after this bucket had left, and add them to what came in time.

        Args:
            late: Numbers of this rank's late parameters; those of other buckets are skipped.
            specs: All parameters of the plan.
            factor: Each rank's part is divided by the world size with it, also where a hook divides the first round.
        """
        extra = self._comm.allocate(self.spec.numel, self.spec.dtype, self.spec.device)
        with torch.no_grad():
            for place, index in enumerate(self.spec.params):
                grad = self.params[place].grad
                if index in late and grad is not None:
                    view = grad_view(extra, self.spec.offsets[place], specs[index])
                    torch.mul(grad.detach(), factor, out=view)
                    self.params[place].grad = None
            self._comm.all_reduce(extra).wait()
            self.flat[: self.spec.numel].add_(extra)

    def multiply(self, factor: float | torch.Tensor) -> None:
        """Scale the reduced gradients."""
        with torch.no_grad():
            self.flat[: self.spec.numel].mul_(factor)

    def hand_back(self) -> None:
        """Give every parameter its view of the buffer as ``.grad``, unless that was done in this step.

        Raises:
            RuntimeError: The module was converted, so that parameters have another dtype. Whole modules are converted as
                a rule, so one stands for all.
        """
        if self.params and self.params[0].dtype != self._dtype:
            raise RuntimeError(f"a gradient of {self._dtype} for {self.params[0].dtype}")
        if self._handed_back:
            return
        self.mend()
        if self._in_place:
            for index in self.large:
                self.params[self.spec.params.index(index)].grad = self.view_of[index]
        else:
            for param, view in zip(self.params, self.views, strict=True):
                param.grad = view
        self._handed_back = True

    def take_back(self) -> None:
        """The result will not come: nobody may take what is in the buffer for it."""
        if self._handed_back:
            for param in self.params:
                param.grad = None

    def restore(self, index: int, kept: Kept) -> None:
        """Give a parameter that no rank used the ``.grad`` it had before."""
        place = self.spec.params.index(index)
        if kept.in_bucket and kept.grad is not None:
            with torch.no_grad():
                self.views[place].copy_(kept.grad)
            self.params[place].grad = self.views[place]
        else:
            self.params[place].grad = kept.grad

    def begin_step(self, awaited: int) -> None:
        """Open for the next step; ``awaited``: how many of its parameters must report before it is full."""
        if self.state is not BucketState.FILLING:
            self.move(BucketState.FILLING)
        self.left = awaited
        self.copied.clear()
        self._in_place = self._handed_back = False
