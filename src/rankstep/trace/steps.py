"""How steps are named: FIRST:LAST, as in a Python slice."""

from __future__ import annotations

import re
import sys

from rankstep.trace.lines import TraceError


def read_steps(text: str | None) -> range:
    """Read ``FIRST:LAST``, both optional, LAST not included; None: all steps.

    Raises:
        TraceError: It is no such text.
    """
    found = re.fullmatch(r"(\d*):(\d*)", text or ":")
    steps = range(int(found[1] or 0), int(found[2] or sys.maxsize)) if found else range(0)
    if not steps:
        raise TraceError(
            f"the steps are {text!r}. Next: write FIRST:LAST, counted from 0 and without LAST, such as 10:20."
        )
    return steps
