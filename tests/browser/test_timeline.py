"""The timeline page in a real browser: what is drawn and said is what was recorded."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest
import traces
from chromium import FLAGS, executable
from seen import BOX, COLOURS, colour, facts, height, hover, place, to_timeline
from traces import HOSTILE

from rankstep.trace.model import Trace
from rankstep.trace.summary import summarize

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(scope="session")
def two(pages):
    return pages(traces.two_ranks())


@pytest.fixture(scope="session")
def big(pages):
    return pages(traces.big())


@pytest.fixture(scope="session")
def four(pages):
    return pages(traces.big(4, 6, 500, 50))


def test_plain_headless_shows_a_page_without_errors(two, tmp_path, browser):
    command = [executable(), *FLAGS, f"--user-data-dir={tmp_path}", "--dump-dom", two.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    browser.open(two)
    assert '<body data-errors="0" data-step="0" data-rank="0" data-ranks-shown="2"' in dom
    assert 'data-lanes="14"' in dom


@pytest.mark.parametrize("address", ["#lanes=full", "#lanes=compact"])
def test_a_big_trace_is_drawn(big, browser, address):
    browser.open(big, address)
    assert facts(browser, "body")["ranksShown"] == "64"
    assert int(facts(browser)["lanes"]) > 0
    browser.run("document.getElementById('scroller').scrollTop = 1e9")
    browser.frame()
    assert int(facts(browser)["lanes"]) > 0
    assert "rank 3" in browser.text("#figures")
    rows = browser.table("#stragglers")
    assert len(rows) == 65
    assert rows[1][:2] == ["3", "18 (90 %)"]
    assert rows[1][4:] == ["data", "± 20.0 µs", "cuda:3", "node00"]


def test_bars_stand_where_the_spans_were(two, browser):
    browser.open(two, width=1600)
    to_timeline(browser)
    for rank, data in enumerate((2, 8)):
        for lane, begin, end in (("forward", data, data + 10), ("backward", data + 10, data + 22)):
            y = height(browser, lane, rank=rank) + 5  # below the words
            inside = [colour(browser, place(browser, ms), y) for ms in (begin + 0.1, end - 0.1)]
            outside = [colour(browser, place(browser, ms), y) for ms in (begin - 0.1, end + 0.1)]
            assert inside == [COLOURS[lane]] * 2
            assert COLOURS[lane] not in outside


def test_every_gradient_has_its_tick(two, browser):
    browser.open(two, width=1600)
    to_timeline(browser)
    y = height(browser, "backward") + 11
    for ms in (14, 15, 23):
        x = place(browser, ms)
        assert "16191d" in [colour(browser, x + shift, y) for shift in (-1, 0, 1)]
    assert colour(browser, place(browser, 18), y) == "ffffff"


def test_hovering_tells_what_was_recorded(two, browser):
    browser.open(two, width=1600)
    to_timeline(browser)
    told = hover(browser, place(browser, 9), height(browser, "forward", rank=1))
    assert told.splitlines()[:3] == [
        "forward: 10.0 ms",
        "rank 1, step 0",
        "from 8.00 ms to 18.0 ms of the step",
    ]
    told = hover(browser, place(browser, 15), height(browser, "backward") + 12)
    assert told.splitlines() == [
        "gradient ready",
        "rank 0, step 0",
        "gradient 2 of 3, at 15.0 ms of the step",
        "3.00 ms after backward began",
        "goes into bucket 0",
        "head.bias",
    ]
    told = hover(browser, place(browser, 20), height(browser, "bucket") - 3)
    assert told.splitlines() == [
        "bucket 0: 6.00 ms in flight",
        "rank 0, step 0",
        "3.00 MiB, 2 parameters",
        "filled in 2.00 ms",
        "launched 1.00 ms after it was full",
        "left while backward went on",
        "launched by all ranks 6.00 ms later",
        "exposed: 5.00 ms",
        "head.weight",
        "head.bias",
    ]
    assert not hover(browser, place(browser, 5), height(browser, "wait"))


def test_the_wheel_zooms_about_the_pointer(two, browser):
    browser.open(two)
    to_timeline(browser)
    x, y = place(browser, 15), height(browser, "data")
    before = facts(browser)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=100)
    assert facts(browser)["left"] == before["left"]  # without the focus it scrolls the page
    to_timeline(browser)
    y = height(browser, "data")
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-120, modifiers=2)
    length = [float(seen["right"]) - float(seen["left"]) for seen in (before, facts(browser))]
    assert length[1] < 0.8 * length[0]
    assert abs(place(browser, 15) - x) < 1


def test_dragging_moves_the_time_with_the_hand(two, browser):
    browser.open(two)
    to_timeline(browser)
    browser.run("document.getElementById('timeline').focus()")
    for _ in range(3):
        browser.key("+")
    x, y = place(browser, 20), height(browser, "data")
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    browser.mouse("mouseMoved", x - 80, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x - 80, y, button="left", clickCount=1)
    assert abs(place(browser, 20) - (x - 80)) < 1
    assert facts(browser, "body")["rank"] == "0"  # a drag is no click


def test_keys_choose_move_and_read_out(two, browser):
    browser.open(two)
    to_timeline(browser)
    browser.run("document.getElementById('timeline').focus()")
    whole = facts(browser)
    browser.key("+")
    zoomed = facts(browser)
    assert float(zoomed["left"]) > float(whole["left"])
    browser.key("ArrowRight")
    assert float(facts(browser)["left"]) > float(zoomed["left"])
    browser.key("0")
    assert facts(browser) == whole
    browser.key("ArrowDown")
    assert facts(browser, "body")["rank"] == "1"
    browser.key("n")
    assert facts(browser, "body")["step"] == "1"
    browser.key(".")
    assert browser.text("#spoken").startswith("data: 8.00 ms, rank 1, step 1")
    browser.key(".")
    assert browser.text("#spoken").startswith("forward: 10.0 ms, rank 1, step 1")
    browser.key("g")
    assert "head.weight" in browser.text("#spoken")
    browser.key("Escape")
    assert browser.run("document.getElementById('tooltip').hidden")
    browser.key("p")
    assert facts(browser, "body")["step"] == "0"
    browser.key("?")
    assert browser.run("document.getElementById('keys').open")
    assert "zoom in" in browser.text("#keys")
    browser.key("Escape")


def test_steps_and_ranks_can_be_chosen(big, browser):
    browser.open(big, "#step=14&rank=9&ranks=8-9,40")
    assert facts(browser, "body").items() >= {"step": "14", "rank": "9", "ranksShown": "3"}.items()
    assert browser.text("#ranks-told") == "3 of 64"
    assert browser.text("#buckets-step") == "14"
    table = browser.text("#buckets")
    browser.run("document.getElementById('next').click()")
    assert facts(browser, "body")["step"] == "15"
    assert browser.text("#buckets") != table
    browser.run(
        "(slider => { slider.value = 0; slider.dispatchEvent(new Event('input')); })"
        "(document.getElementById('slider'))"
    )
    assert facts(browser, "body")["step"] == "10"
    assert "step=10" in browser.run("location.hash")
    for typed, shown, rank in (("3", "1", "3"), ("x", "1", "3"), ("", "64", "3"), ("99", "0", "3")):
        browser.run(
            f"(field => {{ field.value = '{typed}'; field.dispatchEvent(new Event('input')); }})"
            "(document.getElementById('ranks'))"
        )
        assert facts(browser, "body").items() >= {"ranksShown": shown, "rank": rank}.items()


def test_the_tables_add_up(two, browser):
    browser.open(two, width=1600)
    rows = browser.table("#buckets")
    first = ["0", "3.00 MiB", "2.000", "1.000", "6.000", "6.000", "5.000", "in backward"]
    assert rows[1] == [*first, "head.weight, head.bias"]
    last = ["1", "24.0 MiB", "1.000", "0.000", "6.000", "4.000", "4.000", "at its end"]
    assert rows[2] == [*last, "body.weight"]
    late = browser.table("#stragglers")
    assert late[1][:5] == ["1", "1 (100 %)", "6.000", "6.000", "data"]
    assert late[2][:5] == ["0", "0 (0 %)", *3 * ["\u2013"]]
    # Bucket 0 starts at 23 and ends at 29, bucket 1 from 30 to 34. Rank 0 waits from 24, rank 1 from 30.
    told = " ".join(browser.text("#overlap").split())
    assert "35 % of communication is hidden" in told
    assert "hidden 3.50 ms 35 % exposed 6.50 ms 65 %" in told
    assert "waits for such a bucket" in told
    assert "waiting for the slowest rank 500 \u00b5s 1 %" in " ".join(
        browser.text("#parts").split()
    )


@pytest.mark.parametrize("kind", ["big", "late", "torn"])
def test_the_page_says_what_the_command_says(pages, big, browser, kind):
    trace = traces.big() if kind == "big" else traces.two_ranks()
    if kind == "torn":
        trace = torn(traces.big(3, 4, 20, 8))
    browser.open(big if kind == "big" else pages(trace))
    told = summarize(trace)
    shown = browser.run(
        "Object.fromEntries([...document.querySelectorAll('.stacked li')]"
        ".map(one => [one.dataset.part, Number(one.dataset.ns)]))"
    )
    parts = told.parts
    assert shown["hidden"] == pytest.approx(parts.hidden_ns)
    assert shown["exposed"] == shown["exposed communication"] == pytest.approx(parts.exposed_ns)
    assert shown["waiting for the slowest rank"] == pytest.approx(parts.waiting_ns)
    assert shown["data"] == pytest.approx(parts.data_ns)
    compute = shown["forward"] + shown["backward"] + shown["optimizer"]
    assert compute == pytest.approx(parts.compute_ns)
    assert compute + shown["exposed"] + parts.waiting_ns + shown["data"] + shown["other"] == (
        pytest.approx(parts.step_ns)
    )
    late = browser.run(
        "[...document.querySelectorAll('#stragglers tbody tr')].map(r => r.dataset.late)"
    )
    rows = browser.table("#stragglers")[1:]
    assert {int(row[0]): (float(ns), row[4]) for row, ns in zip(rows, late, strict=True)} == {
        rank.rank: (
            pytest.approx(rank.late_ns),
            rank.phase.value if rank.phase else "\u2013",
        )
        for rank in told.ranks
    }


def torn(trace):
    """Take a rank's last step, another's first, and all word of when a bucket ends."""

    def blind(step):
        return replace(step, buckets=tuple(replace(one, finished_ns=None) for one in step.buckets))

    first, second, third = trace.ranks
    return replace(
        trace,
        ranks=(
            replace(first, steps=first.steps[:-1]),
            replace(second, steps=second.steps[1:]),
            replace(third, steps=tuple(map(blind, third.steps))),
        ),
    )


def test_names_are_folded_and_open(four, browser):
    browser.open(four, "#step=12")
    rows = "[...document.querySelectorAll('#buckets .names-row')].map(row => row.hidden)"
    assert all(browser.run(rows))
    browser.run("document.querySelector('#buckets button').click()")
    assert browser.run(rows)[:2] == [False, True]
    assert browser.text("#buckets .names-row").count("transformer.layers.") == 50


def test_clocks_that_cannot_tell_are_told(pages, browser):
    trace = traces.two_ranks()
    vague = tuple(replace(rank, clock_error_ns=3_000_000) for rank in trace.ranks)
    browser.open(pages(replace(trace, ranks=vague)))
    assert "in 1 of them by less than the clocks are exact" in browser.text("#stragglers-told")


def test_a_given_summary_is_shown(pages, browser):
    summary = {
        "paragraph": "As told.",
        "figures": [{"label": "Hidden", "value": "62 %"}],
        "overlap": {"hidden_ns": 62, "exposed_ns": 38, "definition": "As defined."},
    }
    browser.open(pages(traces.two_ranks(), summary=summary))
    assert browser.text("#paragraph") == "As told."
    assert browser.text("#figures").split() == ["Hidden", "62", "%"]
    assert "62 % of communication is hidden" in browser.text("#overlap")
    assert "As defined." in browser.text("#overlap")


def test_hostile_texts_are_shown_and_do_nothing(pages, browser):
    browser.open(pages(traces.hostile(), title=HOSTILE))
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.text("h1") == HOSTILE
    assert HOSTILE in browser.text("#facts")
    assert HOSTILE in browser.text("#buckets")
    assert HOSTILE in browser.text("#stragglers")
    to_timeline(browser)
    browser.run("document.getElementById('timeline').focus()")
    browser.key("g")
    assert HOSTILE in browser.text("#tooltip")
    assert "Nothing was found of ranks 1, 2" in browser.text("#notices")
    assert "rank 0 is cut off" in browser.text("#notices")


@pytest.mark.parametrize("kept", ["nobody", "no steps", "one rank", "other steps"])
def test_what_there_is_is_shown(pages, browser, kept):
    first, second = traces.two_ranks().ranks
    ranks = {
        "nobody": (),
        "no steps": (replace(first, steps=()), replace(second, steps=())),
        "one rank": (first,),
        "other steps": (
            replace(first, steps=first.steps[:1]),
            replace(second, steps=second.steps[1:]),
        ),
    }[kept]
    browser.open(pages(Trace(ranks, 2, "", {})))
    to_timeline(browser)
    browser.run("document.getElementById('timeline').focus()")
    for key in ("n", ".", "g", "+", "w", "p", "ArrowDown", "0"):
        browser.key(key)
    assert int(facts(browser)["lanes"]) == len(ranks) * (
        7 if kept in ("one rank", "other steps") else 6
    )


@pytest.mark.parametrize("width", [400, 1000, 3000])
def test_nothing_sticks_out(four, browser, width):
    browser.open(four, width=width)
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.run(BOX % "#timeline")[2] <= width


def test_dark_and_light(two, browser):
    ground = "getComputedStyle(document.body).backgroundColor"
    browser.open(two, dark=True)
    assert browser.run(ground) == "rgb(20, 23, 26)"
    to_timeline(browser)
    assert colour(browser, place(browser, 5.3), height(browser, "wait")) == "14171a"
    browser.run("document.getElementById('theme').click()")
    browser.frame()
    assert browser.run(ground) == "rgb(255, 255, 255)"
    assert colour(browser, place(browser, 5.3), height(browser, "wait")) == "ffffff"
    browser.media("", dark=False)
    assert "theme=light" in browser.run("location.hash")


def test_paper_is_light_and_holds_all_names(four, browser, tmp_path):
    browser.open(four, "#step=12", dark=True)
    browser.media("print", dark=True)
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.text("#buckets").count("transformer.layers.") == 1000
    assert browser.run("getComputedStyle(document.querySelector('.tools')).display") == "none"
    browser.media("", dark=True)
    browser.paper(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").stat().st_size > 10_000
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"


def test_pictures_can_be_taken(two, browser, tmp_path):
    browser.open(two)
    browser.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes()[:4] == b"\x89PNG"
