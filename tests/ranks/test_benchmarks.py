"""Each benchmark runs to its end on a toy size and writes what it says; counts are checked, times never."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BASH, IP = shutil.which("bash"), shutil.which("ip")
SPREAD = {"min", "q25", "median", "q75"}


@pytest.fixture
def run(tmp_path, common):
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
        # The reader of the pictures can read it, and nothing is lost on the way there and back.
        again = tmp_path / "again.json"
        common.Result.read(file).write(again)
        assert again.read_text(encoding="utf-8") == file.read_text(encoding="utf-8")
        assert result["benchmark"] == script.removesuffix(".py")
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
    assert (result["settings"]["ranks"], result["settings"]["parameters"]) == (ranks, 20)
    assert result["tables"].keys() == {"set_to_none=True", "set_to_none=False"}
    for mode in result["tables"].values():
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
    memory = result["tables"]["memory"]
    assert memory["facts"]["gradient_bytes"] == 4 * 4 * 1024 * 1025
    assert memory["rounds"] is None
    plain, own, torchs = (memory["variants"][v] for v in ("plain", "rankstep", "torch default"))
    assert plain["through_grad"] == pytest.approx(1.0)
    assert 1.0 <= own["through_grad"] < 1.01
    # Bytes in use are counted, not timed, but a few of them are torch's own.
    assert plain["in_use"] == pytest.approx(1.0, abs=0.04)
    assert own["in_use"] < 1.05
    assert torchs["in_use"] == pytest.approx(2.0, abs=0.05)
    assert plain["in_use_cleared"] < 0.05
    assert all(v["in_use_peak"] >= 1.0 for v in memory["variants"].values())
    (bar,) = result["bars"]
    assert bar["held"] is True
    assert "in use after step" in told


def test_step(run):
    result, told = run(
        "step.py",
        *("--model", "cnn", "--rounds", "2", "--repeats", "1", "--variants", "rankstep"),
        "--allow-busy",
    )
    cnn = result["tables"]["cnn"]
    assert cnn["facts"]["gradient_bytes"] == 9_466_152
    assert list(cnn["variants"]) == ["local", "rankstep", "torch default", "all-reduce alone"]
    for figures in cnn["variants"].values():
        assert figures["wall_ms"].keys() == figures["cpu_ms_per_rank"].keys() == SPREAD
    assert cnn["variants"]["torch default"]["ratio_to_torch_default"]["median"] == 1.0
    (bar,) = result["bars"]
    assert bar["limit"] == 0.9
    table, variant, figure = bar["place"]
    assert bar["value"] == result["tables"][table]["variants"][variant][figure]["median"]
    assert "9.5 MB in 29 tensors, 2 ranks" in told


def test_allreduce(run):
    result, told = run(
        "allreduce.py", *("--kib", "4", "64", "--rounds", "2", "--repeats", "1"), "--allow-busy"
    )
    assert list(result["tables"]) == ["4 KiB", "64 KiB"]
    assert (result["settings"]["hosts"], result["settings"]["collective"]) == (1, "all_reduce")
    for size in result["tables"].values():
        assert list(size["variants"]) == ["gloo", "rankstep"]
        assert size["variants"]["rankstep"]["ratio_to_gloo"].keys() == SPREAD
        assert size["variants"]["gloo"]["ratio_to_gloo"]["median"] == 1.0
    assert result["tables"]["4 KiB"]["facts"]["numel"] == 1024
    assert [bar["limit"] for bar in result["bars"]] == [1.0]
    assert "all_reduce of float32, 2 ranks; Rankstep goes through " in told


def test_tracing(run):
    result, told = run(
        "tracing.py", *("--model", "cnn", "--rounds", "2", "--repeats", "2"), "--allow-busy"
    )
    cnn = result["tables"]["cnn"]
    assert list(cnn["variants"]) == ["recorder off", "recorder on"]
    assert cnn["variants"]["recorder on"]["ratio_to_off"].keys() == SPREAD
    assert cnn["facts"]["tensors"] == 29
    assert cnn["facts"]["bytes_per_step"] > 0
    assert [bar["place"] for bar in result["bars"]] == [["cnn", "recorder on", "ratio_to_off"]]
    assert "29 tensors, 2 ranks" in told


def test_guard(run):
    result, told = run(
        "guard.py", *("--model", "cnn", "--rounds", "1", "--repeats", "2"), "--allow-busy"
    )
    off, on = (result["tables"]["cnn"]["variants"][v] for v in ("guard off", "guard on"))
    assert off["wall_ms"].keys() == on["ratio_to_off"].keys() == SPREAD
    assert (off["collectives"], off["store_calls"]) == (on["collectives"], 0)
    assert [bar["limit"] for bar in result["bars"]] == [1.005, 0]
    assert "collectives in 2 steps" in told


def test_gpu_script_without_one(run):
    result, told = run(
        "gpu.py",
        *("--device", "cpu", "--tiny", "--rounds", "1", "--repeats", "1"),
        *("--variants", "rankstep", "--allow-busy"),
    )
    assert result["tables"].keys() == {"resnet50", "gpt2"}
    assert result["machine"]["gpus"] == "none"
    for model in result["tables"].values():
        assert list(model["variants"]) == ["local", "rankstep", "torch default"]
        assert model["variants"]["rankstep"]["peak_bytes"] is None
        assert model["variants"]["torch default"]["ratio_to_torch_default"]["median"] == 1.0
        profile = model["facts"]["profile"]
        assert profile.keys() == {"rankstep", "torch default"}
        assert all("Self CPU time total" in table for table in profile.values())
    # What was not run on a GPU holds no bar.
    assert result["bars"] == []
    assert "peak MB" in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_script_refuses_politely():
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("no GPU that torch can use: ")


def network(*arguments, **env):
    return subprocess.run(
        [BASH, BENCHMARKS / "network.sh", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env=os.environ | {"PYTHON": sys.executable} | env,
    )


@pytest.mark.parametrize(
    ("arguments", "env", "told"),
    [
        ((), {}, "which benchmark?"),
        (("--fast", "allreduce.py"), {}, "unknown option --fast"),
        (("--rate",), {}, "--rate needs a value"),
        (("--ranks-per-host", "0", "allreduce.py"), {}, "a positive number, not '0'"),
        (("nothing.py",), {}, "no such benchmark: "),
        (("allreduce.py",), {"PYTHON": "no-such-python"}, "no interpreter 'no-such-python'"),
    ],
    ids=["nothing", "option", "value", "number", "script", "python"],
)
def test_network_refuses_politely(arguments, env, told):
    done = network(*arguments, **env)
    assert done.returncode == 2
    assert done.stderr.startswith("network.sh: ")
    assert told in done.stderr


def test_network_needs_tools_and_root(tmp_path):
    for tool in ("bash", "env", "id", "dirname"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    done = network("allreduce.py", PATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (
        2,
        "network.sh: needs 'ip' of iproute2, which is not installed\n",
    )
    for tool in ("ip", "tc"):
        (tmp_path / tool).symlink_to("/bin/true")
    (tmp_path / "id").unlink()
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o700)
    done = network("allreduce.py", PATH=str(tmp_path))
    assert done.returncode == 2
    assert "needs root" in done.stderr


def namespaces():
    done = subprocess.run([IP, "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in done.stdout.splitlines() if "rankstep-bench" in line}


@pytest.fixture
def can_make_hosts():
    if os.geteuid() or not (IP and shutil.which("tc")):
        pytest.skip("network namespaces need root and iproute2")
    probe = f"rankstep-probe-{os.getpid()}"
    if subprocess.run([IP, "netns", "add", probe], capture_output=True, check=False).returncode:
        pytest.skip("no network namespaces here")
    subprocess.run([IP, "netns", "del", probe], capture_output=True, check=True)


@pytest.mark.netns
def test_two_hosts_and_a_link(can_make_hosts, tmp_path):
    file = tmp_path / "result.json"
    done = network(
        *("network_step.py", "--model", "cnn", "--rounds", "1", "--repeats", "1", "--allow-busy"),
        *("--variants", "rankstep", "rankstep bf16 wire", "--json", file),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert namespaces() == set()
    result = json.loads(file.read_text(encoding="utf-8"))
    assert (result["settings"]["hosts"], result["settings"]["ranks"]) == (2, 2)
    assert result["machine"]["link"] == "2 hosts x 1, 1gbit"
    assert result["machine"]["command"].startswith(
        "benchmarks/network.sh --ranks-per-host 1 --rate 1gbit benchmarks/network_step.py --model cnn"
    )
    variants = result["tables"]["cnn"]["variants"]
    assert list(variants) == [
        *("local", "rankstep", "torch default", "rankstep bf16 wire"),
        *("all-reduce alone", "link alone", "the larger"),
    ]
    assert "error_l2" not in variants["rankstep"]
    # Halves: something is lost, and no more than rounding to 8 bits thrice loses.
    assert 1e-4 < variants["rankstep bf16 wire"]["error_l2"] < 3 * 2**-8
    # One rank tells, not both.
    assert done.stdout.count("cnn: 9.5 MB in 29 tensors, 2 ranks") == 1


@pytest.mark.netns
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_hosts_are_removed_however_it_ends(can_make_hosts, how):
    """The benchmark itself is a script that never ends."""
    forever = "while true; do sleep 1; done"
    with tempfile.TemporaryDirectory(prefix="rankstep-test-") as folder:
        script = Path(folder, "forever.py")
        script.write_text(forever, encoding="utf-8")
        running = subprocess.Popen(
            [BASH, BENCHMARKS / "network.sh", "--rate", "none", script],
            env=os.environ | {"PYTHON": BASH},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            own = f"rankstep-bench-{running.pid}-"
            until = time.monotonic() + 20
            while len([name for name in namespaces() if name.startswith(own)]) < 2:
                assert time.monotonic() < until
                time.sleep(0.1)
            running.send_signal(how)
            running.wait(20)
        finally:
            running.kill()
            running.wait()
            if how == signal.SIGKILL:
                # The next run takes away what one that was killed left; this one ends at once.
                script.write_text("exit 0", encoding="utf-8")
                done = network("--rate", "none", script, PYTHON=BASH)
                assert done.returncode == 0, done.stderr
        assert not any(name.startswith(own) for name in namespaces())


def test_plan(run):
    result, told = run(
        "plan.py", *("--model", "mlp", "--rounds", "1", "--repeats", "1"), "--allow-busy"
    )
    mlp = result["tables"]["mlp"]
    assert list(mlp["variants"]) == ["auto", "1 MiB", "5 MiB", "25 MiB", "100 MiB"]
    for figures in mlp["variants"].values():
        assert figures["buckets"] >= 1
        assert figures["predicted_ms"].keys() == figures["measured_ms"].keys() == SPREAD
        assert figures["predicted_of_measured"]["median"] > 0
    assert mlp["variants"]["auto"]["ratio_to_auto"]["median"] == 1.0
    # By the model itself, its plan is the best.
    for forecast in mlp["facts"]["forecasts"]:
        least = min(other["step_ns"] for other in forecast["others"])
        assert forecast["plan"]["step_ns"] <= least * (1 + 1e-9)
    assert [bar["limit"] for bar in result["bars"]] == [0.1, 0.1]
    assert "14 parameters in" in told


@pytest.mark.parametrize(
    "script", ["allreduce.py", "gpu.py", "hook_overhead.py", "memory.py", "plan.py", "step.py"]
)
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
