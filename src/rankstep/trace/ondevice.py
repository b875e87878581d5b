"""Turns what a GPU's rank recorded from times of the host into times of the device; ``device.py`` records them.

Note [The device's clock]
    The device counts its own time. A mark was passed not before the host put it into the queue, and not after the host
    saw that it had been passed. So each mark and each look bounds how far the two clocks are apart. The lower bound is
    tight whenever the device had nothing to do, as before the first step, so it is taken; the distance to the upper one
    is the error. Where bounds contradict each other the clocks drift, and the offset follows the bounds from mark to
    mark.

Note [What has no mark]
    Gradients have none: one costs more than the events around it. A gradient is placed between the marks before and
    after it as it lay between them on the host. A data wait belongs to the host; what of it lies where the device had
    nothing to do is waiting, and the rest cost nothing.
"""

from __future__ import annotations

import bisect
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Final

from rankstep.trace.assemble import pairs
from rankstep.trace.journal import COLUMNS
from rankstep.trace.lines import Rows
from rankstep.trace.overlap import merged

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rankstep.trace.lines import RankFile

_MARK: Final = "device_"
_Stretch = tuple[int, int]
_Bound = tuple[int, int, int | None]


class DeviceClock:
    """From a device's times to those of its host.

    Args:
        marks: (host, device) of each mark: the host had put it into the queue then.
        looks: (host, device, seen) of marks that the host saw passed.

    Attributes:
        error_ns: The times may be too early by so much.
    """

    def __init__(self, marks: Sequence[_Stretch], looks: Iterable[tuple[int, ...]]) -> None:
        bounds: list[_Bound] = [(device, host - device, None) for host, device in marks]
        bounds += [(device, host - device, seen - device) for host, device, seen in looks]
        bounds.sort(key=lambda bound: bound[0])
        lows = [low for _, low, _ in bounds]
        highs = [high for _, _, high in bounds if high is not None]
        low, high = max(lows), min(highs, default=max(lows))
        self._from, self._offsets = [0], [low]
        self.error_ns = max(0, high - low)
        if low > high:
            self._follow(bounds)

    def _follow(self, bounds: Sequence[_Bound]) -> None:
        offset = bounds[0][1]
        self._from, self._offsets = [], []
        for device, low, high in bounds:
            offset = max(offset, low)
            if high is not None:
                offset = min(offset, high)
            self._from.append(device)
            self._offsets.append(offset)
        self.error_ns = max(self._offsets) - min(self._offsets)

    def host(self, device_ns: int) -> int:
        """The host's time when the device's was ``device_ns``."""
        place = max(0, bisect.bisect_right(self._from, device_ns) - 1)
        return device_ns + self._offsets[place]


def on_device(file: RankFile) -> tuple[RankFile, int]:
    """Give every event the time at which the device got there, on the clock of the host.

    Steps that lack a mark, because the device had not got there when the recording ended, are left out.

    Args:
        file: As it was read.

    Returns:
        The same with other times, and how many reductions were left out; the file itself if it has no marks.
    """
    marks = [
        row[-2:]
        for kinds in file.events.values()
        for n in COLUMNS
        for row in kinds[n]
        if n.startswith(_MARK)
    ]
    # A wrapper on another device has no marks, and two clocks in one picture would be worse than the host's alone.
    if not marks or any(
        len(kinds["step_settled"]) and not len(kinds[f"{_MARK}bucket_launched"])
        for kinds in file.events.values()
    ):
        return file, 0
    for host, device, host_end, device_end in (
        *file.spans["device_backward"],
        *file.spans["device_optimizer"],
    ):
        marks += [(host, device), (host_end, device_end)]
    clock = DeviceClock([(row[0], row[1]) for row in marks], file.spans["device_seen"])
    moved = {wrapper: _Moved(kinds, clock) for wrapper, kinds in file.events.items()}
    events = {wrapper: each.events for wrapper, each in moved.items()}
    left_out = sum(len(each.lacking) for each in moved.values())
    spans = {name: Rows(rows.width) for name, rows in file.spans.items()}
    for name in ("backward", "optimizer"):
        for _, begin, _, end in file.spans[f"{_MARK}{name}"]:
            spans[name].add(clock.host(begin), clock.host(end))
    for begin, end in _idle(file.spans["data"], _busy(events, spans)):
        spans["data"].add(begin, end)
    error = file.header["error_ns"]
    header = file.header | {"error_ns": None if error is None else error + clock.error_ns}
    return replace(file, header=header, events=events, spans=spans, by_device=True), left_out


class _Moved:
    """The events of one wrapper at the times of the device.

    Args:
        kinds: Its events.
        clock: The device's.

    Attributes:
        events: The same at other times, without the steps that lack a mark.
        lacking: Those steps.
    """

    def __init__(self, kinds: Mapping[str, Rows], clock: DeviceClock) -> None:
        self.events = {name: Rows(len(columns)) for name, columns in COLUMNS.items()}
        self._kinds, self._clock = kinds, clock
        self._settled = {step: clock.host(at) for step, _, at in kinds[f"{_MARK}step_settled"]}
        self._filled, self._launched, self._waited, self._finished = (
            {(s, b): clock.host(at) for s, b, _, at in kinds[f"{_MARK}bucket_{name}"]}
            for name in ("filled", "launched", "waited", "finished")
        )
        steps = {step for step, _ in kinds["step_settled"]}
        self.lacking = steps - self._settled.keys()
        for name, known in (("launched", self._launched), ("waited", self._waited)):
            rows = kinds[f"bucket_{name}"]
            self.lacking |= {row[0] for row in rows if (row[0], row[1]) not in known}
        self._complete = steps - self.lacking
        self._move_steps()
        self._move_buckets()
        self._place_gradients()

    def _move_steps(self) -> None:
        for name in ("forward_began", "forward_ended", "backward_began"):
            for step, _, at in self._kinds[_MARK + name]:
                if step not in self.lacking:
                    self.events[name].add(step, self._clock.host(at))
        for step in sorted(self._complete):
            self.events["step_settled"].add(step, self._settled[step])

    def _move_buckets(self) -> None:
        kinds, complete = self._kinds, self._complete
        for step, bucket, _ in kinds["bucket_filled"]:
            if step in complete and (step, bucket) in self._filled:
                self.events["bucket_filled"].add(step, bucket, self._filled[step, bucket])
        for step, bucket, early, _ in kinds["bucket_launched"]:
            if step in complete:
                at = self._launched[step, bucket]
                self.events["bucket_launched"].add(step, bucket, early, at)
        # A backend whose host waits tells its ends itself; where the device waits there is a mark.
        marked = [(step, bucket, at) for (step, bucket), at in self._finished.items()]
        for step, bucket, at in marked or kinds["bucket_finished"]:
            if step in complete:
                self.events["bucket_finished"].add(step, bucket, at)
        # A wait begins where the last bucket has left, or where the wait before it is over.
        begins: dict[int, int] = {}
        for (step, _), at in self._launched.items():
            begins[step] = max(at, begins.get(step, at))
        for step, bucket, _, _ in kinds["bucket_waited"]:
            if step in complete and step in begins:
                end = self._waited[step, bucket]
                self.events["bucket_waited"].add(step, bucket, min(begins[step], end), end)
                begins[step] = max(begins[step], end)

    def _place_gradients(self) -> None:
        """See Note [What has no mark]."""
        anchors: dict[int, list[_Stretch]] = {}
        for name in ("backward_began", "bucket_filled", "bucket_launched", "step_settled"):
            for row in self._kinds[_MARK + name]:
                anchors.setdefault(row[0], []).append((row[-2], self._clock.host(row[-1])))
        for own in anchors.values():
            own.sort()
        for step, param, at in self._kinds["grad_ready"]:
            if step in self._complete:
                self.events["grad_ready"].add(step, param, _between(anchors[step], at))


def _between(anchors: Sequence[_Stretch], at: int) -> int:
    place = bisect.bisect_left(anchors, at, key=lambda anchor: anchor[0])
    if place == 0 or place == len(anchors):
        return anchors[min(place, len(anchors) - 1)][1]
    (host, device), (host_after, device_after) = anchors[place - 1], anchors[place]
    part = (at - host) / max(1, host_after - host)
    return device + round(part * max(0, device_after - device))


def _busy(events: Mapping[int, Mapping[str, Rows]], spans: Mapping[str, Rows]) -> list[_Stretch]:
    """When the device was between the marks of a forward, a backward, an optimizer step or a wait."""
    stretches: list[_Stretch] = [
        (row[0], row[1]) for name in ("backward", "optimizer") for row in spans[name]
    ]
    for kinds in events.values():
        stretches += pairs(kinds["forward_began"], kinds["forward_ended"])
        stretches += [(row[2], row[3]) for row in kinds["bucket_waited"]]
    return merged(stretches)


def _idle(waits: Rows, busy: Sequence[_Stretch]) -> list[_Stretch]:
    """What of the waits lies outside of the busy stretches."""
    idle = []
    place = 0
    for begin, end in sorted((row[0], row[1]) for row in waits):
        at = begin
        while place < len(busy) and busy[place][1] <= begin:
            place += 1
        for left, right in islice(busy, place, None):
            if left >= end:
                break
            if at < left:
                idle.append((at, left))
            at = max(at, right)
        if at < end:
            idle.append((at, end))
    return idle
