"""Draws the pictures of docs/performance.md, and writes its table of bars, from what the benchmarks write with ``--json``.

Every number comes from such a file; nothing is typed in. The same files give the same bytes, and a picture carries the
checksums of the files it was drawn from, so that a test notices one that is out of date. A picture whose files are
missing is left as it is, and a line says so. Needs matplotlib: the extra ``plots``.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import textwrap
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox
from result import BadResultError, Result, Spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.text import Annotation
    from result import Table

HERE = Path(__file__).parent
DATA = HERE / "results" / "data"
OUT = HERE.parent / "docs" / "pictures"
PAGE = HERE.parent / "docs" / "performance.md"
EXAMPLE = "python benchmarks/plots.py --only step allreduce"

INCHES = 830 / 96
"""As wide as a code host shows a page, so that nothing is scaled and text has the size it was given."""

CAPTION_WIDTH = 140

# The palette of Okabe and Ito, which people with any kind of colour vision can tell apart. Markers differ, too.
BLUE, VERMILLION, GREY, INK, BAND = "#0072B2", "#D55E00", "#6B6B6B", "#1A1A1A", "#DDE6EE"
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "figure.facecolor": "white",  # opaque: pages may be dark
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "Helvetica"],
    "font.size": 9,
    "grid.color": "#E4E4E4",
    "legend.fontsize": 9,
    "legend.frameon": False,
    "savefig.facecolor": "white",
    "svg.fonttype": "none",  # text stays text: it can be read out, searched and tested
    "svg.hashsalt": "rankstep",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}

LOCAL, ALL_REDUCE, LINK, LIMIT = "local", "all-reduce alone", "link alone", "the larger"
OWN, SHARDED, TORCH, PLAIN = "rankstep", "rankstep sharded", "torch default", "plain"
LIMITS = (LOCAL, LINK, ALL_REDUCE, PLAIN)
SHARE = "ratio_to_torch_default"
MODELS = {"mlp": "MLP", "gpt": "GPT", "cnn": "CNN"}


# ---------------------------------------------------------------- what is drawn from


@dataclass(frozen=True)
class Source:
    """One file, and how to get at its figures; whatever is not there is named."""

    file: Path
    result: Result

    @property
    def checksum(self) -> str:
        """As it stands in a picture."""
        return f"{self.file.name} sha256:{hashlib.sha256(self.file.read_bytes()).hexdigest()}"

    def only_table(self) -> str:
        """Name the table of a file that must have one."""
        if len(self.result.tables) != 1:
            raise self._bad("tables", f"must hold one, not {', '.join(self.result.tables)}")
        return next(iter(self.result.tables))

    def table(self, name: str) -> Table:
        """Get a table."""
        return self._of(self.result.tables, name, "tables")

    def variants(self, table: str) -> list[str]:
        """Name those of a table."""
        return list(self.table(table).variants)

    def fact(self, table: str, name: str) -> int:
        """Get a whole number that is known of a table."""
        place = f"tables.{table}.facts"
        value = self._of(self.table(table).facts, name, place)
        if not isinstance(value, int):
            raise self._bad(f"{place}.{name}", f"must be a whole number, not {value!r}")
        return value

    def figure(self, table: str, variant: str, name: str) -> Spread | float:
        """Get what must be there."""
        place = f"tables.{table}.variants"
        figures = self._of(self.table(table).variants, variant, place)
        return self._of(figures, name, f"{place}.{variant}")

    def spread(self, table: str, variant: str, name: str) -> Spread:
        """Get a figure over rounds."""
        value = self.figure(table, variant, name)
        if not isinstance(value, Spread):
            place = f"tables.{table}.variants.{variant}.{name}"
            raise self._bad(place, f"must have quartiles, not be {value}")
        return value

    def number(self, table: str, variant: str, name: str) -> float:
        """Get a figure that is a plain number."""
        value = self.figure(table, variant, name)
        if isinstance(value, Spread):
            place = f"tables.{table}.variants.{variant}.{name}"
            raise self._bad(place, "must be a plain number, without quartiles")
        return value

    def bar(self, table: str, variant: str, name: str) -> float | None:
        """Get what the figure must not exceed, if the project has set itself anything there."""
        bars = (bar for bar in self.result.bars if bar.place == (table, variant, name))
        return next((bar.limit for bar in bars), None)

    def is_lossy(self, table: str, variant: str) -> bool:
        """Whether a variant sends less than the exact gradient."""
        return "error_l2" in self.table(table).variants[variant]

    def quickest_tuned_torch(self, table: str) -> str:
        """Name the best that torch can do with other switches, and without losing anything."""
        names = [name for name in self.variants(table) if name.startswith("torch ")]
        tuned = [name for name in names if name != TORCH and not self.is_lossy(table, name)]
        if not tuned:
            raise self._bad(f"tables.{table}.variants", "lacks a tuned torch")
        return min(tuned, key=lambda name: self.spread(table, name, "wall_ms").median)

    def _of(self, told: Mapping[str, Any], name: str, place: str) -> Any:
        if told.get(name) is None:
            raise self._bad(place, f"lacks '{name}', which this picture is drawn from")
        return told[name]

    def _bad(self, place: str, cause: str) -> BadResultError:
        return BadResultError(f"{self.file}: {place}: {cause}")


def caption(sources: Sequence[Source], marks: str = "dots: medians, whiskers: quartiles") -> str:
    """Say where the figures come from."""
    lines: list[str] = []
    places = []
    for source in sources:
        machine, tables = source.result.machine, source.result.tables.values()
        kept = [
            each.rounds["run"] - each.rounds["dropped"]
            for each in tables
            if each.rounds is not None
        ]
        rounds = f", {span(kept)} rounds" if kept else ""
        command = re.sub(r" --json ('[^']*'|\S+)", "", machine["command"])
        lines += textwrap.wrap(f"$ {command}{rounds}", CAPTION_WIDTH, subsequent_indent="    ")
        places.append(
            "{cpu}, {cores} cores; torch {torch}, Rankstep {rankstep}; {date}".format(**machine)
        )
    *others, last = dict.fromkeys(places)
    return "\n".join([*lines, *others, f"{last}; {marks}"])


def span(numbers: list[int]) -> str:
    """Write a range that may be one number."""
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least} to {most}"


# ---------------------------------------------------------------- how it looks


def label_of(name: str) -> str:
    """Write a variant's name for people."""
    named = {
        LOCAL: "local, no communication",
        LINK: "link alone",
        SHARDED: "Rankstep, sharded step",
        PLAIN: "no wrapper",
        "torch all three": "torch, all three",
    }
    if name in named:
        return named[name]
    name = name.replace("rankstep", "Rankstep").replace("PowerSGD 2", "PowerSGD, rank 2")
    for family in ("Rankstep", "torch"):
        if name.startswith(f"{family} ") and name != TORCH:
            name = name.replace(f"{family} ", f"{family}, ")
    return name


def mark_of(name: str) -> dict:
    """Choose colour and marker: blue circles for Rankstep, vermillion squares for torch, filled as they come."""
    colour = GREY if name in LIMITS else BLUE if name.startswith("rankstep") else VERMILLION
    marker = "X" if name in LIMITS else "o" if colour == BLUE else "s"
    if name == SHARDED:
        marker = "D"
    filled = name in {*LIMITS, OWN, SHARDED, TORCH}
    return {
        "color": colour,
        "marker": marker,
        "markerfacecolor": colour if filled else "white",
        "markersize": 6.5,
    }


def dot(axes: Axes, spread: Spread, row: float, name: str) -> None:
    """Draw a median with its quartiles on a row."""
    whiskers = [[spread.median - spread.q25], [spread.q75 - spread.median]]
    axes.errorbar(spread.median, row, xerr=whiskers, capsize=3, linewidth=1.3, **mark_of(name))


def note(
    axes: Axes, text: str, at: tuple[float, float], away: tuple[float, float], **options: object
) -> Annotation:
    """Write so many points away from a place."""
    look = {"fontsize": 8, "ha": "center", "va": "center"} | options
    return axes.annotate(text, at, xytext=away, textcoords="offset points", **look)


def column(axes: Axes, row: float, text: str, colour: str = INK) -> None:
    """Write at the right end of a row, where all figures of a panel stand below each other."""
    axes.text(0.995, row, text, transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=8, color=colour)  # fmt: skip


def bar_line(axes: Axes, limit: float, row: float, half: float = 0.3) -> None:
    """Mark what a row must not exceed."""
    axes.plot([limit, limit], [row - half, row + half], color=INK, linewidth=2.2, zorder=1.5)


def rows(axes: Axes, names: Sequence[str]) -> None:
    """Name the rows, the first on top."""
    axes.set_yticks(range(len(names)), [label_of(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.7)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def widen(axes: Axes, values: Iterable[float], *, left: float = 0.12, right: float = 0.12) -> None:
    """Leave room at both sides of what is drawn."""
    data = list(values)
    room = (max(data) - min(data)) or 1.0
    axes.set_xlim(min(data) - left * room, max(data) + right * room)


def canvas(height: float, columns: int, title: str, below: str, **options: object) -> tuple:
    """Make a figure with a row of axes, a title and a caption."""
    figure = Figure(figsize=(INCHES, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    axes = figure.subplots(1, columns, squeeze=False, **options)[0]
    figure.suptitle(title, x=0.012, ha="left", fontsize=11.5, fontweight="bold")
    figure.supxlabel(below, x=0.012, ha="left", fontsize=7.5, color=GREY, linespacing=1.4)
    return figure, axes


def key(figure: Figure, handles: Sequence[Line2D]) -> None:
    """Explain marks that no row names, in a line above the picture."""
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), handlelength=1.6)


BAR_KEY = Line2D([], [], color=INK, linewidth=2.2, marker="", label="at most: the project's bar")


# ---------------------------------------------------------------- the pictures


def step(sources: Sequence[Source]) -> Figure:
    """A step of each model, as a share of torch's."""
    (source,) = sources
    models = list(source.result.tables)
    names = [LOCAL, OWN, SHARDED, TORCH, "torch, quickest tuned"]
    figure, panels = canvas(
        3.3, len(models), "A training step, 2 ranks on one host", caption(sources), sharey=True
    )
    for model, axes in zip(models, panels, strict=True):
        best = source.quickest_tuned_torch(model)
        seen = []
        for row, name in enumerate(names):
            variant = best if row == len(names) - 1 else name
            spread = source.spread(model, variant, SHARE)
            dot(axes, spread, row, variant)
            note(axes, f"{spread.median:.2f}", (spread.median, row), (0, 6), va="bottom")
            if variant == best:
                switches = best.removeprefix("torch ")
                note(axes, switches, (spread.q25, row), (-7, 0), ha="right", color=GREY)
            seen += [spread.q25, spread.q75]
            limit = source.bar(model, variant, SHARE)
            if limit is not None:
                bar_line(axes, limit, row, half=0.22)
                seen.append(limit)
        axes.axvline(1, color=VERMILLION, linestyle=":", linewidth=1.2, zorder=1)
        rows(axes, names)
        widen(axes, seen)
        axes.set_title(MODELS.get(model, model))
        axes.set_xlabel("share of torch default's time")
    key(figure, [BAR_KEY])
    return figure


def allreduce(sources: Sequence[Source]) -> Figure:
    """An all-reduce, by size."""
    (source,) = sources
    tables = source.result.tables
    kib = [source.fact(name, "kib") for name in tables]
    title = "All-reduce of float32, 2 ranks on one host"
    figure, (axes,) = canvas(3.9, 1, title, caption(sources))
    for name, label in (("gloo", "gloo, loopback sockets"), (OWN, "Rankstep, shared memory")):
        spreads = [source.spread(table, name, "wall_ms") for table in tables]
        medians = [spread.median for spread in spreads]
        whiskers = [
            [spread.median - spread.q25 for spread in spreads],
            [spread.q75 - spread.median for spread in spreads],
        ]
        axes.errorbar(
            kib, medians, yerr=whiskers, capsize=3, linewidth=1.3, label=label, **mark_of(name)
        )
    for table, size in zip(tables, kib, strict=True):
        own = source.spread(table, OWN, "wall_ms")
        share = source.spread(table, OWN, "ratio_to_gloo").median
        note(axes, f"{share:.2f}", (size, own.q25), (0, -8), va="top")
        limit = source.bar(table, OWN, "ratio_to_gloo")
        if limit is not None:
            bar = limit * source.spread(table, "gloo", "wall_ms").median
            axes.plot([size / 1.25, size * 1.25], [bar, bar], color=INK, linewidth=2.2)
    axes.set(xscale="log", yscale="log", xlabel="size of the tensor", ylabel="time of one call, ms")
    axes.set_xticks(kib, [binary(size) for size in kib])
    for size, after, label in zip(kib, kib[1:], axes.get_xticklabels(), strict=False):
        label.set_visible(after >= 2 * size)
    axes.minorticks_off()
    least = min(source.spread(table, OWN, "wall_ms").q25 for table in tables)
    axes.set_ylim(bottom=least / 2.2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    handles, _ = axes.get_legend_handles_labels()
    axes.legend(handles=[*handles, BAR_KEY], loc="upper left")
    axes.set_title("numbers: Rankstep's share of gloo's time", fontweight="normal", fontsize=9)
    return figure


def binary(kib: int) -> str:
    """Write a size."""
    return f"{kib // 1024} MiB" if kib >= 1024 else f"{kib} KiB"


def hook_overhead(sources: Sequence[Source]) -> Figure:
    """What a parameter costs."""
    mode, figure_name = "set_to_none=True", "wall_us_per_parameter"
    names = sources[0].variants(mode)
    title = "Cost per parameter: zero_grad and backward of tiny parameters"
    figure, panels = canvas(3.4, len(sources), title, caption(sources), sharey=True)
    for source, axes in zip(sources, panels, strict=True):
        seen = [0.0]
        for row, name in enumerate(names):
            spread = source.spread(mode, name, figure_name)
            dot(axes, spread, row, name)
            column(axes, row, f"{spread.median:.2f}")
            seen.append(spread.q75)
        limit = source.bar(mode, OWN, figure_name)
        share = source.bar(mode, OWN, SHARE)
        if limit is None and share is not None:
            limit = share * source.spread(mode, TORCH, figure_name).median
        if limit is not None:
            bar_line(axes, limit, names.index(OWN))
        rows(axes, names)
        widen(axes, seen, left=0, right=0.16)
        axes.set_title(ranks_of(source))
        axes.set_xlabel("µs per parameter, over the model without a wrapper")
    key(figure, [BAR_KEY])
    return figure


def ranks_of(source: Source) -> str:
    """Write how many there were."""
    ranks = source.result.settings.get("ranks", "?")
    return f"{ranks} rank{'s' * (ranks != 1)}"


def network(sources: Sequence[Source]) -> Figure:
    """A step over a slow link."""
    model = sources[0].only_table()
    order: list[str] = []
    for source in sources:
        order += [name for name in source.variants(model) if name not in {*order, LIMIT}]
    lossy = {
        name for each in sources for name in each.variants(model) if each.is_lossy(model, name)
    }
    exact = [name for name in order if name not in lossy and name not in LIMITS]
    names = [name for name in LIMITS if name in order] + exact + [n for n in order if n in lossy]
    title = f"A training step over a slow link: {MODELS.get(model, model)}"
    figure, panels = canvas(6.4, len(sources), title, caption(sources), sharey=True)
    for source, axes in zip(sources, panels, strict=True):
        seen = [0.0]
        for row, name in enumerate(names):
            if name not in source.variants(model):
                column(axes, row, "not run", GREY)
                continue
            spread = source.spread(model, name, "wall_ms")
            dot(axes, spread, row, name)
            column(axes, row, f"{spread.median:.0f}")
            seen.append(spread.q75)
            for bar in source.result.bars:
                if bar.place and bar.place[:2] == (model, name):
                    against = LIMIT if bar.place[2] == "ratio_to_limit" else TORCH
                    base = source.spread(model, against, "wall_ms").median
                    bar_line(axes, bar.limit * base, row)
        if LIMIT in source.variants(model):
            limit = source.spread(model, LIMIT, "wall_ms").median
            axes.axvline(limit, color=INK, linestyle="--", linewidth=1, zorder=1)
        for place in (len(names) - len(lossy), len(names) - len(lossy) - len(exact)):
            axes.axhline(place - 0.5, color=GREY, linewidth=0.8)
        rows(axes, names)
        widen(axes, seen, left=0, right=0.2)
        axes.set_title(link_of(source))
        axes.set_xlabel("time of a step, ms")
    dashes = Line2D(
        [], [], color=INK, linestyle="--", linewidth=1, label="limit of ways that send all bytes"
    )
    key(figure, [BAR_KEY, dashes])
    return figure


def fewer_bytes(sources: Sequence[Source]) -> Figure:
    """What fewer bytes lose, and what they save."""
    model = sources[0].only_table()
    title = "Fewer bytes: what they save and what they lose"
    figure, panels = canvas(3.9, len(sources), title, caption(sources), sharex=True, sharey=True)
    notes, errors, lowest = [], [], 0.0
    for source, axes in zip(sources, panels, strict=True):
        base = source.spread(model, OWN, "wall_ms").median
        for name in source.variants(model):
            if not source.is_lossy(model, name):
                continue
            saved = source.spread(model, name, "saved_ms")
            error = source.number(model, name, "error_l2")
            q25, median, q75 = (
                100 * value / base for value in (saved.q25, saved.median, saved.q75)
            )
            whiskers = [[median - q25], [q75 - median]]
            axes.errorbar(error, median, yerr=whiskers, capsize=3, linewidth=1.3, **mark_of(name))
            name_there = note(axes, label_of(name), (error, median), (0, 0))
            name_there.set_color(mark_of(name)["color"])
            notes.append(name_there)
            errors.append(error)
            lowest = min(lowest, q25 - 20)
        axes.set(xscale="log")
        axes.set_title(link_of(source))
        axes.set_xlabel("error of one step's gradient, relative (L2)")
    if not errors:
        raise BadResultError(
            f"{sources[0].file}: tables.{model}: holds no way that sends fewer bytes"
        )
    panels[0].set(xlim=(min(errors) / 10, max(errors) * 10), ylim=(lowest, 100))
    panels[0].set_ylabel("saved, % of the exact step")
    spread_out(figure, notes)
    return figure


def spread_out(figure: Figure, notes: Sequence[Annotation]) -> None:
    """Put each name above or below its point, as near as it neither covers another point nor another name."""
    figure.draw_without_rendering()
    notes = sorted(notes, key=lambda each: (each.xy[0], -each.xy[1]))
    points = [each.axes.transData.transform(each.xy) for each in notes]
    taken: list[Bbox] = [Bbox.from_extents(x - 6, y - 6, x + 6, y + 6) for x, y in points]
    for each in notes:
        inside = each.axes.get_window_extent()
        for place in PLACES:
            each.set_position(place)
            box = each.get_window_extent()
            within = inside.x0 <= box.x0 and box.x1 <= inside.x1 and box.y1 <= inside.y1
            if within and not box.count_overlaps(taken):
                break
        taken.append(each.get_window_extent())


PLACES = [
    (aside, sign * far) for far in (12, 24, 36, 48) for sign in (1, -1) for aside in (0, 40, -40)
]
"""Where a name may stand, in points from its own, the nearest first."""


def link_of(source: Source) -> str:
    """Write the link for people."""
    link = source.result.machine.get("link", "no link named")
    found = re.fullmatch(r"(\d+) hosts x (\d+), (\d+)gbit", link)
    if not found:
        return link
    hosts, ranks, gigabits = found.groups()
    return f"{hosts} hosts of {ranks} rank{'s' * (ranks != '1')}, {gigabits} Gbit/s"


MEASURED = {"color": INK, "marker": "s", "markersize": 6.5}
PREDICTED = {"color": BLUE, "marker": "o", "markersize": 6.5, "markerfacecolor": "white"}


def plan(sources: Sequence[Source]) -> Figure:
    """What the plan predicts, and what is measured."""
    (source,) = sources
    models = list(source.result.tables)
    title = "The plan's predicted step"
    figure, panels = canvas(3.7, len(models), title, caption(sources))
    for model, axes in zip(models, panels, strict=True):
        names = source.variants(model)
        for place, name in enumerate(names):
            measured = source.spread(model, name, "measured_ms")
            predicted = source.spread(model, name, "predicted_ms")
            axes.bar(place, 0.2 * measured.median, 0.8, 0.9 * measured.median, color=BAND, zorder=1)
            for spread, at, look in ((measured, -0.16, MEASURED), (predicted, 0.16, PREDICTED)):
                whiskers = [[spread.median - spread.q25], [spread.q75 - spread.median]]
                axes.errorbar(
                    place + at, spread.median, yerr=whiskers, capsize=3, linewidth=1.3, **look
                )
        buckets = [source.number(model, name, "buckets") for name in names]
        labels = [name.removesuffix(" MiB") for name in names]
        axes.set_xticks(
            range(len(names)), [f"{n}\n{b:g}" for n, b in zip(labels, buckets, strict=True)]
        )
        axes.grid(visible=False, axis="x")
        axes.tick_params(axis="x", length=0)
        axes.set_title(MODELS.get(model, model))
        axes.set_xlabel("cap in MiB, and the buckets it makes")
        axes.use_sticky_edges = False
        axes.margins(y=0.1)
    panels[0].set_ylabel("time of a step, ms")
    handles = [
        Line2D([], [], linestyle="", label="measured", **MEASURED),
        Line2D([], [], linestyle="", label="predicted", **PREDICTED),
        Line2D([], [], color=BAND, linewidth=8, label="measured ± 10 %: the project's bar"),
    ]
    key(figure, handles)
    return figure


def memory(sources: Sequence[Source]) -> Figure:
    """What gradients and buckets take."""
    (source,) = sources
    table = source.only_table()
    names = source.variants(table)
    title = "Memory beside the model"
    figure, (axes,) = canvas(3.1, 1, title, caption(sources, "counted, not timed"))
    for row, name in enumerate(names):
        after, during = (source.number(table, name, each) for each in ("in_use", "in_use_peak"))
        look = mark_of(name)
        axes.plot([after, during], [row, row], color=look["color"], linewidth=1.3)
        axes.plot(after, row, linestyle="", **look | {"markerfacecolor": look["color"]})
        axes.plot(during, row, linestyle="", **look | {"marker": "|", "markersize": 13})
        text = f"{after:.3f}; at most {during:.3f}"
        note(axes, text, (max(after, during), row), (9, 0), ha="left")
        limit = source.bar(table, name, "in_use")
        if limit is not None:
            bar_line(axes, limit, row)
    rows(axes, names)
    axes.set_xlim(0, 2.6)
    axes.set_xlabel("bytes in use, as a multiple of the gradients")
    marks = {"color": INK, "linestyle": ""}
    handles = [
        Line2D([], [], marker="o", markersize=6.5, label="after a step", **marks),
        Line2D([], [], marker="|", markersize=13, label="at most in a step", **marks),
        BAR_KEY,
    ]
    key(figure, handles)
    return figure


# ---------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Picture:
    """How to draw it, the files it needs, and the benchmark that makes them."""

    draw: Callable[[Sequence[Source]], Figure]
    benchmark: str
    needs: tuple[str, ...]


NETWORK = ("network-2x1.json", "network-2x2.json")
PICTURES = {
    "step": Picture(step, "step", ("step.json",)),
    "allreduce": Picture(allreduce, "allreduce", ("allreduce.json",)),
    "hook_overhead": Picture(
        hook_overhead, "hook_overhead", ("hook_overhead-1.json", "hook_overhead-2.json")
    ),
    "network": Picture(network, "network_step", NETWORK),
    "fewer_bytes": Picture(fewer_bytes, "network_step", NETWORK),
    "plan": Picture(plan, "plan", ("plan.json",)),
    "memory": Picture(memory, "memory", ("memory.json",)),
}


def draw(name: str, data: Path, out: Path) -> str:
    """Draw one picture, and say what was done.

    Raises:
        BadResultError: One of its files is there, and not as it should be.
    """
    picture, file = PICTURES[name], out / f"performance-{name.replace('_', '-')}.svg"
    missing = [need for need in picture.needs if not (data / need).exists()]
    if missing:
        return f"{file.name}: skipped, {data} lacks {' and '.join(missing)}; benchmarks/README.md has the commands"
    sources = [Source(data / need, Result.read(data / need)) for need in picture.needs]
    for source in sources:
        if source.result.benchmark != picture.benchmark:
            raise BadResultError(
                f"{source.file}: benchmark: is '{source.result.benchmark}', and this picture shows '{picture.benchmark}'"
            )
    with mpl.rc_context(STYLE):
        figure = picture.draw(sources)
        figure.savefig(
            file,
            metadata={
                "Title": figure.get_suptitle(),
                "Source": "; ".join(source.checksum for source in sources),
                "Creator": "benchmarks/plots.py",
                "Date": None,  # the same files give the same bytes
            },
        )
    return f"{file.name}: drawn from {', '.join(picture.needs)}"


# ---------------------------------------------------------------- the table of bars

BEGIN, END = "<!-- written by benchmarks/plots.py: bars -->\n", "<!-- end of bars -->\n"
BARS_FROM = (
    *dict.fromkeys(need for picture in PICTURES.values() for need in picture.needs),
    *("guard.json", "tracing.json", "checkpoint.json"),
)
"""The files whose bars stand in the table, in this order; a file that is missing has no rows."""


def bars_table(data: Path) -> str:
    """Write the bars of all files as Markdown.

    Raises:
        BadResultError: A file is there, and not as it should be.
    """
    lines = ["| what | at most | measured | | by, on |", "|---|---|---|---|---|"]
    for name in BARS_FROM:
        if not (data / name).exists():
            continue
        source = Source(data / name, Result.read(data / name))
        by = f"`{source.result.benchmark}.py`, {source.result.machine['date']}"
        for bar in source.result.bars:
            figure = bar.value if bar.place is None else source.figure(*bar.place)
            verdict = {True: "held", False: "**missed**", None: ""}[bar.held]
            lines.append(f"| {bar.what} | {bar.limit:g} | {measured(figure)} | {verdict} | {by} |")
    return "\n".join(lines) + "\n"


def measured(figure: Spread | float | None) -> str:
    """Write a figure, with its quartiles if it has any."""
    if isinstance(figure, Spread):
        return f"{figure:#.3g}"
    return "not measured" if figure is None else f"{figure:.4g}"


def renew(page: Path, table: str) -> str:
    """Put the table where the page wants it, and say what was done.

    Raises:
        BadResultError: There is no such page, or it has no place for a table.
    """
    try:
        before, mark, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    except OSError as cause:
        raise BadResultError(f"{page}: cannot be read: {cause}") from cause
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise BadResultError(f"{page}: lacks the lines {BEGIN.strip()!r} and {END.strip()!r}")
    page.write_text(before + BEGIN + table + END + after, encoding="utf-8")
    return f"{page.name}: table of bars written"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=f"example:\n  {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data", type=Path, default=DATA, help="folder of the files; default: %(default)s"
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, help="folder for the pictures; default: %(default)s"
    )
    parser.add_argument(
        "--only", nargs="+", choices=PICTURES, default=list(PICTURES), metavar="NAME",
        help=f"which to draw, of: {', '.join(PICTURES)}; default: all",
    )  # fmt: skip
    parser.add_argument(
        "--page",
        type=Path,
        help="page whose table of bars is written; default: that of the documents, where everything else is the default, too",
    )
    args = parser.parse_args()
    whole = (args.data, args.out, args.only) == (DATA, OUT, list(PICTURES))
    page = args.page or (PAGE if whole else None)
    args.out.mkdir(parents=True, exist_ok=True)
    tasks = {name: partial(draw, name, args.data, args.out) for name in args.only}
    if page:
        tasks[page.name] = lambda: renew(page, bars_table(args.data))
    failed = False
    for name, task in tasks.items():
        try:
            print(task())
        except BadResultError as bad:
            failed = True
            print(f"{name}: left as it is: {bad}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
