"""The object that users hold: ``with rankstep.Checkpoint(...) as checkpoint:``."""

from __future__ import annotations

import functools
import math
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from rankstep.checkpoint.files import require_safetensors, sync, write_tensors
from rankstep.checkpoint.folder import Folder
from rankstep.checkpoint.keeper import Keeper
from rankstep.checkpoint.parts import Parts
from rankstep.checkpoint.session import Session
from rankstep.checkpoint.stopping import Stopped, StopRequest
from rankstep.data import DistributedSampler, GlobalBatchSampler
from rankstep.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from os import PathLike
    from types import TracebackType

    import torch
    from torch import nn

    from rankstep.checkpoint.loading import Resumed
    from rankstep.checkpoint.parts import Stateful


class Checkpoint:
    """Saves a run so that it goes on exactly where it was, and goes on with it.

    Enter it behind the wrapper, optimizers and loaders: that loads the newest whole checkpoint of the directory, if
    there is one. Loop with it, and say when a step is done::

        with rankstep.Checkpoint("runs/a", model=model, optimizer=optimizer, sampler=sampler, every=500) as checkpoint:
            for epoch in checkpoint.epochs(10):
                for images, labels in checkpoint.batches(loader):
                    ...
                    optimizer.step()
                    checkpoint.step()

    A run that was killed and is started again equals the uninterrupted one, bit for bit, on as many ranks. On another
    number of ranks it takes each sample of the epoch once, and with `GlobalBatchSampler` the same steps. Told by SIGTERM
    to end, all ranks save after the same step and leave.

    Saved are: the model in its own names, optimizers, schedulers, the scaler, the place in the data, the random states of
    every rank, the bucket plan, and ``extra``. Nothing is pickled. Every rank makes the same calls.

    Args:
        directory: Of this run's checkpoints; made private. None: nothing is saved or loaded, the loops work as ever.
        model: Wrapped or not; wrappers and ``torch.compile`` are looked through.
        optimizer: One, or several.
        scheduler: One, or several.
        scaler: A ``torch.amp.GradScaler``.
        sampler: The `DistributedSampler` or `GlobalBatchSampler` of the training loader.
        every: Save after each so many optimizer steps; None: when asked, told to stop, and at the end.
        keep: How many of the newest stay.
        best: "min" or "max": the one that was saved with the lowest or highest score stays, too.
        asynchronous: Write behind the training's back, from a copy in the host's memory.
        stop_signals: What asks all ranks to save and end; a second one ends the rank at once. () for none.
        per_rank: Further objects with ``state_dict`` and ``load_state_dict`` that differ from rank to rank, by name.
        **others: Further ones that are the same on all ranks.

    Attributes:
        extra: A dict of this rank's own, saved with each checkpoint: numbers, texts, lists, dicts, tensors. A rank that
            was not there before gets rank 0's.
        resumed: What was loaded; None: nothing was there.

    Raises:
        CheckpointError: (on entering) No checkpoint that is there is whole; the newest is of another model or of a later
            Rankstep; the directory cannot be written; another job writes there. On every rank.
    """

    def __init__(
        self,
        directory: str | PathLike[str] | None,
        *,
        model: nn.Module,
        optimizer: Any = (),
        scheduler: Any = (),
        scaler: Any = None,
        sampler: DistributedSampler | GlobalBatchSampler | None = None,
        every: int | None = None,
        keep: int = 3,
        best: Literal["min", "max"] | None = None,
        asynchronous: bool = False,
        stop_signals: Sequence[int] = (signal.SIGTERM,),
        per_rank: Mapping[str, Stateful] | None = None,
        **others: Stateful,
    ) -> None:
        if every is not None and (type(every) is not int or every < 1):
            raise CheckpointError(f"every={every!r} must be a number of steps from 1, or None")
        if type(keep) is not int or keep < 1:
            raise CheckpointError(f"keep={keep!r} must be a number of checkpoints from 1")
        if best not in (None, "min", "max"):
            raise CheckpointError(f'best={best!r} must be "min", "max" or None')
        if not isinstance(sampler, DistributedSampler | GlobalBatchSampler | None):
            raise CheckpointError(
                f"sampler= takes a rankstep.DistributedSampler or GlobalBatchSampler, got a {type(sampler).__name__}. "
                "Next: leave it out and loop over batches(loader, replay=True)."
            )
        if scaler is not None:
            others["scaler"] = scaler
        self._parts = Parts(model, _several(optimizer), _several(scheduler), others)
        self._per_rank = dict(per_rank or {})
        self._folder = None if directory is None else Folder(Path(directory))
        self._sampler = sampler
        self._every = every
        self._keep = keep
        self._best = best
        self._waits = not asynchronous
        self._stop = StopRequest(stop_signals)
        # Asked for while a batch was under way, with this score.
        self._asked: list[float | None] = []
        self._session: Session | None = None
        self._keeper: Keeper | None = None
        self.extra: dict[str, Any] = {}
        self.resumed: Resumed | None = None

    # ---------------------------------------------------------------- a run

    @property
    def steps(self) -> int:
        """Optimizer steps done, those before a resume included."""
        return self._now.progress.steps

    @property
    def epoch(self) -> int:
        """Passes over the data that have ended: the number of the present one."""
        return self._now.progress.epoch

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left of ``count``; none if the run was at its end."""
        return self._now.progress.epochs(count)

    def batches(self, loader: Iterable[Any], *, replay: bool = False) -> Batches:
        """Iterate over one pass of the training loader, or after a resume over the rest of it.

        It sets the sampler's epoch, and counts what is trained on. One such loop makes an epoch. One that is left by ``break``
        has ended when the next one begins; a run that is left there goes on there.

        Args:
            loader: A DataLoader that draws from the ``sampler`` given to the constructor.
            replay: After a resume, read the pass from its beginning and throw away what was trained on. Needed for any
                other loader, and for bits where a dataset draws random numbers in loader workers. Needs as many ranks.

        Raises:
            CheckpointError: (in the loop) The place in this loader cannot be known.
        """
        return Batches(loader, self._now.progress.batches(loader, replay=replay))

    def windows(self, loader: Iterable[Any]) -> Iterator[Iterator[Any]]:
        """Iterate over the steps of one pass, each an iterator over this rank's micro-batches.

        All but the last micro-batch of a step are only accumulated, as under ``no_sync``; a rank that has none takes part
        with the count 0. Weigh them: ``model.backward(loss_sum, count=n)``.

        Args:
            loader: A DataLoader whose ``batch_sampler`` is the `GlobalBatchSampler` given as ``sampler``.
        """
        return self._now.progress.windows(loader, self._now.models)

    def step(self) -> None:
        """An optimizer step is done; call it last in the loop's body, on every rank.

        Saves where one is due, was asked for, or a signal asked to end. Inside an accumulation window, whose gradients
        are not reduced yet, it does nothing.

        Raises:
            CheckpointError: It could not be saved, or the asynchronous one before it could not; on every rank. What was
                saved earlier is untouched, and the run may go on.
            Stopped: A signal asked to end: this rank has saved, and ends as the others do.
        """
        session = self._now
        if session.in_window():
            return
        session.progress.settle()
        if self._keeper is None:
            return
        stop = session.look(self._stop.signal, self._keeper)
        due = self._every is not None and session.progress.steps % self._every == 0
        if stop or due or self._asked:
            score = self._asked[0] if self._asked else None
            self._asked.clear()
            session.save(self._keeper, self.extra, score, wait=self._waits or stop > 0)
        if stop:
            raise Stopped(128 + stop)

    def save(self, score: float | None = None) -> None:
        """Save now if the last batch was trained on, else after the coming step; every rank calls it.

        Args:
            score: Of the model as it is, for ``best``; rank 0's counts. NaN and infinity are none.

        Raises:
            CheckpointError: As for :meth:`step`.
        """
        session = self._now
        if self._keeper is None:
            return
        score = float(score) if score is not None and math.isfinite(score) else None
        if session.anyone(session.progress.open or session.in_window()):
            self._asked = [score]
        else:
            session.save(self._keeper, self.extra, score, wait=self._waits)

    def export(self, path: str | PathLike[str]) -> None:
        """Write the model's weights alone, in the module's own names, as one safetensors file; every rank calls it.

        Each checkpoint has the same as ``model.safetensors``. A tied weight is there once; the file's metadata says under
        which other names it goes.

        Raises:
            CheckpointError: It could not be written; on every rank.
        """
        session, path = self._now, Path(path)
        require_safetensors()
        weights, aliases = self._parts.weights()
        write = functools.partial(_write_whole, path, weights, aliases)
        session.ranks.on(0, write, f"exporting to {path}")

    def __enter__(self) -> Self:
        if self._session is not None:
            raise CheckpointError("this Checkpoint is open already")
        listens = self._folder is not None and self._stop.possible
        session = Session(self._parts, self._per_rank, self._sampler, guards_workers=listens)
        if self._folder is not None:
            require_safetensors()
            session.ranks.on(0, self._folder.hold, "opening the directory of checkpoints")
            try:
                self.resumed = session.load(self._folder, self.extra)
            except BaseException:
                self._folder.release()
                raise
            self._keeper = Keeper(self._folder, self._keep, self._best)
            self._stop.listen()
        self._asked.clear()
        self._session = session
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        session, keeper = self._now, self._keeper
        try:
            if keeper is not None and error is None:
                progress = session.progress
                # Ranks that ran out of samples before the others have counted the epoch's end already.
                if session.anyone(progress.steps > 0 and progress.mark != session.saved):
                    session.save(keeper, self.extra, None, wait=True)
                session.finish(keeper)
                session.ranks.on(0, keeper.settle, "deleting old checkpoints")
        finally:
            # Behind an exception, too: what is being written is whole, and a restart is glad of it.
            if keeper is not None:
                keeper.close()
            self._stop.close()
            if self._folder is not None:
                self._folder.release()
            self._session = self._keeper = None

    @property
    def _now(self) -> Session:
        if self._session is None:
            raise CheckpointError(
                "this Checkpoint is not open. Next: use it inside `with rankstep.Checkpoint(...) as checkpoint:`."
            )
        return self._session


class Batches:
    """One pass over a loader; what it does not have itself is the loader's (its dataset, its batch size).

    Args:
        loader: The loader.
        batches: The pass.
    """

    def __init__(self, loader: Iterable[Any], batches: Iterator[Any]) -> None:
        self._loader = loader
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def __len__(self) -> int:
        """Batches of a whole pass."""
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _several(given: Any) -> tuple[Any, ...]:
    return (
        tuple(given) if isinstance(given, list | tuple) else (given,) if given is not None else ()
    )


def _write_whole(
    path: Path, weights: Mapping[str, torch.Tensor], aliases: Mapping[str, str]
) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        write_tensors(part, weights, aliases)
        sync(part)
        part.replace(path)
        sync(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"the weights could not be written to {path}: {error.strerror or error}"
        ) from error
    finally:
        part.unlink(missing_ok=True)
