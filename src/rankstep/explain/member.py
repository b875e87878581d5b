"""What each rank runs: loads the job, measures part after part, and leaves its numbers in a file."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from rankstep.collectives import C10dCommunicator
from rankstep.data import seed_everything
from rankstep.explain import builtin
from rankstep.explain.blame import JobError, is_users, told, users_traceback
from rankstep.explain.job import Job, load_job
from rankstep.explain.measure import (
    averaging,
    backward,
    dealing,
    drift,
    gradients,
    place,
    probe,
    same,
    steps,
    whatif,
)
from rankstep.explain.measure.peers import Peers
from rankstep.explain.measure.stage import Stage
from rankstep.explain.parts import ORDER
from rankstep.explain.progress import Progress
from rankstep.explain.request import Request
from rankstep.world import World, agree, world

Measure = Callable[[Stage], tuple[dict[str, Any], dict[str, Any]]]

_MEASURES: Final[dict[str, Measure]] = {
    "world": place.measure,
    "samples": dealing.measure,
    "gradients": gradients.measure,
    "drift": drift.measure,
    "averaging": averaging.measure,
    "backward": backward.measure,
    "whatif": whatif.measure,
    "steps": steps.measure,
}

# The parts that train shall not take longer than this together; a slow model gets fewer steps.
_TRAINING_S = 20.0
_FAILED = 3
_FEWEST_STEPS = 2
# For the end of the ranks and the telling of the story, in seconds; and for the second world of part 1, in times of what
# the start of the ranks has taken: it has launchers of its own.
_ENDING_S = 3.0
_SECOND_START = 2.0
_MOST_STEPS = 8


def main(folder: Path) -> None:
    """Read the request in ``folder``, measure, and write ``rank-N.json`` there.

    A job that does not work is written there as well, by the ranks that found it out, and no rank goes on. What fails
    later in the user's code is left in ``failed-N.json``, and ends the rank.

    Args:
        folder: Private to this run; `rankstep.explain.run` has made it.
    """
    request = Request.read(folder)
    with world(device=request.device) as here:
        if here.device.type == "cuda":
            # Convolve in full float32, so that one process and several compute the same.
            torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
            torch.backends.cudnn.deterministic = True
        try:
            result = _measured(request, here)
        except JobError as error:
            # Told before this rank leaves the others, who then know why.
            _write(folder / f"failed-{here.rank}.json", {"problem": _told(error)})
            sys.exit(_FAILED)
        except Exception:
            if any(folder.glob("failed-*.json")):
                sys.exit(_FAILED)
            raise
        _write(folder / f"rank-{here.rank}.json", result)


def _measured(request: Request, here: World) -> dict[str, Any]:
    progress = Progress(request, shown=here.is_main)
    began = time.perf_counter()
    start_s = time.monotonic() - request.began
    problem: JobError | None = None
    stage: Stage | None = None
    seconds = 0.0
    progress.show("job")
    try:
        stage = _stage(request, here)
        seconds = probe.probe(stage)
    except JobError as error:
        problem = error
    if agree(problem is not None) or stage is None:
        progress.clear()
        return {"problem": None if problem is None else _told(problem)}
    try:
        same.check(stage)
    except JobError as error:
        progress.clear()
        return {"problem": _told(error)}
    slowest = max(row[0] for row in stage.peers.table([seconds]))
    stage.steps = request.steps or _steps(slowest, here.world_size)
    stage.deadline = request.began + request.seconds - _ENDING_S - _SECOND_START * start_s
    own, shared, spent = {}, {}, {}
    for part in ORDER:
        progress.show(part)
        start = time.perf_counter()
        try:
            own[part], shared[part] = _MEASURES[part](stage)
        except Exception as error:
            if not is_users(error):
                raise
            raise JobError(
                f"rank {here.rank}, in the part {part!r}: the job raised {told(error)}"
            ) from error
        spent[part] = time.perf_counter() - start
    progress.clear()
    job = {
        "name": Path(request.job or "digits").name,
        "built_in": request.job is None,
        "batch_size": stage.job.batch_size,
        "step_seconds": slowest,
    }
    return {
        "problem": None,
        "own": own,
        "shared": shared,
        "job": job,
        "seconds": spent | {"all": time.perf_counter() - began},
    }


def _stage(request: Request, here: World) -> Stage:
    # The same on all ranks, so that a dataset that is drawn is the same dataset everywhere.
    seed_everything(request.seed, per_rank=False)
    job: Job = builtin.digits() if request.job is None else load_job(request.job)
    samples = len(job.dataset)
    if samples < here.world_size:
        raise JobError(
            f"the dataset has {samples} samples for {here.world_size} ranks. Next: give at least one sample per rank, or "
            "start fewer ranks with --nproc-per-node."
        )
    base = probe.copied(job.model, here.device)
    base.train()
    return Stage(
        world=here,
        job=job,
        base=base,
        peers=Peers(C10dCommunicator(), here.device),
        seed=request.seed,
        steps=_FEWEST_STEPS,
        tensors=request.tensors,
        local_batch=min(job.batch_size, samples // here.world_size),
    )


def _steps(seconds: float, ranks: int) -> int:
    """Return how many steps the training parts take: many, unless the model is slow."""
    backwards_per_step = 2 + 5 * 3 + 1 + ranks
    fitting = int(_TRAINING_S / max(seconds * backwards_per_step, 1e-9))
    return max(_FEWEST_STEPS, min(_MOST_STEPS, fitting))


def _told(problem: JobError) -> dict[str, str]:
    """Return the message, and the user's own traceback where the user's code raised."""
    cause = problem.__cause__
    trace = "" if cause is None else users_traceback(cause)
    return {"message": str(problem), "traceback": trace}


def _write(path: Path, result: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(_finite(result), allow_nan=False), encoding="utf-8")
    part.replace(path)


def _finite(value: Any) -> Any:
    """Put None, which JSON has, in place of NaN and infinity, which it lacks."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    # Standard output is for the story: what the job prints goes where the progress goes.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    main(Path(sys.argv[1]))
