"""Puts the guard in its place: where wrappers are made, where the world opens and closes, and where a program ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from rankstep.collectives import failures
from rankstep.collectives.lookout import board
from rankstep.doctor.channel import STORE_ERRORS
from rankstep.doctor.guard import Guard
from rankstep.doctor.position import users_line
from rankstep.doctor.settings import Settings, switched_off
from rankstep.errors import DriftError, ModelMismatchError, SyncError
from rankstep.world import observers

if TYPE_CHECKING:
    from types import TracebackType

_MESSAGE_LENGTH = 300
_BEHIND_NS = 1_000_000_000
_FAULTS = (Exception,)
"""Whatever goes wrong while an end is told must not hide why the program ends."""


class GuardWarning(UserWarning):
    """There is no guard, and why; training goes on."""


class _Post:
    """The guard of this process, if it has one."""

    def __init__(self) -> None:
        self.guard: Guard | None = None
        self.hooked = False
        self.lock = threading.Lock()


_post = _Post()


def install(*, models: bool) -> None:
    """From now on every world that opens has a guard.

    Args:
        models: Every model that is wrapped, too.

    Raises:
        WorldError: A variable has no meaning.
    """
    Settings.from_environment()
    if _begin not in observers.on_open:
        observers.on_open.append(_begin)
        observers.on_close.append(_world_closes)
        observers.in_wait.append(_raise_news)
        failures.explain.append(_explain)
        os.register_at_fork(after_in_child=_leave_to_parent)
    if models:
        from rankstep.parallel import observers as wrappers

        if on_wrap not in wrappers.on_wrap:
            wrappers.on_wrap.append(on_wrap)


def _leave_to_parent() -> None:
    if _post.guard is not None:
        _post.guard.close_in_child()
        _post.guard = None


def on_wrap(model: Any) -> None:
    """A model has been wrapped: watch over it. The guard of this process begins with the first one."""
    if model.reducer.comm.world_size > 1:
        _begin()
        guard = current()
        if guard is not None:
            guard.own.add(model)


def current() -> Guard | None:
    """The guard of this process."""
    guard = _post.guard
    return guard if guard is not None and guard.is_of_this_process else None


def _begin() -> None:
    group = dist.GroupMember.WORLD
    if switched_off() or group is None or not isinstance(group, dist.ProcessGroup):
        return
    if group.size() == 1:
        return
    with _post.lock:
        before = current()
        if before is not None:
            if before.group() is group:
                return
            before.close()
        board.news = None
        settings = Settings.from_environment()
        try:
            guard = Guard(group, settings, threading.get_ident())
            guard.open()
        except (*STORE_ERRORS, AttributeError) as error:
            if "clone" in str(error):
                # A store without connections, made for one process: nobody else is there to be asked.
                return
            warnings.warn(
                f"rank {group.rank()}: no guard watches over this rank: {error}",
                GuardWarning,
                stacklevel=2,
            )
            return
        _post.guard = guard
    _hook_ends()


def _hook_ends() -> None:
    if not _post.hooked:
        _post.hooked = True
        atexit.register(_at_exit)
    if not getattr(sys.excepthook, "rankstep_guard", False):
        before = sys.excepthook

        def hook(
            kind: type[BaseException], error: BaseException, frames: TracebackType | None
        ) -> None:
            with suppress(*_FAULTS):
                _fails(error.with_traceback(frames))
            before(kind, error, frames)

        hook.rankstep_guard = True  # type: ignore[attr-defined]
        sys.excepthook = hook


def _raise_news() -> None:
    guard = current()
    if guard is not None and board.news is not None:
        raise board.news(guard.own.rank, "rank_zero_first()")


def _explain() -> str:
    guard = current()
    with suppress(*_FAULTS):
        return "" if guard is None else guard.explain()
    return ""


def _world_closes(error: BaseException | None) -> None:
    guard = current()
    if guard is None:
        return
    if error is not None:
        with suppress(*_FAULTS):
            _fails(error)
        return
    guard.left("its work is done: it has left world()")
    guard.close()
    _post.guard = None


def _at_exit() -> None:
    guard = current()
    if guard is None:
        return
    if guard.verdict is None and not _failed:
        guard.left("its work is done: its program has come to its end")
    guard.close()
    _post.guard = None


_failed: list[int] = []
"""The errors that have been told; an error may pass ``world()`` first, and the end of the program then."""


def _fails(error: BaseException) -> None:
    guard = current()
    if guard is None or id(error) in _failed:
        return
    _failed.append(id(error))
    if isinstance(error, SystemExit) and not error.code:
        return
    if _may_follow(error):
        # Some other rank's end may be behind it, and is on its way to be told.
        guard.explain()
        if guard.verdict is not None and guard.verdict.reason not in str(error):
            error.add_note(f"rankstep: {guard.verdict.reason}")
    _put_behind_cause(error, guard)
    where = users_line(error)
    text = _in_a_line(error)
    guard.failed(
        f"{text} ({where})" if where else text,
        "".join(traceback.format_exception(error)),
        alone=not _all_hear(error),
    )


def _in_a_line(error: BaseException) -> str:
    first, *others = str(error).splitlines() or [""]
    text = f"{type(error).__name__}: {first}"
    if others and "Caught" in first:
        # A DataLoader hands on what a worker raised, with the whole traceback in the message.
        text += f" {others[-1].strip()}"
    return text[:_MESSAGE_LENGTH]


def _all_hear(error: BaseException) -> bool:
    """Whether it is an error that every rank raises for itself, or a signal that every rank gets.

    ``sys.exit(2)`` is how programs refuse their arguments, on all ranks: each shall end with that code.
    """
    if isinstance(error, SystemExit):
        return isinstance(error.code, int)
    return isinstance(error, (SyncError, ModelMismatchError, KeyboardInterrupt))


def _put_behind_cause(error: BaseException, guard: Guard) -> None:
    """The launcher orders failures by their moments, and hears of a killed rank no sooner than the other ranks do."""
    if guard.verdict is None or guard.own.rank in guard.verdict.ranks:
        return
    now_ns = getattr(error, "rankstep_failed_ns", time.monotonic_ns())
    with suppress(AttributeError, TypeError):
        error.rankstep_failed_ns = now_ns + _BEHIND_NS  # type: ignore[attr-defined]


def _may_follow(error: BaseException) -> bool:
    """Whether an error looks like the consequence of another rank's end."""
    if isinstance(error, DriftError):
        # All ranks raise it, at the same moment.
        return False
    if isinstance(error, (SyncError, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and (
        "onnection" in str(error) or "pair closure" in str(error)
    )
