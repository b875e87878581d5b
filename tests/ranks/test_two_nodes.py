"""Two launchers as two nodes with two ranks each: the places, and a sum across the nodes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from two_hosts import two_hosts

SCRIPT = Path(__file__).parent / "scripts" / "two_nodes.py"
RANKSTEP = Path(sys.executable).parent / "rankstep"
LIMIT = 90
# Node, local rank, rank: local ranks start anew on each node, ranks do not.
PLACES = [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def run_nodes(folder, prefixes, flags):
    """Start one launcher per node, each behind the words that enter its node, and see all succeed."""
    nodes = [
        subprocess.Popen(
            [
                *prefix,
                RANKSTEP,
                "run",
                "--nproc-per-node=2",
                *flags,
                f"--node-rank={node}",
                SCRIPT,
                folder,
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node, prefix in enumerate(prefixes)
    ]
    try:
        output = "".join(node.communicate(timeout=LIMIT)[0] for node in nodes)
        assert [node.returncode for node in nodes] == [0, 0], output
    finally:
        for node in nodes:
            # Its ranks go with it.
            node.kill()
            node.wait()


def check_places(folder):
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]
    assert [(place["node"], place["local_rank"], place["rank"]) for place in found] == PLACES
    for place in found:
        assert (place["world_size"], place["local_world_size"], place["node_count"]) == (4, 2, 2)
        assert place["sum"] == 1 + 2 + 3 + 4
    for node in range(2):
        assert (folder / f"node{node}").read_text().split() == ["0", "1"]


def test_two_launchers_on_one_host(tmp_path):
    flags = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    run_nodes(tmp_path, [[], []], flags)
    check_places(tmp_path)


@pytest.fixture
def hosts():
    """What to put in front of a command for each of two hosts."""
    with two_hosts("10.77.0") as (prefixes, _):
        yield prefixes


@pytest.mark.netns
def test_two_hosts_on_one_cable(hosts, tmp_path):
    # No interface is named: the ranks find the one that leads to rank 0's host.
    flags = ["--nnodes=2", "--master-addr=10.77.0.1", "--master-port=29500"]
    run_nodes(tmp_path, hosts, flags)
    check_places(tmp_path)
