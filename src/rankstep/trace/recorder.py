"""The recorder: listens to every wrapper of this process and keeps one file of what happened.

While a step runs, an event costs one append to a queue. After each backward the queue becomes numbers, and every
``WRITE_STEPS`` steps or ``WRITE_S`` seconds these are written, so that a killed rank loses no more than that. Outside
the steps that are wanted no event is made at all.

A recorder that fails must not end a training: whatever goes wrong in here switches it off with one warning.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing.util
import os
import platform
import shlex
import socket
import sys
import time
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rankstep._version import __version__
from rankstep.parallel import DistributedDataParallel, observers
from rankstep.trace.clock import align
from rankstep.trace.journal import Journal, Queue
from rankstep.trace.steps import read_steps
from rankstep.trace.taps import Taps
from rankstep.world.cores import usable_cores

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankstep.buckets import Reducer
    from rankstep.buckets.line import Line
    from rankstep.trace.device import DeviceMarks

WRITE_STEPS = 10
WRITE_S = 1.0
LIMIT_BYTES = 256 * 1024 * 1024
"""A rank's file takes no more steps beyond this; some 100,000 steps of a model with 150 parameters."""

TELLERS_S = 5.0
"""Ends of buckets that are later than this come from collectives that hang."""

DIRECTORY = "RANKSTEP_TRACE"
STEPS = "RANKSTEP_TRACE_STEPS"

_active: Recorder | None = None
_sessions = itertools.count()


class RecorderWarning(UserWarning):
    """Recording has ended early or does not begin; training goes on."""


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
    queue: Queue
    tell: Callable[[Any], None]
    line: weakref.ref[Line] | None = None


class Recorder:
    """Records one process.

    Args:
        directory: Where its file goes.
        steps: Which synced backwards, of the wrapper that has made most.

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
        self._at_exit: multiprocessing.util.Finalize[None] | None = None
        self._telling: list[list[weakref.ref[Callable[[], None]]]] = []
        self._marks: DeviceMarks | None = None
        self._on = False
        self._unwritten = 0
        self._written_at = time.monotonic()

    # ---------------------------------------------------------------- on and off

    def open(self) -> None:
        """Listen to all wrappers of this process, also to those made later."""
        self._taps.open()
        observers.on_wrap.append(self._wrapped)
        self._close_at_exit()
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
                self._wait_for_tellers()
                if self._marks is not None:
                    self._marks.finish()
                self._take(journal)
                journal.close()
        except OSError as error:
            _warn(f"the end of {self.path} is missing: {error}")

    def _close_at_exit(self) -> None:
        # Not by atexit: a process that was forked ends without its functions, but with those of multiprocessing.
        self._at_exit = multiprocessing.util.Finalize(None, self.close, exitpriority=0)

    def _wait_for_tellers(self) -> None:
        """Let the backend's threads let go of the calls by which they tell the ends of buckets.

        A thread that wants the interpreter while that shuts down is ended by force, and C++ then aborts the process. A
        call is dropped without running Python, so a thread whose call is gone wants the interpreter no more.
        """
        until = time.monotonic() + TELLERS_S
        while time.monotonic() < until:
            if not any(call() is not None for telling in self._telling for call in telling):
                return
            time.sleep(0.001)

    def _stop(self) -> None:
        global _active  # noqa: PLW0603
        if _active is self:
            _active = None
        self._taps.close()
        self._switch(on=False)
        if self._wrapped in observers.on_wrap:
            observers.on_wrap.remove(self._wrapped)
        if self._at_exit is not None and self._at_exit.still_active():
            self._at_exit.cancel()

    def _fail(self, error: Exception) -> None:
        """Something went wrong in here: training must not notice."""
        self._journal = None
        self._stop()
        _warn(
            f"recording into {self.directory} failed and is off now; training goes on: {type(error).__name__}: {error}"
        )

    def _switch(self, *, on: bool) -> None:
        if self._marks is not None and on and not self._on:
            self._marks.start()
        self._taps.marks = self._marks if on else None
        self._on = on
        for each in self._listening:
            reducer = each.reducer()
            if reducer is not None:
                reducer.recorder = each.tell if on else None

    # ---------------------------------------------------------------- called by wrappers and taps

    def _wrapped(self, wrapper: DistributedDataParallel) -> None:
        if os.getpid() != self._pid and not self._adopt():
            return
        try:
            if any(each.reducer() is wrapper.reducer for each in self._listening):
                return
            if self._journal is None:
                self._begin(wrapper)
            reducer, queue = wrapper.reducer, Queue()
            tell = self._teller(wrapper, queue)
            self._listening.append(_Listening(weakref.ref(reducer), reducer.wrapper, queue, tell))
            self._listening.sort(key=lambda each: each.wrapper)
            self._switch(on=self._wanted())
        except Exception as error:  # noqa: BLE001 - see the module's text
            self._fail(error)

    def _adopt(self) -> bool:
        """In a forked process: go on here if the one it came from has recorded nothing, as launchers in notebooks do."""
        if self._journal is not None or self._listening:
            return False
        self._pid = os.getpid()
        self._taps.adopt()
        self._close_at_exit()
        return True

    def _teller(self, wrapper: DistributedDataParallel, queue: Queue) -> Callable[[Any], None]:
        """What the wrapper's reducer tells its events to."""
        if wrapper.device.type != "cuda":
            return queue.tell
        from rankstep.trace.device import DeviceMarks

        if self._marks is None:
            self._marks = DeviceMarks(wrapper.device, self._without_marks)
        if self._marks.device != wrapper.device:
            return queue.tell
        reducer = wrapper.reducer
        return self._marks.teller(reducer.wrapper, queue, host_waits=reducer.comm.host_waits)

    def _without_marks(self, error: Exception) -> None:
        _warn(
            f"times of {self._marks.device if self._marks else 'the device'} cannot be taken, so those of its host are "
            f"recorded: {type(error).__name__}: {error}"
        )

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
        return max((reducer.reductions for reducer in living if reducer is not None), default=0)

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
            "cores": usable_cores(),
            "threads": torch.get_num_threads(),
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
                self._telling.append(line.telling)
                journal.add(_plan_line(reducer, line))
            journal.take(each.wrapper, each.queue)
        journal.take_spans(self._spans)
        if self._marks is not None:
            self._marks.read()
            journal.take_rows(self._marks.drain())
            journal.lost = journal.lost or self._marks.lost


def _plan_line(reducer: Reducer, line: Line) -> dict[str, Any]:
    plan = line.plan
    module = getattr(reducer.owner(), "module", None)
    # What torch.compile was given, not what it returned.
    module = getattr(module, "_orig_mod", module)
    return {
        "wrapper": reducer.wrapper,
        "module": "" if module is None else type(module).__name__,
        # A user's function, or a bucket that no rank used, makes no rank wait for another.
        "all_reduced": reducer.hook is None and not reducer.skips_unused,
        # Found after a backward that used it already.
        "plan_from": max(0, reducer.reductions - 1),
        "params": [spec.name for spec in plan.params],
        "param_bytes": [spec.nbytes for spec in plan.params],
        "buckets": [{"nbytes": b.nbytes, "params": list(b.params)} for b in plan.buckets],
    }
