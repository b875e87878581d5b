"""One operation of the ranks of a host, from the post to the result."""

from __future__ import annotations

import enum
import threading
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rankstep.collectives import lookout
from rankstep.errors import StoppedRankWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankstep.collectives.hub import Hub
    from rankstep.collectives.lookout import Lookout
    from rankstep.collectives.posts import Peer, Post


class State(enum.Enum):
    """The life of an operation on this rank."""

    POSTED = "posted"
    CROSSING = "crossing"
    """This rank's slice is on its way to the other hosts."""
    DONE = "done"
    """This rank's part is."""
    FINISHED = "finished"


def _nothing() -> None:
    """No part in this."""


@dataclass(frozen=True, slots=True)
class Work:
    """This rank's part of an operation, prepared once and done in every step.

    Attributes:
        sum: First.
        crosses: What is then summed over the hosts; None: nothing.
        start: Starts what else goes between the hosts, and returns the work; None: nothing does.
        spread: Last.
    """

    sum: Callable[[], None] = _nothing
    crosses: torch.Tensor | None = None
    start: Callable[[], Any] | None = None
    spread: Callable[[], None] = _nothing


class _Label:
    """What a profile shows of an operation, from its start to its end.

    Profiles are searched for the labels that gloo gives to its collectives, which begin in one thread and end in another.
    """

    def __init__(self, name: str) -> None:
        self._handle = torch.ops.profiler._record_function_enter_new(f"gloo:{name}", None)

    def end(self) -> None:
        """It has ended."""
        end = torch.ops.profiler._record_function_exit._RecordFunction
        thread = threading.Thread(target=end, args=(self._handle,))
        thread.start()
        thread.join()


class Operation:
    """A :class:`rankstep.collectives.Pending` of the ranks of one host.

    Args:
        hub: Where it is under way.
        number: The same on all ranks.
        post: What this rank posted.
        sizes: The ranks' parts, where the caller says them.
        tensor: This rank's; None where there is none.
        then: Called with the result, before anybody hears of it.

    Attributes:
        state: See :class:`State`.
        missing: The peers that have not said that they are done.
        work: This rank's part.
        cross: Starts the sum of a slice over the hosts; None: there is one host.
        crossing: That sum.
        arrived: That has ended.
        memory: What a SHARE has brought.
    """

    def __init__(
        self,
        hub: Hub,
        number: int,
        post: Post,
        sizes: tuple[int, ...],
        tensor: torch.Tensor | None,
        then: Callable[[], None] | None,
    ) -> None:
        self.number = number
        self.post = post
        self.sizes = sizes
        self.tensor: Any = tensor
        self.state = State.POSTED
        self.missing: set[int] = set()
        self.work = Work()
        self.cross: Callable[[torch.Tensor], Any] | None = None
        self.crossing: Any = None
        self.arrived = False
        self.memory: torch.Tensor | None = None
        self._hub = hub
        self._then = then
        profiled = torch.autograd.profiler._is_profiler_enabled
        self._label = _Label(post.kind.name.lower()) if profiled else None
        self._future: torch.futures.Future[None] | None = None

    def cross_over(self, crossing: Any, wake: Callable[[], None]) -> None:
        """What goes between hosts is under way.

        Args:
            crossing: It.
            wake: Called by some thread when it has ended; if that is one of gloo's, before the work itself says so.
        """

        def arrived(_: object) -> None:
            self.arrived = True
            wake()

        self.crossing = crossing
        self.state = State.CROSSING
        crossing.get_future().add_done_callback(arrived)

    def finish(self) -> None:
        """The result is there."""
        self.state = State.FINISHED
        self.tensor = None
        if self._label is not None:
            self._label.end()
        if self._then is not None:
            self._then()
        if self._future is not None:
            self._future.set_result(None)

    def wait(self) -> None:
        """Return when the result is there.

        Raises:
            RuntimeError: A peer has ended or failed, or wants something else.
            RankSkewError: The ranks wait for each other in different places.
        """
        if self.state is not State.FINISHED:
            self._hub.wait(self)

    def get_future(self) -> torch.futures.Future[None]:
        """Is completed when the result is there."""
        with self._hub.lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self.state is State.FINISHED:
                    self._future.set_result(None)
            return self._future


class Watch:
    """A wait that takes long: looks around after some seconds, and ends at the group's time-out.

    Args:
        ask: Knows where the other ranks wait; None: nobody to ask.
        timeout_s: Of the group.
        compare: Raises if the hosts exchange different things; None: there is one.
    """

    def __init__(
        self,
        ask: Lookout | None,
        timeout_s: float,
        compare: Callable[[], None] | None = None,
    ) -> None:
        self._lookout = ask
        self._timeout_s = timeout_s
        self._compare = compare
        self._began = time.monotonic()
        self._next_s = lookout.ALARM_S
        self._looked = False
        self._warned = False

    def look(self, awaited: Sequence[Peer]) -> None:
        """Say what there is to say by now.

        Args:
            awaited: For whom this rank waits.

        Raises:
            RankSkewError: Another rank waits elsewhere.
            RuntimeError: The time is over.
        """
        if self._lookout is not None:
            self._lookout.hear()
        waited_s = time.monotonic() - self._began
        if waited_s < min(self._next_s, self._timeout_s):
            return
        who = ", ".join(map(str, awaited)) or "another host"
        if waited_s >= self._timeout_s:
            raise RuntimeError(f"timed out after {waited_s:.0f} s of waiting for {who}")
        looked, self._looked = self._looked, True
        self._next_s = waited_s + lookout.CONFIRM_S
        stopped = [peer for peer in awaited if peer.stopped()]
        if stopped and not self._warned:
            self._warned = True
            names = ", ".join(map(str, stopped))
            warnings.warn(
                f"waiting for {names}, stopped by a signal; `kill -CONT` lets it go on",
                StoppedRankWarning,
                stacklevel=2,
            )
        if self._lookout is not None:
            self._lookout.waited_long()
        # Places are known by name, and told at the second look, so they come first.
        if looked and self._compare is not None:
            self._compare()

    def over(self) -> None:
        """The result is there."""
        if self._lookout is not None and self._looked:
            self._lookout.came_through()
