"""What ranks of one host say to each other: small messages of one size, and the peer they come from."""

from __future__ import annotations

import enum
import os
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rankstep.collectives.segments import Place, map_segment

if TYPE_CHECKING:
    from collections.abc import Iterator

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
)
"""What is summed in shared memory; a message names one by its position."""

_FORM = struct.Struct("<BBHIIxxxxQQ")
_TEXT_BYTES = 4096


class Kind(enum.IntEnum):
    """What an operation is for. SHARE: memory of the first rank for all; BARRIER: nothing but to meet."""

    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    SHARE = 5
    BARRIER = 6


class Word(enum.IntEnum):
    """What a message says."""

    POST = 1
    """My tensor of operation n is ready, and lies there."""
    DONE = 2
    """I have done my part of operation n, in your tensor, too."""
    SEGMENT = 3
    """Here is the descriptor of a new segment of mine."""
    WITHDRAWN = 4
    """I shall name that segment no more."""
    BROKEN = 5
    """I have failed, and say why."""


@dataclass(frozen=True, slots=True)
class Post:
    """What a rank wants done with which of its tensors."""

    kind: Kind
    dtype: int
    place: Place
    nbytes: int

    @property
    def wanted(self) -> tuple[int, int, int]:
        """What must be the same on all ranks; memory is shared by the first rank alone."""
        if self.kind is Kind.SHARE:
            return (self.kind, 0, 0)
        return (self.kind, self.dtype, self.nbytes)

    def __str__(self) -> str:
        name = self.kind.name.lower().replace("_", "-")
        dtype = str(DTYPES[self.dtype]).removeprefix("torch.")
        return f"{name} of {self.nbytes // DTYPES[self.dtype].itemsize} elements of {dtype}"


def pack(word: Word, number: int, post: Post | None = None, *, nbytes: int = 0) -> bytes:
    """A message about operation or segment ``number``."""
    if post is None:
        return _FORM.pack(word, 0, 0, number, 0, 0, nbytes)
    return _FORM.pack(
        word,
        post.kind,
        post.dtype,
        number,
        post.place.segment,
        post.place.offset_bytes,
        post.nbytes,
    )


@dataclass(eq=False, slots=True)
class Peer:
    """Another rank of this host.

    Attributes:
        rank: In the group.
        pid: Its process; 0: this one cannot see it.
        socket: To it, not blocking.
        posts: Its posts by operation, until they are worked on.
        segments: Its memory.
        ended: It has closed its socket.
        failed: What it said when it failed.
    """

    rank: int
    pid: int
    socket: socket.socket
    posts: dict[int, Post] = field(default_factory=dict)
    segments: dict[int, torch.Tensor] = field(default_factory=dict)
    ended: bool = False
    failed: str = ""

    def hear(self) -> Iterator[int]:
        """Take in all messages that have come; yields the numbers of operations that it is done with."""
        while not self.ended:
            try:
                data, ancillary, _, _ = self.socket.recvmsg(_TEXT_BYTES, _ROOM)
            except BlockingIOError:
                return
            except OSError:
                data, ancillary = b"", []
            if not data:
                self.ended = True
                return
            word, kind, dtype, number, segment, offset_bytes, nbytes = _FORM.unpack_from(data)
            if word == Word.DONE:
                yield number
            elif word == Word.POST:
                self.posts[number] = Post(Kind(kind), dtype, Place(segment, offset_bytes), nbytes)
            elif word == Word.SEGMENT:
                fd = int.from_bytes(ancillary[0][2][:4], "little")
                try:
                    self.segments[number] = map_segment(fd, nbytes)
                finally:
                    os.close(fd)
            elif word == Word.WITHDRAWN:
                self.segments.pop(number, None)
            else:
                self.failed = data[_FORM.size :].decode("utf-8", "replace")

    def stopped(self) -> bool:
        """Whether a signal has stopped its process."""
        if not self.pid:
            return False
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text("utf-8")
        except OSError:
            return False
        return text.rpartition(") ")[2][:1] in "Tt"

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" (process {self.pid})" if self.pid else "")


_ROOM = socket.CMSG_SPACE(4)


def failure(text: str) -> bytes:
    """The message that tells a peer why this rank can do no more."""
    room = _TEXT_BYTES - _FORM.size
    return pack(Word.BROKEN, 0) + text.encode()[:room]
