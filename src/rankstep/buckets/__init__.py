"""From gradients to buckets to one global gradient; knows tensors and a communicator, no modules and no autograd.

Read in this order: ``plan`` (pure arithmetic), ``bucket`` (memory), ``learn`` and ``trailer`` (small parts), ``line``
(all buckets in launch order), then ``reducer``, which tells the story of a step, and ``verdict``, which says what went
wrong. ``window``, ``drift``, ``promise``, ``sparse`` and ``comm_hooks`` each hold one further idea.
"""

from rankstep.buckets.plan import Caps, ParamSpec, Plan, make_plan
from rankstep.buckets.reducer import Reducer
from rankstep.buckets.step import StepFacts

__all__ = ["Caps", "ParamSpec", "Plan", "Reducer", "StepFacts", "make_plan"]
