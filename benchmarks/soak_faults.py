"""The faults that `soak.py` knows: what each does, to whom, and what must come of it."""

from __future__ import annotations

import contextlib
import enum
import os
import random
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from soak_job import dead

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from soak_job import Job
    from soak_training import Training

STOPPED_S, LONG_STOPPED_S = 2.5, 7.5
"""Stopped at most so long; every fourth time for longer than the guard's alarm, which must say so and wait."""


class Whom(enum.Enum):
    """Whom a fault befalls."""

    RANK = "a rank"
    WRITER = "rank 0, which writes the checkpoints"
    ALL = "the job"


class End(enum.Enum):
    """What a fault ends."""

    NOTHING = "nothing"
    RANKS = "the ranks"
    LAUNCHER = "the launcher"


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        number: Counted from 1.
        kind: What it does, by name.
        rank: To whom.
        after: So many steps after the one before, or after a restart.
        delay_s: And so much later, from outside.
        detail: Chooses what a kind leaves open.
    """

    number: int
    kind: str
    rank: int
    after: int
    delay_s: float
    detail: int


# ---------------------------------------------------------------- what happens


def kill_rank(job: Job, fault: Fault) -> None:
    os.kill(job.wait(lambda: job.ranks().get(fault.rank), "a rank"), signal.SIGKILL)


def kill_all(job: Job, _: Fault) -> None:
    pids = list(job.ranks().values())
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    job.wait(lambda: all(map(dead, pids)), "killed ranks", needs_launcher=False)


def kill_launcher(job: Job, _: Fault) -> None:
    job.signal(signal.SIGKILL)


def kill_worker(job: Job, fault: Fault) -> None:
    workers = job.wait(lambda: job.workers(fault.rank), "loader workers")
    os.kill(workers[fault.detail % len(workers)], signal.SIGKILL)


def stop(job: Job, fault: Fault) -> None:
    pid = job.ranks()[fault.rank]
    os.kill(pid, signal.SIGSTOP)
    try:
        job.pause(stopped_s(fault))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def stopped_s(fault: Fault) -> float:
    """Say for how long a rank is stopped."""
    share = fault.detail % 1000 / 1000
    return LONG_STOPPED_S if share < 0.25 else STOPPED_S * share


def preempt(job: Job, _: Fault) -> None:
    job.signal(signal.SIGTERM)


def preempt_rank(job: Job, fault: Fault) -> None:
    os.kill(job.ranks()[fault.rank], signal.SIGTERM)


def interrupt(job: Job, _: Fault) -> None:
    job.signal(signal.SIGINT)


def ordered(job: Job, fault: Fault) -> None:
    """Let the rank do it itself, where it can only be done from inside."""
    job.order(fault.rank, fault.kind, fault.number, fault.detail)


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Args:
        story: What it is.
        act: Does it.
        end: What ends by it.
        code: The launcher's exit code, if that ends.
        says: What stands on the screen if it is named there; empty: nobody is left to name it, or nothing has ended.
        only: Whether a training knows it.
        whom: It befalls.
        steps: So much longer it makes a training: more than may pass until the next one, so that none is over too soon.
    """

    story: str
    act: Callable[[Job, Fault], None]
    end: End
    code: int = 0
    says: str = ""
    only: Callable[[Training], bool] = lambda _: True
    whom: Whom = Whom.RANK
    steps: int = 30


UNTIL_HEARD = 110
"""The ranks ask each other about four times a second, and take the steps in between."""

KILLED = 128 + signal.SIGKILL
BY_KILL = r"rank {rank} .*(signal 9|SIGKILL)"
BY_ERROR = r"rank {rank} failed.*soak: fault {number} in"
KINDS: dict[str, Kind] = {
    "kill_rank": Kind("kill -9 of a rank", kill_rank, End.RANKS, KILLED, BY_KILL),
    "kill_all": Kind("kill -9 of all ranks", kill_all, End.RANKS, KILLED, whom=Whom.ALL),
    "kill_starting": Kind(
        "kill -9 of a rank while the ranks start", kill_rank, End.RANKS, KILLED, BY_KILL
    ),
    "kill_backward": Kind("kill -9 inside backward", ordered, End.RANKS, KILLED, BY_KILL),
    "kill_saving": Kind(
        "kill -9 inside the writing of a checkpoint",
        *(ordered, End.RANKS, KILLED, BY_KILL),
        whom=Whom.WRITER,
    ),
    "kill_launcher": Kind(
        "kill -9 of the launcher", kill_launcher, End.LAUNCHER, -signal.SIGKILL, whom=Whom.ALL
    ),
    "kill_worker": Kind(
        "kill -9 of a loader worker",
        *(kill_worker, End.RANKS, 1, r"rank {rank} failed.*worker"),
        only=lambda training: training.workers > 0,
    ),
    "stop": Kind(
        "SIGSTOP, and SIGCONT a moment later",
        *(stop, End.NOTHING, 0, r"rank {rank} has not come: a signal has stopped it"),
    ),
    "preempt": Kind(
        "SIGTERM to the launcher",
        *(preempt, End.LAUNCHER, 128 + signal.SIGTERM, "stopped by SIGTERM"),
        whom=Whom.ALL,
        steps=UNTIL_HEARD,
    ),
    "preempt_rank": Kind(
        "SIGTERM to a rank",
        *(preempt_rank, End.RANKS, 128 + signal.SIGTERM),
        steps=UNTIL_HEARD,
    ),
    "interrupt": Kind(
        "Ctrl-C",
        *(interrupt, End.LAUNCHER, 128 + signal.SIGINT, "stopped by SIGINT"),
        whom=Whom.ALL,
    ),
    "raise_forward": Kind("an exception in forward", ordered, End.RANKS, 1, BY_ERROR),
    "raise_backward": Kind("an exception in backward", ordered, End.RANKS, 1, BY_ERROR),
    "raise_data": Kind("an exception in the data", ordered, End.RANKS, 1, BY_ERROR),
    "fill_disk": Kind(
        "a checkpoint finds the disk full",
        *(ordered, End.NOTHING, 0, "could not be written"),
        whom=Whom.WRITER,
    ),
    "damage": Kind(
        "the newest checkpoint is damaged",
        *(kill_all, End.RANKS, KILLED, r"{name} was passed over"),
        whom=Whom.ALL,
    ),
}


def damage(job: Job, detail: int) -> tuple[int, list[str], str]:
    """Damage the newest checkpoint; return the step before it, the names that are to be passed over, and what was done."""
    (_, path), (before, _), *_ = whole(job)
    dice = random.Random(detail)
    file, how = dice.choice(sorted(path.iterdir())), dice.choice(["cut", "changed", "deleted"])
    size = file.stat().st_size
    if how == "cut":
        os.truncate(file, dice.randrange(size))
    elif how == "changed":
        with file.open("r+b") as opened:
            place = dice.randrange(size)
            opened.seek(place)
            byte = opened.read(1)[0]
            opened.seek(place)
            opened.write(bytes([byte ^ 0xFF]))
    else:
        file.unlink()
    job.damaged.add(identity(path))
    # One that was damaged earlier may not have been written again.
    passed_over = [each.name for step, each in job.checkpoints().items() if step > before]
    return before, passed_over, f"{path.name}/{file.name} {how}"


def whole(job: Job) -> list[tuple[int, Path]]:
    """Find the checkpoints that nobody has damaged, the newest first."""
    found = []
    for step, path in job.checkpoints().items():
        with contextlib.suppress(FileNotFoundError):  # an old one may be deleted meanwhile
            found += [] if identity(path) in job.damaged else [(step, path)]
    return found


def identity(path: Path) -> tuple[str, int, int]:
    """Tell a checkpoint from a later one of the same step."""
    facts = path.stat()
    return path.name, facts.st_ino, facts.st_mtime_ns
