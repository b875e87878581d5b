"""The story's first half, parts 1 to 4: from the numbers to blocks of text, tables and bars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankstep.explain import numbers
from rankstep.explain.blocks import (
    Arrow,
    Arrows,
    Block,
    Lines,
    Marks,
    Nodes,
    Owners,
    Paragraph,
    Series,
    Table,
)
from rankstep.explain.claims import held
from rankstep.explain.numbers import shares

if TYPE_CHECKING:
    from rankstep.explain.texts import Texts

_SHOWN_DIGITS = 8


def tell_world(facts: dict[str, Any], text: Texts) -> list[Block]:
    """Part 1: who is where, and what each one holds."""
    world = facts["world"]
    first, ranks = world["ranks"][0], world["ranks"]
    table = Table(
        head=(
            text("world.node"),
            "local_rank",
            "rank",
            text("world.device"),
            text("world.pid"),
            text("world.model"),
            text("world.gradient"),
            text("world.state", optimizer=world["optimizer"]),
        ),
        rows=tuple(
            (
                str(rank["node"]),
                str(rank["local_rank"]),
                str(rank["rank"]),
                rank["device"],
                str(rank["pid"]),
                numbers.size(rank["parameter_bytes"]),
                numbers.size(rank["gradient_bytes"]),
                numbers.size(rank["optimizer_bytes"]),
            )
            for rank in ranks
        ),
        align="rrrlrrrr",
    )
    return [
        Paragraph(text("world.ranks", ranks=len(ranks), nodes=world["nodes"])),
        table,
        *_second_world(world["two_nodes"], text),
        Paragraph(
            text(
                "world.whole",
                model=world["model"],
                parameters=numbers.count(first["parameters"]),
                tensors=world["tensors"],
                bytes=numbers.size(first["parameter_bytes"]),
                total=numbers.size(world["parameter_bytes_of_all_ranks"]),
                ranks=len(ranks),
                shard=numbers.size(first["parameter_bytes"] / len(ranks)),
                gradient=numbers.size(first["gradient_bytes"]),
                optimizer=world["optimizer"],
                state=numbers.size(first["optimizer_bytes"]),
            )
        ),
        Paragraph(
            text(
                "world.copied",
                before=len({rank["digest_before"] for rank in ranks}),
                after=len({rank["digest_after"] for rank in ranks}),
            )
        ),
        Marks(
            text("world.digests"),
            tuple(
                (
                    text(f"world.{when}"),
                    tuple(rank[f"digest_{when}"][:_SHOWN_DIGITS] for rank in ranks),
                )
                for when in ("before", "after")
            ),
        ),
    ]


def _second_world(second: dict[str, Any], text: Texts) -> list[Block]:
    """Where one node cannot show what a local rank is: the ranks of two."""
    if second["problem"]:
        return [Paragraph(text("world.no_second", problem=second["problem"]))]
    each = second["ranks_per_node"]
    boxes = tuple(
        (
            f"{text('world.node')} {node}",
            tuple(
                (
                    f"rank {rank['rank']}",
                    f"{node} {text('times')} {each} + local_rank {rank['local_rank']}",
                )
                for rank in second["ranks"]
                if rank["node"] == node
            ),
        )
        for node in range(second["nodes"])
    )
    return [
        Paragraph(text("world.second", nodes=second["nodes"], each=each)),
        Nodes(text("world.boxes", each=each), boxes),
        Paragraph(text("world.numbers", nodes=second["nodes"], world_size=len(second["ranks"]))),
    ]


def tell_samples(facts: dict[str, Any], text: Texts) -> list[Block]:
    """Part 2: who gets which samples."""
    samples = facts["samples"]
    ranks = samples["ranks"]
    counted = numbers.count(samples["counted_samples"])
    owners = Owners(
        text("samples.map", last=len(samples["owners_epoch_0"]) - 1),
        tuple(
            (text("samples.epoch", epoch=epoch), tuple(samples[f"owners_epoch_{epoch}"]))
            for epoch in (0, 1)
        ),
    )
    columns = ("epoch_0", "epoch_1_without_set_epoch", "epoch_1")
    table = Table(
        head=(
            text("rank"),
            text("samples.count"),
            text("samples.first"),
            text("samples.forgotten"),
            text("samples.next"),
        ),
        rows=tuple(
            (
                str(number),
                numbers.count(rank["samples"]),
                *(" ".join(map(str, rank[column])) for column in columns),
            )
            for number, rank in enumerate(ranks)
        ),
        align="rrlll",
    )
    whole = samples["dataset_samples"]
    cut = (
        [Paragraph(text("samples.cut", samples=numbers.count(whole), counted=counted))]
        if samples["counted_samples"] < whole
        else []
    )
    return [
        Paragraph(text("samples.roles", samples=numbers.count(whole), ranks=len(ranks))),
        *cut,
        owners,
        Paragraph(
            text(
                "samples.proof",
                least=samples["dealt_least"],
                most=samples["dealt_most"],
                dealt=numbers.count(samples["dealt"]),
                share=numbers.count(ranks[0]["samples_padded"]),
                twice=samples["padded_twice"],
            )
        ),
        Paragraph(
            text(
                "samples.without",
                samples=counted,
                reads=numbers.count(samples["without_sampler_reads"]),
                ranks=len(ranks),
            )
        ),
        table,
        Paragraph(
            text(
                "samples.set_epoch",
                same=numbers.count(ranks[0]["same_places_without_set_epoch"]),
                places=numbers.count(ranks[0]["places"]),
                changed=numbers.count(ranks[0]["same_places_with_set_epoch"]),
                warning=samples["warning"],
            )
        ),
    ]


def tell_gradients(facts: dict[str, Any], text: Texts) -> list[Block]:
    """Part 3: local gradients, their mean, one process; even and uneven batches."""
    gradients = facts["gradients"]
    ranks, uneven = gradients["ranks"], gradients["uneven"]
    equal = held(facts, "gradients.mean") and held(facts, "gradients.wrapper")
    degrees = [gradients["smallest_angle"], gradients["largest_angle"]]
    rows = [
        (
            f"g_{number}",
            numbers.plain(rank["loss"]),
            numbers.plain(rank["length"]),
            text("gradients.angle_of", degrees=numbers.plain(rank["angle_to_mean"], 1)),
            numbers.plain(rank["element"], 8),
        )
        for number, rank in enumerate(ranks)
    ]
    losses = [rank["loss"] for rank in ranks]
    mean_loss = None if None in losses else sum(losses) / len(losses)
    ends = [
        ("mean", mean_loss, gradients["mean_length"], gradients["element_mean"]),
        (
            "one",
            gradients["one_process_loss"],
            gradients["one_process_length"],
            gradients["element_one_process"],
        ),
        ("wrapper", None, None, gradients["element_wrapper"]),
    ]
    rows += [
        (
            text(f"gradients.{name}"),
            "" if name == "wrapper" else numbers.plain(loss),
            "" if name == "wrapper" else numbers.plain(length),
            "",
            numbers.plain(element, 8),
        )
        for name, loss, length, element in ends
    ]
    return [
        Paragraph(
            text(
                "gradients.local",
                batch=gradients["local_batch"],
                ranks=len(ranks),
                total=gradients["global_batch"],
                smallest=numbers.plain(degrees[0], 1),
                largest=numbers.plain(degrees[1], 1),
            )
        ),
        Table(
            head=(
                "",
                text("gradients.loss"),
                text("gradients.length"),
                text("gradients.angle"),
                text("gradients.element", name=gradients["element_name"]),
            ),
            rows=tuple(rows),
            align="lrrrr",
        ),
        _arrows(gradients, text),
        Paragraph(
            text(
                "gradients.equal",
                total=gradients["global_batch"],
                last=len(ranks) - 1,
                ranks=len(ranks),
                difference=numbers.small(gradients["difference_relative"]),
                wrapper=numbers.small(gradients["wrapper_difference_relative"]),
            )
        ),
        Paragraph(text("gradients.rounding" if equal else "gradients.differs")),
        Paragraph(
            text(
                "gradients.uneven",
                sizes=", ".join(map(str, uneven["sizes"])),
                plain=numbers.share(uneven["mean_of_means_relative"]),
                exact=numbers.small(uneven["exact_relative"]),
            )
        ),
        Table(
            head=("", text("gradients.off")),
            rows=(
                (
                    text("gradients.uneven_plain"),
                    numbers.small(uneven["mean_of_means_relative"]),
                ),
                (text("gradients.uneven_exact"), numbers.small(uneven["exact_relative"])),
            ),
            align="lr",
            shares=shares([uneven["mean_of_means_relative"], uneven["exact_relative"]]),
            shares_of=1,
        ),
    ]


def _arrows(gradients: dict[str, Any], text: Texts) -> Arrows:
    """Draw the mean, and above and below it in turn the gradients that it is the mean of."""
    arrows = [Arrow(text("gradients.mean"), gradients["mean_length"] or 0.0, 0.0)]
    for number, rank in enumerate(gradients["ranks"]):
        degrees = rank["angle_to_mean"] or 0.0
        arrows.append(
            Arrow(f"g_{number}", rank["length"] or 0.0, -degrees if number % 2 else degrees)
        )
    return Arrows(text("gradients.picture"), tuple(arrows))


def tell_drift(facts: dict[str, Any], text: Texts) -> list[Block]:
    """Part 4: what happens without synchronisation."""
    drift = facts["drift"]
    alone = drift["alone_relative"]
    length = drift["weights_length"] or 1.0
    together = [None if apart is None else apart / length for apart in drift["together"]]
    return [
        Paragraph(text("drift.story", steps=drift["steps"], first=drift["alone_checksums"][0])),
        Lines(
            text("drift.apart"),
            tuple(text("drift.step", step=step + 1) for step in range(drift["steps"])),
            (
                _series(text("drift.alone"), alone),
                _series(text("drift.with"), together),
            ),
        ),
        Paragraph(
            text(
                "drift.together" if held(facts, "drift.together") else "drift.parted",
                steps=drift["steps"],
                apart=numbers.small(drift["alone"][-1]),
                share=numbers.share(alone[-1]),
                together=numbers.small(drift["together"][-1]),
            )
        ),
    ]


def _series(name: str, values: list[float | None]) -> Series:
    """What is not finite is drawn as high as the highest, and said with a question mark."""
    highest = max((value for value in values if value is not None), default=1.0)
    return Series(
        name,
        tuple(highest if value is None else value for value in values),
        tuple(numbers.share(value) for value in values),
    )
