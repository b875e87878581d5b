"""Several wrappers in one trace: which backwards make one step, and how they are told apart."""

from __future__ import annotations

import json

import pytest
from rich.console import Console
from trace_samples import MS
from trace_writer import Run, plan

from rankstep.cli.trace import show
from rankstep.trace import chrome, overlap, timeline
from rankstep.trace import events as ev
from rankstep.trace.files import load
from rankstep.trace.screen import tables
from rankstep.trace.summary import paragraph, summarize

D, G = 1, 2
"""A discriminator that was wrapped first, and a generator."""


def plans(run):
    run.journal.add(plan(wrapper=D, module="Discriminator"))
    run.journal.add(plan(wrapper=G, module="Generator", names=("a", "c")))


def together(run, steps, begin, end, order=(D, G)):
    """One backward that reduces both: the gradients of the discriminator first, and both settle at its end."""
    for wrapper, at in zip(order, (begin, begin + 2), strict=True):
        step = steps[wrapper]
        for event in (
            ev.BackwardBegan(step, (at + 1) * MS),
            ev.GradReady(step, 1, (at + 1) * MS),
            ev.BucketFilled(step, 0, (at + 1) * MS),
            ev.BucketLaunched(step, 0, True, (at + 1) * MS),
            ev.GradReady(step, 0, (at + 2) * MS),
        ):
            run.tell(event, wrapper)
    for place, wrapper in enumerate(order):
        step, at = steps[wrapper], (end - 2 + place) * MS
        for event in (
            ev.BucketLaunched(step, 1, False, at),
            ev.BucketWaited(step, 0, at, at),
            ev.BucketWaited(step, 1, at, at + MS),
            ev.StepSettled(step, at + MS),
        ):
            run.tell(event, wrapper)
    run.span("backward", begin, end)


def iteration(run, number, at):
    """A GAN's: the discriminator alone for 20 ms, then the generator through it for 30."""
    run.span("data", at, at + 1)
    run.forward(number, at + 2, at + 3, G)  # samples to tell from real ones
    run.forward(2 * number, at + 3, at + 6, D)
    run.backward(2 * number, at + 7, at + 13, D)
    run.span("optimizer", at + 14, at + 16)
    run.forward(number, at + 20, at + 22, G)
    run.forward(2 * number + 1, at + 22, at + 25, D)
    together(run, {D: 2 * number + 1, G: number}, at + 26, at + 40)
    run.span("optimizer", at + 41, at + 43)


@pytest.fixture
def gan(tmp_path):
    for rank in range(2):
        run = Run(tmp_path, rank=rank, world_size=2)
        plans(run)
        for number in range(3):
            iteration(run, number, 50 * number)
        run.close()
    return load(tmp_path)


def test_each_backward_is_a_step_of_the_wrappers_it_reduces(gan):
    for rank in gan.ranks:
        assert rank.wrappers == ("Discriminator", "Generator")
        assert [(s.number, s.wrappers) for s in rank.steps] == [
            (0, (0,)),
            (1, (0, 1)),
            (2, (0,)),
            (3, (0, 1)),
            (4, (0,)),
            (5, (0, 1)),
        ]
        # Each begins with its data or its first forward, whichever wrapper's.
        assert [s.begin_ns // MS for s in rank.steps] == [0, 20, 50, 70, 100, 120]
        assert [s.learns for s in rank.steps] == [True, True, False, False, False, False]
        alone, both = rank.steps[2:4]
        assert [b.index for b in alone.buckets] == [0, 1]
        assert [b.index for b in both.buckets] == [0, 2, 1, 3]
        assert [rank.buckets[b.index].wrapper for b in both.buckets] == [0, 1, 0, 1]
        assert rank.params == (
            "Discriminator: a",
            "Discriminator: b",
            "Generator: a",
            "Generator: c",
        )
        assert [rank.params[param] for param, _ in both.ready] == [
            "Discriminator: b",
            "Discriminator: a",
            "Generator: c",
            "Generator: a",
        ]


def test_the_kinds_of_steps_are_told_apart(gan):
    summary = summarize(gan)
    alone, both = summary.kinds
    assert (alone.name, alone.steps, alone.parts.step_ns) == ("Discriminator", 2, 20 * MS)
    # The last step ends with its optimizer step, 7 ms before the next data wait would begin.
    assert (both.name, both.steps) == ("Discriminator + Generator", 2)
    assert both.parts.step_ns == (30 + 23) / 2 * MS
    assert "These are steps of 2 kinds: Discriminator (2 steps of 20.0 ms, " in paragraph(summary)
    assert "; Discriminator + Generator (2 steps of 26.5 ms, " in paragraph(summary)
    told = summary.as_dict()["kinds"]
    assert [list(kind["wrappers"]) for kind in told] == [
        ["Discriminator"],
        ["Discriminator", "Generator"],
    ]
    assert told[0]["parts"]["step_ns"] == 20 * MS
    counts = [(b.index, b.wrapper) for b in summary.buckets]
    assert counts == [
        (0, "Discriminator"),
        (1, "Discriminator"),
        (2, "Generator"),
        (3, "Generator"),
    ]


def test_one_wrapper_is_not_named(tmp_path):
    run = Run(tmp_path)
    run.journal.add(plan(module="Net"))
    for number in range(3):
        run.step(number, 20 * number)
    run.close()
    trace = load(tmp_path)
    assert trace.ranks[0].params == ("a", "b")
    assert "kinds" not in paragraph(summarize(trace))
    console = Console(width=200)
    with console.capture() as captured:
        for table in tables(summarize(trace)):
            console.print(table)
    assert "Net" not in captured.get()
    assert timeline.heading(trace, 1) == "Step 1, 20.0 ms on the slowest rank"


def test_tables_and_timeline_name_the_wrappers(gan, capsys):
    import sys

    show(gan, summarize(gan), sys.stdout, brief=False)
    told = capsys.readouterr().out
    kinds = told[told.index("Kinds of steps") :].splitlines()
    assert kinds[2].split()[:4] == ["Discriminator", "2", "20.0", "ms"]
    assert kinds[3].split()[:5] == ["Discriminator", "+", "Generator", "2", "26.5"]
    buckets = told[told.index("Buckets: ") :].splitlines()
    assert buckets[1].split()[:3] == ["bucket", "of", "size"]
    assert [line.split()[:2] for line in buckets[2:6]] == [
        ["0", "Discriminator"],
        ["1", "Discriminator"],
        ["2", "Generator"],
        ["3", "Generator"],
    ]
    assert timeline.heading(gan, 3) == (
        "Step 3 of Discriminator + Generator, 30.0 ms on the slowest rank"
    )


def test_the_chrome_trace_names_the_wrappers(gan):
    events = json.loads(chrome.export(gan))["traceEvents"]
    steps = [e for e in events if e["name"] == "ProfilerStep#3"]
    assert [e["args"]["wrappers"] for e in steps] == [["Discriminator", "Generator"]] * 2
    flights = {
        (e["name"], e["args"]["wrapper"])
        for e in events
        if e["name"].startswith("ncclDevKernel_AllReduce")
    }
    assert flights == {
        ("ncclDevKernel_AllReduce bucket 0 of Discriminator", "Discriminator"),
        ("ncclDevKernel_AllReduce bucket 1 of Discriminator", "Discriminator"),
        ("ncclDevKernel_AllReduce bucket 2 of Generator", "Generator"),
        ("ncclDevKernel_AllReduce bucket 3 of Generator", "Generator"),
    }


def test_ranks_may_launch_the_buckets_of_two_wrappers_in_another_order(tmp_path):
    """Two wrappers with groups of their own: each bucket starts when the last rank has launched it, not its place."""
    for rank, order in enumerate(((D, G), (G, D))):
        run = Run(tmp_path, rank=rank, world_size=2)
        for wrapper in order:  # written in another order, too
            run.journal.add(plan(wrapper=wrapper))
        for number in range(2):
            together(run, {D: number, G: number}, 30 * number, 30 * number + 20, order)
        run.close()
    first, second = load(tmp_path).ranks
    assert first.buckets == second.buckets
    started = overlap.starts([first.steps[1], second.steps[1]])
    # The two first buckets leave at 31 and 33 on one rank, at 33 and 31 on the other.
    assert [started[index] // MS for index in (0, 2)] == [33, 33]
    assert [b.index for b in first.steps[1].buckets] == [0, 2, 1, 3]
    assert [b.index for b in second.steps[1].buckets] == [2, 0, 3, 1]


def test_a_rank_without_inputs_takes_part_wrapper_by_wrapper(tmp_path):
    """It has no backward, so only the others show that the two reductions are one step."""
    for rank in range(2):
        run = Run(tmp_path, rank=rank, world_size=2)
        plans(run)
        for number in range(2):
            at = 40 * number
            if rank == 0:
                together(run, {D: number, G: number}, at, at + 20)
            else:
                run.backward(number, at, at + 10, D, call=False)
                run.backward(number, at + 10, at + 20, G, call=False)
        run.close()
    for rank in load(tmp_path).ranks:
        assert [(s.number, s.wrappers) for s in rank.steps] == [(0, (0, 1)), (1, (0, 1))]
        assert sorted(b.index for b in rank.steps[1].buckets) == [0, 1, 2, 3]


def test_numbers_go_on_where_recording_began(tmp_path):
    run = Run(tmp_path)
    plans(run)
    for number in range(5, 8):
        iteration(run, number, 50 * number)
    run.close()
    (rank,) = load(tmp_path).ranks
    # The discriminator has made most backwards, 10 of them before.
    assert [step.number for step in rank.steps] == [10, 11, 12, 13, 14, 15]


def test_wrappers_of_one_class_have_numbers(tmp_path):
    run = Run(tmp_path)
    run.journal.add(plan(wrapper=4, module="Linear"))
    run.journal.add(plan(wrapper=7, module="Linear"))
    run.journal.add(plan(wrapper=9))
    run.close()
    assert load(tmp_path).ranks[0].wrappers == ("Linear 4", "Linear 7", "9")


def test_a_long_trace_of_several_wrappers_is_read_from_any_step(tmp_path, monkeypatch):
    run = Run(tmp_path)
    plans(run)
    for number in range(40):
        iteration(run, number, 50 * number)
        run.write()
    run.close()
    whole = load(tmp_path)
    monkeypatch.setattr("rankstep.trace.files.READ_BYTES", 20_000)
    part = load(tmp_path, range(61, 65))
    assert part.notices == ()
    assert part.ranks[0].steps == whole.ranks[0].steps[61:65]
