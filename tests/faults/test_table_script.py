"""`benchmarks/faults.py`: every row is there, and its judgement can go both ways."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def faults():
    before = set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("faults")
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in {"faults", "faults_jobs", "faults_training", "common", "result"} - before:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def jobs(faults):
    return importlib.import_module("faults_jobs")


def test_every_row_of_the_table_is_there(faults, jobs):
    assert sorted({row.row for row in faults.TABLE}) == list(range(1, 23))
    names = [row.fault for row in faults.TABLE]
    assert len(set(names)) == len(names)
    assert set(jobs.SPECIAL) <= set(names)
    training = jobs.TRAINING.read_text()
    assert [
        name for name in names if f'"{name}"' not in training and f"_{name}(" not in training
    ] == ["port"]


@pytest.mark.parametrize(
    ("line", "text", "ranks"),
    [
        ("rankstep: cause", "rankstep: cause", {0}),
        ("[rank 2] rankstep: cause", "rankstep: cause", {2}),
        ("[ranks 1-3, 5 x4] no", "no", {1, 2, 3, 5}),
        ("[rank1]: ValueError: no", "ValueError: no", {1}),
        ("[ranking] no", "[ranking] no", {0}),
    ],
)
def test_lines_are_their_ranks(jobs, line, text, ranks):
    assert jobs.spoken(line) == (text, ranks)


def judged(jobs, row, screen, code=1):
    """What is made of these lines, said so many seconds after the fault."""
    job = jobs.Job.__new__(jobs.Job)
    job.row, job.screen = row, [(100.0 + at_s, line) for at_s, line in screen]
    outcome = jobs.Outcome(code=code)
    job._read_screen(outcome, 100.0, nobody=False)
    return outcome


def row_of(faults, name):
    return next(row for row in faults.TABLE if row.fault == name)


SAID = "rankstep: cause: rank 1 did not come: its work is done"


def test_all_surviving_ranks_must_say_it_in_time(faults, jobs):
    row = row_of(faults, "more")
    both = [(4.0, SAID), (5.0, f"[rank 2] {SAID}")]
    met = judged(jobs, row, both)
    assert (met.told_s, met.silent) == (5.0, [])
    assert met.meets(row)
    one = judged(jobs, row, both[:1])
    assert (one.told_s, one.silent) == (None, [2])
    assert not one.meets(row)
    assert not judged(jobs, row, [both[0], (10.5, both[1][1])]).meets(row)
    # What the launcher repeats at the end is no rank's word.
    repeated = f"rankstep: rank 0 failed first (pid 1 on vm): {SAID}"
    assert judged(jobs, row, [(4.0, repeated), both[1]]).silent == [0]
    behind = [both[1], (5.0, "rankstep: traceback of rank 2:"), (5.0, SAID)]
    assert judged(jobs, row, behind).silent == [0]


def test_the_exit_code_and_what_is_left_count(faults, jobs):
    row = row_of(faults, "more")
    met = judged(jobs, row, [(1.0, f"[ranks 0, 2 x2] {SAID}")])
    assert met.meets(row)
    for worse in ({"code": 0}, {"code": None}, {"left": ["file x"]}, {"wrong": ["x"]}):
        assert not replace(met, **worse).meets(row)


def test_an_alarm_where_nothing_is_wrong_counts(faults, jobs):
    row = row_of(faults, "disk")
    note = "waiting in rank_zero_first() for 30 s"
    notes = [(30.0, f"[rank {rank}] rank {rank}: {note}") for rank in (1, 2)]
    assert judged(jobs, row, notes, code=0).meets(row)
    alarm = (40.0, "rankstep: cause: rank 0 has not come")
    assert not judged(jobs, row, [*notes, alarm], code=0).meets(row)


def test_the_result_is_the_runs(faults, jobs):
    row = row_of(faults, "more")
    met = judged(jobs, row, [(1.0, f"[ranks 0, 2 x2] {SAID}")])
    late = replace(met, told_s=None, code=0)
    told = faults.figures(row, [met, met])
    assert (told["row"], told["meets"], told["told_s"].median, told["exit_code"]) == (9, 2, 1.0, 1)
    told = faults.figures(row, [met, late])
    assert (told["meets"], told["told_s"], told["exit_code"]) == (1, None, 0)
    assert faults.described("rankstep", row, met).startswith("rankstep: meets the bar")
    assert faults.described("rankstep", row, late).startswith("rankstep: MISSES the bar")
