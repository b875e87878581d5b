"""The only file that touches autograd: a hook on every parameter, and a callback at the end of the outermost backward.

Note [Outermost backward]
    The engine's ``queue_callback`` belongs to the graph task that is running, and reentrant checkpointing runs a
    backward inside a backward. Settling when the inner one ends would be too early. A hook runs inside an inner
    backward exactly if a frame of ``BackwardCFunction.apply`` is on its Python stack; that frame's node belongs to the
    outer graph, so a pre-hook on the nodes that follow it fires in the outer backward, where the test is repeated.

Note [A backward that died]
    The callback is an object that only the engine holds. If backward raises, the engine drops it without calling it,
    and its ``__del__`` tells the reducer at that very moment.

Note [Frozen parameters]
    A hook cannot be put on a parameter that does not require grad, but one that was put on it before it was frozen
    stays. So frozen ones are thawed for the moment of registration, and report by themselves when a user thaws them.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import BackwardCFunction

from rankstep.buckets.states import ReducerState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import CodeType, FrameType

    from torch.utils.hooks import RemovableHandle

    from rankstep.buckets import Reducer

_REENTRANT: CodeType = BackwardCFunction.apply.__code__


def inside_backward() -> bool:
    """Whether the calling code runs inside a backward (a checkpoint computing its forward again, for example)."""
    return torch._C._current_graph_task_id() != -1


class _AtEnd:
    """Settles the reducer when called, tells it of the backward's death when dropped uncalled."""

    __slots__ = ("_reducer", "_settles")

    def __init__(self, reducer: Reducer, *, settles: bool) -> None:
        self._reducer: Reducer | None = reducer
        self._settles = settles

    def __call__(self) -> None:
        reducer, self._reducer = self._reducer, None
        if reducer is not None and self._settles:
            reducer.settle()

    def __del__(self) -> None:
        if self._reducer is not None:
            self._reducer.died()


class GradientHooks:
    """Connects one reducer to autograd.

    Args:
        reducer: Is told of gradients and of the end of each backward.
        params: The reducer's parameters, in its order.
        frozen: The module's other parameters; a gradient that reaches one of them is a change to be noticed.

    Attributes:
        sync: Whether backwards are reduced; read when a backward's first gradient arrives.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.Tensor.register_post_accumulate_grad_hook.html
    """

    def __init__(
        self, reducer: Reducer, params: Sequence[torch.Tensor], frozen: Iterable[torch.Tensor] = ()
    ) -> None:
        self.sync = True
        self._reducer = reducer
        self._outer: list[RemovableHandle] = []
        self._handles: list[RemovableHandle] = []
        self._mutes: list[RemovableHandle] = []
        self._warned = False
        self.watch(params, frozen)

    def watch(self, params: Sequence[torch.Tensor], frozen: Iterable[torch.Tensor]) -> None:
        """Put the hooks on these parameters, in the reducer's order, and take them off all others."""
        self.remove()
        for index, param in enumerate(params):
            self._handles.append(param.register_post_accumulate_grad_hook(self._hook_for(index)))
        self.watch_new(frozen)

    def watch_new(self, params: Iterable[torch.Tensor]) -> None:
        """Also notice gradients of parameters that the reducer does not have; see Note [Frozen parameters]."""
        for param in params:
            if param.is_leaf and (param.is_floating_point() or param.is_complex()):
                requires_grad = param.requires_grad
                param.requires_grad_(True)
                self._handles.append(param.register_post_accumulate_grad_hook(self._on_new))
                param.requires_grad_(requires_grad)

    def remove(self) -> None:
        """Take every hook off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def mute(self, params: Iterable[torch.Tensor]) -> None:
        """Turn every gradient that reaches these parameters into zeros, also a NaN, until :meth:`unmute`."""
        self.unmute()
        self._mutes = [p.register_hook(torch.zeros_like) for p in params if p.requires_grad]

    def unmute(self) -> None:
        """Let gradients through again."""
        for handle in self._mutes:
            handle.remove()
        self._mutes.clear()

    def remove_with(self, owner: object) -> None:
        """Remove the hooks when ``owner`` is collected, so that its module can be wrapped anew."""
        weakref.finalize(owner, self.remove)

    def _hook_for(self, index: int) -> Callable[[torch.Tensor], None]:
        # Called once per parameter and backward: what it needs is bound here, not looked up there.
        reducer = self._reducer
        collecting = ReducerState.COLLECTING
        firings = reducer.firings
        fired, expected, home, loud = firings.fired, firings.expected, firings.home, firings.loud
        ready, again, begin = reducer.ready, reducer.again, self._begin

        def on_gradient(param: torch.Tensor) -> None:
            if reducer.state is not collecting and not begin(index):
                return
            count = fired[index] = fired[index] + 1
            if count == expected[index]:
                bucket = home[index]
                if bucket.left > 1 and not loud[index]:
                    bucket.left -= 1
                else:
                    ready(index, param)
            elif count > expected[index]:
                again(index, param)

        return on_gradient

    def _on_new(self, param: torch.Tensor) -> None:
        if param.grad is None:
            return
        self._reducer.note_change()
        if self.sync and self._reducer.state is not ReducerState.COLLECTING:
            self._begin(0)

    def _begin(self, index: int) -> bool:
        """The first gradient of a backward. False: under ``no_sync``, it only accumulates."""
        if not self.sync:
            self._reducer.check_plain()
            self._reducer.firings.accumulated[index] = 1
            return False
        if torch.is_grad_enabled() and not self._warned:
            self._warned = True
            warnings.warn(
                "backward(create_graph=True) through DistributedDataParallel: gradients are reduced, but the reduction "
                "itself is not differentiated, so second-order gradients stay this rank's own. Use torch.autograd.grad "
                "for a penalty on inputs, which is exact.",
                stacklevel=2,
            )
        self._reducer.begin()
        self._queue_end()
        return True

    def _queue_end(self) -> None:
        """See Note [Outermost backward]."""
        node = _outer_node()
        _queue_callback(_AtEnd(self._reducer, settles=node is None))
        if node is not None:
            self._outer = [
                following.register_prehook(self._arrived_outside)
                for following, _ in node.next_functions
                if following is not None
            ]

    def _arrived_outside(self, _grads: Any) -> None:
        """The node after a reentrant backward is about to run: one level further out."""
        outer, self._outer = self._outer, []
        for handle in outer:
            handle.remove()
        if outer and self._reducer.state is ReducerState.COLLECTING:
            self._queue_end()


def _queue_callback(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _outer_node() -> Any:
    """The node of the next outer backward inside which this one runs; None if this is the outermost."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _REENTRANT:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None
