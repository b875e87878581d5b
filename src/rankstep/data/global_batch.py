"""Batches of the whole job: what one step trains on does not depend on how many ranks there are."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from torch.utils.data import Sampler

from rankstep.data.checks import whole_number
from rankstep.data.sampler import DistributedSampler, _place
from rankstep.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized

    from rankstep.data.sampler import Order


class GlobalBatchSampler(Sampler[list[int]]):
    """Deals every global batch to the ranks, in micro-batches that fit; pass it as a DataLoader's ``batch_sampler``.

    Step k takes the positions ``k * global_batch`` and following of the epoch's order, whatever the number of ranks. A
    rank's share of them comes as one or more micro-batches, whose gradients are accumulated. Shares differ by one sample
    at most, also in a tail that is shorter; a rank may have none of it. So a job that goes on with other ranks, after
    `load_state_dict`, takes the same steps over the same samples, and each sample of the epoch once.

    ``for window in checkpoint.windows(loader)`` gives a step's micro-batches; with ``model.backward(loss_sum, count=n)``
    the gradient is the exact mean over the global batch.

    Args:
        dataset: Anything with a length.
        global_batch: Samples of one step, over all ranks together.
        micro_batch: The most samples that one forward takes on one rank; None: no bound, one micro-batch a step.
        num_replicas: Ranks to deal to. Default: the size of torch's default process group, or 1 where none is open.
        rank: The rank to deal to.
        shuffle: Whether each epoch has its own random order: that of `DistributedSampler`.
        seed: Fixes the orders; the same on all ranks.
        drop_last: Leave out the last step where it would be shorter.
        order: As for `DistributedSampler`.

    Raises:
        DataError: An argument is out of range, or there are fewer samples than one step needs with `drop_last`.
    """

    def __init__(
        self,
        dataset: Sized,
        global_batch: int,
        micro_batch: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        order: Order = "torch",
    ) -> None:
        super().__init__()
        self.num_replicas, self.rank = _place(num_replicas, rank)
        if not 0 <= self.rank < self.num_replicas:
            raise DataError(
                f"Invalid rank {self.rank}, rank should be in the interval [0, {self.num_replicas - 1}]"
            )
        self.global_batch = whole_number(global_batch, "global_batch", least=1)
        self.micro_batch = (
            None if micro_batch is None else whole_number(micro_batch, "micro_batch", least=1)
        )
        self.drop_last = bool(drop_last)
        # The order of all samples, as one rank alone walks it.
        self._whole = DistributedSampler(dataset, 1, 0, shuffle, seed, pad="none", order=order)
        self._begun_at = 0
        if self.global_batch < self.num_replicas:
            raise DataError(
                f"global_batch={self.global_batch} leaves some of {self.num_replicas} ranks without a sample in every "
                f"step; take at least {self.num_replicas}, or fewer ranks"
            )
        if not self.steps:
            raise DataError(
                f"the dataset has {self._length} samples, and no step of {self.global_batch} can be made of them "
                f"(drop_last={self.drop_last})"
            )

    @property
    def epoch(self) -> int:
        """The epoch whose order the next iteration has."""
        return self._whole.epoch

    @property
    def steps(self) -> int:
        """Steps of a whole epoch."""
        whole, rest = divmod(self._length, self.global_batch)
        return whole + bool(rest and not self.drop_last)

    def __len__(self) -> int:
        """Micro-batches of this rank in a whole epoch."""
        return sum(len(sizes) for sizes in self._windows_from(0))

    def __iter__(self) -> Iterator[list[int]]:
        """Return an iterator over this rank's micro-batches: of the whole epoch, or after a load of the rest of it."""
        self._begun_at = start = self._start
        return self._deal(iter(self._whole), start)

    def _deal(self, order: Iterator[int], start: int) -> Iterator[list[int]]:
        for step, sizes in enumerate(self._windows_from(start)):
            size = min(self.global_batch, self._length - start - step * self.global_batch)
            mine = iter(list(itertools.islice(order, size))[self.rank :: self.num_replicas])
            for count in sizes:
                yield list(itertools.islice(mine, count))
        # A loaded place at the end of its epoch is left, too, by an iteration that yields nothing.
        next(order, None)

    def windows(self) -> Iterator[list[int]]:
        """Yield, step by step, the sizes of the micro-batches that this rank will have in the next iteration."""
        return self._windows_from(self._start)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has; see `DistributedSampler.set_epoch`."""
        changes = epoch != self.epoch
        self._whole.set_epoch(epoch)
        if changes:
            self._begun_at = 0

    def state_dict(self, steps: int = 0) -> dict[str, Any]:
        """Return the place in the present epoch, the same on all ranks, for any number of ranks.

        Args:
            steps: How many steps were done since the last iteration began.
        """
        done = min(self._begun_at + steps * self.global_batch, self._length)
        return self._whole.state_dict(done)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the place that `state_dict` names: its epoch, and in it the samples not consumed yet.

        Raises:
            DataError: It is none of this class, or belongs to another epoch than this sampler walks.
        """
        self._whole.load_state_dict(state_dict)
        self._begun_at = self._start

    @property
    def _length(self) -> int:
        return self._whole.total_size

    @property
    def _start(self) -> int:
        walk = self._whole._walk
        at_load = walk is not None and walk.waits and walk.epoch == self._whole.epoch
        return walk.shard.start if walk is not None and at_load else 0

    def _windows_from(self, start: int) -> Iterator[list[int]]:
        for begin in range(start, self._length, self.global_batch):
            size = min(self.global_batch, self._length - begin)
            if size < self.global_batch and self.drop_last:
                return
            yield self._sizes(size)

    def _sizes(self, size: int) -> list[int]:
        """Sizes of this rank's micro-batches of a step of so many samples; as many on each rank wherever possible."""
        share = len(range(self.rank, size, self.num_replicas))
        fullest = -(-size // self.num_replicas)
        count = 1 if self.micro_batch is None else -(-fullest // self.micro_batch)
        count = min(count, share)
        return [share // count + (index < share % count) for index in range(count)]
