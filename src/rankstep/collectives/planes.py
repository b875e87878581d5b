"""Numbers packed without loss for their way: the bytes that hold the exponents, by a Huffman code.

The last bits of gradients are as good as random, but their exponents lie close together: of float32, the byte with the
sign and most of the exponent holds about 3 bits of information. It is coded by zlib (Huffman only: there are no
repetitions to look for), and all other bytes travel as they are. That leaves out a seventh of all bytes; of float64, a
fourteenth.

Note [Fixed length]
    Whoever takes a message in must know its length before. So each has room for a code of 7/16 of the top bytes; codes of
    gradients need 0.31 to 0.42 of them. Where a code is longer, the bytes travel as they are, and those that find no room
    follow in a second message, which costs a little time, as its receive starts late.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HEAD_BYTES = 8
"""In front: how long the code is; 0: it had no room."""

_RAW_DEFLATE = -15
_MOST_MEMORY = 9
"""zlib's; its blocks are longest then, and each has a code of its own."""


class PackedPiece:
    """One message: a head, all bytes but the top ones plane by plane, and the coded top ones.

    Args:
        memory: :meth:`room_bytes` bytes, 8-byte aligned.
        numel: Of the piece.
        dtype: Of its numbers.

    Attributes:
        message: What travels.
        rest: What travels in a second message; None: nothing does.
    """

    __slots__ = ("_bytes", "_code", "_here", "_numel", "message", "rest")

    lossless = True

    def __init__(self, memory: torch.Tensor, numel: int, dtype: torch.dtype) -> None:
        self.message = memory
        self.rest: torch.Tensor | None = None
        self._numel = numel
        self._bytes: NDArray[np.uint8] = memory.numpy()
        self._code = self._bytes[_HEAD_BYTES + numel * (dtype.itemsize - 1) :]
        self._here = min(numel, len(self._code))

    @staticmethod
    def room_bytes(numel: int, dtype: torch.dtype) -> int:
        """How long the message is, up to the next multiple of 8."""
        return -(-(_HEAD_BYTES + numel * (dtype.itemsize - 1) + -(-7 * numel // 16)) // 8) * 8

    def pack(self, full: torch.Tensor) -> None:
        """Put ``full`` into this piece."""
        numbers = full.numpy()
        for plane, part in self._planes(numbers):
            plane[:] = part
        top = np.ascontiguousarray(_top(numbers))
        coder = zlib.compressobj(1, zlib.DEFLATED, _RAW_DEFLATE, _MOST_MEMORY, zlib.Z_HUFFMAN_ONLY)
        code = coder.compress(top.data) + coder.flush()
        fits = len(code) <= len(self._code)
        self._length[0] = len(code) if fits else 0
        if fits:
            self._code[: len(code)] = np.frombuffer(code, np.uint8)
        else:
            self._code[: self._here] = top[: self._here]
        alone = fits or self._here == self._numel
        self.rest = None if alone else torch.from_numpy(top[self._here :])

    def missing(self) -> torch.Tensor | None:
        """Once the message is here: where its second one must go; None: there is none."""
        alone = self._length[0] or self._here == self._numel
        self.rest = None if alone else torch.empty(self._numel - self._here, dtype=torch.uint8)
        return self.rest

    def unpack(self, into: torch.Tensor) -> None:
        """Write the numbers out."""
        numbers = into.numpy()
        for plane, part in self._planes(numbers):
            part[:] = plane
        top = _top(numbers)
        length = int(self._length[0])
        if length:
            plain = zlib.decompress(self._code[:length].data, _RAW_DEFLATE, self._numel)
            top[:] = np.frombuffer(plain, np.uint8)
            return
        top[: self._here] = self._code[: self._here]
        if self.rest is not None:
            top[self._here :] = self.rest.numpy()

    def add_to(self, total: torch.Tensor) -> None:
        """Add the numbers."""
        term = torch.empty_like(total)
        self.unpack(term)
        total.add_(term)

    @property
    def _length(self) -> NDArray[np.int64]:
        return self._bytes[:_HEAD_BYTES].view(np.int64)

    def _planes(
        self, numbers: NDArray[np.generic]
    ) -> list[tuple[NDArray[np.generic], NDArray[np.generic]]]:
        """Each plane of the message, with what it holds of the numbers: halves first, for speed, then single bytes."""
        width, begin, end, planes = numbers.itemsize, 0, _HEAD_BYTES, []
        while begin < width - 1:
            size = next(size for size in (4, 2, 1) if begin + size < width and not begin % size)
            kind = np.dtype(f"u{size}")
            start, end = end, end + size * self._numel
            planes.append(
                (
                    self._bytes[start:end].view(kind),
                    numbers.view(kind)[begin // size :: width // size],
                )
            )
            begin += size
        return planes


def _top(numbers: NDArray[np.generic]) -> NDArray[np.uint8]:
    """The bytes with the sign and the first bits of the exponent."""
    width = numbers.itemsize
    return numbers.view(np.uint8)[width - 1 :: width]
