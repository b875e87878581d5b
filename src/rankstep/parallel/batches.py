"""One rank's batches, and empty ones behind them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rankstep.collectives.roundtable import Seat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class Source:
    """One rank's batches, and empty ones behind them.

    Args:
        loader: Where the batches come from.
        empty: Makes an empty batch of the last one; None: cut the last one.

    Attributes:
        error: What the loader raised.
        why: Why no empty batch could be made.
    """

    def __init__(self, loader: Iterable[Any], empty: Callable[[Any], Any] | None) -> None:
        self.error: BaseException | None = None
        self.why = ""
        self._loader = loader
        self._empty = empty
        self._batches: Iterator[Any] | None = None
        self._out = False
        self._batch: Any = None
        # The whole last batch only where the user's function asks for it; else its shapes.
        self._last: Any = None

    def fetch(self) -> Seat:
        """Get this rank's next batch; never raises, so that the others can be told."""
        try:
            if not self._out:
                self._out = not self._fetched()
            return self._emptied() if self._out else Seat.HAS
        except BaseException as error:  # noqa: BLE001 - kept, and raised when the others know
            self.error = error
            return Seat.FAILED

    def take(self) -> Any:
        """Hand the batch over; nobody else holds it then."""
        batch, self._batch = self._batch, None
        return batch

    def _fetched(self) -> bool:
        if self._batches is None:
            self._batches = iter(self._loader)
        try:
            self._batch = next(self._batches)
        except StopIteration:
            return False
        if self._empty is not None:
            self._last = self._batch
        elif self._last is None:
            self._last, _ = cut(self._batch)
        return True

    def _emptied(self) -> Seat:
        if self._empty is not None:
            self._batch = self._empty(self._last)
            return Seat.OUT
        if self._last is None:
            self._last, _ = cut(_sample(self._loader))
        if self._last is None:
            self.why = "it never had a batch, and its loader has no dataset to look at"
            return Seat.UNABLE
        # Anew each time, because loops take things out of their batches.
        self._batch, found = cut(self._last)
        if not found:
            self.why = f"there is no tensor in its batch, a {type(self._last).__name__}"
            return Seat.UNABLE
        return Seat.OUT


def _sample(loader: Any) -> Any:
    """Sample 0 as the loader would give it, for a rank that gets none; None if there is no way to it."""
    dataset: Any = getattr(loader, "dataset", None)
    collate: Any = getattr(loader, "collate_fn", None)
    if collate is None or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return None
    return collate([dataset[0]]) if len(dataset) else None


def cut(batch: Any) -> tuple[Any, int]:
    """A batch with nothing in it, and how many tensors were cut for it.

    Args:
        batch: Tensors and arrays in any nest of tuples, lists, mappings and dataclasses. A list without any of these in
            it holds one entry per sample and becomes empty; everything else is kept.
    """
    if isinstance(batch, torch.Tensor | np.ndarray):
        if batch.ndim == 0:
            return batch, 0
        # A copy, since a slice would keep the whole batch in memory.
        none = batch[:0]
        return none.detach().clone() if isinstance(none, torch.Tensor) else none.copy(), 1
    values, rebuild = _parts(batch)
    if rebuild is None:
        return batch, 0
    pairs = [cut(value) for value in values]
    return rebuild([value for value, _ in pairs]), sum(found for _, found in pairs)


def _parts(batch: Any) -> tuple[Iterable[Any], Callable[[list[Any]], Any] | None]:
    """What a container holds, and how to build another with other contents."""
    if isinstance(batch, Mapping):
        return batch.values(), lambda new: _with_items(batch, dict(zip(batch, new, strict=True)))
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return batch, lambda new: type(batch)(*new)
    if isinstance(batch, list | tuple):
        return (batch if any(map(_is_structure, batch)) else ()), type(batch)
    if _is_dataclass(batch):
        names = [field.name for field in dataclasses.fields(batch)]
        return [getattr(batch, name) for name in names], lambda new: _with_fields(batch, names, new)
    return (), None


def _with_fields(batch: Any, names: list[str], values: list[Any]) -> Any:
    new = copy.copy(batch)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(new, name, value)  # also where the class is frozen
    return new


def _with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return items
    new = copy.copy(mapping)
    new.update(items)
    return new


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_structure(value: Any) -> bool:
    """Whether a member of a list is part of the batch's structure, and not one sample of it."""
    return _is_dataclass(value) or isinstance(
        value, torch.Tensor | np.ndarray | Mapping | list | tuple
    )
