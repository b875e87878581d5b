"""Each benchmark runs to its end on a toy size and writes what it says; counts are checked, times never."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SPREAD = {"min", "q25", "median", "q75"}


@pytest.fixture
def run(tmp_path):
    def run_script(script, *arguments):
        file = tmp_path / "result.json"
        done = subprocess.run(
            [sys.executable, BENCHMARKS / script, *arguments, "--json", file],
            capture_output=True,
            text=True,
            check=False,
            timeout=110,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        result = json.loads(file.read_text(encoding="utf-8"))
        assert {"cpu", "cores", "python", "torch", "rankstep", "date"} <= result["machine"].keys()
        assert result["machine"]["command"].startswith(f"python benchmarks/{script} --")
        return result, done.stdout

    return run_script


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    # Another folder of scripts may have a module of that name.
    monkeypatch.delitem(sys.modules, "common", raising=False)
    import common

    yield common
    del sys.modules["common"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_hook_overhead(run, ranks):
    result, told = run(
        "hook_overhead.py",
        *("--ranks", str(ranks), "--parameters", "20", "--rounds", "2", "--repeats", "1"),
        "--allow-busy",
    )
    assert result["benchmark"] == "hook_overhead"
    assert (result["ranks"], result["parameters"]) == (ranks, 20)
    assert result["modes"].keys() == {"set_to_none=True", "set_to_none=False"}
    for mode in result["modes"].values():
        assert mode["rounds"]["run"] == len(mode["rounds"]["foreign_cores"]) == 2
        assert {"rankstep", "torch default", "torch all three"} <= mode["variants"].keys()
        for figures in mode["variants"].values():
            assert figures["wall_us_per_parameter"].keys() == SPREAD
            assert figures["cpu_us_per_parameter"].keys() == SPREAD
    (bar,) = result["bars"]
    assert bar["limit"] == (2.0 if ranks == 1 else 0.5)
    assert "us per parameter over plain" in told


def test_memory(run):
    result, told = run(
        "memory.py",
        *("--layers", "4", "--side", "1024", "--variants", "plain", "rankstep", "torch default"),
    )
    assert result["gradient_bytes"] == 4 * 4 * 1024 * 1025
    plain, own, torchs = (result["variants"][v] for v in ("plain", "rankstep", "torch default"))
    assert plain["through_grad"] == pytest.approx(1.0)
    assert 1.0 <= own["through_grad"] < 1.01
    # Bytes in use are counted, not timed, but a few of them are torch's own.
    assert plain["in_use"] == pytest.approx(1.0, abs=0.04)
    assert own["in_use"] < 1.05
    assert torchs["in_use"] == pytest.approx(2.0, abs=0.05)
    assert plain["in_use_cleared"] < 0.05
    assert all(v["in_use_peak"] >= 1.0 for v in result["variants"].values())
    (bar,) = result["bars"]
    assert bar["held"] is True
    assert "in use after step" in told


def test_step(run):
    result, told = run(
        "step.py",
        *("--model", "cnn", "--rounds", "2", "--repeats", "1", "--variants", "rankstep"),
        "--allow-busy",
    )
    cnn = result["models"]["cnn"]
    assert list(cnn["variants"]) == ["local", "rankstep", "torch default", "all-reduce alone"]
    for figures in cnn["variants"].values():
        assert figures["wall_ms"].keys() == figures["cpu_ms_per_rank"].keys() == SPREAD
    assert cnn["variants"]["torch default"]["ratio_to_torch_default"]["median"] == 1.0
    assert [bar["limit"] for bar in result["bars"]] == [0.9]
    assert "9.5 MB in 29 tensors, 2 ranks" in told


@pytest.mark.parametrize("script", ["hook_overhead.py", "memory.py", "step.py"])
def test_help_shows_an_example(script):
    done = subprocess.run(
        [sys.executable, BENCHMARKS / script, "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert f"example:\n  python benchmarks/{script} " in done.stdout


def test_a_busy_machine_is_refused(common, monkeypatch, capsys):
    monkeypatch.setattr(common, "WATCH_S", 0.0)
    monkeypatch.setattr(common, "foreign_cores", lambda begins, ends: 0.5)
    with pytest.raises(SystemExit, match=r"other programs use 0\.50 cores"):
        common.require_quiet(1, allow_busy=False)
    common.require_quiet(1, allow_busy=True)
    assert "DO NOT QUOTE" in capsys.readouterr().err


def of_rank(number, *, foreign):
    """Make two rounds of 1 s as one of two ranks tells them, each rank busy for 0.5 s of each."""
    return [
        {
            "begin": {"clock": 10.0 * r, "own": 5.0 * r, "busy": 100.0 * r},
            "end": {"clock": 10.0 * r + 1, "own": 5.0 * r + 0.5, "busy": 100.0 * r + 1 + busy},
            "times": {"v": {"wall": [1.0 + r, 3.0 + number], "cpu": [0.5, 0.5]}},
        }
        for r, busy in enumerate(foreign)
    ]


def test_disturbed_rounds_are_left_out(common):
    rounds = common.Rounds.of([of_rank(0, foreign=[0, 1]), of_rank(1, foreign=[0, 1])], max)
    assert rounds.foreign == pytest.approx([0.0, 1.0])
    assert (rounds.disturbed, rounds.dropped, rounds.quiet) == (1, 1, True)
    # The mean over ranks of each repetition, then the longest.
    assert rounds.wall == {"v": [3.5]}


def test_too_few_quiet_rounds_are_told(common, capsys):
    rounds = common.Rounds.of([of_rank(0, foreign=[1, 1]), of_rank(1, foreign=[1, 1])], min)
    assert (rounds.disturbed, rounds.dropped, rounds.quiet) == (2, 0, False)
    assert rounds.wall == {"v": [1.0, 2.0]}
    common.tell_rounds(rounds)
    assert "DO NOT QUOTE" in capsys.readouterr().err


def test_ratios_are_taken_within_rounds(common):
    ratio = common.paired([1.0, 4.0, 9.0], [1.0, 2.0, 3.0])
    assert (ratio.min, ratio.q25, ratio.median, ratio.q75) == (1.0, 1.5, 2.0, 2.5)
    assert common.paired([1.0], [-1.0]) is None
    assert common.cell(None) == "-"
    assert common.Bar("what", 0.5, None).held is None
    assert "MISSED" in str(common.Bar("what", 0.5, 0.51))
