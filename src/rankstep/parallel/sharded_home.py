"""Where one parameter lives while an optimizer is dealt to the ranks: its place in a bucket, its class, its ``.grad``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rankstep.errors import ShardedGradientError
from rankstep.parallel.sharded_gradient import ShardedGradient
from rankstep.parallel.sharded_memory import numbers
from rankstep.parallel.sharded_params import GatheringParameter, ShardedParameter, set_slot, slot_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankstep.buckets.plan import ParamSpec
    from rankstep.collectives import Pending
    from rankstep.parallel.sharded_bucket import ShardedBucket
    from rankstep.parallel.sharded_shares import Shares


class Classes:
    """The two classes that the parameters of one optimizer change to.

    Args:
        homes: Its parameters' homes, by ``id``.
    """

    def __init__(self, homes: dict[int, Home]) -> None:
        self.sharded = type("ShardedParameter", (ShardedParameter,), {"homes": homes})
        self.gathering = type("GatheringParameter", (GatheringParameter,), {"homes": homes})


class Home:
    """One parameter's place.

    Args:
        shares: What it belongs to.
        bucket: Where its gradient lies.
        place: Which of the bucket's parameters it is.
        spec: The parameter, as planned.

    Attributes:
        param: The parameter.
        index: Its number in the plan.
        begin: Where it begins in the bucket, in elements of the buffer.
        start, end: The part of it in this rank's share; equal if there is none.
        region: That part of the gradient, as it lies in the buffer.
        numbers: The same, complex where the parameter is.
        has_grad: ``.grad`` is this rank's share of the global gradient.
        kept: That share, set aside while a further backward runs, to be added to what it brings.
        way: The values' way here; None: they are here.
    """

    __slots__ = (
        "_handle",
        "begin",
        "bucket",
        "end",
        "has_grad",
        "index",
        "kept",
        "numbers",
        "param",
        "place",
        "region",
        "shares",
        "spec",
        "start",
        "way",
    )

    def __init__(self, shares: Shares, bucket: ShardedBucket, place: int, spec: ParamSpec) -> None:
        self.shares = shares
        self.bucket = bucket
        self.place = place
        self.spec = spec
        self.param = bucket.params[place]
        self.index = bucket.spec.params[place]
        self.begin = bucket.spec.offsets[place]
        low, high = bucket.bounds[shares.comm.rank], bucket.bounds[shares.comm.rank + 1]
        self.start = min(max(self.begin, low), high)
        self.end = max(self.start, min(self.begin + spec.buffer_numel, high))
        self.region = bucket.flat[self.start : self.end]
        self.numbers = numbers(self.region, spec.dtype)
        self.has_grad = False
        self.kept: torch.Tensor | None = None
        self.way: Way | None = None
        self._handle: ShardedGradient | None = None

    def dress(self) -> None:
        """Give the parameter the class that tells how it is."""
        kind: Any = nn.Parameter
        if self.way is not None:
            kind = self.shares.classes.gathering
        elif self.has_grad:
            kind = self.shares.classes.sharded
        if self.param.__class__ is not kind:
            self.param.__class__ = kind

    # ---------------------------------------------------------------- values

    def arrive(self) -> None:
        """Wait for the values."""
        if self.way is not None:
            self.way.wait()

    # ---------------------------------------------------------------- asked by the parameter's class

    def gradient(self, slot: torch.Tensor | None) -> torch.Tensor | None:
        """What ``.grad`` is."""
        if not self.has_grad:
            return slot
        if slot is not None:
            raise ShardedGradientError(
                f"{self.grad_of}, and a backward under no_sync has added this rank's own on top. Call zero_grad() before the "
                "first backward of a step, or read .grad after its synced one"
            )
        view = self.bucket.views[self.place]
        if self._handle is None or self._handle.owner is not self:
            self._handle = ShardedGradient.of(view, self)
        return self._handle

    def forget_gradient(self, but: Any) -> bool:
        """``.grad`` is assigned; False: it stays what it was (``p.grad *= 2`` assigns the same object)."""
        if but is not None and but is self._handle and self.has_grad:
            return False
        if isinstance(but, ShardedGradient):
            raise ShardedGradientError(f"{but.owner.grad_of}, and it cannot be another parameter's")
        self.has_grad = False
        self.dress()
        return True

    # ---------------------------------------------------------------- asked by the bucket

    def hand_back(self) -> None:
        """A backward has ended: the gradient is dealt."""
        set_slot(self.param, None)
        self.has_grad = True
        self.dress()

    def take_back(self) -> None:
        """It will not come."""
        self.has_grad = False
        self.dress()

    def restore(self, grad: torch.Tensor | None) -> None:
        """No rank used the parameter: ``grad`` is what lay in its slot; a share that was set aside is put back later."""
        if self.kept is None:
            self.has_grad = False
            self.dress()
            set_slot(self.param, grad)

    def set_aside(self) -> None:
        """A further backward begins, and its gradients are to be added to the finished one here."""
        if self.has_grad:
            self.kept = self.region.clone()
            self.has_grad = False
            self.dress()

    # ---------------------------------------------------------------- asked by the gradient

    @property
    def name(self) -> str:
        """Of the parameter."""
        return self.spec.name

    @property
    def grad_of(self) -> str:
        """Who holds what of the gradient."""
        return (
            f"rank {self.shares.comm.rank}: the gradient of {self.name!r} is dealt to the ranks of a ShardedOptimizer, and this "
            f"one holds {self.end - self.start} of its {self.spec.buffer_numel} elements"
        )

    @property
    def share(self) -> torch.Tensor:
        """This rank's part of the gradient, to be changed."""
        return self.shares.region_of(self)

    def norm(self, order: float) -> torch.Tensor:
        """Of the whole gradient."""
        return self.shares.norms.of(self, order)

    def found_on_any(self, found: torch.Tensor) -> None:
        """Nonzero on all ranks if on one."""
        self.shares.norms.found_on_any(found)

    def slot(self) -> torch.Tensor | None:
        """A whole gradient that somebody has assigned."""
        return slot_of(self.param)


class Way:
    """New values on their way to some parameters.

    Args:
        pending: Ends when they are here.
        homes: Whose they are.
        naming: Gives a wait that fails its name.
        done: Called when they are here.
    """

    def __init__(
        self,
        pending: Pending,
        homes: Sequence[Home],
        naming: Callable[[], Any],
        done: Callable[[Way], None],
    ) -> None:
        self._pending = pending
        self._homes = homes
        self._naming = naming
        self._done = done
        for home in homes:
            home.way = self
            home.dress()

    def wait(self) -> None:
        """Return when they are here, and every class has changed back."""
        with self._naming():
            self._pending.wait()
        for home in self._homes:
            home.way = None
            home.dress()
        self._done(self)
