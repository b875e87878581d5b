"""A trace as it is read back: who did what when, all times on the clock of rank 0.

Times are nanoseconds; only differences mean something. A *step* is one synced backward with everything around it,
whichever wrappers it reduced: it begins where the step before it ended, at the first data wait or forward after that
step's gradients were in place. ``docs/tracing.md`` defines every word. Nothing here needs torch.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class SpanKind(enum.Enum):
    """What a rank's host was doing."""

    DATA = "data"
    """Waiting for the next batch of a DataLoader."""
    FORWARD = "forward"
    BACKWARD = "backward"
    """Inside backward, without the waits for buckets."""
    WAIT = "wait"
    """Waiting for buckets at the end of backward."""
    OPTIMIZER = "optimizer"
    OTHER = "other"
    """None of these: the loss, zero_grad, logging, the user's own code."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one kind; the spans of a step cover it without gaps and without overlap, in order of time."""

    kind: SpanKind
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class BucketTrace:
    """One bucket in one step on one rank.

    Attributes:
        index: Which bucket: a position in :attr:`RankTrace.buckets`.
        filled_ns: Its last gradient arrived and lies in the buffer; None: not recorded.
        launched_ns: Its all-reduce was started on this rank.
        finished_ns: Its all-reduce ended; None: the backend does not tell.
        wait_begin_ns: The rank began to wait for it, when all its own gradients were there.
        wait_end_ns: The wait was over.
        in_backward: It left while other buckets still lacked gradients.
    """

    index: int
    filled_ns: int | None
    launched_ns: int
    finished_ns: int | None
    wait_begin_ns: int
    wait_end_ns: int
    in_backward: bool


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step on one rank.

    Attributes:
        number: Which synced backward, of whichever wrappers, counted from 0; the same on all ranks.
        begin_ns: Where the step before it ended.
        end_ns: Where the next one begins.
        spans: What the host did, from ``begin_ns`` to ``end_ns``.
        ready: (parameter, time) of each gradient, in order of time; empty in the first step, which only learns.
        buckets: In launch order.
        wrappers: Whose gradients it reduced, as positions in :attr:`RankTrace.wrappers`.
        learns: It is the first of one of them, which only learns the order of gradients, and counts in no mean.
        wait_cpu_ns: Processor time of the whole process while it waited for buckets; None: not recorded.
    """

    number: int
    begin_ns: int
    end_ns: int
    spans: tuple[Span, ...]
    ready: tuple[tuple[int, int], ...]
    buckets: tuple[BucketTrace, ...]
    wrappers: tuple[int, ...] = (0,)
    learns: bool = False
    wait_cpu_ns: int | None = None


@dataclass(frozen=True, slots=True)
class BucketInfo:
    """What is in a bucket.

    Attributes:
        index: Its position in :attr:`RankTrace.buckets`.
        nbytes: Bytes of gradients.
        params: Its parameters, as positions in :attr:`RankTrace.params`.
        wrapper: Whose it is, as a position in :attr:`RankTrace.wrappers`.
    """

    index: int
    nbytes: int
    params: tuple[int, ...]
    wrapper: int = 0


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What one rank recorded.

    Attributes:
        rank: Its global rank.
        host: The name of its machine.
        device: Where it computes, as ``cpu`` or ``cuda:0``.
        clock_error_ns: Its times may be off from rank 0's by at most so much; None: unknown.
        params: Names of the parameters; with several wrappers each begins with its wrapper's name.
        buckets: The plan; with several wrappers those of all, one wrapper after the other.
        steps: In order; numbers may begin above 0.
        complete: The file ends as a finished recording does; False: the rank was cut off, or events were lost.
        unix_ns: A time of this rank and this together are Unix time on its host, in nanoseconds.
        wrappers: What each wrapper is called: the class of its module, with its number where two would be the same.
        by_device: Times but those of data waits are when the device got there; False: when the host did.
        param_bytes: Bytes of each parameter's gradient; empty: not recorded.
        cores: Processor cores that it may use; 0: not recorded.
        threads: On how many of them it computes; 0: not recorded.
    """

    rank: int
    host: str
    device: str
    clock_error_ns: int | None
    params: tuple[str, ...]
    buckets: tuple[BucketInfo, ...]
    steps: tuple[StepTrace, ...]
    complete: bool
    unix_ns: int = 0
    wrappers: tuple[str, ...] = ("",)
    by_device: bool = False
    param_bytes: tuple[int, ...] = ()
    cores: int = 0
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """What all ranks recorded in one run.

    Attributes:
        ranks: Those whose files were found, by rank; fewer than ``world_size`` if some are missing.
        world_size: How many ranks the run had.
        command: How it was started.
        versions: Of rankstep, torch and python.
        notices: What is wrong with it or missing in it, in sentences.
    """

    ranks: tuple[RankTrace, ...]
    world_size: int
    command: str
    versions: dict[str, str]
    notices: tuple[str, ...] = ()
