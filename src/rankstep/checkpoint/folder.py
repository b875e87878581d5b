"""The directory of a run's checkpoints: which there are, which are whole, and how one comes and goes.

    runs/digits/                        private (0700)
        lock                            held by the job that writes here
        step-00000100/                  whole: it has been renamed to this name
            model.safetensors           the weights, in the module's own names
            training.safetensors        tensors of optimizers, schedulers and whatever else was given
            ranks.safetensors           what each rank has for itself: random states, its place, its extra
            state.json                  everything that is no tensor, with references to the tensors
            checkpoint.json             the marker, written last: step, ranks, and each file's size and checksum
        .step-00000120.k3j9x2.part/     being written, or left by a job that was killed

A folder is written under another name, everything in it is brought to the disk, then the marker, and only then it is
renamed. So at every moment each name that begins with ``step-`` is a whole checkpoint or, where a disk has lied or
somebody has had a hand in it, one whose sizes or checksums tell.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import tempfile
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from rankstep.checkpoint.files import (
    TensorFile,
    Written,
    measure,
    opened,
    read_json,
    settle,
    sync,
    write_json,
    write_tensors,
)
from rankstep.checkpoint.lock import Lock
from rankstep.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

FORMAT: Final = 1
MARKER: Final = "checkpoint.json"
MODEL: Final = "model.safetensors"
TRAINING: Final = "training.safetensors"
RANKS: Final = "ranks.safetensors"
STATE: Final = "state.json"
FILES: Final = (MODEL, TRAINING, RANKS, STATE)

_MOST_MARKER_BYTES = 1 << 16
_NAME = re.compile(r"step-(\d{8,18})")
_LEFT = re.compile(r"\.(step-\d{8,18})\.\w+\.(part|old|gone)")


@dataclass(frozen=True, slots=True)
class Marker:
    """What a checkpoint says of itself.

    Attributes:
        step: Optimizer steps done.
        epoch: The epoch that is being walked.
        world_size: Ranks at the time of saving.
        score: What the user gave with it, for the best one; None: nothing.
        files: Size and checksum of each file.
        made_by: Versions, for people.
        format: The layout of the folder.
    """

    step: int
    epoch: int
    world_size: int
    score: float | None
    files: dict[str, Written]
    made_by: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT

    @classmethod
    def parse(cls, raw: Any) -> Self:
        """Return the marker in JSON that came from a file.

        Raises:
            NewerFormatError: A later Rankstep wrote it.
            ValueError: It is none of ours.
        """
        if not isinstance(raw, dict) or _count(raw, "format") < 1:
            raise ValueError(f"{MARKER} is none of ours")
        if raw["format"] > FORMAT:
            raise NewerFormatError(
                f"it has format {raw['format']}, and this Rankstep reads formats up to {FORMAT}"
            )
        facts = {name: value for name, value in raw.items() if name != "crc32"}
        if raw.get("crc32") != _checksum(facts):
            raise ValueError(f"{MARKER} is damaged: its checksum is wrong")
        step, epoch, world_size = (_count(raw, name) for name in ("step", "epoch", "world_size"))
        score, files, made_by = raw.get("score"), raw.get("files"), raw.get("made_by")
        if not (score is None or type(score) in (int, float)) or not isinstance(made_by, dict):
            raise ValueError(f"{MARKER} has impossible facts")
        if not isinstance(files, dict) or set(files) != set(FILES):
            raise ValueError(f"{MARKER} does not name the files of a checkpoint")
        written = {
            name: Written(_count(facts, "size_bytes"), _count(facts, "crc32"))
            for name, facts in files.items()
        }
        return cls(step, epoch, world_size, score, written, made_by)


def _checksum(facts: Any) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def _count(raw: Any, name: str) -> int:
    value = raw.get(name) if isinstance(raw, dict) else None
    if type(value) is not int or value < 0:
        raise ValueError(f"{MARKER} says that {name} is {value!r}")
    return value


class NewerFormatError(ValueError):
    """The checkpoint is whole for a Rankstep that is newer than this one."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A folder that is named like a checkpoint.

    Attributes:
        path: Where it is.
        step: Which step its name says.
        marker: What it says of itself; None: it is damaged.
        problem: Why it cannot be used; empty where nothing was found yet.
        newer: It is no damage, but the format of a later Rankstep.
    """

    path: Path
    step: int
    marker: Marker | None
    problem: str = ""
    newer: bool = False


class Folder:
    """The checkpoints below one directory.

    Args:
        path: The directory; made by the first save, if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock(path)
        self._unusable: set[str] = set()

    # ---------------------------------------------------------------- looking

    def entries(self) -> list[Entry]:
        """List what is named like a checkpoint, newest step first; sizes are compared, contents are not read.

        Raises:
            CheckpointError: The directory cannot be read.
        """
        try:
            names = [entry.name for entry in os.scandir(self.path)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"checkpoints in {self.path} cannot be listed: {error.strerror}. "
                "Next: name a directory that this user may read."
            ) from error
        found = [(int(match[1]), name) for name in names if (match := _NAME.fullmatch(name))]
        return [self._entry(step, name) for step, name in sorted(found, reverse=True)]

    def _entry(self, step: int, name: str) -> Entry:
        path = self.path / name
        try:
            return Entry(path, step, _marker_of(path, step))
        except NewerFormatError as error:
            return Entry(path, step, None, str(error), newer=True)
        except FileNotFoundError as error:
            return Entry(path, step, None, f"{Path(error.filename).name} is missing")
        except OSError as error:
            return Entry(path, step, None, error.strerror or str(error))
        except ValueError as error:
            return Entry(path, step, None, str(error))

    def verify(self, entry: Entry) -> str:
        """Read a whole checkpoint and return what is wrong with it; empty if nothing is."""
        if entry.marker is None:
            return entry.problem
        try:
            for name, written in entry.marker.files.items():
                found = measure(entry.path / name)
                if found != written:
                    return f"{name} is damaged: its checksum is {found.crc32:08x} and not {written.crc32:08x}"
                if name == STATE:
                    read_json(entry.path / name)
                else:
                    TensorFile(entry.path / name)
        except OSError as error:
            return error.strerror or str(error)
        except ValueError as error:
            return str(error)
        return ""

    def pass_over(self, entry: Entry) -> None:
        """Count this one no more among those that are kept, and never delete it."""
        self._unusable.add(entry.path.name)

    # ---------------------------------------------------------------- writing

    def hold(self) -> None:
        """Make the directory, and keep other jobs from writing into it; called by the rank that writes.

        Raises:
            CheckpointError: It cannot be made or written, or another job writes there.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock.take()
            self._clear_leftovers()
        except OSError as error:
            raise self._unwritable(error) from error

    def release(self) -> None:
        """Let other jobs write again."""
        self._lock.release()

    def write(
        self,
        facts: Mapping[str, Any],
        state: Any,
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
    ) -> Entry:
        """Write a checkpoint; whatever happens, those that are there stay as they are.

        Args:
            facts: For the marker: step, epoch, world_size, score, made_by.
            state: What :data:`STATE` is to hold.
            tensors: What :data:`MODEL`, :data:`TRAINING` and :data:`RANKS` are to hold.

        Raises:
            CheckpointError: The disk is full, or has failed; says which file and why.
        """
        name = f"step-{facts['step']:08d}"
        part = None
        try:
            # Private, and under a name that nobody else has.
            part = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".part", dir=self.path))
            for file, content in tensors.items():
                write_tensors(part / file, content)
            write_json(part / STATE, state)
            marker = Marker(**facts, files=settle([part / file for file in FILES]))
            written = asdict(marker)
            write_json(part / MARKER, {**written, "crc32": _checksum(written)})
            settle([part / MARKER, part])
            self._rename(part, self.path / name)
            sync(self.path)
        except BaseException as error:
            if part is not None:
                shutil.rmtree(part, ignore_errors=True)
            if isinstance(error, OSError):
                file = Path(error.filename).name if error.filename else name
                raise CheckpointError(
                    f"the checkpoint of step {facts['step']} could not be written to {self.path}: {file}: "
                    f"{error.strerror or error}. The earlier ones are as they were. "
                    "Next: make room there, or keep fewer, and save again."
                ) from error
            raise
        self._unusable.discard(name)
        return Entry(self.path / name, marker.step, marker)

    def _rename(self, part: Path, whole: Path) -> None:
        try:
            part.rename(whole)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            # One of the same step, from a run that went on from an earlier one.
            old = part.with_suffix(".old")
            whole.rename(old)
            part.rename(whole)
            _remove(old)

    def prune(self, keep: int, best: str | None) -> None:
        """Delete all but the newest checkpoints and the best one.

        Args:
            keep: How many of the newest stay.
            best: "min" or "max": the one whose score is lowest or highest stays, too.

        Raises:
            CheckpointError: One cannot be deleted.
        """
        whole = [
            entry
            for entry in self.entries()
            if entry.marker is not None and entry.path.name not in self._unusable
        ]
        kept = {entry.path for entry in whole[:keep]}
        scored = [
            (entry.marker.score, entry.path)
            for entry in whole
            if entry.marker is not None and entry.marker.score is not None
        ]
        if best is not None and scored:
            choose = min if best == "min" else max
            kept.add(choose(scored, key=lambda pair: pair[0])[1])
        try:
            for entry in whole:
                if entry.path not in kept:
                    # Under another name first: half a deletion must not look like a checkpoint.
                    hidden = self.path / f".{entry.path.name}.{secrets.token_hex(4)}.gone"
                    entry.path.rename(hidden)
                    _remove(hidden)
        except OSError as error:
            raise self._unwritable(error) from error

    def _clear_leftovers(self) -> None:
        """Delete what killed jobs have left; take back what one had moved aside to put another in its place."""
        for entry in list(os.scandir(self.path)):
            left = _LEFT.fullmatch(entry.name)
            if left is None or not entry.is_dir(follow_symlinks=False):
                continue
            whole = self.path / left[1]
            if left[2] == "old" and not whole.exists() and (Path(entry.path) / MARKER).exists():
                Path(entry.path).rename(whole)
            else:
                _remove(Path(entry.path))

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"checkpoints cannot be written to {self.path}: {error.strerror or error}. "
            "Next: name a directory that this user may write to."
        )


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def _marker_of(path: Path, step: int) -> Marker:
    """Read a checkpoint's marker, and see whether its files are there, and as long as it says."""
    if path.is_symlink() or not path.is_dir():
        raise ValueError("it is not a folder")
    marker = Marker.parse(read_json(path / MARKER, _MOST_MARKER_BYTES))
    if marker.step != step:
        raise ValueError(f"its marker is that of step {marker.step}")
    for file, written in marker.files.items():
        with opened(path / file) as fd:
            size = os.fstat(fd).st_size
        if size != written.size_bytes:
            raise ValueError(f"{file} has {size:,} bytes of {written.size_bytes:,}")
    return marker
