"""The recorder: listens to every wrapper of this process and keeps one file of what happened.

While a step runs, an event costs one append to a queue. After each backward the queue becomes numbers, and every
``WRITE_STEPS`` steps or ``WRITE_S`` seconds these are written, so that a killed rank loses no more than that. Outside
the steps that are wanted no event is made at all.

A recorder that fails must not end a training: whatever goes wrong in here switches it off with one warning.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import platform
import re
import shlex
import socket
import sys
import time
import warnings
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rankstep._version import __version__
from rankstep.parallel import DistributedDataParallel, observers
from rankstep.trace.clock import align
from rankstep.trace.files import TraceError
from rankstep.trace.journal import Journal, Queue
from rankstep.trace.taps import Taps

if TYPE_CHECKING:
    from rankstep.buckets import Reducer
    from rankstep.buckets.line import Line

WRITE_STEPS = 10
WRITE_S = 1.0
LIMIT_BYTES = 256 * 1024 * 1024
"""A rank's file takes no more steps beyond this; some 100,000 steps of a model with 150 parameters."""

TELLERS_S = 1.0
TELLERS_REST_S = 0.02
"""After its last event a thread needs the interpreter for a moment more."""

DIRECTORY = "RANKSTEP_TRACE"
STEPS = "RANKSTEP_TRACE_STEPS"

_active: Recorder | None = None
_sessions = itertools.count()


class RecorderWarning(UserWarning):
    """Recording has ended early or does not begin; training goes on."""


def read_steps(text: str | None) -> range:
    """Read ``FIRST:LAST``, both optional, LAST not included; None: all steps.

    Raises:
        TraceError: It is no such text.
    """
    found = re.fullmatch(r"(\d*):(\d*)", text or ":")
    steps = range(int(found[1] or 0), int(found[2] or sys.maxsize)) if found else range(0)
    if not steps:
        raise TraceError(
            f"the steps to record are {text!r}. Next: write FIRST:LAST, counted from 0 and without LAST, such as 10:20."
        )
    return steps


def file_name(rank: int) -> str:
    """Name the file of a rank."""
    return f"rank-{rank:05}.jsonl"


def start(directory: str | os.PathLike[str], steps: str | None = None) -> Recorder:
    """Begin to record; a second recorder in a process does nothing but warn.

    Args:
        directory: Where the file of this rank goes.
        steps: As for :func:`rankstep.trace.record`.

    Raises:
        TraceError: ``steps`` cannot be read.
    """
    global _active  # noqa: PLW0603 - a process has one recorder, since a reducer has one
    recorder = Recorder(Path(directory), read_steps(steps))
    if _active is not None:
        _warn(
            f"recording into {_active.directory} goes on, so nothing is recorded into {directory}"
        )
        return recorder
    _active = recorder
    recorder.open()
    return recorder


def install_from_environment() -> Recorder | None:
    """Begin to record if ``RANKSTEP_TRACE`` names a directory; ``RANKSTEP_TRACE_STEPS`` may name steps.

    Raises:
        TraceError: ``RANKSTEP_TRACE_STEPS`` cannot be read.
    """
    directory = os.environ.get(DIRECTORY)
    if not directory or _active is not None:
        return None
    return start(directory, os.environ.get(STEPS) or None)


def _warn(text: str) -> None:
    warnings.warn(text, RecorderWarning, stacklevel=3)


@dataclass(slots=True)
class _Listening:
    """One reducer that is listened to; a model that its script lets go must not live on in here."""

    reducer: weakref.ref[Reducer]
    wrapper: int
    queue: Queue = field(default_factory=Queue)
    line: weakref.ref[Line] | None = None


class Recorder:
    """Records one process.

    Args:
        directory: Where its file goes.
        steps: Which synced backwards, of the wrapper that was made first.

    Attributes:
        path: The file; None while no wrapper was seen.
    """

    def __init__(self, directory: Path, steps: range) -> None:
        self.directory = directory
        self.path: Path | None = None
        self._steps = steps
        self._pid = os.getpid()
        self._session = f"{next(_sessions)}"
        self._journal: Journal | None = None
        self._listening: list[_Listening] = []
        self._spans = Queue()
        self._taps = Taps(self._spans.tell, self._before_backward, self._after_backward)
        self._on = False
        self._unwritten = 0
        self._written_at = time.monotonic()

    # ---------------------------------------------------------------- on and off

    def open(self) -> None:
        """Listen to all wrappers of this process, also to those made later."""
        self._taps.open()
        observers.on_wrap.append(self._wrapped)
        atexit.register(self.close)
        # Wrappers are not registered anywhere; looking at every object takes a tenth of a second, once.
        for thing in gc.get_objects() if dist.is_initialized() else ():
            if DistributedDataParallel in type(thing).__mro__ and "reducer" in vars(thing):
                self._wrapped(thing)

    def close(self) -> None:
        """Stop, write what is left, and mark the file as complete; a second call does nothing."""
        try:
            self._stop()
            journal, self._journal = self._journal, None
            if journal is not None and os.getpid() == self._pid:
                self._take(journal)
                self._wait_for_tellers(journal)
                journal.close()
        except OSError as error:
            _warn(f"the end of {self.path} is missing: {error}")

    def _wait_for_tellers(self, journal: Journal) -> None:
        """Let the backend's threads finish what they are telling.

        A thread that asks for the interpreter while it shuts down is ended by force, and C++ then aborts the process.
        """
        until = time.monotonic() + TELLERS_S
        while journal.in_flight and time.monotonic() < until:
            time.sleep(0.001)
            self._take(journal)
        if any(each.line is not None for each in self._listening):
            time.sleep(TELLERS_REST_S)

    def _stop(self) -> None:
        global _active  # noqa: PLW0603
        if _active is self:
            _active = None
        self._taps.close()
        self._switch(on=False)
        if self._wrapped in observers.on_wrap:
            observers.on_wrap.remove(self._wrapped)
        atexit.unregister(self.close)

    def _fail(self, error: Exception) -> None:
        """Something went wrong in here: training must not notice."""
        self._journal = None
        self._stop()
        _warn(
            f"recording into {self.directory} failed and is off now; training goes on: {type(error).__name__}: {error}"
        )

    def _switch(self, *, on: bool) -> None:
        self._on = on
        for each in self._listening:
            reducer = each.reducer()
            if reducer is not None:
                reducer.recorder = each.queue.tell if on else None

    # ---------------------------------------------------------------- called by wrappers and taps

    def _wrapped(self, wrapper: DistributedDataParallel) -> None:
        if os.getpid() != self._pid:
            return
        try:
            if any(each.reducer() is wrapper.reducer for each in self._listening):
                return
            if self._journal is None:
                self._begin(wrapper)
            reducer = wrapper.reducer
            self._listening.append(_Listening(weakref.ref(reducer), reducer.wrapper))
            self._listening.sort(key=lambda each: each.wrapper)
            self._switch(on=self._wanted())
        except Exception as error:  # noqa: BLE001 - see the module's text
            self._fail(error)

    def _before_backward(self) -> None:
        if self._on and self._main_step() >= self._steps.stop:
            # The last step has ended where the forward of this backward began.
            self.close()

    def _after_backward(self) -> None:
        journal = self._journal
        if journal is None or os.getpid() != self._pid:
            return
        try:
            if self._on:
                self._take(journal)
                self._unwritten += 1
                now = time.monotonic()
                if self._unwritten >= WRITE_STEPS or now - self._written_at >= WRITE_S:
                    journal.write()
                    self._unwritten, self._written_at = 0, now
                if journal.full:
                    _warn(f"{self.path} has reached its limit of {LIMIT_BYTES} bytes and ends here")
                    self.close()
            else:
                self._spans.drain()
                if self._wanted():
                    self._switch(on=True)
        except Exception as error:  # noqa: BLE001 - see the module's text
            self._fail(error)

    # ---------------------------------------------------------------- the file

    def _main_step(self) -> int:
        living = (each.reducer() for each in self._listening)
        return next((reducer.reductions for reducer in living if reducer is not None), 0)

    def _wanted(self) -> bool:
        return self._main_step() in self._steps

    def _begin(self, wrapper: DistributedDataParallel) -> None:
        group = wrapper.process_group
        rank, world_size = group.rank(), group.size()
        if dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
        alignment = align(group, self._session)
        path = self.directory / file_name(rank)
        header = {
            "rank": rank,
            "world_size": world_size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": str(wrapper.device),
            "versions": {
                "rankstep": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "command": shlex.join(sys.argv),
            "run": alignment.run,
            "offset_ns": alignment.offset_ns,
            "error_ns": alignment.error_ns,
            "steps": [self._steps.start, self._steps.stop],
            # Both clocks at one moment, for those who merge this file with others.
            "perf_counter_ns": time.perf_counter_ns(),
            "time_ns": time.time_ns(),
        }
        self._journal = Journal(path, header, LIMIT_BYTES)
        self.path = path

    def _take(self, journal: Journal) -> None:
        for each in self._listening:
            reducer = each.reducer()
            line = None if reducer is None else reducer.line
            if (
                reducer is not None
                and line is not None
                and (not each.line or each.line() is not line)
            ):
                each.line = weakref.ref(line)
                journal.add(_plan_line(reducer, line))
            journal.take(each.wrapper, each.queue)
        journal.take_spans(self._spans)


def _plan_line(reducer: Reducer, line: Line) -> dict[str, Any]:
    plan = line.plan
    return {
        "wrapper": reducer.wrapper,
        # Found after a backward that used it already.
        "plan_from": max(0, reducer.reductions - 1),
        "params": [spec.name for spec in plan.params],
        "param_bytes": [spec.nbytes for spec in plan.params],
        "buckets": [{"nbytes": b.nbytes, "params": list(b.params)} for b in plan.buckets],
    }
