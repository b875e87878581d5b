"""Whether compiled code runs the model: it reads parameters without asking them, so nothing may be on its way to them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from rankstep.parallel.ddp import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


def is_compiled(modules: Iterable[nn.Module]) -> bool:
    """Whether torch.compile or TorchScript has been applied to one of a model's modules."""
    return any(
        isinstance(part, torch.jit.ScriptModule)
        or "_orig_mod" in part._modules
        or getattr(part, "_compiled_call_impl", None) is not None
        for part in modules
    )


def wrapper_is_compiled() -> bool:
    """Whether some wrapper's forward has been compiled from outside (``torch.compile(wrapper)``), in this process."""
    # Imported by every optimizer's first step; not worth an import of our own.
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return False
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    return bool(_debug_get_cache_entry_list(DistributedDataParallel.forward.__code__))
