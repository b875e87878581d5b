"""A trace in figures, and in one paragraph that a person understands."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rankstep.trace import advice as predicted
from rankstep.trace import kinds, overlap
from rankstep.trace.files import TraceError
from rankstep.trace.model import SpanKind
from rankstep.trace.overlap import BucketFigures, Parts
from rankstep.trace.words import ms

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rankstep.trace.advice import Advice
    from rankstep.trace.model import RankTrace, StepTrace, Trace

SMALL_SHARE = 0.02
"""Below 2 % of the step, waiting for a rank is not worth a sentence."""

PHASE_WORDS = {
    SpanKind.DATA: "data loading",
    SpanKind.FORWARD: "forward",
    SpanKind.BACKWARD: "backward",
    SpanKind.OPTIMIZER: "the optimizer step",
    SpanKind.OTHER: "code outside model, loader and optimizer",
}


@dataclass(frozen=True, slots=True)
class BucketSummary:
    """One bucket, mean over steps and ranks; times in nanoseconds, as in :class:`rankstep.trace.overlap.BucketFigures`."""

    index: int
    nbytes: int
    params: tuple[str, ...]
    fill_ns: float | None
    delay_ns: float | None
    peers_ns: float
    flight_ns: float
    exposed_ns: float
    in_backward: float
    """In how many of its launches it left before the end of backward, 0 to 1."""
    wrapper: str = ""
    """Whose it is, where there are several wrappers."""


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank, mean over steps.

    Attributes:
        rank: Which.
        host: Its machine.
        device: Where it computes.
        clock_error_ns: How far its times may be off; None: unknown.
        complete: Its recording has a proper end.
        steps: How many it recorded.
        parts: What its steps were spent on.
        last: In how many steps it was last, 0 to 1.
        late_ns: How late it was in those, mean; 0 if there are none.
        phase: In which phase it mostly lost that time; None if there are none.
    """

    rank: int
    host: str
    device: str
    clock_error_ns: int | None
    complete: bool
    steps: int
    parts: Parts
    last: float
    late_ns: float
    phase: SpanKind | None


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One step, mean over ranks.

    Attributes:
        number: Which.
        parts: What it was spent on.
        last: The rank that was last; None: there is one rank only.
        late_ns: By how much.
        phase: In which phase.
    """

    number: int
    parts: Parts
    last: int | None
    late_ns: float
    phase: SpanKind | None


@dataclass(frozen=True, slots=True)
class Summary:
    """A trace in figures; means over the steps that count and over all ranks.

    Attributes:
        world_size: How many ranks the run had.
        command: How it was started.
        versions: Of what it ran on.
        missing: Ranks without a file.
        parts: What a step was spent on.
        steps: Each step that all ranks have.
        counted: Numbers of the steps that the means are of: all but a wrapper's first, which only learns.
        ranks: Each rank.
        buckets: Each bucket.
        kinds: Steps that reduced the same wrappers; more than one where wrappers take turns.
        notices: What is wrong with the trace or missing in it.
        by_device: Times are those of the ranks' devices.
        advice: What other buckets would do, or why that cannot be told.
    """

    world_size: int
    command: str
    versions: dict[str, str]
    missing: tuple[int, ...]
    parts: Parts
    steps: tuple[StepSummary, ...]
    counted: tuple[int, ...]
    ranks: tuple[RankSummary, ...]
    buckets: tuple[BucketSummary, ...]
    kinds: tuple[kinds.KindSummary, ...] = ()
    notices: tuple[str, ...] = ()
    by_device: bool = False
    advice: Advice | str = ""

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON takes it; times in nanoseconds."""
        told = asdict(self)
        for group in (told["ranks"], told["steps"]):
            for each in group:
                each["phase"] = None if each["phase"] is None else each["phase"].value
        for each in (told, *told["ranks"], *told["steps"], *told["kinds"]):
            shown: Parts = Parts(**each["parts"])
            each["parts"] |= {"step_ns": shown.step_ns, "hidden_share": shown.hidden_share}
        told["advice"] = predicted.as_dict(self.advice)
        told["paragraph"] = paragraph(self)
        return told


def summarize(trace: Trace, only: int | None = None) -> Summary:
    """Put a trace into figures.

    Args:
        trace: As it was read.
        only: This step alone; None: all.

    Raises:
        TraceError: No step was recorded by all ranks, or not the one that is asked for.
    """
    common = overlap.common_steps(trace.ranks)
    if not common or (only is not None and only not in common):
        raise TraceError(_nothing(trace, common, only))
    by_rank = {rank.rank: {step.number: step for step in rank.steps} for rank in trace.ranks}
    shown = common if only is None else [only]
    counted = [number for number in shown if not _learns(by_rank, number)] or shown
    plans = {r.rank: [bucket.params for bucket in r.buckets] for r in trace.ranks}
    told: dict[int, dict[int, Parts]] = {}
    figures: list[tuple[BucketFigures, bool]] = []
    lasts: dict[int, overlap.Last | None] = {}
    for number in shown:
        steps = {rank: own[number] for rank, own in by_rank.items()}
        started = overlap.starts(steps.values())
        told[number] = {rank: overlap.parts(step, started) for rank, step in steps.items()}
        lasts[number] = overlap.last(steps, _previous(by_rank, number))
        if number in counted:
            for rank, step in steps.items():
                ours = overlap.bucket_figures(step, started, plans[rank])
                figures += zip(ours, (b.in_backward for b in step.buckets), strict=False)
    return Summary(
        world_size=trace.world_size,
        command=trace.command,
        versions=trace.versions,
        missing=tuple(sorted(set(range(trace.world_size)) - by_rank.keys())),
        parts=Parts.mean([parts for number in counted for parts in told[number].values()]),
        steps=tuple(
            StepSummary(
                number,
                Parts.mean(list(told[number].values())),
                None if (one := lasts[number]) is None else one.rank,
                0.0 if one is None else one.late_ns,
                None if one is None else one.phase,
            )
            for number in shown
        ),
        counted=tuple(counted),
        ranks=tuple(
            _rank(
                rank,
                Parts.mean([told[number][rank.rank] for number in counted]),
                [lasts[number] for number in counted],
            )
            for rank in trace.ranks
        ),
        buckets=tuple(_buckets(trace.ranks[0], figures)),
        kinds=kinds.summarize_kinds(trace, told, counted),
        notices=trace.notices,
        by_device=all(rank.by_device for rank in trace.ranks),
        advice=predicted.advise(trace, counted),
    )


def _learns(by_rank: dict[int, dict[int, StepTrace]], number: int) -> bool:
    return any(own[number].learns for own in by_rank.values())


def _previous(by_rank: dict[int, dict[int, StepTrace]], number: int) -> dict[int, StepTrace]:
    previous = {rank: own[number - 1] for rank, own in by_rank.items() if number - 1 in own}
    # Times since then are compared, so they must begin at the same place on all ranks.
    return previous if len(previous) == len(by_rank) else {}


def _rank(rank: RankTrace, parts: Parts, lasts: Sequence[overlap.Last | None]) -> RankSummary:
    own = [one for one in lasts if one is not None and one.rank == rank.rank]
    lost: Counter[SpanKind] = Counter()
    for one in own:
        lost[one.phase] += int(one.late_ns)
    return RankSummary(
        rank=rank.rank,
        host=rank.host,
        device=rank.device,
        clock_error_ns=rank.clock_error_ns,
        complete=rank.complete,
        steps=len(rank.steps),
        parts=parts,
        last=len(own) / len(lasts),
        late_ns=statistics.fmean(one.late_ns for one in own) if own else 0.0,
        phase=lost.most_common(1)[0][0] if lost else None,
    )


def _buckets(
    rank: RankTrace, figures: Sequence[tuple[BucketFigures, bool]]
) -> Iterable[BucketSummary]:
    of: dict[int, list[tuple[BucketFigures, bool]]] = {}
    for figure, left_early in figures:
        of.setdefault(figure.index, []).append((figure, left_early))
    for info in rank.buckets:
        own = of.get(info.index)
        if own is None:
            continue
        one = [figure for figure, _ in own]
        yield BucketSummary(
            index=info.index,
            nbytes=info.nbytes,
            params=tuple(rank.params[i] for i in info.params),
            fill_ns=_mean(f.fill_ns for f in one),
            delay_ns=_mean(f.delay_ns for f in one),
            peers_ns=statistics.fmean(f.peers_ns for f in one),
            flight_ns=statistics.fmean(f.flight_ns for f in one),
            exposed_ns=statistics.fmean(f.exposed_ns for f in one),
            in_backward=statistics.fmean(early for _, early in own),
            wrapper=rank.wrappers[info.wrapper] if len(rank.wrappers) > 1 else "",
        )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _nothing(trace: Trace, common: Sequence[int], only: int | None) -> str:
    recorded = "; ".join(f"rank {r.rank}: {_span(r.steps)}" for r in trace.ranks[:8])
    if common:
        return (
            f"step {only} was not recorded by all ranks. Next: ask for one of {common[0]} to {common[-1]} "
            f"({recorded})."
        )
    return (
        f"no step was recorded by all ranks ({recorded}). Next: see whether the run got through a backward of the "
        "wrapper, and whether the steps that were asked for exist."
    )


def _span(steps: Sequence[StepTrace]) -> str:
    return f"steps {steps[0].number} to {steps[-1].number}" if steps else "none"


# ---------------------------------------------------------------- words


def paragraph(summary: Summary) -> str:
    """Tell what a step was spent on, who was late, and what is missing in the trace."""
    parts = summary.parts
    spent = (
        f"{_steps(summary.counted)} on {_plural(len(summary.ranks), 'rank')}: "
        f"step {ms(parts.step_ns)}: compute {_of(parts.compute_ns, parts)}, "
        f"exposed communication {_of(parts.exposed_ns, parts)}, "
        f"waiting for the slowest rank {_of(parts.waiting_ns, parts)}, "
        f"data {_of(parts.data_ns, parts)}, other {_of(parts.other_ns, parts)}."
    )
    sentences = [
        spent,
        _communication(summary),
        _straggler(summary),
        kinds.sentence(summary.kinds),
        predicted.sentence(summary.advice),
        *_gaps(summary),
        *summary.notices,
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _communication(summary: Summary) -> str:
    parts = summary.parts
    if len(summary.ranks) == 1 and summary.world_size == 1:
        return "One rank has nobody to communicate with."
    share = parts.hidden_share
    if share is None:
        return "No communication was seen."
    device = {rank.device.partition(":")[0] for rank in summary.ranks}
    limit = "" if device == {"cpu"} or summary.by_device else " at most, as the host sees it,"
    return (
        f"{share:.0%} of communication{limit} was hidden behind compute "
        f"({ms(parts.hidden_ns)} of {ms(parts.hidden_ns + parts.exposed_ns)})."
    )


def _straggler(summary: Summary) -> str:
    if len(summary.ranks) < 2:
        return ""
    worst = max(summary.ranks, key=lambda rank: rank.last * rank.late_ns)
    cost = worst.last * worst.late_ns
    fair = 1 / len(summary.ranks)
    if worst.phase is None or cost < SMALL_SHARE * summary.parts.step_ns:
        return "No rank kept the others waiting."
    how = "mostly" if worst.last > max(0.6, 1.5 * fair) else "at times"
    error = worst.clock_error_ns
    doubt = f" (give or take {ms(error)}, the error of its clock)" if error else ""
    told = (
        f"Rank {worst.rank} was last in {worst.last:.0%} of the steps, {ms(worst.late_ns)} late{doubt}, "
        f"in {PHASE_WORDS[worst.phase]}."
    )
    return told if how == "mostly" else f"The ranks were late in turns: {told[0].lower()}{told[1:]}"


def _gaps(summary: Summary) -> Iterable[str]:
    if summary.missing:
        yield (
            f"Files of {_plural(len(summary.missing), 'rank')} are missing "
            f"({_list(summary.missing)}), so waiting for those counts as communication."
        )
    torn = [rank.rank for rank in summary.ranks if not rank.complete]
    if torn:
        yield f"The recording of {_ranks(torn)} has no end: cut off, or events were lost."
    unsure = [rank.rank for rank in summary.ranks if rank.clock_error_ns is None]
    if unsure:
        yield (
            f"The clocks of {_ranks(unsure)} could not be compared with rank 0's, so who waited for whom is a guess."
        )


def _of(ns: float, parts: Parts) -> str:
    share = ns / parts.step_ns if parts.step_ns else 0.0
    return f"{ms(ns)} ({share:.0%})"


def _steps(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"Step {numbers[0]}"
    return f"Steps {numbers[0]} to {numbers[-1]}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {_list(ranks)}"


def _list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _plural(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"
