"""A user's own communication for a bucket: the object it gets, and how its answer is taken.

The object has the methods of torch's ``GradBucket``, which cannot be made from Python, so that the hooks that come with
torch (fp16, PowerSGD, post-local SGD and their wrappers) run unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class CommHook:
    """A hook as it was registered: ``function(state, bucket)`` returns a future of the reduced tensor."""

    state: Any
    function: Callable[[Any, Any], Any]


class GradBucket:
    """One bucket as a communication hook sees it; stands in for ``torch.distributed.GradBucket``.

    Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
    """

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        *,
        is_last: bool,
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._gradients = list(gradients)
        self._parameters = list(parameters)
        self._is_last = is_last

    def index(self) -> int:
        """The bucket's place in the launch order."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients as one flat tensor, not divided by the world size."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the tensor that :meth:`buffer` returns, and of which :meth:`gradients` are the parts."""
        old, self._buffer = self._buffer, buffer
        if not buffer.is_sparse:
            self._gradients = [_moved(grad, old, buffer) for grad in self._gradients]

    def gradients(self) -> list[torch.Tensor]:
        """The gradients, in their parameters' shapes."""
        return list(self._gradients)

    def parameters(self) -> list[torch.Tensor]:
        """The parameters that the gradients belong to."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether no further bucket follows in this backward."""
        return self._is_last


def _moved(grad: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The part of ``new`` that lies where ``grad`` lies in ``old``; complex where ``grad`` is."""
    per_element = 2 if grad.is_complex() else 1
    start = per_element * grad.storage_offset() - old.storage_offset()
    part = new[start : start + per_element * grad.numel()]
    if grad.is_complex():
        part = torch.view_as_complex(part.view(-1, 2))
    return part.as_strided(grad.shape, grad.stride(), part.storage_offset())


class HookWork:
    """A hook's future as something to wait for, whose result lands in the bucket's buffer.

    Args:
        future: What the hook returned.
        buffer: Where the result belongs.

    Raises:
        RuntimeError: The hook returned no future (torch's text).
    """

    def __init__(self, future: Any, buffer: torch.Tensor) -> None:
        if not isinstance(future, torch._C.Future):
            raise RuntimeError(  # noqa: TRY004 - torch's type
                "DDP communication hook's callback must return a torch.futures.Future object, "
                f"but got {type(future).__name__}."
            )
        self._future = future
        self._buffer = buffer

    def result(self) -> torch.Tensor:
        """Wait, and return the hook's tensor."""
        value = self._future.wait()
        if isinstance(value, list | tuple):
            value = value[0]
        return value  # type: ignore[no-any-return]

    def wait(self) -> None:
        """Return when the result lies in the buffer."""
        value = self.result()
        if value.data_ptr() != self._buffer.data_ptr() or value.dtype != self._buffer.dtype:
            with torch.no_grad():
                self._buffer.copy_(value.view_as(self._buffer))
