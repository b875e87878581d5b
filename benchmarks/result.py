"""The file that ``--json`` writes: one form for all benchmarks, and a reader that names what is wrong with a file.

A result has tables, a table has variants, a variant has figures. A figure is a `Spread` over rounds, a plain number (a
count, bytes, an error), or None where it could not be measured. `README.md` has the form with an example. Nothing here
needs torch, so that results can be read, and pictures drawn, where it is not installed.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

SCHEMA = "rankstep-benchmark/1"
"""Changes with every change of the form that a reader has to know of."""

MACHINE = ("cpu", "cores", "python", "torch", "rankstep", "date", "command")
ROUNDS = {"run": int, "dropped": int, "disturbed": int, "quiet": bool}


class BadResultError(Exception):
    """A file does not have the form of a result, or lacks what is asked of it: names the file, the place and the cause."""


# ---------------------------------------------------------------- figures


@dataclass(frozen=True)
class Spread:
    """A figure over rounds; ``min`` may be missing in what was copied from a printed table, which does not tell it."""

    min: float | None
    q25: float
    median: float
    q75: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Sort and cut."""
        data = sorted(values)
        if len(data) == 1:
            return cls(*data * 4)
        q25, median, q75 = statistics.quantiles(data, n=4, method="inclusive")
        return cls(data[0], q25, median, q75)

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.q25:{spec}} .. {self.q75:{spec}})"


@dataclass(frozen=True)
class Bar:
    """What a figure must not exceed, and what it is.

    Attributes:
        what: The sentence that is printed.
        limit: At most this.
        value: The figure; None: not measured.
        place: Where the figure stands: table, variant, name; None: nowhere, it is made of several.
    """

    what: str
    limit: float
    value: float | None
    place: tuple[str, str, str] | None = None

    @property
    def held(self) -> bool | None:
        """Whether it is not exceeded."""
        return None if self.value is None else self.value <= self.limit

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.what}: not measured"
        return f"{self.what}: {self.value:.4g}, bar {self.limit:g}: {'held' if self.held else 'MISSED'}"


# ---------------------------------------------------------------- a result


@dataclass(frozen=True)
class Table:
    """Variants that took turns.

    Attributes:
        variants: For each, its figures by name; the name says the unit, or what it is a ratio to.
        rounds: How many rounds there were, and how quiet it was; None: nothing was timed.
        facts: What else is known, for instance how many bytes the gradients have.
    """

    variants: dict[str, dict[str, Spread | float | None]]
    rounds: dict[str, Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What one run of a benchmark found.

    Attributes:
        benchmark: The script's name without ``.py``.
        machine: Processor, versions, date and command; see `common.machine`.
        settings: What the command line asked for, defaults included.
        tables: By name, for instance one for each model.
        bars: What the project has set itself.
    """

    benchmark: str
    machine: dict[str, str]
    settings: dict[str, Any]
    tables: dict[str, Table]
    bars: tuple[Bar, ...] = ()

    def write(self, file: Path) -> None:
        """Write it."""
        told = {"schema": SCHEMA} | asdict(self)
        for bar, plain in zip(self.bars, told["bars"], strict=True):
            plain["held"] = bar.held
        text = json.dumps(told, indent=2, allow_nan=False)
        file.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Result:
        """Read a file, and check that it has the form.

        Raises:
            BadResultError: It has not; the first place is named.
        """
        return _Reader(file).result()


@dataclass(frozen=True)
class _Reader:
    """Turns what JSON holds into a `Result`, and knows the way to where it is."""

    file: Path

    def result(self) -> Result:
        try:
            told = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as cause:
            self._bad("", f"cannot be read: {cause}")
        except ValueError as cause:
            self._bad("", f"is no JSON: {cause}")
        top = self._object(told, "")
        if top.get("schema") != SCHEMA:
            self._bad("schema", f"is {top.get('schema')!r}, and only {SCHEMA!r} can be read")
        machine = self._object(self._of(top, "machine", ""), "machine")
        for name in MACHINE:
            self._is(self._of(machine, name, "machine"), str, f"machine.{name}")
        tables = self._object(self._of(top, "tables", ""), "tables")
        if not tables:
            self._bad("tables", "holds none")
        bars = self._is(self._of(top, "bars", ""), list, "bars")
        return Result(
            self._is(self._of(top, "benchmark", ""), str, "benchmark"),
            machine,
            self._object(self._of(top, "settings", ""), "settings"),
            {name: self._table(each, f"tables.{name}") for name, each in tables.items()},
            tuple(self._bar(each, f"bars[{place}]") for place, each in enumerate(bars)),
        )

    def _table(self, told: Any, place: str) -> Table:
        table = self._object(told, place)
        variants = self._object(self._of(table, "variants", place), f"{place}.variants")
        if not variants:
            self._bad(f"{place}.variants", "holds none")
        rounds = self._of(table, "rounds", place)
        if rounds is not None:
            self._object(rounds, f"{place}.rounds")
            for name, kind in ROUNDS.items():
                self._is(self._of(rounds, name, f"{place}.rounds"), kind, f"{place}.rounds.{name}")
        return Table(
            {
                name: {
                    figure: self._figure(value, f"{place}.variants.{name}.{figure}")
                    for figure, value in self._object(each, f"{place}.variants.{name}").items()
                }
                for name, each in variants.items()
            },
            rounds,
            self._object(self._of(table, "facts", place), f"{place}.facts"),
        )

    def _figure(self, told: Any, place: str) -> Spread | float | None:
        if not isinstance(told, dict):
            return None if told is None else self._number(told, place)
        q25, median, q75 = (
            self._number(self._of(told, name, place), f"{place}.{name}")
            for name in ("q25", "median", "q75")
        )
        least = self._of(told, "min", place)
        if least is not None:
            self._number(least, f"{place}.min")
        ordered = [value for value in (least, q25, median, q75) if value is not None]
        if ordered != sorted(ordered):
            self._bad(place, f"min, q25, median, q75 are not in ascending order: {ordered}")
        return Spread(least, q25, median, q75)

    def _bar(self, told: Any, place: str) -> Bar:
        bar = self._object(told, place)
        value, where = self._of(bar, "value", place), self._of(bar, "place", place)
        if value is not None:
            self._number(value, f"{place}.value")
        if where is not None:
            self._is(where, list, f"{place}.place")
            if len(where) != 3 or not all(isinstance(word, str) for word in where):
                self._bad(f"{place}.place", f"must be table, variant, figure, not {where!r}")
        return Bar(
            self._is(self._of(bar, "what", place), str, f"{place}.what"),
            self._number(self._of(bar, "limit", place), f"{place}.limit"),
            value,
            where and tuple(where),
        )

    def _of(self, told: Mapping[str, Any], name: str, place: str) -> Any:
        if name not in told:
            self._bad(place, f"lacks '{name}'")
        return told[name]

    def _object(self, told: Any, place: str) -> dict[str, Any]:
        return self._is(told, dict, place)

    def _number(self, told: Any, place: str) -> float:
        if isinstance(told, bool) or not isinstance(told, int | float) or not math.isfinite(told):
            self._bad(place, f"must be a finite number, not {told!r}")
        return told

    def _is(self, told: Any, kind: type, place: str) -> Any:
        if not isinstance(told, kind):
            names = {dict: "an object", list: "a list", str: "a text", int: "a whole number"}
            wanted = names.get(kind, kind.__name__)
            self._bad(place, f"must be {wanted}, not {json.dumps(told)[:60]}")
        return told

    def _bad(self, place: str, cause: str) -> NoReturn:
        raise BadResultError(f"{self.file}: {f'{place}: ' if place else ''}{cause}")
