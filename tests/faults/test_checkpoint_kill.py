"""Jobs that are killed, by kill -9 at all kinds of moments, and go on by themselves as the same job."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "checkpointed.py"
RANKSTEP = Path(sys.executable).parent / "rankstep"
LIMIT = 100


def start(folder, *flags):
    """Start one launcher; its output goes to a file, so that it never waits for a reader."""
    output = (folder / f"output-{len(list(folder.glob('output-*')))}").open("wb")
    with output:
        return subprocess.Popen(
            [str(word) for word in (RANKSTEP, "run", *flags, SCRIPT, folder)],
            env=os.environ | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def output_of(folder):
    return "\n".join(path.read_text() for path in sorted(folder.glob("output-*")))


def end(folder, *launchers):
    """Wait for the launchers' own ends; return their exit codes."""
    try:
        return [launcher.wait(LIMIT) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()


def prepare(folder, **plan):
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(json.dumps({"deaths": [], "epochs": 2} | plan))
    return folder


def results(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("result-*.json"))]


def uninterrupted(_, folder):
    """What the script does, without a launcher."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        importlib.import_module(SCRIPT.stem).main(folder)


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """The results of a job that nobody kills."""
    folder = prepare(tmp_path_factory.mktemp("whole"))
    ranks(2).run(uninterrupted, folder)
    return results(folder)


DEATHS = [
    {"rank": 1, "how": "backward", "at": 3},
    # While it saves, and in the same epoch once more.
    {"rank": 0, "how": "sync", "at": 9},
]


def test_killed_ranks_go_on_as_the_same_job(whole, tmp_path):
    folder = prepare(tmp_path / "job", deaths=DEATHS)
    launcher = start(folder, "--nproc-per-node=2", "--max-restarts=2", "--monitor-interval=0.05")
    assert end(folder, launcher) == [0], output_of(folder)
    output = output_of(folder)
    assert output.count("life ") == 3
    assert output.count("rankstep: resumed from ") == 2
    assert results(folder) == whole
    left = [path.name for path in (folder / "checkpoints").iterdir()]
    assert sorted(left) == ["lock", *(f"step-{step:08d}" for step in (14, 15, 16))]


def wait_for(folder, condition):
    until = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < until, output_of(folder)
        time.sleep(0.05)


def steps(folder, rank=0):
    """What a rank noted of its steps: step, life, ranks, samples."""
    path = folder / f"steps-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("]")]


def test_preempted_all_ranks_save_and_end(whole, tmp_path):
    folder = prepare(tmp_path / "job", pause=0.05)
    launcher = start(folder, "--nproc-per-node=2")
    wait_for(folder, lambda: len(steps(folder)) >= 3)
    launcher.send_signal(signal.SIGTERM)
    assert end(folder, launcher) == [128 + signal.SIGTERM]
    output = output_of(folder)
    assert output.splitlines()[-1] == "rankstep: stopped by SIGTERM"
    assert "Traceback" not in output
    # Both ranks ended behind the same step, and it is saved.
    last = steps(folder, 0)[-1][0]
    assert last == steps(folder, 1)[-1][0] < 16
    assert (folder / "checkpoints" / f"step-{last:08d}").is_dir()
    assert end(folder, start(folder, "--nproc-per-node=2")) == [0], output_of(folder)
    assert steps(folder)[-1][0] == 16
    assert results(folder) == whole


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_one_of_two_nodes_dies_and_another_comes(tmp_path):
    folder = prepare(tmp_path / "job", epochs=12, windows=True, pause=0.05)
    flags = [
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--rdzv-id=job",
        "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3",
        "--monitor-interval=0.1",
    ]
    nodes = [start(folder, *flags)]
    try:
        time.sleep(0.5)  # the first one hosts the meeting point
        nodes.append(start(folder, *flags))
        wait_for(folder, lambda: len(steps(folder)) > 5 and steps(folder)[-1][2] == 2)
        nodes[1].kill()
        nodes[1].wait()
        before = len(steps(folder))
        wait_for(folder, lambda: len(steps(folder)) > before and steps(folder)[-1][2] == 1)
        nodes.append(start(folder, *flags))
        wait_for(folder, lambda: steps(folder)[-1][2] == 2)
    except BaseException:
        end(folder, *nodes)
        raise
    assert end(folder, nodes[0], nodes[2]) == [0, 0], output_of(folder)
    output = output_of(folder)
    assert "(written by 2, now 1 rank)" in output
    assert "(written by 1, now 2 ranks)" in output
    # The last life that took a step is the one that counts: what came behind the last checkpoint was done again.
    taken = {}
    for rank in (0, 1):
        for step, life, _, samples in steps(folder, rank):
            taken.setdefault(step, {}).setdefault(life, []).extend(samples)
    of_step = {step: sorted(lives[max(lives)]) for step, lives in taken.items()}
    assert sorted(of_step) == list(range(1, 97))
    for epoch in range(12):
        of_epoch = [of_step[1 + 8 * epoch + index] for index in range(8)]
        assert all(len(samples) == 6 for samples in of_epoch)
        assert sorted(itertools.chain(*of_epoch)) == list(range(48))
