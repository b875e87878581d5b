"""What every test gets: living ranks, fixed seeds, and a guard that fails it for anything it leaves behind."""

from __future__ import annotations

import gc
import multiprocessing.util
import os
import random
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass, fields
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
import torch.distributed as dist

from rankstep.testing import close_pools, get_pool
from rankstep.testing._member import helper_pids
from rankstep.testing.ranks import kept_ports

# The same examples on every machine, and no limit in seconds: the machines are shared.
hypothesis.settings.register_profile("rankstep", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("rankstep")

LISTENING = "0A"
SETTLE_S = 1.0


@pytest.fixture(scope="session")
def ranks():
    """Give ``ranks(n)``, the living pool of n ranks; see `rankstep.testing.ranks`."""
    yield get_pool
    close_pools()


@pytest.fixture(autouse=True, scope="session")
def temp_folder(tmp_path_factory):
    """Use a temporary folder of our own, so that only this run's leftovers are found in it."""
    # These outlive the folder, so they are made elsewhere: pytest's own folders and that of the ranks' sockets.
    tmp_path_factory.getbasetemp()
    multiprocessing.util.get_temp_dir()
    folder = tempfile.mkdtemp(prefix="rankstep-tests-")
    before, tempfile.tempdir = tempfile.tempdir, folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        yield folder
    tempfile.tempdir = before
    close_pools()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def clean_test(temp_folder):
    """Start from fixed seeds, and fail a test that leaves something behind."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (the global state is what the code under test draws from)
    torch.manual_seed(0)
    environment = _environment()
    before = Held.now(temp_folder)
    yield
    leaks = [*_restore_environment(environment), *_close_group()]
    until = time.monotonic() + SETTLE_S
    # Threads and sockets of native code end a moment after their owner.
    while (held := before.added(Held.now(temp_folder))) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.02)
    leaks += held
    if leaks:
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)


@dataclass(frozen=True)
class Held:
    """What this process holds at one moment."""

    threads: frozenset[str]
    processes: frozenset[str]
    ports: frozenset[str]
    files: frozenset[str]

    @classmethod
    def now(cls, temp_folder):
        """Look around."""
        threads = {f"{t.name} ({t.ident})" for t in threading.enumerate() if not t.daemon}
        files = {path.name for path in Path(temp_folder).glob("rankstep-*")}
        return cls(*map(frozenset, (threads, _processes(), _ports(), files)))

    def added(self, later):
        """Name what came since."""
        return [
            f"{field.name} {', '.join(sorted(new))}"
            for field in fields(self)
            if (new := getattr(later, field.name) - getattr(self, field.name))
        ]


def _environment():
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _restore_environment(before):
    after = _environment()
    changed = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [f"environment variable {name}" for name in changed]


def _close_group():
    if not dist.is_initialized():
        return []
    dist.destroy_process_group()
    return ["an open process group"]


def _processes():
    """Name our living child processes but those that multiprocessing keeps for the pools."""
    ours = str(os.getpid())
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = status.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        name, _, rest = text.partition(" (")[2].rpartition(") ")
        state, parent, *_ = rest.split()
        pid = int(status.parent.name)
        if parent == ours and state != "Z" and pid not in helper_pids():
            found.add(f"{name} ({pid})")
    return found


def _ports():
    """Name the ports on which this process listens but those of the shared pools."""
    listening = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENING:
                listening[f"socket:[{rest[5]}]"] = int(local.rpartition(":")[2], 16)
    held = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            held.add(str(fd.readlink()))
        except OSError:
            continue
    return {str(port) for inode, port in listening.items() if inode in held} - {
        str(port) for port in kept_ports()
    }
