"""Steps this rank's share with the user's optimizer, chunk by chunk while it is in the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rankstep.parallel.sharded_layout import CHUNK_NUMEL, chunks
from rankstep.parallel.sharded_memory import in_order, numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from rankstep.buckets.plan import ParamSpec
    from rankstep.parallel.sharded_bucket import ShardedBucket
    from rankstep.parallel.sharded_home import Home
    from rankstep.parallel.sharded_shares import Shares

Groups = list[dict[str, Any]]


@dataclass(eq=False, slots=True)
class Part:
    """What this rank steps of one parameter.

    Attributes:
        param: The parameter.
        spec: As planned.
        start, end: Which of its elements, as they lie in its bucket.
        home: Where it lives; None: in no bucket, so that every rank steps all of it.
        pieces: Flat tensors over its memory, in order.
        grads: For each piece this rank's share of the reduced gradient; none without a home.
        shown: The pieces' ``.grad`` are those.
    """

    param: torch.Tensor
    spec: ParamSpec
    start: int
    end: int
    home: Home | None
    pieces: list[torch.Tensor]
    grads: list[torch.Tensor]
    shown: bool = False

    def show(self) -> bool:
        """Give the pieces the gradient that the parameter has; False: it has none."""
        home = self.home
        if home is not None and home.has_grad:
            if not self.shown:
                for piece, grad in zip(self.pieces, self.grads, strict=True):
                    piece.grad = grad
                self.shown = True
            return True
        slot = home.slot() if home is not None else self.param.grad
        self.shown = False
        if slot is None:
            for piece in self.pieces:
                piece.grad = None
            return False
        if slot.is_sparse:
            slot = slot.to_dense()
        flat = numbers(in_order(slot, self.spec)[self.start : self.end], slot.dtype)
        sizes = [piece.numel() for piece in self.pieces]
        for piece, part in zip(self.pieces, flat.split_with_sizes(sizes), strict=True):
            piece.grad = part
        return True


@dataclass(eq=False, slots=True)
class Batch:
    """Pieces that lie side by side and are stepped together.

    Attributes:
        start, end: Where they lie in their bucket.
        groups: For each group of parameters that has any its number, and the pieces.
    """

    start: int
    end: int
    groups: list[tuple[int, list[torch.Tensor]]] = field(default_factory=list)

    def add(self, group: int, piece: torch.Tensor) -> None:
        """Take in the next piece."""
        for number, pieces in self.groups:
            if number == group:
                pieces.append(piece)
                return
        self.groups.append((group, [piece]))


class Stepper:
    """One layout's pieces, and the optimizer that steps them.

    Args:
        kind: The optimizer's class.
        options: Its arguments.
        groups: The groups of parameters, of the whole ones.
        shares: The layout.
        loose: Parameters of the groups that are in no bucket, as planned.

    Attributes:
        parts: What this rank steps of each parameter, in the order of the groups; by ``id``.
        inner: Steps the pieces.
    """

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        options: Mapping[str, Any],
        groups: Groups,
        shares: Shares,
        loose: Mapping[int, ParamSpec],
    ) -> None:
        self._shares = shares
        self._step = plain_step(kind)
        self.parts: dict[int, Part] = {}
        group_of: dict[int, int] = {}
        numbers = {id(bucket): number for number, bucket in enumerate(shares.buckets)}
        for number, group in enumerate(groups):
            for param in group["params"]:
                home = shares.homes.get(id(param))
                if home is not None:
                    self.parts[id(param)] = _part_of(home, shares, numbers[id(home.bucket)])
                elif id(param) in loose:
                    self.parts[id(param)] = _whole(param, loose[id(param)])
                group_of[id(param)] = number
        self.inner = made(kind, options, groups, self._pieces_of(groups))
        self._groups: Groups = self.inner.param_groups
        self._batches = [list(self._batches_of(bucket, group_of)) for bucket in shares.buckets]
        self._whole = [
            number
            for number, bucket in enumerate(shares.buckets)
            if all(id(home.param) in group_of for home in bucket.homes)
        ]
        self._loose = [
            (group_of[key], part) for key, part in self.parts.items() if part.home is None
        ]

    def _pieces_of(self, groups: Groups) -> list[list[torch.Tensor]]:
        return [
            [
                piece
                for param in group["params"]
                if id(param) in self.parts
                for piece in self.parts[id(param)].pieces
            ]
            for group in groups
        ]

    def _batches_of(self, bucket: ShardedBucket, group_of: Mapping[int, int]) -> Iterator[Batch]:
        batch: Batch | None = None
        for home in sorted(bucket.homes, key=lambda home: home.start):
            part = self.parts.get(id(home.param))
            at = home.start
            for piece in [] if part is None else part.pieces:
                end = at + piece.numel() * (1 + piece.is_complex())
                if batch is not None and end - batch.start > CHUNK_NUMEL:
                    yield batch
                    batch = None
                if batch is None:
                    batch = Batch(at, end)
                batch.end = end
                batch.add(group_of[id(home.param)], piece)
                at = end
        if batch is not None:
            yield batch

    def take_state(self, state: dict[Any, dict[str, Any]]) -> None:
        """Give the pieces this state; the class may bring an older form up to date."""
        known = self.inner.state
        known.update(state)
        self.inner.__setstate__({"state": known, "param_groups": self.inner.param_groups})

    # ---------------------------------------------------------------- a step

    def step(self, groups: Groups) -> list[torch.Tensor]:
        """Step every piece that has a gradient.

        Args:
            groups: The whole parameters' groups; their options count, and what the step writes into them is kept.

        Returns:
            The parameters that were stepped, on whatever rank.
        """
        for outer, inner in zip(groups, self._groups, strict=True):
            inner.update((key, value) for key, value in outer.items() if key != "params")
        stepped = [part.param for part in self.parts.values() if part.show()]
        everything = self.inner.param_groups
        try:
            for number, bucket in enumerate(self._shares.buckets):
                self._step_bucket(number, bucket)
            for group, part in self._loose:
                if part.pieces[0].grad is not None:
                    self._step_pieces([(group, part.pieces)])
        finally:
            self.inner.param_groups = everything
        for outer, inner in zip(groups, self._groups, strict=True):
            outer.update((key, value) for key, value in inner.items() if key != "params")
        return stepped

    def _step_bucket(self, number: int, bucket: ShardedBucket) -> None:
        with self._shares.naming_reduction():
            bucket.finish()
        factors: Sequence[Any] = ()
        if number in self._whole:
            factors, bucket.factors = bucket.factors, []
        else:
            bucket.flush()
        for batch in self._batches[number]:
            for factor in factors:
                bucket.flat[batch.start : batch.end].mul_(factor)
            self._step_pieces(batch.groups)

    def _step_pieces(self, of_groups: Sequence[tuple[int, list[torch.Tensor]]]) -> None:
        for number, pieces in of_groups:
            self._groups[number]["params"] = pieces
        self.inner.param_groups = [self._groups[number] for number, _ in of_groups]
        self._step(self.inner)


def _part_of(home: Home, shares: Shares, number: int) -> Part:
    memory: Any = shares.memory
    bounds = list(chunks(home.begin, home.start, home.end))
    flat, grads = memory.flats[number], home.bucket.flat
    return Part(
        home.param,
        home.spec,
        home.start - home.begin,
        home.end - home.begin,
        home,
        [numbers(flat[start:end], home.spec.dtype) for start, end in bounds],
        [numbers(grads[start:end], home.spec.dtype) for start, end in bounds],
    )


def _whole(param: torch.Tensor, spec: ParamSpec) -> Part:
    flat = in_order(param, spec)
    if not spec.dense:
        # That is a copy. It is what the parameter will lie in when its gradients are planned, too.
        param.data = numbers(flat, spec.dtype).as_strided(spec.shape, spec.view_stride)
    return Part(param, spec, 0, spec.buffer_numel, None, [numbers(flat, spec.dtype)], [])


def made(
    kind: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    groups: Groups,
    pieces: Sequence[Sequence[torch.Tensor]],
) -> torch.optim.Optimizer:
    """An optimizer of these pieces, with the groups' options.

    Args:
        kind: Its class.
        options: Its arguments, where a group does not say.
        groups: Give the options; their parameters do not count.
        pieces: For each group.
    """
    own = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        | {"params": list(each)}
        for group, each in zip(groups, pieces, strict=True)
    ]
    return kind(own, **options)


def plain_step(kind: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], object]:
    """The class's ``step`` without what torch puts around it: hooks are for the whole step, and run once."""
    step: Any = kind.step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]
