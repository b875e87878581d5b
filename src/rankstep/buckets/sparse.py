"""A bucket of one embedding whose gradient is sparse: it travels as rows and indices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankstep.buckets.bucket import Bucket, BucketState, Kept
from rankstep.buckets.comm_hooks import CommHook, GradBucket, HookWork

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankstep.buckets.plan import BucketSpec, ParamSpec
    from rankstep.collectives import Communicator


class SparseBucket(Bucket):
    """Like :class:`Bucket`, with a sparse tensor in the buffer's place.

    The result has the union of the ranks' rows. A rank without a gradient sends no rows; one whose gradient came dense
    sends it as rows.
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
        (self._param,) = self.params
        self._index = spec.params[0]
        self._rows = self._no_rows()
        self.large = {self._index}
        # There is no memory that a gradient could lie in between steps.
        self.view_of = {}

    def _no_rows(self) -> torch.Tensor:
        param = self._param
        return torch.sparse_coo_tensor(
            torch.empty(1, 0, dtype=torch.int64, device=param.device),
            torch.empty(0, *param.shape[1:], dtype=param.dtype, device=param.device),
            param.shape,
            check_invariants=False,
        )

    def _as_rows(self, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.detach()
        rows = grad if grad.is_sparse else grad.to_sparse(1)
        return (rows * self.scale).coalesce()

    def copy_in(self, index: int, param: torch.Tensor) -> None:
        """Take the gradient."""
        if param.grad is not None:
            self._rows = self._as_rows(param.grad)
            param.grad = None
            self.copied.add(index)

    def add(self, index: int, param: torch.Tensor) -> None:  # noqa: ARG002 - there is only one
        """A further gradient before it has left."""
        if param.grad is not None:
            self._rows = (self._rows + self._as_rows(param.grad)).coalesce()
            param.grad = None

    def gather_with_gaps(self, touched: Sequence[int]) -> dict[int, Kept]:
        """Take what is there; no rows where nothing is."""
        if self._index in self.copied:
            return {}
        grad = self._param.grad
        if grad is None:
            self._rows = self._no_rows()
            return {self._index: Kept(None)}
        self._rows = self._as_rows(grad)
        self._param.grad = None
        return {} if touched[self._index] else {self._index: Kept(grad)}

    def first_nonfinite(self) -> int | None:
        """The parameter's number, if one of its rows is NaN or infinite."""
        return None if bool(torch.isfinite(self._rows.values()).all()) else self._index

    def part_from_gradients(self) -> None:
        """Nothing to do: rows are not kept in a buffer."""

    def silence(self) -> None:
        """Contribute no rows."""
        self._rows = self._no_rows()

    def zero(self) -> None:
        """Contribute no rows."""
        self._rows = self._no_rows()

    def launch(self, hook: CommHook | None, *, is_last: bool, tail_only: bool) -> None:  # noqa: ARG002
        """Start the all-reduce, or hand the rows to a communication hook."""
        if hook is None:
            self._work = self._comm.all_reduce(self._rows)
        else:
            bucket = GradBucket(
                self.spec.index, self._rows, [self._rows], self.params, is_last=is_last
            )
            with torch.no_grad():
                self._work = HookWork(hook.function(hook.state, bucket), self._rows)
        self.move(BucketState.IN_FLIGHT)

    def wait(self) -> None:
        """Return when the result may be used."""
        work, self._work = self._work, None
        if isinstance(work, HookWork):
            self._rows = work.result()
        elif work is not None:
            work.wait()
        self.move(BucketState.REDUCED)

    def second_round(self, late: Sequence[int], specs: Sequence[ParamSpec], factor: float) -> None:  # noqa: ARG002
        """Reduce a gradient that came after this bucket had left."""
        grad = self._param.grad
        extra = self._no_rows()
        if self._index in late and grad is not None:
            extra = ((grad if grad.is_sparse else grad.to_sparse(1)).detach() * factor).coalesce()
            self._param.grad = None
        self._comm.all_reduce(extra).wait()
        self._rows = (self._rows + extra).coalesce()

    def multiply(self, factor: float | torch.Tensor) -> None:
        """Scale the reduced rows."""
        self._rows = self._rows * factor

    def hand_back(self) -> None:
        """Give the parameter its reduced rows."""
        self._param.grad = self._rows

    def restore(self, index: int, kept: Kept) -> None:  # noqa: ARG002 - there is only one
        """Give the parameter what it had before."""
        self._param.grad = kept.grad
