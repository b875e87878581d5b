"""When a GPU gets to what its host has queued: marks in its streams, read later and never waited for.

The host runs ahead of a GPU, so its own times say when work was handed over. With each event that bounds a piece of
work a mark (an event of the device, with its time) is put into the stream that is current there, and read when the
device has passed it, as a rule one step later. Nothing here makes the host wait but :meth:`DeviceMarks.finish`, which
looks again for at most a second when the recording has ended. On CPUs none of this is loaded.

Source: https://docs.pytorch.org/docs/stable/generated/torch.cuda.Event.html
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import torch

from rankstep.trace import events as ev

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankstep.trace.journal import Queue

WAITING: Final = 20_000
"""Marks that may wait to be passed; the oldest are given up."""

FIRST_LOOK_S: Final = 0.002
"""Before the first step the device has little to do, and one look soon after the first mark ties the clocks together."""

LAST_LOOK_S: Final = 1.0

# Beyond this a difference of two events, a 32-bit number of milliseconds, is rounded to more than 60 ns.
_REBASE_MS: Final = 1000.0

_MARKED: Final[dict[type, str]] = {
    ev.ForwardBegan: "device_forward_began",
    ev.ForwardEnded: "device_forward_ended",
    ev.BackwardBegan: "device_backward_began",
    ev.BucketFilled: "device_bucket_filled",
    ev.BucketLaunched: "device_bucket_launched",
    ev.BucketFinished: "device_bucket_finished",
    ev.BucketWaited: "device_bucket_waited",
    ev.StepSettled: "device_step_settled",
}


class Mark:
    """One mark in a stream.

    Attributes:
        host_ns: When the host put it there.
        device_ns: When the device passed it, counted from the first mark; 0 until it is read.
    """

    __slots__ = ("begin", "device_ns", "event", "host_ns", "name", "row", "wrapper")

    def __init__(
        self, event: Any, name: str, wrapper: int | None, row: tuple[int, ...], begin: Mark | None
    ) -> None:
        self.event, self.name, self.wrapper, self.row, self.begin = event, name, wrapper, row, begin
        self.host_ns = time.perf_counter_ns()
        self.device_ns = 0


class DeviceMarks:
    """The marks of one device.

    Args:
        device: Which.
        fail: Told of an error, after which no mark is made or read; recording goes on without.
        module: ``torch.cuda`` or what stands for it.

    Attributes:
        lost: Marks were given up.
    """

    def __init__(
        self, device: torch.device, fail: Callable[[Exception], None], module: Any = torch.cuda
    ) -> None:
        self.device = device
        self.lost = False
        self._fail, self._module = fail, module
        self._on = True
        self._free: list[Any] = []
        self._waiting: deque[Mark] = deque()
        self._rows: dict[int | None, dict[str, list[int]]] = {}
        self._base: Any = None
        self._base_ns = 0

    # ---------------------------------------------------------------- put

    def start(self) -> None:
        """Put the first mark and look for it for a moment: all times of the device count from it."""
        first = self._put("")
        if first is None:
            return
        self._base = first.event
        until = time.perf_counter() + FIRST_LOOK_S
        while self._waiting and time.perf_counter() < until:
            self.read()

    def teller(self, wrapper: int, queue: Queue, *, host_waits: bool) -> Callable[[Any], None]:
        """Give the recorder of a wrapper's reducer: its events go into the queue, and marks into streams.

        Args:
            wrapper: The wrapper's number.
            queue: Takes the events.
            host_waits: The backend's waits block the host, which therefore knows itself when a bucket has ended.
        """
        tell = queue.tell
        names = {k: n for k, n in _MARKED.items() if not (host_waits and k is ev.BucketFinished)}

        def told(event: Any) -> None:
            tell(event)
            name = names.get(type(event))
            if name is not None:
                bucket = getattr(event, "bucket", None)
                row = (event.step,) if bucket is None else (event.step, bucket)
                self._put(name, wrapper, row)

        return told

    def begins(self) -> Mark | None:
        """Mark the begin of a backward call or an optimizer step."""
        return self._put("")

    def ends(self, kind: str, begin: Mark | None) -> None:
        """Mark the end of what began with ``begin``."""
        if begin is not None:
            self._put(f"device_{kind}", begin=begin)

    def _put(
        self,
        name: str,
        wrapper: int | None = None,
        row: tuple[int, ...] = (),
        begin: Mark | None = None,
    ) -> Mark | None:
        """Put a mark into the current stream of the device."""
        if not self._on:
            return None
        try:
            # What is put into a stream that is being captured belongs to the graph and has no time of its own.
            if self._module.is_current_stream_capturing():
                return None
            event = self._free.pop() if self._free else self._module.Event(enable_timing=True)
            mark = Mark(event, name, wrapper, row, begin)
            event.record(self._module.current_stream(self.device))
        except Exception as error:  # noqa: BLE001 - a training must not end because it is watched
            self._stop(error)
            return None
        if len(self._waiting) >= WAITING:
            self._waiting.popleft()
            self.lost = True
        self._waiting.append(mark)
        return mark

    def _stop(self, error: Exception) -> None:
        self._on = False
        self._waiting.clear()
        self._fail(error)

    # ---------------------------------------------------------------- read

    def read(self) -> None:
        """Read the marks that the device has passed, in the order in which they were put."""
        last: Mark | None = None
        try:
            while self._waiting and self._waiting[0].event.query():
                mark = self._waiting.popleft()
                self._note(mark)
                last = mark
        except Exception as error:  # noqa: BLE001 - see _put
            self._stop(error)
        if last is not None:
            seen = self._rows.setdefault(None, {}).setdefault("device_seen", [])
            seen += (last.host_ns, last.device_ns, time.perf_counter_ns())

    def finish(self) -> None:
        """The recording has ended: read what is left, and for that look again for a moment."""
        until = time.monotonic() + LAST_LOOK_S
        self.read()
        while self._waiting and time.monotonic() < until:
            time.sleep(0.001)
            self.read()

    def drain(self) -> dict[int | None, dict[str, list[int]]]:
        """Hand over what was read: for each wrapper, and None for spans, rows of each kind as ``COLUMNS`` has them."""
        rows, self._rows = self._rows, {}
        return rows

    def _note(self, mark: Mark) -> None:
        event = mark.event
        apart_ms = self._base.elapsed_time(event)
        mark.device_ns = self._base_ns + round(apart_ms * 1e6)
        if apart_ms > _REBASE_MS:
            event, self._base, self._base_ns = self._base, event, mark.device_ns
        if event is not self._base:
            self._free.append(event)
        if mark.name:
            row = mark.row
            if mark.begin is not None:
                row = (mark.begin.host_ns, mark.begin.device_ns)
            rows = self._rows.setdefault(mark.wrapper, {}).setdefault(mark.name, [])
            rows += (*row, mark.host_ns, mark.device_ns)
