"""An all-reduce that sends fewer bytes: float32 becomes bfloat16 or float16 for the way, or is packed without loss.

Every rank owns a part of the tensor. It gets the others' rounded versions of that part, adds them to its own in rank
order and in full precision, rounds the sum once and sends it back, so that all ranks end with the same bits. Everything
goes piece by piece: while one is on its way, the next is converted, and the one before is summed. Pieces without loss
(``planes.py``) go the same way, and nothing is rounded.

Note [Scales]
    float16 ends at 65504 and is coarse below 6e-5. Each piece is therefore multiplied by a power of two that puts its
    largest finite number just below 2^15, which is exact and travels with it. So no finite number overflows, and what is
    lost is less than 2^-39 of the largest number in the piece, or 2^-11 of the number itself. bfloat16 has the range of
    float32 (but for its last 0.4 %, which round to infinity) and needs no scale, except for float64. NaN and infinity
    stay what they are.

Note [Two couriers]
    What follows the first send happens in two threads, one that sums and sends on, and one that takes in results. With a
    single one, a bucket that waits for its result would keep the next from being summed, and the link would idle.

Note [Memory]
    A result from rank p arrives where the part for rank p was sent from. It cannot arrive before that part has: p needs
    it for the sum.
"""

from __future__ import annotations

import math
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch

from rankstep.collectives.patrol import patrol
from rankstep.collectives.planes import PackedPiece

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

    from rankstep.collectives.direct import Lane
    from rankstep.collectives.lookout import Lookout

PIECE_NUMEL = 128 * 1024
"""256 KiB on the wire: small enough to be converted in the cache, large enough that a message costs little."""

DTYPES = (torch.bfloat16, torch.float16)
"""What may travel."""

PACKED = "packed"
"""Said instead: the numbers as they are, in fewer bytes."""

WireType = torch.dtype | str
"""One of :data:`DTYPES`, or :data:`PACKED`."""

FULL_DTYPES = (torch.float32, torch.float64)
"""What is converted; other tensors travel as they are."""

_HEAD_NUMEL = 4
"""In front of each piece: room for its scale, a float64, whose address must be a multiple of 8 bytes."""

_TOP_EXPONENT = 15


class Piece:
    """One message: a scale and the converted numbers.

    Args:
        memory: ``_HEAD_NUMEL`` elements more than the piece, 8-byte aligned.
        numel: Of the piece.
    """

    __slots__ = ("body", "head", "message")

    rest = None
    lossless = False

    def __init__(self, memory: torch.Tensor, numel: int) -> None:
        self.message = memory[: _HEAD_NUMEL + numel]
        self.head = memory[:_HEAD_NUMEL].view(torch.float64)
        self.body = memory[_HEAD_NUMEL : _HEAD_NUMEL + numel]

    def pack(self, full: torch.Tensor) -> None:
        """Convert ``full`` into this piece."""
        if not _scales(full.dtype, self.body.dtype):
            self.body.copy_(full)
            return
        scale = scale_of(full)
        self.head[0] = scale
        self.body.copy_(full if scale == 1.0 else full * scale)

    def missing(self) -> None:
        """There is never a second message."""

    def unpack(self, into: torch.Tensor) -> None:
        """Convert this piece back."""
        into.copy_(self.body)
        if _scales(into.dtype, self.body.dtype):
            into.mul_(1.0 / self.head.item())

    def add_to(self, total: torch.Tensor) -> None:
        """Add this piece, in the precision of ``total``."""
        scaled = _scales(total.dtype, self.body.dtype)
        total.add_(self.body, alpha=1.0 / self.head.item() if scaled else 1.0)


AnyPiece = Piece | PackedPiece


def wire_bytes(tensor: torch.Tensor, dtype: WireType) -> int:
    """How many bytes numbers like these are on the wire."""
    if not isinstance(dtype, str):
        return tensor.numel() * dtype.itemsize
    total = 0
    for full in tensor.detach().view(-1).split(PIECE_NUMEL) if tensor.numel() else ():
        room = PackedPiece.room_bytes(full.numel(), full.dtype)
        piece = PackedPiece(torch.empty(room, dtype=torch.uint8), full.numel(), full.dtype)
        piece.pack(full)
        total += room + (0 if piece.rest is None else piece.rest.nbytes)
    return total


def name_of(dtype: WireType) -> str:
    """As people write it."""
    return str(dtype).removeprefix("torch.")


def _scales(full: torch.dtype, wire: torch.dtype) -> bool:
    return wire is torch.float16 or full is torch.float64


def scale_of(full: torch.Tensor) -> float:
    """The power of two that brings the largest finite number just below 2^15; see Note [Scales]."""
    largest = _largest(full)
    if not math.isfinite(largest):
        largest = _largest(torch.nan_to_num(full, nan=0.0, posinf=0.0, neginf=0.0))
    if largest == 0.0:
        return 1.0
    exponent = _TOP_EXPONENT - math.frexp(largest)[1]
    # Both the scale and its reciprocal must be normal numbers.
    bound = 126 if full.dtype is torch.float32 else 1000
    return math.ldexp(1.0, max(-bound, min(bound, exponent)))


def _largest(full: torch.Tensor) -> float:
    """The largest magnitude; NaN if there is one. A norm would take ten times as long."""
    low, high = torch.aminmax(full)
    return max(-low.item(), high.item())


class Wire:
    """All-reduces in a half type, or packed, among the ranks of one lane.

    Args:
        lane: Carries the messages.
        lookout: Of the communicator on whose behalf this is.
        dtype: In which numbers travel.
    """

    def __init__(self, lane: Lane, lookout: Lookout, dtype: WireType) -> None:
        self.lane = lane
        self.lookout = lookout
        self.dtype = dtype

    def all_reduce(self, tensor: torch.Tensor) -> WireWork:
        """Start a sum over the lane's ranks, in place; the same bits on all of them.

        Args:
            tensor: Contiguous, of one of :data:`FULL_DTYPES`, on the CPU; the same size on every rank.

        Raises:
            RuntimeError: A connection is broken; also from ``wait``.
        """
        return WireWork(self, tensor.detach().view(-1))


class WireWork:
    """One all-reduce under way.

    Args:
        wire: Whose.
        tensor: Becomes the sum.
    """

    def __init__(self, wire: Wire, tensor: torch.Tensor) -> None:
        self._wire = wire
        self._lane = lane = wire.lane
        self._future: Future[None] = Future()
        parts = tensor.tensor_split(lane.world_size)
        self._parts = [part.split(PIECE_NUMEL) if part.numel() else () for part in parts]
        self._borrowed: list[torch.Tensor] = []
        self._rests: list[torch.Tensor] = []
        # What leaves for each peer, and what each of them sends for this rank's own part.
        self._out = {peer: self._pieces(parts[peer]) for peer in lane.peers}
        self._in = {peer: self._pieces(parts[lane.rank]) for peer in lane.peers}
        count = max(map(len, self._parts))
        full, half = name_of(tensor.dtype), name_of(wire.dtype)
        tags = lane.tags(4 * count, f"the sum of {tensor.numel()} elements of {full} as {half}")
        self._there, self._back = tags[:count], tags[count : 2 * count]
        # Second messages, where there are any.
        self._rest_of = dict(zip(self._there + self._back, tags[2 * count :], strict=True))
        self._sends: list[dist.Work] = []
        self._terms = [
            [lane.receive(self._in[peer][i].message, peer, self._there[i]) for peer in lane.peers]
            for i in range(len(self._parts[lane.rank]))
        ]
        self._results = [
            (lane.receive(self._out[peer][i].message, peer, self._back[i]), peer, i)
            for i in range(count)
            for peer in lane.peers
            if i < len(self._parts[peer])
        ]
        with torch.no_grad():
            for i in range(count):
                for peer in lane.peers:
                    if i < len(self._parts[peer]):
                        self._out[peer][i].pack(self._parts[peer][i])
                        self._send(self._out[peer][i], peer, self._there[i])
        adding, taking = lane.couriers
        adding.send(lambda: self._carry_on(self._add, lambda: taking.send(self._last_leg)))

    def _pieces(self, part: torch.Tensor) -> list[AnyPiece]:
        """Memory for the messages of one part."""
        numels = [PIECE_NUMEL] * (part.numel() // PIECE_NUMEL)
        if part.numel() % PIECE_NUMEL:
            numels.append(part.numel() % PIECE_NUMEL)
        wire_dtype = self._wire.dtype
        if isinstance(wire_dtype, str):
            rooms = [PackedPiece.room_bytes(numel, part.dtype) for numel in numels]
            memory = self._borrow(sum(rooms), torch.uint8)
            return [
                PackedPiece(room, numel, part.dtype)
                for room, numel in zip(memory.split(rooms), numels, strict=True)
            ]
        rooms = [_HEAD_NUMEL + -(-numel // _HEAD_NUMEL) * _HEAD_NUMEL for numel in numels]
        memory = self._borrow(sum(rooms), wire_dtype)
        return [Piece(room, numel) for room, numel in zip(memory.split(rooms), numels, strict=True)]

    def _borrow(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        memory = self._lane.borrow(numel, dtype)
        self._borrowed.append(memory)
        return memory

    def _send(self, piece: AnyPiece, peer: int, tag: int) -> None:
        messages = [(piece.message, tag)]
        if piece.rest is not None:
            messages.append((piece.rest, self._rest_of[tag]))
            # The piece may be packed anew before it has left.
            self._rests.append(piece.rest)
        for message, its_tag in messages:
            self._sends.append(self._lane.send(message, peer, its_tag))

    def _take(self, work: dist.Work, piece: AnyPiece, peer: int, tag: int) -> None:
        """Wait for a piece."""
        work.wait()
        rest = piece.missing()
        if rest is not None:
            self._lane.receive(rest, peer, self._rest_of[tag]).wait()

    # ---------------------------------------------------------------- in the couriers' threads

    def _carry_on(self, errand: Callable[[], None], then: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                errand()
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            self._future.set_exception(error)
        else:
            then()

    def _last_leg(self) -> None:
        self._carry_on(self._take_in, lambda: self._future.set_result(None))

    def _add(self) -> None:
        """Sum this rank's part as its terms arrive, and send it back, rounded."""
        lane = self._lane
        own_pieces = self._parts[lane.rank]
        for i, works in enumerate(self._terms):
            own = own_pieces[i]
            terms = {peer: self._in[peer][i] for peer in lane.peers}
            for peer, work in zip(lane.peers, works, strict=True):
                self._take(work, terms[peer], peer, self._there[i])
            if lane.rank > 1:
                before = torch.empty_like(own)
                terms[0].unpack(before)
                for sender in range(1, lane.rank):
                    terms[sender].add_to(before)
                own.add_(before)
            elif lane.rank == 1:
                terms[0].add_to(own)
            for sender in range(lane.rank + 1, lane.world_size):
                terms[sender].add_to(own)
            # All terms are used, so the first one's memory may hold the sum.
            rounded = self._in[lane.peers[0]][i]
            rounded.pack(own)
            for peer in lane.peers:
                self._send(rounded, peer, self._back[i])
            if not rounded.lossless:
                rounded.unpack(own)

    def _take_in(self) -> None:
        """Take the other ranks' sums as they arrive."""
        for work, peer, i in self._results:
            self._take(work, self._out[peer][i], peer, self._back[i])
            self._out[peer][i].unpack(self._parts[peer][i])
        for work in self._sends:
            work.wait()
        for memory in self._borrowed:
            self._lane.give_back(memory)
        self._borrowed, self._terms, self._results, self._sends = [], [], [], []
        self._rests = []

    # ---------------------------------------------------------------- in the caller's thread

    def wait(self) -> None:
        """Return when the sum is there."""
        lane = self._lane
        with patrol.watch(self._wire.lookout, lane.close, lane.ledger.compare):
            self._future.result()

    def is_completed(self) -> bool:
        """Whether ``wait`` would not block."""
        return self._future.done()

    def get_future(self) -> Future[None]:
        """Calls back from another thread when the sum is there."""
        return self._future
