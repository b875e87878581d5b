"""Rankstep: train one PyTorch model on many processes as if they were one.

The names below are loaded when they are first used, so that ``rankstep --help`` does not wait for torch. Loading
``DistributedDataParallel`` registers it with torch's class of that name (an ABC registration), so that ``isinstance``
checks across the ecosystem hold; nothing else is changed.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from rankstep._version import __version__

if TYPE_CHECKING:
    from rankstep import trace
    from rankstep.checkpoint import Checkpoint
    from rankstep.data import DistributedSampler, GlobalBatchSampler, seed_everything
    from rankstep.parallel import (
        DistributedDataParallel,
        ShardedOptimizer,
        SyncBatchNorm,
        together,
    )
    from rankstep.world import World, agree, rank_zero_first, world

__all__ = [
    "Checkpoint",
    "DistributedDataParallel",
    "DistributedSampler",
    "GlobalBatchSampler",
    "ShardedOptimizer",
    "SyncBatchNorm",
    "World",
    "__version__",
    "agree",
    "rank_zero_first",
    "seed_everything",
    "together",
    "trace",
    "world",
]

_HOME = {
    "Checkpoint": "rankstep.checkpoint",
    "DistributedDataParallel": "rankstep.parallel",
    "DistributedSampler": "rankstep.data",
    "GlobalBatchSampler": "rankstep.data",
    "ShardedOptimizer": "rankstep.parallel",
    "SyncBatchNorm": "rankstep.parallel",
    "World": "rankstep.world",
    "agree": "rankstep.world",
    "rank_zero_first": "rankstep.world",
    "seed_everything": "rankstep.data",
    "together": "rankstep.parallel",
    "trace": "rankstep.trace",
    "world": "rankstep.world",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rankstep' has no attribute {name!r}")
    module = importlib.import_module(_HOME[name])
    if name != "trace" and os.environ.get("RANKSTEP_GUARD") != "0":
        doctor = importlib.import_module("rankstep.doctor")
        doctor.install(models="rankstep.parallel" in sys.modules)
    # A folder that is its own function (see _callable.py) is the value itself.
    value = getattr(module, name, module)
    globals()[name] = value
    if name == "DistributedDataParallel" and os.environ.get("RANKSTEP_TRACE"):
        importlib.import_module("rankstep.trace.recorder").install_from_environment()
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
