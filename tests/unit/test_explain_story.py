"""What the story is made of: texts in two languages, arithmetic of overlap, lines of characters."""

# ruff: noqa: RUF001 - full-width punctuation is what Chinese is written with

from __future__ import annotations

import inspect
import io
import itertools
import math
import re
import string
from pathlib import Path

import pytest
from rich.console import Console

from rankstep.explain import claims, numbers
from rankstep.explain.blocks import (
    Arrow,
    Arrows,
    Chain,
    Lane,
    Lines,
    Link,
    Marks,
    Nodes,
    Paragraph,
    Section,
    Series,
    Span,
    Story,
    Timeline,
    Verdict,
)
from rankstep.explain.figures import WIDTH, chart, fan
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


def test_every_text_is_used():
    """Keys that are put together when the story is told are known by their first words."""
    folder = Path(claims.__file__).parent
    source = "".join(
        path.read_text("utf-8")
        for path in [*folder.glob("*.py"), *folder.glob("*.jinja")]
        if not path.name.startswith("texts_")
    )
    put_together = re.compile(
        r"(progress|claim|cause)\.|\w+\.title$|world\.(before|after)$|gradients\.(mean|one|wrapper)$"
        r"|whatif\.(per_parameter|after_backward|one_bucket|plan)$"
    )
    unused = [key for key in ENGLISH if f'"{key}"' not in source and f"'{key}'" not in source]
    assert [key for key in unused if not put_together.match(key)] == []


def test_the_excerpt_in_the_readme_is_what_would_be_printed():
    text = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    excerpt = text.partition("```text\n")[2].partition("```")[0].splitlines()
    claimed = [re.sub(r"^  ✓ holds: |  \(.*\)$", "", line) for line in excerpt if "✓" in line]
    titles = [line for line in excerpt if re.match(r"\d\. ", line)]
    assert claimed
    assert titles
    assert set(claimed + titles) <= set(ENGLISH.values())
    ways = {ENGLISH[f"whatif.{way}"] for way in ("per_parameter", "one_bucket", "plan")}
    assert ways <= {re.split(r"\s{2,}", line.strip())[0] for line in excerpt}


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


def test_bars_are_as_long_as_their_values():
    first = Series("apart", (0.02, 0.04, 0.0), ("2 %", "4 %", "0"))
    second = Series("together", (0.0, 0.0, 0.0), ("a", "b", "c"))
    text = drawn(Lines("caption", ("one", "two", "no"), (first, second)))
    rows = [line for line in text if line.startswith(("  one", "  two", "  no"))]
    counts = [line.count("█") for line in rows]
    assert counts[1] > 20
    assert counts[0] == pytest.approx(counts[1] / 2, abs=1)
    assert counts[2] == 0
    assert [line.rpartition(" ")[2] for line in rows] == ["a", "b", "c"]
    assert "  caption: apart" in text


def test_a_chain_shows_what_each_rank_has():
    links = (Link("dataset"), Link("loss", ("L_0", "L_1")), Link("mean"))
    assert [line for line in drawn(Chain("chain", ("rank 0", "rank 1"), links)) if line][1:] == [
        "1. part",
        "───────",
        "  chain",
        "    dataset",
        "  → loss",
        "      L_0   L_1",
        "  → mean",
        "the end",
    ]


def test_nodes_and_marks_are_rows():
    nodes = Nodes("two", (("node 0", (("rank 0", "0 + 0"), ("rank 1", "0 + 1"))),))
    marks = Marks("sums", (("before", ("aa", "bb")), ("after", ("aa", "aa"))))
    text = drawn(nodes, marks)
    assert "  node 0  [rank 0 = 0 + 0]   [rank 1 = 0 + 1]" in text
    assert "  before  aa  bb" in text
    assert "  after   aa  aa" in text


def test_equal_marks_have_equal_colours():
    marks = Marks("", (("before", ("aa", "bb")), ("after", ("aa", "aa"))))
    written = io.StringIO()
    show(story(marks), Console(file=written, width=60, force_terminal=True))
    colours = re.findall(r"\x1b\[(\d+)m(?:aa|bb)", written.getvalue())
    assert colours[0] != colours[1]
    assert colours[0] == colours[2] == colours[3]


def test_characters_draw_no_arrows():
    assert drawn(Arrows("fan", (Arrow("mean", 1.0, 0.0),))) == drawn()


def test_a_legend_breaks_between_its_parts():
    parts = ["{flight} a bucket is in flight", "{step} a step", "{wait} it is waiting for all"]
    text = drawn(Timeline("rank 0", 10, (Lane("a"),), "   ".join(parts)))
    assert "  ━ a bucket is in flight   ▓ a step" in text
    assert "  ░ it is waiting for all" in text


def place(arrow, seen):
    """Undo the drawing: give length and angle of a drawn arrow."""
    dx, dy = arrow.x - seen.x, seen.y - arrow.y
    return math.hypot(dx, dy) / seen.scale, math.degrees(math.atan2(dy, dx))


def test_arrows_have_true_lengths_and_angles():
    arrows = (Arrow("mean", 0.5, 0.0), Arrow("g_0", 1.0, 30.0), Arrow("g_1", 0.7, -120.0))
    seen = fan(Arrows("", arrows))
    for arrow, made in zip(arrows, seen.arrows, strict=True):
        assert place(made, seen) == (pytest.approx(arrow.length), pytest.approx(arrow.degrees))
        assert 0 <= made.x <= WIDTH
        assert 0 <= made.y <= seen.height
    assert place(seen.arrows[1], seen) != place(seen.arrows[2], seen)


@pytest.mark.parametrize("length", [0.0, 1e-9, 1e9])
def test_arrows_of_any_length_fit(length):
    seen = fan(Arrows("", (Arrow("mean", length, 0.0), Arrow("g_0", length, 170.0))))
    assert all(0 <= made.x <= WIDTH and 0 <= made.y <= seen.height for made in seen.arrows)


def test_a_chart_is_drawn_to_scale():
    first = Series("apart", (0.01, 0.03, 0.04), ("1", "3", "4"))
    second = Series("together", (0.0, 0.0, 0.0), ("0", "0", "0"))
    seen = chart(Lines("", ("1", "2", "3"), (first, second)))
    apart, together = seen.lines
    top = seen.heights[-1][0]
    shares = [(seen.floor - dot.y) / (seen.floor - top) for dot in apart.dots]
    assert shares == pytest.approx([0.25, 0.75, 1.0])
    assert [dot.y for dot in together.dots] == [seen.floor] * 3
    steps = [b.x - a.x for a, b in itertools.pairwise(apart.dots)]
    assert steps[0] == pytest.approx(steps[1])
    assert [shown for _, shown in seen.heights] == ["0", "2.0 %", "4.0 %"]


def test_a_chart_of_nothing_is_flat():
    seen = chart(Lines("", ("1",), (Series("a", (0.0,), ("0",)),)))
    assert [dot.y for dot in seen.lines[0].dots] == [seen.floor]


def test_bars_are_shares_of_the_longest():
    assert numbers.shares([1.0, 4.0, None]) == (0.25, 1.0, 1.0)
    assert numbers.shares([0.0, None]) == (0.0, 1.0)


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
