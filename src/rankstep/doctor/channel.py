"""How guards speak to each other: keys in the job's own store, written and read only when something is wrong.

While all goes well a guard's ear blocks in one wait for one key, on a connection of its own: nothing travels. To ring,
a rank sets that key for every rank. Rings are numbered, and whoever gets a number first is the judge of that round.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from rankstep.world import background

_FOR_EVER = timedelta(days=3650)
_QUICK_S = 3.0
"""For what is answered in a fraction of a millisecond; a store that takes longer is out of reach."""

STORE_ERRORS = (RuntimeError, KeyError, ValueError, OSError)
"""What a store raises that is gone, cut off, or late."""

_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Ring:
    """What a ring says.

    Attributes:
        kind: ASK: say where you are, and wait for a verdict; WHERE: only say it; TOLD: here is the verdict; STOP: the ear
            shall end.
        judge: Who rang.
        text: TOLD: the verdict.
    """

    kind: str
    judge: int
    text: str = ""


ASK, WHERE, TOLD, STOP = "ask", "where", "told", "stop"


class Mouth:
    """Speaks to the store in a thread of its own, since a call may never return once the host is cut off.

    Args:
        store: A connection that nobody else uses.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._errands: queue.SimpleQueue[_Errand | None] = queue.SimpleQueue()
        self._late: _Errand | None = None
        self._thread = background.begin("rankstep guard mouth", self._speak, (), self._finish)

    def __call__(self, method: str, *args: Any) -> Any:
        """Call a method of the store.

        Raises:
            TimeoutError: The store does not answer.
            RuntimeError: What the store raises.
        """
        errand = _Errand(method, args)
        if not self._stuck:
            self._errands.put(errand)
            if errand.done.wait(_QUICK_S):
                if errand.error is not None:
                    raise errand.error
                return errand.result
            self._late = errand
        raise TimeoutError(f"no answer for {_QUICK_S:g} s")

    @property
    def _stuck(self) -> bool:
        """Whether a call has not returned yet that was given up."""
        return self._late is not None and not self._late.done.is_set()

    def close(self) -> None:
        """End the thread."""
        self._finish()
        # A connection that a thread closes while the interpreter shuts down ends the process with it.
        self._thread.join(0.0 if self._stuck else _QUICK_S)

    def _finish(self) -> None:
        self._errands.put(None)

    def _speak(self) -> None:
        while (errand := self._errands.get()) is not None:
            try:
                errand.result = getattr(self._store, errand.method)(*errand.args)
            except Exception as error:  # noqa: BLE001 - raised where it was asked
                errand.error = error
            errand.done.set()


class _Errand:
    """One call."""

    __slots__ = ("args", "done", "error", "method", "result")

    def __init__(self, method: str, args: tuple[Any, ...]) -> None:
        self.method = method
        self.args = args
        self.done = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None


class Channel:
    """One rank's side.

    Args:
        store: The default group's own.
        rank: This one.
        world_size: Of the job.

    Attributes:
        round: The number of the next ring.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        # Two connections: a wait keeps everybody else from using its own.
        self._ear = _prefixed(store.clone())
        self._mouth = Mouth(_prefixed(store.clone()))
        self._ear.set_timeout(_FOR_EVER)
        # Kept in the store, for a second guard of the same rank.
        self.round = int(self._mouth("add", f"heard/{rank}", 0))

    def introduce(self, card: dict[str, Any]) -> None:
        """Leave word of who this rank is."""
        self._mouth("set", f"here/{self.rank}", json.dumps(card))

    def card(self, rank: int) -> dict[str, Any] | None:
        """Who a rank is; None: it has not come."""
        if not self._mouth("check", [f"here/{rank}"]):
            return None
        card: dict[str, Any] = json.loads(self._mouth("get", f"here/{rank}"))
        return card

    # ---------------------------------------------------------------- rings

    def listen(self) -> Ring:
        """Block until the next ring.

        Raises:
            RuntimeError: The store is gone.
        """
        key = f"ring/{self.round}/{self.rank}"
        self._ear.wait([key], _FOR_EVER)
        ring = Ring(**json.loads(self._ear.get(key)))
        if ring.kind == STOP:
            self._ear.delete_key(key)
        else:
            self.round = int(self._ear.add(f"heard/{self.rank}", 1))
        return ring

    def lead(self, number: int) -> bool:
        """Become the judge of a round; False: another rank is."""
        return int(self._mouth("add", f"lead/{number}", 1)) == 1

    def ring(self, number: int, ring: Ring) -> None:
        """Wake all ranks, this one too."""
        text = json.dumps({"kind": ring.kind, "judge": ring.judge, "text": ring.text})
        for rank in range(self.world_size):
            self._mouth("set", f"ring/{number}/{rank}", text)

    def stop(self) -> None:
        """End this rank's own ear."""
        text = json.dumps({"kind": STOP, "judge": self.rank, "text": ""})
        with suppress(*STORE_ERRORS):
            self._mouth("set", f"ring/{self.round}/{self.rank}", text)
        self._mouth.close()

    # ---------------------------------------------------------------- one round

    def answer(self, number: int, text: str) -> None:
        """Say where this rank is; for the ear."""
        self._ear.set(f"answer/{number}/{self.rank}", text)

    def answers(self, number: int, within_s: float) -> dict[int, bytes]:
        """Collect what the ranks answer."""
        until = time.monotonic() + within_s
        missing = set(range(self.world_size))
        found: dict[int, bytes] = {}
        while missing:
            for rank in sorted(missing):
                if self._mouth("check", [f"answer/{number}/{rank}"]):
                    found[rank] = self._mouth("get", f"answer/{number}/{rank}")
            missing -= found.keys()
            if time.monotonic() >= until:
                break
            time.sleep(_LOOK_S)
        return found

    def conclude(self, number: int, text: str) -> None:
        """As the judge: let the others have the verdict; an empty text is none."""
        self._mouth("set", f"verdict/{number}", text)

    def verdict(self, number: int, within_s: float) -> str | None:
        """Wait for what the judge concludes; None: it says nothing. For the ear."""
        try:
            self._ear.wait([f"verdict/{number}"], timedelta(seconds=within_s))
        except STORE_ERRORS:
            return None
        return bytes(self._ear.get(f"verdict/{number}")).decode()

    # ---------------------------------------------------------------- ends

    def post(self, kind: str, record: dict[str, Any]) -> None:
        """Leave word of this rank's end: ``failed`` or ``left``; in the order in which they come."""
        number: int = self._mouth("add", f"ends/{kind}", 1) - 1
        self._mouth("set", f"ends/{kind}/{number}", json.dumps(record | {"rank": self.rank}))

    def settle(self, rank: int, text: str) -> bytes:
        """Agree on what is said of a process that has ended without a word: what the first rank says of it."""
        return bytes(self._mouth("compare_set", f"ended/{rank}", "", text))

    def posted(self, kind: str) -> list[dict[str, Any]]:
        """Who has left such word, the first one first."""
        keys = [f"ends/{kind}/{number}" for number in range(self._mouth("add", f"ends/{kind}", 0))]
        # Between the two calls of `post` there is a number without a record.
        return [json.loads(self._mouth("get", key)) for key in keys if self._mouth("check", [key])]


def _prefixed(store: Any) -> Any:
    return dist.PrefixStore("rankstep/guard", store)  # type: ignore[attr-defined]
