"""Makes a package callable, so that ``rankstep.world`` is the function whether or not the folder was imported first."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def make_callable(module: str, function: Callable[..., Any]) -> None:
    """Let the module of this name be called as ``function`` is.

    Importing a submodule puts it in its parent's namespace under its own name. Where a public function has that name,
    too, either one must do.

    Args:
        module: Its full name; imported already.
        function: What calling it calls.
    """

    class CallableModule(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    sys.modules[module].__class__ = CallableModule
