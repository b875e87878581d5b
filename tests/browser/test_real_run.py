"""The page of a run that really was: two ranks train a small model, and what is drawn and told is what they recorded."""

from __future__ import annotations

import re

import pytest
import torch
from seen import BOX, COLOURS, across, colour, facts, hover, lane_middle, to_timeline
from torch.utils.data import DataLoader, TensorDataset

import rankstep
from rankstep.trace import overlap, record
from rankstep.trace.files import load
from rankstep.trace.model import SpanKind
from rankstep.trace.summary import summarize

pytestmark = pytest.mark.usefixtures("quiet")

STEPS = 6
WIDE = 10
"""Pixels: a bar of this width can be met by a pointer, and its middle is clear of its neighbours."""


def train(rank, folder):
    """Alternate two wrappers, so that everything the page can tell apart is there."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(384, 384) for _ in range(4)]
    model = rankstep.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.6)
    judge = rankstep.DistributedDataParallel(torch.nn.Linear(384, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = DataLoader(TensorDataset(torch.randn(STEPS * 96, 384)), batch_size=96)
    with record(folder):
        for number, (batch,) in enumerate(data):
            optimizer.zero_grad()
            out = model(batch)
            (judge(out) if number % 2 else out).square().mean().backward()
            optimizer.step()


@pytest.fixture(scope="module")
def real(ranks, tmp_path_factory, pages):
    """The trace, and the page."""
    folder = tmp_path_factory.mktemp("real")
    ranks(2).run(train, folder)
    trace = load(folder)
    assert [len(rank.steps) for rank in trace.ranks] == [STEPS, STEPS]
    return trace, pages(trace)


def told(ns):
    """A time as the page writes it."""
    for unit, scale in (("s", 1e9), ("ms", 1e6), ("\u00b5s", 1e3), ("ns", 1)):
        if ns >= scale * 0.9995 or unit == "ns":
            value = ns / scale
            digits = 0 if unit == "ns" or value >= 99.95 else 1 if value >= 9.995 else 2
            return "0 ms" if ns == 0 else f"{value:.{digits}f} {unit}"
    raise AssertionError(ns)


class Seen:
    """Where a moment is drawn now."""

    def __init__(self, browser, trace):
        self.browser = browser
        self.zero = min(rank.steps[0].begin_ns for rank in trace.ranks)

    def x(self, at_ns):
        left, _, width, _ = self.browser.run(BOX % "#timeline")
        return across(self.browser, left, width, at_ns - self.zero)

    def wide(self, spans):
        """Those that can be met, and the middle of each."""
        left, _, width, _ = self.browser.run(BOX % "#timeline")
        gutter = float(facts(self.browser)["gutter"])
        for span in spans:
            begin, end = self.x(span.begin_ns), self.x(span.end_ns)
            if end - begin >= WIDE and begin > left + gutter and end < left + width:
                yield span, (begin + end) / 2


def spans_of(step, kind):
    return [span for span in step.spans if span.kind is kind]


def test_everything_of_a_step_is_drawn_where_it_was(real, browser):
    trace, page = real
    number = 3
    browser.open(page, f"#step={number}&lanes=full", width=1900)
    to_timeline(browser)
    seen = Seen(browser, trace)
    met = set()
    for place, rank in enumerate(trace.ranks):
        (step,) = (step for step in rank.steps if step.number == number)
        for kind in (SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.OPTIMIZER, SpanKind.DATA):
            y = lane_middle(browser, kind.value, place)
            for span, x in seen.wide(spans_of(step, kind)):
                title, where, stretch = hover(browser, x, y).splitlines()[:3]
                assert title == f"{kind.value}: {told(span.end_ns - span.begin_ns)}"
                assert where.startswith(f"rank {rank.rank}, step {number} of Sequential + Linear")
                begin = told(span.begin_ns - step.begin_ns)
                assert stretch == f"from {begin} to {told(span.end_ns - step.begin_ns)} of the step"
                if kind.value in ("forward", "backward"):
                    assert colour(browser, x, y + 5) == COLOURS[kind.value]
                met.add(kind)
    assert {SpanKind.FORWARD, SpanKind.BACKWARD} <= met


def test_zooming_and_moving_by_keys_keeps_to_the_data(real, browser):
    trace, page = real
    browser.open(page, "#step=2&ranks=1&rank=1", width=1200)
    to_timeline(browser)
    rank = trace.ranks[1]
    seen = Seen(browser, trace)
    (backward, *_) = spans_of(rank.steps[2], SpanKind.BACKWARD)
    y = lane_middle(browser, "backward", 0)
    browser.run("document.getElementById('timeline').focus()")
    before = facts(browser)
    lengths = []
    for key in ("+", "+", "-", "ArrowRight", "ArrowLeft", "0"):
        browser.key(key)
        now = facts(browser)
        lengths.append(float(now["right"]) - float(now["left"]))
        for span, x in seen.wide([backward]):
            assert hover(browser, x, y).startswith(f"backward: {told(span.end_ns - span.begin_ns)}")
    first = float(before["right"]) - float(before["left"])
    assert lengths == [pytest.approx(first / part) for part in (1.5, 2.25, 1.5, 1.5, 1.5, 1.0)]
    assert facts(browser)["left"] == before["left"]


def test_dragging_and_the_wheel_keep_to_the_data(real, browser):
    trace, page = real
    browser.open(page, "#step=2", width=1200)
    to_timeline(browser)
    seen = Seen(browser, trace)
    middle = trace.ranks[0].steps[2].spans[0].begin_ns
    x, y = seen.x(middle) + 200, lane_middle(browser, "data", 0)
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    browser.mouse("mouseMoved", x - 120, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x - 120, y, button="left", clickCount=1)
    moved = seen.x(middle) + 200
    assert moved == pytest.approx(x - 120, abs=1.5)
    browser.mouse("mouseWheel", 700, y, deltaX=0, deltaY=-120, modifiers=2)
    (backward, *_) = spans_of(trace.ranks[0].steps[2], SpanKind.BACKWARD)
    for span, at in seen.wide([backward]):
        assert hover(browser, at, lane_middle(browser, "backward", 0)).startswith(
            f"backward: {told(span.end_ns - span.begin_ns)}"
        )


def test_each_step_and_rank_has_its_own_table(real, browser):
    trace, page = real
    browser.open(page, "#step=1&rank=0")
    browser.run("document.getElementById('timeline').focus()")
    for key, rank_number, number in (("", 0, 1), ("n", 0, 2), ("ArrowDown", 1, 2), ("p", 1, 1)):
        if key:
            browser.key(key)
        body = facts(browser, "body")
        assert (body["step"], body["rank"]) == (str(number), str(rank_number))
        rank = trace.ranks[rank_number]
        step = rank.steps[number]
        started = overlap.starts(r.steps[number] for r in trace.ranks)
        figures = overlap.bucket_figures(step, started, [b.params for b in rank.buckets])
        header, *rows = browser.table("#buckets")
        assert header[:2] == ["Bucket", "Of"]
        assert len(rows) == len(figures)
        scale = {
            name: {"s": 1e9, "ms": 1e6, "\u00b5s": 1e3, "ns": 1}[title.split()[-1]]
            for name, title in zip(
                ("fill", "delay", "peers", "flight", "exposed"), header[3:8], strict=True
            )
        }
        for row, figure in zip(rows, figures, strict=True):
            info = rank.buckets[figure.index]
            assert row[:2] == [str(figure.index), rank.wrappers[info.wrapper]]
            for place, name in enumerate(scale, 3):
                ns = getattr(figure, f"{name}_ns")
                if ns is not None:
                    shown = float(re.sub(r"[^\d.]", "", row[place]))
                    digits = len(row[place].partition(".")[2])
                    assert shown == pytest.approx(ns / scale[name], abs=0.51 * 10**-digits)


def test_gradients_are_told_in_their_order(real, browser):
    trace, page = real
    browser.open(page, "#step=3&rank=1", width=1600)
    to_timeline(browser)
    rank = trace.ranks[1]
    step = rank.steps[3]
    browser.run("document.getElementById('timeline').focus()")
    for place, (param, at_ns) in enumerate(step.ready[:4]):
        browser.key("g")
        spoken = browser.text("#spoken")
        assert f"gradient {place + 1} of {len(step.ready)}" in spoken
        assert f"at {told(at_ns - step.begin_ns)} of the step" in spoken
        assert rank.params[param] in spoken


def test_ranks_can_be_chosen(real, browser):
    _, page = real
    browser.open(page, "#step=2")
    all_lanes = int(facts(browser)["lanes"])
    for typed, shown in (("1", 1), ("0-1", 2), ("7", 0)):
        browser.run(
            f"(field => {{ field.value = '{typed}'; field.dispatchEvent(new Event('input')); }})"
            "(document.getElementById('ranks'))"
        )
        browser.frame()
        assert facts(browser, "body")["ranksShown"] == str(shown)
        assert int(facts(browser)["lanes"]) == all_lanes * shown // 2


def test_what_the_page_says_is_what_the_command_says(real, browser):
    trace, page = real
    browser.open(page)
    summary = summarize(trace)
    shown = browser.run(
        "Object.fromEntries([...document.querySelectorAll('.stacked li')]"
        ".map(one => [one.dataset.part, Number(one.dataset.ns)]))"
    )
    parts = summary.parts
    assert shown["hidden"] == pytest.approx(parts.hidden_ns)
    assert shown["exposed communication"] == pytest.approx(parts.exposed_ns)
    assert shown["waiting for the slowest rank"] == pytest.approx(parts.waiting_ns)
    assert shown["data"] == pytest.approx(parts.data_ns)
    rows = browser.table("#kinds")[1:]
    assert [row[:2] for row in rows] == [[kind.name, str(kind.steps)] for kind in summary.kinds]
    assert [kind.name for kind in summary.kinds] == ["Sequential", "Sequential + Linear"]
    options = browser.run("[...document.querySelectorAll('#step option')].map(o => o.text)")
    assert options[:3] == ["0: Sequential", "1: Sequential + Linear", "2: Sequential"]
    assert "2 wrappers: Sequential, Linear" in browser.text("#facts")
