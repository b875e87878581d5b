"""From the measured numbers to the story in one language: nothing is measured here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rankstep.explain import numbers, tell_first, tell_second
from rankstep.explain.blocks import Block, Chain, Link, Paragraph, Section, Story, Verdict
from rankstep.explain.parts import PARTS
from rankstep.explain.texts import texts

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankstep.explain.texts import Texts

_TELLERS: Final[dict[str, Callable[[dict[str, Any], Texts], list[Block]]]] = {
    "world": tell_first.tell_world,
    "samples": tell_first.tell_samples,
    "gradients": tell_first.tell_gradients,
    "drift": tell_first.tell_drift,
    "averaging": tell_second.tell_averaging,
    "backward": tell_second.tell_backward,
    "whatif": tell_second.tell_whatif,
    "steps": tell_second.tell_steps,
}
_SHOWN_MODULES = 4
_SHOWN_DIGITS = 8
_SHOWN_SAMPLES = 2


def tell(facts: dict[str, Any], lang: str) -> Story:
    """Tell the story.

    Args:
        facts: The document of one run.
        lang: ``"en"`` or ``"zh"``.
    """
    text = texts(lang)
    claims = facts["claims"]
    sections = []
    for part in PARTS:
        verdicts = [
            _verdict(claim, facts, text)
            for claim in claims
            if claim["claim"].partition(".")[0] == part
        ]
        blocks = (*_TELLERS[part](facts, text), *verdicts)
        sections.append(Section(part, text(f"{part}.title"), blocks))
    failed = [text(f"claim.{claim['claim']}") for claim in claims if not claim["held"]]
    ending = text(
        "claims.some" if failed else "claims.all",
        count=len(claims),
        failed=len(failed),
        names=text("separator").join(failed),
        seconds=f"{facts['seconds']['command']:.0f}",
    )
    name = text("built_in") if facts["job"]["built_in"] else f"`{facts['job']['name']}`"
    intro = (
        Paragraph(text("intro", ranks=facts["world"]["world_size"], job=name)),
        _chain(facts, text),
    )
    return Story(lang, text("title"), intro, tuple(sections), ending, facts["held"])


def _chain(facts: dict[str, Any], text: Texts) -> Chain:
    """The tutorial's one chain, from the dataset to equal weights, with this run's numbers."""
    samples, gradients, backward = facts["samples"], facts["gradients"], facts["backward"]
    dealt, computed, ended = samples["ranks"], gradients["ranks"], facts["steps"]["ranks"]
    return Chain(
        text("chain"),
        tuple(f"{text('rank')} {number}" for number in range(len(dealt))),
        (
            Link(text("chain.dataset", samples=numbers.count(samples["dataset_samples"]))),
            Link(
                text("chain.sampler"),
                tuple(
                    text("chain.samples", count=numbers.count(rank["samples_padded"]))
                    for rank in dealt
                ),
            ),
            Link(
                text(
                    "chain.batch", batch=gradients["local_batch"], total=gradients["global_batch"]
                ),
                tuple(
                    f"D_{number} = {', '.join(map(str, rank['samples'][:_SHOWN_SAMPLES]))} ..."
                    for number, rank in enumerate(computed)
                ),
            ),
            Link(
                text("chain.loss"),
                tuple(
                    f"L_{number} = {numbers.plain(rank['loss'], 3)}"
                    for number, rank in enumerate(computed)
                ),
            ),
            Link(
                text("chain.ready", tensors=len(backward["names"])),
                tuple(
                    f"|g_{number}| = {numbers.plain(rank['length'], 3)}"
                    for number, rank in enumerate(computed)
                ),
            ),
            Link(text("chain.bucket", buckets=len(backward["plan"]))),
            Link(
                text(
                    "chain.reduce",
                    all_reduces=backward["all_reduces"],
                    early=backward["launched_in_backward"],
                )
            ),
            Link(text("chain.mean", length=numbers.plain(gradients["mean_length"], 3))),
            Link(
                text("chain.step", optimizer=facts["steps"]["optimizer"]),
                tuple(rank["digest"][:_SHOWN_DIGITS] for rank in ended),
                alike=True,
            ),
            Link(text("chain.equal", checksums=facts["steps"]["rows"][-1]["checksums"])),
        ),
    )


def _verdict(claim: dict[str, Any], facts: dict[str, Any], text: Texts) -> Verdict:
    causes: tuple[str, ...] = ()
    if not claim["held"]:
        found = claim["causes"] or [{"cause": "unknown"}]
        causes = tuple(
            text("because", cause=_cause(cause, facts["world"]["world_size"], text))
            for cause in found
        )
    limit = claim["limit"]
    compares = limit is not None and isinstance(limit, float)
    measured = f"{numbers.small(claim['value'])}" if compares else ""
    if compares:
        relation = ">" if claim["claim"] in ("averaging.adam", "averaging.adamw") else "<="
        measured += f" {relation} {limit:.1e}"
    return Verdict(claim["held"], text(f"claim.{claim['claim']}"), measured, causes)


def _cause(cause: dict[str, Any], ranks: int, text: Texts) -> str:
    modules = cause.get("modules", [])
    names = ", ".join(modules[:_SHOWN_MODULES])
    if len(modules) > _SHOWN_MODULES:
        names += f", ... ({len(modules)})"
    return text(
        f"cause.{cause['cause']}",
        modules=names,
        ranks=ranks,
        one_process=numbers.plain(cause.get("one_process")),
        mean_of_ranks=numbers.plain(cause.get("mean_of_ranks")),
        said=cause.get("said", ""),
    )
