"""Where a thread of this process stands: the user's line, the phase of the step, and whether it waits for other ranks.

Everything is read from the frames of the thread, by another one, so the thread itself pays nothing for it.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rankstep.collectives.lookout import board
from rankstep.doctor.report import Standing

if TYPE_CHECKING:
    from types import FrameType

_OURS = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = tuple(
    path + os.sep
    for path in {*(sysconfig.get_paths()[name] for name in ("stdlib", "platlib", "purelib"))}
    | {str(Path(torch.__file__).parent)}
)
_COLLECTIVES_OF_OURS = _OURS + "collectives"
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_AROUND = (_COLLECTIVES, "torch/distributed/c10d_logger.py")
_BETWEEN_TWO = ("send", "recv", "send_object_list", "recv_object_list", "batch_isend_irecv")
_STACK_LINES = 8
_SOURCE_LENGTH = 80

_PHASES = (
    ("data loading", ("torch/utils/data/dataloader.py",)),
    ("checkpoint", ("torch/serialization.py",)),
    ("checkpoint", ("torch/distributed/checkpoint/",)),
    ("checkpoint", (_OURS + "checkpoint/",)),
    ("backward", ("torch/autograd/graph.py",)),
    ("optimizer", ("torch/optim/",)),
    ("forward", (_OURS + "parallel/ddp.py",)),
)


@dataclass(frozen=True, slots=True)
class Position:
    """Where a thread stands.

    Attributes:
        line: The user's innermost line, for people.
        phase: Of the step; empty where the frames do not say.
        standing: WAITING, YIELDING or WORKING.
        place: WAITING: equal on all ranks that wait there.
        what: WAITING: for what.
        site: The user's line without its text; the same for every pass.
        stack: The user's lines, the innermost last.
        members: The ranks that are waited for; empty: all.
        mark: Equal as long as the thread has not moved.
    """

    line: str
    phase: str
    standing: Standing
    place: str
    what: str
    site: str
    stack: tuple[str, ...]
    members: tuple[int, ...]
    mark: tuple[tuple[int, int], ...]


def position_of(thread: int, *, brief: bool = False) -> Position | None:
    """Look at a thread.

    Args:
        thread: Its ``threading.get_ident()``.
        brief: Without lines for people, for looks in passing.

    Returns:
        None: it has ended.
    """
    frames = sys._current_frames()
    innermost = frames.get(thread)
    if innermost is None:
        return None
    stack = _stack(innermost)
    user = [frame for frame in stack if not _is_library(frame.f_code.co_filename)]
    waits = stack
    if _phase(stack) == "backward" and not _own(stack):
        # The engine runs the backward of a GPU in threads of its own; our hooks then wait there.
        waits = next(
            (other for other in map(_stack, _engine_frames(frames, thread)) if _own(other)), stack
        )
    standing, place, what, members = _waiting(waits)
    shown = [] if brief else user[:_STACK_LINES] or [innermost]
    lines = tuple(describe(frame) for frame in shown)[::-1]
    return Position(
        line=lines[-1] if lines else "",
        phase=_phase(stack),
        standing=standing,
        place=place,
        what=what,
        site=_site(user[0]) if user else "",
        stack=lines,
        members=members,
        # Our own collectives take up a wait anew, and ask the store in between: it has not moved on by that.
        mark=tuple(
            (id(frame.f_code), frame.f_lasti) for frame in stack if not _in_collectives(frame)
        ),
    )


def describe(frame: FrameType) -> str:
    """Write a frame as ``train.py:41 in load: `time.sleep(60)` ``."""
    return describe_line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def describe_line(file: str, line: int, function: str) -> str:
    """Write a line of a program for people."""
    inside = "" if function == "<module>" else f" in {function}"
    source = linecache.getline(file, line).strip()
    if len(source) > _SOURCE_LENGTH:
        source = source[: _SOURCE_LENGTH - 3] + "..."
    return f"{short_name(file)}:{line}{inside}" + (f": `{source}`" if source else "")


def short_name(file: str) -> str:
    """A file's path from the working directory if it lies in there, else with its folder."""
    path = Path(file)
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(Path(*path.parts[-2:])) if path.is_absolute() else file


def users_line(error: BaseException) -> str:
    """Where an exception comes from, as ``train.py:41 in load``: the innermost line that is the user's."""
    found = None
    innermost = None
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        innermost = (code.co_filename, traceback.tb_lineno, code.co_name)
        if not _is_library(code.co_filename):
            found = innermost
        traceback = traceback.tb_next
    file, line, function = found or innermost or ("", 0, "")
    if not file:
        return ""
    return f"{short_name(file)}:{line}" + ("" if function == "<module>" else f" in {function}")


def cpu_seconds(thread: int) -> float:
    """The CPU time that a living thread has used."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _site(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _stack(innermost: FrameType) -> list[FrameType]:
    stack: list[FrameType] = []
    frame: FrameType | None = innermost
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    return stack


def _is_library(file: str) -> bool:
    return file.startswith((_OURS, "<", *_LIBRARIES))


def _own(stack: list[FrameType]) -> bool:
    return any(map(_in_collectives, stack))


def _in_collectives(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_COLLECTIVES_OF_OURS)


def _engine_frames(frames: dict[int, FrameType], but: int) -> list[FrameType]:
    # Threads that Python knows are the user's or ours; those of the engine are not.
    known = {thread.ident for thread in threading.enumerate() if not _is_foreign(thread)}
    return [frame for ident, frame in frames.items() if ident not in known and ident != but]


def _is_foreign(thread: threading.Thread) -> bool:
    return isinstance(thread, threading._DummyThread)


def _phase(stack: list[FrameType]) -> str:
    for frame in stack:
        file = frame.f_code.co_filename
        for phase, parts in _PHASES:
            if any(part in file for part in parts):
                return phase
    return ""


def _waiting(stack: list[FrameType]) -> tuple[Standing, str, str, tuple[int, ...]]:
    """Whether these frames wait for other ranks: standing, place, what, and the ranks that take part."""
    for frame in stack:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(_COLLECTIVES_OF_OURS):
            return _in_ours(stack)
        if file == _OURS + "buckets/bucket.py" and function == "wait":
            # Collectives would stand further in: this is the future of a user's own hook.
            return Standing.WAITING, "torch.hook", "a communication hook's future", ()
        if file == _OURS + "world/agree.py" and function == "_wait":
            return Standing.YIELDING, "first", "rank_zero_first(), until its turn comes", ()
        if file.endswith(_COLLECTIVES):
            return _in_torchs(stack)
        if not file.endswith(_AROUND) and _is_user(file):
            break
    return Standing.WORKING, "", "", ()


def _is_user(file: str) -> bool:
    return not _is_library(file)


def _in_ours(stack: list[FrameType]) -> tuple[Standing, str, str, tuple[int, ...]]:
    lookout = board.latest
    mark = {"place": "ours", "what": "the other ranks"} if lookout is None else lookout.mark
    members: tuple[int, ...] = ()
    if lookout is not None:
        members = _members(lookout.group)
    return Standing.WAITING, mark["place"], mark["what"] + _bucket(stack), members


def _bucket(stack: list[FrameType]) -> str:
    """Which bucket is waited for."""
    for frame in stack:
        if frame.f_code.co_name == "wait" and frame.f_code.co_filename.endswith("buckets/line.py"):
            bucket = frame.f_locals.get("bucket")
            line = frame.f_locals.get("self")
            if bucket is not None and line is not None:
                names = [line.plan.params[index].name for index in bucket.spec.params]
                held = f" ({names[0]} to {names[-1]})" if names else ""
                return f", bucket {bucket.spec.index}{held}"
    return ""


def _in_torchs(stack: list[FrameType]) -> tuple[Standing, str, str, tuple[int, ...]]:
    """The outermost of the collectives that call each other (``all_gather_object`` calls ``all_gather``)."""
    function, group = "", None
    for frame in stack:
        file = frame.f_code.co_filename
        if file.endswith(_COLLECTIVES):
            function, group = frame.f_code.co_name, frame.f_locals.get("group", group)
        elif not file.endswith(_AROUND):
            break
    members = _members(group) if group is not None else ()
    if function in _BETWEEN_TWO:
        # The other one is not known: no rank of the group is missing.
        members = (torch.distributed.get_rank(),)
    return Standing.WAITING, f"torch.{function}", f"torch.distributed.{function}()", members


def _members(group: Any) -> tuple[int, ...]:
    try:
        ranks = torch.distributed.get_process_group_ranks(group)
    except (RuntimeError, ValueError, KeyError, AttributeError):
        return ()
    return () if len(ranks) == torch.distributed.get_world_size() else tuple(ranks)
