"""Which rank this is, for every launcher's variables, and what is said when they are wrong."""

from __future__ import annotations

import pytest

from rankstep.errors import WorldError
from rankstep.world.env import RankEnv, adopted_rank_env, is_loopback, read_rank_env
from rankstep.world.slurm import expand_counts, first_host

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}
PMI = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "4000",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "node[01-03,07]",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
}
ALONE = RankEnv(0, 0, 1, 1, 0, 1, None, None, "none")


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        pytest.param({}, ALONE, id="nothing"),
        pytest.param({"WORLD_SIZE": "1"}, ALONE, id="size one needs no rank"),
        pytest.param({"RANK": "", "WORLD_SIZE": " "}, ALONE, id="empty is unset"),
        pytest.param(
            TORCHRUN, RankEnv(3, 1, 4, 2, 1, 2, "10.0.0.1", 29500, "torchrun"), id="torchrun"
        ),
        pytest.param(
            TORCHRUN | OPEN_MPI | SLURM,
            RankEnv(3, 1, 4, 2, 1, 2, "10.0.0.1", 29500, "torchrun"),
            id="torchrun inside mpirun inside srun",
        ),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            RankEnv(1, 1, 2, 2, 0, 1, "localhost", 1, "env"),
            id="bare pair on loopback is one host",
        ),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "master-0", "MASTER_PORT": "1"},
            RankEnv(1, 0, 2, 1, 1, 2, "master-0", 1, "env"),
            id="bare pair elsewhere is a pod each",
        ),
        pytest.param(
            without(
                TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "LOCAL_RANK"
            ),
            RankEnv(3, 1, 4, 2, 1, 2, "10.0.0.1", 29500, "env"),
            id="place follows from the local size",
        ),
        pytest.param(
            SLURM | {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"},
            RankEnv(5, 1, 8, 4, 1, 2, "node01", 19567, "env"),
            id="pair exported around srun",
        ),
        pytest.param(OPEN_MPI, RankEnv(1, 1, 2, 2, 0, 1, "127.0.0.1", 23487, "mpi"), id="Open MPI"),
        pytest.param(
            OPEN_MPI | SLURM,
            RankEnv(1, 1, 2, 2, 0, 1, "127.0.0.1", 23487, "mpi"),
            id="mpirun in SLURM",
        ),
        pytest.param(PMI, RankEnv(5, 1, 8, 4, 1, 2, "node1", 4000, "mpi"), id="PMI in blocks"),
        pytest.param(
            PMI | {"MPI_LOCALRANKID": "2"},
            RankEnv(5, 2, 8, 4, 1, 2, "node1", 4000, "mpi"),
            id="PMI one after the other",
        ),
        pytest.param(SLURM, RankEnv(5, 1, 8, 4, 1, 2, "node01", 19567, "slurm"), id="SLURM"),
        pytest.param(
            without(
                SLURM, "SLURM_NTASKS_PER_NODE", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_ID"
            ),
            RankEnv(5, 1, 8, 4, 1, 2, "node01", 19567, "slurm"),
            id="SLURM without a step number, place from the counts",
        ),
        pytest.param(
            SLURM | {"SLURM_NTASKS": "7", "SLURM_TASKS_PER_NODE": "4,3"},
            RankEnv(5, 1, 7, 3, 1, 2, "node01", 19567, "slurm"),
            id="SLURM uneven",
        ),
        pytest.param(
            SLURM
            | {
                "SLURM_STEP_NUM_TASKS": "6",
                "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
                "SLURM_STEP_ID": "2",
            },
            RankEnv(5, 1, 6, 3, 1, 2, "node01", 21585, "slurm"),
            id="a step smaller than its job",
        ),
        pytest.param(
            SLURM
            | {
                "SLURM_NNODES": "1",
                "SLURM_NODEID": "0",
                "SLURM_LOCALID": "5",
                "SLURM_TASKS_PER_NODE": "8",
            },
            RankEnv(5, 5, 8, 8, 0, 1, "127.0.0.1", 19567, "slurm"),
            id="SLURM on one node meets on loopback",
        ),
        pytest.param(
            SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "77", "WORLD_SIZE": "8"},
            RankEnv(5, 1, 8, 4, 1, 2, "head", 77, "slurm"),
            id="SLURM with an address given",
        ),
        pytest.param(
            without(SLURM, "SLURM_PROCID", "SLURM_STEP_ID"), ALONE, id="SLURM interactive shell"
        ),
        pytest.param(
            without(SLURM, "SLURM_STEP_ID") | {"SLURM_PROCID": "0"}, ALONE, id="SLURM batch script"
        ),
        pytest.param(
            SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_ID": str(0xFFFFFFFA)},
            ALONE,
            id="SLURM interactive step",
        ),
    ],
)
def test_reads_the_place(variables, expected):
    assert read_rank_env(variables) == expected


@pytest.mark.parametrize(
    ("variables", "parts"),
    [
        pytest.param(
            {"WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "RANK", "rankstep run"], id="size without rank"
        ),
        pytest.param({"RANK": "2"}, ["RANK=2", "WORLD_SIZE is not set"], id="rank without size"),
        pytest.param(
            TORCHRUN | {"RANK": "4"}, ["RANK=4", "WORLD_SIZE is 4", "0 to 3"], id="rank too big"
        ),
        pytest.param(TORCHRUN | {"RANK": "-1"}, ["RANK=-1"], id="rank negative"),
        pytest.param(TORCHRUN | {"RANK": "one"}, ["RANK=one", "whole number"], id="no number"),
        pytest.param(
            TORCHRUN | {"WORLD_SIZE": "0"}, ["WORLD_SIZE=0", "at least 1"], id="empty world"
        ),
        pytest.param(
            TORCHRUN | {"LOCAL_RANK": "2"},
            ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE is 2"],
            id="local rank too big",
        ),
        pytest.param(
            TORCHRUN | {"LOCAL_WORLD_SIZE": "5"},
            ["LOCAL_WORLD_SIZE=5", "4 ranks"],
            id="local size too big",
        ),
        pytest.param(TORCHRUN | {"GROUP_RANK": "2"}, ["GROUP_RANK=2"], id="node too big"),
        pytest.param(
            without(TORCHRUN, "MASTER_ADDR", "MASTER_PORT"),
            ["rank 3 of 4", "MASTER_ADDR and MASTER_PORT", "rankstep run"],
            id="nowhere to meet",
        ),
        pytest.param(without(TORCHRUN, "MASTER_PORT"), ["MASTER_PORT not set"], id="no port"),
        pytest.param(
            TORCHRUN | {"MASTER_PORT": "70000"}, ["MASTER_PORT=70000", "65535"], id="port too big"
        ),
        pytest.param(
            without(TORCHRUN, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
            ["LOCAL_RANK=1", "LOCAL_WORLD_SIZE is not set"],
            id="local rank without local size",
        ),
        pytest.param(
            PMI | {"MPI_LOCALRANKID": "3"}, ["MPI_LOCALRANKID=3", "GROUP_RANK"], id="no even deal"
        ),
        pytest.param(
            {"OMPI_COMM_WORLD_SIZE": "2"},
            ["OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK is not set"],
            id="Open MPI size without rank",
        ),
        pytest.param(
            without(OPEN_MPI, "PMIX_NAMESPACE"), ["MASTER_PORT not set"], id="no job to derive from"
        ),
        pytest.param(
            SLURM | {"SLURM_PROCID": "8"}, ["SLURM_PROCID=8", "SLURM_NTASKS is 8"], id="SLURM rank"
        ),
        pytest.param(SLURM | {"SLURM_LOCALID": "4"}, ["SLURM_LOCALID=4"], id="SLURM local rank"),
        pytest.param(SLURM | {"SLURM_NNODES": "two"}, ["SLURM_NNODES=two"], id="SLURM no number"),
        pytest.param(
            SLURM | {"WORLD_SIZE": "9"}, ["WORLD_SIZE=9", "slurm", "8 ranks"], id="SLURM disagrees"
        ),
        pytest.param(
            SLURM | {"SLURM_NTASKS": "7", "SLURM_TASKS_PER_NODE": "4(x2)"},
            ["SLURM_NTASKS=7", "SLURM_TASKS_PER_NODE=4(x2)"],
            id="SLURM counts do not add up",
        ),
        pytest.param(
            without(SLURM, "SLURM_JOB_NODELIST"), ["MASTER_ADDR not set"], id="SLURM without hosts"
        ),
        pytest.param(
            without(SLURM, "SLURM_JOB_ID"), ["MASTER_PORT not set"], id="SLURM without job"
        ),
    ],
)
def test_says_what_is_wrong(variables, parts):
    with pytest.raises(WorldError) as caught:
        read_rank_env(variables)
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message
    assert "Next: " in message or "export MASTER_ADDR" in message


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node[01-03,07]", "node01"),
        ("node7", "node7"),
        ("login,node[1-2]", "login"),
        ("rack[1-2]n[3,4].site", "rack1n3.site"),
        ("", ""),
    ],
)
def test_first_host_of_a_slurm_list(hosts, first):
    assert first_host(hosts) == first


def test_slurm_counts():
    assert expand_counts("4(x2),3") == [4, 4, 3]
    with pytest.raises(WorldError, match="notation"):
        expand_counts("4x2")


def test_two_steps_and_two_jobs_get_their_own_ports():
    ports = {
        read_rank_env(SLURM | {"SLURM_STEP_ID": step, "SLURM_JOB_ID": job}).master_port
        for step in "01"
        for job in ("1234567", "1234568")
    }
    assert len(ports) == 4
    assert all(15000 <= port < 25000 for port in ports)


@pytest.mark.parametrize(
    ("variables", "source"),
    [
        (TORCHRUN, "torchrun"),
        (TORCHRUN | {"RANK": "2"}, "adopted"),
        ({"WORLD_SIZE": "4"}, "adopted"),
        ({}, "adopted"),
    ],
)
def test_an_open_group_is_believed_before_the_variables(variables, source):
    env = adopted_rank_env(variables, 3, 4)
    assert (env.rank, env.world_size, env.source) == (3, 4, source)
    assert env.local_rank == (1 if source == "torchrun" else 3)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("localhost", True),
        ("127.1.2.3", True),
        ("[::1]", True),
        ("10.0.0.1", False),
        ("node1", False),
    ],
)
def test_loopback(address, expected):
    assert is_loopback(address) is expected
