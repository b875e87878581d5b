"""How the reported situations spell what is Rankstep's own, for the runner of those situations.

Run it with ``--ddp rankstep:DistributedDataParallel --adapter case_adapter --path tests/parity``.
"""

from __future__ import annotations

import contextlib

import rankstep


def uneven(ddp):
    """A context for loops that end at different times on the ranks."""
    return ddp.join()


def weighted_step(ddp, micro_batches, loss_sum):
    """One exact step over micro-batches of any sizes; ``loss_sum(ddp, batch)`` gives a sum and a count."""
    for number, micro_batch in enumerate(micro_batches):
        last = number == len(micro_batches) - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            total, count = loss_sum(ddp, micro_batch)
            ddp.backward(total, count=count)


def make_sampler(n, rank, world_size, shuffle=True, seed=0, drop_last=False, purpose="train"):
    """The indices of a rank; for evaluation no sample is seen twice."""
    return rankstep.DistributedSampler(
        range(n),
        num_replicas=world_size,
        rank=rank,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        pad="none" if purpose == "eval" else "repeat",
    )


def sampler_state(sampler, consumed):
    """Where the sampler stands after ``consumed`` samples."""
    return sampler.state_dict(consumed)


def sampler_restore(sampler, state):
    """Go on from there."""
    sampler.load_state_dict(state)
