"""Traces in any state: what is wrong is told, and what there is is shown."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_samples import MS
from trace_writer import Run, plan

from rankstep.cli.main import main
from rankstep.trace import align, files, overlap
from rankstep.trace import events as ev
from rankstep.trace.files import TraceError, load
from rankstep.trace.journal import COLUMNS, SPANS
from rankstep.trace.model import SpanKind
from rankstep.trace.recorder import file_name
from rankstep.trace.summary import paragraph, summarize


def rank_file(folder, rank, world_size=2, steps=2, late=0, **other):
    """Write the file of one rank, whose times are so many milliseconds late."""
    run = Run(folder, rank=rank, world_size=world_size, **other)
    run.journal.add(plan())
    for number in range(steps):
        run.step(number, 20 * number + late)
        run.write()
    run.close()
    return folder / file_name(rank)


@pytest.fixture
def plain(tmp_path):
    """Two ranks with two steps."""
    for rank in range(2):
        rank_file(tmp_path, rank)
    return tmp_path


def rewrite(path, how):
    lines = path.read_text().splitlines()
    how(lines)
    path.write_text("".join(f"{line}\n" for line in lines))


def numbers(trace):
    return [[step.number for step in rank.steps] for rank in trace.ranks]


# ---------------------------------------------------------------- nothing there


def test_what_is_no_trace_is_told(tmp_path, capsys):
    with pytest.raises(TraceError, match="there is no directory"):
        load(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="holds no trace"):
        load(tmp_path)
    assert main(["trace", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"rankstep trace: {tmp_path} holds no trace")


def test_a_sound_trace_has_nothing_to_tell(plain):
    trace = load(plain)
    assert trace.notices == ()
    assert all(rank.complete for rank in trace.ranks)
    assert numbers(trace) == [[0, 1], [0, 1]]


# ---------------------------------------------------------------- cut and damaged files


def test_a_torn_last_line_is_no_error(plain):
    path = plain / file_name(0)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + '{"wrapper":0,"grad_rea')
    trace = load(plain)
    assert numbers(trace) == [[0, 1], [0, 1]]
    assert [rank.complete for rank in trace.ranks] == [False, True]
    assert "The recording of rank 0 has no end" in paragraph(summarize(trace))


def test_a_file_may_be_cut_anywhere(plain):
    """Whatever length a killed rank left: no step is half there, and none is invented."""
    path = plain / file_name(1)
    whole, data = load(plain), path.read_bytes()
    first_line = data.index(b"\n") + 1
    for length in range(first_line, len(data), 17):
        path.write_bytes(data[:length])
        trace = load(plain)
        own = trace.ranks[1]
        assert not own.complete
        for step, full in zip(own.steps, whole.ranks[1].steps, strict=False):
            assert (step.number, step.ready, step.begin_ns) == (
                full.number,
                full.ready,
                full.begin_ns,
            )
            assert len(step.buckets) in (0, 2)
    assert len(own.steps) == 2
    path.write_bytes(data[: first_line - 5])
    trace = load(plain)
    assert [rank.rank for rank in trace.ranks] == [0]
    assert trace.notices == (
        "rank-00001.jsonl is empty: its rank ended before its first line was written, so it was left out.",
    )


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        '{"data":[1,2,3]}',
        '{"data":[1,2.5]}',
        '{"data":["1",2]}',
        '{"data":[1,99999999999999999999]}',
        '{"data":null}',
        '{"wrapper":0,"grad_ready":[1,2]}',
        '{"wrapper":[],"grad_ready":[1,2,3]}',
        '{"wrapper":0,"plan_from":0,"params":["a"],"buckets":[{"nbytes":4,"params":[1]}]}',
        '{"end":true}',
        "[" * 5000,
        "\0\0\0\0",
    ],
)
def test_a_damaged_line_is_left_out(plain, line):
    rewrite(plain / file_name(0), lambda lines: lines.insert(2, line))
    trace = load(plain)
    (notice,) = trace.notices
    assert notice.startswith("1 line of rank-00000.jsonl is damaged (line 3: ")
    assert numbers(trace) == [[0, 1], [0, 1]]
    assert not trace.ranks[0].complete
    assert notice in paragraph(summarize(trace))


def test_of_many_damaged_lines_the_first_is_told(plain):
    for rank in range(2):
        rewrite(plain / file_name(rank), lambda lines: lines.__setitem__(slice(2, 4), ["{", "}{"]))
    trace = load(plain)
    assert [notice[:56] for notice in trace.notices] == [
        f"2 lines of rank-0000{rank}.jsonl are damaged (the first is li" for rank in range(2)
    ]
    assert numbers(trace) == [[1], [1]]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda lines: lines.clear(), "is empty"),
        (lambda lines: lines.__setitem__(0, '{"a":1}'), "was not written by Rankstep's recorder"),
        (lambda lines: lines.__setitem__(0, "null"), "was not written by Rankstep's recorder"),
        (
            lambda lines: lines.__setitem__(0, lines[0].replace('"version":1', '"version":9')),
            "has format version 9, and this Rankstep reads 1; read it with the release that wrote it, rankstep 1",
        ),
        (
            lambda lines: lines.__setitem__(0, lines[0].replace('"host"', '"guest"')),
            "has no 'host'",
        ),
        (
            lambda lines: lines.__setitem__(0, lines[0].replace('"rank":0', '"rank":"x"')),
            "has no 'rank'",
        ),
    ],
)
def test_a_file_that_is_none_is_left_out(plain, how, words):
    rewrite(plain / file_name(0), how)
    trace = load(plain)
    (notice,) = trace.notices
    assert notice.startswith(f"rank-00000.jsonl {words}")
    assert [rank.rank for rank in trace.ranks] == [1]
    assert "Files of 1 rank are missing (0)" in paragraph(summarize(trace))
    # With nothing else to show, that is an error.
    (plain / file_name(1)).unlink()
    with pytest.raises(TraceError) as raised:
        load(plain)
    text = str(raised.value)
    assert [w for w in (words, file_name(0), str(plain), "Next: ") if w not in text] == []


def test_a_file_that_cannot_be_read_is_left_out(plain):
    (plain / file_name(2)).mkdir()
    assert load(plain).notices == (
        "rank-00002.jsonl cannot be read (Is a directory), so it was left out.",
    )


def test_many_bad_files_are_counted(plain):
    for rank in range(2, 9):
        (plain / file_name(rank)).write_text("")
    notices = load(plain).notices
    assert len(notices) == 4
    assert notices[-1] == "4 more files are in such a state, so it was left out."


# ---------------------------------------------------------------- several runs


@pytest.mark.parametrize("other", [{"run": "b"}, {"world_size": 4}])
def test_of_several_runs_the_newest_is_shown(plain, other):
    rank_file(plain, 2, steps=1, **{"time_ns": 5000} | other)
    trace = load(plain)
    assert [rank.rank for rank in trace.ranks] == [2]
    (notice,) = trace.notices
    assert notice == (
        "The directory holds files of 2 runs. This is the newest, of rank 2; those of ranks 0, 1 were left out. Next: "
        "delete them, and give each run a directory of its own."
    )
    rank_file(plain, 2, steps=1, **{"time_ns": 500} | other)
    trace = load(plain)
    assert [rank.rank for rank in trace.ranks] == [0, 1]
    assert "This is the newest, of ranks 0, 1; those of rank 2 were left out" in trace.notices[0]


def test_ranks_without_a_common_name_for_their_run_are_read(plain):
    rank_file(plain, 1, run="")
    trace = load(plain)
    assert [rank.rank for rank in trace.ranks] == [0, 1]
    assert trace.notices == ()


def test_a_copy_of_a_file_counts_once(plain):
    text = (plain / file_name(1)).read_text()
    (plain / "rank-00001 (copy).jsonl").write_text(text.replace('"time_ns":1005', '"time_ns":1'))
    trace = load(plain)
    assert numbers(trace) == [[0, 1], [0, 1]]
    assert trace.notices == (
        "rank-00001 (copy).jsonl says that it is of rank 1, as rank-00001.jsonl does, which is newer; it was left out.",
    )


# ---------------------------------------------------------------- clocks


def test_a_clock_that_drifted_is_moved_as_far_as_the_collectives_prove(plain):
    rank_file(plain, 1, late=100, error_ns=1000)
    trace = load(plain)
    first, second = trace.ranks
    for own, other in zip(second.steps, first.steps, strict=True):
        low, high = align.bounds(own, other)
        assert low <= 0 <= high
        assert own.begin_ns == other.begin_ns + 2 * MS  # it need not be moved further
    (notice,) = trace.notices
    assert notice == (
        "The clock of rank 1 is wrong by up to 98.0 ms from step 0 on, as its collectives prove, so its times were moved "
        "by as much."
    )


def test_a_clock_within_its_bounds_is_left_alone(plain):
    rank_file(plain, 1, late=1, error_ns=1000)
    trace = load(plain)
    assert trace.ranks[1].steps[0].begin_ns == 1 * MS
    assert trace.notices == ()


def test_a_clock_that_jumps_against_the_others_is_told_from_there_on(tmp_path):
    rank_file(tmp_path, 0, steps=4)
    run = Run(tmp_path, rank=1, world_size=2)
    run.journal.add(plan())
    for number in range(4):
        run.step(number, 20 * number + (500 if number >= 2 else 0))
    run.close()
    trace = load(tmp_path)
    (notice,) = trace.notices
    assert notice.startswith("The clock of rank 1 is wrong by up to 498.0 ms from step 2 on")
    assert [step.begin_ns // MS for step in trace.ranks[1].steps] == [0, 20, 42, 62]


def test_what_a_users_hook_does_proves_nothing_about_clocks(tmp_path):
    for rank in range(2):
        run = Run(tmp_path, rank=rank, world_size=2)
        run.journal.add(plan(all_reduced=False))
        run.step(0, 100 * rank)
        run.close()
    trace = load(tmp_path)
    assert trace.ranks[1].steps[0].begin_ns == 100 * MS
    assert trace.notices == ()


def test_times_that_no_clock_explains_are_told(plain):
    """A bucket that ended there before it began here, and one that began there after it had ended here."""
    run = Run(plain, rank=1, world_size=2, error_ns=1000)
    run.journal.add(plan())
    run.forward(0, 0, 1)
    for event in (
        ev.BackwardBegan(0, 1 * MS),
        ev.BucketLaunched(0, 0, True, 1 * MS),
        ev.BucketWaited(0, 0, 2 * MS, 2 * MS),
        ev.BucketLaunched(0, 1, False, 30 * MS),
        ev.BucketWaited(0, 1, 30 * MS, 30 * MS),
        ev.StepSettled(0, 31 * MS),
    ):
        run.tell(event)
    run.close()
    (notice,) = load(plain).notices
    assert notice.startswith(
        "The times of rank 1 contradict those of the first rank in 1 steps (step 0"
    )


def test_nothing_is_corrected_without_ranks():
    assert align.by_collectives(()) == ((), [])


def test_a_clock_that_went_back_leaves_every_step(tmp_path):
    """Steps 0 and 1 at 1 s, steps 2 and 3 at 0 s: in their order, each as long as it was, and told."""
    run = Run(tmp_path)
    run.journal.add(plan())
    for number, at in enumerate((1000, 1020, 0, 20)):
        run.step(number, at)
        run.write()
    run.close()
    trace = load(tmp_path)
    (rank,) = trace.ranks
    assert numbers(trace) == [[0, 1, 2, 3]]
    # What came after follows right behind the optimizer step, at 1036.
    assert [step.begin_ns // MS for step in rank.steps] == [1000, 1020, 1036, 1056]
    lengths = [
        [(span.kind, span.end_ns - span.begin_ns) for span in step.spans] for step in rank.steps
    ]
    assert lengths[2] == lengths[0]
    (notice,) = trace.notices
    assert notice == (
        "The clock of rank 0 went back by 1,020.0 ms or more after its step 1; what it did later was moved to follow that, "
        "so how long that step took is not known."
    )


times = st.integers(-(10**6), 10**6)


@given(
    st.dictionaries(
        st.sampled_from(sorted(COLUMNS)),
        st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 2), times, times), max_size=6),
    ),
    st.dictionaries(
        st.sampled_from(sorted(SPANS)),
        st.lists(st.tuples(times, times, times, times), max_size=4),
    ),
)
def test_whatever_times_a_file_holds_steps_add_up(tmp_path_factory, events, spans):
    folder = tmp_path_factory.mktemp("times")
    rank_file(folder, 0, world_size=1)
    lines = [
        {"wrapper": 0}
        | {n: [v for row in rows for v in row[: len(COLUMNS[n])]] for n, rows in events.items()},
        {n: [v for row in rows for v in row[: SPANS[n]]] for n, rows in spans.items()},
    ]
    rewrite(
        folder / file_name(0), lambda all_: all_.__setitem__(slice(3, 5), map(json.dumps, lines))
    )
    trace = load(folder)
    for rank in trace.ranks:
        for step in rank.steps:
            assert step.begin_ns <= step.end_ns
            assert sum(span.end_ns - span.begin_ns for span in step.spans) == (
                step.end_ns - step.begin_ns
            )
            parts = overlap.parts(step, overlap.starts([step]))
            assert parts.step_ns == step.end_ns - step.begin_ns
    if overlap.common_steps(trace.ranks):
        assert paragraph(summarize(trace))


# ---------------------------------------------------------------- more than can be read at once


@pytest.fixture
def long(tmp_path, monkeypatch):
    """Two ranks with 60 steps, of which the limit lets some ten be read."""
    for rank in range(2):
        path = rank_file(tmp_path, rank, steps=60)
    size = path.stat().st_size
    monkeypatch.setattr(files, "READ_BYTES", size * 2 // 6)
    return tmp_path


def test_a_long_trace_is_read_from_its_first_step_on(long):
    seen = []
    trace = load(long, tell=lambda done, total: seen.append((done, total)))
    shown = numbers(trace)
    assert shown[0] == shown[1] == list(range(len(shown[0])))
    assert 5 <= len(shown[0]) < 15
    (notice,) = trace.notices
    assert f"so nothing after step {shown[0][-1]} is told here. Next: name others" in notice
    # Nothing is wrong with the files themselves.
    assert all(rank.complete for rank in trace.ranks)
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]


def test_other_steps_can_be_named(long):
    trace = load(long, range(40, 44))
    assert numbers(trace) == [[40, 41, 42, 43]] * 2
    assert trace.notices == ()
    whole = trace.ranks[0].steps[1]
    assert (whole.begin_ns, whole.end_ns, len(whole.buckets)) == (820 * MS, 840 * MS, 2)
    assert {span.kind for span in whole.spans} >= {SpanKind.DATA, SpanKind.OPTIMIZER}
    # So many do not fit either.
    trace = load(long, range(10, 60))
    assert numbers(trace)[0][0] == 10
    assert 5 <= len(numbers(trace)[0]) < 15
    assert "more than is read at once" in trace.notices[0]


def test_steps_can_be_named_for_a_short_trace(plain):
    assert numbers(load(plain, range(1, 9))) == [[1], [1]]
    with pytest.raises(TraceError, match="no step was recorded by all ranks"):
        summarize(load(plain, range(5, 9)))


def test_the_command_says_that_it_reads_and_how_far(long, capsys, monkeypatch):
    monkeypatch.setattr("rankstep.cli.trace.TOLD_BYTES", 1000)
    assert main(["trace", str(long)]) == 0
    told, errors = capsys.readouterr()
    assert errors.startswith("reading ")
    assert errors.count("reading") == 1
    assert "Next: name others with --steps FIRST:LAST" in " ".join(told.split())
    assert main(["trace", str(long), "--steps", "40:44", "--json"]) == 0
    told, _ = capsys.readouterr()
    assert [step["number"] for step in json.loads(told)["steps"]] == [40, 41, 42, 43]
    assert json.loads(told)["notices"] == []
    # A step that lies beyond what is read at once is found, too.
    assert main(["trace", str(long), "--step", "50"]) == 0
    assert "Step 50 on 2 ranks" in capsys.readouterr().out
    assert main(["trace", str(long), "--steps", "4"]) == 2
    assert "write FIRST:LAST" in capsys.readouterr().err


def test_a_short_trace_is_read_without_a_word(plain, capsys):
    assert main(["trace", str(plain), "--step", "1"]) == 0
    assert capsys.readouterr().err == ""


def test_what_is_wrong_is_said_beside_a_written_file(plain, tmp_path, capsys):
    rewrite(plain / file_name(0), lambda lines: lines.insert(2, "{"))
    page = tmp_path / "page.html"
    assert main(["trace", str(plain), "--html", str(page)]) == 0
    assert "rankstep trace: 1 line of rank-00000.jsonl is damaged" in capsys.readouterr().err
    assert "1 line of rank-00000.jsonl is damaged" in page.read_text("utf-8")


def test_a_long_line_takes_no_memory(tmp_path, monkeypatch):
    """No file that the recorder wrote: a hundred megabytes without the end of a line."""
    monkeypatch.setattr("rankstep.trace.lines.LINE_BYTES", 2**20)
    path = rank_file(tmp_path, 0, world_size=1)
    with path.open("ab") as file:
        file.truncate(path.stat().st_size + 100 * 2**20)
    tracemalloc.start()
    trace = load(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert numbers(trace) == [[0, 1]]
    assert not trace.ranks[0].complete
    assert peak < 20 * 2**20


def test_a_file_that_grows_meanwhile_is_read_as_far_as_it_goes(tmp_path):
    run = Run(tmp_path)
    run.journal.add(plan())
    run.step(0, 0)
    run.write()
    assert numbers(load(tmp_path)) == [[0]]
    run.step(1, 20)
    run.close()
    assert numbers(load(tmp_path)) == [[0, 1]]
    assert [path.name for path in tmp_path.iterdir()] == [file_name(0)]
