"""Loops over data that end together, whatever each rank's number of batches: ``for batch in together(loader, model)``.

Each iteration begins with one small agreement about who has a batch (``collectives/roundtable.py``). As long as anybody
has one, all ranks take the step; a rank that has none gets an *empty* batch, its last one with every tensor cut to
length 0 (``batches.py``), and its model's reducer is told that it is spent. Therefore

* forward and backward run on every rank, with whatever collectives are in them (SyncBatchNorm);
* every rank takes every optimizer step, so momentum and moving averages never go stale, as they do under ``join``;
* gradients weigh what is really there: ``model.backward(loss_sum, count=n)`` divides by what all ranks counted, and plain
  ``loss.backward()`` by the number of ranks, or micro-batches of ranks, that had data;
* nothing that a spent rank computes counts, be it NaN (the mean of an empty loss) or a penalty on the weights;
* buffers (running statistics) that an empty batch has touched are never seen by anybody.

``docs/design/uneven-loops.md`` tells the reasons.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from rankstep.collectives.roundtable import Place, RoundTable, Seat, table_of
from rankstep.errors import DataError, ModelError, RankSkewError, RankstepError
from rankstep.parallel.batches import Source
from rankstep.parallel.ddp import DistributedDataParallel
from rankstep.parallel.sync_batchnorm import SyncBatchNorm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rankstep.buckets import Reducer


def together(
    loader: Iterable[Any],
    model: nn.Module | Sequence[nn.Module],
    *,
    empty: Callable[[Any], Any] | None = None,
) -> Together:
    """Iterate over this rank's batches until no rank has any, so that all ranks take the same number of steps.

    Every rank calls it. Write the loop as ever, and take every batch like any other, the empty ones too: no ``continue``
    for them. A mean over an empty batch is NaN, here and in the log; its gradient is dropped. Accumulation under
    ``no_sync`` works, since all ranks count the same micro-batches. Leave the loop on all ranks in the same step; a rank
    that leaves alone, or whose loader raises, is an error by name on all others. In a world of one this is ``loader``
    itself, at no cost.

    Args:
        loader: Any iterable; iterated anew each time the result is.
        model: The wrapped model, or all of several that the loop trains; wrappers inside other modules are found.
        empty: Makes the batch of a rank that has run out: gets its last batch (None if it never had one), is called for
            each such step, and may return samples, since whatever is computed from them does not count. By default
            tensors and arrays keep all dimensions but the first, which becomes 0, inside tuples, lists, dicts,
            dataclasses too; lists of other things become empty, and everything else stays. A rank that never had a batch
            takes the shapes from sample 0 of its loader's dataset.

    Returns:
        An iterable without a length: nobody knows beforehand how many steps the longest rank takes.

    Raises:
        ModelError: There is no ``rankstep.DistributedDataParallel`` in ``model``, or their ranks differ.
        DataError: (in the loop) A rank has nothing that an empty batch could be made of; on all ranks.
        RankSkewError: (in the loop) A rank has left, or its loader failed; on all others.
        CommunicationError: (in the loop) A rank has ended.

    Source: https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html tells of the same trouble.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    wrappers: dict[DistributedDataParallel, None] = {}
    for each in models:
        wrappers.update((m, None) for m in each.modules() if isinstance(m, DistributedDataParallel))
    if not wrappers:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ModelError(
                f"rank {dist.get_rank()}: together() needs the model as rankstep.DistributedDataParallel wraps it, and found "
                f"none in {', '.join(type(each).__name__ for each in models) or 'an empty list'}. Wrap it first"
            )
        return Together(loader, [], None, empty)
    sizes = {wrapper.reducer.comm.world_size for wrapper in wrappers}
    if len(sizes) > 1:
        raise ModelError(
            f"together() got models that train on {sorted(sizes)} ranks; all of one loop must share the same ranks"
        )
    table = None if sizes == {1} else table_of(next(iter(wrappers)).process_group)
    return Together(loader, list(wrappers), table, empty)


class Together:
    """What :func:`together` returns: each iteration over it is one loop of all ranks."""

    def __init__(
        self,
        loader: Iterable[Any],
        wrappers: Sequence[DistributedDataParallel],
        table: RoundTable | None,
        empty: Callable[[Any], Any] | None,
    ) -> None:
        self.loader = loader
        self._wrappers = wrappers
        self._table = table
        self._empty = empty

    def __iter__(self) -> Iterator[Any]:
        """Begin a loop."""
        return iter(self.loader) if self._table is None else self._steps(self._table)

    def _steps(self, table: RoundTable) -> Iterator[Any]:
        source = Source(self.loader, self._empty)
        parts = [_Part(wrapper, table.rank) for wrapper in self._wrappers]
        place = Place(table.open(), 0)
        try:
            while True:
                seat = source.fetch()
                if source.error is not None:
                    with contextlib.suppress(RankstepError):
                        table.meet(place, seat)
                    raise source.error
                seats = table.meet(place, seat)
                _check(seats, table, place, source.why)
                if Seat.HAS not in seats:
                    return
                live = [seat is Seat.HAS for seat in seats]
                for part in parts:
                    part.before(live)
                place = Place(place.loop, place.step + 1)
                yield source.take()
                for part in parts:
                    part.after(place.step - 1)
        except GeneratorExit:
            table.leave(place)
            raise
        finally:
            table.close(place.loop)
            for part in parts:
                part.end()


def _check(seats: Sequence[Seat], table: RoundTable, place: Place, why: str) -> None:
    """Raise on every rank that can, if one of them cannot go on."""
    failed = [rank for rank, seat in enumerate(seats) if seat is Seat.FAILED]
    if failed:
        raise RankSkewError(
            f"rank {table.rank}: the loader of {_named(failed)} raised before {place}; its own output has the traceback."
        )
    unable = [rank for rank, seat in enumerate(seats) if seat is Seat.UNABLE]
    if unable and Seat.HAS in seats:
        raise DataError(
            f"rank {table.rank}: {_named(unable)} ran out of batches before {place} and has nothing to make an empty one of"
            f"{f' ({why})' if why else ''}. Pass together(..., empty=function), which returns such a batch."
        )


def _named(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


# ---------------------------------------------------------------- models


@dataclasses.dataclass
class _Tally:
    """How much data the window since a model's last reduction has seen.

    Attributes:
        mark: The reductions before it.
        taken: Micro-batches in it, the same on all ranks.
        had: Micro-batches that ranks had data for, summed over the ranks.
        own: Those of this rank.
    """

    mark: int = -1
    taken: int = 0
    had: int = 0
    own: int = 0

    def add(self, live: Sequence[bool], rank: int, times: int = 1) -> None:
        """Count a step, or with -1 take it back."""
        self.taken += times
        self.had += times * sum(live)
        self.own += times * live[rank]


# A window may begin in one epoch's loop and end in the next one's.
_tallies: weakref.WeakKeyDictionary[Reducer, _Tally] = weakref.WeakKeyDictionary()


class _Part:
    """One model's part in a loop: who counts in its mean, what a spent rank gives, and whose buffers are right."""

    def __init__(self, wrapper: DistributedDataParallel, rank: int) -> None:
        self._wrapper = wrapper
        self._rank = rank
        self._reducer: Reducer = wrapper.reducer
        self._tally = _tallies.setdefault(self._reducer, _Tally())
        # Of the loop around this one, if there is one.
        self._outer = (self._reducer.spent, self._reducer.silent, self._reducer.exchange.live)
        self._outer_source = wrapper.buffer_source
        self._mark = 0
        self._live: Sequence[bool] = ()
        self._always_trained = True
        self._buffers: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []

    def before(self, live: Sequence[bool]) -> None:
        """A step begins; ``live``: which ranks have data for it."""
        reducer, tally, wrapper = self._reducer, self._tally, self._wrapper
        if reducer.reductions != tally.mark:
            tally.mark, tally.taken, tally.had, tally.own = reducer.reductions, 0, 0, 0
        self._mark = reducer.reductions
        self._live = live
        tally.add(live, self._rank)
        whole = tally.had == tally.taken * len(live)
        reducer.exchange.live = None if whole else tally.had / tally.taken
        wrapper.buffer_source = wrapper._authoritative_rank = live.index(True)
        if reducer.spent == live[self._rank]:
            self._set_spent(not live[self._rank])
        if reducer.spent:
            reducer.silent = not tally.own
            self._buffers = _copies(wrapper)

    def after(self, step: int) -> None:
        """The step's body has run."""
        reducer = self._reducer
        if reducer.reductions == self._mark and not any(reducer.firings.accumulated):
            # The loop trains another model in this step.
            self._tally.add(self._live, self._rank, -1)
            if reducer.spent and self._always_trained and step:
                warnings.warn(
                    f"rank {reducer.comm.rank}: no backward was made for the empty batch of step {step}; where the other "
                    "ranks made one, they wait for this rank. Take empty batches like any other, without `continue`.",
                    stacklevel=3,
                )
            self._always_trained = False
        self._restore_buffers()

    def end(self) -> None:
        """The loop is over."""
        self._restore_buffers()
        spent, silent, live = self._outer
        self._set_spent(spent)
        self._reducer.silent, self._reducer.exchange.live = silent, live
        self._wrapper.buffer_source = self._wrapper._authoritative_rank = self._outer_source

    def _restore_buffers(self) -> None:
        """Undo what an empty batch did to buffers, unless those of a rank with data have come in their place."""
        copied = self._wrapper.forward_sync_buffers and self._reducer.reductions != self._mark
        if self._buffers and not copied:
            _put_back(self._buffers)
        self._buffers = []

    def _set_spent(self, spent: bool) -> None:
        reducer, hooks = self._reducer, self._wrapper._hooks
        reducer.spent = reducer.silent = spent
        if spent:
            hooks.mute(reducer.params)
        else:
            hooks.unmute()
        for module in self._wrapper.modules():
            if isinstance(module, SyncBatchNorm):
                module.silent = spent


def _copies(model: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]]:
    """What training may change in a model's buffers, except where statistics are those of all ranks."""
    return [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        if module.training and not isinstance(module, nn.SyncBatchNorm)
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def _put_back(copies: Sequence[tuple[nn.Module, str, torch.Tensor, torch.Tensor]]) -> None:
    changed = tuple(buffer for _, _, buffer, _ in copies)
    with torch.no_grad(), _unsafe_preserve_version_counter(changed):
        for module, name, buffer, value in copies:
            module._buffers[name] = buffer.copy_(value)
