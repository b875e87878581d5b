"""Buffers: rank 0's values on every rank, before a forward and after a backward, or what a user's hook makes of them."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rankstep.parallel import replicate

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import nn

    from rankstep.collectives import Communicator


class When(enum.Enum):
    """Where in forward a user's buffer hook runs."""

    PRE_FORWARD = "before forward"
    POST_FORWARD = "after forward"


@dataclass(frozen=True, slots=True)
class BufferHook:
    """A user's function ``hook(state, {name: buffer})``, which may return futures."""

    state: Any
    function: Callable[[Any, dict[str, torch.Tensor]], Any]
    when: When


class Buffers:
    """Keeps the buffers of one module equal on all ranks.

    Args:
        module: Its buffers are collected anew each time, since modules may put new tensors in their place.
        ignored: Names to leave alone.
        comm: The ranks.
        chunk_bytes: Upper bound of one message.
    """

    def __init__(
        self, module: nn.Module, ignored: Collection[str], comm: Communicator, chunk_bytes: int
    ) -> None:
        self._module = module
        self._ignored = ignored
        self._comm = comm
        self._chunk_bytes = chunk_bytes
        self.hook: BufferHook | None = None
        self._futures: list[Any] = []
        self._slots: list[tuple[str, dict[str, torch.Tensor | None], str]] | None = None

    def forget(self) -> None:
        """A buffer or submodule was assigned: walk over the module again when next asked."""
        self._slots = None

    def named(self) -> dict[str, torch.Tensor]:
        """The synchronised buffers by name; the tensors as they are now, the places as they were found before."""
        if self._slots is None:
            seen: set[int] = set()
            self._slots = []
            for prefix, part in self._module.named_modules():
                for key, buffer in part._buffers.items():
                    name = f"{prefix}.{key}" if prefix else key
                    if buffer is not None and name not in self._ignored and id(buffer) not in seen:
                        seen.add(id(buffer))
                        self._slots.append((name, part._buffers, key))
        found = ((name, buffers.get(key)) for name, buffers, key in self._slots)
        return {name: buffer for name, buffer in found if buffer is not None}

    def copy_from(self, src: int) -> None:
        """Overwrite them with those of group rank ``src``."""
        replicate.copy_from(self.named().values(), self._comm, src, self._chunk_bytes)

    def sync(self, when: When, src: int) -> None:
        """Do what is due at this place of forward: the user's hook, or the copy, which belongs before forward."""
        if self.hook is None:
            if when is When.PRE_FORWARD:
                self.copy_from(src)
        elif self.hook.when is when:
            with torch.no_grad():
                futures = self.hook.function(self.hook.state, self.named())
            self._futures += futures or []

    def settle(self, src: int) -> None:
        """At the end of backward: wait for the hook's futures, or copy again.

        So the inner module, which people evaluate and save, is the same on every rank after the last step as well.
        """
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()
        if self.hook is None:
            self.copy_from(src)
