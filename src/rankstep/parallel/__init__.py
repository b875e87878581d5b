"""The wrapper that users see (``ddp``), and what connects it: ``replicate`` (same model everywhere), ``hooks`` (autograd)."""

import os

import torch

from rankstep.parallel.ddp import DistributedDataParallel
from rankstep.parallel.sharded import ShardedOptimizer
from rankstep.parallel.sync_batchnorm import SyncBatchNorm
from rankstep.parallel.together import together

__all__ = ["DistributedDataParallel", "ShardedOptimizer", "SyncBatchNorm", "together"]

# isinstance(x, torch.nn.parallel.DistributedDataParallel) decides in many libraries how a model is saved, unwrapped and
# accumulated. torch's class is an ABC, so registering makes those checks hold without inheriting anything.
# RANKSTEP_REGISTER=0, set before the first use, leaves torch's class alone.
if os.environ.get("RANKSTEP_REGISTER") != "0":
    torch.nn.parallel.DistributedDataParallel.register(DistributedDataParallel)
