"""The files of one checkpoint: tensors in safetensors' format, facts in JSON, all of it on the disk before it counts.

Whoever can write into a directory can put anything there. So a file is opened without following links and must be a
plain one, its size is looked at before it is read, and what is read is JSON or safetensors.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import stat
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rankstep.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch

MOST_JSON_BYTES: Final = 1 << 28
"""256 MiB: the state of a model of a million tensors is about as long, and more could fill the memory."""

_CHUNK_BYTES = 1 << 23
# The library has the number of a system's error in its text alone, in one of two ways.
_SYSTEM_ERROR = re.compile(r"(?:os error|code:) (\d+)")


@dataclass(frozen=True, slots=True)
class Written:
    """What the marker says of a file."""

    size_bytes: int
    crc32: int


def require_safetensors() -> Any:
    """Return the library `safetensors.torch`.

    Raises:
        CheckpointError: It is not installed.
    """
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise CheckpointError(
            "checkpoints are written by the library safetensors, which is not installed. "
            "Next: pip install 'rankstep[checkpoint]'"
        ) from error


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors, from whatever device, in safetensors' format; :func:`settle` brings them to the disk.

    Raises:
        OSError: No room, or no permission.
    """
    library = require_safetensors()
    plain = apart({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    with _as_os_error(path):
        library.save_file(plain, path, {"format": "pt", **(metadata or {})})


def apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy those that overlap with another in memory: a file has no way to say so."""
    result = dict(tensors)
    where = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name)
        for name, tensor in tensors.items()
        if tensor.nbytes
    )
    taken_until = 0
    for start, end, name in where:
        if start < taken_until:
            result[name] = tensors[name].clone()
        taken_until = max(taken_until, end)
    return result


@contextlib.contextmanager
def _as_os_error(path: Path) -> Iterator[None]:
    """Raise what stands behind the library's own error."""
    try:
        yield
    except importlib.import_module("safetensors").SafetensorError as error:
        found = _SYSTEM_ERROR.search(str(error))
        if found:
            number = int(found[1])
            raise OSError(number, os.strerror(number), str(path)) from error
        raise OSError(f"{path.name}: {error}") from error


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON; :func:`settle` brings it to the disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump(value, file, allow_nan=False, separators=(",", ":"))


def settle(paths: list[Path]) -> dict[str, Written]:
    """See that files are on the disk, and compute their checksums meanwhile; by file name.

    Raises:
        OSError: The disk has failed, or is full.
    """
    # Both release the interpreter: some wait for the disk, the other reads what is still in memory.
    with ThreadPoolExecutor(len(paths), "rankstep-fsync") as pool:
        synced = [pool.submit(sync, path) for path in paths]
        written = {path.name: measure(path) for path in paths if path.is_file()}
        for done in synced:
            done.result()
    return written


def sync(path: Path) -> None:
    """Bring a file's data, or a folder's entries, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def measure(path: Path) -> Written:
    """Read a plain file and return its size and checksum.

    Raises:
        OSError: It is not there, not readable, or not a plain file.
    """
    with opened(path) as fd:
        size, crc = 0, 0
        buffer = bytearray(min(_CHUNK_BYTES, os.fstat(fd).st_size + 1))
        view = memoryview(buffer)
        while count := os.readv(fd, [buffer]):
            crc = zlib.crc32(view[:count], crc)
            size += count
    return Written(size, crc)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a plain file for reading: no link, no pipe, no device."""
    # Without O_NONBLOCK, opening a pipe would wait for somebody to write into it.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path.name} is not a plain file")
        yield fd
    finally:
        os.close(fd)


def read_json(path: Path, most_bytes: int = MOST_JSON_BYTES) -> Any:
    """Read a JSON file.

    Raises:
        OSError: It is not there, not readable, or not a plain file.
        ValueError: It is too big, or no JSON.
    """
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        if size > most_bytes:
            raise ValueError(f"{path.name} has {size:,} bytes, and at most {most_bytes:,} are read")
        with os.fdopen(os.dup(fd), "rb") as file:
            return parse_json(file.read(most_bytes), path.name)


def parse_json(data: bytes, name: str) -> Any:
    """Parse JSON.

    Raises:
        ValueError: It is none.
    """
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON of ours ({type(error).__name__}: {error})") from error


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number in JSON")


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A tensor as a file's header describes it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class TensorFile:
    """A safetensors file, opened for reading.

    Args:
        path: Where it is.

    Raises:
        ValueError: It is none.
    """

    def __init__(self, path: Path) -> None:
        library = require_safetensors()
        # It opens by name; what is there has been looked at before.
        with opened(path):
            pass
        try:
            with library.safe_open(path, framework="pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
                self.facts = [
                    TensorFacts(name, library._getdtype(part.get_dtype()), tuple(part.get_shape()))
                    for name, part in slices.items()
                ]
                self.metadata: dict[str, str] = file.metadata() or {}
        except (importlib.import_module("safetensors").SafetensorError, KeyError) as error:
            raise ValueError(f"{path.name} is no safetensors file ({error})") from error
        self._path = path

    def read(self, on: Mapping[str, torch.device]) -> dict[str, torch.Tensor]:
        """Read tensors, each to its device.

        Args:
            on: Which, and where to.
        """
        library = require_safetensors()
        tensors = {}
        for device in set(on.values()):
            with library.safe_open(self._path, framework="pt", device=str(device)) as file:
                for name in (name for name, place in on.items() if place == device):
                    tensor = file.get_tensor(name)
                    # On the CPU it is a window on the file, which may go before the tensor does.
                    tensors[name] = tensor.clone() if device.type == "cpu" else tensor
        return tensors
