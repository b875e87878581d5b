"""A directory of checkpoints: each is there whole or not at all, whatever ends the writing, and what is damaged is named."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

from rankstep.checkpoint import files, folder, lock
from rankstep.checkpoint.files import TensorFile
from rankstep.checkpoint.folder import FILES, MARKER, MODEL, RANKS, STATE, TRAINING, Folder
from rankstep.errors import CheckpointError

FACTS = {"epoch": 0, "world_size": 1, "score": None, "made_by": {}}


def tensors_of(value):
    """So small that a whole checkpoint takes a millisecond."""
    return {
        MODEL: {"w": torch.full((3,), float(value))},
        TRAINING: {"m": torch.full((2, 2), float(value))},
        RANKS: {},
    }


def write(where, step, *, score=None):
    return where.write({**FACTS, "step": step, "score": score}, {"step": step}, tensors_of(step))


def whole_steps(where):
    """The steps whose checkpoints are whole to the last bit, with the values that they must have."""
    found = []
    for entry in where.entries():
        if entry.marker is None or where.verify(entry):
            continue
        cpu = torch.device("cpu")
        model = TensorFile(entry.path / MODEL).read({"w": cpu})
        assert model["w"].tolist() == [float(entry.step)] * 3
        assert json.loads((entry.path / STATE).read_text()) == {"step": entry.step}
        found.append(entry.step)
    return found


@pytest.fixture
def where(tmp_path):
    where = Folder(tmp_path / "run")
    where.hold()
    yield where
    where.release()


def names(where):
    return sorted(path.name for path in where.path.iterdir())


def test_what_was_written_is_found_newest_first(where):
    for step in (5, 20, 100_000_000):
        write(where, step)
    assert whole_steps(where) == [100_000_000, 20, 5]
    assert names(where) == ["lock", "step-00000005", "step-00000020", "step-100000000"]


def test_a_directory_that_is_not_there_holds_none(tmp_path):
    assert Folder(tmp_path / "nothing").entries() == []


def test_everything_is_private(where):
    write(where, 1)
    paths = [where.path, where.path / "lock", *(where.path / "step-00000001").rglob("*")]
    assert not [str(path) for path in paths if path.stat().st_mode & 0o077]


def test_the_tensors_can_be_read_by_the_format_s_own_library(where):
    from safetensors.torch import load_file

    entry = write(where, 7)
    assert load_file(entry.path / MODEL)["w"].tolist() == [7.0] * 3


def test_torch_reads_a_checkpoint_too(where):
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    entry = write(where, 7)
    metadata = HuggingFaceStorageReader(str(entry.path)).read_metadata()
    assert {"w", "m"} <= set(metadata.state_dict_metadata)


# ---------------------------------------------------------------- killed while writing


class Killed(BaseException):
    """Stands for the end of the process: nothing behind it may run, not even what cleans up."""


@contextlib.contextmanager
def killed_before(count):
    """End everything before the ``count``-th call that changes the disk; yields how many were made."""
    made = []

    def watched(function):
        def call(*args, **kwargs):
            made.append(function.__name__)
            if len(made) == count:
                raise Killed
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        library = files.require_safetensors()
        patch.setattr(library, "save_file", watched(library.save_file))
        patch.setattr(os, "fsync", watched(os.fsync))
        patch.setattr(Path, "rename", watched(Path.rename))
        patch.setattr(folder.tempfile, "mkdtemp", watched(folder.tempfile.mkdtemp))

        def no_cleaning(path, ignore_errors=False, **kwargs):
            made.append("rmtree")
            if len(made) == count:
                raise Killed
            if count == 0 or len(made) < count:
                real_rmtree(path, ignore_errors=ignore_errors)

        real_rmtree = shutil.rmtree
        patch.setattr(folder.shutil, "rmtree", no_cleaning)
        yield made


def write_and_prune(where):
    write(where, 2)
    where.prune(1, None)


def test_killed_at_any_moment_the_old_or_the_new_one_is_whole(tmp_path):
    with killed_before(0) as calls:
        where = Folder(tmp_path / "counted")
        where.hold()
        write(where, 1)
        calls.clear()
        write(where, 2)
        where.prune(1, None)
        where.release()
    steps = len(calls)
    assert steps > 10
    seen = set()
    for count in range(1, steps + 1):
        where = Folder(tmp_path / f"killed-{count}")
        where.hold()
        write(where, 1)
        with killed_before(count), pytest.raises(Killed):
            write_and_prune(where)
        where.release()
        # The next job.
        where = Folder(where.path)
        where.hold()
        found = whole_steps(where)
        assert found in ([1], [2, 1], [2]), f"killed before call {count} ({calls[count - 1]})"
        assert not [name for name in names(where) if name.startswith(".")]
        seen.add(tuple(found))
        write(where, 3)
        assert whole_steps(where)[0] == 3
        where.release()
    # Else the moments were not where they matter.
    assert seen == {(1,), (2, 1), (2,)}


def test_killed_while_one_of_the_same_step_is_replaced(tmp_path):
    for count in range(1, 20):
        where = Folder(tmp_path / f"killed-{count}")
        where.hold()
        write(where, 1)
        write(where, 2)
        with killed_before(count), contextlib.suppress(Killed):
            write(where, 2)
        where.release()
        where = Folder(where.path)
        where.hold()
        assert whole_steps(where) == [2, 1]
        where.release()


# ---------------------------------------------------------------- no room, no permission


def test_a_failing_disk_is_named_and_leaves_the_earlier_ones(where, monkeypatch):
    write(where, 1)

    def fails(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(files.os, "fsync", fails)
    with pytest.raises(CheckpointError, match=r"step 2 could not be written .*Input/output error"):
        write(where, 2)
    monkeypatch.undo()
    assert whole_steps(where) == [1]
    assert names(where) == ["lock", "step-00000001"]


@contextlib.contextmanager
def small_disk(size_bytes):
    """Let no file grow beyond a size, as a full disk would not."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_named_and_leaves_the_earlier_ones(where):
    write(where, 1)
    big = tensors_of(2) | {TRAINING: {"m": torch.zeros(1 << 18)}}
    with small_disk(1 << 16), pytest.raises(CheckpointError) as raised:
        where.write({**FACTS, "step": 2}, {}, big)
    text = str(raised.value)
    assert "the checkpoint of step 2 could not be written" in text
    assert "training.safetensors: File too large" in text
    assert "The earlier ones are as they were" in text
    assert whole_steps(where) == [1]
    assert names(where) == ["lock", "step-00000001"]
    write(where, 2)
    assert whole_steps(where) == [2, 1]


def test_a_small_file_system_that_fills_up(tmp_path):
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting needs root")
    small = tmp_path / "small"
    small.mkdir()
    made = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=256k,mode=700", "none", small], check=False
    )
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    where = Folder(small)
    try:
        where.hold()
        write(where, 1)
        big = tensors_of(2) | {MODEL: {"m": torch.zeros(1 << 18)}}
        with pytest.raises(CheckpointError, match=r"model\.safetensors: No space left on device"):
            where.write({**FACTS, "step": 2}, {}, big)
        assert whole_steps(where) == [1]
        where.release()
        subprocess.run([mount, "-o", "remount,ro", small], check=True)
        with pytest.raises(CheckpointError, match=r"cannot be written to .*Read-only file system"):
            Folder(small).hold()
        assert whole_steps(where) == [1]
    finally:
        where.release()
        subprocess.run([shutil.which("umount"), small], check=True)


def test_a_place_where_no_directory_can_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written to .*Not a directory"):
        Folder(tmp_path / "file" / "run").hold()
    with pytest.raises(CheckpointError, match="cannot be listed: Not a directory"):
        Folder(tmp_path / "file").entries()


# ---------------------------------------------------------------- damaged


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


def link(path):
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def directory(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", [*FILES, MARKER])
@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (Path.unlink, "{} is missing"),
        (cut, "bytes of|no JSON"),
        (flip, "{} is damaged: its checksum is|no JSON|says that|none of ours"),
        (link, "Too many levels of symbolic links"),
        (pipe, "{} is not a plain file"),
        (directory, "Is a directory|not a plain file"),
    ],
)
def test_a_damaged_checkpoint_is_named(damage, named, name, where):
    write(where, 1)
    entry = write(where, 2)
    assert whole_steps(where) == [2, 1]
    damage(entry.path / name)
    damaged, good = where.entries()
    problem = where.verify(damaged)
    assert any(part.format(name) in problem for part in named.split("|")), problem
    assert where.verify(good) == ""


class Bomb:
    """What would run if anybody unpickled it."""

    def __reduce__(self):
        return (os.system, (f"touch {sys.argv[0]}.exploded",))


@pytest.mark.parametrize("name", [*FILES, MARKER])
def test_a_pickle_in_place_of_a_file_is_not_run(name, where, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bomb")])
    entry = write(where, 2)
    bomb = pickle.dumps(Bomb())
    (entry.path / name).write_bytes(bomb)
    (entry.path / ".metadata").write_bytes(bomb)
    if name != MARKER:
        # Whoever can write files can write a marker that goes with them.
        sign(entry.path)
    (found,) = where.entries()
    assert where.verify(found)
    # The twin: it does explode where it is unpickled.
    assert not (tmp_path / "bomb.exploded").exists()
    pickle.loads(bomb)  # noqa: S301 - it is ours
    assert (tmp_path / "bomb.exploded").exists()


def sign(path, **changes):
    """Write a marker that goes with the files that are there."""
    marker = json.loads((path / MARKER).read_text())
    for name in FILES:
        written = files.measure(path / name)
        marker["files"][name] = {"size_bytes": written.size_bytes, "crc32": written.crc32}
    del marker["crc32"]
    marker |= changes
    checksum = zlib.crc32(json.dumps(marker, sort_keys=True).encode())
    (path / MARKER).write_text(json.dumps(marker | {"crc32": checksum}))


def header(text):
    data = text.encode()
    return len(data).to_bytes(8, "little") + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (1 << 62).to_bytes(8, "little") + b"{}",
        header("{}x"),
        header('{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,4000000000]}}'),
        header('{"w":{"dtype":"F32","shape":[99999999999999],"data_offsets":[0,4]}}') + b"1234",
        header('{"w":{"dtype":"EVIL","shape":[1],"data_offsets":[0,4]}}') + b"1234",
        header('{"w":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}') + b"1234",
    ],
    ids=["empty", "huge", "huge2", "trailing", "beyond", "absurd", "dtype", "negative"],
)
def test_malicious_tensors_are_refused_however_well_signed(content, where):
    entry = write(where, 2)
    (entry.path / MODEL).write_bytes(content)
    sign(entry.path)
    (found,) = where.entries()
    assert found.marker is not None
    assert "model.safetensors is no safetensors file" in where.verify(found)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format": 2}, "it has format 2, and this Rankstep reads formats up to 1"),
        ({"format": "1"}, "says that format is '1'"),
        ({"format": 0}, "checkpoint.json is none of ours"),
        ({"step": 3}, "its marker is that of step 3"),
        ({"step": -1}, "says that step is -1"),
        ({"step": True}, "says that step is True"),
        ({"world_size": 1.5}, "says that world_size is 1.5"),
        ({"score": "best"}, "impossible facts"),
        ({"made_by": []}, "impossible facts"),
        ({"files": {}}, "does not name the files"),
        ({"files": {"../../../etc/passwd": {}}}, "does not name the files"),
        ({"files": dict.fromkeys(FILES)}, "says that size_bytes is None"),
        ({"files": {name: {"size_bytes": 1 << 70, "crc32": 0} for name in FILES}}, "bytes of"),
    ],
)
def test_a_marker_with_impossible_facts_is_named(changes, named, where):
    entry = write(where, 2)
    sign(entry.path)
    assert whole_steps(where) == [2]
    sign(entry.path, **changes)
    (found,) = where.entries()
    assert found.marker is None
    assert named in found.problem
    assert found.newer == ("formats up to" in named)


@pytest.mark.parametrize("name", [STATE, MARKER])
@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a": NaN}', '{"a": 1' + "0" * 5000 + "}", "\xff"]
)
def test_malicious_json_is_refused(text, name, where):
    entry = write(where, 2)
    (entry.path / name).write_bytes(text.encode("latin-1"))
    if name == STATE:
        sign(entry.path)
    (found,) = where.entries()
    assert name in where.verify(found)


def test_more_json_than_memory_is_not_read(where, monkeypatch):
    entry = write(where, 2)
    monkeypatch.setattr(files, "MOST_JSON_BYTES", 3)
    monkeypatch.setattr(files.read_json, "__defaults__", (3,))
    assert "state.json has 10 bytes, and at most 3 are read" in where.verify(where.entries()[0])
    monkeypatch.undo()
    assert where.verify(where.entries()[0]) == ""
    assert entry.path.exists()


def test_strange_names_are_left_alone(where):
    write(where, 1)
    for name in ("step-1", "step-0000000x", "notes", "step-00000009 (copy)"):
        (where.path / name).mkdir()
    (where.path / "step-00000008").symlink_to(where.path / "step-00000001")
    (where.path / "step-00000007").write_text("")
    assert whole_steps(where) == [1]
    problems = {entry.step: entry.problem for entry in where.entries()}
    assert problems == {1: "", 7: "it is not a folder", 8: "it is not a folder"}
    where.prune(1, None)
    assert len(names(where)) == 8


# ---------------------------------------------------------------- keeping, and one job at a time


def test_the_newest_and_the_best_are_kept(where):
    for step, score in ((1, 0.5), (2, 0.9), (3, None), (4, 0.7), (5, 0.6)):
        write(where, step, score=score)
    where.prune(2, "max")
    assert whole_steps(where) == [5, 4, 2]
    write(where, 6, score=0.1)
    where.prune(2, "min")
    assert whole_steps(where) == [6, 5]


def test_one_that_was_passed_over_is_not_counted_and_not_deleted(where):
    for step in (1, 2, 3):
        write(where, step)
    flip(where.path / "step-00000003" / MODEL)
    where.pass_over(where.entries()[0])
    where.prune(1, None)
    assert [entry.step for entry in where.entries()] == [3, 2]
    # Reached again, it is replaced, and counts.
    write(where, 3)
    where.prune(1, None)
    assert whole_steps(where) == [3]


def test_a_second_job_is_told_who_writes(where, monkeypatch):
    monkeypatch.setattr(lock, "_PATIENCE_SECONDS", 0.0)
    program = (
        "import sys; from pathlib import Path\n"
        "from rankstep.checkpoint import folder, lock\n"
        "lock._PATIENCE_SECONDS = 0.0\n"
        "f = folder.Folder(Path(sys.argv[1]))\n"
        "try: f.hold()\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "else: print('held')\n"
    )

    words = [sys.executable, "-c", program, str(where.path)]
    run = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert "CheckpointError another job writes checkpoints into" in run.stdout
    assert f"process {os.getpid()} on " in run.stdout
    where.release()
    run = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "held\n"
