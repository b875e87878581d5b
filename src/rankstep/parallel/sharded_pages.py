"""A private mapping of memory that others write, and the question to the kernel which of its pages are this process's own."""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np
import torch

PAGE = mmap.PAGESIZE
PAGEMAP = "/proc/self/pagemap"

# Bits of an entry of that file.
_HERE, _SWAPPED, _OF_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))


class Private:
    """A private mapping of a file, which knows the pages that this process has written to.

    Args:
        fd: The file.
        nbytes: Its size, whole pages.

    Attributes:
        bytes: All of it.

    Raises:
        OSError: It cannot be mapped, or the kernel does not tell about pages.

    Source: https://docs.kernel.org/admin-guide/mm/pagemap.html
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE)
        self.bytes = torch.from_numpy(np.frombuffer(self._map, dtype=np.uint8))
        self._pages = nbytes // PAGE
        self._first = self.bytes.data_ptr() // PAGE
        self._pagemap = os.open(PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._pagemap).atexit = False
        self.bytes[0] = 1
        if self.written() != [(0, PAGE)]:
            raise OSError(f"{PAGEMAP} does not show which pages were written")
        self.drop(0, PAGE)

    def written(self) -> list[tuple[int, int]]:
        """The ranges of bytes, whole pages, that are copies of this process; some 0.2 ms for 25 MiB."""
        told = os.pread(self._pagemap, 8 * self._pages, 8 * self._first)
        entries = np.frombuffer(told, dtype=np.uint64)
        copies = ((entries & (_HERE | _SWAPPED)) != 0) & ((entries & _OF_FILE) == 0)
        if not copies.any():
            return []
        edges = np.flatnonzero(np.diff(np.concatenate(([False], copies, [False]))))
        return [(int(a) * PAGE, int(b) * PAGE) for a, b in edges.reshape(-1, 2)]

    def drop(self, start: int, end: int) -> None:
        """Give copies back: the range shows the file again."""
        self._map.madvise(mmap.MADV_DONTNEED, start, end - start)
