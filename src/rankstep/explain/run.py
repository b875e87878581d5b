"""Start the ranks, wait for their numbers, and put them together into one document."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.run import get_args_parser

from rankstep._version import __version__
from rankstep.explain.blame import JobError
from rankstep.explain.claims import judge
from rankstep.explain.job import check_source
from rankstep.explain.nodes import two_nodes
from rankstep.explain.overlap import overlap
from rankstep.explain.parts import PARTS
from rankstep.launch.launch import launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankstep.explain.request import Request

SCHEMA = 1


class RanksFailed(Exception):  # noqa: N818 - not an error of its own: the launcher has told it
    """The ranks ended without numbers; the launcher has said why on the screen.

    Args:
        code: The launcher's exit code.
    """

    def __init__(self, code: int) -> None:
        super().__init__(f"the ranks ended with code {code}")
        self.code = code


def run(request: Request, told: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Run the story's parts on real ranks and return the document with all numbers and claims.

    The ranks are started as ``rankstep run`` starts them. Their numbers come back as JSON in a private folder, which is
    gone when this returns.

    Args:
        request: What to run.
        told: Hears what begins, where the ranks cannot say it.

    Raises:
        JobError: The user's job cannot be found or run.
        RanksFailed: A rank died, or somebody stopped them.
    """
    if request.job is not None:
        check_source(request.job)
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="rankstep-explain-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        request.write(folder)
        code = launch(_launcher_flags(request, folder))
        _refuse(folder, "failed-*.json")
        if code:
            raise RanksFailed(code)
        _refuse(folder, "rank-*.json")
        results = [
            json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))
            for rank in range(request.ranks)
        ]
    told("nodes")
    return _document(request, results, two_nodes())


def _refuse(folder: Path, pattern: str) -> None:
    """Raise what a rank has found wrong with the job, if one has."""
    for file in sorted(folder.glob(pattern)):
        problem = json.loads(file.read_text(encoding="utf-8"))["problem"]
        if problem is not None:
            shown = problem["traceback"].rstrip()
            rank = file.stem.rpartition("-")[2]
            raise JobError(
                problem["message"]
                + (f"\n\nthe job's own traceback, on rank {rank}:\n{shown}" if shown else "")
            )


def _launcher_flags(request: Request, folder: Path) -> Any:
    words = ["--nnodes", "1", "--nproc-per-node", str(request.ranks), "--max-restarts", "0"]
    return get_args_parser().parse_args([*words, "-m", "rankstep.explain.member", str(folder)])


def _document(
    request: Request, results: list[dict[str, Any]], second: dict[str, Any]
) -> dict[str, Any]:
    """Put what all ranks found in common beside what each found of itself."""
    first = results[0]
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "rankstep": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "job": first["job"],
        "seed": request.seed,
        "cores": os.cpu_count() or 1,
        "seconds": first["seconds"],
    }
    for part in PARTS:
        own = [result["own"][part] for result in results]
        document[part] = first["shared"][part] | ({"ranks": own} if any(own) else {})
    document["world"]["two_nodes"] = second
    _put_on_one_axis(document["backward"]["ranks"])
    # Only now, because the telling is as good as done.
    document["seconds"]["command"] = time.monotonic() - request.began
    claims = judge(document)
    document["claims"] = claims
    document["held"] = all(claim["held"] for claim in claims)
    return document


def _put_on_one_axis(ranks: list[dict[str, Any]]) -> None:
    """Say when each rank's step began, and how much of its communication was hidden.

    The ranks are on one host, where ``time.perf_counter_ns`` is one clock for all processes.
    """
    first = min(rank["clock_began_ns"] for rank in ranks)
    for rank in ranks:
        rank["began"] = (rank.pop("clock_began_ns") - first) / 1e3
        rank["overlap"] = overlap(rank)
