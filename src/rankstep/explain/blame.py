"""Calling what a user gave, and saying in one place what went wrong there."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from rankstep.errors import RankstepError

if TYPE_CHECKING:
    from collections.abc import Callable

_Result = TypeVar("_Result")
_OURS = str(Path(__file__).parent)
_KNOWN = (
    str(Path(__file__).parents[1]),
    str(Path(torch.__file__).parent),
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")},
    "<frozen ",
    "<string>",
)
_DEVICES = ("cuda", "nvidia", "cudnn")


class JobError(RankstepError, ValueError):
    """A user's job cannot be found, loaded or run; says what is wrong with it and what would be right."""


def calling(what: str, call: Callable[[], _Result]) -> _Result:
    """Call code of the user's and return what it returns.

    Args:
        what: What is called, for messages.
        call: Calls it.

    Raises:
        JobError: It raised, or wanted to end the process; the cause is chained.
    """
    try:
        return call()
    except SystemExit as error:
        raise JobError(
            f"{what} ended the process with exit({error.code!r}). Next: keep what belongs to a script, such as reading "
            'its arguments, below `if __name__ == "__main__":`.'
        ) from error
    except Exception as error:
        raise JobError(f"{what} raised {told(error)}{_next(error)}") from error


def told(error: BaseException) -> str:
    """Return an exception as one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def users_traceback(error: BaseException) -> str:
    """Return an exception's traceback without the frames of this package and of Python's import machinery."""
    whole = traceback.TracebackException.from_exception(error)
    one: traceback.TracebackException | None = whole
    while one is not None:
        one.stack = traceback.StackSummary.from_list(
            [frame for frame in one.stack if not _is_ours(frame.filename)]
        )
        one = one.__cause__ or one.__context__
    lines = list(whole.format() if whole.stack else whole.format_exception_only())
    return "".join(lines)


def is_users(error: BaseException) -> bool:
    """Say whether code that is neither ours nor Python's nor PyTorch's took part in this exception."""
    one: BaseException | None = error
    while one is not None:
        names = (frame.filename for frame in traceback.extract_tb(one.__traceback__))
        if not all(name.startswith(_KNOWN) for name in names):
            return True
        one = one.__cause__ or one.__context__
    return False


def _is_ours(filename: str) -> bool:
    return filename.startswith((_OURS, "<frozen importlib"))


def _next(error: BaseException) -> str:
    """Say what to do about it, where that is known."""
    if not any(word in str(error).lower() for word in _DEVICES):
        return ""
    if torch.cuda.is_available():
        return (
            ". Next: return model and samples on the CPU; explain moves them to each rank's device."
        )
    return (
        ". Next: PyTorch has no GPU here, so return a model and samples that work on the CPU, and move nothing to a device "
        "in the job."
    )
