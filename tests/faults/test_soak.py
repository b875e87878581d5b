"""The soak on a small scale, and that it notices what it looks for: other bits, other places, things left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OURS = ("common", "result", "soak", "soak_faults", "soak_job", "soak_training")


@pytest.fixture(scope="module")
def parts():
    """The soak's modules; another folder of scripts has a module named common, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        for name in OURS:
            patch.delitem(sys.modules, name, raising=False)
        import soak
        import soak_faults
        import soak_job
        import soak_training

        yield SimpleNamespace(soak=soak, faults=soak_faults, job=soak_job, training=soak_training)
        for name in OURS:
            patch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def job(parts, tmp_path):
    whole = {(0, 1): ("0x1.8p+1", 7), (0, 2): ("0x1.0p+1", 9)}
    made = parts.job.Job(tmp_path, parts.training.TRAININGS[0], seed=1, epochs=1, whole=whole)
    yield made
    made.close()


def test_a_few_faults_are_survived_with_the_same_bits(tmp_path):
    result = tmp_path / "result.json"
    done = subprocess.run(
        [
            *(sys.executable, BENCHMARKS / "soak.py", "--faults", "3", "--trainings", "momentum"),
            *("--kinds", "kill_rank", "damage", "preempt", "--json", result),
        ],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(result.read_text(encoding="utf-8"))
    kinds = told["tables"]["faults"]["variants"]
    assert {kind: facts["done"] for kind, facts in kinds.items()} == dict.fromkeys(
        ("kill_rank", "damage", "preempt"), 1
    )
    assert kinds["preempt"]["steps_lost"] == 0
    training = told["tables"]["trainings"]["variants"]["momentum"]
    assert training["lives"] == 4
    assert 2 <= training["starts"] <= 4
    assert training["differ"] == 0 < training["steps_repeated"]
    # Both ranks' losses of each step, and what they had at the end.
    assert training["compared"] > 2 * training["steps"] > 0
    assert all(bar["held"] for bar in told["bars"])
    assert "3 of 3 faults done" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json"]


def test_a_limit_that_comes_first_is_told(parts, capfd, monkeypatch):
    # No rank comes so far as to read them.
    monkeypatch.setattr(parts.soak, "save_digits", lambda file: file.write_bytes(b"") or 1437)
    assert parts.soak.main(["--faults", "5", "--trainings", "momentum", "--limit", "0.01"]) == 1
    output, errors = capfd.readouterr()
    assert "0 of 5 faults done" in output
    assert "faults that were not done: 5, bar 0: MISSED" in output
    assert "things that differ: not measured" in output
    assert "the limit of 0.01 s came first" in errors


def test_the_seed_draws_the_faults(parts):
    def drawn(seed, count=32):
        soak = parts.soak.Soak(seed, Path(), 0.0)
        return soak.plan(count, list(parts.faults.KINDS), parts.training.TRAININGS[:2])

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    plain, with_workers = drawn(1)
    assert [fault.number for fault in plain + with_workers] == list(range(1, 33))
    kinds = [fault.kind for fault in plain]
    # All kinds come before one comes again.
    assert set(kinds[:15]) == set(parts.faults.KINDS) - {"kill_worker"}
    assert "kill_worker" in {fault.kind for fault in with_workers}
    assert {fault.rank for fault in plain if fault.kind == "kill_saving"} == {0}


# ---------------------------------------------------------------- twins: it notices


def test_one_other_bit_in_a_weight_is_named(parts):
    weight = torch.full((3, 2), 0.1)
    other = weight.clone()
    other.view(torch.int32)[2, 1] ^= 1
    digest = parts.training.digest
    whole = [{"weights 0.weight": digest(weight), "losses": digest(["0x1p+0"])}] * 2
    assert parts.job.differences(whole, [dict(each) for each in whole]) == []
    changed = [whole[0], whole[1] | {"weights 0.weight": digest(other)}]
    assert parts.job.differences(whole, changed) == ["weights 0.weight of rank 1"]
    assert parts.job.differences(whole, [whole[0], {}]) == [
        "losses of rank 1",
        "weights 0.weight of rank 1",
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["state"][0]["momentum"].add_(1e-7),
        lambda state: state["state"][0].update(step=3),
        lambda state: state["groups"].reverse(),
        lambda state: state.update(extra=None),
    ],
)
def test_an_optimizer_that_differs_has_another_hash(parts, change):
    def state():
        return {"state": {0: {"momentum": torch.ones(2), "step": 2}}, "groups": [0.1, 0.2]}

    changed = state()
    change(changed)
    digest = parts.training.digest
    assert digest(state()) == digest(state()) != digest(changed)


@pytest.mark.parametrize(
    ("loss", "samples", "named"),
    [
        ("0x1.0p+1", 9, None),
        ("0x1.0000000000001p+1", 9, r"step 2 on rank 0: the loss is 2\.0000000000000004.*same"),
        ("0x1.0p+1", 8, r"from other samples"),
    ],
)
def test_a_step_that_differs_is_named(parts, job, loss, samples, named):
    pipe = os.open(job.folder / parts.training.PIPE, os.O_WRONLY)
    for step, facts in ((1, ("0x1.8p+1", 7)), (2, (loss, samples))):
        told = {"is": "step", "rank": 0, "step": step, "loss": facts[0], "samples": facts[1]}
        os.write(pipe, json.dumps(told).encode() + b"\n")
    os.close(pipe)
    if named is None:
        assert job.hear(1.0)
        assert (job.newest, job.since, job.repeated) == (2, 2, 0)
    else:
        with pytest.raises(parts.job.DifferentError, match=named):
            job.hear(1.0)


@pytest.mark.parametrize(
    ("kind", "step", "wrong"),
    [
        ("kill_rank", 6, ""),
        ("kill_rank", 8, ""),
        ("kill_rank", 4, "went on behind step 4, not behind one of 6 to 8"),
        ("preempt", 8, ""),
        ("preempt", 6, "went on behind step 6, not behind one of 8 to 8"),
        ("damage", 4, ""),
        ("damage", 6, "went on behind step 6, not behind one of 4 to 4"),
    ],
)
def test_a_place_that_was_lost_is_named(parts, job, kind, step, wrong):
    soak = parts.soak.Soak(1, Path(), 0.0)
    outcome = parts.soak.Outcome(parts.faults.Fault(3, kind, 0, 1, 0.0, 0), "momentum", 8)
    job.begun = {"step": step, "newest": 8, "saved": 6, "ignored": ["step-00000006"]}
    soak._check(job, outcome, (4, ["step-00000006"]) if kind == "damage" else None)
    assert soak.problems == ([f"fault 3 ({kind}): {wrong}"] if wrong else [])


def test_a_checkpoint_that_should_have_been_passed_over_and_an_order_nobody_took(parts, job):
    soak = parts.soak.Soak(1, Path(), 0.0)
    outcome = parts.soak.Outcome(parts.faults.Fault(3, "damage", 0, 1, 0.0, 0), "momentum", 8)
    job.begun = {"step": 4, "newest": 8, "saved": 6, "ignored": []}
    job.order(1, "raise_forward", 3, 0)
    soak._check(job, outcome, (4, ["step-00000006"]))
    assert [text.partition(": ")[2] for text in soak.problems] == [
        "nobody has taken ['order-1']",
        "passed over [], not ['step-00000006']",
    ]


@pytest.mark.parametrize("how", ["cut", "changed", "deleted"])
def test_a_damaged_checkpoint_counts_no_more_until_it_is_written_again(parts, job, how):
    folder = job.folder / parts.training.CHECKPOINTS
    for step in (2, 4):
        (folder / f"step-{step:08d}").mkdir(parents=True)
        (folder / f"step-{step:08d}" / "a").write_bytes(b"12345678")
    newest = folder / "step-00000004"
    ways = {}
    for detail in range(20):
        (newest / "a").write_bytes(b"12345678")
        job.damaged.clear()
        before, names, done = parts.faults.damage(job, detail)
        assert (before, names) == (2, [newest.name])
        ways[done.removeprefix(f"{newest.name}/a ")] = detail
    assert ways.keys() == {"cut", "changed", "deleted"}
    (newest / "a").write_bytes(b"12345678")
    job.damaged.clear()
    parts.faults.damage(job, ways[how])
    assert not (newest / "a").exists() or (newest / "a").read_bytes() != b"12345678"
    assert [step for step, _ in parts.faults.whole(job)] == [2]
    # The one before it is damaged, too, before the newest has been written again.
    (folder / "step-00000001").mkdir()
    before, names, _ = parts.faults.damage(job, ways[how])
    assert (before, names) == (1, [newest.name, "step-00000002"])
    newest.rename(folder / "old")
    newest.mkdir()
    assert [step for step, _ in parts.faults.whole(job)] == [4, 1]


HOLDS = """
import mmap, os, socket, sys
held = socket.socket(fileno=int(sys.argv[1]))
open(sys.argv[2], "w").close()
segment = os.open("/dev/shm/" + sys.argv[3], os.O_RDWR | os.O_CREAT, 0o600)
print(flush=True)
input()
"""


def test_what_is_left_behind_is_named(parts, tmp_path):
    mark, segment = "soak-test", f"rankstep-soak-test-{os.getpid()}"
    traces = parts.job.Traces(mark, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDS, str(server.fileno()), tmp_path / "file", segment],
            env=os.environ | {parts.job.MARK: mark},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[server.fileno()],
        )
        try:
            holder.stdout.readline()
            traces.look()
            process, *others = traces.left(0.0)
            assert process.startswith(f"process {holder.pid} ({sys.executable} -c")
            rest = [f"port {port}", f"shared memory {segment}", "file file"]
            assert others == rest
            holder.send_signal(signal.SIGKILL)
            holder.communicate()
            # What it held outlives it.
            assert traces.left(0.0) == rest
        finally:
            holder.kill()
            holder.communicate()
            Path("/dev/shm", segment).unlink(missing_ok=True)  # noqa: S108 - where it is
    (tmp_path / "file").unlink()
    assert traces.left() == []
    # Another job's are none of ours.
    assert parts.job.Traces("another", tmp_path).left(0.0) == []
