"""What the launcher shows of many ranks' lines: equal ones once, in each rank's own order, none lost."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankstep.launch.screen import Collapser, prefix


def collapser(*speakers):
    made = Collapser()
    made.speakers.update(speakers)
    return made


def test_a_line_of_all_ranks_waits_for_none():
    lines = collapser(1, 2, 3)
    for rank in (3, 1):
        lines.add(rank, b"same", 0.0)
        assert lines.ready(0.1) == []
    lines.add(2, b"same", 0.1)
    assert lines.ready(0.1) == [([1, 2, 3], b"same")]
    assert lines.due() is None


def test_a_line_of_some_ranks_waits_a_moment():
    lines = collapser(1, 2, 3)
    lines.add(1, b"same", 5.0)
    lines.add(2, b"same", 5.1)
    assert lines.due() == pytest.approx(5.2)
    assert lines.ready(5.15) == []
    assert lines.ready(5.2) == [([1, 2], b"same")]
    lines.add(3, b"same", 5.3)
    assert lines.ready(math.inf) == [([3], b"same")]


def test_a_rank_that_repeats_itself_is_shown_twice():
    lines = collapser(1, 2)
    for rank in (1, 1, 2):
        lines.add(rank, b"same", 0.0)
    assert lines.ready(math.inf) == [([1, 2], b"same"), ([1], b"same")]


def test_equal_lines_in_another_order_keep_each_ranks_order():
    lines = collapser(1, 2)
    for rank, text in ((1, b"a"), (1, b"b"), (2, b"b"), (2, b"a")):
        lines.add(rank, text, 0.0)
    assert lines.ready(math.inf) == [([1], b"a"), ([1, 2], b"b"), ([2], b"a")]


def test_too_many_lines_do_not_wait():
    lines = collapser(1, 2)
    for number in range(1500):
        lines.add(1, b"%d" % number, 0.0)
    assert [text for _, text in lines.ready(0.0)] == [b"%d" % number for number in range(500)]


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([b"a", b"b", b"c"]), st.booleans())))
def test_no_line_is_lost_and_no_rank_out_of_order(said):
    lines, shown = collapser(1, 2, 3), []
    for now, (rank, text, look) in enumerate(said):
        lines.add(rank, text, now / 10)
        if look:
            shown += lines.ready(now / 10)
    shown += lines.ready(math.inf)
    for rank in (1, 2, 3):
        own = [text for speaker, text, _ in said if speaker == rank]
        assert [text for speakers, text in shown if rank in speakers] == own


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "[rank 3]"),
        ([1, 2], "[ranks 1-2 x2]"),
        ([1, 2, 3, 5, 7, 8], "[ranks 1-3,5,7-8 x6]"),
    ],
)
def test_prefix(ranks, text):
    assert prefix(ranks) == text
