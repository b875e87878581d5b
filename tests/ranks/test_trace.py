"""Recording on real ranks: what two ranks tell fits together, agrees with torch's profiler, and survives their end."""

from __future__ import annotations

import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

import rankstep
from rankstep.trace import chrome, clock, overlap, record
from rankstep.trace.files import load
from rankstep.trace.model import SpanKind
from rankstep.trace.summary import summarize

RANKSTEP = Path(sys.executable).parent / "rankstep"
LATE_S = 0.02


class SlowOn(TensorDataset):
    """Samples that take their time on one rank."""

    def __init__(self, rank, late_rank, count, width):
        super().__init__(torch.randn(count, width))
        self.wait_s = LATE_S if rank == late_rank else 0.0

    def __getitem__(self, index):
        time.sleep(self.wait_s)
        return super().__getitem__(index)


def train(rank, folder, width=256, steps=6, late_rank=None):
    model, optimizer, data = parts(rank, width, steps, late_rank)
    with record(folder):
        loop(model, optimizer, data)
    return model.reducer.recorder is None


def parts(rank, width, steps, late_rank=None, group=None):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    model = rankstep.DistributedDataParallel(
        torch.nn.Sequential(*layers), bucket_cap_mb=0.2, process_group=group
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = DataLoader(SlowOn(rank.rank, late_rank, steps, width), batch_size=1)
    return model, optimizer, data


def train_profiled(rank, folder):
    """Over gloo's sockets, whose work the profiler sees; a group finds out at its first use how its ranks communicate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANKSTEP_SHARED_MEMORY", "0")
        group = dist.new_group()
        model, optimizer, data = parts(rank, 768, 6, group=group)
        with record(folder), profile(activities=[ProfilerActivity.CPU]) as profiler:
            loop(model, optimizer, data)
        profiler.export_chrome_trace(str(Path(folder) / f"profile-{rank.rank}.json"))
        del model
        gc.collect()
        dist.destroy_process_group(group)


def loop(model, optimizer, data):
    for (batch,) in data:
        optimizer.zero_grad()
        model(batch.expand(64, -1)).square().mean().backward()
        optimizer.step()


def test_two_ranks_tell_one_story(ranks, tmp_path):
    assert all(ranks(2).run(train, tmp_path))
    trace = load(tmp_path)
    assert [r.rank for r in trace.ranks] == [0, 1]
    assert all(r.complete and r.clock_error_ns == 0 for r in trace.ranks)
    assert trace.ranks[0].buckets == trace.ranks[1].buckets
    assert len(trace.ranks[0].buckets) > 2
    for steps in zip(*(r.steps for r in trace.ranks), strict=True):
        assert len({step.number for step in steps}) == 1
        started = overlap.starts(steps)
        for step in steps:
            assert overlap.parts(step, started).step_ns == step.end_ns - step.begin_ns
            assert [b.index for b in step.buckets] == list(range(len(started)))
            for bucket in step.buckets:
                assert bucket.finished_ns is not None
                times = (bucket.filled_ns, bucket.launched_ns, bucket.finished_ns)
                assert sorted(times) == list(times)
                assert max(bucket.finished_ns, bucket.wait_begin_ns) <= bucket.wait_end_ns
    assert all(b.in_backward for b in trace.ranks[0].steps[-1].buckets[:-1])


def test_a_late_rank_is_named_with_its_phase(ranks, tmp_path):
    ranks(2).run(train, tmp_path, late_rank=1)
    first, second = summarize(load(tmp_path)).ranks
    assert second.last == 1.0
    assert second.phase is SpanKind.DATA
    # It sleeps for so long; how much more its step takes is the machine's affair.
    assert second.parts.data_ns >= LATE_S * 1e9
    assert first.parts.waiting_ns > 0.5 * LATE_S * 1e9


def spans_of_profile(path, *names):
    events = json.loads(path.read_text("utf-8"))
    base_ns = events["baseTimeNanoseconds"]
    return sorted(
        (base_ns + e["ts"] * 1000, base_ns + (e["ts"] + e["dur"]) * 1000)
        for e in events["traceEvents"]
        if e.get("ph") == "X" and any(name in e["name"] for name in names)
    )


def slices_nest(events):
    """Slices of one thread lie inside each other or apart."""
    threads = {}
    for event in events:
        if event["ph"] == "X":
            begin = round(event["ts"] * 1000)
            end = begin + round(event.get("dur", 0) * 1000)
            threads.setdefault((event["pid"], event["tid"]), []).append((begin, -end))
    for slices in threads.values():
        until = []
        for begin, minus_end in sorted(slices):
            while until and until[-1] <= begin:
                until.pop()
            if until and -minus_end > until[-1]:
                return False
            until.append(-minus_end)
    return True


@pytest.fixture(scope="module")
def profiled(ranks, tmp_path_factory):
    """One run, recorded by us and by torch's profiler at the same time; over gloo, whose work the profiler sees."""
    folder = tmp_path_factory.mktemp("profiled")
    ranks(2).run(train_profiled, folder)
    return folder


def measured_by_both(folder, rank, label, ours):
    """Pairs of (begin, end), ours and the profiler's, in Unix time; the same clock for both."""
    theirs = spans_of_profile(folder / f"profile-{rank.rank}.json", label)
    assert len(theirs) == len(ours)
    shifted = [(begin + rank.unix_ns, end + rank.unix_ns) for begin, end in ours]
    return list(zip(shifted, theirs, strict=True))


@pytest.mark.parametrize(
    ("kind", "label", "around_ns"),
    [
        (SpanKind.FORWARD, "DistributedDataParallel.forward", 0),
        # Its label also covers torch's own bookkeeping before and after the hooks that tell us.
        (SpanKind.OPTIMIZER, "Optimizer.step#", 200_000),
    ],
)
def test_spans_agree_with_torchs_profiler(profiled, kind, label, around_ns):
    """The same work measured by both in one run: within 5 %, whatever else the machine does."""
    for rank in load(profiled).ranks:
        ours = [
            (span.begin_ns, span.end_ns)
            for step in rank.steps
            for span in step.spans
            if span.kind is kind
        ]
        assert len(ours) == 6
        pairs = measured_by_both(profiled, rank, label, ours)
        lengths = [(end - begin, their_end - their) for (begin, end), (their, their_end) in pairs]
        # A rank may be interrupted between two looks at a clock, but not each time.
        apart = statistics.median(abs(own - other) / other for own, other in lengths)
        rest = statistics.median(abs(own - other) for own, other in lengths)
        assert apart <= 0.05 or rest <= around_ns
        assert statistics.median(abs(own[0] - their[0]) for own, their in pairs) < 1e6


def test_launches_of_buckets_agree_with_torchs_profiler(profiled):
    """The profiler shows an all-reduce from when a thread of gloo takes it up: later than its launch."""
    clocks_ns = 1_000_000
    for rank in load(profiled).ranks:
        buckets = [bucket for step in rank.steps for bucket in step.buckets]
        assert len(buckets) == 24
        theirs = spans_of_profile(profiled / f"profile-{rank.rank}.json", "gloo:all_reduce")
        assert len(theirs) == 24
        launches = sorted(bucket.launched_ns + rank.unix_ns for bucket in buckets)
        # Whatever else the machine does, nothing is taken up before it is launched.
        assert all(o <= t + clocks_ns for o, (t, _) in zip(launches, theirs, strict=True))
        # Our ends come from a callback that may run before or after the profiler's own, so they only follow the launch.
        assert all(bucket.launched_ns <= bucket.finished_ns for bucket in buckets)


def test_a_profile_is_merged_so_that_viewers_can_show_it(profiled):
    """Whether the profiler's own slices nest depends on when a collective ends; merged ones always do."""
    paths = [profiled / f"profile-{number}.json" for number in range(2)]
    trace = load(profiled)
    events = json.loads(chrome.export(trace, None, paths))["traceEvents"]
    assert slices_nest(events)
    timed = [event for event in events if event["ph"] != "M"]
    assert min(event["ts"] for event in timed) == 0
    assert {event["ph"] for event in timed} <= {"X", "i", "s", "f", "t"}
    starts = [event["id"] for event in timed if event["ph"] == "s"]
    assert len(set(starts)) == len(starts)
    for rank in trace.ranks:
        ours = sorted(
            event["ts"]
            for event in timed
            if event["ph"] == "X" and event["name"] == "forward" and event["pid"] == rank.rank
        )
        theirs = sorted(
            event["ts"]
            for event in timed
            if event["name"] == "DistributedDataParallel.forward"
            and event["pid"] // 1_000_000 == rank.rank + 1
        )
        # The labels lie around what is recorded inside of them.
        apart_us = [own - their for own, their in zip(ours, theirs, strict=True)]
        assert 0 <= statistics.median(apart_us) < 1000


# ---------------------------------------------------------------- clocks


def aligned(rank, apart_ns, answers=True):
    """Every rank believes to be on a host of its own, whose clock is wrong by so much."""
    own = clock.identity
    clock.identity = lambda: f"host of rank {rank.rank}"
    try:
        found = clock.align(
            dist.distributed_c10d._get_default_group(),
            f"test {apart_ns} {answers}",
            lambda: time.perf_counter_ns() + apart_ns * rank.rank,
        )
    finally:
        clock.identity = own
    return found.offset_ns, found.error_ns, found.run


@pytest.mark.parametrize("apart_ns", [5_000_000_000, -7])
def test_clocks_of_different_hosts_are_compared_with_a_known_error(ranks, apart_ns):
    told = ranks(3).run(aligned, apart_ns)
    assert len({run for _, _, run in told}) == 1
    for rank, (offset, error, _) in enumerate(told):
        assert abs(offset - apart_ns * rank) <= error
        assert error < 1e9
    assert told[0][:2] == (0, 0)


def records_alone(rank):
    clock._LIMIT = clock.timedelta(seconds=0.5)
    try:
        if rank.rank:
            return None
        return clock.align(dist.distributed_c10d._get_default_group(), "alone")
    finally:
        clock._LIMIT = clock.timedelta(seconds=clock.PATIENCE_S)


def test_a_rank_that_records_alone_does_not_hang(ranks):
    first, _ = ranks(2).run(records_alone)
    assert first == clock.Alignment(0, None, "")


# ---------------------------------------------------------------- the whole way

SCRIPT = """
import sys, torch, rankstep
with rankstep.world() as world:
    model = rankstep.DistributedDataParallel(torch.nn.Linear(64, 64))
    for step in range(int(sys.argv[1])):
        model.zero_grad()
        model(torch.ones(8, 64)).sum().backward()
    if "--fail" in sys.argv and world.rank == 1:
        raise ValueError("cannot go on")
    if "--kill" in sys.argv:
        import os, signal, time
        time.sleep(1.2)
        model(torch.ones(8, 64)).sum().backward()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)

    def run_ranks(*words, **env):
        command = [*words[:-1], str(tmp_path / "train.py"), *words[-1].split()]
        done = subprocess.run(
            command,
            env=os.environ | env,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        return done.returncode, done.stderr

    return run_ranks


LAUNCH = (RANKSTEP, "run", "--nproc-per-node", "2")


def test_run_records_and_tells_at_the_end(run, tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "rank-00007.jsonl").write_text("of an earlier run")
    code, errors = run(*LAUNCH, "--trace", str(folder), "--trace-steps", "2:5", "7")
    assert code == 0, errors
    assert "Steps 2 to 4 on 2 ranks: step " in errors.replace("\n", " ")
    assert errors.splitlines()[-1].startswith("rankstep: tables and a timeline: rankstep trace ")
    trace = load(folder)
    assert [[s.number for s in r.steps] for r in trace.ranks] == [[2, 3, 4], [2, 3, 4]]
    assert trace.command.endswith("train.py 7")


def test_the_cause_of_a_failure_stays_last(run, tmp_path):
    folder = tmp_path / "traces"
    code, errors = run(*LAUNCH, "--trace", str(folder), "3 --fail")
    assert code == 1
    assert errors.splitlines()[-1].startswith("rankstep: rank 1 failed first")
    assert len(load(folder).ranks[1].steps) == 3


def test_killed_ranks_leave_what_they_had_written(run, tmp_path):
    folder = tmp_path / "traces"
    code, errors = run(*LAUNCH, "--trace", str(folder), "3 --kill")
    assert code == 128 + signal.SIGKILL, errors
    for rank in load(folder).ranks:
        assert not rank.complete
        assert [s.number for s in rank.steps][:3] == [0, 1, 2]


def test_torchrun_records_through_the_environment(run, tmp_path):
    folder = tmp_path / "traces"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    code, errors = run(*torchrun, "3", RANKSTEP_TRACE=str(folder))
    assert code == 0, errors
    assert [len(r.steps) for r in load(folder).ranks] == [3, 3]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--trace-steps", "1:2"], "--trace-steps needs --trace DIR"),
        (["--trace", "t", "--trace-steps", "2:1"], "the steps are '2:1'"),
    ],
)
def test_wrong_flags_are_told_before_a_rank_starts(run, words, part):
    code, errors = run(*LAUNCH, *words, "1")
    assert code == 2
    assert part in errors
