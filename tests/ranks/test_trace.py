"""Recording on real ranks: what two ranks tell fits together, agrees with torch's profiler, and survives their end."""

from __future__ import annotations

import json
import os
import signal
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
from rankstep.trace import clock, overlap, record
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


def train(rank, folder, width=256, steps=6, late_rank=None, profiled=None):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    model = rankstep.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = DataLoader(SlowOn(rank.rank, late_rank, steps, width), batch_size=1)
    with record(folder):
        if profiled is None:
            loop(model, optimizer, data)
        else:
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                loop(model, optimizer, data)
            profiler.export_chrome_trace(str(Path(profiled) / f"profile-{rank.rank}.json"))
    return model.reducer.recorder is None


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


def near(ours, theirs):
    """Within 5 %, or the third of a millisecond that a busy machine puts between two looks at a clock."""
    return abs(ours - theirs) <= max(0.05 * theirs, 300_000)


def test_it_agrees_with_torchs_profiler(ranks, tmp_path):
    """Forward, optimizer step and each all-reduce, measured by both in the same run."""
    ranks(2).run(train, tmp_path, width=768, profiled=tmp_path)
    for rank in load(tmp_path).ranks:
        path = tmp_path / f"profile-{rank.rank}.json"
        pairs = []
        for kind, name in (
            (SpanKind.FORWARD, "DistributedDataParallel.forward"),
            (SpanKind.OPTIMIZER, "Optimizer.step#"),
        ):
            theirs = spans_of_profile(path, name)
            ours = [s for step in rank.steps for s in step.spans if s.kind is kind]
            assert len(theirs) == len(ours) == 6
            pairs += zip(ours, theirs, strict=True)
        agree = [near(s.end_ns - s.begin_ns, end - begin) for s, (begin, end) in pairs]
        # One of them may be interrupted between the two looks.
        assert agree.count(False) <= 1, pairs
        # The same clock, too: Unix time, as the profiler has it.
        apart = sorted(abs(s.begin_ns + rank.unix_ns - begin) for s, (begin, _) in pairs)
        assert apart[len(apart) // 2] < 1e6


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
        (["--trace", "t", "--trace-steps", "2:1"], "the steps to record are '2:1'"),
    ],
)
def test_wrong_flags_are_told_before_a_rank_starts(run, words, part):
    code, errors = run(*LAUNCH, *words, "1")
    assert code == 2
    assert part in errors
