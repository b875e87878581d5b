"""The records a reducer hands to a recorder: one frozen object for each thing that happened in a step.

Times are ``time.perf_counter_ns()`` of the rank that recorded them, in nanoseconds. Nothing of Rankstep is imported
here, so every folder may speak this language.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForwardBegan:
    """The wrapper was called.

    Attributes:
        step: The synced backward that will follow, counted from 0 for each wrapper.
        at_ns: When.
    """

    step: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class ForwardEnded:
    """The wrapper returned its output.

    Attributes:
        step: The synced backward that will follow.
        at_ns: When.
    """

    step: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class BackwardBegan:
    """A synced backward produced its first gradient.

    Attributes:
        step: Which synced backward.
        at_ns: When.
    """

    step: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class GradReady:
    """A parameter received its whole gradient of this backward.

    Attributes:
        step: Which synced backward, counted from 0 for each wrapper.
        param: The parameter's number in the plan's list of parameters.
        at_ns: When.
    """

    step: int
    param: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class BucketLaunched:
    """A bucket's all-reduce was started.

    Attributes:
        step: Which synced backward.
        bucket: The bucket's index, which is its launch order.
        in_backward: It left from a gradient hook while other buckets still lacked gradients.
        at_ns: When.
    """

    step: int
    bucket: int
    in_backward: bool
    at_ns: int


@dataclass(frozen=True, slots=True)
class BucketFilled:
    """Every awaited parameter of a bucket has its gradient, and the gradients are in the buffer.

    Attributes:
        step: Which synced backward.
        bucket: The bucket's index.
        at_ns: When.
    """

    step: int
    bucket: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class BucketFinished:
    """A bucket's all-reduce has ended, whether or not anybody waits for it; told by backends whose works have futures.

    Attributes:
        step: Which synced backward.
        bucket: The bucket's index.
        at_ns: When, on the host.
    """

    step: int
    bucket: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class BucketWaited:
    """The rank waited for a bucket at the end of backward.

    Attributes:
        step: Which synced backward.
        bucket: The bucket's index.
        begun_ns: When the wait began.
        at_ns: When it ended.
    """

    step: int
    bucket: int
    begun_ns: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class WaitsEnded:
    """The rank had waited for all buckets of a step.

    Attributes:
        step: Which synced backward.
        cpu_ns: Processor time of the process meanwhile, all threads together: what communication takes.
        begun_ns: When the first wait began.
        at_ns: When the last one ended.
    """

    step: int
    cpu_ns: int
    begun_ns: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class StepSettled:
    """All gradients of a synced backward are in place.

    Attributes:
        step: Which synced backward.
        at_ns: When.
    """

    step: int
    at_ns: int


Event = (
    ForwardBegan
    | ForwardEnded
    | BackwardBegan
    | GradReady
    | BucketFilled
    | BucketLaunched
    | BucketFinished
    | BucketWaited
    | WaitsEnded
    | StepSettled
)
