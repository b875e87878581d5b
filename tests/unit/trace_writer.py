"""Writes files of ranks as the recorder does, with times in whole milliseconds."""

from __future__ import annotations

import os

from trace_samples import MS

from rankstep.trace import events as ev
from rankstep.trace.journal import Journal, Queue
from rankstep.trace.recorder import file_name

BIG = 1 << 30


def header(rank=0, world_size=1, **other):
    return {
        "rank": rank,
        "world_size": world_size,
        "host": "here",
        "pid": 1,
        "device": "cpu",
        "versions": {"rankstep": "1", "torch": "2", "python": "3"},
        "command": "train.py",
        "run": "a",
        "offset_ns": 0,
        "error_ns": 0,
        "perf_counter_ns": 5,
        "time_ns": 1005,
    } | other


def plan(wrapper=0, plan_from=0, names=("a", "b"), buckets=((1,), (0,)), **other):
    return {
        "wrapper": wrapper,
        "plan_from": plan_from,
        "params": list(names),
        "param_bytes": [4] * len(names),
        "buckets": [{"nbytes": 4 * len(each), "params": list(each)} for each in buckets],
    } | other


class Run:
    """Writes the file of one rank, in milliseconds."""

    def __init__(self, folder, **other):
        self.journal = Journal(folder / file_name(other.get("rank", 0)), header(**other), BIG)
        self.queues = {}
        self.spans = Queue()

    def tell(self, event, wrapper=0):
        self.queues.setdefault(wrapper, Queue()).tell(event)

    def span(self, kind, begin, end):
        self.spans.tell((kind, begin * MS, end * MS))

    def forward(self, step, begin, end, wrapper=0):
        self.tell(ev.ForwardBegan(step, begin * MS), wrapper)
        self.tell(ev.ForwardEnded(step, end * MS), wrapper)

    def backward(self, step, begin, end, wrapper=0, *, call=True):
        """Two buckets: ready at the first and second third, waited for in the last one."""
        third = (end - begin) / 3
        first, second = (round((begin + third * n) * MS) for n in (1, 2))
        tells = [
            ev.BackwardBegan(step, first),
            ev.GradReady(step, 1, first),
            ev.BucketFilled(step, 0, first),
            ev.BucketLaunched(step, 0, True, first),
            ev.GradReady(step, 0, second),
            ev.BucketFilled(step, 1, second),
            ev.BucketLaunched(step, 1, False, second),
            ev.BucketFinished(step, 0, second),
            ev.BucketWaited(step, 0, second, second),
            ev.BucketWaited(step, 1, second, end * MS),
            ev.StepSettled(step, end * MS),
        ]
        for event in tells:
            self.tell(event, wrapper)
        if call:
            self.span("backward", begin, end)

    def step(self, number, at):
        """20 ms: data 2, forward 3, backward 4, waiting 2, optimizer 2."""
        self.span("data", at, at + 2)
        self.forward(number, at + 3, at + 6)
        self.backward(number, at + 7, at + 13)
        self.span("optimizer", at + 14, at + 16)

    def take(self):
        for wrapper, queue in self.queues.items():
            self.journal.take(wrapper, queue)
        self.journal.take_spans(self.spans)

    def write(self):
        """Put what was told into lines of their own."""
        self.take()
        self.journal.write()

    def close(self, *, end=True):
        self.take()
        if end:
            self.journal.close()
        else:
            self.journal.write()
            os.close(self.journal._file)
