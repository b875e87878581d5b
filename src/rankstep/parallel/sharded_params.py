"""Parameters that know that their values, or their gradients, are not all here: they wait, or say so, when they are used.

Note [Changing classes]
    Between ``step()`` and the arrival of the other ranks' new values a parameter's class is ``GatheringParameter``, whose
    ``__torch_function__`` sees every use from Python: an operation, ``.data``, ``state_dict``, a copy, a pickle. The use
    waits for exactly this parameter's bucket. While the gradient is dealt to the ranks the class is
    ``ShardedParameter``, which differs from ``nn.Parameter`` in its ``grad`` alone. Otherwise, and so in all of forward
    and backward behind the first use, it is ``nn.Parameter``. torch turns an ``UninitializedParameter`` into a
    ``Parameter`` in the same way. Nothing is kept on the parameter.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import nn
from torch._guards import TracingContext
from torch.nn.modules import module as torch_module

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_SLOT: Any = torch._C.TensorBase.grad
_NEEDS_GRAD: Any = torch.Tensor.requires_grad
_as_it_is: Any = torch._C.DisableTorchFunctionSubclass

_GETTERS = (
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
    "_version",
    "device",
    "dtype",
    "grad_fn",
    "is_cpu",
    "is_cuda",
    "is_leaf",
    "is_meta",
    "is_mkldnn",
    "is_mps",
    "is_nested",
    "is_quantized",
    "is_sparse",
    "is_sparse_csr",
    "is_xpu",
    "itemsize",
    "layout",
    "names",
    "nbytes",
    "ndim",
    "requires_grad",
    "retains_grad",
    "shape",
)
_METHODS = (
    "__hash__",
    "__len__",
    "dim",
    "element_size",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "ndimension",
    "nelement",
    "numel",
    "register_hook",
    "requires_grad_",
    "size",
    "storage_offset",
    "stride",
)
READS_NOTHING = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _GETTERS if hasattr(torch.Tensor, name)]
    + [getattr(torch.Tensor, name) for name in _METHODS]
    + [_NEEDS_GRAD.__set__, _SLOT.__get__, _SLOT.__set__, _SLOT.__delete__]
    + [torch.is_complex, torch.is_floating_point, torch.numel]
)
"""What tells about a tensor without looking at its values."""


class Home(Protocol):
    """What a parameter's class asks about it."""

    def arrive(self) -> None:
        """Wait for its values; its class changes before this returns."""

    def gradient(self, slot: torch.Tensor | None) -> torch.Tensor | None:
        """What ``.grad`` is, if autograd's own slot holds ``slot``."""

    def forget_gradient(self, but: Any) -> bool:
        """``.grad`` is assigned: drop this rank's share of it; False: it is what it was."""


class ShardedParameter(nn.Parameter):
    """A parameter whose gradient is dealt to the ranks; see Note [Changing classes]."""

    homes: ClassVar[Mapping[int, Home]] = {}

    @property
    def grad(self) -> torch.Tensor | None:
        """A :class:`rankstep.parallel.sharded_gradient.ShardedGradient`, or what was assigned."""
        if TracingContext.try_get() is not None:
            # torch.compile describes the parameters that it meets, gradients and all, and uses none of it.
            return slot_of(self)
        return self.homes[id(self)].gradient(slot_of(self))

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self.homes[id(self)].forget_gradient(value):
            set_slot(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            # As nn.Parameter does it, without this class.
            values = self.data.clone(memory_format=torch.preserve_format)
            memo[id(self)] = nn.Parameter(values, self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch._utils._rebuild_parameter, (self.data, self.requires_grad, OrderedDict())


class GatheringParameter(ShardedParameter):
    """A parameter whose new values are on their way; see Note [Changing classes]."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Wait for what ``func`` is about to use."""
        kwargs = kwargs or {}
        if func in READS_NOTHING:
            with _as_it_is():
                return func(*args, **kwargs)
        for param in _gathering((args, kwargs)):
            param.homes[id(param)].arrive()
        return func(*args, **kwargs)


def _gathering(values: Any) -> Iterator[GatheringParameter]:
    if isinstance(values, GatheringParameter):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _gathering(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from _gathering(value)


def slot_of(param: torch.Tensor) -> torch.Tensor | None:
    """What autograd itself keeps as the gradient."""
    with _as_it_is():
        return _SLOT.__get__(param)  # type: ignore[no-any-return]


def set_slot(param: torch.Tensor, value: torch.Tensor | None) -> None:
    """Write what autograd keeps as the gradient."""
    with _as_it_is():
        _SLOT.__set__(param, value)


class Doorkeeper:
    """While values are on their way, lets no module's forward begin before its own parameters have arrived.

    Their class would wait, too; but extensions written in C++ may read a tensor's memory without asking it.
    """

    def __init__(self) -> None:
        self._handle: Any = None

    def watch(self) -> None:
        """Values are on their way."""
        if self._handle is None:
            self._handle = torch_module.register_module_forward_pre_hook(_uncompiled())

    def leave(self) -> None:
        """All have arrived."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _let_in(module: nn.Module, _inputs: Any) -> None:
    # Below torch.compile's own module nobody is asked, so everything has to be here.
    compiled = "_orig_mod" in module._modules
    arrived(module.parameters() if compiled else module._parameters.values())


@functools.cache
def _uncompiled() -> Any:
    """The hook as torch.compile leaves it alone, made late: it imports the compiler, as an optimizer's first step does."""
    return torch.compiler.disable(_let_in)


def arrived(params: Iterable[torch.Tensor | None]) -> None:
    """Wait for those of these parameters whose values are on their way."""
    for param in params:
        if isinstance(param, GatheringParameter):
            param.homes[id(param)].arrive()
