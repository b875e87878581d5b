"""Finding the newest whole checkpoint, and bringing it to every rank; read once, by one of them."""

from __future__ import annotations

import contextlib
import functools
import json
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rankstep.checkpoint.files import TensorFacts, TensorFile, parse_json
from rankstep.checkpoint.folder import MODEL, RANKS, STATE, TRAINING, Entry, Folder, Marker
from rankstep.checkpoint.tree import dtype_named, tensor_facts
from rankstep.errors import CheckpointError, CheckpointWarning

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rankstep.checkpoint.parts import Parts
    from rankstep.checkpoint.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a run went on from.

    Attributes:
        path: The checkpoint.
        step: Optimizer steps that were done.
        epoch: Passes over the data that had ended.
        world_size: Ranks that wrote it.
        ignored: What was passed over, newest first: its path, and why.
    """

    path: Path
    step: int
    epoch: int
    world_size: int
    ignored: tuple[tuple[Path, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """A whole checkpoint, and the rank that reads it."""

    entry: Entry
    marker: Marker
    reader: int
    ignored: tuple[tuple[Path, str], ...]


@contextlib.contextmanager
def together(ranks: Ranks, what: str) -> Iterator[None]:
    """Do something on all ranks; if it fails on any, it has failed on all of them.

    Raises:
        CheckpointError: Names the ranks that failed, and why.
    """
    problem: BaseException | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - told to all, then raised
        problem = error
    text = "" if problem is None else str(problem) or type(problem).__name__
    told = ranks.exchange(text.encode(), what)
    failed = {rank: said.decode() for rank, said in enumerate(told) if said}
    if not failed:
        return
    if isinstance(problem, CheckpointError) and len(set(failed.values())) == 1:
        raise problem
    who = "; ".join(f"rank {rank}: {said}" for rank, said in list(failed.items())[:4])
    raise CheckpointError(f"rank {ranks.rank}: {what} failed. {who}") from problem


def find(folder: Folder, ranks: Ranks) -> Found | None:
    """Agree on the newest whole checkpoint that any host sees, and on who reads it.

    Args:
        folder: Where this rank looks.
        ranks: All ranks.

    Returns:
        None where there is none at all.

    Raises:
        CheckpointError: None of those that are there can be used, or the newest has a newer format.
    """
    entries: dict[str, Entry] = {}
    with together(ranks, "looking for checkpoints"):
        if ranks.leads_host:
            entries = {entry.path.name: entry for entry in folder.entries()}
    seen = ranks.exchange(
        json.dumps([[e.path.name, e.step, e.problem, e.newer] for e in entries.values()]).encode(),
        "looking for checkpoints",
    )
    by_name: dict[str, dict[int, tuple[str, bool]]] = {}
    steps: dict[str, int] = {}
    for rank, text in enumerate(seen):
        for name, step, problem, newer in json.loads(text):
            by_name.setdefault(name, {})[rank] = (problem, newer)
            steps[name] = step
    ignored: list[tuple[Path, str]] = []
    for name in sorted(by_name, key=lambda name: (steps[name], name), reverse=True):
        path = folder.path / name
        whole = [rank for rank, (problem, _) in by_name[name].items() if not problem]
        newer = [problem for problem, newer in by_name[name].values() if newer]
        if newer and not whole:
            raise CheckpointError(
                f"{path} is of a later Rankstep: {newer[0]}. Next: update Rankstep, or move that folder away to go on from "
                "the one before it."
            )
        if whole:
            reader = whole[0]
            check = functools.partial(_checked, folder, entries.get(name))
            told = ranks.tell(ranks.on(reader, check, f"checking {name}"), reader, "telling it")
            facts = json.loads(told)
            problem = facts.pop("problem")
            if not problem:
                marker = Marker(**facts, files={})
                return Found(
                    Entry(path, steps[name], marker), marker, reader, _warn(ranks, ignored, path)
                )
        else:
            problem = next(problem for problem, _ in by_name[name].values())
        ignored.append((path, problem))
        folder.pass_over(Entry(path, steps[name], None))
    if ignored:
        listing = "; ".join(f"{path.name}: {problem}" for path, problem in ignored[:4])
        raise CheckpointError(
            f"none of the {len(ignored)} checkpoints in {folder.path} is whole: {listing}. "
            "Next: move them away to begin anew."
        )
    return None


def _checked(folder: Folder, entry: Entry | None) -> bytes:
    """Read a checkpoint; return what is wrong with it, and what its marker says, for all ranks."""
    marker = None if entry is None else entry.marker
    if entry is None or marker is None:
        return json.dumps({"problem": "it is gone"}).encode()
    facts: dict[str, Any] = {"problem": folder.verify(entry)}
    facts |= {name: getattr(marker, name) for name in ("step", "epoch", "world_size", "score")}
    return json.dumps(facts).encode()


def _warn(
    ranks: Ranks, ignored: list[tuple[Path, str]], taken: Path
) -> tuple[tuple[Path, str], ...]:
    if ranks.rank == 0:
        for path, problem in ignored:
            warnings.warn(
                f"checkpoint {path} was passed over: {problem}; going on from {taken.name}",
                CheckpointWarning,
                stacklevel=5,
            )
    return tuple(ignored)


def read(found: Found, ranks: Ranks, parts: Parts, default: torch.device) -> Loaded:
    """Bring a checkpoint to every rank: one reads, the others get its tensors on their own devices.

    Args:
        found: Which.
        ranks: All ranks.
        parts: What it is for; nothing of it is changed.
        default: Where this rank computes.

    Raises:
        CheckpointError: It is that of another model, or malformed; on all ranks.
    """
    path, reader = found.entry.path, found.reader
    head = ranks.on(reader, functools.partial(_heads, path), f"reading {path.name}")
    state_text, ranks_bytes, facts_text = (
        ranks.tell(None if head is None else head[index], reader, f"reading {path.name}")
        for index in range(3)
    )
    with together(ranks, f"loading {path}"), malformed(path):
        state = parse_json(state_text, STATE)
        facts = {name: _facts_in(rows) for name, rows in json.loads(facts_text).items()}
        if len(state["ranks"]) != found.marker.world_size:
            raise CheckpointError(
                f"it has states of {len(state['ranks'])} ranks, and its marker says {found.marker.world_size}"
            )
        parts.refuse_foreign(state["parts"], facts[MODEL])
        noted = tensor_facts(state["parts"])
        places = parts.places()
        on = {
            MODEL: {f.name: _place(f.name, noted, places, default) for f in facts[MODEL]},
            TRAINING: {f.name: _place(f.name, noted, {}, default) for f in facts[TRAINING]},
        }
    tensors: dict[str, torch.Tensor] = {}
    for name in (MODEL, TRAINING):
        open_file = functools.partial(_read_tensors, path / name, on[name])
        got = ranks.on(reader, open_file, f"reading {path.name}/{name}")
        with together(ranks, f"finding room for {path.name}/{name}"):
            if got is None:
                got = {
                    f.name: torch.empty(f.shape, dtype=f.dtype, device=on[name][f.name])
                    for f in facts[name]
                }
        # The same order everywhere.
        ranks.copy((got[fact.name] for fact in facts[name]), reader)
        tensors |= got
    return Loaded(state, tensors, ranks_bytes)


def _heads(path: Path) -> list[bytes]:
    """What all ranks need of a checkpoint but its tensors."""
    files = {name: TensorFile(path / name) for name in (MODEL, TRAINING)}
    facts = {name: _facts_out(file) for name, file in files.items()}
    return [
        (path / STATE).read_bytes(),
        (path / RANKS).read_bytes(),
        json.dumps(facts).encode(),
    ]


def _read_tensors(path: Path, on: dict[str, torch.device]) -> dict[str, torch.Tensor]:
    return TensorFile(path).read(on)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint on its way into the parts.

    Attributes:
        state: What its state file holds.
        tensors: Its tensors, on this rank's devices.
        ranks: What each rank has for itself, as bytes of the safetensors format.
    """

    state: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    ranks: bytes


@contextlib.contextmanager
def malformed(path: Path) -> Iterator[None]:
    """A checkpoint whose checksums are right can still be nonsense, made by whoever."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"checkpoint {path}: its state is malformed ({type(error).__name__}: {error})"
        ) from error


def _place(
    name: str,
    noted: dict[str, dict[str, Any]],
    places: dict[str, torch.device],
    default: torch.device,
) -> torch.device:
    cpu = torch.device("cpu")
    return places.get(name, cpu if noted.get(name, {}).get("on") == "cpu" else default)


def _facts_out(file: TensorFile) -> list[list[Any]]:
    return [[f.name, str(f.dtype).removeprefix("torch."), list(f.shape)] for f in file.facts]


def _facts_in(rows: list[list[Any]]) -> list[TensorFacts]:
    return [TensorFacts(name, dtype_named(dtype), tuple(shape)) for name, dtype, shape in rows]
