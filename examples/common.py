"""What the examples share around their training loops: switches, a common start, progress, and the final report.

Nothing here is needed to train with Rankstep. It keeps the examples short, so that the part to copy stands out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist
from rich import get_console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rankstep.errors import RankstepError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    import rankstep


class UserError(Exception):
    """Something that the user can put right; the text says how."""


# ---------------------------------------------------------------- before training


def parse_options(
    story: str | None, *, epochs: int, global_batch: int, lr: float, bucket_cap_mb: float
) -> argparse.Namespace:
    """Read the switches that every example has.

    Args:
        story: the example's docstring, shown by ``--help``.
        epochs: default number of passes over the training data.
        global_batch: default samples per step, over all ranks together.
        lr: default learning rate of the first step.
        bucket_cap_mb: default MiB of gradients that fill a bucket.
    """
    summary, _, more = (story or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=more.strip("\n"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--epochs", type=int, default=epochs, help="passes over the training data (%(default)s)")
    add(
        "--global-batch",
        type=int,
        default=global_batch,
        help="samples per step, over all ranks together (%(default)s)",
    )
    add("--lr", type=float, default=lr, help="learning rate, falling to 0 (%(default)s)")
    add("--seed", type=int, default=7, help="fixes first weights and orders (%(default)s)")
    add(
        "--bucket-cap-mb",
        type=float,
        default=bucket_cap_mb,
        help="MiB of gradients that fill a bucket (%(default)s)",
    )
    add("--json", type=Path, metavar="FILE", help="write the result to FILE as well")
    return parser.parse_args()


@contextmanager
def all_ranks_ready(world: rankstep.World) -> Iterator[None]:
    """Prepare in this block; if that fails on any rank, all ranks end with one message and nothing is trained.

    Without the exchange at its end, ranks that are ready would begin to train and wait for one that is not.
    """
    problem = None
    try:
        yield
    except (UserError, RankstepError) as error:
        problem = str(error)
    problems: list[str | None] = [None] * world.world_size
    dist.all_gather_object(problems, problem)
    first = next(filter(None, problems), None)
    if first is not None:
        world.print(f"error: {first}", file=sys.stderr, flush=True)
        # A launcher ends all ranks when one has left: let rank 0 print first.
        dist.barrier()
        raise SystemExit(2)


def check_options(options: argparse.Namespace, world: rankstep.World, *, samples: int) -> None:
    """Refuse switches that cannot work, before any time is spent on them.

    Args:
        options: what `parse_options` returned.
        world: all ranks.
        samples: how many there are to train on.

    Raises:
        UserError: names the switch, its value and what would work.
    """
    if options.epochs < 1:
        raise UserError(f"--epochs {options.epochs}: take at least 1")
    if options.global_batch > samples:
        most = samples // world.world_size * world.world_size
        raise UserError(
            f"--global-batch {options.global_batch}: there are {samples} samples to train on; "
            f"take at most {most}"
        )
    if not 0 < options.lr < math.inf:
        raise UserError(f"--lr {options.lr}: take a positive number, such as 0.001")
    if not 0 < options.bucket_cap_mb < math.inf:
        raise UserError(f"--bucket-cap-mb {options.bucket_cap_mb}: take a positive number of MiB")
    if options.json is not None and world.is_main:
        _check_writable(options.json)


def _check_writable(path: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            fits = path.is_file() or not path.exists()
    except OSError as error:
        raise UserError(
            f"--json {path}: cannot write there ({error.strerror}); "
            "name a file in an existing folder that you may write to"
        ) from error
    if not fits:
        raise UserError(f"--json {path}: not a plain file; name one, such as result.json")


# ---------------------------------------------------------------- while training


class Display:
    """Shows on rank 0 how far training is: a moving bar on a terminal, one plain line per epoch elsewhere.

    The loss shown is the mean over all ranks, read once per epoch: reading it at each step would make a GPU wait.
    """

    def __init__(self, world: rankstep.World, epochs: int, steps_per_epoch: int) -> None:
        self.seconds = 0.0
        self._is_main = world.is_main
        self._epochs = epochs
        self._begun = time.perf_counter()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeRemainingColumn(),
            disable=not (world.is_main and sys.stdout.isatty() and get_console().is_interactive),
        )
        self._task = self._bar.add_task(
            f"epoch 1/{epochs}", total=epochs * steps_per_epoch, loss="..."
        )

    def __enter__(self) -> Self:
        self._bar.start()
        self._begun = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.seconds = time.perf_counter() - self._begun
        self._bar.stop()

    def step(self) -> None:
        """One optimizer step is done."""
        self._bar.advance(self._task)

    def epoch(self, epoch: int, losses: list[float]) -> None:
        """One epoch, counted from 0, is done.

        Args:
            epoch: its number.
            losses: the mean loss of each of its steps.
        """
        mean = f"{sum(losses) / len(losses):.4f}"
        upcoming = min(epoch + 2, self._epochs)
        self._bar.update(self._task, description=f"epoch {upcoming}/{self._epochs}", loss=mean)
        if self._is_main and self._bar.disable:
            print(f"epoch {epoch + 1}/{self._epochs}  loss {mean}", flush=True)


def mean_over_ranks(local_losses: list[torch.Tensor]) -> list[float]:
    """Return the global loss of each step: the ranks' batches are equally big, so it is the mean of their losses.

    One all-reduce for a whole epoch, so that nothing but gradients travels inside a step.
    """
    losses = torch.stack(local_losses)
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


# ---------------------------------------------------------------- after training


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a run; ``--json`` writes these fields.

    ``losses`` has one global mean per step. ``launched_before_backward_ended`` counts the buckets that left in the last
    step while gradients were still to come.
    """

    world_size: int
    global_batch: int
    epochs: int
    seed: int
    losses: list[float]
    test_loss: float
    test_accuracy: float
    weights_identical: bool
    buckets: int
    all_reduces_per_step: int
    launched_before_backward_ended: int
    seconds: float
    samples_per_second: float
    device: str
    torch: str


def report(
    world: rankstep.World,
    options: argparse.Namespace,
    model: rankstep.DistributedDataParallel,
    *,
    losses: list[float],
    test_loss: float,
    test_accuracy: float,
    seconds: float,
) -> None:
    """Show the result on rank 0 and write it where ``--json`` says; every rank must call it.

    Raises:
        SystemExit: the ranks' weights differ, which must never happen.
    """
    step = model.reducer.last_step
    result = Report(
        world_size=world.world_size,
        global_batch=options.global_batch,
        epochs=options.epochs,
        seed=options.seed,
        losses=losses,
        test_loss=test_loss,
        test_accuracy=test_accuracy,
        weights_identical=weights_identical(model),
        buckets=step.buckets,
        all_reduces_per_step=step.all_reduces,
        launched_before_backward_ended=step.launched_in_backward,
        seconds=seconds,
        samples_per_second=len(losses) * options.global_batch / seconds,
        device=str(world.device),
        torch=str(torch.__version__),
    )
    if world.is_main:
        _show(result)
        if options.json is not None:
            _write(options.json, result)
    if not result.weights_identical:
        raise SystemExit(f"rank {world.rank}: the ranks' weights differ after training")


def weights_identical(model: torch.nn.Module) -> bool:
    """Whether all parameters and buffers are equal on all ranks, byte for byte."""
    digest = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        digest.update(
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return len(set(digests)) == 1


def _show(result: Report) -> None:
    ranks = "1 rank" if result.world_size == 1 else f"{result.world_size} ranks"
    same = "identical" if result.weights_identical else "NOT identical"
    lines = {
        "test accuracy": f"{result.test_accuracy:.2%}",
        "loss": f"{result.losses[0]:.4f} at the first step, {result.losses[-1]:.4f} at the last of "
        f"{len(result.losses)}; {result.test_loss:.4f} on the test data",
        "gradients": f"{result.all_reduces_per_step} all-reduces per step for {result.buckets} buckets, "
        f"{result.launched_before_backward_ended} of them while backward was still running",
        "weights": f"{same} on all ranks, byte for byte",
        "speed": f"{result.samples_per_second:,.0f} samples per second, {result.seconds:.1f} s in all",
    }
    print(f"\n{ranks} ({result.device}), global batch {result.global_batch}")
    for name, text in lines.items():
        print(f"  {name:<15}{text}")


def _write(path: Path, result: Report) -> None:
    """Write the whole file or none: a reader never meets half of it."""
    path = path.resolve()
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
