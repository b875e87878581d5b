"""`rankstep doctor --network`: who reaches whom, and what is said when one does not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from rankstep.cli.main import main
from rankstep.launch.probe import Contact, own_address, tell, try_to_reach
from rankstep.world.env import RankEnv
from rankstep.world.ports import announce, listen

RANKSTEP = Path(sys.executable).parent / "rankstep"
LIMIT = 90
CONTACTS = [
    Contact(rank, rank // 2, f"host{rank // 2}", f"10.0.0.{rank // 2}", 4000 + rank)
    for rank in range(4)
]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_two_nodes_reach_each_other(tmp_path):
    flags = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    nodes = [
        subprocess.Popen(
            [RANKSTEP, "doctor", "--network", *flags, f"--node-rank={node}"],
            env=os.environ | {"RANKSTEP_TOKEN": "secret", "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        outputs = [node.communicate(timeout=LIMIT)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert [node.returncode for node in nodes] == [0, 0], outputs
    lines = outputs[0].splitlines()
    assert lines[0] == "rankstep doctor: 2 ranks on 2 nodes"
    assert lines[3] == "  each rank reaches each other one: 2 connections"
    assert [line.partition(" (")[0] for line in lines[4:]] == [
        "  all-reduce of 4 KiB",
        "  all-reduce of 4 MiB",
    ]


def test_who_cannot_be_reached_is_named():
    broken = replace(CONTACTS[3], failures=((0, "no answer within 5 s"),))
    report, reached = tell([*CONTACTS[:3], broken])
    assert not reached
    assert (
        "rank 3 (node 1, host1) cannot reach rank 0 (node 0, host0) at 10.0.0.0 port 4000: no answer within 5 s"
        in report
    )
    assert "Next: see whether a firewall" in report
    report, reached = tell(CONTACTS)
    assert reached
    assert report.splitlines()[-1] == "  each rank reaches each other one: 12 connections"


def test_a_closed_port_and_a_stranger_are_told_apart():
    other = replace(CONTACTS[1], address="127.0.0.1", port=free_port())
    assert try_to_reach(other, 0) == "Connection refused"
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0")

        thread = threading.Thread(target=answer)
        thread.start()
        port = server.getsockname()[1]
        assert try_to_reach(replace(other, port=port), 0) == "somebody else answers rank 0 there"
        thread.join()


def test_ranks_of_one_host_meet_on_loopback():
    assert own_address(RankEnv(0, 0, 2, 2, 0, 1, "10.0.0.1", 1, "env")) == "127.0.0.1"
    assert own_address(RankEnv(0, 0, 2, 1, 0, 2, "localhost", 1, "env")) == "127.0.0.1"


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("127.0.0.1", ""),
        ("localhost", ""),
        # This is nobody's address (RFC 5737).
        ("192.0.2.1", "rankstep: rank 0 listens on all interfaces, port {}, for the other hosts\n"),
        ("a-name", "rankstep: rank 0 listens on all interfaces, port {}, for the other hosts\n"),
    ],
)
def test_who_listens_to_other_hosts_says_so(address, told, capsys, monkeypatch):
    monkeypatch.setenv("RANKSTEP_TOKEN", "secret")
    with listen(address, 0) as listener:
        announce("rank 0", listener)
        port = listener.getsockname()[1]
    assert capsys.readouterr().err == told.format(port)


def test_who_listens_without_a_token_says_so(capsys):
    with listen("a-name", 0) as listener:
        announce("rank 0", listener)
    assert "RANKSTEP_TOKEN is not set, so no secret is compared" in capsys.readouterr().err


def test_a_numeric_address_of_this_host_is_enough():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))
        except OSError:
            pytest.skip("this host has no address but loopback")
        own = probe.getsockname()[0]
    with listen(own, 0) as listener:
        assert listener.getsockname()[0] == own


@pytest.mark.parametrize(
    ("words", "said"),
    [(["train.py"], "takes no script, and got train.py"), (["--timeout", "0"], "above 0")],
)
def test_wrong_words(words, said, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--network", *words])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
