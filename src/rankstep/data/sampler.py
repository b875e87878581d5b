"""The sampler that tells each rank which samples are its own, and that can stop and go on anywhere in an epoch."""

from __future__ import annotations

import itertools
import os
import threading
import warnings
from collections.abc import Iterator, Sized
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from rankstep.data.checks import whole_number
from rankstep.data.drawing import note_loader
from rankstep.data.shard import Pad, Shard, StreamingOrder, index_lists, select
from rankstep.data.state import SamplerState
from rankstep.errors import DataError

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from rankstep.world.draws import Loader

Order: TypeAlias = Literal["torch", "streaming"]
ORDERS: Final = ("torch", "streaming")


class RepeatedOrderWarning(UserWarning):
    """A shuffled epoch has the order of the one before it, because `set_epoch` was not called in between."""


@dataclass(slots=True)
class _Walk:
    """One walk along a rank's share; the iterator counts in it, the sampler reads it. Hence not frozen."""

    shard: Shard
    seed: int
    epoch: int
    loaded: bool = False  # its place is that of a loaded state
    yielded: int = 0
    exhausted: bool = False

    @property
    def waits(self) -> bool:
        """Whether a loaded place has not been left yet: a DataLoader with workers begins to iterate twice."""
        return self.loaded and not (self.yielded or self.exhausted)

    def repeats(self, seed: int, epoch: int) -> bool:
        """Whether this was a full pass, and a pass with `seed` and `epoch` would have its order."""
        full = self.shard.start == 0 and 0 < self.shard.count == self.yielded
        return full and (self.seed, self.epoch) == (seed, epoch)


class DistributedSampler(TorchDistributedSampler[int]):
    """Deals a dataset's indices to the ranks; torch's sampler, that can also stop and go on, and need not pad.

    For equal arguments the indices are those of `torch.utils.data.DistributedSampler`, bit for bit, and it is one by
    class. Call `set_epoch` before each epoch; a shuffled pass that repeats the order of the last one is warned of, once.

    *Stop and go on.* `state_dict` names a place in the epoch for all ranks together. After `load_state_dict` the next
    iteration yields only the rest of that epoch, on any number of ranks: what is left of the same order is dealt to the
    ranks that there are now. The iteration after it, or any after `set_epoch` with another number, is whole again. A
    DataLoader asks for indices before it needs them, so tell `state_dict` how many were trained on. `len()` is always
    that of the whole epoch on the present number of ranks, as torch's loader expects.

    *Padding after a change of ranks.* The tail belongs to the ranks that deal it: `pad="repeat"` fills up, and
    `drop_last` cuts, what is left so that it suits the new number of ranks. Only `pad="none"` deals the same samples
    whatever the number.

    *Changing datasets.* As in torch, the length is read again at each iteration, and the number of samples per rank is
    that of construction; a length that no longer fits it is refused.

    Args:
        dataset: Anything with a length. Its items are never read.
        num_replicas: Ranks to deal to. Default: the size of torch's default process group, or 1 where none is open.
        rank: The rank to deal to, in [0, num_replicas - 1]. Default: the rank in that group, or 0 where none is open.
        shuffle: Whether each epoch has its own random order.
        seed: Fixes the orders; the same on all ranks, in [0, 2**64 - 1]. torch's generator, hence order="torch", looks
            at the lowest 32 bits alone.
        drop_last: Leave out the tail that does not give every rank one more sample.
        pad: "repeat" fills that tail up with samples from the front of the order, so that all ranks get equally many.
            "none" deals each sample exactly once: some ranks get one fewer, or with fewer samples than ranks none at
            all. It is meant for evaluation.
        order: "torch" gives torch's order, from a permutation of 8 bytes per sample of the dataset. "streaming" gives
            another random order in constant memory, for any length. Without `shuffle` both need constant memory.

    Raises:
        DataError: An argument is out of range or contradicts another; ranks would get no sample; or the world is
            unclear, because the environment speaks of several ranks and no process group is open yet.

    Source:
        torch.utils.data.distributed.DistributedSampler of PyTorch 2.13, whose order it follows.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: Pad = "repeat",
        order: Order = "torch",
    ) -> None:
        num_replicas, rank = _place(num_replicas, rank)
        seed = whole_number(seed, "seed", least=0)
        _check_epoch(seed, 0)
        if order not in ORDERS:
            raise DataError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
        whole = Shard(_length(dataset), num_replicas, rank, drop_last=bool(drop_last), pad=pad)
        whole.refuse_empty_ranks()
        super().__init__(
            cast("Dataset[int]", dataset), num_replicas, rank, bool(shuffle), seed, whole.drop_last
        )
        self.pad = pad
        self.order = order
        self.num_samples = whole.count
        self.total_size = whole.stop
        self._built_for = whole.length
        self._walk: _Walk | None = None
        self._epoch_set = False
        self._warned = False

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over this rank's indices: of the whole epoch, or after a load of the rest of it.

        Raises:
            DataError: The dataset's length no longer fits the sampler.
        """
        if (
            self.shuffle
            and not self._warned
            and not self._epoch_set
            and self._walk is not None
            and self._walk.repeats(self.seed, self.epoch)
        ):
            self._warned = True
            warnings.warn(
                f"rank {self.rank}: this epoch has the order of the last one, epoch {self.epoch} of seed {self.seed}; "
                "call sampler.set_epoch(epoch) before each epoch",
                RepeatedOrderWarning,
                stacklevel=2,
            )
        return SamplerIterator(self)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has.

        After a load, the number of the loaded epoch keeps the place in it, and any other begins that epoch whole.

        Args:
            epoch: Number of the epoch.

        Raises:
            DataError: No whole number, or one that added to the seed leaves the range of torch's generator.
        """
        epoch = whole_number(epoch, "epoch")
        _check_epoch(self.seed, epoch)
        super().set_epoch(epoch)
        self._epoch_set = True

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the place in the present epoch, as a dict of plain ints, strings and bools.

        The place is the same on all ranks when they took equally many samples; save rank 0's where pad="none" leaves
        some ranks a sample short.

        Args:
            consumed: Samples that this rank is done with in this epoch, counted from the epoch's beginning, those before
                a load included (after a load on another number of ranks: `global_consumed // num_replicas` of them).
                Default: what the latest iterator handed out, which under a DataLoader that works ahead is too many.

        Raises:
            DataError: `consumed` is more than this rank has in the epoch, or fewer than were done before the load.
        """
        walk = self._walk
        if walk is None or walk.epoch != self.epoch:
            walk = _Walk(self._shard(), self.seed, self.epoch)
        return asdict(self._state(walk, consumed))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the place that `state_dict` names: its epoch, and in it the samples not consumed yet.

        Load the same state on every rank.

        Args:
            state_dict: What `state_dict` returned, on any rank and any number of ranks.

        Raises:
            DataError: The state is incomplete, of an unknown version, or belongs to another epoch than this sampler
                walks (dataset length, seed, shuffle, order, drop_last or pad differ). The sampler stays as it was.
        """
        state = SamplerState.parse(state_dict)
        _check_epoch(state.seed, state.epoch)
        state.refuse_unless_same_epoch(self._state(_Walk(self._shard(), self.seed, self.epoch)))
        self.epoch = state.epoch
        shard = self._shard(start=state.global_consumed)
        self._walk = _Walk(shard, self.seed, self.epoch, loaded=True)

    def _shard(self, start: int = 0) -> Shard:
        return Shard(
            self._built_for,
            self.num_replicas,
            self.rank,
            drop_last=self.drop_last,
            pad=self.pad,
            start=start,
        )

    def _state(self, walk: _Walk, consumed: int | None = None) -> SamplerState:
        shard = walk.shard
        if walk.exhausted and consumed is None:
            reached = shard.stop
        else:
            reached = shard.reached(walk.yielded if consumed is None else _since(shard, consumed))
        return SamplerState(
            seed=walk.seed,
            epoch=walk.epoch,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            pad=self.pad,
            order=self.order,
            dataset_len=_length(self.dataset),
            global_consumed=reached,
            world_size=shard.world_size,
        )

    def _begin(self) -> tuple[_Walk, Iterator[int]]:
        """Open a new walk and return it with its indices."""
        length = self._length_now()
        last = self._walk
        goes_on = last is not None and last.waits and last.epoch == self.epoch
        shard = self._shard(start=last.shard.start if last is not None and goes_on else 0)
        walk = _Walk(shard, self.seed, self.epoch, loaded=goes_on)
        if not self.shuffle:
            lists = index_lists(shard.positions, length, None)
        elif self.order == "streaming":
            streaming = StreamingOrder.keyed(length, self.seed, self.epoch)
            lists = index_lists(shard.positions, length, streaming.take)
        else:
            # On the CPU even where the user made another device the default: the order is torch's CPU order.
            generator = torch.Generator(device="cpu").manual_seed(self.seed + self.epoch)
            permutation = torch.randperm(length, generator=generator, device="cpu").numpy()
            share = select(permutation, shard.positions)
            lists = index_lists(range(len(share)), len(share), share.__getitem__)
        self._walk = walk
        self._epoch_set = False
        return walk, itertools.chain.from_iterable(lists)

    def _length_now(self) -> int:
        """Read the dataset's length again, as torch does, and see that it still fits."""
        length = _length(self.dataset)
        if self.pad == "none":
            fits = length == self._built_for
        elif self.drop_last:
            fits = length >= self.total_size
        else:
            fits = 0 < length <= self.total_size
        if not fits:
            raise DataError(
                f"rank {self.rank}: the dataset had {self._built_for} samples when this sampler was built and now has "
                f"{length}, which does not fit the {self.num_samples} per rank it deals; build a new sampler"
            )
        return length


class SamplerIterator(Iterator[int]):
    """The indices of one walk. Has `state_dict` and `load_state_dict` of its own, as torchdata's loader looks for them.

    Args:
        sampler: Whose walk to begin; loading a state into the iterator loads it into the sampler too.
    """

    def __init__(self, sampler: DistributedSampler) -> None:
        self._sampler = sampler
        self._walk, self._indices = sampler._begin()
        self._loader: Loader | None = None

    def __next__(self) -> int:
        try:
            index = next(self._indices)
        except StopIteration:
            self._walk.exhausted = True
            raise
        self._walk.yielded += 1
        if self._loader is not None:
            if self._loader.thread != threading.get_ident():
                self._loader.thread = 0
        elif self._walk.yielded == 1:
            self._loader = note_loader(self._sampler.num_replicas, self._sampler.rank)
        return index

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the place of this iterator, whatever the sampler did since; see `DistributedSampler.state_dict`."""
        return asdict(self._sampler._state(self._walk, consumed))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the place that `state_dict` names; see `DistributedSampler.load_state_dict`."""
        self._sampler.load_state_dict(state_dict)
        self._walk, self._indices = self._sampler._begin()


def _since(shard: Shard, consumed: int) -> int:
    """Return how many of the `consumed` samples of a rank were taken since the shard's start."""
    before = shard.start // shard.world_size
    since = whole_number(consumed, "consumed", least=0) - before
    if since < 0:
        raise DataError(
            f"consumed={consumed} on rank {shard.rank}, but {before} samples per rank were done before this epoch was "
            "loaded; count from the beginning of the epoch"
        )
    if since > shard.rounds:
        raise DataError(
            f"consumed={consumed} on rank {shard.rank} is beyond the end of the epoch, which has "
            f"{before + shard.rounds} samples per rank; count samples of this epoch alone (the last batch may be short)"
        )
    return since


def _length(dataset: object) -> int:
    if not isinstance(dataset, Sized):
        raise DataError(
            f"a sampler needs a dataset with a length, got {type(dataset).__name__}; an iterable dataset has to be "
            "split over the ranks inside its own __iter__"
        )
    return len(dataset)


def _check_epoch(seed: int, epoch: int) -> None:
    if not -(2**63) <= seed + epoch < 2**64:
        raise DataError(
            f"seed + epoch must be in [-2**63, 2**64 - 1], the range of torch's generator, got {seed} + {epoch}"
        )


def _place(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of ranks and this one's, from the arguments or the default process group."""
    if dist.is_available() and dist.is_initialized():
        if num_replicas is None:
            num_replicas = dist.get_world_size()
        if rank is None:
            rank = dist.get_rank()
    if num_replicas is None:
        announced = os.environ.get("WORLD_SIZE", "1")
        # One rank is a fine answer on a laptop; under a launcher it would train every rank on the same samples.
        if announced != "1":
            raise DataError(
                f"WORLD_SIZE={announced} in the environment, but no process group is open to take num_replicas and "
                "rank from; build the sampler inside rankstep.world() (or after init_process_group), or pass both"
            )
        num_replicas = 1
    num_replicas = whole_number(num_replicas, "num_replicas", least=1)
    if rank is None:
        if num_replicas > 1:
            raise DataError(
                f"num_replicas={num_replicas} needs a rank, and no process group is open to take it from; "
                "pass rank as well"
            )
        rank = 0
    return num_replicas, whole_number(rank, "rank")
