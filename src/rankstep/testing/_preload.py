"""Imported once by the process that forks the ranks, so that no rank pays for importing torch.

Not for use elsewhere. It also ties that process to the one that started it: when a test run is killed, even by SIGKILL,
nothing of it stays behind.
"""

from __future__ import annotations

import os

import numpy as np  # noqa: F401 (imported for the ranks forked from here)
import torch.distributed
import torch.nn
import torch.optim

# torch imports its compiler when the first optimizer is built; that takes as long as torch itself.
import torch._dynamo  # noqa: F401  # isort: skip

import rankstep.testing._rank_process as rank_process

if os.environ.pop(rank_process.FORKED_FOR, "") == str(os.getppid()):
    rank_process.die_with_parent(os.getppid())
