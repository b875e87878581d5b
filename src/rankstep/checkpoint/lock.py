"""One job writes into a directory of checkpoints; a second one is told who that is."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from typing import TYPE_CHECKING

from rankstep.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

_PATIENCE_SECONDS = 30.0
# A file server keeps the locks of a host that was lost for as long as it hopes to hear of it: mostly 90 seconds.
_PATIENCE_FOR_HOSTS_SECONDS = 120.0
# Some network file systems know no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)


class Lock:
    """A lock on a directory, which ends with the process that holds it.

    Args:
        path: The directory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def take(self) -> None:
        """Take it; the job that held it before a restart may still be on its way out, so wait a while.

        Raises:
            CheckpointError: Another job keeps it.
            OSError: The directory cannot be written.
        """
        if self._fd is not None:
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._path / "lock", flags, 0o600)
        try:
            self._wait(fd)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def release(self) -> None:
        """Give it back."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _wait(self, fd: int) -> None:
        began = time.monotonic()
        while not _locked(fd):
            holder = os.pread(fd, 200, 0).decode("utf-8", "replace") or "a process"
            here = holder.endswith(f" on {socket.gethostname()}")
            patience = _PATIENCE_SECONDS if here else _PATIENCE_FOR_HOSTS_SECONDS
            if time.monotonic() - began > patience:
                raise CheckpointError(
                    f"another job writes checkpoints into {self._path}: {holder}. "
                    "Next: end that job, or give this one another directory."
                )
            time.sleep(0.1)


def _locked(fd: int) -> bool:
    try:
        # Not flock: workers of a loader would inherit it, and outlive this process for a while.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
