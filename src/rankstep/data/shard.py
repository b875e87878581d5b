"""Which sample goes to which rank: pure arithmetic over positions, no loader and no process group.

An epoch is a line of positions 0, 1, 2, ... and an *order* that says which sample stands at a position. `Shard` deals the
positions to the ranks like cards: rank r gets r, r + N, r + 2N, ... The order is either none (sample i stands at
position i), a permutation held in memory, or a `StreamingOrder`, which computes any position from a key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Self, TypeAlias

import numpy as np

from rankstep.data.checks import whole_number
from rankstep.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    Indices: TypeAlias = NDArray[np.int64]
    Words: TypeAlias = NDArray[np.uint64]

Pad: TypeAlias = Literal["repeat", "none"]
PADS: Final = ("repeat", "none")

# Long enough that numpy's cost per call vanishes, short enough that a chunk's arrays and ints stay below 1 MiB.
CHUNK_POSITIONS: Final = 4096
# Up to here the order is sorted, not computed: a Feistel network reaches too few orders of a handful of samples.
SORTED_UP_TO: Final = 4096
# Four rounds suffice with perfect round functions; the other four pay for a quick one.
FEISTEL_ROUNDS: Final = 8


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share of an epoch, or of the rest of one.

    Position p stands for the sample `order(p % length)`: positions from `length` on are padding, which starts again at
    the front of the order. Every rank takes each N-th position, so no two ranks share one.

    Args:
        length: Samples in the dataset.
        world_size: Ranks that the samples are dealt to.
        rank: The rank whose share this is, in [0, world_size - 1].
        drop_last: Leave out the tail that does not give every rank one more sample.
        pad: "repeat" fills that tail up with samples from the front, so that all ranks get equally many; "none" deals
            every sample exactly once, and some ranks may get one fewer.
        start: Positions already consumed by all ranks together; the share begins there.

    Raises:
        DataError: A value is out of range, or `drop_last` meets pad="none".
    """

    length: int
    world_size: int
    rank: int
    drop_last: bool = False
    pad: Pad = "repeat"
    start: int = 0

    def __post_init__(self) -> None:
        whole_number(self.length, "the dataset's length", least=0)
        whole_number(self.world_size, "num_replicas", least=1)
        whole_number(self.rank, "rank")
        whole_number(self.start, "the count of samples consumed", least=0)
        if not 0 <= self.rank < self.world_size:
            raise DataError(
                f"Invalid rank {self.rank}, rank should be in the interval [0, {self.world_size - 1}]"
            )
        if self.pad not in PADS:
            raise DataError(f"pad must be one of {', '.join(PADS)}, got {self.pad!r}")
        if self.drop_last and self.pad == "none":
            raise DataError(
                'drop_last=True leaves samples out and pad="none" deals every sample exactly once; '
                'ask for one of the two: drop_last=True to train, pad="none" to evaluate'
            )

    @property
    def stop(self) -> int:
        """The position at which the epoch ends, for all ranks together."""
        left = max(self.length - self.start, 0)
        if self.pad == "none":
            return self.start + left
        if self.drop_last:
            return self.start + left // self.world_size * self.world_size
        return self.start + math.ceil(left / self.world_size) * self.world_size

    @property
    def positions(self) -> range:
        """The positions of this rank, in the order in which it takes them."""
        return range(self.start + self.rank, self.stop, self.world_size)

    @property
    def count(self) -> int:
        """Samples that this rank gets."""
        return len(self.positions)

    @property
    def rounds(self) -> int:
        """Samples that the fullest rank gets: `count`, or one more where pad="none" deals unevenly."""
        return -(-(self.stop - self.start) // self.world_size)

    def reached(self, taken: int) -> int:
        """Return the position that all ranks together stand at when each took `taken` samples."""
        return min(self.start + taken * self.world_size, self.stop)

    def refuse_empty_ranks(self) -> None:
        """Raise where this deal would leave ranks without a sample that the caller expects to work.

        A rank without a batch never enters the first collective, and the others wait for it until they time out.

        Raises:
            DataError: The dataset is empty, or `drop_last` leaves nothing; names the ranks.
        """
        if self.pad == "none" or self.rounds > 0:
            return
        last = self.world_size - 1
        who = "rank 0" if last == 0 else f"ranks 0 to {last}"
        if self.length == 0:
            raise DataError(
                f"the dataset is empty, so {who} would get no sample (world size {self.world_size}); "
                'check how it was built, or use pad="none" where an empty evaluation is meant'
            )
        raise DataError(
            f"drop_last=True with {self.length} samples on {self.world_size} ranks leaves {who} without a sample, and "
            f"training would hang there; use drop_last=False, at most {self.length} ranks, or a dataset of at least "
            f"{self.world_size} samples"
        )


@dataclass(frozen=True, slots=True)
class StreamingOrder:
    """A random order of any number of samples that needs no memory: each position is computed from a key.

    Above `SORTED_UP_TO` samples it is a Feistel network over pairs (l, r) of numbers below the square root of the
    length. Each round replaces (l, r) by (r, l + F(r)), which can be undone whatever F is, so the whole is a true
    permutation of the pairs. There are slightly more pairs than samples; a result beyond the last sample is sent through
    again until it falls inside ("cycle walking"), which keeps it a permutation of the samples alone. At or below that
    length the samples are sorted by a hash of (key, sample), which can give every order there is.

    It is a good shuffle, not a cipher. The order for a key never changes between machines, versions of numpy or torch.

    Args:
        length: Samples to order.
        keys: `FEISTEL_ROUNDS` numbers of 64 bits; `keyed` derives them.

    Source:
        J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002 (cycle walking, generalised
        Feistel); G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014 (the hash).
    """

    length: int
    keys: tuple[int, ...]

    @classmethod
    def keyed(cls, length: int, seed: int, epoch: int) -> Self:
        """Return the order of one epoch.

        Unlike torch's rule, which adds the two, epoch 1 of seed 0 is not epoch 0 of seed 1.

        Args:
            length: Samples to order.
            seed: The run's seed, at least 0.
            epoch: The epoch; counted modulo 2**64, so a negative one is allowed.

        Raises:
            DataError: A value is no whole number or is negative.
        """
        whole_number(length, "length", least=0)
        whole_number(seed, "seed", least=0)
        sequence = np.random.SeedSequence(seed, spawn_key=(whole_number(epoch, "epoch") % 2**64,))
        words = sequence.generate_state(FEISTEL_ROUNDS, np.uint64)
        return cls(length, tuple(words.tolist()))

    def at(self, position: int) -> int:
        """Return the sample at one position.

        Raises:
            DataError: The position lies outside [0, length - 1].
        """
        return int(self.take(np.array([whole_number(position, "position")], dtype=np.int64))[0])

    def take(self, positions: Indices) -> Indices:
        """Return the samples at many positions, in the order asked for.

        Raises:
            DataError: A position lies outside [0, length - 1].
        """
        if positions.size == 0:
            return positions
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= self.length:
            raise DataError(
                f"positions {low} to {high} were asked for, this order has 0 to {self.length - 1}"
            )
        if self.length <= SORTED_UP_TO:
            ranked = _hash(np.arange(self.length, dtype=np.uint64), self.keys[0])
            return np.argsort(ranked, kind="stable")[positions]
        samples = self._network(positions.astype(np.uint64))
        while (outside := samples >= np.uint64(self.length)).any():
            samples[outside] = self._network(samples[outside])
        return samples.astype(np.int64)

    def _network(self, numbers: Words) -> Words:
        side = np.uint64(math.isqrt(self.length - 1) + 1)
        left, right = numbers // side, numbers % side
        for key in self.keys:
            # The hash's upper half, scaled to [0, side) without a division.
            turned = ((_hash(right, key) >> np.uint64(32)) * side) >> np.uint64(32)
            turned += left
            # Modulo side: where nothing is to be taken off, the subtraction wraps to a huge number and loses.
            left, right = right, np.minimum(turned, turned - side)
        return left * side + right


def index_lists(
    positions: range, length: int, order: Callable[[Indices], Indices] | None
) -> Iterator[list[int]]:
    """Yield the samples at `positions`, as lists of at most `CHUNK_POSITIONS`, in constant memory.

    Args:
        positions: Positions of one rank; those from `length` on wrap around to the front.
        length: Samples in the dataset.
        order: Turns positions below `length` into samples; None where sample i stands at position i.
    """
    for first in range(0, len(positions), CHUNK_POSITIONS):
        part = positions[first : first + CHUNK_POSITIONS]
        wrapped = np.arange(part.start, part.stop, part.step, dtype=np.int64) % length
        yield (wrapped if order is None else order(wrapped)).tolist()


def select(permutation: Indices, positions: range) -> Indices:
    """Return a rank's samples out of a whole permutation, so that the rest of it can be freed.

    Args:
        permutation: The sample at each position of the dataset.
        positions: Positions of one rank; those beyond the permutation wrap around to the front.
    """
    length = len(permutation)
    share = np.ascontiguousarray(permutation[positions.start : positions.stop : positions.step])
    padding = positions[len(share) :]
    if not padding:
        return share
    return np.concatenate([share, permutation[np.asarray(padding, dtype=np.int64) % length]])


def _hash(numbers: Words, key: int) -> Words:
    """Mix each number with the key into 64 even bits; distinct numbers stay distinct (SplitMix64's finaliser)."""
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
