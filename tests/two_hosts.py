"""Two hosts on one machine: network namespaces, joined by a virtual cable."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack, contextmanager

import pytest


@contextmanager
def two_hosts(network):
    """Make them, and remove them whatever happens; skip the test where that is not allowed.

    Args:
        network: The first three numbers of their addresses; different for each test file.

    Yields:
        What to put in front of a command for each host, and a function that cuts the cable.
    """
    ip = shutil.which("ip")
    if ip is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2's ip")

    def call(*words):
        return subprocess.run([ip, *words], capture_output=True, text=True, check=False)

    number = network.rpartition(".")[0].rpartition(".")[2]
    names = [f"rankstep-{number}-{os.getpid()}-{node}" for node in range(2)]
    ends = [f"r{number}{os.getpid() % 100_000}{node}" for node in range(2)]
    with ExitStack() as stack:
        for name in names:
            made = call("netns", "add", name)
            if made.returncode:
                pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
            stack.callback(call, "netns", "del", name)
        made = call("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        if made.returncode:
            pytest.skip(f"no virtual cable here: {made.stderr.strip()}")
        stack.callback(call, "link", "del", ends[0])
        for node, (name, end) in enumerate(zip(names, ends, strict=True)):
            for words in (
                ["link", "set", end, "netns", name],
                ["-n", name, "link", "set", end, "name", "cable"],
                ["-n", name, "addr", "add", f"{network}.{node + 1}/24", "dev", "cable"],
                ["-n", name, "link", "set", "cable", "up"],
                ["-n", name, "link", "set", "lo", "up"],
            ):
                done = call(*words)
                assert done.returncode == 0, done.stderr
        yield (
            [[ip, "netns", "exec", name] for name in names],
            lambda: call("-n", names[1], "link", "set", "cable", "down"),
        )
