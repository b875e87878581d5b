"""The jobs of `faults.py`: start one, let a fault happen in it, and see what its ranks said and what is left of it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from faults_training import GROUPS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RANKS = 3
ALARM_S = 5.0
BEYOND_S = 5.0
"""The bar: so long after the alarm time every surviving rank has spoken."""
LEFT_S = 5.0
"""So long the kernel may take to clear away what has ended."""
LONGEST = 400
TRAINING = Path(__file__).with_name("faults_training.py")
BIN = Path(sys.executable).parent
SHM = Path("/dev/shm")  # noqa: S108 - looked at only
SAID_AT_END = re.compile(r"^rankstep: (rank \d+ failed first|later|traceback of|stopped by)")
SPEAKERS = re.compile(r"^\[ranks? ?([\d, -]+?)(?: x\d+)?\]:? ?")
LAUNCHER = re.compile(r"^[EWI]\d{4} ")
# What is left of a traceback without its frames are its last lines.
DROPPED = re.compile(
    r"^\s|^\[W|^$|^Traceback|^Original Traceback|^During handling|^The above exception|^rankstep: traceback of|^[-=*]+$"
    r"|^Failures:|^\[\d+\]:|^Root Cause|^Setting OMP_NUM|^\[Gloo\]|^\*+|^Fatal Python|^Time +:|^time +:|host +:|^rank +:|^exitcode|^error_file|^traceback :"
)


@dataclass(frozen=True)
class Row:
    """One fault.

    Attributes:
        row: Its number in the table.
        fault: Its name in `faults_training.py`.
        title: In words.
        said: What Rankstep's ranks must say.
        code: The exit code of Rankstep's launcher.
        dead: Ranks that cannot say anything.
        alone: Every surviving rank but those of `dead` and these need not say it.
        never: What must not be said.
        limit_s: A job that stands for longer is ended.
    """

    row: int
    fault: str
    title: str
    said: str
    code: int = 1
    dead: tuple[int, ...] = ()
    alone: tuple[int, ...] = ()
    never: str = "(?!)"
    limit_s: float = 60.0


@dataclass
class Outcome:
    """What became of one job.

    Attributes:
        code: The launcher's exit code; None: it stood until the limit, and was ended.
        ended_s: Seconds from the fault to the end.
        told_s: Seconds from the fault until the last of the ranks had said it; None: one of them never did.
        silent: The ranks that have not said it.
        first_s: Seconds from the fault to the first line of any kind.
        left: Processes, ports, segments and files that were still there.
        wrong: What was said and should not have been, or is missing otherwise.
        lines: The screen, without tracebacks and repetition.
    """

    code: int | None = None
    ended_s: float = 0.0
    told_s: float | None = None
    silent: list[int] = field(default_factory=list)
    first_s: float | None = None
    left: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def meets(self, row: Row) -> bool:
        """Whether it meets the bar of the table."""
        if self.told_s is None or self.told_s > self.allowed_s(row):
            return False
        return self.code == row.code and not self.left and not self.wrong

    @staticmethod
    def allowed_s(row: Row) -> float:
        """When every rank must have spoken. A wait by intention is no alarm: its notes come every 30 s."""
        return (30.0 if row.fault == "disk" else ALARM_S) + BEYOND_S


class Job:
    """One launcher with its ranks.

    Args:
        wrapper: "rankstep" or "torch".
        row: What happens in it.
        folder: For its temporary files, and for what its ranks note.
        flags: Further ones of the launcher.
        prefix: A command around it.
        env: Further variables.
    """

    def __init__(
        self,
        wrapper: str,
        row: Row,
        folder: Path,
        flags: Sequence[str] = (f"--nproc-per-node={RANKS}",),
        prefix: Sequence[str] = (),
        **env: str,
    ) -> None:
        self.row = row
        self.token = uuid.uuid4().hex
        self.notes = folder / "notes"
        self.temp = folder / "temp"
        for path in (self.notes, self.temp):
            path.mkdir(parents=True)
        self._segments = set(SHM.iterdir())
        if wrapper == "rankstep":
            launcher: list[object] = [BIN / "rankstep", "run"]
        else:
            alone = not any("master-port" in flag for flag in flags)
            launcher = [BIN / "torchrun", *(["--standalone"] if alone else [])]
        fault = "nothing" if row.fault == "port" else row.fault
        words = [*prefix, *launcher, *flags, TRAINING, wrapper, fault, self.notes]
        self.began_s = time.monotonic()
        self.screen: list[tuple[float, str]] = []
        self._job = subprocess.Popen(
            [str(word) for word in words],
            env=os.environ
            | {
                "OMP_NUM_THREADS": "1",
                "RANKSTEP_GUARD_ALARM": str(ALARM_S),
                "TMPDIR": str(self.temp),
                "RANKSTEP_FAULTS": self.token,
            }
            | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._job.stdout:
            self.screen.append((time.monotonic(), line.rstrip("\n")))

    def signal(self, number: int) -> None:
        """As a terminal does it: the launcher's whole group gets the signal."""
        with suppress(ProcessLookupError):
            os.killpg(self._job.pid, number)

    def noted_s(self, name: str) -> float | None:
        """When a rank noted this."""
        path = self.notes / name
        return float(path.read_text()) if path.exists() else None

    def wait_for(self, *names: str) -> bool:
        """Wait until ranks have noted these; False: the job has ended before."""
        until = time.monotonic() + self.row.limit_s
        while not all((self.notes / name).exists() for name in names):
            if time.monotonic() > until or self._job.poll() is not None:
                return False
            time.sleep(0.01)
        return True

    def finish(self, fault_s: float | None = None, *, nobody: bool = False) -> Outcome:
        """Wait for the end, or bring it about.

        Args:
            fault_s: The moment of the fault, if no rank has noted it.
            nobody: No line is looked for.
        """
        outcome = Outcome()
        limit_s = self.row.limit_s
        try:
            outcome.code = self._job.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._stop()
        except BaseException:
            self._stop()
            raise
        ended_s = time.monotonic()
        fault_s = fault_s or self.noted_s("fault") or self.began_s
        outcome.ended_s = ended_s - fault_s
        outcome.left = self._left(ended_s + LEFT_S)
        self._reader.join(LEFT_S)
        self._job.stdout.close()
        self._read_screen(outcome, fault_s, nobody=nobody)
        return outcome

    def _stop(self) -> None:
        self.signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._job.wait(10)
        self.signal(signal.SIGKILL)
        self._job.wait()

    def _read_screen(self, outcome: Outcome, fault_s: float, *, nobody: bool) -> None:
        row = self.row
        missing = set(range(RANKS)) - set(row.dead) - set(row.alone)
        anybody = row.fault in ("cut", "port")
        if anybody or nobody:
            # One rank on each host, or a launcher that starts none.
            missing = set() if nobody else {0}
        of_launcher = row.fault in ("endless", "stubborn", "preempted", "port")
        outcome.told_s = 0.0 if nobody else None
        for at_s, line in self.screen:
            text, speakers = spoken(line)
            if SAID_AT_END.match(text) and not of_launcher:
                # From here on the launcher repeats.
                speakers = set()
            if text.startswith("rankstep: traceback of"):
                break
            if re.search(row.never, text):
                outcome.wrong.append(text)
            if not DROPPED.search(text) and at_s > fault_s and "is through" not in text:
                outcome.first_s = min(outcome.first_s or at_s - fault_s, at_s - fault_s)
            if missing and re.search(row.said, text):
                missing -= {0} if anybody else speakers
                if not missing:
                    outcome.told_s = at_s - fault_s
        outcome.silent = sorted(missing)
        outcome.lines = self._shown()

    def _shown(self) -> list[str]:
        """The screen without frames of tracebacks, and each line once."""
        shown: dict[str, None] = {}
        for _, line in self.screen:
            # A rank's own prefix may stand behind the launcher's.
            if not DROPPED.search(LAUNCHER.sub("", spoken(spoken(line)[0])[0])):
                shown[line.rstrip()[:LONGEST]] = None
        return list(shown)

    def _left(self, until_s: float) -> list[str]:
        """What is still there once the kernel has had its time."""
        while left := [*self._processes(), *self._segments_left(), *self._files()]:
            if time.monotonic() > until_s:
                for pid in self._pids():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                break
            time.sleep(0.05)
        return left

    def _pids(self) -> list[int]:
        """Processes that carry this job's token; a port is theirs, or nobody's."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.token.encode() in (path / "environ").read_bytes():
                    found.append(int(path.name))
        return found

    def _processes(self) -> list[str]:
        return [f"process {pid}" for pid in self._pids()]

    def _segments_left(self) -> list[str]:
        new = [path for path in SHM.iterdir() if path not in self._segments]
        return [
            f"segment {path.name}"
            for path in new
            if re.search("rankstep|torch", path.name)
            # Other jobs of this host have segments, too.
            and not any(Path("/proc", pid).exists() for pid in re.findall(r"\d+", path.name))
        ]

    def _files(self) -> list[str]:
        return [f"file {path.relative_to(self.temp)}" for path in self.temp.iterdir()]


def spoken(line: str) -> tuple[str, set[int]]:
    """A line of the screen without its prefix, and the ranks that said it."""
    found = SPEAKERS.match(line)
    if not found:
        return line, {0}
    ranks: set[int] = set()
    for part in found[1].replace(" ", "").split(","):
        first, _, last = part.partition("-")
        ranks |= set(range(int(first), int(last or first) + 1))
    return line[found.end() :], ranks


# ---------------------------------------------------------------- rows that need more than one job that runs


def run(wrapper: str, row: Row) -> Outcome:
    """Let one fault happen.

    Raises:
        RuntimeError: This host does not allow it.
    """
    with tempfile.TemporaryDirectory(prefix="rankstep-faults-") as name:
        return SPECIAL.get(row.fault, usual)(wrapper, row, Path(name))


def usual(wrapper: str, row: Row, folder: Path) -> Outcome:
    return Job(wrapper, row, folder).finish()


def memory(wrapper: str, row: Row, folder: Path) -> Outcome:
    try:
        (GROUPS / f"rankstep-faults-{os.getpid()}").mkdir()
    except OSError as error:
        raise RuntimeError(f"no control group can be made: {error}") from error
    try:
        return usual(wrapper, row, folder)
    finally:
        for group in GROUPS.glob("rankstep-faults-*"):
            with suppress(OSError):
                group.rmdir()


def signalled(wrapper: str, row: Row, folder: Path) -> Outcome:
    """Ctrl-C, or SIGTERM, once the ranks train."""
    job = Job(wrapper, row, folder)
    ready = job.wait_for(*(f"ready{rank}" for rank in range(RANKS)))
    fault_s = time.monotonic()
    job.signal(signal.SIGTERM if row.fault == "preempted" else signal.SIGINT)
    if row.fault == "stubborn":
        time.sleep(1.0)
        fault_s = time.monotonic()
        job.signal(signal.SIGINT)
    outcome = job.finish(fault_s)
    if not ready:
        outcome.wrong.append("the ranks did not come so far")
    if row.fault == "preempted":
        saved = [path.name for path in job.notes.glob("checkpoints/step*")]
        outcome.lines.append(f"(saved: {', '.join(saved) or 'nothing'})")
        if wrapper == "rankstep" and not saved:
            outcome.wrong.append("nothing was saved")
    return outcome


def port(wrapper: str, row: Row, folder: Path) -> Outcome:
    """Two jobs on one port, and two that were given none."""
    flags = ["--nproc-per-node=2"]
    if wrapper == "rankstep":
        jobs = [Job(wrapper, row, folder / name, flags) for name in "ab"]
        codes = [job.finish(nobody=True).code for job in jobs]
    else:
        codes = [0, 0]
    with socket.create_server(("127.0.0.1", 0)) as server:
        given = f"--master-port={server.getsockname()[1]}"
    endless = Row(row.row, "endless", row.title, row.said)
    first = Job(wrapper, endless, folder / "first", [*flags, given])
    first.wait_for("ready0", "ready1")
    second = Job(wrapper, row, folder / "second", [*flags, given])
    outcome = second.finish(second.began_s)
    first.signal(signal.SIGINT)
    outcome.left += first.finish(nobody=True).left
    if codes != [0, 0]:
        outcome.wrong.append(f"two jobs without a port ended with {codes}")
    if outcome.code == 2:
        # The launcher's code for what cannot be started.
        outcome.code = row.code
    return outcome


@contextmanager
def cable() -> Iterator[tuple[list[list[str]], list[str]]]:
    """Two hosts, made of network namespaces: how to be on each, and how to cut the cable between them.

    Raises:
        RuntimeError: This host does not allow it.
    """
    ip = shutil.which("ip")
    if ip is None or os.geteuid() != 0:
        raise RuntimeError("network namespaces need root and iproute2's ip")

    def call(*words: str) -> None:
        made = subprocess.run([ip, *words], capture_output=True, text=True, check=False)
        if made.returncode:
            raise RuntimeError(f"no network namespaces here: {made.stderr.strip()}")

    names = [f"rankstep-faults-{os.getpid()}-{node}" for node in range(2)]
    ends = [f"rf{os.getpid() % 100_000}{node}" for node in range(2)]
    with ExitStack() as stack:
        for name in names:
            call("netns", "add", name)
            stack.callback(call, "netns", "del", name)
        call("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for node, (name, end) in enumerate(zip(names, ends, strict=True)):
            call("link", "set", end, "netns", name)
            call("-n", name, "link", "set", end, "name", "cable")
            call("-n", name, "addr", "add", f"10.79.0.{node + 1}/24", "dev", "cable")
            call("-n", name, "link", "set", "cable", "up")
            call("-n", name, "link", "set", "lo", "up")
        yield (
            [[ip, "netns", "exec", name] for name in names],
            [ip, "-n", names[1], "link", "set", "cable", "down"],
        )


def cut(wrapper: str, row: Row, folder: Path) -> Outcome:
    """Two hosts with a rank each; the cable between them is cut."""
    flags = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=10.79.0.1", "--master-port=29501"]
    with cable() as (prefixes, scissors):
        jobs = [
            Job(
                wrapper,
                row,
                folder / str(node),
                [*flags, f"--node-rank={node}"],
                prefix,
                RANKSTEP_HOST=f"host {node}",
                RANKSTEP_GUARD_LIMIT="15",
                GLOO_SOCKET_IFNAME="cable",
            )
            for node, prefix in enumerate(prefixes)
        ]
        for node, job in enumerate(jobs):
            job.wait_for(f"ready{node}")
        fault_s = time.monotonic()
        subprocess.run(scissors, check=True)
        first, second = [job.finish(fault_s) for job in jobs]
    told = [first.told_s, second.told_s]
    first.told_s = None if None in told else max(told)
    first.silent = [node for node, each in enumerate(told) if each is None]
    first.lines += [f"(host 1, exit code {second.code}) {line}" for line in second.lines]
    first.left += second.left
    first.wrong += second.wrong
    first.code = first.code and second.code and max(first.code, second.code)
    first.ended_s = max(first.ended_s, second.ended_s)
    return first


SHIM = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *offset;

__attribute__((constructor)) static void begin(void) {
    const char *name = getenv("FAULTS_CLOCK");
    int fd = name ? open(name, O_RDONLY) : -1;
    void *at = fd < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
    if (at != MAP_FAILED) offset = at;
    if (fd >= 0) close(fd);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, id, now);
    if (!failed && offset && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
"""


def clock(wrapper: str, row: Row, folder: Path) -> Outcome:
    """The C library's clock of the whole job jumps to and fro while a rank is waited for."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError("the clock of a job can be moved only with a C compiler")
    source, shim, offset = (folder / name for name in ("clock.c", "clock.so", "offset"))
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", shim, source], check=True)

    def move(hours: int) -> None:
        # Written in one go, into the same file.
        with offset.open("r+b") as file:
            file.write((hours * 3600).to_bytes(8, sys.byteorder, signed=True))

    offset.write_bytes(bytes(8))
    job = Job(wrapper, row, folder / "job", LD_PRELOAD=str(shim), FAULTS_CLOCK=str(offset))
    if job.wait_for("fault"):
        for hours in (2, -2, 3):
            move(hours)
            time.sleep(1.5)
    outcome = job.finish()
    if wrapper == "rankstep" and not any("moved by 10800 s" in line for line in outcome.lines):
        outcome.wrong.append("the clock has not moved")
    return outcome


SPECIAL = {
    "memory": memory,
    "endless": signalled,
    "stubborn": signalled,
    "preempted": signalled,
    "port": port,
    "cut": cut,
    "clock": clock,
}
