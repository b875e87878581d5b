"""The timeline page as text: its size, what it escapes, and that it needs nobody else. tests/browser looks at it."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankstep.trace import page
from rankstep.trace.model import BucketTrace, RankTrace, StepTrace, Trace
from rankstep.trace.page import fitted, numbers, pack, render

ROOT = Path(__file__).parents[2]
EMPTY = Trace((), 4, "", {})


def load(name):
    """Load the invented traces, which the browser's tests use too."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / "browser" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


traces = load("traces")


class Elements(HTMLParser):
    """Collects what a browser would make of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts = [], [], {}
        self._open = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attributes]
        self._open = (tag, dict(attributes).get("id"))

    def handle_data(self, text):
        self.texts[self._open] = self.texts.get(self._open, "") + text


def embedded(text):
    return json.loads(Elements(text).texts["script", "trace"])


def read_numbers(text):
    """Read what `numbers` wrote, as the page does."""
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    out, value, scale = [], 0, 1
    for letter in text:
        digit = digits.index(letter)
        value += (digit & 31) * scale
        scale *= 32
        if not digit & 32:
            out.append(-(value >> 1) if value & 1 else value >> 1)
            value, scale = 0, 1
    return out


def test_a_big_trace_fits_in_ten_megabytes():
    trace = traces.big()
    assert len(trace.ranks) == 64
    assert {len(rank.steps) for rank in trace.ranks} == {20}
    assert {len(step.ready) for rank in trace.ranks for step in rank.steps[1:]} == {1000}
    assert len(render(trace).encode()) < 10_000_000


def test_the_same_trace_gives_the_same_page():
    assert render(traces.big(3, 2, 10, 4)) == render(traces.big(3, 2, 10, 4))


def test_nothing_is_loaded_from_elsewhere():
    elements = Elements(render(traces.two_ranks()))
    sources = [one for one in elements.attributes if one[1] in ("src", "srcset", "data", "action")]
    links = [value for _, name, value in elements.attributes if name == "href"]
    assert sources == []
    assert links == ["#timeline-heading"]
    assert not {"link", "iframe", "object", "embed", "base", "img"} & set(elements.tags)
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttp|WebSocket|import\(", render(EMPTY))


def test_only_its_own_script_and_style_may_run():
    text = render(traces.hostile())
    policy = next(
        value
        for _, name, value in Elements(text).attributes
        if name == "content" and "src" in value
    )
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        inside = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    inline = [one for one in Elements(text).attributes if one[1].startswith(("on", "style"))]
    assert inline == []


def test_hostile_texts_stay_texts():
    tags = Elements(render(traces.two_ranks())).tags
    evil = traces.HOSTILE
    text = render(
        traces.hostile(),
        title=evil,
        summary={
            "paragraph": evil,
            "figures": [{"label": evil, "value": evil, "note": evil}],
            "overlap": {"hidden_ns": 1, "exposed_ns": 1, "definition": evil},
        },
    )
    elements = Elements(text)
    assert "img" not in elements.tags
    assert elements.tags.count("script") == tags.count("script") == 2
    assert evil not in text
    for place in (("title", None), ("h1", None), ("p", "paragraph")):
        assert elements.texts[place].strip() == evil
    data = embedded(text)
    assert data["ranks"][0]["host"] == data["overlap"]["definition"] == data["names"][0][0] == evil
    text.encode()  # the lone surrogate has gone


def test_our_own_files_hold_no_closing_tag():
    assert "</script" not in page._scripts()
    assert "</style" not in page._read("page.css")


def test_scripts_can_be_read_in_one_sitting_and_are_all_used():
    folder = Path(page.__file__).with_name("templates")
    lines = {path.name: len(path.read_text("utf-8").splitlines()) for path in folder.iterdir()}
    assert max(lines.values()) < 400
    used = {f"{name}.js" for name in page.SCRIPTS} | {"page.css", "page.html.jinja"}
    assert set(lines) == used


@given(st.lists(st.integers(-(2**52), 2**52)))
def test_numbers_can_be_read_again(values):
    text = numbers(values)
    assert read_numbers(text) == values
    assert re.fullmatch(r"[A-Za-z0-9+/]*", text)


def test_half_a_millisecond_takes_four_letters():
    assert [len(numbers([value])) for value in (0, 15, 16, 524_287, 524_288)] == [1, 1, 2, 4, 5]


def test_times_are_kept_to_the_nanosecond():
    trace = traces.big(2, 2, 5, 4)
    data = pack(trace)
    origin = min(rank.steps[0].begin_ns for rank in trace.ranks)
    for rank, packed in zip(trace.ranks, data["ranks"], strict=True):
        for step, row in zip(rank.steps, packed["steps"], strict=True):
            number, begin, length, spans, order, times, buckets, _ = row
            assert (number, begin, length) == (
                step.number,
                step.begin_ns - origin,
                step.end_ns - step.begin_ns,
            )
            assert read_numbers(spans)[2::3] == [one.end_ns - one.begin_ns for one in step.spans]
            assert sums(read_numbers(times), step.begin_ns) == [at for _, at in step.ready]
            assert sums(read_numbers(data["orders"][order])) == [one for one, _ in step.ready]
            rows = read_numbers(buckets)
            assert sums(rows[2::7], step.begin_ns) == [one.launched_ns for one in step.buckets]
            assert rows[4::7] == [one.finished_ns - one.launched_ns for one in step.buckets]


def sums(values, start=0):
    out = []
    for value in values:
        start += value
        out.append(start)
    return out


def test_what_ranks_share_is_stored_once():
    data = pack(traces.big(5, 3, 10, 4))
    assert len(data["names"]) == len(data["plans"]) == 1
    assert len(data["orders"]) == 2  # the first step has none


def test_what_is_not_known_is_not_invented():
    bucket = BucketTrace(0, None, 5, None, 6, 7, False)
    step = StepTrace(0, 0, 10, (), (), (bucket,))
    trace = Trace((RankTrace(0, "h", "cpu", None, (), (), (step,), False),), 1, "", {})
    packed = pack(trace)["ranks"][0]
    flags = read_numbers(packed["steps"][0][6])[1]
    assert flags == 0
    assert packed["clock_error"] is None
    assert packed["complete"] is False


def test_a_summary_is_shown_in_place_of_the_pages_own():
    summary = {
        "paragraph": "Step 41.2 ms.",
        "figures": [{"label": "Hidden", "value": "62 %"}],
        "overlap": {"hidden_ns": 62, "exposed_ns": 38},
        "unknown": object(),
    }
    text = render(traces.two_ranks(), title="My run", summary=summary)
    assert "<h1>My run</h1>" in text
    assert "Step 41.2 ms.</p>" in text
    assert "<div><dt>Hidden</dt><dd>62 %</dd></div>" in text
    assert embedded(text)["overlap"] == {"hidden": 62, "exposed": 38, "definition": ""}


@pytest.mark.parametrize("summary", [{"figures": [{"label": "x"}]}, {"overlap": {"hidden_ns": 1}}])
def test_half_a_summary_is_refused(summary):
    with pytest.raises(KeyError):
        render(EMPTY, summary=summary)


def test_an_empty_trace_is_a_page_too():
    text = render(EMPTY)
    assert "<h1>Training steps of 4 ranks</h1>" in text
    assert embedded(text)["ranks"] == []


def test_a_page_that_would_be_too_long_holds_the_first_steps():
    trace = traces.big(4, 20, 100, 10)
    assert fitted(trace) is trace
    whole = len(json.dumps(pack(trace)))
    part = fitted(trace, whole // 2)
    kept = [step.number for step in part.ranks[0].steps]
    assert kept == list(range(10, 10 + len(kept)))
    assert 5 <= len(kept) < 20
    assert len(json.dumps(pack(part))) < 1.1 * whole // 2
    assert all(len(rank.steps) == len(kept) for rank in part.ranks)
    (notice,) = part.notices
    assert f"so this one ends with step {kept[-1]}; the last that was read is 29" in notice
    assert notice in render(part).replace("\\u003c", "<")
    # One step stays, whatever its size.
    assert [len(rank.steps) for rank in fitted(trace, 10).ranks] == [1] * 4
