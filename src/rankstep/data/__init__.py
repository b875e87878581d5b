"""Which rank trains on which sample, in which order, with which random numbers.

`shard` is the arithmetic: it deals positions to ranks and computes orders, and knows neither torch nor processes.
`sampler` puts torch's interface around it, for a DataLoader. `state` is what the sampler writes into a checkpoint, and
the checks when it comes back. `seed` gives each rank and each loader worker random numbers of its own. `checks` holds
what they all ask of an argument.

An index's way: the epoch's order (torch's permutation, the streaming one, or none) says which sample stands at each
position; the shard says which positions are this rank's; the sampler's iterator hands the samples out and counts them,
and that count, times the ranks, is the place that a checkpoint keeps. `global_batch` deals whole steps instead, so that a
step does not depend on the number of ranks.
"""

from rankstep.data.global_batch import GlobalBatchSampler
from rankstep.data.sampler import DistributedSampler, RepeatedOrderWarning
from rankstep.data.seed import seed_everything, worker_init_fn
from rankstep.data.shard import Shard, StreamingOrder

__all__ = [
    "DistributedSampler",
    "GlobalBatchSampler",
    "RepeatedOrderWarning",
    "Shard",
    "StreamingOrder",
    "seed_everything",
    "worker_init_fn",
]
