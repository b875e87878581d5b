"""The same script under every launcher is the same world; and what `world` does when something is wrong."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from rankstep.errors import DataError, WorldError
from rankstep.world import agree, rank_zero_first, world
from rankstep.world.env import RankEnv
from rankstep.world.ports import port_holder
from rankstep.world.world import World, _choose_device

SCRIPT = Path(__file__).parent / "scripts" / "world_facts.py"
PROGRAMS = Path(sys.executable).parent
LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "MASTER_",
    "SLURM_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "MPI_",
    "TORCHELASTIC",
    "GLOO_",
    "TP_",
)


def clean_environment(**more):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    kept.pop("OMP_NUM_THREADS", None)
    return kept | more


@pytest.fixture
def alone(monkeypatch):
    """Run in a process that no launcher has started."""
    for name in os.environ:
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(command, **more):
    return subprocess.Popen(
        [str(word) for word in command],
        env=clean_environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(processes):
    try:
        return "".join(process.communicate(timeout=90)[0] for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def under_slurm(folder):
    job = str(1_000_000 + os.getpid())
    return [
        start(
            [sys.executable, SCRIPT, folder],
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
            SLURM_NTASKS="2",
            SLURM_NNODES="1",
            SLURM_NODEID="0",
            SLURM_STEP_ID="0",
            SLURM_JOB_ID=job,
        )
        for rank in range(2)
    ]


STARTS = {
    "rankstep run": lambda folder: [
        start([PROGRAMS / "rankstep", "run", "--nproc-per-node", "2", SCRIPT, folder])
    ],
    "torchrun": lambda folder: [
        start([PROGRAMS / "torchrun", "--nproc-per-node=2", SCRIPT, folder])
    ],
    "srun": under_slurm,
    "plain": lambda folder: [start([sys.executable, SCRIPT, folder])],
}


@pytest.mark.parametrize("launcher", STARTS)
def test_one_script_under_every_launcher(launcher, tmp_path):
    processes = STARTS[launcher](tmp_path)
    output = finish(processes)
    assert [process.returncode for process in processes] == [0] * len(processes), output

    size = 1 if launcher == "plain" else 2
    ranks = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert [(facts["rank"], facts["local_rank"], facts["is_main"]) for facts in ranks] == [
        (rank, rank, rank == 0) for rank in range(size)
    ]
    for facts in ranks:
        assert facts["world_size"] == facts["local_world_size"] == size
        assert (facts["node"], facts["node_count"]) == (0, 1)
        assert (facts["device"], facts["backend"]) == ("cpu", "gloo")
        assert f"rank {facts['rank']} of {size}" in facts["repr"]
        assert facts["sum"] == sum(range(1, size + 1))
        assert facts["agree"] == [True, size == 1, True, False]
        assert facts["inner"] == facts["rank"]
        assert facts["open after inner"]
        assert not facts["open after"]
        assert facts["share"] == 4
        assert facts["uneven"] == 5 if size == 1 else "take 8 or 10" in facts["uneven"]
        assert facts["again"]
        # IPv4 loopback ends in 127 in the kernel's byte order; the launcher, not the rank, hosts torchrun's store.
        assert all(address.endswith("7F") for address in facts["listening"]), facts["listening"]
    assert "printed by rank 0" in output
    assert "printed by rank 1" not in output

    turns = [line.split() for line in (tmp_path / "order").read_text().splitlines()]
    for turn in range(3):
        order = [int(rank) for number, rank in turns if int(number) == turn]
        assert order[0] == 0
        assert sorted(order) == list(range(size))
    assert ranks[0]["first failed"] == "KeyError: 'lost'"
    if size == 2:
        told = ranks[1]["first failed"]
        assert told.startswith("WorldError: rank 1: rank 0 went first")
        assert "KeyError: 'lost'" in told
        cores = len(os.sched_getaffinity(0))
        if launcher != "torchrun":
            assert ranks[0]["threads"] <= max(1, cores // 2)


def test_a_taken_port_is_named_with_its_holder(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port_holder(port).startswith(f"process {os.getpid()} (")
        process = start(
            [sys.executable, SCRIPT, tmp_path],
            RANK="0",
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        output = finish([process])
    assert process.returncode == 1
    assert f"port {port} (MASTER_PORT) is taken by process {os.getpid()}" in output


def test_ranks_that_do_not_arrive_are_named():
    program = "import rankstep.world\nwith rankstep.world.world(timeout=2): pass"
    process = start(
        [sys.executable, "-c", program],
        RANK="0",
        WORLD_SIZE="3",
        MASTER_ADDR="localhost",
        MASTER_PORT=str(free_port()),
    )
    output = finish([process])
    assert process.returncode == 1
    assert "rank 0 of 3: ranks 1, 2 did not arrive within 2 s" in output


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_closes_whatever_ends_the_block(error, alone):
    interface, hook = os.environ.get("GLOO_SOCKET_IFNAME"), sys.excepthook
    try:
        with pytest.raises(error), world(timeout=timedelta(minutes=1)) as here:  # noqa: PT012
            assert dist.is_initialized()
            assert dist.get_world_size() == here.world_size == 1
            raise error
    finally:
        # torch's prefix stays on the hook for the traceback of an error; tests want their own hook back.
        sys.excepthook = hook
    assert not dist.is_initialized()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface
    with pytest.raises(WorldError, match="not open"):
        _ = here.process_group


@pytest.mark.parametrize("named", ["", "lo"])
def test_gloo_stays_on_loopback_unless_told_otherwise(named, alone, monkeypatch):
    if named:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    with world():
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        dist.new_group()
    assert os.environ.get("GLOO_SOCKET_IFNAME", "") == named


def test_adopts_an_open_group_and_leaves_it_open(alone):
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with world() as here:
            assert (here.backend, here.rank, here.world_size) == ("gloo", 0, 1)
            assert agree(True)
        assert dist.is_initialized()
        with pytest.raises(
            WorldError, match=r"gloo is open already, and world.. was asked for nccl"
        ):
            world(backend="nccl")
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def test_one_world_is_entered_once(alone):
    here = world()
    with here, pytest.raises(WorldError, match="open already"), here:
        pass
    with here:
        assert here.is_main


def test_without_a_group_the_helpers_are_plain():
    assert agree(True, "all")
    assert not agree(False)
    with pytest.raises(WorldError, match="some"):
        agree(True, "some")
    with rank_zero_first():
        pass


def test_shares_of_a_global_batch():
    here = World(RankEnv(1, 1, 4, 4, 0, 1, None, None, "none"), torch.device("cpu"), "gloo", None)
    assert here.local_batch(32) == 8
    for batch, advice in ((30, "take 28 or 32"), (3, "take 4"), (0, "take 4"), (-8, "take 4")):
        with pytest.raises(DataError, match=advice):
            here.local_batch(batch)


@pytest.mark.parametrize(
    ("source", "local_rank", "gpus", "backend", "device", "expected"),
    [
        ("torchrun", 1, 0, None, None, "cpu"),
        ("torchrun", 1, 2, None, None, "cuda:1"),
        ("torchrun", 1, 2, "nccl", "cuda", "cuda:1"),
        ("torchrun", 1, 2, "gloo", None, "cpu"),
        ("torchrun", 1, 2, None, "cuda:0", "cuda:0"),
        ("slurm", 1, 1, None, None, "cuda:0"),
        ("torchrun", 1, 1, None, None, "no GPU number 1; 2 ranks on this node see 1"),
        ("torchrun", 1, 0, "nccl", None, "nccl works on GPUs"),
    ],
)
def test_chooses_the_device(source, local_rank, gpus, backend, device, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    env = RankEnv(local_rank, local_rank, 2, 2, 0, 1, "localhost", 1, source)
    if expected.startswith("c"):
        assert str(_choose_device(env, backend, device)) == expected
    else:
        with pytest.raises(WorldError, match=expected):
            _choose_device(env, backend, device)


def test_the_store_stays_until_the_last_rank_has_left(tmp_path):
    # Rank 0 hosts the store and is gone at once; rank 1 still has to read from it.
    program = (
        "import os, time, rankstep.world as w\n"
        "with w.world() as here:\n"
        "    with w.rank_zero_first():\n"
        "        time.sleep(0.5 * here.rank)\n"
        "    with w.rank_zero_first(): pass\n"
        "os._exit(0)\n"
    )
    port = str(free_port())
    processes = [
        start(
            [sys.executable, "-c", program],
            RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for rank in range(2)
    ]
    output = finish(processes)
    assert [process.returncode for process in processes] == [0, 0], output


def test_sigint_is_still_pythons(alone):
    with world():
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
