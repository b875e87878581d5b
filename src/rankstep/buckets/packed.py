"""The small parameters of a bucket: too many for a call each, so their gradients are copied in together."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter, is_
from typing import TYPE_CHECKING

import torch

from rankstep.buckets.plan import MIN_RUN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankstep.buckets.plan import ParamSpec

_grads_of = attrgetter("grad")


class Packed:
    """Copies the gradients of small parameters into the front of a flat buffer.

    The plan lays parameters with equal rows side by side. Such a run is filled by one ``torch.cat``, which takes a third
    of the time of ``torch._foreach_copy_`` because it knows one target and not one for each gradient. What is left (few
    of a kind, complex, scalar, or not row by row in memory) is copied view by view, also in one call.

    Args:
        flat: The bucket's buffer.
        params: The small parameters, in the order in which they lie in it.
        specs: What the plan knows of them.
        offsets: Where each begins.

    Attributes:
        params: As given.
    """

    def __init__(
        self,
        flat: torch.Tensor,
        params: Sequence[torch.Tensor],
        specs: Sequence[ParamSpec],
        offsets: Sequence[int],
    ) -> None:
        self.params = list(params)
        self._runs: list[tuple[slice, torch.Tensor, torch.Size]] = []
        self._rest: list[int] = []
        for row, group in groupby(range(len(specs)), lambda place: specs[place].row_shape):
            places = list(group)
            if row is None or len(places) < MIN_RUN:
                self._rest += places
                continue
            first, last = places[0], places[-1]
            end = offsets[last] + specs[last].buffer_numel
            region = flat[offsets[first] : end].view(-1, *row)
            self._runs.append((slice(first, last + 1), region, region.shape))

    @property
    def copies_views(self) -> bool:
        """Whether some are copied through their views, which must then lie in the buffer."""
        return bool(self._rest)

    def grads(self) -> list[torch.Tensor | None]:
        """The gradients as they are now."""
        return list(map(_grads_of, self.params))

    @staticmethod
    def in_place(grads: Sequence[torch.Tensor | None], views: Sequence[torch.Tensor]) -> bool:
        """Whether every gradient is its view: nobody set them to None, and autograd has added where they lie."""
        return grads[0] is views[0] and all(map(is_, grads, views))

    def copy(self, grads: list[torch.Tensor | None], views: Sequence[torch.Tensor]) -> None:
        """Write the gradients into the buffer.

        Args:
            grads: One for each parameter.
            views: Their places in the buffer.

        Raises:
            TypeError: One is None. Others may have been written.
            RuntimeError: One is not a dense tensor of its parameter's planned shape, or lies in the buffer already.
        """
        for part, region, shape in self._runs:
            torch.cat(grads[part], out=region)  # type: ignore[arg-type]
            if region.shape != shape:
                raise RuntimeError(f"gradients with {len(region)} rows for {shape[0]} in the plan")
        if self._rest:
            torch._foreach_copy_(
                [views[place] for place in self._rest],
                [grads[place] for place in self._rest],  # type: ignore[misc]
            )
