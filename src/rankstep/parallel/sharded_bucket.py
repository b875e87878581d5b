"""A bucket whose sum is dealt to the ranks: a reduce-scatter in the all-reduce's place.

It is started where the all-reduce would be, and waited for as late as possible: by the optimizer's step, by whoever asks
for a gradient, or by the next backward, which needs the buffer. Backward itself waits for the trailer alone, which is an
all-reduce of its own behind the last bucket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankstep.buckets.bucket import Bucket, BucketState, Kept, grad_view
from rankstep.parallel.sharded_layout import share_bounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankstep.buckets.comm_hooks import CommHook
    from rankstep.buckets.plan import BucketSpec, ParamSpec
    from rankstep.collectives import Communicator, Pending
    from rankstep.parallel.sharded_home import Home


class ShardedBucket(Bucket):
    """Like :class:`Bucket`; after a step this rank's share of the buffer holds the global gradient, the rest does not.

    Arguments are those of :class:`Bucket`.

    Attributes:
        bounds: Where the ranks' shares begin in the buffer, and where the last one ends.
        parts: The shares.
        share: This rank's.
        homes: Its parameters' places, in the plan's order.
        factors: What the share must still be multiplied with; see :meth:`flush`.
    """

    def __init__(
        self,
        spec: BucketSpec,
        specs: Sequence[ParamSpec],
        tensors: Sequence[torch.Tensor],
        comm: Communicator,
        extra_numel: int,
    ) -> None:
        super().__init__(spec, specs, tensors, comm, extra_numel)
        self.bounds = share_bounds(spec, specs, comm.world_size)
        self.parts = self.parts_of(self.flat)
        self.share = self.parts[comm.rank]
        self.homes: list[Home] = []
        self.factors: list[float | torch.Tensor] = []
        self._tail_work: Pending | None = None

    def parts_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The ranks' shares of a buffer that is laid out like this one."""
        sizes = [end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False)]
        return list(flat[: self.spec.numel].split_with_sizes(sizes))

    def launch(self, hook: CommHook | None, *, is_last: bool, tail_only: bool) -> None:
        """Start the reduce-scatter of the gradients, and behind the last one the all-reduce of the trailer."""
        if hook is not None:
            raise AssertionError("a communication hook under a sharded optimizer")
        if not tail_only and self.spec.numel and self._comm.world_size > 1:
            self._work = self._comm.reduce_scatter(self.share, self.parts)
        if is_last:
            self._tail_work = self._comm.all_reduce(self.flat[self.spec.numel :])
        self.move(BucketState.IN_FLIGHT)

    def wait(self) -> None:
        """Return when the trailer can be read."""
        if self._tail_work is not None:
            self._tail_work.wait()
            self._tail_work = None
        self.move(BucketState.REDUCED)

    def reduced(self) -> None:
        """Return when the share holds the mean of the ranks' parts, and the buffer may be written again."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def finish(self) -> None:
        """Return when the share holds the global gradient, but for :attr:`factors`."""
        self.reduced()
        for home in self.homes:
            if home.kept is not None:
                self.flush()
                with torch.no_grad():
                    home.region.add_(home.kept)
                home.kept = None

    def flush(self) -> None:
        """Multiply the share with what it must still be multiplied with; the optimizer does that chunk by chunk."""
        factors, self.factors = self.factors, []
        with torch.no_grad():
            for factor in factors:
                self.share.mul_(factor)

    def second_round(self, late: Sequence[int], specs: Sequence[ParamSpec], factor: float) -> None:  # noqa: ARG002 - for all-reduces
        """Reduce gradients that came after this bucket had left, and add this rank's share of them."""
        extra = self._comm.allocate(self.spec.numel, self.spec.dtype, self.spec.device)
        with torch.no_grad():
            for place, index in enumerate(self.spec.params):
                grad = self.params[place].grad
                if index in late and grad is not None:
                    view = grad_view(extra, self.spec.offsets[place], specs[index])
                    torch.mul(grad.detach(), self.scale, out=view)
                    self.params[place].grad = None
            self.reduced()
            if not self.spec.numel or self._comm.world_size == 1:
                self.share.add_(extra)
                return
            parts = self.parts_of(extra)
            self._comm.reduce_scatter(parts[self._comm.rank], parts).wait()
            self.share.add_(parts[self._comm.rank])

    def multiply(self, factor: float | torch.Tensor) -> None:
        """Scale the reduced gradients, when they are used."""
        self.factors.append(factor)

    def hand_back(self) -> None:
        """Give every parameter its share of a gradient; in a world of one, the gradient itself.

        Raises:
            RuntimeError: As :meth:`Bucket.hand_back`.
        """
        if self._comm.world_size == 1:
            self.reduced()
            self.flush()
            super().hand_back()
            return
        if self.params and self.params[0].dtype != self._dtype:
            raise RuntimeError(f"a gradient of {self._dtype} for {self.params[0].dtype}")
        if not self._handed_back:
            for home in self.homes:
                home.hand_back()
            self._handed_back = True

    def take_back(self) -> None:
        """The result will not come."""
        if self._comm.world_size == 1:
            super().take_back()
        elif self._handed_back:
            for home in self.homes:
                home.take_back()

    def restore(self, index: int, kept: Kept) -> None:
        """Give a parameter that no rank used the gradient it had before."""
        if self._comm.world_size == 1:
            super().restore(index, kept)
        else:
            self.homes[self.spec.params.index(index)].restore(kept.grad)
