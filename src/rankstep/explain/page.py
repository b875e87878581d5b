"""The story as one page of HTML that needs nothing else: no script, no font, no network."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from rankstep.explain.figures import WIDTH, chart, fan
from rankstep.explain.screen import MARKS
from rankstep.explain.texts import texts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankstep.explain.blocks import Block, Story

_TEMPLATE = "page.html.jinja"


def page(story: Story, facts: dict[str, Any]) -> str:
    """Return the page; everything that came from the user's job is escaped.

    Args:
        story: In its language.
        facts: The document it was told from, for the line that says what made it.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"code": _code, "keys": _keys}
    template = environment.get_template(_TEMPLATE)
    return template.render(
        story=story,
        text=texts(story.lang),
        grouped=_grouped,
        percent=_percent,
        fan=fan,
        chart=chart,
        width=WIDTH,
        made_by=f"rankstep {facts['rankstep']} explain, torch {facts['torch']}, Python {facts['python']}",
    )


def _grouped(blocks: Iterable[Block]) -> list[tuple[str, list[Block]]]:
    """Return runs of blocks of one kind, so that claims stand in one list."""
    return [
        (kind, list(run))
        for kind, run in itertools.groupby(blocks, key=lambda block: type(block).__name__)
    ]


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / max(whole, 1e-9):.3f}"


def _code(text: str) -> Markup:
    """Escape a text, and set what stands between backticks as code."""
    parts = text.split("`")
    return Markup().join(
        Markup("<code>{}</code>").format(part) if number % 2 else escape(part)
        for number, part in enumerate(parts)
    )


def _keys(legend: str) -> Markup:
    """Put a small coloured box in place of each mark of a legend, and let no line end between a box and its name."""
    boxes = {kind: Markup('<i class="key {}"></i>').format(kind) for kind in (*MARKS, "tick")}
    parts = [escape(part).format(**boxes) for part in legend.split("   ")]
    return Markup(" ").join(Markup("<span>{}</span>").format(part) for part in parts)
