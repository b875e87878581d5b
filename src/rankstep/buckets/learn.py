"""How often each parameter fires in a backward, and in which order: learned once, then kept up to date."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankstep.buckets.bucket import Bucket

WINDOW = 8
"""After so many backwards in a row that differ from what was learned, what they showed is learned anew."""


class Firings:
    """Counts of gradient-hook calls for each parameter.

    A parameter used twice by reentrant checkpoints fires twice in one backward, one that the loss does not reach fires
    never. The first synced backward says how often to expect each; a higher count is adopted at once, so that its
    bucket waits for it from then on, a lower one only when it has lasted, so that a branch taken now and then never
    makes a gradient late.

    Args:
        count: How many parameters there are.

    Attributes:
        fired: Calls in this backward or the last one, per parameter; hooks write it.
        expected: Calls after which a gradient is whole; hooks read it. Both lists stay the same objects for good.
        home: Each parameter's bucket, once there is a plan; the same object for good, too.
        loud: True for each parameter whose hook must call the reducer and not only count down its bucket.
        accumulated: 1 for each parameter that fired under ``no_sync`` since the last reduction.
        newly_used: Parameters that fired although they did not in the first backward.
        newly_unused: Parameters that fired in the first backward and missed in a later one.
    """

    def __init__(self, count: int) -> None:
        self.fired = [0] * count
        self.expected = [0] * count
        self.home: list[Bucket] = []
        self.loud: list[bool] = []
        self.accumulated = [0] * count
        self._zeros = [0] * count
        self._last_position: dict[int, int] = {}
        self._positions = 0
        self._differed = 0
        self._highest = [0] * count
        self._first: list[int] | None = None
        self.newly_used: set[int] = set()
        self.newly_unused: set[int] = set()

    def note(self, index: int) -> None:
        """While learning: a parameter fired."""
        self._positions += 1
        self._last_position[index] = self._positions

    def order(self) -> list[int]:
        """Parameters in the order of their last firing; those that never fired follow, last registered first."""
        seen = sorted(self._last_position, key=self._last_position.__getitem__)
        return seen + [i for i in reversed(range(len(self.fired))) if i not in self._last_position]

    @property
    def always_same(self) -> bool:
        """Whether every backward so far used the same parameters."""
        return not self.newly_used and not self.newly_unused

    def touched(self) -> list[int]:
        """For each parameter: nonzero if any gradient reached it since the last reduction."""
        return [f + a for f, a in zip(self.fired, self.accumulated, strict=True)]

    def open(self) -> None:
        """A synced backward begins: count from 0.

        Not done when the one before ends, where the memory that its gradients have just left makes any further
        allocation slow.
        """
        self.fired[:] = self._zeros

    def close(self, *, learns: bool = True) -> bool:
        """The backward is over: draw the conclusions.

        Args:
            learns: False: it died, or this rank only kept the others company, so its counts mean nothing.

        Returns:
            Whether what is expected has changed.
        """
        changed = False
        if not learns:
            pass
        elif self._first is None:
            self._first = list(self.fired)
            self.expected[:] = self.fired
            changed = True
        elif self.fired != self.expected:
            self.newly_used.update(
                i for i, count in enumerate(self.fired) if count and not self._first[i]
            )
            self.newly_unused.update(
                i for i, count in enumerate(self._first) if count and not self.fired[i]
            )
            for index, count in enumerate(self.fired):
                if count > self.expected[index]:
                    self.expected[index] = count
                    changed = True
                self._highest[index] = max(self._highest[index], count)
            self._differed += 1
            if self._differed == WINDOW:
                changed = changed or self.expected != self._highest
                self.expected[:] = self._highest
                self._forget()
        elif self._differed:
            self._forget()
        if self.accumulated != self._zeros:
            self.accumulated[:] = self._zeros
        return changed

    def _forget(self) -> None:
        self._differed = 0
        self._highest[:] = self._zeros

    def learned(self) -> dict[str, Any]:
        """What is known by now, as plain data."""
        return {
            "expected": list(self.expected),
            "first": list(self.expected if self._first is None else self._first),
            "highest": list(self._highest),
            "differed": self._differed,
        }

    def recall(self, learned: dict[str, Any]) -> None:
        """Know what :meth:`learned` returned."""
        self.expected[:] = learned["expected"]
        self._first = list(learned["first"])
        self._highest[:] = learned["highest"]
        self._differed = learned["differed"]
