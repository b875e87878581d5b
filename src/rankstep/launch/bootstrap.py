"""What each rank runs before the user's script, so that the launcher knows of it and it never outlives the launcher.

The launcher starts this file by its path, and it imports nothing but the standard library: a script that needs no torch
starts as fast as it would alone. It runs the script as ``__main__``, as the interpreter itself would.
"""

from __future__ import annotations

import builtins
import json
import os
import signal
import sys
import time
import traceback
import types
from contextlib import suppress
from importlib.machinery import SourceFileLoader

# Variables by which the launcher tells its ranks where to report.
LAUNCHER_PID = "RANKSTEP_LAUNCHER_PID"
CONTROL_PIPE = "RANKSTEP_CONTROL_PIPE"
# The first word when the program is no Python script.
EXECUTE = "--exec"

_PR_SET_PDEATHSIG = 1
_INTERRUPTED = 128 + signal.SIGINT
_LONGEST_FOLDER = 107 - len("/listener-12345678")


def main(words: list[str]) -> None:
    """Report to the launcher, then become the user's program.

    Args:
        words: what follows this file on the command line: ``script.py ...``, ``-m module ...`` or ``--exec program ...``.
    """
    _die_with_launcher()
    _report_start()
    if words[0] == EXECUTE:
        os.execvp(words[1], words[1:])  # noqa: S606
    _keep_files_of_workers()
    pid = os.getpid()
    try:
        if words[0] == "-m":
            _run_module(words[1:])
        else:
            _run_script(words)
    except SystemExit as error:
        if error.code and os.getpid() == pid:
            _record(f"SystemExit: {error.code}", "")
        raise
    except KeyboardInterrupt as error:
        # The launcher has stopped all ranks: one traceback says where they stood.
        if os.environ.get("RANK") == "0":
            _leave_out_own_frames(error)
            sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(_INTERRUPTED)
    except BaseException as error:  # noqa: BLE001
        if os.getpid() == pid:
            _leave_out_own_frames(error)
            callstack = "".join(traceback.format_exception(error))
            # world() stamps an exception before it closes the group, which makes other ranks fail, too.
            _record(
                traceback.format_exception_only(error)[-1].strip(),
                callstack,
                getattr(error, "rankstep_failed_ns", None),
            )
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _die_with_launcher() -> None:
    """Ask the kernel to kill this process when the launcher is gone, even by SIGKILL."""
    if sys.platform != "linux":
        return
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The launcher may have died before the kernel was asked.
    if os.getppid() != int(os.environ[LAUNCHER_PID]):
        sys.exit(f"rank {os.environ.get('RANK')}: the launcher is gone")


def _report_start() -> None:
    # Non-blocking: a launcher that is gone or busy must not hold the rank.
    with suppress(OSError):
        pipe = os.open(os.environ[CONTROL_PIPE], os.O_WRONLY | os.O_NONBLOCK)
        os.write(pipe, f"{os.getpid()}\n".encode())
        os.close(pipe)


def _keep_files_of_workers() -> None:
    """Have multiprocessing make its folder of sockets in the launcher's: a worker that is killed cannot remove its own."""
    from multiprocessing import process

    folder = os.path.join(os.path.dirname(os.environ[CONTROL_PIPE]), "workers")  # noqa: PTH118, PTH120
    # Longer than multiprocessing's own, and a socket's path has a limit.
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        return
    with suppress(OSError):
        os.makedirs(folder, mode=0o700, exist_ok=True)  # noqa: PTH103
        process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]


def _run_script(words: list[str]) -> None:
    script = os.path.abspath(words[0])  # noqa: PTH100
    # Only the reading may fail here: what the script itself raises must pass.
    source = b"PK"
    with suppress(OSError), open(script, "rb") as file:  # noqa: PTH123
        source = file.read()
    if not source.startswith(b"PK") and not script.endswith(".pyc"):
        _run_source(script, source, words)
        return
    # A folder or archive with a __main__.py, or compiled code: the interpreter knows how.
    os.execv(sys.executable, [sys.executable, "-u", *words])  # noqa: S606


def _run_source(script: str, source: bytes, words: list[str]) -> None:
    sys.argv = words
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))  # noqa: PTH120
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(
        __builtins__=builtins,
        __file__=script,
        __loader__=SourceFileLoader("__main__", script),
        __cached__=None,
    )
    sys.modules["__main__"] = main_module
    exec(compile(source, script, "exec", dont_inherit=True), main_module.__dict__)  # noqa: S102


def _run_module(words: list[str]) -> None:
    import runpy

    sys.argv = words
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # noqa: PTH109
    sys.modules["__main__"] = types.ModuleType("__main__")
    # What `python -m` does: it fills the present __main__ and puts the file's path into sys.argv[0].
    runpy._run_module_as_main(words[0])  # type: ignore[attr-defined]


def _leave_out_own_frames(error: BaseException) -> None:
    """Cut the frames of this file and of runpy off the top of a traceback: they are not the user's."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        frame = frame.tb_next
    error.__traceback__ = frame


def _record(message: str, callstack: str, failed_ns: int | None = None) -> None:
    """Leave the exception where the launcher looks for it, in the form of torch's error files."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    record = {
        "message": {
            "message": message,
            "extraInfo": {
                "py_callstack": callstack,
                "timestamp": str(int(time.time())),
                # Seconds are too coarse to tell which of the ranks failed first.
                "monotonic_ns": failed_ns or time.monotonic_ns(),
            },
        }
    }
    with suppress(OSError):
        with open(f"{path}.part", "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump(record, file)
        os.replace(f"{path}.part", path)  # noqa: PTH105


if __name__ == "__main__":
    main(sys.argv[1:])
