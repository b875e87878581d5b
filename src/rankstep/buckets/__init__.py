"""From gradients to buckets to one global gradient; knows tensors and a communicator, no modules and no autograd.

Read in this order: ``plan`` (pure arithmetic), ``bucket`` (memory), ``learn`` and ``trailer`` (small parts), ``line``
(all buckets in launch order), then ``reducer``, which tells the story of a step, and ``verdict``, which says what went
wrong. ``window``, ``drift``, ``promise``, ``sparse`` and ``comm_hooks`` each hold one further idea. ``predict`` (pure),
``forecast``, ``measure`` and ``autoplan`` find the buckets with which a step is shortest.

The names below are loaded when they are first used: reports on traces need ``predict`` and not torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankstep.buckets.plan import Caps, ParamSpec, Plan, make_plan
    from rankstep.buckets.reducer import Reducer
    from rankstep.buckets.step import StepFacts

__all__ = ["Caps", "ParamSpec", "Plan", "Reducer", "StepFacts", "make_plan"]

_HOME = {
    "Caps": "plan",
    "ParamSpec": "plan",
    "Plan": "plan",
    "Reducer": "reducer",
    "StepFacts": "step",
    "make_plan": "plan",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rankstep.buckets' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"rankstep.buckets.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
