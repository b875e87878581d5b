"""``bucket_cap_mb="auto"``: measure the group and the first steps, then keep the buckets with which a step is shortest.

1. LEARNING: the first synced backward is that of every reducer: it learns the order. At its end the group's all-reduce
   is measured (``measure.py``), and one bucket that leaves at the end of backward becomes the plan for a while: nothing
   that is sent disturbs the times at which gradients become ready.
2. MEASURING: a few steps, the first of which does not count. Each rank notes when its gradients were ready, when
   backward ended and how long sending took.
3. The next backward learns once more, so that nothing of it lies in a bucket yet. At its end the ranks gather what they
   have measured, rank 0 plans, every rank adopts that plan (SETTLED), and nothing here is called in a step any more.

All ranks count steps, not time, so they get there together, whatever became of the steps in between; a step that some
rank leaves with an error counts like any other. A module that changes begins anew.
"""

from __future__ import annotations

import enum
import itertools
import statistics
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from rankstep.buckets.forecast import CAPS_MIB, Forecast, Outlook
from rankstep.buckets.measure import gathered, measure_link
from rankstep.buckets.measured import NONE, PER_STEP, Measured, StepModel, cut
from rankstep.buckets.plan import Caps, lay_out, make_plan
from rankstep.buckets.predict import MIB, Link, cap_list
from rankstep.collectives.failures import naming_failure
from rankstep.trace import events as ev

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankstep.buckets.plan import ParamSpec, Plan
    from rankstep.collectives import Communicator

MEASURED = 10
"""Steps that count. What a loopback socket takes for the same bytes varies by a third; this halves the error twice."""

WARM_UP = 2
"""Steps before them: the first learns, and the first after it still touches memory for the first time."""

_WHOLE = Caps((1 << 62,))


class Phase(enum.Enum):
    """How far the search for a plan has come."""

    LEARNING = "learning the order"
    MEASURING = "measuring steps"
    SETTLED = "settled"


@dataclass(slots=True)
class Marks:
    """What one rank notes in one step, in nanoseconds of its own clock, or as events of its device.

    Attributes:
        ready: When each gradient was ready.
        left: The first bucket left: backward had ended, and its gradients lay in the bucket.
        through: The last wait was over.
        settled: All gradients were in place.
    """

    ready: dict[int, Any] = field(default_factory=dict)
    left: Any = None
    through: Any = None
    settled: Any = None


class Clock:
    """Tells when the host did something; see :class:`DeviceClock`."""

    def mark(self, at_ns: int) -> Any:
        """A moment; ``at_ns``: what the host's clock showed."""
        return at_ns

    def between_ns(self, earlier: Any, later: Any) -> int:
        """How long two moments lie apart."""
        return int(later - earlier)


class DeviceClock(Clock):
    """Tells when a device got there: the host runs ahead of it, and must not wait for it in a step.

    Args:
        device: Which.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self, _at_ns: int) -> Any:
        """An event in the device's queue."""
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def between_ns(self, earlier: Any, later: Any) -> int:
        """How long the device took from one event to the other; waits for the later one."""
        later.synchronize()
        return round(1e6 * float(earlier.elapsed_time(later)))


class AutoPlan:
    """Finds a reducer's plan; see the module's text.

    Args:
        comm: The ranks.
        device: Of the gradients.

    Attributes:
        phase: How far it is.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self.phase = Phase.LEARNING
        self._comm = comm
        self._device = device
        self._clock = Clock() if device.type == "cpu" or comm.host_waits else DeviceClock(device)
        self._link: Link | None = None
        self._steps = 0
        self._order: list[int] = []
        self._now = Marks()
        self._told: list[tuple[int, Marks]] = []

    # ---------------------------------------------------------------- asked by the reducer

    def restart(self) -> None:
        """The parameters are others than before."""
        self.phase = Phase.LEARNING
        self._order = []
        self._forget()

    def _forget(self) -> None:
        self._steps = 0
        self._now = Marks()
        self._told = []

    def beside(
        self, watcher: Callable[[ev.Event], None] | None
    ) -> Callable[[ev.Event], None] | None:
        """Whom to tell of events now, where ``watcher`` wants to be told as well; None: nobody."""
        if self.phase is not Phase.MEASURING:
            return watcher
        if watcher is None:
            return self.tell

        def tell_both(event: ev.Event) -> None:
            self.tell(event)
            watcher(event)

        return tell_both

    def step_closed(self) -> None:
        """A synced backward is over, whatever came of it; called by every rank."""
        self._steps += 1

    @property
    def due(self) -> bool:
        """The backward that begins ends with the plan that stays; the same on all ranks."""
        return self.phase is Phase.MEASURING and self._steps == WARM_UP + MEASURED

    def tell(self, event: ev.Event) -> None:
        """Take in what happened in a step that is measured."""
        now = self._now
        if isinstance(event, ev.GradReady):
            now.ready[event.param] = self._clock.mark(event.at_ns)
        elif isinstance(event, ev.BucketLaunched):
            if now.left is None:
                now.left = self._clock.mark(event.at_ns)
        elif isinstance(event, ev.BucketWaited):
            now.through = self._clock.mark(event.at_ns)
        elif isinstance(event, ev.StepSettled):
            now.settled = self._clock.mark(event.at_ns)
            self._told.append((self._steps, now))
            self._now = Marks()

    def plan(
        self, specs: Sequence[ParamSpec], order: Sequence[int], packed_below_bytes: int
    ) -> Plan:
        """The plan from here on; collective, at the end of a backward that has sent nothing yet.

        Args:
            specs: The parameters.
            order: In which they become ready, the same on all ranks; counts at the first call only.
            packed_below_bytes: As for :func:`rankstep.buckets.plan.make_plan`.

        Raises:
            CommunicationError: A collective failed.
        """
        if self.phase is Phase.LEARNING:
            self._order = list(order)
        if self._link is None:
            self._link = self._measure_link(specs)
        whole = make_plan(specs, self._order, _WHOLE, packed_below_bytes=packed_below_bytes)
        if self.phase is Phase.MEASURING:
            with naming_failure(self._comm, "plan", "agreeing on the measured bucket plan"):
                rows = gathered(self._comm, self._own(len(specs)), self._device)
                measured = Measured.of(rows, MEASURED)
                if measured is not None:
                    model = StepModel(self._link, measured, specs, self._order, whole)
                    plan = self._best(model, specs, packed_below_bytes)
                    self.phase = Phase.SETTLED
                    self._forget()
                    return plan
        # Again, if no rank got through a step.
        self.phase = Phase.MEASURING
        self._forget()
        return whole

    # ---------------------------------------------------------------- measuring

    def _measure_link(self, specs: Sequence[ParamSpec]) -> Link:
        of: Counter[torch.dtype] = Counter()
        for spec in specs:
            of[spec.buffer_dtype] += spec.nbytes
        dtype = of.most_common(1)[0][0]
        return measure_link(self._comm, dtype, self._device, of.total())

    def _own(self, count: int) -> list[int]:
        """This rank's row; see :meth:`rankstep.buckets.measured.Measured.of`."""
        steps = [[NONE] * PER_STEP for _ in range(MEASURED)]
        ready: list[list[int]] = [[] for _ in range(count)]
        between = self._clock.between_ns
        for (_, before), (number, now) in itertools.pairwise(self._told):
            if number < WARM_UP or not now.ready or now.left is None or now.through is None:
                continue
            begin = before.settled
            steps[number - WARM_UP] = [
                between(begin, now.left),
                between(now.left, now.through),
                between(begin, now.settled),
            ]
            for index, at in now.ready.items():
                ready[index].append(between(begin, at))
        medians = [round(statistics.median(each)) if each else NONE for each in ready]
        return [*itertools.chain.from_iterable(steps), *medians]

    # ---------------------------------------------------------------- planning

    def _best(self, model: StepModel, specs: Sequence[ParamSpec], packed_below_bytes: int) -> Plan:
        dense = model.dense
        nbytes = [specs[index].nbytes for index in dense]
        ends = self._of_rank_0(model.best_ends(), len(dense))
        through = list(itertools.accumulate(nbytes, initial=0))
        sizes = [through[end] - through[begin] for begin, end in itertools.pairwise([0, *ends])]
        plan = lay_out(
            specs,
            cut(specs, self._order, dense, ends),
            Caps(tuple(max(1, size) for size in sizes) or _WHOLE.cap_bytes),
            packed_below_bytes,
        )
        others = [
            make_plan(specs, self._order, Caps((cap * MIB,)), packed_below_bytes=packed_below_bytes)
            for cap in CAPS_MIB
        ]
        forecast = Forecast(
            link=model.link,
            compute_ns=model.compute_ns,
            plan=Outlook(
                cap_list(nbytes, ends) if model.of_one_kind else (),
                len(plan.buckets),
                model.step_ns(plan),
            ),
            others=tuple(
                Outlook((float(cap),), len(other.buckets), model.step_ns(other))
                for cap, other in zip(CAPS_MIB, others, strict=True)
            ),
        )
        return replace(plan, forecast=forecast)

    def _of_rank_0(self, ends: Sequence[int], count: int) -> list[int]:
        """Rank 0's ends of buckets: the arithmetic of two hosts may differ in the last bit."""
        is_end = torch.zeros(count + 1, dtype=torch.int64, device=self._device)
        is_end[list(ends)] = 1
        self._comm.broadcast(is_end, 0).wait()
        return [place for place, flag in enumerate(is_end.tolist()) if flag]
