"""What `rankstep trace` tells: the paragraph, the figures, the timeline, and files for other viewers."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import pytest
from rich.console import Console
from trace_samples import MS, quick, rank, slow, two_ranks

from rankstep.cli.main import main
from rankstep.cli.trace import typical
from rankstep.trace import chrome, files, timeline
from rankstep.trace.files import TraceError
from rankstep.trace.model import Trace
from rankstep.trace.screen import tables
from rankstep.trace.summary import ms, paragraph, summarize


def changed(trace, place, **values):
    ranks = list(trace.ranks)
    ranks[place] = replace(ranks[place], **values)
    return replace(trace, ranks=tuple(ranks))


@pytest.fixture
def command(monkeypatch, capsys):
    """Run `rankstep trace` on a trace that was read."""

    def run(trace, *words):
        monkeypatch.setattr("rankstep.cli.trace.load", lambda *_: trace)
        code = main(["trace", "somewhere", *words])
        return code, *capsys.readouterr()

    return run


# ---------------------------------------------------------------- figures and words


def test_the_paragraph_of_a_late_rank():
    assert paragraph(summarize(two_ranks(1, 2))) == (
        "Steps 1 to 2 on 2 ranks: step 84.0 ms: compute 40.0 ms (48%), exposed communication 10.5 ms (12%), waiting for "
        "the slowest rank 11.5 ms (14%), data 18.0 ms (21%), other 4.00 ms (5%). 28% of communication was hidden behind "
        "compute (4.00 ms of 14.5 ms). Rank 1 was last in 100% of the steps, 32.0 ms late, in data loading."
    )


def test_ranks_that_are_late_in_turns():
    first = rank(0, [quick(1), slow(2, 84), quick(3, 168), slow(4, 252)])
    second = rank(1, [slow(1), quick(2, 84), slow(3, 168), quick(4, 252)])
    told = paragraph(summarize(Trace((first, second), 2, "", {})))
    assert "The ranks were late in turns: rank 0 was last in 50% of the steps, 32.0 ms late" in told


def test_ranks_side_by_side():
    trace = Trace((rank(0, [quick()]), rank(1, [quick()])), 2, "", {})
    assert "No rank kept the others waiting." in paragraph(summarize(trace))


def test_one_rank_waits_for_nobody():
    told = paragraph(summarize(Trace((rank(0, [quick()]),), 1, "", {})))
    assert told.startswith("Step 1 on 1 rank: step 84.0 ms")
    assert told.endswith("One rank has nobody to communicate with.")


def test_what_is_missing_or_unsure_is_told():
    trace = changed(two_ranks(), 1, complete=False, clock_error_ns=None)
    told = paragraph(summarize(replace(trace, world_size=12)))
    assert "Files of 10 ranks are missing (2, 3, 4, 5, 6, 7, 8, 9 and 2 more)" in told
    assert "The recording of rank 1 has no end" in told
    assert "The clocks of rank 1 could not be compared with rank 0's" in told
    told = paragraph(summarize(changed(two_ranks(), 1, clock_error_ns=250_000)))
    assert "32.0 ms late (give or take 0.25 ms, the error of its clock), in data loading" in told
    told = paragraph(summarize(changed(two_ranks(), 0, device="cuda:0")))
    assert "28% of communication at most, as the host sees it, was hidden" in told


def test_figures_of_ranks_steps_and_buckets():
    summary = summarize(two_ranks(0, 1, 2))
    assert summary.counted == (1, 2)  # the first step of a run only learns
    assert [step.number for step in summary.steps] == [0, 1, 2]
    assert [(s.last, s.late_ns, s.phase.value) for s in summary.steps] == [(1, 32 * MS, "data")] * 3
    first, second = summary.ranks
    assert (first.last, first.late_ns, first.phase) == (0.0, 0.0, None)
    assert (second.last, second.late_ns, second.phase.value) == (1.0, 32 * MS, "data")
    assert [r.parts.waiting_ns / MS for r in summary.ranks] == [23, 0]
    small, big = summary.buckets
    assert small.params == ("third.weight", "second.weight")
    assert (small.in_backward, big.in_backward) == (1.0, 0.0)
    assert (small.fill_ns, small.peers_ns, small.flight_ns) == (5 * MS, 16 * MS, 8 * MS)
    assert (small.exposed_ns, big.exposed_ns) == (4 * MS, 6 * MS)


def test_one_step_can_be_asked_for():
    summary = summarize(two_ranks(0, 1, 2), only=0)
    assert summary.counted == (0,)
    assert len(summary.steps) == 1
    with pytest.raises(
        TraceError, match=r"step 7 was not recorded by all ranks. Next: ask for one of 0 to 2"
    ):
        summarize(two_ranks(0, 1, 2), only=7)


def test_a_trace_without_a_common_step_says_what_there_is():
    trace = Trace((rank(0, [quick(1)]), rank(1, [])), 2, "", {})
    with pytest.raises(TraceError, match=r"rank 0: steps 1 to 1; rank 1: none"):
        summarize(trace)


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1000, "1.0 us"),
        (99_900, "99.9 us"),
        (100_000, "0.10 ms"),
        (9_990_000, "9.99 ms"),
        (10_000_000, "10.0 ms"),
        (12_345_678_901, "12,345.7 ms"),
    ],
)
def test_times_are_written_so_that_their_size_is_seen(ns, text):
    assert ms(ns) == text


# ---------------------------------------------------------------- the command


def test_the_command_tells_everything(command):
    code, told, errors = command(two_ranks(0, 1, 2))
    assert (code, errors) == (0, "")
    assert "\x1b" not in told
    for part in ("Rank 1 was", "Ranks: ", "Steps: ", "Buckets: ", "third.weight, second.weight"):
        assert part in told
    assert "Step 2, 84.0 ms on the slowest rank" in told
    assert max(map(len, told.splitlines())) <= 120


def test_json_has_every_figure(command):
    code, told, _ = command(two_ranks(0, 1, 2), "--json")
    result = json.loads(told)
    assert code == 0
    assert result["paragraph"].startswith("Steps 1 to 2")
    assert result["parts"]["step_ns"] == 84 * MS
    parts = result["parts"]
    added = sum(parts[f"{each}_ns"] for each in ("compute", "exposed", "waiting", "data", "other"))
    assert added == parts["step_ns"]
    assert [rank["phase"] for rank in result["ranks"]] == [None, "data"]
    assert result["buckets"][0]["params"] == ["third.weight", "second.weight"]
    assert len(result["steps"]) == 3


def test_a_directory_that_is_no_trace(tmp_path, capsys):
    assert main(["trace", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"rankstep trace: {tmp_path} holds no trace")


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["trace", "--help"])
    assert ended.value.code == 0
    assert "  rankstep trace traces --html traces.html" in capsys.readouterr().out


def test_a_page_is_written(command, tmp_path):
    page = tmp_path / "page.html"
    code, told, errors = command(two_ranks(), "--html", str(page))
    assert (code, told, errors) == (0, "", f"wrote {page}\n")
    assert "<html" in page.read_text("utf-8")
    code, _, errors = command(two_ranks(), "--html", str(tmp_path))
    assert code == 2
    assert f"{tmp_path} cannot be written" in errors


def test_long_tables_are_cut():
    trace = Trace(tuple(rank(n, [slow(1) if n == 39 else quick(1)]) for n in range(40)), 40, "", {})
    console = Console(width=200)
    with console.capture() as captured:
        for table in tables(summarize(trace)):
            console.print(table)
    assert "32 of 40 ranks" in captured.get()
    assert "\n 39 " in captured.get()


def test_the_step_that_is_drawn_is_the_median_one():
    assert typical(summarize(two_ranks(0, 1, 2, 3))) == 2


# ---------------------------------------------------------------- the timeline


def test_the_timeline_shows_what_happened_when():
    trace = Trace((rank(0, [quick()]), rank(1, [slow()])), 2, "", {})
    # 84 columns of 1 ms, and labels of 7.
    lines = [line.plain for line in timeline.draw(trace, 1, 91)]
    expected = [
        "rank 0 dd " + "f" * 10 + "b" * 20 + "." * 38 + "b" + "o" * 9,
        " " * 28 + "0" + "-" * 31 + "=" * 9,
        " " * 40 + "1" + "-" * 31 + "=" * 7,
        "rank 1 " + "d" * 34 + " " + "f" * 10 + "b" * 20 + "." * 6 + "b" + "o" * 9,
        " " * 60 + "0" + "=" * 8 + " " * 3 + "1" + "=" * 6,
    ]
    assert lines[1:6] == expected
    assert lines[0].startswith("       |0 ms")
    assert lines[-1].startswith("d data")


@pytest.mark.parametrize("width", [1, 30, 79, 200])
def test_the_timeline_keeps_to_its_width(width):
    for line in timeline.draw(two_ranks(), 1, width)[:-1]:
        assert len(line.plain) <= max(width, 15)


def test_many_ranks_are_counted():
    trace = Trace(tuple(rank(n, [quick()]) for n in range(20)), 20, "", {})
    assert "4 more ranks are not drawn" in [line.plain for line in timeline.draw(trace, 1, 80)]


# ---------------------------------------------------------------- other viewers


def slices_nest(events):
    """Slices of one thread lie inside each other or apart, in whole nanoseconds."""
    threads = {}
    for event in events:
        if event["ph"] == "X":
            begin = round(event["ts"] * 1000)
            span = (begin, begin + round(event["dur"] * 1000))
            threads.setdefault((event["pid"], event["tid"]), []).append(span)
    for spans in threads.values():
        open_until = []
        for begin, end in sorted(spans, key=lambda s: (s[0], -s[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            if open_until and end > open_until[-1]:
                return False
            open_until.append(end)
    return True


def test_the_nesting_check_finds_a_breach():
    def x(ts, dur):
        return {"ph": "X", "pid": 0, "tid": 0, "ts": ts, "dur": dur}

    assert slices_nest([x(0, 5), x(1, 2), x(3, 2), x(5, 1)])
    assert not slices_nest([x(0, 5), x(4, 2)])


def test_the_chrome_trace_has_the_form_that_viewers_want(command, tmp_path):
    file = tmp_path / "out.json"
    assert command(two_ranks(1, 2), "--chrome", str(file))[0] == 0
    text = file.read_text("utf-8")
    document = json.loads(text)
    assert '"rank": 0' in text
    events = document["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "i", "s", "f"}
    assert all(isinstance(event["pid"], int) and isinstance(event["tid"], int) for event in events)
    assert all(event["ts"] >= 0 for event in events if event["ph"] != "M")
    assert slices_nest(events)
    starts = [event["id"] for event in events if event["ph"] == "s"]
    ends = [event["id"] for event in events if event["ph"] == "f"]
    assert len(set(starts)) == len(starts) == 8
    assert sorted(starts) == sorted(ends)
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == set(named)
    flights = [e for e in events if e["name"] == "ncclDevKernel_AllReduce bucket 1"]
    assert [(e["pid"], e["ts"], e["dur"]) for e in flights] == [
        (0, 65_000, 6_000),
        (0, 149_000, 6_000),
        (1, 65_000, 6_000),
        (1, 149_000, 6_000),
    ]


def test_a_directory_gets_one_file_per_rank(command, tmp_path):
    assert command(two_ranks(), "--chrome", str(tmp_path))[0] == 0
    for number in range(2):
        document = json.loads((tmp_path / f"rank-0000{number}.json").read_text("utf-8"))
        assert document["distributedInfo"]["rank"] == number
        assert {event["pid"] for event in document["traceEvents"]} == {number}


def profile(**other):
    return {
        "distributedInfo": {"rank": 1},
        "baseTimeNanoseconds": 10_000_000,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "args": {"name": "python"}},
            {"ph": "X", "pid": 77, "tid": 5, "ts": 100.5, "dur": 2, "name": "aten::mm"},
            {"ph": "s", "pid": 77, "tid": 5, "ts": 101.0, "id": 3, "name": "ac2g", "cat": "ac2g"},
            {
                "ph": "X",
                "pid": "Spans",
                "tid": 0,
                "ts": 1,
                "dur": 1,
                "name": "s",
                "args": {"correlation": 4},
            },
        ],
    } | other


@pytest.mark.parametrize("packed", [False, True])
def test_a_profile_is_moved_onto_the_same_clock(command, tmp_path, packed):
    file, other = tmp_path / "out.json", tmp_path / "profile.json"
    data = json.dumps(profile()).encode()
    other.write_bytes(gzip.compress(data) if packed else data)
    # At 0 of rank 1 its host's Unix time is 9 ms, so the profile's base is at 1 ms.
    trace = changed(two_ranks(), 1, unix_ns=9_000_000)
    assert command(trace, "--chrome", str(file), "--kineto", str(other))[0] == 0
    events = json.loads(file.read_text("utf-8"))["traceEvents"]
    name, operator, arrow, span = events[-4:]
    assert operator["ts"] == 1000 + 100.5
    assert name["args"]["name"] == "rank 1 profile: python"
    assert name["pid"] == operator["pid"] == arrow["pid"] != span["pid"]
    assert len({e["id"] for e in events if e["ph"] == "s"}) == 5
    assert span["args"]["correlation"] > 1000


def test_slices_that_reach_out_of_others_get_threads_of_their_own(command, tmp_path):
    """As the profiler draws a collective: from inside of what set it off to long after that."""

    def x(name, ts, dur, tid=5):
        return {"ph": "X", "pid": 77, "tid": tid, "ts": ts, "dur": dur, "name": name}

    thread = {"ph": "M", "name": "thread_name", "pid": 77, "tid": 5, "args": {"name": "main"}}
    slices = [
        x("gradient", 100, 10),
        x("all_reduce 0", 105, 50),
        x("all_reduce 1", 108, 90),
        x("inside", 101, 2),
        x("after", 300, 5),
        x("elsewhere", 104, 50, tid=6),
    ]
    file, other = tmp_path / "out.json", tmp_path / "profile.json"
    other.write_text(json.dumps(profile(traceEvents=[thread, *slices])))
    assert not slices_nest(slices)
    assert command(two_ranks(), "--chrome", str(file), "--kineto", str(other))[0] == 0
    events = json.loads(file.read_text("utf-8"))["traceEvents"]
    assert slices_nest(events)
    tids = {e["name"]: e["tid"] for e in events if e["ph"] == "X" and e["pid"] > 1000}
    assert [tids[n] for n in ("gradient", "inside", "after", "elsewhere")] == [5, 5, 5, 6]
    assert len({5, 6, tids["all_reduce 0"], tids["all_reduce 1"]}) == 4
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named[tids["all_reduce 0"]] == "main: beside, 1"
    assert named[tids["all_reduce 1"]] == "main: beside, 2"


def test_a_profile_that_begins_before_the_first_step_leaves_no_time_below_0(command, tmp_path):
    file, other = tmp_path / "out.json", tmp_path / "profile.json"
    other.write_text(json.dumps(profile()))
    # At 0 of rank 1 its host's Unix time is 15 ms, so the profile's first slice is 5 ms before.
    trace = changed(two_ranks(), 1, unix_ns=15_000_000)
    assert command(trace, "--chrome", str(file), "--kineto", str(other))[0] == 0
    events = json.loads(file.read_text("utf-8"))["traceEvents"]
    assert min(event["ts"] for event in events if event["ph"] != "M") == 0
    first = next(e for e in events if e["name"] == "ProfilerStep#1" and e["pid"] == 1)
    operator = next(e for e in events if e["name"] == "aten::mm")
    assert operator["ts"] - first["ts"] == pytest.approx(-5000 + 100.5)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is no trace of torch.profiler"),
        ("[]", "is no trace of torch.profiler"),
        (json.dumps(profile(distributedInfo={})), "is no trace of torch.profiler"),
        (json.dumps(profile(distributedInfo={"rank": 5})), "of rank 5, which this trace lacks"),
    ],
)
def test_a_profile_that_does_not_fit_is_told(command, tmp_path, content, words):
    other = tmp_path / "profile.json"
    other.write_text(content)
    code, _, errors = command(
        two_ranks(), "--chrome", str(tmp_path / "out.json"), "--kineto", str(other)
    )
    assert code == 2
    assert words in errors


def test_a_step_that_is_not_there_cannot_be_exported():
    with pytest.raises(TraceError, match="no step to export with the number 9"):
        chrome.export(two_ranks(), 9)


def test_the_error_is_one_class_everywhere():
    from rankstep.trace import lines, steps

    assert lines.TraceError is steps.TraceError is files.TraceError
