"""The timeline page: a recorded trace as one HTML file that needs no network.

What Python does here is small: pack the trace, and fill in a template. Drawing, tables and arithmetic are done by the
scripts in ``templates/``, which are copied into the page. ``docs/design/page.md`` tells how, and why.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from jinja2 import Environment

    from rankstep.trace.model import BucketTrace, RankTrace, Span, StepTrace, Trace

FORMAT = 2
"""The number of the packed form; the page refuses any other."""

LIMIT_BYTES = 9_800_000
"""A longer page takes too long to open and to send; its script and style have some 80 kB."""

SCRIPTS = ("text", "data", "arithmetic", "state", "paint", "timeline", "pointer", "tables", "start")
"""The page's scripts in order: each uses those before it."""

_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_KINDS = ("DATA", "FORWARD", "BACKWARD", "WAIT", "OPTIMIZER", "OTHER")
_IN_BACKWARD, _FILLED, _FINISHED = 1, 2, 4


def render(
    trace: Trace, *, title: str | None = None, summary: Mapping[str, Any] | None = None
) -> str:
    """Make the timeline page of ``trace``.

    The same trace gives the same page, byte for byte. Nothing in it is loaded from elsewhere, and its content security
    policy forbids that as well as any script but its own. Names, commands and hosts are shown as text whatever they
    hold. Without a summary the page computes one.

    Args:
        trace: What was recorded.
        title: The page's heading; by default it names the number of ranks.
        summary: What to say above the timeline; every key may be missing. ``paragraph`` is plain text. ``figures`` is
            a list of mappings with ``label``, ``value`` and perhaps ``note``, all texts, shown in place of the page's
            own. ``overlap`` has ``hidden_ns`` and ``exposed_ns`` (for one rank and one step) and perhaps
            ``definition``. Other keys are ignored.

    Returns:
        The whole HTML document, to be written as UTF-8.

    Raises:
        KeyError: A figure lacks its label or value, or the overlap one of its times.
    """
    summary = summary or {}
    ranks = f"{trace.world_size} rank{'' if trace.world_size == 1 else 's'}"
    script, style = _scripts(), _read("page.css")
    data = pack(trace) | {"overlap": _overlap(summary)}
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            title=_text(title) if title is not None else f"Training steps of {ranks}",
            paragraph=_text(summary.get("paragraph", "")),
            figures=[
                {name: _text(figure[name]) for name in ("label", "value")}
                | {"note": _text(figure.get("note", ""))}
                for figure in summary.get("figures", ())
            ],
            command=_text(trace.command),
            versions=[
                (_text(name), _text(trace.versions[name])) for name in sorted(trace.versions)
            ],
            data=_json(data),
            script=script,
            script_hash=_hash(script),
            style=style,
            style_hash=_hash(style),
        )
    )


def fitted(trace: Trace, limit_bytes: int = LIMIT_BYTES) -> Trace:
    """Leave out steps, from the last one on, until the page is short enough for any browser.

    Args:
        trace: What was recorded.
        limit_bytes: How long the page may be; one step is kept in any case.

    Returns:
        The trace itself, or a part of it that says in its notices what is missing.
    """
    numbers = sorted({step.number for rank in trace.ranks for step in rank.steps})
    fits = len(numbers)
    length = len(_json(pack(trace)))
    while fits > 1 and length > limit_bytes:
        # The shared rows stay however few steps there are, so a few rounds are needed.
        fits = max(1, min(fits - 1, int(fits * limit_bytes / length)))
        part = _first(trace, numbers[fits - 1])
        length = len(_json(pack(part)))
    if fits == len(numbers):
        return trace
    notice = (
        f"A page of all steps would be longer than {limit_bytes / 1e6:.0f} MB, so this one ends with step "
        f"{numbers[fits - 1]}; the last that was read is {numbers[-1]}. Next: name others with --steps FIRST:LAST."
    )
    return replace(part, notices=(*trace.notices, notice))


def _first(trace: Trace, last: int) -> Trace:
    """The trace without what follows a step."""
    ranks = (
        replace(rank, steps=tuple(step for step in rank.steps if step.number <= last))
        for rank in trace.ranks
    )
    return replace(trace, ranks=tuple(ranks))


def pack(trace: Trace) -> dict[str, Any]:
    """Turn a trace into what the page reads: few objects, and long rows of numbers as short strings.

    Times count from the first step's begin. Inside a step they are differences, in nanoseconds, written as a source
    map writes its own: see :func:`numbers`. Parameter names, plans and orders that several ranks share are stored once.

    Args:
        trace: What was recorded.

    Returns:
        Plain data for JSON.
    """
    origin = min((step.begin_ns for rank in trace.ranks for step in rank.steps), default=0)
    names, plans, orders, kinds = _Table(), _Table(), _Table(), _Table()
    return {
        "format": FORMAT,
        "world_size": trace.world_size,
        "by_device": bool(trace.ranks) and all(rank.by_device for rank in trace.ranks),
        "notices": [_text(notice) for notice in trace.notices],
        "wrappers": [
            _text(name) for name in max((r.wrappers for r in trace.ranks), key=len, default=())
        ],
        "ranks": [_rank(rank, origin, names, plans, orders, kinds) for rank in trace.ranks],
        "names": names.rows,
        "plans": plans.rows,
        "orders": orders.rows,
        "kinds": kinds.rows,
    }


def numbers(values: Iterable[int]) -> str:
    """Write whole numbers as base-64 digits of variable length, as source maps do.

    Five bits a digit, the lowest first; the sixth bit says that more follow; the lowest bit of a number is its sign.
    A time of up to half a millisecond takes four letters.

    Args:
        values: The numbers.

    Returns:
        Letters of the base-64 alphabet.
    """
    letters = []
    for value in values:
        rest = value << 1 if value >= 0 else (-value << 1) | 1
        while rest > 31:
            letters.append(_DIGITS[rest & 31 | 32])
            rest >>= 5
        letters.append(_DIGITS[rest])
    return "".join(letters)


class _Table:
    """Rows that are stored once however often they are used."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._seen: dict[Any, int] = {}

    def add(self, key: Any, row: Any) -> int:
        """Return the number of the row with this key; the row is stored where the key is new."""
        if key not in self._seen:
            self._seen[key] = len(self.rows)
            self.rows.append(row)
        return self._seen[key]


def _rank(
    rank: RankTrace, origin: int, names: _Table, plans: _Table, orders: _Table, kinds: _Table
) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "host": _text(rank.host),
        "device": _text(rank.device),
        "clock_error": rank.clock_error_ns,
        "complete": rank.complete,
        "names": names.add(rank.params, [_text(name) for name in rank.params]),
        "plan": plans.add(
            rank.buckets,
            [
                [info.index, info.nbytes, numbers(_steps(info.params)), info.wrapper]
                for info in rank.buckets
            ],
        ),
        "steps": [_step(step, origin, orders, kinds) for step in rank.steps],
    }


def _step(step: StepTrace, origin: int, orders: _Table, kinds: _Table) -> list[Any]:
    """Pack a step: number, begin, length, spans, order of the gradients, their times, buckets, kind."""
    order = tuple(param for param, _ in step.ready)
    return [
        step.number,
        step.begin_ns - origin,
        step.end_ns - step.begin_ns,
        numbers(_spans(step.spans, step.begin_ns)),
        orders.add(order, numbers(_steps(order))),
        numbers(_steps((at for _, at in step.ready), step.begin_ns)),
        numbers(_buckets(step.buckets, step.begin_ns)),
        kinds.add((step.wrappers, step.learns), [step.wrappers, step.learns]),
    ]


def _steps(values: Iterable[int], before: int = 0) -> Iterable[int]:
    """Yield the difference of each number from the one before it."""
    for value in values:
        yield value - before
        before = value


def _spans(spans: Sequence[Span], before: int) -> Iterable[int]:
    """Yield three numbers a span: its kind, its begin after the last one's end, its length."""
    for span in spans:
        yield _KINDS.index(span.kind.name)
        yield span.begin_ns - before
        yield span.end_ns - span.begin_ns
        before = span.end_ns


def _buckets(buckets: Sequence[BucketTrace], before: int) -> Iterable[int]:
    """Yield seven numbers a bucket: index, flags, launch after the last one's, and four times around the launch."""
    for bucket in buckets:
        launched, filled, finished = bucket.launched_ns, bucket.filled_ns, bucket.finished_ns
        yield bucket.index
        yield (
            _IN_BACKWARD * bucket.in_backward
            + _FILLED * (filled is not None)
            + _FINISHED * (finished is not None)
        )
        yield launched - before
        yield 0 if filled is None else launched - filled
        yield 0 if finished is None else finished - launched
        yield bucket.wait_begin_ns - launched
        yield bucket.wait_end_ns - bucket.wait_begin_ns
        before = launched


def _overlap(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    given = summary.get("overlap")
    if given is None:
        return None
    return {
        "hidden": given["hidden_ns"],
        "exposed": given["exposed_ns"],
        "definition": _text(given.get("definition", "")),
    }


def _text(value: object) -> str:
    """Make a text that can be written as UTF-8: command lines may hold bytes that are none."""
    return str(value).encode("utf-8", "replace").decode("utf-8")


def _json(data: object) -> str:
    """Write JSON that holds nothing HTML takes for its own, not even ``</script>`` or ``<!--``."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _hash(text: str) -> str:
    """Name a script or style in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _read(name: str) -> str:
    return (files(__package__) / "templates" / name).read_text("utf-8")


@cache
def _scripts() -> str:
    """Join the page's scripts in one function, so that they share names with nobody else."""
    parts = "\n".join(_read(f"{name}.js") for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}\n}})();'


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    return Environment(
        autoescape=True,
        loader=FunctionLoader(_read),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
