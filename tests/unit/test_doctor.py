"""The guard's arithmetic: from reports to a verdict, from beats to an alarm, from frames to a line."""

from __future__ import annotations

import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rankstep.doctor import hooks, pulse
from rankstep.doctor import position as doctor_position
from rankstep.doctor.ask import Place, ask, find
from rankstep.doctor.channel import STORE_ERRORS, Mouth
from rankstep.doctor.desk import Desk
from rankstep.doctor.guard import Guard
from rankstep.doctor.position import position_of, users_line
from rankstep.doctor.processes import Identity
from rankstep.doctor.pulse import Beat, Pulse
from rankstep.doctor.report import Report, Standing, name_ranks
from rankstep.doctor.settings import End, Settings
from rankstep.doctor.verdict import Cause, Verdict, ended, judge
from rankstep.errors import CommunicationError, DoctorError, DriftError, SyncError, WorldError


def waits(rank, place="step 3", step=3, waited_s=5.0, **more):
    return Report(
        rank,
        Standing.WAITING,
        step=step,
        line="train.py:60 in main: `loss.backward()`",
        place=place,
        what=f"the reduction of {place}",
        waited_s=waited_s,
        **more,
    )


def other(rank, standing, **more):
    return Report(rank, standing, step=3, line="train.py:41 in load: `read()`", **more)


# ---------------------------------------------------------------- verdicts


def test_ranks_that_stand_together_are_one_line():
    reports = [
        waits(0),
        other(1, Standing.WORKING, phase="data loading", pid=7),
        waits(2),
        waits(3),
    ]
    verdict = judge(reports)
    assert (verdict.cause, verdict.ranks, verdict.hopeless) == (Cause.LATE, (1,), False)
    assert verdict.lines == (
        (
            "cause: rank 1 has not come: step 3, data loading, train.py:41 in load: `read()`, idle: asleep, or waiting for "
            "something else than ranks (process 7)"
        ),
        "effect: ranks 0, 2, 3 have waited 5 s: train.py:60 in main: `loss.backward()`, in the reduction of step 3",
    )


@pytest.mark.parametrize(
    ("standing", "cause", "hopeless"),
    [
        (Standing.FAILED, Cause.FAILED, True),
        (Standing.ENDED, Cause.ENDED, True),
        (Standing.LEFT, Cause.LEFT, True),
        (Standing.UNREACHABLE, Cause.UNREACHABLE, False),
        (Standing.STOPPED, Cause.LATE, False),
        (Standing.HELD, Cause.LATE, False),
        (Standing.UNGUARDED, Cause.LATE, False),
        (Standing.WORKING, Cause.LATE, False),
    ],
)
def test_only_what_can_never_come_is_hopeless(standing, cause, hopeless):
    verdict = judge([waits(0), other(1, standing, detail="so it is")])
    assert (verdict.cause, verdict.ranks, verdict.hopeless) == (cause, (1,), hopeless)


def test_who_is_gone_is_the_cause_and_who_is_late_is_not():
    late, gone = other(1, Standing.WORKING), other(2, Standing.ENDED, detail="gone")
    assert judge([waits(0), late, gone]).ranks == (2,)
    assert judge([waits(0), late, replace(gone, standing=Standing.WORKING)]).ranks == (1, 2)


def test_the_odd_one_out_is_the_cause():
    verdict = judge([waits(0), waits(1, "a barrier"), waits(2)])
    assert (verdict.cause, verdict.ranks, verdict.hopeless) == (Cause.APART, (1,), True)
    # Of two, the one that is behind.
    assert judge([waits(0, "step 3", 3), waits(1, "step 4", 4)]).ranks == (0,)
    assert judge([waits(0, "step 5", 5), waits(1, "step 4", 4)]).ranks == (1,)


def test_ranks_that_pass_by_are_not_judged():
    reports = [waits(0), waits(1, "a barrier", waited_s=0.2)]
    assert judge(reports, steady_s=1.0) is None
    assert judge(reports, steady_s=0.1).cause is Cause.APART


def test_nobody_waits_or_all_wait_together():
    assert judge([other(0, Standing.WORKING), other(1, Standing.YIELDING)]) is None
    verdict = judge([waits(0), waits(1)])
    assert (verdict.cause, verdict.ranks, verdict.hopeless) == (Cause.NETWORK, (), False)


def test_ranks_outside_of_the_group_are_nobodys_cause():
    pair = {"members": (0, 2)}
    reports = [waits(0, **pair), other(1, Standing.ENDED), other(2, Standing.WORKING)]
    assert judge(reports).ranks == (2,)
    assert judge([waits(0), *reports[1:]]).ranks == (1,)


def test_a_transfer_that_all_of_its_ranks_have_joined_is_slow_and_not_hopeless():
    pair = [waits(1, "a broadcast", members=(1, 2)), waits(2, "a broadcast", members=(1, 2))]
    verdict = judge([waits(0, "a barrier"), *pair])
    assert (verdict.cause, verdict.ranks, verdict.hopeless) == (Cause.LATE, (1, 2), False)
    # One of the pair is somewhere else: now nobody can go on.
    verdict = judge([waits(0, "a barrier"), pair[0], waits(2, "a barrier")])
    assert (verdict.cause, verdict.ranks, verdict.hopeless) == (Cause.APART, (1,), True)


def test_verdicts_and_reports_travel():
    verdict = ended([other(1, Standing.FAILED, detail="ValueError: x")], [waits(0)])
    assert Verdict.from_json(verdict.as_json()) == verdict
    assert verdict.lines[0] == "rank 1 failed: ValueError: x"
    report = waits(0, members=(0, 1), calls=("a",), stack=("b", "c"))
    assert Report.from_json(report.as_json()) == report
    for text in ("{}", "[]", "no", json.dumps({"rank": 1, "standing": "flying"})):
        with pytest.raises(ValueError):
            Report.from_json(text)


def test_the_calls_that_led_to_the_odd_one_are_told():
    way = ("train.py:9: `main()`", *(f"train.py:{n} in f{n}: `f()`" for n in range(50, 56)))
    odd = waits(1, place="torch.barrier", stack=way)
    told = judge([waits(0), odd, waits(2)]).lines
    wanted = "train.py:54 in f54, train.py:53 in f53, train.py:52 in f52, train.py:51 in f51"
    assert f"rank 1 was called there from {wanted}" in told
    for single in ((), way[:1]):
        told = judge([waits(0), replace(odd, stack=single), waits(2)]).lines
        assert not any("called there from" in line for line in told)


def test_ranks_are_named_in_runs():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([2, 0]) == "ranks 0, 2"
    assert name_ranks([0, 2, 3, 4, 5, 7, 8]) == "ranks 0, 2-5, 7, 8"


# ---------------------------------------------------------------- alarms


def here():
    return position_of(threading.get_ident())


def beats(alarm_s, beginning, seen):
    """Feed a pulse; ``seen`` holds (seconds, waits, steps, collectives)."""
    found = Pulse(alarm_s)
    place = replace(here(), mark=(), place="p")
    told = []
    for at_s, standing, steps, collectives in seen:
        position = replace(place, standing=standing)
        found.beat(Beat(beginning + at_s, position, steps, 0.0, collectives))
        told.append((found.waited_s, found.alarm_s))
    return told


WAITING, WORKING = Standing.WAITING, Standing.WORKING


def test_a_wait_is_one_as_long_as_nothing_moves():
    seen = [(t, WAITING, 3, "a") for t in range(4)]
    assert [waited for waited, _ in beats(5.0, 10.0, seen)] == [0.0, 1.0, 2.0, 3.0]
    for other_beat in [(4, WAITING, 4, "a"), (4, WAITING, 3, "b"), (4, WORKING, 3, "a")]:
        assert beats(5.0, 10.0, [*seen, other_beat])[-1][0] == 0.0


def test_the_alarm_grows_with_the_usual_step():
    quick = [(t, WORKING, 10 * t, "") for t in range(20)]
    assert beats(5.0, 0.0, quick)[-1][1] == 5.0
    slow = [(t, WORKING, t // 10, "") for t in range(0, 100, 5)]
    assert beats(5.0, 0.0, slow)[-1][1] == 30.0


def test_the_alarm_grows_with_a_wait_that_came_to_a_good_end():
    seen = [(t, WAITING, 3, "a") for t in range(0, 21, 5)]
    assert beats(5.0, 0.0, [*seen, (21, WORKING, 3, "a")])[-1] == (0.0, 42.0)


def test_the_recorder_of_torch_is_asked_for_nccls_collectives(monkeypatch):
    entries = [
        {"profiling_name": "nccl:all_reduce", "state": "completed", "collective_seq_id": 4},
        {"profiling_name": "gloo:barrier", "state": "scheduled", "collective_seq_id": 5},
        {"profiling_name": "nccl:broadcast", "state": "started", "collective_seq_id": 6},
    ]
    for count, wanted in ((2, ""), (3, "nccl:broadcast number 6")):
        text = json.dumps({"entries": entries[:count]})
        monkeypatch.setattr(pulse.c10d, "_dump_fr_trace_json", lambda text=text, **_: text)
        assert pulse.oldest_on_gpu() == wanted


# ---------------------------------------------------------------- places


def test_the_users_line_is_found_under_the_librarys():
    box = {}
    gate, entered = threading.Event(), threading.Event()

    def stand_still():
        entered.set()
        gate.wait()

    thread = threading.Thread(target=stand_still)
    thread.start()
    entered.wait()
    box["seen"] = position_of(thread.ident)
    gate.set()
    thread.join()
    seen = box["seen"]
    assert "test_doctor.py:" in seen.line
    assert seen.line.endswith(("in stand_still: `gate.wait()`", "in stand_still: `entered.set()`"))
    assert (seen.standing, seen.place) == (Standing.WORKING, "")
    assert position_of(thread.ident) is None


def test_a_wait_of_ours_that_looks_around_is_the_same_wait():
    """It asks the store in between, in other lines of the same file, and may be kept there by a network that is gone."""
    lines = (
        "def wait(steps):\n    for step in steps:\n        step()\n    steps[0]()\n    steps[1]()\n"
    )
    for folder, moves in (("collectives", False), ("parallel", True)):
        file = Path(doctor_position.__file__).parents[1] / folder / "lookout.py"
        space = {}
        exec(compile(lines, str(file), "exec"), space)  # noqa: S102 - the file's name is what counts
        seen = []

        def look(seen=seen):
            seen.append(here_below(look))

        space["wait"]([look, look])
        marks = {position.mark for position in seen}
        assert len(seen) == 4
        assert (len(marks) > 1) is moves


def here_below(function):
    """Where this thread is, without the frames from ``function`` inwards, which differ with each look."""
    seen = position_of(threading.get_ident())
    code = id(function.__code__)
    inner = next(i for i, (each, _) in enumerate(seen.mark) if each == code)
    return replace(seen, mark=seen.mark[inner + 1 :])


def test_an_exception_is_told_with_the_users_line():
    with pytest.raises(ValueError) as caught:
        json.loads("no json")
    assert users_line(caught.value).endswith("in test_an_exception_is_told_with_the_users_line")
    assert users_line(ValueError()) == ""


@pytest.mark.parametrize(
    ("error", "alone"),
    [
        (ValueError("x"), True),
        (SystemExit("text"), True),
        (SystemExit(3), False),
        (SyncError("x"), False),
        (KeyboardInterrupt(), False),
        (SystemExit(128 + signal.SIGTERM), False),
    ],
)
def test_what_every_rank_raises_itself_is_not_told_to_all(error, alone):
    assert hooks._all_hear(error) is not alone


def test_what_all_ranks_raise_at_once_follows_nothing():
    assert hooks._may_follow(CommunicationError("x"))
    assert hooks._may_follow(RuntimeError("Connection closed by peer"))
    assert not hooks._may_follow(DriftError("x"))
    assert not hooks._may_follow(ValueError("x"))


@pytest.mark.parametrize(("asked", "told"), [(True, "rank 1 failed: x"), (False, "")])
def test_a_rank_that_was_asked_waits_for_the_judge(asked, told):
    """Its own wait may be broken before its ear has heard the verdict."""
    guard = Guard.__new__(Guard)
    guard.verdict, guard._in_round, guard._gone = None, asked, list
    verdict = ended([other(1, Standing.FAILED, detail="x")])
    judge_speaks = threading.Timer(0.3, setattr, (guard, "verdict", verdict))
    judge_speaks.start()
    assert guard.explain(within_s=0.0) == told
    judge_speaks.join()


class Kept:
    """Something that is closed once."""

    def __init__(self):
        self.closed = 0

    def close(self):
        self.closed += 1


def test_what_a_busy_watch_uses_is_freed_by_the_watch():
    guard = Guard.__new__(Guard)
    guard._pid, guard._closing, guard._unfreed = os.getpid(), threading.Event(), threading.Lock()
    guard._wake_read, guard._wake_write = os.pipe()
    guard._channel = SimpleNamespace(stop=lambda: None)
    guard._desk, guard._neighbours, guard._selector = Kept(), Kept(), Kept()
    parts = (guard._desk, guard._neighbours, guard._selector)
    busy = SimpleNamespace(join=lambda _: None, is_alive=lambda: True)
    guard._threads = [busy]
    guard.close()
    assert guard._closing.is_set()
    assert [part.closed for part in parts] == [0, 0, 0]
    guard._free()
    guard._free()
    assert [part.closed for part in parts] == [1, 1, 1]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(guard._wake_read)


# ---------------------------------------------------------------- processes, stores, settings


def test_a_process_is_known_by_its_end():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(") ")[2].split()
    started = int(fields[19])
    own = Identity.own()
    known = replace(own, pid=child.pid, started=started)
    try:
        assert known.look()[0] is Standing.HELD
        assert replace(known, started=started + 1).look()[0] is Standing.ENDED
        assert replace(known, namespace="elsewhere").look()[0] is Standing.UNREACHABLE
        os.kill(child.pid, signal.SIGSTOP)
        until = time.monotonic() + 5.0
        while known.look()[0] is not Standing.STOPPED:
            assert time.monotonic() < until
        assert known.end_code() is None
    finally:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        standing, detail = known.look()
        code = known.end_code()
        child.wait()
    assert standing is Standing.ENDED
    assert "killed by signal 9 (SIGKILL)" in detail
    assert code == signal.SIGKILL
    assert known.look() == (Standing.ENDED, "its process has ended without a word")


class Stuck:
    """A store that does not answer until it is let."""

    def __init__(self):
        self.gate = threading.Event()

    def add(self, _, amount):
        self.gate.wait()
        return amount

    def get(self, key):
        raise KeyError(key)


def test_a_store_that_does_not_answer_holds_nobody(monkeypatch):
    monkeypatch.setattr("rankstep.doctor.channel._QUICK_S", 0.1)
    store = Stuck()
    mouth = Mouth(store)
    for _ in range(2):
        with pytest.raises(STORE_ERRORS, match="no answer"):
            mouth("add", "key", 1)
    store.gate.set()
    until = time.monotonic() + 5.0
    while mouth._stuck:
        assert time.monotonic() < until
    assert mouth("add", "key", 2) == 2
    with pytest.raises(KeyError):
        mouth("get", "key")
    mouth.close()


def test_settings_come_from_the_environment(monkeypatch):
    assert Settings.from_environment() == Settings(5.0, None, End.RAISE)
    assert Settings().lost_s == 60.0
    monkeypatch.setenv("RANKSTEP_GUARD_ALARM", "2.5")
    monkeypatch.setenv("RANKSTEP_GUARD_LIMIT", "20")
    monkeypatch.setenv("RANKSTEP_GUARD_END", "tell")
    assert Settings.from_environment() == Settings(2.5, 20.0, End.TELL)
    assert Settings.from_environment().lost_s == 20.0


@pytest.mark.parametrize(
    ("name", "value"),
    [*itertools.product(["ALARM", "LIMIT"], ["0", "-1", "soon", "inf", "nan"]), ("END", "explode")],
)
def test_settings_without_a_meaning_are_refused(monkeypatch, name, value):
    monkeypatch.setenv(f"RANKSTEP_GUARD_{name}", value)
    with pytest.raises(WorldError, match=f"RANKSTEP_GUARD_{name}={value}"):
        Settings.from_environment()


def test_a_job_that_is_not_there_is_named():
    with pytest.raises(DoctorError, match="there is no directory nowhere"):
        find("nowhere")
    with pytest.raises(DoctorError, match=f"process {os.getpid()} is no rank"):
        find(str(os.getpid()))


def test_the_desk_says_that_the_store_does_not_answer():
    def where():
        raise TimeoutError("no answer for 3 s")

    selector = selectors.DefaultSelector()
    desk = Desk(selector, where)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, Place(pid=os.getpid()))
        ((key, _),) = selector.select(20)
        key.data()
        with pytest.raises(DoctorError, match=r"store does not answer \(no answer for 3 s\)"):
            asked.result(20)
    desk.close()
    selector.close()
