"""Which reductions make one step, and which number it has on all ranks.

Note [What a step is]
    A step is one synced backward. Several wrappers may take part in it: one inside the other, or a generator that is
    trained through its discriminator. Their reductions then lie inside each other in time, because each begins with a
    gradient and all end when backward ends. Where wrappers take turns, each backward is a step of its own.

    With one wrapper a step has the number that the wrapper itself gives it. With several they are counted in order,
    from the number that the wrapper that has reduced most often gave to its first one.

A rank that has run out of inputs takes part without a backward, one wrapper after the other, so what some rank shows as
one step is one on all.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankstep.trace.lines import RankFile

Reduction = tuple[int, int]
"""A wrapper's number, and which of its synced backwards."""


def numbered(files: Sequence[RankFile]) -> dict[Reduction, int]:
    """Give every reduction of all ranks the number of its step.

    Args:
        files: Of the ranks of one run.
    """
    orders = sorted(map(_passes, files), key=len, reverse=True)
    every = {one for order in orders for together in order for one in together}
    if len({wrapper for wrapper, _ in every}) < 2:
        return {one: one[1] for one in every}
    groups: dict[Reduction, frozenset[Reduction]] = {}
    for order in orders:
        for together in order:
            whole = together.union(*(groups[one] for one in together if one in groups))
            groups |= dict.fromkeys(whole, whole)
    # In the order of the rank that has most; what it lacks stands behind what came before it elsewhere.
    keys: dict[frozenset[Reduction], tuple[int, ...]] = {}
    for order in orders:
        before: tuple[int, ...] = (-1,)
        for place, together in enumerate(order):
            whole = groups[next(iter(together))]
            if whole not in keys:
                keys[whole] = (place,) if order is orders[0] else (*before, place)
            before = keys[whole]
    wrappers = {wrapper for wrapper, _ in every}
    first = max(min(step for w, step in every if w == wrapper) for wrapper in wrappers)
    ordered = sorted(keys, key=lambda whole: keys[whole])
    return {one: first + place for place, whole in enumerate(ordered) for one in whole}


def own_steps(numbers: Mapping[Reduction, int], steps: range) -> dict[int, range]:
    """For each wrapper, from its first to its last reduction in these steps, and one more, where the last one ends.

    Args:
        numbers: From :func:`numbered`.
        steps: Numbers of steps.
    """
    own: dict[int, range] = {}
    for (wrapper, step), number in numbers.items():
        if number in steps:
            before = own.get(wrapper, range(step, step + 2))
            own[wrapper] = range(min(before.start, step), max(before.stop, step + 2))
    return own


def own_times(
    file: RankFile, numbers: Mapping[Reduction, int], steps: range
) -> tuple[float, float]:
    """A rank's time from the settlement before these steps to the first gradient behind them.

    Args:
        file: Of the rank; :func:`rankstep.trace.lines.sketch` of it is enough.
        numbers: From :func:`numbered`.
        steps: Numbers of steps.
    """
    first, last = -math.inf, math.inf
    for wrapper, kinds in file.events.items():
        for step, at in kinds["step_settled"]:
            if numbers.get((wrapper, step), steps.start) < steps.start:
                first = max(first, at)
        for step, at in kinds["backward_began"]:
            if numbers.get((wrapper, step), steps.start) >= steps.stop:
                last = min(last, at)
    return first, last


def _passes(file: RankFile) -> list[frozenset[Reduction]]:
    """A rank's reductions in order of time, those that lie inside each other together."""
    spans: list[tuple[int, int, Reduction]] = []
    for wrapper, kinds in file.events.items():
        began = {step: at for step, at in kinds["backward_began"]}  # noqa: C416 - dict() would not know the widths
        for step, at in kinds["step_settled"]:
            spans.append((min(began.get(step, at), at), at, (wrapper, step)))
    order: list[set[Reduction]] = []
    until = None
    for begin, end, one in sorted(spans):
        if until is None or begin >= until or any(one[0] == wrapper for wrapper, _ in order[-1]):
            order.append(set())
        order[-1].add(one)
        until = end if until is None else max(until, end)
    return [frozenset(together) for together in order]
