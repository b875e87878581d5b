"""What `--dry-run` tells, and that the recipes of docs/launch.md and Kubeflow's variables come to what they should."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from rankstep.cli.main import main
from rankstep.world.env import RankEnv, read_rank_env
from rankstep.world.identity import TOKEN

LAUNCH_PAGE = Path(__file__).parents[2] / "docs" / "launch.md"
SCRIPT = str(Path(__file__).parents[1] / "faults" / "scripts" / "rank.py")
# What Kubeflow's training operator sets in the pods of a PyTorchJob with one master and three workers.
KUBEFLOW = {
    "PYTHONUNBUFFERED": "1",
    "MASTER_ADDR": "digits-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "4",
    "RANK": "3",
}
# And what its Trainer sets in each pod of a TrainJob.
TRAINER = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "digits-node-0-0.digits",
    "PET_MASTER_PORT": "29400",
}
ELASTIC = {
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "digits-worker-0:23456",
    "PET_RDZV_ID": "digits",
    "PET_NNODES": "1:3",
    "PET_MAX_RESTARTS": "5",
}


def rehearse(capsys, *flags):
    assert main(["run", "--dry-run", *flags, SCRIPT, "write", "x"]) == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    return output


def nodes(told):
    """The variables of each rank, as told."""
    every, ranks = {}, []
    for line in told.splitlines():
        if re.match(r"node \d|each node", line):
            every = {}
        elif own := re.match(r"  (?:a )?rank.*: (.*LOCAL_RANK=\d+)$", line):
            ranks.append(every | dict(part.split("=") for part in own[1].split()))
        elif variable := re.match(r"    (\w+)=(.*)$", line):
            every[variable[1]] = variable[2]
    return ranks


def bash_block(beginning):
    """The recipe of the page that begins with these words."""
    (found,) = [
        block
        for block in re.findall(r"```bash\n(.*?)```", LAUNCH_PAGE.read_text(), re.DOTALL)
        if block.startswith(beginning)
    ]
    return found


def test_one_node_finds_a_port_of_its_own(capsys, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    told = rehearse(capsys, "--nproc-per-node", "2")
    assert "listens at 127.0.0.1, a free port (this host only)" in told
    assert f"{sys.executable} -u {SCRIPT} write x" in told
    ranks = nodes(told)
    assert [rank["RANK"] for rank in ranks] == ["0", "1"]
    assert ranks[0]["WORLD_SIZE"] == "2"
    assert ranks[0][TOKEN] == "(a new secret)"
    assert ranks[0]["MASTER_PORT"] == "(a free port)"
    assert ranks[0]["OMP_NUM_THREADS"].isdecimal()


def test_each_node_is_told_its_line_and_no_port_is_opened(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv(TOKEN, "hush")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ["--nnodes=2", "--node_rank", "1", "--master-addr=127.0.0.1"]
        told = rehearse(capsys, *flags, f"--master-port={port}", "--trace", str(tmp_path / "t"))
    assert "hush" not in told
    assert not (tmp_path / "t").exists()
    lines = [line.partition(": ")[2] for line in told.splitlines() if re.match(r"node \d", line)]
    assert [shlex.split(line)[-5:-3] for line in lines] == [
        ["--node-rank", "0"],
        ["--node-rank", "1"],
    ]
    assert not any("dry-run" in line or "node_rank" in line for line in lines)
    for rank in nodes(told):
        assert read_rank_env(rank).master_port == int(port)
        assert rank["RANKSTEP_TRACE"] == str(tmp_path / "t")
        assert rank[TOKEN] == "(yours)"


def test_a_missing_script_is_no_rehearsal(capsys):
    assert main(["run", "--dry-run", "trian.py"]) == 2
    assert "there is no script trian.py" in capsys.readouterr().err


def test_kubeflow_sets_all_for_one_rank_per_pod():
    assert read_rank_env(KUBEFLOW) == RankEnv(3, 0, 4, 1, 3, 4, "digits-master-0", 23456, "env")


def test_kubeflow_sets_all_for_a_launcher_per_pod(capsys, monkeypatch):
    # The operator's own RANK and WORLD_SIZE count pods; the launcher's ranks must not see them.
    for name, value in (KUBEFLOW | TRAINER).items():
        monkeypatch.setenv(name, value)
    told = rehearse(capsys)
    assert "other hosts can connect" in told
    places = [read_rank_env(rank) for rank in nodes(told)]
    assert [(place.rank, place.node, place.local_rank) for place in places] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]
    assert places[3].master_addr == "digits-node-0-0.digits"
    assert places[3].master_port == 29400


def test_kubeflow_elastic_jobs_are_decided_when_the_nodes_meet(capsys, monkeypatch):
    for name, value in ELASTIC.items():
        monkeypatch.setenv(name, value)
    told = rehearse(capsys)
    assert "1:3 nodes with 1 rank each" in told
    assert "c10d at digits-worker-0:23456, id digits" in told
    (rank,) = nodes(told)
    assert rank["LOCAL_RANK"] == "0"
    assert "RANK" not in rank
    assert rank["TORCHELASTIC_MAX_RESTARTS"] == "5"


def test_the_slurm_recipe_with_a_launcher_per_node(capsys, tmp_path):
    programs = {
        "srun": 'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
        "scontrol": '[ "$*" = "show hostnames node[07-08]" ] && printf "node07\\nnode08\\n"',
        "openssl": "echo 0123456789abcdef",
        "rankstep": 'echo "$@" "$RANKSTEP_TOKEN"',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o700)
    variables = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[07-08]", "SLURM_JOB_ID": "4711"}
    done = subprocess.run(
        [shutil.which("bash"), "-eu", "-c", bash_block("#SBATCH --nodes=2 --ntasks-per-node=1")],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"} | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[-1] for line in lines] == ["0123456789abcdef"] * 2
    for node, line in enumerate(lines):
        assert line[-2] == "train.py"
        assert line[line.index("--node-rank") + 1] == str(node)
        told = rehearse(capsys, *line[1:-2])
        places = [read_rank_env(rank) for rank in nodes(told)]
        assert [place.rank for place in places] == list(range(8))
        assert places[4] == RankEnv(4, 0, 8, 4, 1, 2, "node07", 29500, "torchrun")
