"""Notices when a wrapped module gets a new parameter or submodule, at the moment of the assignment.

torch calls a global hook for each registration; ours looks whether the module belongs to a wrapper. A step pays
nothing, since nobody walks over the parameters to find out.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.nn.modules import module as torch_module

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

_listeners: weakref.WeakKeyDictionary[nn.Module, list[weakref.WeakMethod[Callable[[], None]]]] = (
    weakref.WeakKeyDictionary()
)
_installed: list[Any] = []


def watch(module: nn.Module, on_change: Callable[[], None]) -> None:
    """Call ``on_change``, a bound method, when a parameter or submodule is assigned anywhere inside ``module``.

    Args:
        module: A wrapped module; all its submodules are watched.
        on_change: Held weakly, so that watching keeps no wrapper alive.
    """
    if not _installed:
        _installed.append(torch_module.register_module_parameter_registration_hook(_registered))
        _installed.append(torch_module.register_module_module_registration_hook(_registered))
    for part in module.modules():
        _listeners.setdefault(part, []).append(weakref.WeakMethod(on_change))


def _registered(module: nn.Module, _name: str, _new: Any) -> None:
    for reference in _listeners.get(module, ()):
        listener = reference()
        if listener is not None:
            listener()
