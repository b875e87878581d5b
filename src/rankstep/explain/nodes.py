"""A second world for part 1: two launchers on this machine, each told that it is a node with two ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankstep.world.ports import listen

if TYPE_CHECKING:
    from collections.abc import Callable

NODES = 2
RANKS_PER_NODE = 2

_ADDRESS = "127.0.0.1"
_PATIENCE_S = 120.0
_GRACE_S = 10.0
_LAUNCHER = "import sys; from rankstep.cli.main import main; sys.exit(main())"
# A port that was free may be taken before the launcher has it: then another one is tried.
_TRIES = 2


@dataclass(frozen=True, slots=True)
class _Ended:
    """How the launchers ended: the codes, and the last thing that one of them said."""

    codes: list[int | None]
    said: str


def two_nodes(member: str = "rankstep.explain.node_member") -> dict[str, Any]:
    """Start ranks on two nodes, for real, and return where each of them found itself.

    A node is what a launcher says it is: each of the two numbers its own ranks from 0, and the meeting point makes one
    world of them. Several machines are started in the same way, by one launcher on each.

    Args:
        member: The module that each rank runs.

    Returns:
        ``nodes``, ``ranks_per_node``, ``seconds``, ``ranks`` in the order of their ranks, and ``problem``: None, or why
        there are no ranks.
    """
    began = time.monotonic()
    ended = _Ended([], "")
    ranks: list[dict[str, Any]] = []
    for _ in range(_TRIES):
        with ExitStack() as stack:
            folder = Path(tempfile.mkdtemp(prefix="rankstep-explain-nodes-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            ended = _run(folder, member)
            files = [folder / f"rank-{rank}.json" for rank in range(NODES * RANKS_PER_NODE)]
            if ended.codes == [0] * NODES and all(file.is_file() for file in files):
                ranks = [json.loads(file.read_text(encoding="utf-8")) for file in files]
                break
    return {
        "nodes": NODES,
        "ranks_per_node": RANKS_PER_NODE,
        "seconds": time.monotonic() - began,
        "ranks": ranks,
        "problem": None if ranks else ended.said or f"the launchers ended with {ended.codes}",
    }


def _run(folder: Path, member: str) -> _Ended:
    with listen(_ADDRESS, 0) as free:
        port = free.getsockname()[1]
    launchers: list[subprocess.Popen[bytes]] = []
    try:
        for node in range(NODES):
            with (folder / f"node-{node}.log").open("wb") as log:
                launchers.append(
                    subprocess.Popen(  # noqa: S603 - our own program
                        _command(node, port, member, folder),
                        env=_environment(),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        _wait(launchers, lambda: any(launcher.returncode for launcher in launchers))
    finally:
        _stop(launchers)
    said = [_last_line(folder / f"node-{node}.log") for node in range(NODES)]
    codes = [launcher.returncode for launcher in launchers]
    return _Ended(codes, next(filter(None, said), ""))


def _command(node: int, port: int, member: str, folder: Path) -> list[str]:
    flags = {
        "nnodes": NODES,
        "node-rank": node,
        "nproc-per-node": RANKS_PER_NODE,
        "master-addr": _ADDRESS,
        "master-port": port,
    }
    words = [f"--{name}={value}" for name, value in flags.items()]
    return [sys.executable, "-c", _LAUNCHER, "run", *words, "-m", member, str(folder)]


def _environment() -> dict[str, str]:
    """Leave out what a launcher above this command may have set, and what would record this run."""
    ours = ("TORCHELASTIC_", "PET_", "RANKSTEP_TRACE")
    places = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(ours) and name not in places
    }


def _wait(launchers: list[subprocess.Popen[bytes]], failed: Callable[[], bool]) -> None:
    """Wait until both have ended, one has failed, or it has taken too long."""
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until and not failed():
        if all([launcher.poll() is not None for launcher in launchers]):  # noqa: C419 - ask every one
            return
        time.sleep(0.02)


def _stop(launchers: list[subprocess.Popen[bytes]]) -> None:
    """End what still runs: a launcher takes its ranks with it."""
    running = [launcher for launcher in launchers if launcher.poll() is None]
    for launcher in running:
        launcher.send_signal(signal.SIGTERM)
    for launcher in running:
        try:
            launcher.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
