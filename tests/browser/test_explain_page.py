"""The page of `rankstep explain` in a real browser: what is drawn is what the run's JSON says."""

from __future__ import annotations

import copy
import json
import math
import time
from pathlib import Path

import pytest

from rankstep.explain import member, numbers
from rankstep.explain.claims import judge
from rankstep.explain.page import page
from rankstep.explain.parts import PARTS
from rankstep.explain.request import Request
from rankstep.explain.run import _document
from rankstep.explain.tell import tell
from rankstep.explain.texts import texts
from rankstep.world import world

RANKS = 2
PATIENCE_S = 60
PLACES = [[0, 0, 0], [0, 1, 1], [1, 0, 2], [1, 1, 3]]
SECOND = {
    "nodes": 2,
    "ranks_per_node": 2,
    "seconds": 1.0,
    "problem": None,
    "ranks": [
        {"node": node, "local_rank": local, "rank": rank, "heard": PLACES}
        for node, local, rank in PLACES
    ],
}
# Half a pixel on either side, for what the browser rounds.
PIXEL = 1.0


def measured_on_rank(me, request):
    with world() as here:
        found = member._finite(member._measured(request, here))
    return json.loads(json.dumps(found, allow_nan=False))


@pytest.fixture(scope="module")
def facts(ranks):
    """One run of the built-in job, on ranks of the pool."""
    request = Request(ranks=RANKS, steps=3, tensors=200)
    document = _document(request, ranks(RANKS).run(measured_on_rank, request), SECOND)
    assert document["held"]
    return document


@pytest.fixture(scope="module")
def pages(facts, tmp_path_factory):
    """Give ``pages(lang)``, the file of that run's page; other facts may be told as well."""
    folder = tmp_path_factory.mktemp("pages")

    def write(lang, told=facts):
        path = folder / f"{len(list(folder.iterdir()))}.html"
        path.write_text(page(tell(told, lang), told), encoding="utf-8")
        return path

    return write


@pytest.fixture(autouse=True)
def quiet(browser):
    """Fail a test whose page has complained or asked for something."""
    yield
    assert browser.console == []


def load(browser, path, *, width=1000, dark=False):
    browser.console.clear()
    browser.size(width, 900)
    browser.media("", dark=dark)
    browser.send("Page.navigate", url="about:blank")
    browser.send("Page.navigate", url=Path(path).as_uri())
    until = time.monotonic() + PATIENCE_S
    while not browser.run("document.readyState == 'complete' && !!document.querySelector('main')"):
        assert time.monotonic() < until
        time.sleep(0.01)
    browser.frame()


@pytest.fixture(params=["en", "zh"])
def told(request, pages, browser):
    """Load the page in a language, and give its texts."""
    load(browser, pages(request.param))
    return texts(request.param)


def each(browser, selector, what):
    """Give something of every element that is found."""
    return browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(one => {what})")


def test_the_page_has_all_sections_and_asks_for_nothing(told, browser, facts):
    titles = each(browser, "section h2", "one.innerText")
    assert titles == [told(f"{part}.title") for part in PARTS]
    assert browser.run("document.title") == told("title")
    assert browser.run("performance.getEntriesByType('resource').length") == 0
    assert browser.run("document.querySelectorAll('script, link, img').length") == 0
    verdicts = each(browser, ".claims li", "one.innerText.trim()")
    assert len(verdicts) == len(facts["claims"])
    assert all(verdict.startswith(f"✓ {told('held')}") for verdict in verdicts)


def test_the_contents_lead_to_the_sections(told, browser):
    for part in PARTS[1:-1]:
        browser.run(f"document.querySelector('nav a[href=\"#{part}\"]').click()")
        browser.frame()
        assert browser.run("location.hash") == f"#{part}"
        assert (
            0
            <= browser.run(f"document.getElementById('{part}').getBoundingClientRect().top + 1")
            < 60
        )


def test_the_chain_shows_every_ranks_part(told, browser, facts):
    rows = each(
        browser, ".chain .part .cells", "[...one.children].map(cell => cell.innerText.trim())"
    )
    samples, batches, losses, lengths, digests = rows
    assert samples == [
        told("chain.samples", count=numbers.count(rank["samples_padded"]))
        for rank in facts["samples"]["ranks"]
    ]
    computed = facts["gradients"]["ranks"]
    for number, rank in enumerate(computed):
        first = ", ".join(map(str, rank["samples"][:2]))
        assert batches[number] == f"D_{number} = {first} ..."
        assert losses[number] == f"L_{number} = {rank['loss']:.3f}"
        assert lengths[number] == f"|g_{number}| = {rank['length']:.3f}"
    assert digests == [rank["digest"][:8] for rank in facts["steps"]["ranks"]]


def ground(browser, selector):
    return each(browser, selector, "getComputedStyle(one).backgroundColor")


def test_equal_weights_look_equal_and_others_do_not(told, browser, facts):
    marks = each(browser, "#world .marks b", "one.innerText")
    ranks = facts["world"]["ranks"]
    assert marks == [rank[f"digest_{when}"][:8] for when in ("before", "after") for rank in ranks]
    first, second, third, fourth = ground(browser, "#world .marks b")
    assert first != second
    assert third == fourth
    after = ground(browser, ".chain .part:last-of-type .cells b, #steps .marks b")
    assert len(set(after[-RANKS:])) == 1


def test_two_nodes_are_boxes_in_boxes(told, browser):
    boxes = each(
        browser,
        ".nodes > div",
        "[one.querySelector('strong').innerText, ...[...one.querySelectorAll('p b')].map(b => b.innerText)]",
    )
    node = told("world.node")
    assert boxes == [[f"{node} 0", "rank 0", "rank 1"], [f"{node} 1", "rank 2", "rank 3"]]
    inside = browser.run(
        "[...document.querySelectorAll('.nodes > div')].every(box => [...box.querySelectorAll('p')].every(p => {"
        " const a = box.getBoundingClientRect(), b = p.getBoundingClientRect();"
        " return a.left <= b.left && b.right <= a.right && a.top <= b.top && b.bottom <= a.bottom; }))"
    )
    assert inside


def test_every_sample_has_the_colour_of_its_rank(told, browser, facts):
    shown = each(browser, ".owners b", "Number(one.innerText)")
    owners = [*facts["samples"]["owners_epoch_0"], *facts["samples"]["owners_epoch_1"]]
    assert shown == owners
    pairs = set(zip(owners, ground(browser, ".owners b"), strict=True))
    assert len(pairs) == len({colour for _, colour in pairs}) == RANKS


def test_arrows_are_as_long_and_as_steep_as_the_gradients(told, browser, facts):
    drawn = each(
        browser,
        ".fan line",
        "['x1', 'y1', 'x2', 'y2'].map(name => Number(one.getAttribute(name)))",
    )
    gradients = facts["gradients"]
    spans = [(x2 - x1, y1 - y2) for x1, y1, x2, y2 in drawn]
    lengths = [math.hypot(*span) for span in spans]
    angles = [math.degrees(math.atan2(y, x)) for x, y in spans]
    expected = [gradients["mean_length"], *(rank["length"] for rank in gradients["ranks"])]
    assert [length / lengths[0] for length in lengths] == pytest.approx(
        [length / expected[0] for length in expected], rel=1e-2
    )
    steep = [rank["angle_to_mean"] for rank in gradients["ranks"]]
    assert angles == pytest.approx([0.0, steep[0], -steep[1]], abs=0.5)
    assert each(browser, ".fan text", "one.textContent") == [
        told("gradients.mean"),
        *(f"g_{number}" for number in range(RANKS)),
    ]


def test_the_distance_between_ranks_is_drawn(told, browser, facts):
    apart, together = each(
        browser,
        ".chart g",
        "[...one.querySelectorAll('circle')].map(dot => Number(dot.getAttribute('cy')))",
    )
    drift = facts["drift"]
    floor = together[0]
    assert together == [floor] * drift["steps"]
    highest = max(drift["alone_relative"])
    heights = [(floor - y) / (floor - min(apart)) for y in apart]
    assert heights == pytest.approx(
        [share / highest for share in drift["alone_relative"]], abs=0.01
    )
    titles = each(browser, ".chart .l0 title", "one.textContent")
    shown = [numbers.share(share) for share in drift["alone_relative"]]
    assert titles == [f"{told('drift.alone')}{told('colon')}{share}" for share in shown]


def bars(browser, section, table):
    """Give the lengths of the bars of a section's table, as shares of the longest."""
    widths = browser.run(
        f"[...[...document.querySelectorAll('#{section} table.wide')][{table}].querySelectorAll('td.beside i')]"
        ".map(one => one.getBoundingClientRect().width)"
    )
    return [width / max(widths) for width in widths], max(widths)


@pytest.mark.parametrize("model", ["job", "many"])
def test_bars_are_as_long_as_the_times(told, browser, facts, model):
    found, longest = bars(browser, "whatif", ("job", "many").index(model))
    ways = facts["whatif"][model]["ways"]
    most = max(way["milliseconds"] for way in ways)
    shares = [max(way["milliseconds"] / most, 2 / longest) for way in ways]
    assert found == pytest.approx(shares, abs=PIXEL / longest)
    shown = [row[:3] for row in browser.table("#whatif table")]
    for way in ways:
        counted = numbers.count(way["all_reduces"])
        name = told(f"whatif.{way['way']}")
        assert [name, counted, numbers.milliseconds(way["milliseconds"])] in shown


def test_bars_are_as_long_as_the_differences(told, browser, facts):
    found, longest = bars(browser, "averaging", 0)
    apart = [row["apart_every_step_relative"] for row in facts["averaging"]["optimizers"]]
    shares = [max(share / max(apart), 2 / longest) for share in apart]
    assert found == pytest.approx(shares, abs=PIXEL / longest)


def lanes(browser):
    """Give for each rank the lanes of its timeline: what is drawn where, as shares of the lane."""
    return browser.run(
        "[...document.querySelectorAll('#backward figure')].filter(one => one.querySelector('.lane')).map(figure =>"
        " [...figure.querySelectorAll('.lane')].map(lane => { const track = lane.querySelector('.track')"
        ".getBoundingClientRect(); return [lane.querySelector('span').innerText,"
        " [...lane.querySelectorAll('i')].map(one => { const box = one.getBoundingClientRect();"
        " return [one.className, (box.left - track.left) / track.width, (box.right - track.left) / track.width]; })];"
        " }))"
    )


def expected_lanes(rank, end, told):
    began, ready = rank["began"], rank["overlap"]["last_ready"]

    def span(kind, begin, finish):
        return [kind, (began + begin) / end, (began + finish) / end]

    rows = [
        ["forward", [span("forward", *rank["forward"])]],
        [
            "backward",
            [
                span("compute", rank["backward"][0], ready),
                span("wait", ready, rank["backward"][1]),
            ],
        ],
        ["ready", [span("tick", event["at"], event["at"]) for event in rank["ready"]]],
    ]
    for bucket in rank["buckets"]:
        name = f"bucket {bucket['bucket']}"
        rows.append([name, [span("flight", bucket["launched"], bucket["finished"])]])
    return [*rows, ["step", [span("step", *rank["step"])]]]


def test_the_timeline_is_drawn_where_things_happened(told, browser, facts):
    ranks = facts["backward"]["ranks"]
    end = max(rank["began"] + rank["step"][1] for rank in ranks)
    width = browser.run("document.querySelector('.track').getBoundingClientRect().width")
    drawn = lanes(browser)
    assert len(drawn) == RANKS
    for found, rank in zip(drawn, ranks, strict=True):
        expected = expected_lanes(rank, end, told)
        assert [name for name, _ in found] == [name for name, _ in expected]
        for (_, marks), (_, spans) in zip(found, expected, strict=True):
            assert [mark[0] for mark in marks] == [span[0] for span in spans]
            for (kind, left, right), (_, begin, finish) in zip(marks, spans, strict=True):
                assert left * width == pytest.approx(begin * width, abs=PIXEL)
                # A tick, and what is shorter than a line, is a line of two pixels.
                longer = max(finish * width, begin * width + 2)
                assert right * width == pytest.approx(longer, abs=PIXEL), kind


def test_another_run_is_drawn_elsewhere(browser, facts, pages):
    """The twin of the test above: the places come from the numbers."""
    load(browser, pages("en"))
    before = lanes(browser)
    other = copy.deepcopy(facts)
    bucket = other["backward"]["ranks"][1]["buckets"][0]
    bucket["finished"] = bucket["launched"] + 0.5 * (bucket["finished"] - bucket["launched"])
    load(browser, pages("en", other))
    after = lanes(browser)
    assert after[0] == before[0]
    changed = [a[0] for a, b in zip(before[1], after[1], strict=True) if a != b]
    assert changed == ["bucket 0"]


def test_hovering_tells_the_times(told, browser, facts):
    spans = each(browser, "#backward .flight[title]", "one.title")
    first = facts["backward"]["ranks"][0]
    bucket, began = first["buckets"][0], first["began"]
    times = [round((began + at) / 1e3, 2) for at in (bucket["launched"], bucket["finished"])]
    assert spans[0] == f"{times[0]} - {times[1]} ms"


def test_the_tables_hold_the_numbers(told, browser, facts):
    rows = browser.table("#world table")[1:]
    assert [row[:5] for row in rows] == [
        [str(rank[key]) for key in ("node", "local_rank", "rank", "device", "pid")]
        for rank in facts["world"]["ranks"]
    ]
    rows = browser.table("#steps table")[1:]
    steps = facts["steps"]
    losses = [
        (row["loss"], one)
        for row, one in zip(steps["rows"], steps["one_process_losses"], strict=True)
    ]
    assert rows == [
        [str(number + 1), f"{loss:.6f}", f"{one:.6f}", "1"]
        for number, (loss, one) in enumerate(losses)
    ]
    rows = browser.table("#backward table")[1:]
    names = [
        facts["backward"]["names"][event["param"]]
        for event in facts["backward"]["ranks"][0]["ready"]
    ]
    assert [row[1] for row in rows] == names


@pytest.mark.parametrize("width", [360, 700, 2400])
def test_nothing_sticks_out(told, browser, width):
    browser.size(width, 900)
    browser.frame()
    assert browser.run("document.documentElement.scrollWidth") == width
    outside = browser.run(
        "[...document.querySelectorAll('p, h1, h2, table, svg, .chain, .lane, .owners, .nodes, .marks, .claims')]"
        f".filter(one => one.getBoundingClientRect().right > {width} && !one.closest('.scroll'))"
        ".map(one => one.className || one.tagName)"
    )
    assert outside == []
    overflowing = each(
        browser,
        ".chain b, .chain .whole, .owners b, .marks b, .nodes p",
        "one.scrollWidth > one.clientWidth + 1 ? one.innerText : ''",
    )
    assert {text for text in overflowing if text} == set()


# The brightness of a colour and the contrast of two, as the web's rules for accessible pages define them.
CONTRAST = """
(() => {
  const light = colour => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(Number).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = one => {
    for (let at = one; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (!/^rgba.*, 0\\)$/.test(colour)) return colour;
    }
    return 'rgb(255, 255, 255)';
  };
  const seen = [...document.querySelectorAll('p, h1, h2, li, th, td, figcaption, b, .lane span, .axis span, .held')];
  const weakest = seen.map(one => {
    const a = light(getComputedStyle(one).color), b = light(ground(one));
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), one.outerHTML.slice(0, 200)];
  }).sort((a, b) => a[0] - b[0])[0];
  return weakest;
})()
"""


def test_both_themes_can_be_read(told, browser, pages):
    path = pages(told.lang)
    grounds = []
    for dark in (False, True):
        load(browser, path, dark=dark)
        grounds.append(browser.run("getComputedStyle(document.body).backgroundColor"))
        contrast, weakest = browser.run(CONTRAST)
        assert contrast >= 4.5, weakest
    assert grounds == ["rgb(253, 252, 250)", "rgb(22, 24, 27)"]
    browser.run("document.body.style.color = '#333'")
    assert browser.run(CONTRAST)[0] < 4.5


def test_paper_is_light_without_contents(told, browser, pages, tmp_path):
    load(browser, pages(told.lang), dark=True)
    browser.media("print", dark=True)
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    browser.media("", dark=True)
    browser.paper(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").stat().st_size > 10_000


def test_a_claim_that_does_not_hold_stands_out(browser, facts, pages):
    wrong = copy.deepcopy(facts)
    wrong["gradients"]["difference_relative"] = 0.1
    wrong["gradients"]["causes"] = [{"cause": "draws", "modules": ["1 (Dropout)"]}]
    wrong["claims"] = judge(wrong)
    wrong["held"] = False
    for lang in ("en", "zh"):
        load(browser, pages(lang, wrong))
        text = texts(lang)
        (failed,) = each(browser, ".claims .failed", "one.parentElement.innerText")
        assert failed.startswith(f"✗ {text('failed')}")
        assert text("claim.gradients.mean") in failed
        assert "1 (Dropout)" in failed
        colours = each(browser, ".claims .failed, .claims .held", "getComputedStyle(one).color")
        assert len(set(colours)) == 2
        assert text("claim.gradients.mean") in browser.text(".ending")
