"""The job that `soak.py` disturbs: its command, its ranks, what they say, and what they may leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soak_training import CHECKPOINTS, PIPE, PLAN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from soak_training import Training

MARK = "RANKSTEP_SOAK"
"""In the environment of each process of the job, with a word that no other job has."""

RANKS = 2
PATIENCE_S = 120.0
"""What has not happened by then does not happen any more."""

GONE_S = 10.0
"""So long processes and files may take to go after the launcher's end."""

_SCRIPT = Path(__file__).with_name("soak_training.py")
_RANKSTEP = Path(sys.executable).with_name("rankstep")
_LISTENING = "0A"
_NUMBERS = re.compile(r"\d+")
_STEP = re.compile(r"step-(\d+)")


class WrongError(Exception):
    """Something that must not happen has happened, and the training cannot go on; the text says what."""


class DifferentError(Exception):
    """A step has other bits than in the run that nobody disturbs; the text says which."""


class LimitError(Exception):
    """The soak's time is over."""


class EndedError(Exception):
    """The launcher has ended while somebody waited for its ranks."""


# ---------------------------------------------------------------- processes


@dataclass(frozen=True)
class Process:
    """One living process of the job."""

    pid: int
    parent: int
    rank: int | None
    command: str


def processes(mark: str) -> Iterator[Process]:
    """Find the living processes that carry a mark."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            variables = (path / "environ").read_bytes().split(b"\0")
            if f"{MARK}={mark}".encode() not in variables:
                continue
            state, parent = (
                (path / "stat").read_text("utf-8", "replace").rpartition(") ")[2].split()[:2]
            )
            if state in "ZX":
                continue
            rank = [int(each[5:]) for each in variables if each.startswith(b"RANK=")]
            command = (
                (path / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            )
            yield Process(
                int(path.name), int(parent), rank[0] if rank else None, command.strip()[:80]
            )


def dead(pid: int) -> bool:
    """Whether a process runs no more; a zombie does not."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(") ")[2][0] in "ZX"
        )
    except OSError:
        return True


class Traces:
    """What marked processes hold at the moments somebody looks, to be asked for when they are gone.

    Other programs of the machine come and go meanwhile; what is theirs is not counted.

    Args:
        mark: The job's.
        temporary: The job's own temporary folder; whatever is in it at the end was left behind.
    """

    def __init__(self, mark: str, temporary: Path) -> None:
        self._mark = mark
        self._temporary = temporary
        self._pids: set[int] = set()
        self._sockets: dict[str, str] = {}
        self._segments: set[str] = set()
        self._segments_before = set(_shm())

    def look(self) -> None:
        """Note their numbers, the ports on which they listen, and their named shared memory."""
        listening = _listening()
        for process in processes(self._mark):
            self._pids.add(process.pid)
            for held in _held(process.pid):
                if held in listening:
                    self._sockets[held] = listening[held]
                elif held.startswith("/dev/shm/"):  # noqa: S108 - looked for, not written
                    self._segments.add(held.removeprefix("/dev/shm/"))  # noqa: S108

    def left(self, settle_s: float = GONE_S) -> list[str]:
        """Name what is still there after a while."""
        until = time.monotonic() + settle_s
        while (found := self._found()) and time.monotonic() < until:
            time.sleep(0.05)
        return found

    def _found(self) -> list[str]:
        found = [f"process {each.pid} ({each.command})" for each in processes(self._mark)]
        listening = _listening()
        found += [f"port {port}" for held, port in self._sockets.items() if held in listening]
        for name in sorted(set(_shm()) - self._segments_before):
            ours = name in self._segments or self._pids & set(map(int, _NUMBERS.findall(name)))
            found += [f"shared memory {name}"] if ours else []
        return found + [f"file {path.name}" for path in sorted(self._temporary.iterdir())]


def _shm() -> list[str]:
    return [path.name for path in Path("/dev/shm").iterdir()]  # noqa: S108


def _listening() -> dict[str, str]:
    """Give the sockets that listen, as `/proc` names them, and their ports."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == _LISTENING:
                found[f"socket:[{rest[5]}]"] = str(int(local.rpartition(":")[2], 16))
    return found


def _held(pid: int) -> Iterator[str]:
    """Yield what a process has open or mapped."""
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                yield str(fd.readlink())
        for line in Path(f"/proc/{pid}/maps").read_text("utf-8", "replace").splitlines():
            yield line.split(maxsplit=5)[-1]


# ---------------------------------------------------------------- the job


class Job:
    """One training: its command is started as often as it takes, and everything its ranks say is compared.

    Args:
        folder: Of its own; has the data already.
        training: Which.
        seed: Of the training.
        epochs: So long.
        whole: What the ranks have said of each step in the run that nobody disturbs, to compare with; None: this is that
            run, and it saves nothing.
        deadline: When the soak's time is over, by the monotonic clock.

    Attributes:
        folder: See above.
        training: See above.
        told: What each rank has said of each step: loss and samples.
        repeated: Steps of rank 0 that were taken again.
        lives: Times that ranks have begun to train.
        starts: Times that the command was started.
        begun: What rank 0 said when it last began, and what was newest and saved before.
        newest: The last step of this life that a rank told of.
        saved: The last step of this life that is on the disk for sure.
        since: Steps of rank 0 in this life since the last fault.
        unsaved: What the ranks said of checkpoints that could not be written, since the last fault.
        said: What stood on the screen since the last fault, by line.
        damaged: Checkpoints that were damaged, by name, inode and time.
    """

    def __init__(
        self,
        folder: Path,
        training: Training,
        *,
        seed: int,
        epochs: int,
        whole: dict[tuple[int, int], tuple[str, int]] | None = None,
        deadline: float = float("inf"),
    ) -> None:
        self.folder = folder
        self.deadline = deadline
        self.training = training
        self.whole = whole
        self.told: dict[tuple[int, int], tuple[str, int]] = {}
        self.repeated = self.lives = self.starts = 0
        self.begun: dict[str, Any] = {}
        self.newest = self.saved = self.since = 0
        self.unsaved: list[str] = []
        self.said: list[str] = []
        self.damaged: set[tuple[str, int, int]] = set()
        self._began = time.monotonic()
        self.mark = secrets.token_hex(8)
        self._launcher: subprocess.Popen[bytes] | None = None
        self._rest = {"pipe": b"", "screen": b""}
        plan = {
            "training": asdict(training),
            "seed": seed,
            "epochs": epochs,
            "saves": whole is not None,
        }
        (folder / PLAN).write_text(json.dumps(plan), encoding="utf-8")
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        os.mkfifo(folder / PIPE, 0o600)
        # For writing, too: so it never comes to an end.
        self._pipe = os.open(folder / PIPE, os.O_RDWR | os.O_NONBLOCK)
        self.traces = Traces(self.mark, self.temporary)

    # ---------------------------------------------------------------- the command

    def start(self, max_restarts: int) -> None:
        """Start the command."""
        command = [
            *(_RANKSTEP, "run", f"--nproc-per-node={RANKS}", f"--max-restarts={max_restarts}"),
            *(_SCRIPT, self.folder),
        ]
        self._launcher = subprocess.Popen(
            [str(word) for word in command],
            env=os.environ
            | {
                MARK: self.mark,
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(self.temporary),
                # torch makes it wherever its optimizers are used, and leaves it on purpose.
                "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache"),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.starts += 1

    def signal(self, number: int) -> None:
        """Send the launcher a signal."""
        if self._launcher is not None:
            self._launcher.send_signal(number)

    def ended(self) -> int | None:
        """Return the launcher's exit code if it has ended."""
        return None if self._launcher is None else self._launcher.poll()

    def ranks(self) -> dict[int, int]:
        """Find the ranks' processes: the launcher's children that have a number."""
        parent = None if self._launcher is None else self._launcher.pid
        return {
            each.rank: each.pid
            for each in processes(self.mark)
            if each.parent == parent and each.rank is not None
        }

    def workers(self, rank: int) -> list[int]:
        """Find a rank's loader workers."""
        parent = self.ranks().get(rank)
        return sorted(each.pid for each in processes(self.mark) if each.parent == parent)

    def close(self) -> None:
        """End it whatever it does, and everything that belongs to it."""
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait()
            if self._launcher.stdout is not None:
                self._launcher.stdout.close()
        for _ in range(100):
            living = list(processes(self.mark))
            for each in living:
                with contextlib.suppress(OSError):
                    os.kill(each.pid, signal.SIGKILL)
            if not living:
                break
            time.sleep(0.05)
        os.close(self._pipe)

    # ---------------------------------------------------------------- hearing

    def hear(self, seconds: float) -> bool:
        """Take in what ranks and launcher say; wait so long at most until there is something, and tell whether there was."""
        screen = None if self._launcher is None else self._launcher.stdout
        sources: dict[int, str] = {self._pipe: "pipe"}
        if screen is not None and not screen.closed:
            sources[screen.fileno()] = "screen"
        ready, _, _ = select.select(list(sources), [], [], max(0.0, seconds))
        for fd in ready:
            name = sources[fd]
            data = os.read(fd, 1 << 16)
            if not data and screen is not None:
                screen.close()
            *lines, self._rest[name] = (self._rest[name] + data).split(b"\n")
            for line in lines:
                if name == "pipe":
                    self._note(json.loads(line))
                else:
                    self._see(line.decode("utf-8", "replace"))
        return bool(ready)

    def _see(self, line: str) -> None:
        self.said.append(line)
        with (self.folder / "output").open("a", encoding="utf-8") as file:
            file.write(f"{time.monotonic() - self._began:8.2f} {line}\n")

    def forget(self) -> None:
        """A fault comes: what was said before has nothing to do with it."""
        while self.hear(0.0):
            pass
        self.said.clear()
        self.unsaved.clear()

    def pause(self, seconds: float) -> None:
        """Let time pass, and listen."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.hear(left)

    def wait(
        self,
        until: Callable[[], Any],
        what: str,
        *,
        needs_launcher: bool = True,
        patience_s: float = PATIENCE_S,
    ) -> Any:
        """Listen until something is so, and return it.

        Raises:
            EndedError: The launcher has ended.
            WrongError: It does not happen.
            LimitError: The soak's time is over.
        """
        give_up = time.monotonic() + patience_s
        while not (found := until()):
            ended = self.ended() is not None
            self.hear(0.0 if ended else 0.02)
            if ended and needs_launcher and not (found := until()):
                self.drain()
                if not (found := until()):
                    raise EndedError(f"exit code {self.ended()}, last words {self.said[-3:]}")
                return found
            if time.monotonic() > self.deadline:
                raise LimitError
            if time.monotonic() > give_up:
                raise WrongError(f"waited {patience_s:.0f} s for {what}; {self._standing()}")
        return found

    def drain(self) -> None:
        """Take in all that is left of an ended launcher's words."""
        screen = None if self._launcher is None else self._launcher.stdout
        give_up = time.monotonic() + GONE_S
        while screen is not None and not screen.closed and time.monotonic() < give_up:
            self.hear(0.1)
        while self.hear(0.0):
            pass

    def _standing(self) -> str:
        ranks = ", ".join(f"rank {rank} is process {pid}" for rank, pid in self.ranks().items())
        return (
            f"launcher: {self.ended()}; {ranks or 'no rank is there'}; last words: {self.said[-3:]}"
        )

    # ---------------------------------------------------------------- what ranks tell

    def _note(self, told: dict[str, Any]) -> None:
        rank = told["rank"]
        if told["is"] == "begun" and rank == 0:
            self.lives += 1
            self.begun = told | {"newest": self.newest, "saved": self.saved}
            self.newest = self.saved = told["step"]
            self.since = 0
        elif told["is"] == "step":
            self._step(rank, told["step"], (told["loss"], told["samples"]))
        elif told["is"] == "saved" and rank == 0:
            self.saved = max(self.saved, told["step"])
        elif told["is"] == "unsaved":
            self.unsaved.append(told["error"])

    def _step(self, rank: int, step: int, facts: tuple[str, int]) -> None:
        self.newest = max(self.newest, step)
        if rank == 0:
            self.since += 1
            self.repeated += (rank, step) in self.told
        known = (self.told if self.whole is None else self.whole).get((rank, step))
        if known is not None and known != facts:
            loss, known_loss = (float.fromhex(each[0]) for each in (facts, known))
            what = f"the loss is {loss!r} and not {known_loss!r}"
            samples = "the same" if facts[1] == known[1] else "other"
            raise DifferentError(
                f"{self.training.name}: step {step} on rank {rank}: {what}, from {samples} samples"
            )
        self.told[rank, step] = facts

    # ---------------------------------------------------------------- its files

    def order(self, rank: int, do: str, number: int, detail: int) -> None:
        """Have a rank do something to itself."""
        if do == "raise_data":
            name, text = f"data-order-{rank}", str(number)
        else:
            name, text = f"order-{rank}", json.dumps({"do": do, "number": number, "detail": detail})
        part = self.folder / f"{name}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(self.folder / name)

    def orders(self) -> list[str]:
        """Name the orders that nobody has taken."""
        return sorted(path.name for path in self.folder.glob("*order-*"))

    def checkpoints(self) -> dict[int, Path]:
        """Find what is named like a checkpoint, by step, the newest first."""
        found = {}
        for path in (self.folder / CHECKPOINTS).glob("step-*"):
            match = _STEP.fullmatch(path.name)
            if match:
                found[int(match[1])] = path
        return dict(sorted(found.items(), reverse=True))

    def results(self) -> list[dict[str, str]]:
        """Read what the ranks had at the end."""
        return [
            json.loads((self.folder / f"result-{rank}.json").read_text(encoding="utf-8"))
            for rank in range(RANKS)
        ]

    def left(self) -> list[str]:
        """Name what is there that should not be, once the command has ended."""
        stray = [
            f"{CHECKPOINTS}/{path.name}"
            for path in sorted((self.folder / CHECKPOINTS).glob(".*"))
            if self.ended() == 0
        ]
        return self.traces.left() + stray


def differences(whole: list[dict[str, str]], resumed: list[dict[str, str]]) -> list[str]:
    """Name what is not equal, bit for bit, at the ends of two runs."""
    return [
        f"{name} of rank {rank}"
        for rank, (one, other) in enumerate(zip(whole, resumed, strict=True))
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name)
    ]
