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


class Noted:
    """A dataset whose loading workers say who they are."""

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        from torch.utils.data import get_worker_info

        note_pid(self.folder, os.getpid(), f"worker{RANK}-{get_worker_info().id}")
        return index


def loads(folder):
    from torch.utils.data import DataLoader

    batches = iter(DataLoader(Noted(folder), num_workers=2))
    next(batches)
    hang(folder)


def write(_):
    for line in range(5000):
        print(f"line {line} of rank {RANK}")
    sys.stderr.write(f"bar 1\rbar 2\rbar 3\nno end of rank {RANK}")


def say(_):
    print("all say this")
    print(f"only {RANK} says this")


def wait_for(folder, name):
    end = time.monotonic() + 60
    while not Path(folder, name).exists() and time.monotonic() < end:
        time.sleep(0.01)


def progress(folder):
    """Rank 1 writes a line while rank 0's progress bar stands on the screen."""
    if RANK == 1:
        wait_for(folder, "drawn.pid")
        print("a line")
        return
    sys.stdout.write("\rstep 1 of 2")
    sys.stdout.flush()
    note_pid(folder, 0, "drawn")
    wait_for(folder, "seen.pid")
    sys.stdout.write("\rstep 2 of 2\n")


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
    "loads": loads,
    "write": write,
    "say": say,
    "progress": progress,
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
