"""Which collectives a piece of code starts, for tests that count them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

METHODS = (
    "allreduce",
    "broadcast",
    "allgather",
    "_allgather_base",
    "reduce_scatter",
    "alltoall",
    "barrier",
    "send",
    "recv",
)


@dataclass(frozen=True, slots=True)
class Called:
    """One collective that was started.

    Attributes:
        name: As a process group calls it, such as ``allreduce``.
        numel: Elements of the tensors that it was given.
    """

    name: str
    numel: int


@contextlib.contextmanager
def noted_collectives(*hubs: type) -> Iterator[list[Called]]:
    """Collect the collectives that this process starts, on any process group and on our own hubs.

    Args:
        hubs: Classes whose ``start(kind, tensor)`` starts one, with a kind that is an enum.

    Yields:
        The list, in the order of the calls.
    """
    called: list[Called] = []
    # From the class itself: what getattr gives for a method written in C++ binds to nothing when it is put back.
    kept = [(owner, name, vars(owner)[name]) for owner, name in _places(hubs)]

    def noting(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            kind = args[0].name.lower().replace("_", "") if name == "start" else name
            called.append(Called(kind, sum(tensor.numel() for tensor in _tensors(args))))
            return method(self, *args, **kwargs)

        return noted

    for owner, name, _ in kept:
        setattr(owner, name, noting(getattr(owner, name), name))
    try:
        yield called
    finally:
        for owner, name, method in kept:
            setattr(owner, name, method)


def _places(hubs: tuple[type, ...]) -> list[tuple[type, str]]:
    return [(dist.ProcessGroup, name) for name in METHODS] + [(hub, "start") for hub in hubs]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
