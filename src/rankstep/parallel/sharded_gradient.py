"""What ``.grad`` is while each rank holds its share of it: a tensor that answers what can be answered, and refuses the rest.

The memory behind it holds the global gradient in this rank's share, and what the sum has left elsewhere. So nothing may
read it as a whole. What works on each element by itself works on the share; norms, and the search for infinities that
a ``GradScaler`` makes, are agreed among the ranks. That is all that ``torch.nn.utils.clip_grad_norm_`` and
``clip_grad_value_``, ``GradScaler`` and ``zero_grad`` do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from rankstep.errors import ShardedGradientError
from rankstep.parallel.sharded_params import READS_NOTHING, _as_it_is

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Owner(Protocol):
    """What a gradient needs of the parameter that it belongs to."""

    @property
    def name(self) -> str:
        """Of the parameter."""

    @property
    def share(self) -> torch.Tensor:
        """This rank's share of the gradient, reduced; may be empty."""

    @property
    def grad_of(self) -> str:
        """Who holds what, for messages."""

    def norm(self, order: float) -> torch.Tensor:
        """The norm of the whole gradient; collective."""

    def found_on_any(self, found: torch.Tensor) -> None:
        """Make a scalar nonzero on all ranks if it is on one; collective."""


class ShardedGradient(torch.Tensor):
    """A gradient that is dealt to the ranks."""

    owner: Owner

    @staticmethod
    def of(view: torch.Tensor, owner: Owner) -> ShardedGradient:
        """The gradient whose memory is ``view``."""
        made: ShardedGradient = torch.Tensor._make_subclass(ShardedGradient, view)
        made.owner = owner
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ShardedGradient({self.owner.grad_of})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it on the share, or with the other ranks, or refuse."""
        kwargs = kwargs or {}
        if func in READS_NOTHING:
            with _as_it_is():
                return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, *args, **kwargs)
        owner = next(_sharded((args, kwargs))).owner
        raise ShardedGradientError(
            f"{owner.grad_of}, so {getattr(func, '__name__', func)!r} cannot be done with it. On every rank, call "
            "optimizer.gather_gradients() first: then each .grad is the whole gradient. To clip, call "
            "optimizer.clip_grad_norm_(max_norm) or torch.nn.utils.clip_grad_norm_, which work as it is"
        )


def _sharded(values: Any) -> Any:
    if isinstance(values, ShardedGradient):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _sharded(value)
    elif isinstance(values, dict):
        yield from _sharded(list(values.values()))


# ---------------------------------------------------------------- what can be done


def _same(_func: Any, grad: ShardedGradient, *_: Any) -> ShardedGradient:
    return grad


def _in_place(
    func: Callable[..., Any], grad: ShardedGradient, *args: Any, **kwargs: Any
) -> ShardedGradient:
    """An operation on each element by itself."""
    _refuse_tensors(func, grad, (args, kwargs))
    func(grad.owner.share, *args, **kwargs)
    return grad


def _in_place_each(
    func: Callable[..., Any], grads: Sequence[torch.Tensor], *args: Any, **kwargs: Any
) -> None:
    """The same on a list of gradients."""
    _refuse_tensors(func, grads, (args, kwargs))
    func([_share_of(grad) for grad in grads], *args, **kwargs)


def _refuse_tensors(func: Any, grads: Any, values: Any) -> None:
    """Other operands must be numbers: a tensor would have to be cut to the share."""
    for value in (*values[0], *values[1].values()):
        if isinstance(value, list | tuple) or (isinstance(value, torch.Tensor) and value.ndim):
            owner = next(_sharded(grads)).owner
            raise ShardedGradientError(
                f"{owner.grad_of}, so {getattr(func, '__name__', func)!r} takes a number and no tensor of values. On every "
                "rank, call optimizer.gather_gradients() first"
            )


def _share_of(grad: torch.Tensor) -> torch.Tensor:
    return grad.owner.share if isinstance(grad, ShardedGradient) else grad


def _norm(func: Any, grad: ShardedGradient, order: Any = 2, *args: Any, **kwargs: Any) -> Any:
    order = kwargs.pop("ord", kwargs.pop("p", order))
    partial = args or any(value is not None for value in kwargs.values())
    if partial or isinstance(order, str) or order < 0:
        raise ShardedGradientError(
            f"{grad.owner.grad_of}, so {getattr(func, '__name__', func)!r} can take the norm of all elements alone. On every "
            "rank, call optimizer.gather_gradients() first"
        )
    return grad.owner.norm(float(order))


def _norm_each(
    func: Callable[..., Any], grads: Sequence[torch.Tensor], order: Any = 2, *_: Any, **__: Any
) -> list[torch.Tensor]:
    return [
        grad.owner.norm(float(order))
        if isinstance(grad, ShardedGradient)
        else func([grad], order)[0]
        for grad in grads
    ]


def _unscale(
    func: Callable[..., Any],
    grads: Sequence[torch.Tensor],
    found: torch.Tensor,
    inverse_scale: torch.Tensor,
) -> None:
    func([_share_of(grad) for grad in grads], found, inverse_scale)
    next(_sharded(grads)).owner.found_on_any(found)


_T: Any = torch.Tensor
_torch: Any = torch
_HANDLERS: dict[Any, Callable[..., Any]] = (
    dict.fromkeys([_T.detach_, _T.requires_grad.__set__], _same)
    | dict.fromkeys(
        [
            _T.mul_,
            _T.div_,
            _T.__imul__,
            _T.__itruediv__,
            _T.zero_,
            _T.clamp_,
            _T.clamp_min_,
            _T.clamp_max_,
            _T.nan_to_num_,
            _torch.clamp_,
            _torch.nan_to_num_,
            _torch.zero_,
        ],
        _in_place,
    )
    | dict.fromkeys(
        [
            _torch._foreach_mul_,
            _torch._foreach_div_,
            _torch._foreach_zero_,
            _torch._foreach_clamp_min_,
            _torch._foreach_clamp_max_,
        ],
        _in_place_each,
    )
    | dict.fromkeys([_torch.linalg.vector_norm, _torch.norm, _T.norm], _norm)
    | {
        _torch._foreach_norm: _norm_each,
        _torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
    }
)
