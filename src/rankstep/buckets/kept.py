"""A reducer's plan, and what it has learned, as plain data for a checkpoint.

A sum of many numbers depends in its last bits on the order in which they are added, and that follows from where a
gradient lies in its bucket. So a run that goes on from a checkpoint takes the same buckets, and does not learn anew.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rankstep.buckets.autoplan import Phase
from rankstep.buckets.line import EAGER_BYTES, Line
from rankstep.buckets.plan import Caps, lay_out

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankstep.buckets.plan import ParamSpec
    from rankstep.buckets.reducer import Reducer


def kept_plan(reducer: Reducer) -> dict[str, Any] | None:
    """Return the plan and what was learned; None as long as there is none that stays."""
    line = reducer.line
    searching = reducer.auto is not None and reducer.auto.phase is not Phase.SETTLED
    if line is None or searching or reducer.reductions == 0:
        return None
    return {
        "params": [[spec.name, *spec.shape] for spec in reducer.specs],
        "buckets": [list(bucket.params) for bucket in line.plan.buckets if bucket.params],
        "cap_bytes": list(line.plan.caps.cap_bytes),
        "firings": reducer.firings.learned(),
    }


def adopt_plan(reducer: Reducer, kept: Mapping[str, Any]) -> str:
    """Take over a plan and what was learned; every rank does, between two steps.

    Args:
        reducer: Has reduced nothing yet.
        kept: What :func:`kept_plan` returned, on any number of ranks.

    Returns:
        Why it was not taken over; empty if it was.
    """
    if kept["params"] != [[spec.name, *spec.shape] for spec in reducer.specs]:
        return "it is that of other trainable parameters"
    if reducer.line is not None:
        own = [list(bucket.params) for bucket in reducer.line.plan.buckets if bucket.params]
        return "" if own == kept["buckets"] else "a step was reduced with another one already"
    problem = _nonsense(kept, reducer.specs)
    if problem:
        return problem
    on_cpu = reducer.specs[0].device.type == "cpu"
    plan = lay_out(
        reducer.specs,
        kept["buckets"],
        Caps(tuple(kept["cap_bytes"])),
        EAGER_BYTES if on_cpu else sys.maxsize,
    )
    reducer.firings.recall(kept["firings"])
    line = Line(plan, reducer.params, reducer.comm, reducer.sharding)
    reducer.use_line(line)
    line.expect(reducer.firings.expected)
    line.begin_step(reducer.reductions)
    if reducer.auto is not None:
        reducer.auto.phase = Phase.SETTLED
    return ""


def _nonsense(kept: Mapping[str, Any], specs: list[ParamSpec]) -> str:
    """What is wrong with a plan that came from a file."""
    buckets: list[list[int]] = kept["buckets"]
    numbers = [index for bucket in buckets for index in bucket]
    if sorted(numbers) != list(range(len(specs))):
        return "it does not name each parameter once"
    for bucket in buckets:
        kinds = {(specs[index].dtype, specs[index].device) for index in bucket}
        if len(kinds) > 1 or (len(bucket) > 1 and any(specs[index].sparse for index in bucket)):
            return "it puts parameters together that cannot share a bucket"
    counts = kept["firings"]["expected"], kept["firings"]["first"], kept["firings"]["highest"]
    if any(len(count) != len(specs) for count in counts):
        return "what was learned is that of other parameters"
    if any(type(cap) is not int or cap <= 0 for cap in kept["cap_bytes"]) or not kept["cap_bytes"]:
        return "its caps are impossible"
    return ""
