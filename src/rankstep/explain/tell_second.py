"""The story's second half, parts 5 to 8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankstep.explain import numbers
from rankstep.explain.blocks import Block, Lane, Marks, Paragraph, Span, Table, Timeline
from rankstep.explain.claims import held
from rankstep.explain.numbers import shares

if TYPE_CHECKING:
    from rankstep.explain.texts import Texts

_SHOWN_PARAMETERS = 16
_SHOWN_DIGITS = 8
_SHOWN_RANKS = 4
# What the communicator calls it; other ways are told in its own words.
_SHARED = "shared memory"


def tell_averaging(facts: dict[str, Any], text: Texts) -> list[Block]:
    """Part 5: gradients against parameters."""
    averaging = facts["averaging"]
    rows = averaging["optimizers"]
    apart = {row["optimizer"]: numbers.share(row["apart_every_step_relative"]) for row in rows}
    return [
        Paragraph(text("averaging.story", steps=averaging["steps"])),
        Table(
            head=(
                text("averaging.optimizer"),
                text("averaging.each"),
                text("averaging.few", every=averaging["every"]),
                text("averaging.states"),
            ),
            rows=tuple(
                (
                    row["optimizer"],
                    apart[row["optimizer"]],
                    numbers.share(row["apart_every_few_relative"]),
                    text("averaging.no_state")
                    if row["optimizer"] == "SGD"
                    else numbers.share(row["states_apart_relative"]),
                )
                for row in rows
            ),
            align="lrrr",
            shares=shares([row["apart_every_step_relative"] for row in rows]),
            shares_of=1,
        ),
        Paragraph(text("averaging.linear")),
        Paragraph(
            text(
                "averaging.adaptive",
                steps=averaging["steps"],
                adam=apart["Adam"],
                adamw=apart["AdamW"],
            )
        ),
    ]


def tell_backward(facts: dict[str, Any], text: Texts) -> list[Block]:
    """Part 6: one backward in time."""
    backward = facts["backward"]
    ranks = backward["ranks"]
    first = ranks[0]
    hidden = first["overlap"]
    computing = hidden["last_ready"] - first["backward"][0]
    end = max(rank["began"] + rank["step"][1] for rank in ranks)
    timelines: list[Block] = [
        Timeline(
            text("backward.of_rank", rank=number),
            end,
            _lanes(rank, text),
            text.raw("backward.legend") if number == min(len(ranks), _SHOWN_RANKS) - 1 else "",
        )
        for number, rank in enumerate(ranks[:_SHOWN_RANKS])
    ]
    bucket_of = {param: bucket for bucket in backward["plan"] for param in bucket["params"]}
    flights = {bucket["bucket"]: bucket for bucket in first["buckets"]}
    rows = [
        (
            str(place + 1),
            backward["names"][event["param"]],
            str(bucket_of[event["param"]]["bucket"]),
            numbers.milliseconds(event["at"] / 1e3),
            numbers.milliseconds(flights[bucket_of[event["param"]]["bucket"]]["launched"] / 1e3),
            numbers.milliseconds(flights[bucket_of[event["param"]]["bucket"]]["finished"] / 1e3),
        )
        for place, event in enumerate(first["ready"][:_SHOWN_PARAMETERS])
    ]
    rest = len(first["ready"]) - len(rows)
    if rest > 0:
        rows.append(("", text("backward.more", count=numbers.count(rest)), "", "", "", ""))
    return [
        Paragraph(text("backward.story", recorded=backward["recorded"])),
        *timelines,
        Table(
            head=(
                "",
                text("backward.parameter"),
                text("backward.bucket"),
                text("backward.ready_at"),
                text("backward.left_at"),
                text("backward.back_at"),
            ),
            rows=tuple(rows),
            align="rlrrrr",
            caption=text("backward.order"),
        ),
        Paragraph(
            text(
                "backward.overlap",
                buckets=len(backward["plan"]),
                cap=numbers.size(backward["bucket_cap_mb"] * 2**20),
                tensors=len(backward["names"]),
                all_reduces=backward["all_reduces"],
                early=backward["launched_in_backward"],
                flight=f"{numbers.milliseconds(hidden['in_flight'] / 1e3)} ms",
                hidden=f"{numbers.milliseconds(hidden['hidden'] / 1e3)} ms",
                share=numbers.share(hidden["hidden_share"]),
            )
        ),
        Paragraph(
            text(
                "backward.hidden",
                ranks=len(ranks),
                cores=facts["cores"],
                compute=f"{numbers.milliseconds(computing / 1e3)} ms",
            )
        ),
    ]


def _lanes(rank: dict[str, Any], text: Texts) -> tuple[Lane, ...]:
    """Lay one rank's events out on the common axis of all ranks."""
    began = rank["began"]
    ready = rank["overlap"]["last_ready"]
    backward = rank["backward"]

    def span(begin: float, end: float, kind: str) -> Span:
        return Span(began + begin, began + end, kind)

    return (
        Lane(
            text("backward.lane_forward"),
            (span(rank["forward"][0], rank["forward"][1], "forward"),),
        ),
        Lane(
            text("backward.lane_backward"),
            (span(backward[0], ready, "compute"), span(ready, backward[1], "wait")),
        ),
        Lane(
            text("backward.lane_ready"), ticks=tuple(began + event["at"] for event in rank["ready"])
        ),
        *(
            Lane(
                text("backward.lane_bucket", bucket=bucket["bucket"]),
                (span(bucket["launched"], bucket["finished"], "flight"),),
            )
            for bucket in rank["buckets"]
        ),
        Lane(text("backward.lane_step"), (span(rank["step"][0], rank["step"][1], "step"),)),
    )


def tell_whatif(facts: dict[str, Any], text: Texts) -> list[Block]:
    """Part 7: other ways to reduce."""
    whatif = facts["whatif"]
    job, many = whatif["job"], whatif["many"]
    ways = {way["way"]: way for way in many["ways"]}
    alone, plan = ways["per_parameter"], ways["plan"]
    tensors = numbers.count(many["tensors"])
    cut = alone["tensors"] < many["tensors"]
    return [
        Paragraph(
            text(
                "whatif.job",
                tensors=numbers.count(job["tensors"]),
                bytes=numbers.size(job["bytes"]),
                repeats=job["ways"][-1]["repeats"],
                way=text("whatif.shared") if whatif["way"] == _SHARED else whatif["way"],
            )
        ),
        _ways(job, text),
        Paragraph(
            text(
                "whatif.many",
                tensors=tensors,
                elements=many["elements"],
                bytes=numbers.size(many["bytes"]),
                repeats=plan["repeats"],
            )
        ),
        _ways(many, text),
        Paragraph(
            text(
                "whatif.cut" if cut else "whatif.whole",
                run=numbers.count(alone["all_reduces"]),
                tensors=tensors,
                each=f"{numbers.milliseconds(alone['milliseconds'] / alone['all_reduces'])} ms",
                slower=f"{alone['milliseconds'] / plan['milliseconds']:,.1f}",
                all_reduces=plan["all_reduces"],
            )
        ),
        Paragraph(text("whatif.reading")),
    ]


def _ways(model: dict[str, Any], text: Texts) -> Table:
    return Table(
        head=(
            text("whatif.way"),
            text("whatif.count"),
            text("whatif.time"),
            text("whatif.spread"),
        ),
        rows=tuple(
            (
                text(f"whatif.{way['way']}"),
                numbers.count(way["all_reduces"]),
                numbers.milliseconds(way["milliseconds"]),
                ""
                if way["repeats"] == 1
                else f"{numbers.milliseconds(way['milliseconds_least'])} - "
                f"{numbers.milliseconds(way['milliseconds_most'])}",
            )
            for way in model["ways"]
        ),
        align="lrrr",
        shares=shares([way["milliseconds"] for way in model["ways"]]),
        shares_of=2,
    )


def tell_steps(facts: dict[str, Any], text: Texts) -> list[Block]:
    """Part 8: the optimizer steps."""
    steps = facts["steps"]
    return [
        Paragraph(text("steps.story", steps=steps["steps"], optimizer=steps["optimizer"])),
        Table(
            head=(
                text("steps.step"),
                text("steps.loss"),
                text("steps.one_loss"),
                text("steps.checksums"),
            ),
            rows=tuple(
                (
                    str(number + 1),
                    numbers.plain(row["loss"], 6),
                    numbers.plain(one, 6),
                    str(row["checksums"]),
                )
                for number, (row, one) in enumerate(
                    zip(steps["rows"], steps["one_process_losses"], strict=True)
                )
            ),
            align="rrrr",
        ),
        Marks(
            text("steps.weights"),
            ((text("steps.last"), tuple(r["digest"][:_SHOWN_DIGITS] for r in steps["ranks"])),),
        ),
        Paragraph(
            text(
                "steps.one",
                apart=numbers.share(steps["one_process_apart_relative"]),
                ranks=len(steps["ranks"]),
            )
        ),
        Paragraph(text("steps.rounding" if held(facts, "gradients.mean") else "steps.differs")),
    ]
