"""Have the ranks made the same job? Each calls the job function by itself."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from rankstep.explain.blame import JobError
from rankstep.explain.measure import vectors

if TYPE_CHECKING:
    from rankstep.explain.measure.stage import Stage


def check(stage: Stage) -> None:
    """Compare what the ranks' job functions returned; all ranks come to the same result.

    Weights may differ, as they do after different draws: the wrapper copies rank 0's.

    Args:
        stage: Everything.

    Raises:
        JobError: The ranks' models or samples differ.
    """
    model = [
        (name, tuple(param.shape), str(param.dtype), param.requires_grad)
        for name, param in stage.base.named_parameters()
    ]
    sizes = (len(stage.job.dataset), stage.job.batch_size)
    first = vectors.digest_of_batch(stage.batch(stage.indices(0, rank=0)[:2]))
    for what, seen in (
        ("models have different parameters", repr(model).encode()),
        ("datasets or batches have different sizes", repr(sizes).encode()),
        ("datasets hold different samples", first),
    ):
        if len(set(stage.peers.digests(hashlib.sha256(seen).digest()))) > 1:
            raise JobError(
                f"the ranks' {what}: the job function does not return the same job in each process. Next: fix the seed of "
                "what it draws, and let it depend on nothing that differs from process to process."
            )
