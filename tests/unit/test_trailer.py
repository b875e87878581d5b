"""The trailer: what one rank writes every rank reads back exactly, in every dtype, and what a verdict makes of it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankstep.buckets import trailer
from rankstep.buckets.trailer import BASE, ROW_NUMEL, Mode, Row, Trailer
from rankstep.buckets.verdict import factor, judge
from rankstep.errors import AbandonedBackwardError, CountError, RankSkewError, SyncError

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PARAMS = 7


def all_reduced(rows, used, dtype, *, averages):
    """Play every rank and the collective; return each rank's trailer over the one result."""
    world = len(rows)
    regions = []
    tails = []
    for rank in range(world):
        # Whatever the buffer held before must not matter.
        region = torch.full((trailer.numel(PARAMS, world),), 3.0, dtype=dtype)
        tail = Trailer(region, PARAMS, rank, world, averages=averages)
        tail.write(rows[rank], used[rank])
        regions.append(region)
        tails.append(tail)
    total = torch.zeros_like(regions[0])
    for region in regions:
        # The harder of the two ways to average: each part is rounded before it is added.
        total += region * (1.0 / world) if averages else region
    for region in regions:
        region.copy_(total)
    return tails


def some_row(rank):
    return Row(
        wrapper=(rank * 37) % 1024,
        reductions=31 + 1000 * rank,
        forwards=rank % 1024,
        abandoned=rank % 2,
        late=(rank + 1) % 2,
        changed=rank % 2,
        nonfinite=rank * 1001,
        count=rank * 0.1,
        drift=rank * 123_456_789,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_rank_reads_what_every_rank_wrote(dtype):
    for averages, world in itertools.product([False, True], [1, 2, 3, 7, 48]):
        rows = [some_row(rank) for rank in range(world)]
        used = [[int((rank + i) % 3 == 0) for i in range(PARAMS)] for rank in range(world)]
        counts = [sum(flags[i] for flags in used) for i in range(PARAMS)]
        for tail in all_reduced(rows, used, dtype, averages=averages):
            assert tail.read_rows() == rows
            assert tail.read_used() == counts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_digits_are_exact_too(dtype):
    for averages, world in itertools.product([False, True], [3, 5, 11, 64]):
        most = Row(
            mode=BASE - 1,
            wrapper=BASE**2 - 1,
            reductions=BASE**4 - 1,
            forwards=BASE**2 - 1,
            abandoned=1,
            late=1,
            changed=1,
            nonfinite=BASE**4 - 1,
            count=float("inf"),
            drift=BASE**trailer.DRIFT_DIGITS - 1,
        )
        rows = [most] * (world - 1) + [replace(most, reductions=BASE**4 - 2)]
        for tail in all_reduced(rows, [None] * world, dtype, averages=averages):
            assert tail.read_rows() == rows
            assert tail.read_used() == [world] * PARAMS


def test_one_user_among_a_thousand_ranks_is_still_seen():
    for dtype, averages in itertools.product(DTYPES, [False, True]):
        world = 1000
        used = [[0, 1, 0, 0, 1, 0, 0]] + [[0, 0, 1, 0, 1, 0, 0]] * (world - 1)
        counts = all_reduced([Row()] * world, used, dtype, averages=averages)[0].read_used()
        # Beyond 256 a half type stops counting; only "nobody" must stay exact.
        assert [bool(count) for count in counts] == [False, True, True, False, True, False, False]


def test_rows_of_ranks_that_differ_in_one_digit_differ_when_read():
    # The quick way for equal rows must not take nearly equal ones for equal.
    for name in ("wrapper", "reductions", "forwards", "abandoned", "late", "changed", "drift"):
        rows = [Row(reductions=4), replace(Row(reductions=4), **{name: 1})]
        for tail in all_reduced(rows, [None, None], torch.float32, averages=False):
            assert tail.read_rows() == rows, name


def test_a_second_write_replaces_the_first():
    region = torch.zeros(trailer.numel(PARAMS, 3))
    tail = Trailer(region, PARAMS, 1, 3, averages=False)
    tail.write(Row(reductions=999, late=1), [1] * PARAMS)
    region.add_(5.0)
    tail.write(Row(reductions=2), [0, 1, 0, 0, 0, 0, 0])
    assert tail.read_rows() == [Row(mode=0), Row(reductions=2), Row(mode=0)]
    assert tail.read_used() == [0, 1, 0, 0, 0, 0, 0]


def test_every_write_says_all_of_its_row_whatever_was_said_before():
    tail = Trailer(torch.zeros(trailer.numel(PARAMS, 2)), PARAMS, 0, 2, averages=False)
    flags = [0, 1, 1, 0, 1, 0, 1]
    for row, used in [(some_row(3), flags), (Row(), None), (some_row(4), None), (Row(), flags)]:
        tail.region.fill_(9.0)
        tail.write(row, used)
        assert tail.read_rows() == [row, Row(mode=0)]
        assert tail.read_used() == (used or [1] * PARAMS)


def test_a_row_that_nobody_wrote_is_no_valid_row():
    tail = Trailer(torch.zeros(trailer.numel(PARAMS, 2)), PARAMS, 0, 2, averages=False)
    tail.write(Row(), None)
    written, untouched = tail.read_rows()
    assert written.mode == Mode.SYNC
    assert untouched.mode not in list(Mode)


def test_the_trailer_has_one_flag_per_parameter_and_one_row_per_rank():
    assert trailer.numel(0, 1) == ROW_NUMEL
    assert trailer.numel(10, 1) - trailer.numel(9, 1) == 1
    assert trailer.numel(10, 5) - trailer.numel(10, 4) == ROW_NUMEL
    assert len(Row().digits()) == ROW_NUMEL


NUMBERS = st.builds(
    Row,
    mode=st.integers(0, BASE - 1),
    wrapper=st.integers(0, BASE**2 - 1),
    reductions=st.integers(0, BASE**4 - 1),
    forwards=st.integers(0, BASE**2 - 1),
    abandoned=st.integers(0, 1),
    late=st.integers(0, 1),
    changed=st.integers(0, 1),
    nonfinite=st.integers(0, BASE**4 - 1),
    count=st.floats(min_value=0.0, allow_nan=False),
    drift=st.integers(0, BASE**trailer.DRIFT_DIGITS - 1),
)


@given(NUMBERS)
def test_a_row_survives_its_digits(row):
    digits = row.digits()
    assert all(0 <= digit < BASE for digit in digits)
    assert Row.from_digits(digits) == row


@given(NUMBERS, st.floats(-0.49, 0.49))
def test_digits_are_rounded_when_read(row, error):
    assert Row.from_digits([digit + error for digit in row.digits()]) == row


def test_numbers_wrap_at_the_width_of_their_field():
    assert Row.from_digits(Row(reductions=BASE**4 + 5).digits()) == Row(reductions=5)
    assert Row.from_digits(Row(wrapper=BASE**2).digits()) == Row(wrapper=0)
    # The last before the wrap and the first after it are told apart.
    assert Row(reductions=BASE**4 - 1).digits() != Row(reductions=BASE**4).digits()


def test_counts_add_up_exactly_without_reading_them():
    for dtype, averages in itertools.product(DTYPES, [False, True]):
        # Counts far beyond what the dtype itself could hold or tell apart.
        counts = [7_654_321.0, 123_457.0, 0.0, 0.1]
        rows = [Row(mode=Mode.WEIGHTED, count=count) for count in counts]
        for tail in all_reduced(rows, [None] * 4, dtype, averages=averages):
            total = tail.read_total_count()
            assert total.dtype == torch.float64
            assert float(total) == sum(counts)


def test_a_checksum_may_come_from_a_device():
    for dtype in DTYPES:
        region = torch.full((trailer.numel(PARAMS, 2),), 3.0, dtype=dtype)
        tail = Trailer(region, PARAMS, 1, 2, averages=False)
        checksum = torch.tensor(BASE**trailer.DRIFT_DIGITS - 77)
        tail.write(Row(reductions=5, count=2.5), None, checksum)
        assert tail.read_rows()[1] == Row(reductions=5, count=2.5, drift=int(checksum))


# ---------------------------------------------------------------- verdicts


def verdicts(rows, step=4):
    """What each rank raises."""
    raised = []
    for rank in range(len(rows)):
        try:
            judge(rows, rank, step)
        except SyncError as error:
            raised.append(error)
    return raised


def test_ranks_in_step_are_left_alone():
    assert verdicts([Row(wrapper=2, reductions=9, forwards=1)] * 3) == []
    # Late gradients are no disagreement: the second round settles them.
    assert verdicts([Row(), Row(late=1), Row()]) == []


def test_a_backward_that_died_on_some_ranks_is_told_on_all():
    for died in ([0], [2], [0, 2]):
        raised = verdicts([Row(abandoned=int(rank in died)) for rank in range(4)])
        assert len(raised) == 4
        for rank, error in enumerate(raised):
            assert isinstance(error, AbandonedBackwardError)
            named = "rank " if len(died) == 1 else "ranks "
            assert f"{named}{', '.join(map(str, died))} left backward" in str(error)
            assert str(error).startswith(f"rank {rank}: ")
            assert "step 4" in str(error)


def test_a_backward_that_died_everywhere_disturbs_nobody():
    assert verdicts([Row(abandoned=1)] * 3) == []


def test_a_death_counts_before_any_other_difference():
    raised = verdicts([Row(forwards=2), Row(abandoned=1, forwards=1)])
    assert [type(error) for error in raised] == [AbandonedBackwardError] * 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wrapper", "reduced wrapper number 3"),
        ("reductions", "is at reduction 3"),
        ("forwards", "ran 3 training forward(s)"),
    ],
)
def test_two_ranks_out_of_step_are_both_shown(name, said):
    rows = [Row(**{name: 3}), Row(**{name: 4})]
    raised = verdicts(rows)
    assert [type(error) for error in raised] == [RankSkewError] * 2
    for error in raised:
        assert f"rank 0 {said}" in str(error)
        assert f"rank 1 {said.replace('3', '4')}" in str(error)
        assert "step 4" in str(error)


@pytest.mark.parametrize("odd", [0, 3])
def test_the_one_rank_that_differs_from_the_others_is_named(odd):
    rows = [Row(forwards=2 if rank == odd else 1) for rank in range(5)]
    raised = verdicts(rows)
    assert len(raised) == 5
    for error in raised:
        assert f": rank {odd} ran 2 training forward(s)" in str(error)
        assert "the others: ran 1 training forward(s)" in str(error)
        for other in set(range(5)) - {odd}:
            assert f"rank {other} ran" not in str(error)


def test_without_a_majority_all_sides_are_shown():
    (error, *_) = verdicts([Row(forwards=1), Row(forwards=1), Row(forwards=2), Row(forwards=2)])
    for rank, count in enumerate((1, 1, 2, 2)):
        assert f"rank {rank} ran {count}" in str(error)


def test_ranks_that_ran_out_are_not_compared_with_the_others():
    for mode in (Mode.JOINED, Mode.SPENT):
        assert verdicts([Row(forwards=1), Row(mode=mode, forwards=0), Row(forwards=1)]) == []
    # The twin: without that mode the same numbers are a skipped step.
    assert verdicts([Row(forwards=1), Row(forwards=0), Row(forwards=1)])


def test_counted_windows_may_be_of_any_length_but_not_mixed_with_plain_ones():
    weighted = [Row(mode=Mode.WEIGHTED, forwards=f, count=f) for f in (1, 4, 0)]
    assert verdicts(weighted) == []
    raised = verdicts([weighted[0], weighted[1], Row(forwards=1)])
    assert [type(error) for error in raised] == [RankSkewError] * 3
    assert ": rank 2 called model.backward with a count: False" in str(raised[0])


def scale(rows, *, divides_by_live=False):
    return factor(rows, 0, 4, divides_by_live=divides_by_live)


def test_what_a_mean_over_all_ranks_is_multiplied_with():
    plain, joined, spent = Row(), Row(mode=Mode.JOINED), Row(mode=Mode.SPENT)
    counted = [Row(mode=Mode.WEIGHTED, count=c) for c in (3.0, 5.0, 0.0, 0.0)]
    assert scale([plain] * 4) == 1.0
    # The sum of four parts, each divided by 4, becomes a sum divided by what was counted.
    assert scale(counted) == 4 / 8
    assert scale([*counted[:2], joined]) == 3 / 8
    assert scale([plain, plain, joined, joined]) == 1.0
    assert scale([plain, plain, joined, joined], divides_by_live=True) == 2.0
    assert scale([plain, spent, spent, spent]) == 4.0
    assert scale([spent] * 3) == 1.0
    with pytest.raises(CountError, match="step 4"):
        scale(counted[2:])
