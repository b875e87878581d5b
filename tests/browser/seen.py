"""What is on the screen: where things are drawn, in which colour, and what hovering tells."""

from __future__ import annotations

import json

COLOURS = {"data": "e69f00", "forward": "56b4e9", "backward": "0072b2", "bucket": "009e73"}
BOX = "(b => [b.left, b.top, b.width, b.height])(document.querySelector('%s').getBoundingClientRect())"


def facts(browser, selector="#timeline"):
    return browser.run(f"({{...document.querySelector({json.dumps(selector)}).dataset}})")


def to_timeline(browser):
    browser.run("document.getElementById('scroller').scrollIntoView()")
    browser.frame()


def place(browser, ms, *, step=0):
    """Say where, across the window, so many milliseconds after a step's begin are drawn; the steps take 40 ms."""
    left, _, width, _ = browser.run(BOX % "#timeline")
    return across(browser, left, width, (40 * step + ms) * 1e6)


def across(browser, left, width, at_ns):
    """Say where a moment of the trace is drawn on a canvas with this left edge and width."""
    drawn = facts(browser)
    begin, end, gutter = (float(drawn[name]) for name in ("left", "right", "gutter"))
    return left + gutter + (at_ns - begin) / (end - begin) * (width - gutter)


def lane_middle(browser, lane, place):
    """Say where, down the window, the middle of a lane's bar is drawn, for the rank in this place from above."""
    drawn = facts(browser)
    tops = dict(one.split(":") for one in drawn["tops"].split())
    top = browser.run(BOX % "#timeline")[1] + 38
    return top + place * float(drawn["block"]) + float(tops[lane]) + 7


def height(browser, lane, *, rank=0):
    """Say the same for a page that shows all ranks from 0 on."""
    return lane_middle(browser, lane, rank)


def colour(browser, x, y):
    left, top, *_ = browser.run(BOX % "#timeline")
    return browser.run(
        "[...document.getElementById('timeline').getContext('2d')"
        f".getImageData({round(x - left)}, {round(y - top)}, 1, 1).data]"
        ".slice(0, 3).map(n => n.toString(16).padStart(2, '0')).join('')"
    )


def hover(browser, x, y):
    browser.mouse("mouseMoved", x, y)
    return browser.text("#tooltip")
