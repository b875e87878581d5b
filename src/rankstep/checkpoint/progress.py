"""Where a run is: the steps done, the epoch, the place in its data; and the loops that count them.

Note [What was trained on]
    A DataLoader's workers ask for indices ahead of time, and a window of micro-batches may be half done. So the place in
    the data is counted here: batches are counted when the loop gets them, and count as done when an optimizer step was
    made of them. A checkpoint has what is done.

Note [Random numbers of a pass]
    Beginning to iterate over a loader draws a number, from which it seeds its workers. A run that goes on in the middle
    of a pass begins to iterate once more, so it goes back to the numbers at the beginning of that pass, begins, and then
    takes up those of the checkpoint.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler

from rankstep.checkpoint import rng
from rankstep.checkpoint.stopping import workers_apart
from rankstep.data import DistributedSampler, GlobalBatchSampler
from rankstep.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

    from rankstep.parallel import DistributedDataParallel


class Progress:
    """One rank's place in a run.

    Args:
        sampler: What deals the samples; None: only the number of batches is known.
        devices: Where this rank computes.
        rank: This rank.
        world_size: How many ranks there are.
        guards_workers: A loader's workers shall not die of the signals that ask this rank to end.

    Attributes:
        steps: Optimizer steps done.
        epoch: Passes over the data that have ended.
        open: A batch was handed out since the last step.
    """

    def __init__(
        self,
        sampler: DistributedSampler | GlobalBatchSampler | None,
        devices: set[torch.device],
        rank: int,
        world_size: int,
        *,
        guards_workers: bool = False,
    ) -> None:
        self.steps = 0
        self.epoch = 0
        self.open = False
        self._sampler = sampler
        self._devices = devices
        self._rank = rank
        self._world_size = world_size
        self._guards_workers = guards_workers
        # Batches of this pass: those the loop got, and those that steps were made of, also before a resume.
        self._handed = self._done = 0
        # What the sampler counts: batches, or windows, since it began in this process, and when the last step was made.
        self._counted = self._counted_done = 0
        self._counts = False
        self._before = 0
        self._batch_size = 1
        self._windows: Iterator[list[int]] = iter(())
        self._at_begin: dict[str, Any] = {}
        self._generator: torch.Tensor | None = None
        # What was loaded and waits for the loop: see Note [Random numbers of a pass].
        self._waiting: dict[str, Any] | None = None
        self._saved_world_size = world_size

    def settle(self) -> None:
        """An optimizer step was made of all that was handed out."""
        self.steps += 1
        self._done, self._counted_done = self._handed, self._counted
        self.open = False

    @property
    def mark(self) -> tuple[int, int, int]:
        """Equal exactly where a checkpoint would have the same place."""
        return self.steps, self.epoch, self._done

    # ---------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        """The place, for all ranks."""
        return {"handed": self._done, "sampler": self._sampler_state()}

    def own_state(self) -> dict[str, Any]:
        """What this rank has for itself."""
        return {
            "random": rng.capture(self._devices),
            "at_begin": self._at_begin,
            "generator": self._generator,
        }

    def _sampler_state(self) -> dict[str, Any] | None:
        sampler = self._sampler
        if sampler is None or not self._counts:
            return None if sampler is None else sampler.state_dict()
        if self._done == 0:
            sampler.set_epoch(self.epoch)
        if isinstance(sampler, GlobalBatchSampler):
            return sampler.state_dict(self._counted_done)
        # The last batch may be short.
        most = sampler._walk.shard.count if self._counted_done and sampler._walk else 0
        return sampler.state_dict(self._before + min(self._counted_done * self._batch_size, most))

    def load(
        self,
        state: dict[str, Any],
        own: dict[str, Any] | None,
        other: dict[str, Any],
        *,
        steps: int,
        epoch: int,
        world_size: int,
    ) -> None:
        """Go to the place of a checkpoint.

        Args:
            state: What :meth:`state` returned.
            own: What :meth:`own_state` returned on this rank; None: there was no such rank.
            other: The same of rank 0.
            steps: Optimizer steps done.
            epoch: Passes that had ended.
            world_size: Ranks that wrote it.
        """
        self.steps, self.epoch = steps, epoch
        self._handed = self._done = int(state["handed"])
        self._saved_world_size = world_size
        if self._sampler is not None and state["sampler"] is not None:
            self._sampler.load_state_dict(state["sampler"])
            if isinstance(self._sampler, DistributedSampler):
                self._before = state["sampler"]["global_consumed"] // self._world_size
        if own is None:
            rng.seed_newcomer(other["random"], self._rank, steps)
            own = {"random": rng.capture(self._devices), "at_begin": {}, "generator": None}
        self._at_begin, self._generator = own["at_begin"], own["generator"]
        self._waiting = own
        rng.restore(own["random"], self._devices)

    # ---------------------------------------------------------------- loops

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left of ``count``."""
        while self.epoch < count:
            if self._waiting is not None and not self._handed:
                rng.restore(self._waiting["random"], self._devices)
                self._waiting = None
            epoch = self.epoch
            yield epoch
            if self.epoch == epoch:
                self._end_pass()

    def batches(self, loader: Iterable[Any], *, replay: bool) -> Iterator[Any]:
        """Yield the batches of one pass, or of the rest of it, and count them."""
        if isinstance(self._sampler, GlobalBatchSampler) and not replay:
            raise CheckpointError(
                "a GlobalBatchSampler makes steps of one or more batches, or of none: iterate over windows(loader)"
            )
        for batch in self._begin_pass(loader, replay=replay):
            self._hand_out()
            self._counted += 1
            yield batch
        # One that is left by `break` ends when the next pass begins: whoever stops for today goes on in it tomorrow.
        self._end_pass()

    def windows(
        self, loader: Iterable[Any], models: Sequence[DistributedDataParallel]
    ) -> Iterator[Iterator[Any]]:
        """Yield one iterator over micro-batches for each step of a pass, or of the rest of it."""
        if not isinstance(self._sampler, GlobalBatchSampler):
            raise CheckpointError(
                "windows() needs to know what a step is made of: build the loader with "
                "DataLoader(dataset, batch_sampler=rankstep.GlobalBatchSampler(...)), and pass that as sampler=, too"
            )
        iterator = self._begin_pass(loader, replay=False)
        for sizes in self._windows:
            self._counted += 1
            yield self._window(iterator, len(sizes), models)
        for _ in iterator:
            raise CheckpointError("a window was left before all of its micro-batches were taken")
        self._end_pass()

    def _window(
        self, iterator: Iterator[Any], count: int, models: Sequence[DistributedDataParallel]
    ) -> Iterator[Any]:
        self.open = True
        try:
            for index in range(count):
                batch = next(iterator)
                self._hand_out()
                for model in models:
                    model.require_backward_grad_sync = index == count - 1
                yield batch
        finally:
            for model in models:
                model.require_backward_grad_sync = True
        if not count:
            # The others average over this rank, too.
            for model in models:
                model.backward(None, count=0)

    def _begin_pass(self, loader: Any, *, replay: bool) -> Iterator[Any]:
        resumes = self._waiting is not None and self._handed > 0
        if self._handed and not resumes:
            self._end_pass()  # the last pass was left without an end
        ours = self._sampler is not None and sampler_of(loader) is self._sampler
        if not (ours or replay):
            raise CheckpointError(
                f"batches() cannot know the place in a {type(loader).__name__} whose sampler is not the one that Checkpoint "
                "was given. Next: pass that one (rankstep.DistributedSampler or GlobalBatchSampler) as sampler=, or ask "
                "for batches(loader, replay=True), which reads a pass from its beginning again to find the place."
            )
        if self._sampler is not None:
            self._sampler.set_epoch(self.epoch)
        skipped = self._skipped(replay=replay) if resumes else 0
        if ours:
            self._batch_size = getattr(loader, "batch_size", None) or 1
            self._counts = True
        if isinstance(self._sampler, GlobalBatchSampler):
            self._windows = self._sampler.windows()
        generator = getattr(loader, "generator", None)
        if resumes:
            self._back_to_begin(generator)
        else:
            self._note_begin(generator)
        with workers_apart() if self._guards_workers else contextlib.nullcontext():
            iterator: Iterator[Any] = iter(loader)
        for _ in range(skipped):
            next(iterator)
        if resumes and self._waiting is not None:
            rng.restore(self._waiting["random"], self._devices)
        self._waiting = None
        return iterator

    def _note_begin(self, generator: torch.Generator | None) -> None:
        """A pass begins: remember with which random numbers."""
        if self._waiting is not None:
            rng.restore(self._waiting["random"], self._devices)
        self._at_begin = rng.capture(self._devices)
        self._generator = None if generator is None else generator.get_state()

    def _back_to_begin(self, generator: torch.Generator | None) -> None:
        """A pass is begun once more: see Note [Random numbers of a pass]."""
        if self._at_begin:
            rng.restore(self._at_begin, self._devices)
        if generator is not None and self._generator is not None:
            generator.set_state(self._generator.cpu())

    def _skipped(self, *, replay: bool) -> int:
        """How many batches are to be read and thrown away to come to the place."""
        if not replay:
            return 0
        if self._saved_world_size != self._world_size:
            raise CheckpointError(
                f"the pass was begun on {self._saved_world_size} ranks and there are {self._world_size} now, so reading it "
                "again gives other batches. Next: start as many ranks, or use rankstep.DistributedSampler without replay."
            )
        if self._sampler is not None:
            self._sampler.load_state_dict({**self._sampler.state_dict(), "global_consumed": 0})
            self._before = 0
        self._counted = self._counted_done = self._handed
        return self._handed

    def _hand_out(self) -> None:
        self._handed += 1
        self.open = True

    def _end_pass(self) -> None:
        self.epoch += 1
        self._handed = self._done = self._counted = self._counted_done = self._before = 0


def sampler_of(loader: Any) -> Any:
    """What a DataLoader draws indices from; None where it does not show."""
    batches = getattr(loader, "batch_sampler", None)
    if isinstance(batches, GlobalBatchSampler):
        return batches
    if batches is None:
        return getattr(loader, "sampler", None)
    # One of another class may make batches of any size.
    return batches.sampler if type(batches) is BatchSampler else None
