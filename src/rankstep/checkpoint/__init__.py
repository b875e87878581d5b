"""Checkpoints: a run that was killed goes on as if nothing had happened, on as many ranks or on others.

`checkpoint` is what users hold, `session` what all ranks do together while it is open. Below them stand, each alone:

- `progress`: the loops, and where a run is in its data; `rng`: each rank's random numbers.
- `parts`: the user's model, optimizers and so on; `own`: what each rank has for itself; `tree`: state dicts as JSON and
  named tensors, without a pickle.
- `folder`: which checkpoints there are, and how one comes and goes whole; `files`: what is in one.
- `keeper`: writes on rank 0, at once or behind the training's back; `loading`: finds the newest whole one and brings it
  to all ranks; `ranks`: what they say to each other; `stopping`: a signal that asks all to end.

A state's way out: parts and each rank's own state -> tree -> rank 0 -> keeper -> folder. And back: folder -> one rank
that reads -> broadcast to each rank's device -> tree -> parts.
"""

from rankstep.checkpoint.checkpoint import Checkpoint
from rankstep.checkpoint.loading import Resumed
from rankstep.checkpoint.stopping import Stopped

__all__ = ["Checkpoint", "Resumed", "Stopped"]
