"""How long a backward and its communication take with given buckets, and which buckets make that shortest.

Pure arithmetic on times in nanoseconds; no tensors, no ranks. The link carries one bucket after the other, and a bucket
of n bytes takes ``start + n * byte``. A bucket leaves when its last gradient is ready and all buckets before it have
left; the last one leaves when backward has ended. So with ``f(j)`` the moment at which the first j gradients are
through, and a bucket that holds the gradients i+1 to j, ``f(j) = max(f(i), ready(j)) + start + byte * bytes(i+1..j)``.

Note [Charge]
    Where ranks compute on all cores of a host, moving bytes takes time from computing: for each second that the link is
    busy, ``charge`` seconds of compute are lost, 0 to 1. All gradients that come after a bucket then come later by
    ``charge`` times its flight. Counted on a clock that stands still for those times (g = f - charge * flights so far),
    the recursion is the same with ``1 - charge`` of every flight, and the end lies ``charge`` times all flights later.
    Their bytes are the same whatever the plan, so what a plan pays for is ``charge * start`` for each of its buckets.
    With a charge of 1 nothing can be hidden, and one bucket at the end is best.

Note [Two candidates]
    ``F(m, j)``, the earliest end of j gradients in m buckets, never falls when j grows, and neither does
    ``F(m, i) - byte * bytes(1..i)``: leaving out the last gradient, or splitting it off another bucket, shows both. So
    for the last bucket only two beginnings can be best: the latest i with ``F(i) <= ready(j)``, which has the fewest
    bytes among those that need not wait for the link, and the first i after it, which keeps the link busiest.

Source: Shi et al., "MG-WFBP", INFOCOM 2019, arXiv 1811.11141 (the model; their merging is greedy, this is exact).
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MIB = 1024 * 1024

CAP_BYTES = 256 * MIB
"""256 MiB: a bigger bucket saves less than a hundredth of its time, and a second round takes memory for a whole one."""

NOISE, BOUND = 0.05, 0.5
"""A measured charge below a twentieth is noise, and from a half on it is 1; see :func:`as_charge`."""

_SAME = 1e-9
"""Two sums of the same times in another order differ by less than this share."""


@dataclass(frozen=True, slots=True)
class Link:
    """What an all-reduce costs.

    Attributes:
        start_ns: Of each, however small.
        byte_ns: Of each byte.
        charge: Compute lost while it is under way, as a share of its time, 0 to 1; see Note [Charge].
    """

    start_ns: float
    byte_ns: float
    charge: float = 0.0

    def flight_ns(self, nbytes: float) -> float:
        """How long an all-reduce of so many bytes takes."""
        return self.start_ns + self.byte_ns * nbytes


def as_charge(share: float) -> float:
    """The charge of a transport for which a share of its time was seen to be lost.

    Sockets of one host were seen to take 0.6 to 1 of it, the rest being gaps of some microseconds between a thread's
    wake-ups; but no plan gained anything there by sending during backward. Networks were seen to take 0.1 to 0.25.
    """
    if share < NOISE:
        return 0.0
    return share if share < BOUND else 1.0


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of one backward in the order in which they are put into buckets.

    Attributes:
        ready_ns: When each is ready where nothing is sent meanwhile.
        nbytes: Bytes of each.
        end_ns: When backward has ended; the last bucket leaves then.
    """

    ready_ns: tuple[float, ...]
    nbytes: tuple[int, ...]
    end_ns: float

    def buckets(self, ends: Sequence[int]) -> list[tuple[float, int]]:
        """(when its gradients are all ready, bytes) of each bucket.

        Args:
            ends: How many gradients lie in the first bucket, in the first two, and so on.
        """
        through = list(itertools.accumulate(self.nbytes, initial=0))
        # A bucket leaves no earlier than the one before it.
        latest = list(itertools.accumulate(self.ready_ns, max))
        pairs = list(itertools.pairwise([0, *ends]))
        made = [(latest[end - 1], through[end] - through[begin]) for begin, end in pairs]
        made[-1] = (max(self.end_ns, made[-1][0]), made[-1][1])
        return made


def finish_ns(buckets: Iterable[tuple[float, int]], link: Link) -> float:
    """When everything has been sent.

    Args:
        buckets: In launch order, (when its gradients are all ready, bytes) of each.
        link: What sending costs.
    """
    through, sent = -math.inf, 0.0
    for ready, nbytes in buckets:
        flight = link.flight_ns(nbytes)
        through = max(through, ready + link.charge * sent) + flight
        sent += flight
    return through


# ---------------------------------------------------------------- the best buckets


def best_ends(gradients: Gradients, link: Link, *, cap_bytes: int = CAP_BYTES) -> tuple[int, ...]:
    """The buckets with which everything has been sent earliest; the fewest of them where several plans are equal.

    Exact for this model: no other way to cut the order into buckets ends earlier. See Note [Two candidates].

    Args:
        gradients: At least one.
        link: What sending costs.
        cap_bytes: No bucket holds more, unless it holds a single gradient.

    Returns:
        How many gradients lie in the first bucket, in the first two, and so on.
    """
    count = len(gradients.nbytes)
    through = np.concatenate(([0.0], np.cumsum(gradients.nbytes, dtype=np.float64)))
    ready = np.maximum.accumulate(np.asarray(gradients.ready_ns, dtype=np.float64))
    ready[-1] = max(ready[-1], gradients.end_ns)
    ready -= ready[-1]
    places = np.arange(1, count + 1)
    # The earliest beginning of a bucket that ends at each place.
    lowest = np.minimum(np.searchsorted(through, through[1:] - cap_bytes), places - 1)
    start, byte = (1 - link.charge) * link.start_ns, (1 - link.charge) * link.byte_ns
    fee = link.charge * link.start_ns
    bound = _without_fee(ready, through, lowest, start, byte)

    earliest = np.full(count + 1, np.inf)
    earliest[1:] = np.where(lowest == 0, ready + start + byte * through[1:], np.inf)
    begins = [np.zeros(count + 1, dtype=np.int32)]
    least, best = float(earliest[-1]) + fee, 1
    for buckets in range(2, count + 1):
        slack = _SAME * (abs(bound) + float(byte * through[-1]) + start)
        if bound + buckets * fee >= least - slack:
            break
        earliest, begin = _one_more(earliest, buckets, ready, through, lowest, start, byte)
        begins.append(begin)
        if float(earliest[-1]) + buckets * fee < least - slack:
            least, best = float(earliest[-1]) + buckets * fee, buckets
    ends = [count]
    for begin in reversed(begins[1:best]):
        ends.append(int(begin[ends[-1]]))
    return tuple(reversed(ends))


def _one_more(
    before: np.ndarray,
    buckets: int,
    ready: np.ndarray,
    through: np.ndarray,
    lowest: np.ndarray,
    start: float,
    byte: float,
) -> tuple[np.ndarray, np.ndarray]:
    """F(m, .) from F(m - 1, .), and where the last bucket begins for each place."""
    places = np.arange(1, len(ready) + 1)
    first = buckets - 1
    floor = np.maximum(lowest, first)
    latest = np.searchsorted(before[first:], ready, side="right") + first - 1
    idle, busy = np.minimum(latest, places - 1), np.maximum(latest + 1, floor)
    busy_at = np.minimum(busy, len(ready))
    of_idle = np.where(idle >= floor, ready - byte * through[idle], np.inf)
    of_busy = np.where(busy < places, before[busy_at] - byte * through[busy_at], np.inf)
    after = np.full(len(before), np.inf)
    after[1:] = np.minimum(of_idle, of_busy) + start + byte * through[1:]
    begin = np.zeros(len(before), dtype=np.int32)
    begin[1:] = np.where(of_idle <= of_busy, idle, busy_at)
    return after, begin


def _without_fee(
    ready: np.ndarray, through: np.ndarray, lowest: np.ndarray, start: float, byte: float
) -> float:
    """The earliest end with any number of buckets: what no number of them can beat."""
    ends: list[float] = [-math.inf]
    sums, floors = through.tolist(), lowest.tolist()
    for place, at in enumerate(ready.tolist(), 1):
        latest = bisect.bisect_right(ends, at) - 1
        best = math.inf
        if latest >= floors[place - 1]:
            best = at - byte * sums[latest]
        busy = max(latest + 1, floors[place - 1])
        if busy < place:
            best = min(best, ends[busy] - byte * sums[busy])
        ends.append(best + start + byte * sums[place])
    return ends[-1]


# ---------------------------------------------------------------- caps


def ends_of_caps(nbytes: Sequence[int], cap_bytes: Sequence[int]) -> tuple[int, ...]:
    """The buckets that caps make, as :func:`rankstep.buckets.plan.make_plan` fills them with gradients of one dtype.

    Args:
        nbytes: Of each gradient, in order.
        cap_bytes: A bucket closes with the gradient that reaches its cap; the last cap repeats.
    """
    ends: list[int] = []
    running = 0
    for place, size in enumerate(nbytes, 1):
        running += size
        if running >= cap_bytes[min(len(ends), len(cap_bytes) - 1)]:
            ends.append(place)
            running = 0
    if not ends or ends[-1] != len(nbytes):
        ends.append(len(nbytes))
    return tuple(ends)


def cap_list(nbytes: Sequence[int], ends: Sequence[int]) -> tuple[float, ...]:
    """A ``bucket_cap_mb_list`` that makes these buckets, with no more digits than it takes.

    Args:
        nbytes: Of each gradient, in order.
        ends: The buckets.
    """
    through = list(itertools.accumulate(nbytes, initial=0))
    sizes = [through[end] - through[begin] for begin, end in itertools.pairwise([0, *ends])]
    for digits in range(7):
        # Rounded down: a cap that is a little short still closes with the same gradient, a longer one with the next.
        unit = 10**digits
        caps = [max(1, math.floor(size / MIB * unit)) / unit for size in sizes[:-1]]
        # The last bucket ends anyway.
        caps.append(max(1, math.ceil(sizes[-1] / MIB * unit)) / unit)
        if ends_of_caps(nbytes, [max(1, int(cap * MIB)) for cap in caps]) == tuple(ends):
            break
    else:
        caps = [size / MIB or 1 / MIB for size in sizes]
    while len(caps) > 1 and caps[-1] == caps[-2]:
        caps.pop()
    return tuple(caps)


# ---------------------------------------------------------------- the link


def fit_link(points: Iterable[tuple[float, float]], charge: float = 0.0) -> Link:
    """The link that fits measured flights best: least sum of relative errors, neither cost below 0.

    Such a line lies on two of the points (or on one, with one cost 0), so that one which something has spoiled does not
    move it. Points of one size only leave ``start_ns`` at 0; see :func:`tells_start`.

    Args:
        points: (bytes, time in ns), at least one with a positive time.
        charge: Of the link.
    """
    known = _few(points)
    lines = [(0.0, time / size) for size, time in known if size]
    lines += [(time, 0.0) for size, time in known if not size or len(known) > 1]
    for (small, short), (big, long) in itertools.combinations(known, 2):
        byte = (long - short) / (big - small)
        start = short - byte * small
        if byte >= 0 and start >= 0:
            lines.append((start, byte))
    start, byte = min(
        lines,
        key=lambda line: sum(
            abs(line[0] + line[1] * size - time) / max(time, 1.0) for size, time in known
        ),
    )
    return Link(start, byte, charge)


def tells_start(sizes: Iterable[float]) -> bool:
    """Whether flights of these sizes differ enough to tell the price of a start from the price of bytes."""
    known = [size for size in sizes if size]
    return bool(known) and max(known) >= 2 * min(known)


def _few(points: Iterable[tuple[float, float]], most: int = 16) -> list[tuple[float, float]]:
    """One point for each size, medians; neighbours are taken together where there are many sizes."""
    of: dict[float, list[float]] = {}
    for size, time in points:
        of.setdefault(size, []).append(time)
    each = [(size, statistics.median(times)) for size, times in sorted(of.items())]
    width = -(-len(each) // most)
    groups = [each[at : at + width] for at in range(0, len(each), width)]
    return [
        (statistics.median(s for s, _ in group), statistics.median(t for _, t in group))
        for group in groups
    ]
