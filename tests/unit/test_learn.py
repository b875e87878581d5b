"""Learning: how often each parameter fires, and in which order."""

from __future__ import annotations

from rankstep.buckets.learn import WINDOW, Firings


def backward(firings, *indices):
    """Begin a backward, fire as the hooks do, then end it."""
    firings.open()
    for index in indices:
        firings.fired[index] += 1
    return firings.close()


def learned(*indices, count=4):
    """Learn from one backward and see it confirmed by a second."""
    firings = Firings(count)
    assert backward(firings, *indices)
    assert not backward(firings, *indices)
    return firings


def test_the_order_is_that_of_the_last_firing():
    firings = Firings(4)
    for index in (2, 0, 2, 3, 1, 0):
        firings.note(index)
    assert firings.order() == [2, 3, 1, 0]


def test_parameters_that_never_fired_follow_with_the_last_registered_first():
    firings = Firings(6)
    for index in (4, 1):
        firings.note(index)
    assert firings.order() == [4, 1, 5, 3, 2, 0]
    assert Firings(3).order() == [2, 1, 0]


def test_the_first_backward_says_what_to_expect():
    assert learned(0, 1, 1, 3).expected == [1, 2, 0, 1]


def test_the_same_backward_again_changes_nothing():
    firings = learned(0, 1, 1, 3)
    assert not backward(firings, 3, 1, 0, 1)
    assert firings.expected == [1, 2, 0, 1]


def test_counts_are_for_one_backward():
    firings = learned(0, 1)
    firings.fired[2] = 1
    firings.accumulated[3] = 1
    firings.close()
    assert firings.accumulated == [0] * 4
    firings.open()
    assert firings.fired == [0] * 4


def test_the_lists_that_hooks_hold_stay_the_same_objects():
    firings = Firings(2)
    lists = firings.fired, firings.expected, firings.accumulated
    for _ in range(2 * WINDOW):
        backward(firings, 0)
        backward(firings, 1, 1)
    assert all(
        now is before
        for now, before in zip(
            (firings.fired, firings.expected, firings.accumulated), lists, strict=True
        )
    )


def test_a_higher_count_is_adopted_at_once():
    firings = learned(0, 1)
    assert backward(firings, 0, 0, 0, 2)
    # Parameter 1 did not fire and is still expected.
    assert firings.expected == [3, 1, 1, 0]


def test_a_lower_count_is_adopted_after_a_window_and_not_before():
    firings = learned(0, 0, 1, 2)
    for _ in range(WINDOW - 1):
        assert not backward(firings, 0, 1)
        assert firings.expected == [2, 1, 1, 0]
    assert backward(firings, 0, 1)
    assert firings.expected == [1, 1, 0, 0]
    assert not backward(firings, 0, 1)


def test_the_backward_that_is_learned_from_is_not_part_of_a_window():
    firings = Firings(2)
    assert backward(firings, 0, 1)
    changes = [backward(firings, 0) for _ in range(WINDOW)]
    assert changes == [False] * (WINDOW - 1) + [True]
    assert firings.expected == [1, 0]


def test_the_window_counts_backwards_in_a_row():
    firings = learned(0, 1)
    for _ in range(WINDOW - 1):
        assert not backward(firings, 0)
    assert not backward(firings, 0, 1)
    for _ in range(WINDOW - 1):
        assert not backward(firings, 0)
    assert firings.expected == [1, 1, 0, 0]
    assert backward(firings, 0)
    assert firings.expected == [1, 0, 0, 0]


def test_the_window_keeps_the_highest_count_seen_in_it():
    firings = learned(0, 0, 0, 1, 2)
    for step in range(WINDOW):
        # Never all three of parameter 0, twice once; a branch now and then keeps parameter 2.
        backward(firings, 0, *([0] if step == 3 else []), 1, *([2] if step == 5 else []))
    assert firings.expected == [2, 1, 1, 0]


def test_a_count_from_before_the_window_does_not_come_back():
    firings = learned(0, 1)
    backward(firings, 0, 1, 1, 1)
    assert firings.expected == [1, 3, 0, 0]
    # That backward was the first of a window, so its count of 3 is still seen when the window ends.
    for _ in range(WINDOW - 1):
        backward(firings, 0, 1)
    assert firings.expected == [1, 3, 0, 0]
    for _ in range(WINDOW - 1):
        assert not backward(firings, 0, 1)
    assert backward(firings, 0, 1)
    assert firings.expected == [1, 1, 0, 0]


def test_touched_counts_this_backward_and_what_no_sync_accumulated():
    firings = Firings(4)
    firings.accumulated[1] = 1
    firings.fired[2] = 2
    firings.accumulated[2] = 1
    assert [bool(t) for t in firings.touched()] == [False, True, True, False]
    firings.close()
    firings.open()
    assert firings.touched() == [0] * 4
