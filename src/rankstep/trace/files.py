"""Reads a directory of recorded files into a :class:`rankstep.trace.model.Trace`.

Whatever state the directory is in, what can be shown is read, and what is wrong is told in the trace's notices.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rankstep.trace import align, lines, passes
from rankstep.trace.assemble import Names, assemble
from rankstep.trace.jumps import mend
from rankstep.trace.lines import RankFile, TraceError, Wanted, read_header
from rankstep.trace.model import RankTrace, Trace
from rankstep.trace.ondevice import on_device
from rankstep.trace.words import ms, plural, ranks, size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike

    from rankstep.trace.model import StepTrace
    from rankstep.trace.passes import Reduction

__all__ = ["READ_BYTES", "TraceError", "is_long", "load"]

PATTERN: Final = "rank-*.jsonl"
READ_BYTES: Final = 100_000_000
"""No more of the ranks' files is kept at once. In memory it becomes some six times as much."""

_TOLD: Final = 3
"""So many files are told about by name."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A file with a readable first line."""

    path: Path
    header: dict[str, Any]

    @property
    def rank(self) -> int:
        rank: int = self.header["rank"]
        return rank


def is_long(directory: str | PathLike[str]) -> bool:
    """Whether a trace is more than can be read at once, so that :func:`load` needs to know which steps."""
    sizes = (path.stat().st_size for path in Path(directory).glob(PATTERN))
    return sum(sizes) > READ_BYTES


def load(
    directory: str | PathLike[str],
    steps: range | None = None,
    tell: Callable[[int, int], None] = lambda _done, _total: None,
) -> Trace:
    """Read what the ranks of one run recorded; times come out on rank 0's clock.

    A file that ends in the middle of a line, because its rank was killed, is read up to there. Lines and files that are
    damaged are left out, and of several runs the newest is taken; the trace's notices say so. Files of more than
    ``READ_BYTES`` together are read from the first step on as far as that goes.

    Args:
        directory: What was given to ``rankstep run --trace``, ``RANKSTEP_TRACE`` or :func:`rankstep.trace.record`.
        steps: Only these; None: all that can be read at once.
        tell: Is called with the bytes that were read so far, and all there are.

    Raises:
        TraceError: There is nothing that can be read.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise TraceError(
            f"there is no directory {folder}. Next: record one with `rankstep run --trace {folder} train.py`."
        )
    found, notices = _find(folder)
    found, more = _one_run(found)
    notices += more
    try:
        files, numbers, more = _read(found, steps, tell)
    except OSError as error:
        raise TraceError(f"{folder} can no longer be read: {error}. Next: try again.") from error
    notices += more
    names = [Names(file.plans) for file in files]
    read = tuple(
        RankTrace(
            rank=file.header["rank"],
            host=file.header["host"],
            device=file.header["device"],
            clock_error_ns=file.header["error_ns"],
            params=tuple(name.params),
            buckets=tuple(name.buckets),
            steps=_only(assemble(file, name, numbers), steps),
            complete=file.complete,
            unix_ns=_unix_ns(file.header),
            wrappers=tuple(name.wrappers),
            by_device=file.by_device,
            param_bytes=tuple(name.param_bytes),
            cores=_count(file.header.get("cores")),
            threads=_count(file.header.get("threads")),
        )
        for file, name in zip(files, names, strict=True)
    )
    # What a user's function does in place of an all-reduce proves nothing about clocks.
    if all(plan["all_reduced"] for file in files for plan in file.plans):
        read, more = align.by_collectives(read)
        notices += more
    first = files[0].header
    return Trace(
        ranks=read,
        world_size=first["world_size"],
        command=first["command"],
        versions={str(k): str(v) for k, v in first["versions"].items()},
        notices=tuple(notices),
    )


def _only(steps: tuple[StepTrace, ...], wanted: range | None) -> tuple[StepTrace, ...]:
    return steps if wanted is None else tuple(step for step in steps if step.number in wanted)


def _count(told: Any) -> int:
    """A number that recorders of older releases did not write."""
    return told if isinstance(told, int) else 0


def _unix_ns(header: Mapping[str, Any]) -> int:
    own: int = header["time_ns"] - header["perf_counter_ns"]
    return own + int(header["offset_ns"])


# ---------------------------------------------------------------- which files


def _find(folder: Path) -> tuple[list[_Found], list[str]]:
    """The files that can be read, and what is wrong with the others.

    Raises:
        TraceError: There are none.
    """
    found, wrong = [], []
    for path in sorted(folder.glob(PATTERN)):
        try:
            found.append(_Found(path, read_header(path)))
        except TraceError as error:
            wrong.append(f"{path.name} {error}")
    if found:
        return found, [f"{each}, so it was left out." for each in _first_few(wrong, "files")]
    if wrong:
        raise TraceError(
            f"nothing in {folder} can be read: {'; '.join(_first_few(wrong, 'files'))}. Next: record again; a rank writes "
            "its first line when its first wrapper is made."
        )
    raise TraceError(
        f"{folder} holds no trace (no {PATTERN}): it is another directory, or the run made no "
        "rankstep.DistributedDataParallel. Next: record one with `rankstep run --trace DIR train.py`."
    )


def _first_few(texts: list[str], things: str) -> list[str]:
    if len(texts) <= _TOLD:
        return texts
    return [*texts[:_TOLD], f"{len(texts) - _TOLD} more {things} are in such a state"]


def _one_run(found: list[_Found]) -> tuple[list[_Found], list[str]]:
    """The files of the newest run by rank, one for each."""
    notices = []
    runs: dict[tuple[int, str], list[_Found]] = {}
    for each in found:
        runs.setdefault((each.header["world_size"], each.header["run"]), []).append(each)

    def made(key: tuple[int, str]) -> int:
        return max(int(each.header["time_ns"]) for each in runs[key])

    world_size = max(runs, key=made)[0]
    named = max((key for key in runs if key[0] == world_size and key[1]), key=made, default=None)
    # Files without a name are of ranks that could not agree on one with the others.
    own = {named, (world_size, "")}
    chosen = [each for key in runs if key in own for each in runs[key]]
    others = [each for key in runs if key not in own for each in runs[key]]
    if others:
        notices.append(
            f"The directory holds files of {len(runs.keys() - own) + 1} runs. This is the newest, of "
            f"{ranks(sorted(each.rank for each in chosen))}; those of {ranks(sorted(each.rank for each in others))} "
            "were left out. Next: delete them, and give each run a directory of its own."
        )
    by_rank: dict[int, _Found] = {}
    for each in sorted(chosen, key=lambda one: one.header["time_ns"]):
        by_rank[each.rank] = each
    notices += [
        f"{each.path.name} says that it is of rank {each.rank}, as {by_rank[each.rank].path.name} does, which is newer; it "
        "was left out."
        for each in chosen
        if by_rank[each.rank] is not each
    ]
    return [by_rank[rank] for rank in sorted(by_rank)], notices


# ---------------------------------------------------------------- what is in them


def _read(
    found: Sequence[_Found], steps: range | None, tell: Callable[[int, int], None]
) -> tuple[list[RankFile], dict[Reduction, int], list[str]]:
    """Read the files; see :func:`load`."""
    total = sum(each.path.stat().st_size for each in found)
    big = total > READ_BYTES
    share = READ_BYTES // len(found) if big else None
    expected = total * 2 if big and steps is not None else total
    done = 0

    def progress(count: int) -> None:
        nonlocal done
        done += count
        tell(done, expected)

    wanted = [Wanted(limit_bytes=share)] * len(found)
    numbers: dict[Reduction, int] | None = None
    if big and steps is not None:
        # Which reductions these steps are is known only when all are counted.
        sketches = [lines.sketch(each.path, each.header, progress) for each in found]
        numbers = passes.numbered(sketches)
        own = passes.own_steps(numbers, steps)
        wanted = [
            Wanted(limit_bytes=share, steps=own, times=passes.own_times(each, numbers, steps))
            for each in sketches
        ]
    files = [
        lines.read(each.path, each.header, what, progress)
        for each, what in zip(found, wanted, strict=True)
    ]
    notices = _damage(found, files)
    numbers = numbers or passes.numbered(files)
    tell(expected, expected)
    if any(file.stopped for file in files):
        # What some ranks were read further than others cannot be compared.
        last = min(
            max(
                (numbers[w, s] for w, k in f.events.items() for s, _ in k["step_settled"]),
                default=-1,
            )
            for f in files
        )
        numbers = {one: number for one, number in numbers.items() if number <= last}
        notices.append(
            f"The files hold {size(total)}, more than is read at once ({size(READ_BYTES)}), so nothing after step {last} is "
            "told here. Next: name others with --steps FIRST:LAST."
        )
    for place, file in enumerate(files):
        rank = file.header["rank"]
        for step, back in mend(file):
            notices.append(
                f"The clock of rank {rank} went back by {ms(back)} or more after its step {step}; what it did later was "
                "moved to follow that, so how long that step took is not known."
            )
        files[place], left_out = on_device(file)
        if left_out:
            notices.append(
                f"The device of rank {rank} had not got to the end of {plural(left_out, 'step')} when the recording ended, "
                "so they are left out."
            )
    return files, numbers, notices


def _damage(found: Sequence[_Found], files: Sequence[RankFile]) -> list[str]:
    told = [
        f"{plural(file.damaged, 'line')} of {each.path.name} {'is' if file.damaged == 1 else 'are'} damaged "
        f"({'' if file.damaged == 1 else 'the first is '}{file.first_damage}) and left out, with the steps in "
        f"{'it' if file.damaged == 1 else 'them'}."
        for each, file in zip(found, files, strict=True)
        if file.damaged
    ]
    for file in files:
        file.complete = file.complete and not file.damaged
    return _first_few(told, "files")
