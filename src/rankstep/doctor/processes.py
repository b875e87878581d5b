"""What the kernel says about the processes of other ranks on this host."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankstep.collectives.neighbours import host_label
from rankstep.doctor.report import Standing

_EXIT_CODE_FIELD = 52
_START_FIELD = 22
_SIGNAL_BITS = 0x7F


@dataclass(frozen=True, slots=True)
class Identity:
    """Which process a rank is.

    Attributes:
        pid: In its own namespace.
        started: When, in the kernel's ticks: numbers are given again, moments are not.
        namespace: Where the number holds.
        host: The host's name, for people.
    """

    pid: int
    started: int
    namespace: str
    host: str

    @classmethod
    def own(cls) -> Identity:
        """This process."""
        pid = os.getpid()
        fields = _stat(pid)
        return cls(
            pid, int(fields[_START_FIELD - 3]) if fields else 0, _namespace(), socket.gethostname()
        )

    @classmethod
    def of(cls, values: dict[str, Any]) -> Identity:
        """From what a rank has left in the store."""
        return cls(
            int(values["pid"]),
            int(values["started"]),
            str(values["namespace"]),
            str(values["host"]),
        )

    @property
    def is_near(self) -> bool:
        """Whether this process can see that one."""
        return bool(self.namespace) and self.namespace == _namespace()

    def look(self) -> tuple[Standing, str]:
        """How a process is that does not answer, and in which words.

        Returns:
            ENDED, STOPPED, HELD; UNREACHABLE if it runs where this process cannot look.
        """
        if not self.is_near:
            return Standing.UNREACHABLE, f"nothing is heard from host {self.host}"
        fields = _stat(self.pid)
        if not fields or (self.started and int(fields[_START_FIELD - 3]) != self.started):
            return Standing.ENDED, "its process has ended without a word"
        state = fields[0]
        if state in "ZX":
            return Standing.ENDED, _end(fields)
        if state in "Tt":
            return Standing.STOPPED, "a signal has stopped it; `kill -CONT` lets it go on"
        if state == "D":
            return Standing.HELD, "it hangs in the kernel (state D: a disk or a device)"
        return Standing.HELD, "its interpreter does not run: native code keeps it"

    def end_code(self) -> int | None:
        """How the process ended, as ``waitpid`` gives it; None while it lives or once nobody can tell any more."""
        fields = _stat(self.pid)
        if fields and fields[0] in "ZX" and len(fields) > _EXIT_CODE_FIELD - 3:
            return int(fields[_EXIT_CODE_FIELD - 3])
        return None


def _end(fields: list[str]) -> str:
    code = int(fields[_EXIT_CODE_FIELD - 3]) if len(fields) > _EXIT_CODE_FIELD - 3 else 0
    number = code & _SIGNAL_BITS
    if number:
        name = signal.Signals(number).name if number in set(signal.Signals) else "?"
        text = f"its process was killed by signal {number} ({name})"
        if number == signal.SIGKILL:
            killed = _killed_for_memory()
            text += (
                ", and the kernel has killed a process of this control group for its memory"
                if killed
                else ", by hand or because the host ran out of memory (see dmesg)"
            )
        return text
    return f"its process has ended with exit code {code >> 8}, without a word"


_ours_at_start = -1


def note_memory_kills() -> None:
    """Remember how many processes of this control group the kernel has killed for their memory by now."""
    global _ours_at_start  # noqa: PLW0603 - of this process
    _ours_at_start = _memory_kills()


def _killed_for_memory() -> bool:
    return 0 <= _ours_at_start < _memory_kills()


def _memory_kills() -> int:
    """Of this process's control group, in either version of the kernel's interface; -1: it does not say."""
    try:
        groups = Path("/proc/self/cgroup").read_text("ascii").splitlines()
    except OSError:
        return -1
    for entry in groups:
        _, controllers, path = entry.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = Path("/sys/fs/cgroup") / ("memory" if controllers else "")
        name = "memory.oom_control" if controllers else "memory.events"
        try:
            text = (base / path.lstrip("/") / name).read_text("ascii")
        except OSError:
            continue
        counts = dict(line.split() for line in text.splitlines())
        if "oom_kill" in counts:
            return int(counts["oom_kill"])
    return -1


def _stat(pid: int) -> list[str]:
    """The fields of a process from its state on; empty: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(") ")[2].split()
    except OSError:
        return []


def _namespace() -> str:
    try:
        # RANKSTEP_HOST tells hosts apart that the kernel takes for one: several network namespaces.
        return f"{host_label()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
