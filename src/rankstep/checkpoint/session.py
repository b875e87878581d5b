"""A run while its Checkpoint is open: what all ranks do together to look, to save and to load."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any

import torch

from rankstep._version import __version__
from rankstep.buckets.kept import adopt_plan, kept_plan
from rankstep.checkpoint import names, own
from rankstep.checkpoint.folder import MODEL, RANKS, TRAINING
from rankstep.checkpoint.loading import Resumed, find, malformed, read, together
from rankstep.checkpoint.progress import Progress
from rankstep.checkpoint.ranks import Ranks
from rankstep.checkpoint.stopping import Looks
from rankstep.errors import CheckpointError
from rankstep.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankstep.checkpoint.folder import Folder
    from rankstep.checkpoint.keeper import Keeper
    from rankstep.checkpoint.loading import Found
    from rankstep.checkpoint.parts import Parts, Stateful

_SAYING_SO = "telling each other what to save"


class Session:
    """See the module's text.

    Args:
        parts: What is saved.
        per_rank: What differs from rank to rank.
        sampler: What deals the samples.
        guards_workers: A loader's workers shall not die of the signals that ask this rank to end.

    Attributes:
        ranks: All ranks.
        progress: Where this one is.
        saved: The place of the newest checkpoint; None: there is none.
        models: The wrapped ones.
    """

    def __init__(
        self,
        parts: Parts,
        per_rank: Mapping[str, Stateful],
        sampler: Any,
        *,
        guards_workers: bool = False,
    ) -> None:
        self.ranks = Ranks()
        self.progress = Progress(
            sampler,
            parts.devices(),
            self.ranks.rank,
            self.ranks.world_size,
            guards_workers=guards_workers,
        )
        self.saved: tuple[int, ...] | None = None
        self._parts = parts
        self._per_rank = per_rank
        self._looks = Looks()
        self.models = [m for m in parts.model.modules() if isinstance(m, DistributedDataParallel)]

    # ---------------------------------------------------------------- asking

    def in_window(self) -> bool:
        """Whether gradients were accumulated that no reduction has taken up yet."""
        return any(any(model.reducer.firings.accumulated) for model in self.models)

    def anyone(self, yes: bool) -> bool:
        """Whether any rank says yes; collective."""
        return bool(self.ranks.add([int(yes)], "asking whether to save now")[0])

    def look(self, stop: int, keeper: Keeper) -> int:
        """Ask the ranks, in some steps, whether one was told to end; a signal's number if so.

        Args:
            stop: The signal that this rank has got; 0: none.
            keeper: Is asked for failures meanwhile.

        Raises:
            CheckpointError: One that was being written has failed; on every rank.
        """
        step = self.progress.steps
        if not self._looks.due(step):
            return 0
        if self.ranks.world_size == 1:
            told = [stop, int(keeper.failed), 1]
        else:
            told = self.ranks.add(
                [int(stop > 0), int(keeper.failed), self._looks.proposal(step)],
                f"asking whether to go on after step {step}",
            )
            self._looks.agreed(step, told[2] // self.ranks.world_size)
        if told[1]:
            self.finish(keeper)
        return (stop or signal.SIGTERM) if told[0] else 0

    def finish(self, keeper: Keeper) -> None:
        """Wait until nothing is being written.

        Raises:
            CheckpointError: It has failed; on every rank.
        """
        try:
            self.ranks.wait_for(keeper.take(), "writing a checkpoint")
        except CheckpointError:
            self.saved = None
            raise

    # ---------------------------------------------------------------- saving

    def save(
        self, keeper: Keeper, extra: dict[str, Any], score: float | None, *, wait: bool
    ) -> None:
        """Save on all ranks.

        Args:
            keeper: Writes on rank 0.
            extra: This rank's.
            score: Of the model; rank 0's counts.
            wait: Until it is on the disk; else it is written behind the training's back.

        Raises:
            CheckpointError: It cannot be saved, or the one before it could not; on every rank.
        """
        ranks, progress = self.ranks, self.progress
        self.finish(keeper)
        packed, apart = b"", {}
        with together(ranks, _SAYING_SO):
            collected = self._parts.collect()
            apart = names.apart(self._parts.model) if ranks.world_size > 1 else {}
        if apart:  # on all ranks or on none
            digests = ranks.exchange(own.digest(apart), "comparing the ranks' buffers")
            apart = {} if digests[ranks.rank] == digests[0] else apart
        with together(ranks, _SAYING_SO):
            packed = own.pack(self._own_state(extra, apart))
        everybody = ranks.exchange(packed, _SAYING_SO)
        with together(ranks, f"saving after step {progress.steps}"):
            if ranks.rank == 0:
                trees, tensors = own.merge(everybody)
                facts = {
                    "step": progress.steps,
                    "epoch": progress.epoch,
                    "world_size": ranks.world_size,
                    "score": score,
                    "made_by": {"rankstep": __version__, "torch": str(torch.__version__)},
                }
                state = {
                    "parts": collected.state,
                    "progress": progress.state(),
                    "plans": [kept_plan(model.reducer) for model in self.models],
                    "ranks": trees,
                }
                files = {MODEL: collected.model, TRAINING: collected.training, RANKS: tensors}
                keeper.write(facts, state, files, copy=not wait)
        self.saved = progress.mark
        if wait:
            self.finish(keeper)

    def _own_state(self, extra: dict[str, Any], apart: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {
            "progress": self.progress.own_state(),
            "extra": extra,
            "objects": {name: part.state_dict() for name, part in self._per_rank.items()},
            # Those that nobody keeps equal on all ranks, where they are not equal to rank 0's.
            "tensors": apart,
        }

    # ---------------------------------------------------------------- loading

    def load(self, folder: Folder, extra: dict[str, Any]) -> Resumed | None:
        """Load the newest whole checkpoint on all ranks; None if there is none.

        Args:
            folder: Where to look.
            extra: Is filled.

        Raises:
            CheckpointError: There are some, and none can be used; on every rank.
        """
        found = find(folder, self.ranks)
        if found is None:
            return None
        loaded = read(found, self.ranks, self._parts, self._device())
        marker, rank = found.marker, self.ranks.rank
        with together(self.ranks, f"loading {found.entry.path}"), malformed(found.entry.path):
            trees = loaded.state["ranks"]
            first = own.unpack(trees, loaded.ranks, 0)
            mine = own.unpack(trees, loaded.ranks, rank) if rank < len(trees) else None
            self._parts.apply(loaded.state["parts"], loaded.tensors)
            objects = (mine or first)["objects"]
            for name, part in self._per_rank.items():
                part.load_state_dict(objects[name])
            if mine is not None and mine["tensors"]:
                self._parts.overwrite(mine["tensors"])
            extra.update((mine or first)["extra"])
            self._adopt(loaded.state["plans"])
            self.progress.load(
                loaded.state["progress"],
                None if mine is None else mine["progress"],
                first["progress"],
                steps=marker.step,
                epoch=marker.epoch,
                world_size=marker.world_size,
            )
        self.saved = self.progress.mark
        self._say(found)
        return Resumed(
            found.entry.path, marker.step, marker.epoch, marker.world_size, found.ignored
        )

    def _adopt(self, plans: list[Any]) -> None:
        if len(plans) != len(self.models):
            return  # trained without a wrapper then, or now
        for model, kept in zip(self.models, plans, strict=True):
            problem = "" if kept is None else adopt_plan(model.reducer, kept)
            if problem and self.ranks.rank == 0:
                sys.stderr.write(f"rankstep: the checkpoint's bucket plan is not used: {problem}\n")

    def _say(self, found: Found) -> None:
        if self.ranks.rank:
            return
        marker, now = found.marker, self.ranks.world_size
        ranks = f"{now} rank{'s' if now > 1 else ''}"
        if marker.world_size != now:
            ranks = f"written by {marker.world_size}, now {ranks}"
        sys.stderr.write(
            f"rankstep: resumed from {found.entry.path} after step {marker.step} ({ranks})\n"
        )
        sys.stderr.flush()

    def _device(self) -> torch.device:
        first = next(iter(self._parts.model.parameters()), None)
        return torch.device("cpu") if first is None else first.device
