"""Where the recorder listens outside the wrapper: data loaders, backward calls, optimizer steps.

While at least one tap is open, ``DataLoader`` iterators and ``torch.autograd.backward`` are replaced by functions that
note when the original began and ended; afterwards the originals are back. Optimizers have hooks for this.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from rankstep.parallel.hooks import inside_backward

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankstep.trace.device import DeviceMarks, Mark

DATA = "data"
BACKWARD = "backward"
OPTIMIZER = "optimizer"


class Taps:
    """Tells of data waits, backward calls and optimizer steps of one thread.

    Other threads that load data (prefetchers) do not make the training wait.

    Args:
        tell: Called with ``(kind, begin, end)``, nanoseconds of ``time.perf_counter_ns``.
        before_backward: Called before each outermost backward; must not raise.
        after_backward: Called after each, also one that raised; must not raise.

    Attributes:
        marks: Also notes when a device gets to the begin and end of backward calls and optimizer steps.
    """

    def __init__(
        self,
        tell: Callable[[tuple[str, int, int]], object],
        before_backward: Callable[[], None],
        after_backward: Callable[[], None],
    ) -> None:
        self._tell = tell
        self._before, self._after = before_backward, after_backward
        self._thread = threading.get_ident()
        self._stepping: dict[int, tuple[int, Mark | None]] = {}
        self._loading = False
        self.marks: DeviceMarks | None = None
        self._undo: list[Callable[[], None]] = []

    def open(self) -> None:
        """Begin to listen."""
        self._replace(DataLoader, "__iter__", self._timed_loading)
        self._replace(_BaseDataLoaderIter, "__next__", self._timed_loading)
        self._replace(torch.autograd, "backward", self._timed_backward)
        self._undo.append(register_optimizer_step_pre_hook(self._step_begins).remove)
        self._undo.append(register_optimizer_step_post_hook(self._step_ended).remove)

    def adopt(self) -> None:
        """From now on the thread that calls this is the one that is listened to."""
        self._thread = threading.get_ident()

    def close(self) -> None:
        """Stop listening and put the originals back."""
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: Any, name: str, timed: Callable[[Any], Any]) -> None:
        original = vars(owner)[name]
        replacement = timed(original)
        setattr(owner, name, replacement)

        def undo() -> None:
            # Somebody may have put a function of their own around ours: theirs stays, and ours only passes on.
            if vars(owner)[name] is replacement:
                setattr(owner, name, original)

        self._undo.append(undo)

    def _timed_loading(self, original: Any) -> Any:
        @functools.wraps(original)
        def load(loader: Any) -> Any:
            if self._loading or not self._undo or threading.get_ident() != self._thread:
                return original(loader)
            self._loading = True
            begin_ns = time.perf_counter_ns()
            try:
                return original(loader)
            finally:
                self._loading = False
                self._tell((DATA, begin_ns, time.perf_counter_ns()))

        return load

    def _timed_backward(self, original: Any) -> Any:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if (
                not self._undo
                or inside_backward()
                or torch.compiler.is_compiling()
                or threading.get_ident() != self._thread
            ):
                return original(*args, **kwargs)
            self._before()
            marks = self.marks
            mark = None if marks is None else marks.begins()
            begin_ns = time.perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                self._tell((BACKWARD, begin_ns, time.perf_counter_ns()))
                if marks is not None:
                    marks.ends(BACKWARD, mark)
                self._after()

        return backward

    def _step_begins(self, optimizer: Any, *_: Any) -> None:
        # An optimizer may step others inside itself; one whose step raises tells no end.
        mark = None if self.marks is None else self.marks.begins()
        self._stepping[id(optimizer)] = (time.perf_counter_ns(), mark)

    def _step_ended(self, optimizer: Any, *_: Any) -> None:
        begun = self._stepping.pop(id(optimizer), None)
        if begun is not None:
            self._tell((OPTIMIZER, begun[0], time.perf_counter_ns()))
            if self.marks is not None:
                self.marks.ends(OPTIMIZER, begun[1])
