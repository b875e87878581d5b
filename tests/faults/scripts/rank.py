"""A rank that fails, hangs or writes as its first argument says. Needs no torch, so it starts at once."""
# ruff: noqa: T201

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

RANK = int(os.environ["RANK"])
CHILD = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"


def note_pid(folder, pid, name):
    """Write a process's number where the test finds it, whole or not at all."""
    part = Path(folder, f"{name}.part")
    part.write_text(str(pid))
    part.rename(Path(folder, f"{name}.pid"))


def hang(folder):
    note_pid(folder, os.getpid(), f"rank{RANK}")
    time.sleep(60)


def stubborn(folder):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", CHILD])
    note_pid(folder, child.pid, f"child{RANK}")
    hang(folder)


def write(_):
    for line in range(5000):
        print(f"line {line} of rank {RANK}")
    sys.stderr.write(f"bar 1\rbar 2\rbar 3\nno end of rank {RANK}")


def terminal(_):
    print(f"rank {RANK} has a terminal: {sys.stdout.isatty()}")


def restart(_):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and RANK == 1:
        sys.exit(9)


def lose(batch):
    message = f"cannot use batch {batch}\nsecond line"
    raise ValueError(message)


ALL_RANKS = {
    "hang": hang,
    "stubborn": stubborn,
    "write": write,
    "terminal": terminal,
    "restart": restart,
}


def closes(_):
    """Rank 1 fails inside world(), whose closing makes rank 0, which waits for it, fail as well."""
    from torch import distributed as dist

    import rankstep

    with rankstep.world():
        dist.barrier()
        if RANK == 1:
            lose(8)
        dist.barrier()


ALL_RANKS["closes"] = closes

RANK_1 = {
    "raise": lambda: lose(7),
    "missing": lambda: Path("no such file").read_text(),
    "exit": lambda: sys.exit(3),
    "vanish": lambda: os._exit(5),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def main(how, folder):
    print(f"rank {RANK} begins")
    if how in ALL_RANKS:
        ALL_RANKS[how](folder)
    elif RANK == 1:
        RANK_1[how]()
    else:
        hang(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
