"""Writes checkpoints on rank 0, at once or behind the training's back, and deletes old ones."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankstep.checkpoint.folder import Folder

    Files = Mapping[str, Mapping[str, torch.Tensor]]


class Keeper:
    """Keeps the newest checkpoints of a folder, and the best one.

    A thread writes. Asynchronously, it writes copies of the tensors, which lie in memory of the host that is kept for the
    next time; else the caller waits. One checkpoint is in work at most.

    Args:
        folder: Where they are.
        keep: How many of the newest stay.
        best: "min" or "max": that of the lowest or highest score stays, too; None: no score counts.
    """

    def __init__(self, folder: Folder, keep: int, best: str | None) -> None:
        self._folder = folder
        self._keep = keep
        self._best = best
        self._pool = ThreadPoolExecutor(1, "rankstep-checkpoint")
        self._work: Future[None] | None = None
        self._cleaning: Future[None] | None = None
        self._copies: dict[str, dict[str, torch.Tensor]] = {}

    def write(self, facts: Mapping[str, Any], state: Any, tensors: Files, *, copy: bool) -> None:
        """Have a checkpoint written, and then old ones deleted; :meth:`take` the one before it first.

        Args:
            facts: For its marker.
            state: Everything that is no tensor.
            tensors: The live tensors, by file and name.
            copy: They are going to change before it is written.

        Raises:
            CheckpointError: The last time, old ones could not be deleted.
        """
        self.settle()
        if copy:
            tensors = self._copied(tensors)
        self._work = self._pool.submit(self._write, facts, state, tensors)
        self._cleaning = self._pool.submit(self._clean, self._work)

    def _write(self, facts: Mapping[str, Any], state: Any, tensors: Files) -> None:
        self._folder.write(facts, state, tensors)

    def _clean(self, work: Future[None]) -> None:
        # Nobody waits for it: deleting gigabytes takes a while.
        if work.exception() is None:
            self._folder.prune(self._keep, self._best)

    def settle(self) -> None:
        """Wait until old ones are deleted.

        Raises:
            CheckpointError: They could not be.
        """
        cleaning, self._cleaning = self._cleaning, None
        if cleaning is not None:
            cleaning.result()

    @property
    def failed(self) -> bool:
        """Whether the one in work is known to have failed."""
        return self._work is not None and self._work.done() and self._work.exception() is not None

    def take(self) -> Future[None] | None:
        """Hand over what is in work, to wait for it; None if nothing is."""
        work, self._work = self._work, None
        return work

    def close(self) -> None:
        """Wait, whatever becomes of it, and end the thread."""
        self._pool.shutdown()

    def _copied(self, tensors: Files) -> Files:
        """Copy into the host's memory, so that training may go on."""
        copies: dict[str, dict[str, torch.Tensor]] = {}
        devices: set[torch.device] = set()
        for file, named in tensors.items():
            before = self._copies.get(file, {})
            copies[file] = {}
            for name, tensor in named.items():
                copy = before.get(name)
                if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                    copy = torch.empty(
                        tensor.shape,
                        dtype=tensor.dtype,
                        device="cpu",
                        pin_memory=tensor.device.type == "cuda",
                    )
                copies[file][name] = copy.copy_(tensor, non_blocking=True)
                devices.add(tensor.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self._copies = copies
        return copies
