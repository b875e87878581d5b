"""What the story is made of: texts in two languages, arithmetic of overlap, lines of characters."""

# ruff: noqa: RUF001 - full-width punctuation is what Chinese is written with

from __future__ import annotations

import inspect
import io
import itertools
import re
import string

import pytest
from rich.console import Console

from rankstep.explain import claims, numbers
from rankstep.explain.blocks import (
    Bar,
    Bars,
    Lane,
    Paragraph,
    Section,
    Span,
    Story,
    Timeline,
    Verdict,
)
from rankstep.explain.measure import gradients
from rankstep.explain.overlap import overlap, union
from rankstep.explain.page import _code
from rankstep.explain.parts import PARTS
from rankstep.explain.screen import show
from rankstep.explain.texts import texts
from rankstep.explain.texts_en import TEXTS as ENGLISH
from rankstep.explain.texts_zh import TEXTS as CHINESE
from rankstep.explain.wrap import breaks


def gaps(text):
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


def test_both_languages_have_the_same_keys():
    assert ENGLISH.keys() == CHINESE.keys()


@pytest.mark.parametrize("key", ENGLISH)
def test_both_languages_tell_the_same_facts(key):
    assert gaps(ENGLISH[key]) == gaps(CHINESE[key])


def test_every_text_is_in_its_language():
    chinese = re.compile("[\u4e00-\u9fff]")
    assert not [key for key, text in ENGLISH.items() if chinese.search(text)]
    prose = [key for key, text in CHINESE.items() if len(text) > 30 or key.startswith("claim.")]
    assert not [key for key in prose if not chinese.search(CHINESE[key])]


def test_every_claim_and_every_cause_has_a_text():
    source = inspect.getsource(claims)
    named = set(re.findall(rf'"((?:{"|".join(PARTS)})\.\w+)"', source)) | {
        "averaging.adam",
        "averaging.adamw",
    }
    assert {f"claim.{name}" for name in named} == {
        key for key in ENGLISH if key.startswith("claim.")
    }
    found = set(re.findall(r'"cause": "(\w+)"', source + inspect.getsource(gradients)))
    found |= {"batch_statistics", "draws", "unknown"}
    assert {f"cause.{name}" for name in found} == {
        key for key in ENGLISH if key.startswith("cause.")
    }


def test_there_is_no_third_language():
    with pytest.raises(KeyError):
        texts("fr")


def rank(ready, *flights):
    return {
        "backward": [0.0, 100.0],
        "ready": [{"param": number, "at": at} for number, at in enumerate(ready)],
        "buckets": [{"launched": begin, "finished": end} for begin, end in flights],
    }


@pytest.mark.parametrize(
    ("flights", "in_flight", "hidden"),
    [
        ([(10.0, 30.0)], 20, 20),  # back before the last gradient
        (
            [(10.0, 30.0), (20.0, 60.0)],
            50,
            40,
        ),  # two at once count once; 10 after the last gradient
        ([(55.0, 80.0)], 25, 0),  # left after it
        ([(10.0, 20.0), (30.0, 70.0), (60.0, 65.0)], 50, 30),
        ([], 0, 0),
    ],
)
def test_what_is_in_flight_before_the_last_gradient_is_hidden(flights, in_flight, hidden):
    found = overlap(rank([5.0, 50.0], *flights))
    assert (found["in_flight"], found["hidden"]) == (in_flight, hidden)
    assert found["exposed"] == in_flight - hidden
    assert found["hidden_share"] == pytest.approx(hidden / in_flight if in_flight else 0)


def test_spans_are_joined_where_they_touch():
    assert union([(5, 6), (0, 2), (2, 3), (1, 2)]) == [(0, 3), (5, 6)]


def lines(text, width):
    places = [0, *breaks(text, width), len(text)]
    return [text[a:b].rstrip() for a, b in itertools.pairwise(places)]


def test_english_breaks_between_words():
    assert lines("one two three", 8) == ["one two", "three"]
    assert lines("unbreakable", 5) == ["unbreakable"]


def test_chinese_breaks_anywhere_but_before_a_comma_and_after_a_bracket():
    assert lines("每个样本恰好一次", 8) == ["每个样本", "恰好一次"]
    assert lines("每个样，本恰好", 6) == ["每个", "样，本", "恰好"]
    assert lines("各个「样本」", 6) == ["各个", "「样", "本」"]
    assert lines("用 AllReduce 求和", 12) == ["用 AllReduce", "求和"]


def story(*blocks):
    return Story("en", "title", (), (Section("world", "1. part", blocks),), "the end", held=True)


def drawn(*blocks):
    written = io.StringIO()
    show(story(*blocks), Console(file=written, width=60, color_system=None))
    return [line.rstrip() for line in written.getvalue().splitlines()]


def test_a_timeline_is_drawn_to_scale():
    lanes = (
        Lane("compute", (Span(0, 500, "compute"), Span(500, 1000, "wait"))),
        Lane("ready", ticks=(0, 500)),
        Lane("bucket", (Span(250, 750, "flight"),)),
        Lane("step", (Span(1000, 1000.1, "step"),)),
    )
    text = drawn(Timeline("rank 0", 1000, lanes, ""))
    compute, ready, bucket, step = (
        next(line for line in text if line.startswith(f"  {lane.label}")) for lane in lanes
    )
    first = compute.index("█")
    room = len(compute) - first
    assert compute.count("█") == pytest.approx(room / 2, abs=1)
    assert compute.count("░") == pytest.approx(room / 2, abs=1)
    assert [place - first for place, mark in enumerate(ready) if mark == "╵"] == [
        0,
        pytest.approx(room / 2, abs=1),
    ]
    assert bucket.index("━") - first == pytest.approx(room / 4, abs=1)
    assert bucket.count("━") == pytest.approx(room / 2, abs=1)
    assert step.count("▓") == 1


def test_bars_are_as_long_as_their_shares():
    text = drawn(
        Bars("caption", (Bar("one", 0.5, "1 %"), Bar("two", 1.0, "2 %"), Bar("no", 0, "0")))
    )
    counts = [line.count("█") for line in text if line.startswith(("  one", "  two", "  no"))]
    assert counts[1] > 20
    assert counts[0] == pytest.approx(counts[1] / 2, abs=1)
    assert counts[2] == 0


def test_a_claim_that_failed_is_told_with_its_cause():
    text = "\n".join(
        drawn(Verdict(held=False, text="equal", measured="1 <= 0", causes=("because x",)))
    )
    assert "✗ DOES NOT HOLD: equal  (1 <= 0)\n      because x" in text


def test_markup_in_a_text_is_shown_as_it_is():
    assert "  [bold]<b>" in drawn(Paragraph("[bold]<b>"))
    assert _code("a `<b>` <i>") == "a <code>&lt;b&gt;</code> &lt;i&gt;"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (numbers.count(12345), "12,345"),
        (numbers.size(100), "100 B"),
        (numbers.size(1536), "1.5 KiB"),
        (numbers.small(0), "0"),
        (numbers.small(3.2e-7), "3.2e-07"),
        (numbers.small(0.5), "0.500"),
        (numbers.share(0.123), "12.3 %"),
        (numbers.share(1e-6), "1.0e-06"),
        (numbers.milliseconds(1234.5), "1,234"),
        (numbers.milliseconds(12.34), "12.3"),
        (numbers.milliseconds(1.234), "1.23"),
        (numbers.plain(None), numbers.MISSING),
    ],
)
def test_numbers_are_short(shown, expected):
    assert shown == expected
