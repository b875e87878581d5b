"""Notices when a wrapped module gets a new parameter or submodule, or another wrapper.

torch calls a global hook for each registration; ours looks whether the module belongs to a wrapper. A step pays
nothing, since nobody walks over the parameters to find out.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from torch.nn.modules import module as torch_module
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import nn


class Listener(Protocol):
    """Wants to know when its module changes."""

    def module_changed(self, new: Any) -> None:
        """``new``, a parameter or submodule or None, was assigned somewhere inside the module."""

    def buffers_changed(self) -> None:
        """A buffer was assigned somewhere inside the module."""

    def taken_over(self, newer: Any, params: set[int]) -> None:
        """Another wrapper now reduces these parameters, given by ``id``."""


_listeners: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Listener]]] = (
    weakref.WeakKeyDictionary()
)
_installed: list[Any] = []


def watch(module: nn.Module, listener: Listener) -> None:
    """Tell ``listener`` when a parameter or submodule is assigned anywhere inside ``module``.

    Args:
        module: A wrapped module; all its submodules are watched.
        listener: Held weakly, so that watching keeps no wrapper alive.
    """
    if not _installed:
        _installed.append(torch_module.register_module_parameter_registration_hook(_registered))
        _installed.append(torch_module.register_module_module_registration_hook(_registered))
        _installed.append(torch_module.register_module_buffer_registration_hook(_buffer_registered))
    for part in module.modules():
        # Those of wrappers that are gone leave the list here, so that it does not grow.
        others = [ref for ref in _listeners.get(part, ()) if ref() not in (None, listener)]
        _listeners[part] = [*others, weakref.ref(listener)]


def _buffer_registered(module: nn.Module, _name: str, _new: Any) -> None:
    for reference in _listeners.get(module, ()):
        listener = reference()
        if listener is not None:
            listener.buffers_changed()


def _registered(module: nn.Module, _name: str, new: Any) -> None:
    for reference in _listeners.get(module, ()):
        listener = reference()
        if listener is not None:
            listener.module_changed(new)


_owners = WeakTensorKeyDictionary()


def take_over(params: Iterable[torch.Tensor], wrapper: Listener) -> None:
    """From now on ``wrapper`` reduces these parameters; wrappers that did so before are told.

    Hooks are always armed here, so two wrappers around one parameter would both reduce it.

    Args:
        params: Parameters of a module that has just been wrapped.
        wrapper: The new wrapper.
    """
    params = list(params)
    before: dict[int, Listener] = {}
    for param in params:
        reference = _owners.get(param)
        owner = reference() if reference is not None else None
        if owner is not None and owner is not wrapper:
            before[id(owner)] = owner
        _owners[param] = weakref.ref(wrapper)
    for owner in before.values():
        owner.taken_over(wrapper, {id(param) for param in params})
