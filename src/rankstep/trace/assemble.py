"""From one rank's recorded events to its steps.

Note [Where a step begins]
    A step is cut at the first data wait, or the first forward of any wrapper, after the gradients of the step before it
    were in place. So the optimizer step, logging and whatever else follows a backward belongs to that backward's step,
    and micro-batches under ``no_sync`` belong to the synced backward they lead to. ``passes.py`` says which reductions of
    several wrappers make one step.

Note [Nested spans]
    An optimizer's closure runs forward and backward inside the optimizer step, and waits lie inside backward. Each
    moment belongs to the innermost span, the one that began last.
"""

from __future__ import annotations

import bisect
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from rankstep.trace.model import BucketInfo, BucketTrace, Span, SpanKind, StepTrace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rankstep.trace.lines import RankFile, Rows
    from rankstep.trace.passes import Reduction

_Interval = tuple[SpanKind, int, int]
T = TypeVar("T")


class Names:
    """Numbers for the parameters and buckets of all wrappers and all plans of a rank; the same on every rank.

    Args:
        plans: The plan lines of its file.

    Attributes:
        wrappers: What each is called.
        params: All names; a name that several plans of a wrapper share stands once.
        param_bytes: Bytes of each; empty if some plan does not tell.
        buckets: Those of all plans, one after the other.
    """

    def __init__(self, plans: Sequence[dict[str, Any]]) -> None:
        # In another order than they were written: ranks may have written them at different times.
        plans = sorted(plans, key=lambda plan: (plan["wrapper"], plan["plan_from"]))
        modules = {plan["wrapper"]: plan["module"] for plan in plans}
        self.places = {wrapper: place for place, wrapper in enumerate(modules)}
        self.wrappers = [_called(wrapper, modules) for wrapper in modules] or [""]
        self.params: list[str] = []
        self.param_bytes: list[int] = []
        self.buckets: list[BucketInfo] = []
        # For each wrapper and plan: from which step, the numbers of its parameters, the number of its first bucket.
        self._plans: dict[int, list[tuple[int, list[int], int]]] = {}
        known: dict[tuple[int, str], int] = {}
        for plan in plans:
            wrapper = plan["wrapper"]
            place = self.places[wrapper]
            numbers = []
            for place_in_plan, name in enumerate(plan["params"]):
                if (wrapper, name) not in known:
                    known[wrapper, name] = len(self.params)
                    several = len(modules) > 1
                    self.params.append(f"{self.wrappers[place]}: {name}" if several else name)
                    self.param_bytes += plan["param_bytes"][place_in_plan : place_in_plan + 1]
                numbers.append(known[wrapper, name])
            first = len(self.buckets)
            self._plans.setdefault(wrapper, []).append((plan["plan_from"], numbers, first))
            for bucket in plan["buckets"]:
                params = tuple(numbers[i] for i in bucket["params"])
                self.buckets.append(BucketInfo(len(self.buckets), bucket["nbytes"], params, place))

    def param(self, wrapper: int, step: int, index: int) -> int | None:
        """Its number among all; None if the file lacks the plan."""
        plan = self._plan(wrapper, step)
        return plan[1][index] if plan is not None and 0 <= index < len(plan[1]) else None

    def bucket(self, wrapper: int, step: int, index: int) -> int | None:
        """Its number among all; None if the file lacks the plan."""
        plan = self._plan(wrapper, step)
        if plan is None or not 0 <= plan[2] + index < len(self.buckets):
            return None
        return plan[2] + index

    def _plan(self, wrapper: int, step: int) -> tuple[int, list[int], int] | None:
        valid = [plan for plan in self._plans.get(wrapper, []) if plan[0] <= step]
        return valid[-1] if valid else None


def _called(wrapper: int, modules: dict[int, str]) -> str:
    name = modules[wrapper]
    if not name:
        return str(wrapper)
    return name if list(modules.values()).count(name) == 1 else f"{name} {wrapper}"


def assemble(
    file: RankFile, names: Names, numbers: Mapping[Reduction, int]
) -> tuple[StepTrace, ...]:
    """Put a rank's events into steps; a step whose gradients never got into place is left out.

    Args:
        file: As it was read.
        names: Numbers of its parameters and buckets.
        numbers: The number of the step of each reduction.
    """
    events = file.events
    settled = _settled(file, numbers)
    if not settled:
        return ()
    shift = file.header["offset_ns"]
    intervals = sorted(_intervals(file), key=lambda each: (each[1], -each[2]))
    forwards = [at for kinds in events.values() for _, at in kinds["forward_began"]]
    begins = sorted([*(begin for begin, _ in file.spans["data"]), *forwards])
    cuts = _cuts([at for at, _, _ in settled], begins, [end for _, _, end in intervals])
    buckets = sorted(
        (b for wrapper, kinds in events.items() for b in _buckets(wrapper, kinds, names)),
        key=lambda each: each.launched_ns,
    )
    # On GPUs the host never sees a collective end: what torch reports there is when it was queued.
    if not file.by_device and not on_host(file.header["device"]):
        buckets = [replace(b, finished_ns=None) for b in buckets]
    ready = sorted(
        (at, number)
        for wrapper, kinds in events.items()
        for step, param, at in kinds["grad_ready"]
        if (number := names.param(wrapper, step, param)) is not None
    )
    cpu = {(w, step): ns for w, kinds in events.items() for step, ns, _, _ in kinds["waits_ended"]}
    steps = []
    still: list[_Interval] = []
    place = 0
    for (_, number, together), (begin, end) in zip(settled, pairwise(cuts), strict=True):
        inside = [each for each in still if each[2] > begin]
        while place < len(intervals) and intervals[place][1] < end:
            inside.append(intervals[place])
            place += 1
        still = inside
        clipped = [(k, max(b, begin), min(e, end)) for k, b, e in inside if e > begin]
        wrappers = {names.places[wrapper] for wrapper, _ in together if wrapper in names.places}
        step = StepTrace(
            number=number,
            begin_ns=begin,
            end_ns=end,
            spans=tuple(Span(*each) for each in innermost(clipped, begin, end)),
            ready=tuple((param, at) for at, param in _between(ready, begin, end, lambda r: r[0])),
            buckets=tuple(_between(buckets, begin, end, lambda b: b.launched_ns)),
            wrappers=tuple(sorted(wrappers)) or (0,),
            learns=any(step == 0 for _, step in together),
            wait_cpu_ns=sum(cpu[one] for one in together) if cpu.keys() >= {*together} else None,
        )
        steps.append(moved(step, shift))
    return tuple(steps)


def _settled(
    file: RankFile, numbers: Mapping[Reduction, int]
) -> list[tuple[int, int, list[Reduction]]]:
    """When each step's last gradients were in place, which step, and its reductions, in order of time."""
    found: dict[int, tuple[int, list[Reduction]]] = {}
    for wrapper, kinds in file.events.items():
        for step, at in kinds["step_settled"]:
            number = numbers.get((wrapper, step))
            if number is not None:
                until, together = found.get(number, (at, []))
                found[number] = (max(until, at), [*together, (wrapper, step)])
    return sorted((at, number, together) for number, (at, together) in found.items())


def on_host(device: str) -> bool:
    """Whether the times of work on this device are those of its host."""
    return device.startswith("cpu")


def _between(items: Sequence[T], begin: int, end: int, at: Callable[[T], int]) -> Sequence[T]:
    """Those from ``begin`` on and before ``end``, of items ordered by time."""
    return items[bisect.bisect_left(items, begin, key=at) : bisect.bisect_left(items, end, key=at)]


def moved(step: StepTrace, by: int) -> StepTrace:
    """The same step, earlier by so many nanoseconds."""
    if not by:
        return step
    return replace(
        step,
        begin_ns=step.begin_ns - by,
        end_ns=step.end_ns - by,
        spans=tuple(Span(s.kind, s.begin_ns - by, s.end_ns - by) for s in step.spans),
        ready=tuple((param, at - by) for param, at in step.ready),
        buckets=tuple(
            replace(
                b,
                filled_ns=None if b.filled_ns is None else b.filled_ns - by,
                launched_ns=b.launched_ns - by,
                finished_ns=None if b.finished_ns is None else b.finished_ns - by,
                wait_begin_ns=b.wait_begin_ns - by,
                wait_end_ns=b.wait_end_ns - by,
            )
            for b in step.buckets
        ),
    )


def _cuts(settled: Sequence[int], begins: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Where each step begins, and where the last one ends; see Note [Where a step begins]."""
    cuts = [min(begins[0] if begins else settled[0], settled[0])]
    for at in settled[:-1]:
        place = bisect.bisect_left(begins, at)
        cuts.append(begins[place] if place < len(begins) else at)
    after = bisect.bisect_left(begins, settled[-1])
    known_end = max([settled[-1], *ends])
    cuts.append(begins[after] if after < len(begins) else known_end)
    # Two backwards without a forward between them: the second step begins where the first has settled.
    for place, at in enumerate(settled[1:], 1):
        if cuts[place] > at:
            cuts[place] = settled[place - 1]
    return cuts


def _intervals(file: RankFile) -> Iterable[_Interval]:
    for kind in (SpanKind.DATA, SpanKind.BACKWARD, SpanKind.OPTIMIZER):
        yield from ((kind, begin, end) for begin, end in file.spans[kind.value])
    calls = sorted(file.spans["backward"])
    for kinds in file.events.values():
        for begin, end in pairs(kinds["forward_began"], kinds["forward_ended"]):
            yield SpanKind.FORWARD, begin, end
        ended = {step: at for step, at in kinds["step_settled"]}  # noqa: C416 - dict() would not know the widths
        for step, at in kinds["backward_began"]:
            # Somebody called the engine by another way: all that is known is the first gradient.
            place = bisect.bisect_right(calls, at, key=lambda call: call[0]) - 1
            if step in ended and (place < 0 or calls[place][1] < at):
                yield SpanKind.BACKWARD, at, ended[step]
        waits: dict[int, list[int]] = {}
        for step, _, begun, at in kinds["bucket_waited"]:
            waits.setdefault(step, []).extend((begun, at))
        for times in waits.values():
            yield SpanKind.WAIT, min(times), max(times)


def pairs(
    begins: Iterable[tuple[int, ...]], ends: Iterable[tuple[int, ...]]
) -> Iterable[tuple[int, int]]:
    """Match each end with the last begin before it; a forward that raised has no end."""
    marks = sorted([*((b[1], 0) for b in begins), *((e[1], 1) for e in ends)])
    stack: list[int] = []
    for at, is_end in marks:
        if not is_end:
            stack.append(at)
        elif stack:
            yield stack.pop(), at


def innermost(intervals: Sequence[_Interval], begin: int, end: int) -> list[_Interval]:
    """Cover a stretch without gaps or overlap; see Note [Nested spans].

    Args:
        intervals: Inside the stretch, ordered by begin, and by length where they begin together, longest first.
        begin: Of the stretch.
        end: Of the stretch.
    """
    covered: list[_Interval] = []
    at = begin
    stack: list[_Interval] = [(SpanKind.OTHER, begin, end)]

    def advance(to: int) -> None:
        nonlocal at
        while at < to:
            kind, _, until = stack[-1]
            if until <= at and len(stack) > 1:
                stack.pop()
                continue
            stop = min(to, until)
            if covered and covered[-1][0] is kind:
                covered[-1] = (kind, covered[-1][1], stop)
            else:
                covered.append((kind, at, stop))
            at = stop

    for interval in intervals:
        advance(interval[1])
        stack.append(interval)
    advance(end)
    return covered


def _buckets(wrapper: int, kinds: Mapping[str, Rows], names: Names) -> Iterable[BucketTrace]:
    filled = {(step, index): at for step, index, at in kinds["bucket_filled"]}
    finished = {(step, index): at for step, index, at in kinds["bucket_finished"]}
    waited = {(step, index): (begun, at) for step, index, begun, at in kinds["bucket_waited"]}
    for step, index, in_backward, launched in kinds["bucket_launched"]:
        number = names.bucket(wrapper, step, index)
        if number is None or (step, index) not in waited:
            continue
        begun, ended = waited[step, index]
        finish = finished.get((step, index))
        # A thread told of the end, and it may have had to wait for this one.
        finish = None if finish is None else max(launched, min(finish, ended))
        yield BucketTrace(
            number,
            filled.get((step, index)),
            launched,
            finish,
            begun,
            ended,
            bool(in_backward),
        )
