"""The file of one rank: JSON lines, each written by one call, so that a killed rank leaves whole lines.

``docs/design/trace-format.md`` describes the lines. Events are turned into flat lists of whole numbers as soon as a
step is over: numbers are small, and the garbage collector does not look at them.
"""

from __future__ import annotations

import json
import os
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from rankstep.trace import events as ev

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

FORMAT: Final = "rankstep-trace"
VERSION: Final = 1
QUEUE_LIMIT: Final = 200_000
"""Events that may wait in memory, about 20 MB; the oldest are given up, and the trace says so."""

# How each kind of event is named in the file, and which of its numbers are written, times last.
COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "forward_began": ("step", "at_ns"),
    "forward_ended": ("step", "at_ns"),
    "backward_began": ("step", "at_ns"),
    "grad_ready": ("step", "param", "at_ns"),
    "bucket_filled": ("step", "bucket", "at_ns"),
    "bucket_launched": ("step", "bucket", "in_backward", "at_ns"),
    "bucket_finished": ("step", "bucket", "at_ns"),
    "bucket_waited": ("step", "bucket", "begun_ns", "at_ns"),
    "waits_ended": ("step", "cpu_ns", "begun_ns", "at_ns"),
    "step_settled": ("step", "at_ns"),
    # When the host told the device to note the moment, and when the device did; see device.py.
    "device_forward_began": ("step", "host_ns", "device_ns"),
    "device_forward_ended": ("step", "host_ns", "device_ns"),
    "device_backward_began": ("step", "host_ns", "device_ns"),
    "device_bucket_filled": ("step", "bucket", "host_ns", "device_ns"),
    "device_bucket_launched": ("step", "bucket", "host_ns", "device_ns"),
    "device_bucket_finished": ("step", "bucket", "host_ns", "device_ns"),
    "device_bucket_waited": ("step", "bucket", "host_ns", "device_ns"),
    "device_step_settled": ("step", "host_ns", "device_ns"),
}
# What belongs to no wrapper, and how many numbers a row of it has: begin and end of spans; the same on the device, as
# (host, device) twice; and moments at which the host saw that the device had passed a mark: host, device, seen.
SPANS: Final[Mapping[str, int]] = {
    "data": 2,
    "backward": 2,
    "optimizer": 2,
    "device_backward": 4,
    "device_optimizer": 4,
    "device_seen": 3,
}
_TAKE: Final[dict[type, tuple[str, Callable[[Any], tuple[int, ...]]]]] = {
    ev.ForwardBegan: ("forward_began", lambda e: (e.step, e.at_ns)),
    ev.ForwardEnded: ("forward_ended", lambda e: (e.step, e.at_ns)),
    ev.BackwardBegan: ("backward_began", lambda e: (e.step, e.at_ns)),
    ev.GradReady: ("grad_ready", lambda e: (e.step, e.param, e.at_ns)),
    ev.BucketFilled: ("bucket_filled", lambda e: (e.step, e.bucket, e.at_ns)),
    ev.BucketLaunched: (
        "bucket_launched",
        lambda e: (e.step, e.bucket, int(e.in_backward), e.at_ns),
    ),
    ev.BucketFinished: ("bucket_finished", lambda e: (e.step, e.bucket, e.at_ns)),
    ev.BucketWaited: ("bucket_waited", lambda e: (e.step, e.bucket, e.begun_ns, e.at_ns)),
    ev.WaitsEnded: ("waits_ended", lambda e: (e.step, e.cpu_ns, e.begun_ns, e.at_ns)),
    ev.StepSettled: ("step_settled", lambda e: (e.step, e.at_ns)),
}


class Queue:
    """What one source has told and nobody has read yet; telling is one append, from any thread."""

    def __init__(self) -> None:
        self._waiting: deque[Any] = deque(maxlen=QUEUE_LIMIT)
        self.tell = self._waiting.append

    def drain(self) -> tuple[list[Any], bool]:
        """Take all, and say whether older ones were given up."""
        waiting = self._waiting
        full = len(waiting) == QUEUE_LIMIT
        # Other threads may tell more meanwhile; that is for the next time.
        return [waiting.popleft() for _ in range(len(waiting))], full


class Journal:
    """Collects lines and writes them.

    Args:
        path: The file; one that is there is replaced.
        header: Its first line.
        limit_bytes: No more is taken once the file is this long.

    Attributes:
        lost: Some events are not in the file.

    Raises:
        OSError: The file cannot be made.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], limit_bytes: int) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        self._limit = limit_bytes
        self._written = 0
        self._lines: list[str] = []
        self._columns: dict[Any, dict[str, list[int]]] = {}
        self.lost = False
        self.add({"format": FORMAT, "version": VERSION, **header})
        self.write()

    @property
    def full(self) -> bool:
        """The file is as long as it may be."""
        return self._written >= self._limit

    def add(self, line: Mapping[str, Any]) -> None:
        """Take a line of its own."""
        self._lines.append(json.dumps(line, separators=(",", ":")))

    def take(self, wrapper: int, queue: Queue) -> None:
        """Take what one wrapper's reducer has told."""
        events, lost = queue.drain()
        self.lost = self.lost or lost
        columns = self._columns.setdefault(wrapper, {})
        for event in events:
            name, numbers = _TAKE[type(event)]
            columns.setdefault(name, []).extend(numbers(event))

    def take_spans(self, queue: Queue) -> None:
        """Take ``(kind, begin, end)`` of what belongs to no wrapper."""
        spans, lost = queue.drain()
        self.lost = self.lost or lost
        columns = self._columns.setdefault(None, {})
        for kind, begin_ns, end_ns in spans:
            columns.setdefault(kind, []).extend((begin_ns, end_ns))

    def take_rows(self, rows: Mapping[int | None, Mapping[str, list[int]]]) -> None:
        """Take rows of numbers that are ready to be written: for each wrapper, and None for spans, those of each kind."""
        for wrapper, kinds in rows.items():
            columns = self._columns.setdefault(wrapper, {})
            for name, numbers in kinds.items():
                columns.setdefault(name, []).extend(numbers)

    def write(self) -> None:
        """Put everything taken so far into the file.

        Raises:
            OSError: It cannot be written: the disk is full, for example.
        """
        # Spans first: a file that is cut short then has no step that lacks them.
        for wrapper, columns in sorted(self._columns.items(), key=lambda each: each[0] is not None):
            if columns:
                self.add(columns if wrapper is None else {"wrapper": wrapper, **columns})
                columns.clear()
        if not self._lines:
            return
        data = "".join(f"{line}\n" for line in self._lines).encode()
        self._lines.clear()
        while data:
            count = os.write(self._file, data)
            self._written += count
            data = data[count:]

    def close(self) -> None:
        """Write what is left and close the file.

        Raises:
            OSError: It cannot be written.
        """
        try:
            self.add({"end": True, "lost": self.lost})
            self.write()
        finally:
            os.close(self._file)
