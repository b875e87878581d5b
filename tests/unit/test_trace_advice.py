"""What a recorded run says about other buckets, on traces whose answer can be worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console
from trace_samples import MS, B, F, S, W, bucket, step

from rankstep.cli.main import main
from rankstep.trace.advice import Advice, advise, sentence
from rankstep.trace.flights import crowded
from rankstep.trace.model import BucketInfo, RankTrace, Trace
from rankstep.trace.screen import tables
from rankstep.trace.summary import paragraph, summarize

MIB = 2**20


def rank(number, steps, groups, *, cores=0, threads=0, **changes):
    made = RankTrace(
        rank=number,
        host="here",
        device="cpu",
        clock_error_ns=0,
        params=("a", "b", "c", "d"),
        buckets=tuple(
            BucketInfo(place, len(group) * MIB, tuple(group)) for place, group in enumerate(groups)
        ),
        steps=tuple(steps),
        complete=True,
        param_bytes=(MIB,) * 4,
        cores=cores,
        threads=threads,
    )
    return replace(made, **changes)


def small_then_large(number=1, wait_cpu_ns=None):
    """Gradients at 10, 20, 30 and 40 ms. An all-reduce takes 2 ms, and 4 ms for each MiB."""
    one = step(
        number,
        0,
        [(F, 5), (B, 35), (W, 14), (S, 6)],
        [(0, 10), (1, 20), (2, 30), (3, 40)],
        [bucket(0, 10, 10, 16, 40, 40), bucket(1, 40, 40, 54, 40, 54, early=False)],
    )
    return replace(one, wait_cpu_ns=wait_cpu_ns)


SMALL_THEN_LARGE = [(0,), (1, 2, 3)]


def run(steps, groups=SMALL_THEN_LARGE, ranks=2, **changes):
    return Trace(tuple(rank(r, steps, groups, **changes) for r in range(ranks)), ranks, "", {})


NETWORK = {"cores": 8, "threads": 1}


def test_a_run_with_known_costs():
    advice = advise(run([small_then_large(n) for n in (1, 2, 3)], **NETWORK), [1, 2, 3])
    assert isinstance(advice, Advice)
    assert advice.steps == 3
    assert advice.link.start_ns == pytest.approx(2 * MS)
    assert advice.link.byte_ns * MIB == pytest.approx(4 * MS)
    assert advice.link.charge == 0
    # The recorded step takes 60, and the model says so.
    assert advice.recorded.step_ns == 60 * MS
    assert advice.model_ns == pytest.approx(60 * MS)
    # a until 16, b and c from 30 to 40, d from there to 46: 8 less than 54.
    assert (advice.best.buckets, advice.best.step_ns) == (3, pytest.approx(52 * MS))
    one, five, *_ = advice.others
    # Four buckets are as quick, one at the end takes from 40 to 58.
    assert (one.buckets, one.step_ns) == (4, pytest.approx(52 * MS))
    assert (five.buckets, five.step_ns) == (1, pytest.approx(64 * MS))
    assert advice.proposal is one
    assert sentence(advice) == "With bucket_cap_mb=1 the step would take about 52.0 ms, 13% less."


def test_compute_that_was_lost_is_lost_in_other_plans_too():
    # A quarter of the 14 ms of waiting was spent by processors, and there is no core to spare.
    steps = [small_then_large(wait_cpu_ns=int(3.5 * MS))]
    advice = advise(run(steps, cores=2, threads=1), [1])
    assert advice.link.charge == 0.25
    assert advice.model_ns == pytest.approx(60 * MS)
    # Without the first bucket's 6 ms, all but the first gradient would have been ready 1.5 earlier: 10, 18.5, 28.5, 38.5.
    # One bucket: from 38.5 to 56.5. The recorded ones: until 54.
    assert advice.others[1].step_ns == pytest.approx(62.5 * MS)
    # Four: 10 to 16, then 18.5 + 1.5 to 26, 28.5 + 3 to 37.5, 38.5 + 4.5 to 49.
    assert advice.others[0].step_ns == pytest.approx(55 * MS)


def test_where_communication_takes_the_cores_nothing_is_gained():
    steps = [small_then_large(wait_cpu_ns=20 * MS)]
    advice = advise(run(steps, cores=2, threads=1), [1])
    assert advice.link.charge == 1.0
    # Computing made the hidden bucket slower, so it tells nothing of a start. One bucket saves one, of the usual price.
    assert not advice.knows_start
    assert advice.others[1].step_ns == pytest.approx(59.7 * MS)
    assert advice.others[0].step_ns == pytest.approx(60.6 * MS)
    assert advice.best.buckets == 1
    one_bucket = step(
        1,
        0,
        [(F, 5), (B, 35), (W, 18), (S, 6)],
        [(0, 10), (1, 20), (2, 30), (3, 40)],
        [bucket(0, 40, 40, 58, 40, 58, early=False)],
    )
    told = sentence(advise(run([replace(one_bucket, wait_cpu_ns=18 * MS)], [(0, 1, 2, 3)]), [1]))
    assert told == (
        "Other buckets would gain next to nothing, since communication takes the ranks' own cores: the best would make "
        "it 64.0 ms."
    )


def one_size(number=1):
    """Two buckets of 2 MiB, each through after 10 ms."""
    return step(
        number,
        0,
        [(F, 5), (B, 35), (W, 10), (S, 10)],
        [(0, 10), (1, 20), (2, 30), (3, 40)],
        [bucket(0, 20, 20, 30, 40, 40), bucket(1, 40, 40, 50, 40, 50, early=False)],
    )


def test_buckets_of_one_size_do_not_tell_what_a_start_costs():
    advice = advise(run([one_size()], [(0, 1), (2, 3)], **NETWORK), [1])
    assert not advice.knows_start
    # A usual one is taken; the bytes then cost what is left of the 20 ms.
    assert advice.link.start_ns == 0.3 * MS
    assert advice.link.byte_ns * MIB == pytest.approx(19.4 / 4 * MS)
    # At best the last gradient alone follows the end of backward: 5.15 instead of 10.
    assert advice.best.step_ns == pytest.approx(55.15 * MS)
    assert advice.best.buckets == 3
    told = sentence(advice)
    assert told.startswith("With bucket_cap_mb=1 the step would take about 55.1 ms, 8% less, if")
    assert told.endswith(
        "if starting a bucket costs 0.30 ms: no two recorded buckets of different size travelled alone, which would tell."
    )
    assert "0.30 ms (taken as usual) + 4.85 ms per MiB" in shown(
        summarize(run([one_size()], [(0, 1), (2, 3)], **NETWORK))
    )


def test_a_start_costs_no_more_than_the_buckets_took():
    quick = step(
        1,
        0,
        [(F, 5), (B, 35), (W, 0), (S, 10)],
        [(0, 10), (1, 20), (2, 30), (3, 40)],
        [bucket(0, 20, 20, 20.125, 40, 40), bucket(1, 40, 40, 40.125, 40, 40.125, early=False)],
    )
    advice = advise(run([quick], [(0, 1), (2, 3)], **NETWORK), [1])
    assert (advice.link.start_ns, advice.link.byte_ns) == (0.125 * MS, 0)


def test_the_best_buckets_need_nothing_else():
    good = step(
        1,
        0,
        [(F, 5), (B, 35), (W, 6), (S, 14)],
        [(0, 10), (1, 20), (2, 30), (3, 40)],
        [
            bucket(0, 10, 10, 16, 40, 40),
            bucket(1, 30, 30, 40, 40, 40),
            bucket(2, 40, 40, 46, 40, 46, early=False),
        ],
    )
    advice = advise(run([good], [(0,), (1, 2), (3,)], **NETWORK), [1])
    assert advice.best.step_ns == advice.recorded.step_ns == 60 * MS
    assert advice.recorded.argument == "bucket_cap_mb_list=[1, 2, 1]"
    assert sentence(advice) == (
        "Other buckets would gain next to nothing: the best would make it 60.0 ms."
    )


def test_buckets_that_share_the_link_tell_only_their_sum():
    beside = step(
        1,
        0,
        [(F, 5), (B, 35), (W, 16), (S, 4)],
        [(0, 36), (1, 37), (2, 38), (3, 40)],
        [bucket(0, 36, 36, 50, 40, 50), bucket(1, 40, 40, 56, 50, 56, early=False)],
    )
    advice = advise(run([beside], SMALL_THEN_LARGE, **NETWORK), [1])
    assert not advice.knows_start
    assert advice.link.byte_ns * MIB == pytest.approx((56 - 36 - 0.6) / 4 * MS)
    assert advice.model_ns == pytest.approx(advice.recorded.step_ns)


def test_a_slow_rank_counts():
    quick, slow = small_then_large(), small_then_large()
    late = tuple((param, at + 2 * MS) for param, at in slow.ready)
    moved = [replace(b, launched_ns=b.launched_ns + 2 * MS) for b in slow.buckets]
    ranks = [rank(0, [quick], SMALL_THEN_LARGE, **NETWORK)]
    ranks.append(
        rank(
            1,
            [replace(slow, ready=late, buckets=tuple(moved))],
            SMALL_THEN_LARGE,
            **NETWORK,
        )
    )
    advice = advise(Trace(tuple(ranks), 2, "", {}), [1])
    # Buckets start 2 ms later and so take 2 ms less.
    assert advice.link.start_ns + advice.link.byte_ns * MIB == pytest.approx(4 * MS)


def ends_in_the_wait(first_ends=46, second_ends=60, steps=6):
    """The first bucket leaves at 10, 30 ms before the end of backward, and ends only while it is waited for."""
    one = step(
        1,
        0,
        [(F, 5), (B, 35), (W, second_ends - 40), (S, 6)],
        [(0, 10), (1, 20), (2, 30), (3, 40)],
        [
            bucket(0, 10, 10, first_ends, 40, max(40, first_ends)),
            bucket(1, 40, 40, second_ends, max(40, first_ends), second_ends, early=False),
        ],
    )
    return [replace(one, number=number) for number in range(1, steps + 1)]


def test_a_transport_that_moves_only_while_it_is_waited_for_hides_nothing():
    # 3 MiB take 14 ms from 46 on, so 1 MiB does not take 36.
    advice = advise(run(ends_in_the_wait(), **NETWORK), range(1, 7))
    assert advice.link.charge == 1.0
    assert advice.link.start_ns == pytest.approx(2 * MS)
    assert advice.link.byte_ns * MIB == pytest.approx(4 * MS)
    # One bucket: from 40 to 58 instead of 60.
    assert advice.best.buckets == 1
    assert advice.best.step_ns == pytest.approx(advice.recorded.step_ns - 2 * MS)


def test_a_slow_network_is_none_such():
    # Here 3 MiB take 108 ms, so 1 MiB does take 36.
    advice = advise(run(ends_in_the_wait(46, 154), **NETWORK), range(1, 7))
    assert advice.link.charge == 0.0
    assert advice.link.byte_ns * MIB == pytest.approx((154 - 10 - 0.6) / 4 * MS)


def test_nor_is_one_that_was_late_in_some_steps():
    steps = ends_in_the_wait(steps=6)
    in_time = [replace(one, number=7) for one in ends_in_the_wait(16, 54, steps=1)]
    assert advise(run([*steps, *in_time], **NETWORK), range(1, 8)).link.charge == 0.0
    assert advise(run(steps[:2], **NETWORK), range(1, 3)).link.charge == 0.0


@pytest.mark.parametrize(
    ("cores", "threads", "ranks", "share"),
    [
        (0, 0, 2, 1.0),
        (2, 1, 2, 1.0),
        (4, 1, 2, 0.0),
        (3, 1, 2, 0.5),
        (16, 8, 2, 1.0),
        (1, 1, 4, 1.0),
    ],
)
def test_cores_to_spare(cores, threads, ranks, share):
    assert crowded(rank(0, [], [], cores=cores, threads=threads), ranks) == share


def test_only_steps_of_the_last_plan_count():
    whole = step(
        1,
        0,
        [(F, 5), (B, 35), (W, 18), (S, 6)],
        [(0, 10), (1, 20), (2, 30), (3, 40)],
        [bucket(2, 40, 40, 58, 40, 58, early=False)],
    )
    groups = [*SMALL_THEN_LARGE, (0, 1, 2, 3)]
    advice = advise(run([whole, small_then_large(2)], groups, **NETWORK), [1, 2])
    assert (advice.steps, advice.recorded.buckets) == (1, 2)
    # The other way round there is one bucket, which cannot be compared with another.
    turned = [small_then_large(1), replace(whole, number=2)]
    assert not advise(run(turned, groups, **NETWORK), [1, 2]).knows_start


def test_a_parameter_that_is_never_used_is_not_waited_for():
    unused = replace(small_then_large(), ready=((1, 20 * MS), (2, 30 * MS), (3, 40 * MS)))
    advice = advise(run([unused], **NETWORK), [1])
    assert advice.others[0].buckets == 4
    assert advice.best.step_ns <= 52 * MS


# ---------------------------------------------------------------- no prediction


def without(why, trace, counted=(1,)):
    told = advise(trace, counted)
    assert isinstance(told, str)
    assert why in told
    assert sentence(told) == told
    return told


def test_why_there_is_no_prediction():
    trace = run([small_then_large()])
    without("files of some ranks are missing", replace(trace, world_size=3))
    without("several wrappers", run([small_then_large()], wrappers=("A", "B")))
    without("on a GPU the host does not see", run([small_then_large()], device="cuda:0"))
    without("clocks could not be compared", run([small_then_large()], clock_error_ns=None))
    without("no step after the first", run([replace(small_then_large(), ready=())]))
    blind = replace(
        small_then_large(),
        buckets=(bucket(0, 10, 10, None, 40, 40), bucket(1, 40, 40, None, 40, 40)),
    )
    without("when buckets ended was not recorded", run([blind]))
    assert isinstance(
        advise(run([small_then_large()], device="cuda:0", by_device=True), [1]), Advice
    )


def test_where_nobody_expects_a_prediction_nothing_is_said():
    assert advise(run([small_then_large()], ranks=1), [1]) == ""
    assert advise(run([small_then_large()], param_bytes=()), [1]) == ""
    assert summarize(run([small_then_large()], ranks=1)).as_dict()["advice"] is None


# ---------------------------------------------------------------- in the reports


def shown(summary):
    plain = Console(width=140)
    with plain.capture() as told:
        for table in tables(summary):
            plain.print(table)
    return told.get()


def test_it_stands_in_the_paragraph_the_table_and_the_figures():
    summary = summarize(run([small_then_large()], **NETWORK))
    assert "With bucket_cap_mb=1 the step would take about 52.0 ms, 13% less." in paragraph(summary)
    told = shown(summary)
    assert "Buckets that were not tried: steps predicted" in told
    assert "bucket_cap_mb_list=[2, 1]" in told
    assert "an all-reduce takes 2.00 ms + 4.00 ms per MiB" in told
    (row,) = [line.split() for line in told.splitlines() if line.split()[:2] == ["5", "MiB"]]
    assert row == ["5", "MiB", "1", "64.0", "ms", "107%", "bucket_cap_mb=5"]
    figures = summary.as_dict()["advice"]
    assert figures["proposal"]["argument"] == "bucket_cap_mb=1"
    assert figures["best"]["argument"] == "bucket_cap_mb_list=[2, 1]"
    assert figures["gain"] == pytest.approx(8 / 60)
    assert json.dumps(figures)


def test_a_long_list_of_caps_stays_out_of_the_paragraph():
    advice = advise(run([small_then_large()], **NETWORK), [1])
    caps = tuple(0.1 * place for place in range(1, 12))
    many = replace(advice.best, caps_mib=caps, buckets=11)
    assert sentence(replace(advice, proposal=many)) == (
        "With 11 buckets of 0.1 to 1.1 MiB (the report lists them) the step would take about 52.0 ms, 13% less."
    )


def test_the_command_tells_it(monkeypatch, capsys):
    trace = run([small_then_large()], **NETWORK)
    monkeypatch.setattr("rankstep.cli.trace.load", lambda *_, **__: trace)
    assert main(["trace", "somewhere"]) == 0
    assert "With bucket_cap_mb=1 the step would" in " ".join(capsys.readouterr().out.split())
    assert main(["trace", "somewhere", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["advice"]["knows_start"] is True
