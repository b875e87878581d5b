"""A rank's side of the pool: open the group once, then run what the test sends until told to end."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rankstep.testing._wire import Packed, pack, unpack
from rankstep.testing.outcomes import Outcome, Status, dotted_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection

FORKED_FOR = "RANKSTEP_FORKED_FOR"
LOOPBACK = "127.0.0.1"
# Seldom used by programs, so that a rank may use SIGUSR1 and SIGUSR2 as it likes.
STACKS_SIGNAL = signal.SIGRTMIN + 5
SEED = 0

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Rank:
    """What a function on a rank is told about itself.

    Args:
        rank: Its number, from 0.
        world_size: How many ranks run the same function.
        device: Where its tensors belong.
    """

    rank: int
    world_size: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class Start:
    """What a rank needs to join the pool."""

    rank: Rank
    backend: str | None
    env: Mapping[str, str | None]
    store_port: int
    stacks_path: str
    group_timeout_s: float


@dataclass(frozen=True, slots=True)
class Request:
    """One function to run, with what it needs to be imported."""

    call: Packed
    sys_path: list[str]
    store_port: int


def die_with_parent(parent_pid: int) -> None:
    """End this process when its parent ends, however that happens."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def serve(start: Start, requests: Connection) -> None:
    """Run requests until the other end closes; the entry point of a rank's process."""
    die_with_parent(os.getppid())
    # A process of the forkserver would start its own by another one, which stays when this rank is killed. What a test runs
    # shall be what a program of its own runs.
    multiprocessing.set_start_method(None, force=True)
    # ^C reaches the whole terminal; the test alone decides when its ranks end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(start.stacks_path, "w", encoding="utf-8") as stacks:  # noqa: PTH123 (a path in /proc)
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
        _answer(requests, _outcome(start, _join))
        # What is here now stays; without this every collection below walks through all of torch.
        gc.freeze()
        while True:
            try:
                request: Request = unpack(Packed(requests.recv_bytes(), {}))
            except EOFError:
                break
            _answer(requests, _outcome(start, _run, request))
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(start: Start) -> None:
    os.environ.update(
        RANK=str(start.rank.rank),
        LOCAL_RANK=str(start.rank.rank),
        WORLD_SIZE=str(start.rank.world_size),
        LOCAL_WORLD_SIZE=str(start.rank.world_size),
        GROUP_RANK="0",
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT=str(start.store_port),
        # torch then joins the test's store at MASTER_PORT and does not try to listen there.
        TORCHELASTIC_USE_AGENT_STORE="True",
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    for name, value in start.env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    torch.set_num_threads(1)
    if start.rank.device.type == "cuda":
        torch.cuda.set_device(start.rank.device)
    if start.backend is not None:
        dist.init_process_group(
            start.backend,
            store=TCPStore(LOOPBACK, start.store_port, is_master=False),
            rank=start.rank.rank,
            world_size=start.rank.world_size,
            timeout=timedelta(seconds=start.group_timeout_s),
        )


def _run(start: Start, request: Request) -> Any:
    sys.path[:] = request.sys_path
    # Before warnings become errors: what an import says was judged when the test imported it.
    function, args, kwargs = unpack(request.call)
    environ = dict(os.environ)
    os.environ["MASTER_PORT"] = str(request.store_port)
    _reset_state()
    try:
        with warnings.catch_warnings(), _Uncaught() as uncaught:
            warnings.simplefilter("error")
            # Raised inside torch while it inspects its own annotations.
            warnings.filterwarnings("ignore", ".*_check_is_size.*", FutureWarning)
            value = function(start.rank, *args, **kwargs)
            gc.collect()
        uncaught.check()
        _check_group(start)
        return pack(value)
    finally:
        # Restored by difference: clearing the environment would for a moment take PATH away from other threads.
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        os.environ.update(environ)


def _reset_state() -> None:
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 (the global state is what user code draws from)
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


def _check_group(start: Start) -> None:
    if start.backend is None and dist.is_initialized():
        dist.destroy_process_group()
        raise RuntimeError("the function left a process group open")
    if start.backend is not None and not dist.is_initialized():
        raise RuntimeError(
            "the function closed the pool's process group; functions that open and close groups themselves need a pool "
            "with backend=None"
        )


def _outcome(start: Start, call: Callable[..., Any], *args: Any) -> Outcome:
    rank = start.rank.rank
    try:
        value = call(start, *args)
        return Outcome(rank, Status.OK, value, ended_ns=time.monotonic_ns())
    # A rank must report whatever ended the function, KeyboardInterrupt and SystemExit too.
    except BaseException as error:  # noqa: BLE001
        ended_ns = time.monotonic_ns()
        # Without the frames of this file, which say nothing about the test.
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        return Outcome(
            rank,
            Status.RAISED,
            error_type=type(error).__name__,
            error=str(error),
            traceback="".join(traceback.format_exception(error.with_traceback(frames))),
            error_bases=tuple(dotted_name(kind) for kind in type(error).__mro__),
            ended_ns=ended_ns,
        )
    finally:
        gc.collect()


def _answer(requests: Connection, outcome: Outcome) -> None:
    requests.send_bytes(pack(outcome).payload)


class _Uncaught:
    """Collects errors that Python can only print: in ``__del__``, in callbacks and in threads."""

    def __init__(self) -> None:
        self._errors: list[str] = []

    def __enter__(self) -> Self:
        self._before = sys.unraisablehook, threading.excepthook
        sys.unraisablehook = self._add
        threading.excepthook = self._add
        return self

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook, threading.excepthook = self._before

    def _add(self, unraised: Any) -> None:
        lines = traceback.format_exception(
            unraised.exc_type, unraised.exc_value, unraised.exc_traceback
        )
        self._errors.append("".join(lines))

    def check(self) -> None:
        if self._errors:
            raise RuntimeError("errors that nobody caught:\n" + "\n".join(self._errors))
