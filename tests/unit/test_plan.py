"""The plan: every element has exactly one place, and every rank can compute the same places."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankstep.buckets.plan import (
    CAP_BYTES,
    FIRST_CAP_BYTES,
    MIN_RUN,
    Caps,
    ParamSpec,
    make_plan,
)

CPU = torch.device("cpu")
META = torch.device("meta")
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
)


def spec(*shape, dtype=torch.float32, device=CPU, name="p"):
    return ParamSpec.of(name, torch.empty(shape, dtype=dtype, device=device))


def plan_of(specs, order=None, caps=(64,), packed_below_bytes=0):
    order = list(range(len(specs))) if order is None else order
    return make_plan(specs, order, Caps(caps), packed_below_bytes=packed_below_bytes)


def groups(plan):
    return [bucket.params for bucket in plan.buckets]


# ---------------------------------------------------------------- filling


def test_a_bucket_closes_with_the_parameter_that_reaches_the_cap():
    # 64 bytes are 16 floats: 12 + 4 is exactly full, 12 + 8 is over it, 15 is not full.
    assert groups(plan_of([spec(12), spec(4), spec(12), spec(8), spec(15)])) == [
        (0, 1),
        (2, 3),
        (4,),
    ]


def test_one_parameter_over_the_cap_is_a_bucket_of_its_own():
    assert groups(plan_of([spec(100), spec(1), spec(100)])) == [(0,), (1, 2)]


def test_the_caps_are_used_in_turn_and_the_last_one_repeats():
    plan = plan_of([spec(1)] * 11, caps=(4, 8, 16))
    assert groups(plan) == [(0,), (1, 2), (3, 4, 5, 6), (7, 8, 9, 10)]


def test_the_default_caps_are_torchs():
    assert (FIRST_CAP_BYTES, CAP_BYTES) == (2**20, 25 * 2**20)
    caps = Caps()
    assert [caps.at(i) for i in range(4)] == [2**20, 25 * 2**20, 25 * 2**20, 25 * 2**20]


def test_buckets_are_filled_in_the_order_of_readiness():
    specs = [spec(8), spec(8), spec(8), spec(8)]
    assert groups(plan_of(specs, order=[2, 0, 3, 1])) == [(2, 0), (3, 1)]
    assert groups(plan_of(specs, order=[0, 1, 2, 3])) == [(0, 1), (2, 3)]


def test_dtypes_and_devices_never_share_a_bucket_and_count_their_own_caps():
    specs = [
        spec(4, name="a"),
        spec(2, dtype=torch.float64, name="b"),
        spec(8, dtype=torch.bfloat16, name="c"),
        spec(4, device=META, name="d"),
        spec(2, name="e"),
        spec(4, name="f"),
    ]
    plan = plan_of(specs, caps=(16, 24))
    # Each of the four kinds has its first bucket of 16 bytes; the second fp32 bucket has the cap of 24.
    assert groups(plan) == [(0,), (1,), (2,), (3,), (4, 5)]
    kinds = [(bucket.dtype, bucket.device) for bucket in plan.buckets]
    assert kinds == [
        (torch.float32, CPU),
        (torch.float64, CPU),
        (torch.bfloat16, CPU),
        (torch.float32, META),
        (torch.float32, CPU),
    ]


def test_a_bucket_leaves_at_the_place_of_its_last_parameter():
    small, wide = spec(1), spec(1, dtype=torch.float64)
    # The fp64 bucket opens first but is complete only after the fp32 one.
    plan = plan_of([wide, small, wide], order=[0, 1, 2], caps=(1000,))
    assert groups(plan) == [(1,), (0, 2)]
    assert [bucket.index for bucket in plan.buckets] == [0, 1]


def test_every_parameter_lands_in_one_bucket_when_nothing_reaches_the_cap():
    plan = plan_of([spec(2), spec(3)], caps=(10**9,))
    assert groups(plan) == [(0, 1)]
    assert plan.order == (0, 1)


def test_zero_size_and_scalar_parameters_are_planned():
    plan = plan_of([spec(0, 3), spec(), spec(5), spec(2, 0)], caps=(10**6,))
    (bucket,) = plan.buckets
    assert bucket.offsets == (0, 0, 1, 6)
    assert bucket.numel == 6


def test_complex_parameters_take_two_reals_each():
    for kind, real in ((torch.complex64, torch.float32), (torch.complex128, torch.float64)):
        (bucket,) = plan_of([spec(3, dtype=kind), spec(2, dtype=kind)], caps=(10**6,)).buckets
        assert (bucket.dtype, bucket.offsets, bucket.numel) == (real, (0, 6), 10)
        assert bucket.nbytes == 5 * kind.itemsize


def test_complex_and_real_parameters_of_one_buffer_dtype_stay_apart():
    # One buffer could hold both, but a view of complex numbers must begin at an even place.
    plan = plan_of([spec(1), spec(1, dtype=torch.complex64)], caps=(10**6,))
    assert groups(plan) == [(0,), (1,)]


# ---------------------------------------------------------------- layout


def test_small_parameters_lie_together_at_the_front():
    specs = [spec(8), spec(1), spec(9), spec(2)]
    (bucket,) = plan_of(specs, order=[0, 1, 2, 3], caps=(10**6,), packed_below_bytes=16).buckets
    assert bucket.params == (0, 1, 2, 3)
    assert bucket.offsets == (3, 0, 11, 1)
    assert bucket.packed_numel == 3
    assert bucket.numel == 20


def test_eight_or_more_small_ones_with_equal_rows_lie_side_by_side():
    specs = [spec(2, 3), spec(4)] * MIN_RUN + [spec(5, 7)] * (MIN_RUN - 1) + [spec(1, 3)]
    order = list(reversed(range(len(specs))))
    (bucket,) = plan_of(specs, order, (10**6,), packed_below_bytes=10**6).buckets
    assert bucket.params == tuple(order)
    by_place = sorted(bucket.params, key=dict(zip(order, bucket.offsets, strict=True)).get)
    rows = [specs[i].shape[1:] for i in by_place]
    assert rows == [(3,)] * (MIN_RUN + 1) + [()] * MIN_RUN + [(7,)] * (MIN_RUN - 1)
    # Among themselves they stay in the order of readiness.
    assert [i for i in by_place if specs[i].shape == (4,)] == order[-2 * MIN_RUN :: 2]


def test_fewer_with_equal_rows_stay_in_order():
    specs = [spec(2, 3), spec(4)] * (MIN_RUN - 1)
    order = list(reversed(range(len(specs))))
    (bucket,) = plan_of(specs, order, (10**6,), packed_below_bytes=10**6).buckets
    assert list(bucket.offsets) == sorted(bucket.offsets)


@pytest.mark.parametrize(
    ("tensor", "row"),
    [
        (torch.empty(3, 4), (4,)),
        (torch.empty(3), ()),
        (torch.empty(2, 3, 4, 5), (3, 4, 5)),
        # Not dense, so its view is row-major.
        (torch.empty(4, 6)[:, ::2], (3,)),
        (torch.empty(3, 4).t(), None),
        (torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), None),
        (torch.empty(()), None),
        (torch.empty(0, 3), None),
        (torch.empty(3, 0), None),
        (torch.empty(3, dtype=torch.complex64), None),
    ],
)
def test_the_rows_of_a_view(tensor, row):
    assert ParamSpec.of("p", tensor).row_shape == row


def test_packing_asks_for_less_than_the_bound():
    bound = spec(4).nbytes
    packed = [
        plan_of([spec(4)], packed_below_bytes=below).buckets[0].packed_numel
        for below in (bound - 1, bound, bound + 1)
    ]
    assert packed == [0, 0, 4]


def test_packed_complex_parameters_count_in_elements_of_the_buffer():
    kind = torch.complex64
    (bucket,) = plan_of(
        [spec(4, dtype=kind), spec(1, dtype=kind)], caps=(10**6,), packed_below_bytes=16
    ).buckets
    assert (bucket.packed_numel, bucket.offsets, bucket.numel) == (2, (2, 0), 10)


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.empty(3, 4), True),
        (torch.empty(3, 4).t(), True),
        (torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), True),
        (torch.empty(1, 3, 1, 5).contiguous(memory_format=torch.channels_last), True),
        (torch.empty(()), True),
        (torch.empty(4, 6)[:, ::2], False),
        (torch.empty(4, 6)[:, :3], False),
        (torch.empty(1).expand(5), False),
        (torch.empty(3, 1).expand(3, 2), False),
    ],
)
def test_dense_strides_are_kept_and_others_become_row_major(tensor, dense):
    described = ParamSpec.of("p", tensor)
    assert described.dense is dense
    if dense:
        assert described.view_stride == tensor.stride()
    else:
        assert described.view_stride == torch.empty(tensor.shape).stride()


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "order", [[], [0], [0, 1], [0, 1, 1], [0, 1, 3], [-1, 0, 1], [0, 1, 2, 2], [0, 1, 2, 3]]
)
def test_an_order_that_is_no_permutation_is_refused(order):
    with pytest.raises(ValueError, match="each of 3 parameters once"):
        plan_of([spec(1)] * 3, order=order)


@pytest.mark.parametrize("caps", [(), (0,), (5, -1), (5, 0, 5)])
def test_caps_that_bound_nothing_are_refused(caps):
    with pytest.raises(ValueError, match="positive"):
        Caps(caps)


# ---------------------------------------------------------------- fingerprint


def test_the_fingerprint_tells_layouts_apart():
    specs = [spec(4, name="a"), spec(4, name="b"), spec(2, 2, name="c")]
    base = plan_of(specs)
    others = {
        "order": plan_of(specs, order=[1, 0, 2]),
        "caps": plan_of(specs, caps=(16,)),
        "packing": plan_of([*specs[:2], spec(5)], packed_below_bytes=17),
        "name": plan_of([replace(specs[0], name="z"), *specs[1:]]),
        "shape": plan_of([*specs[:2], spec(4, 1, name="c")]),
        "strides": plan_of([*specs[:2], replace(specs[2], stride=(1, 2))]),
        "dtype": plan_of([replace(s, dtype=torch.bfloat16) for s in specs]),
        "swapped": plan_of([specs[1], specs[0], specs[2]]),
        "fewer": plan_of(specs[:2]),
    }
    prints = {what: plan.fingerprint() for what, plan in others.items()}
    assert len({base.fingerprint(), *prints.values()}) == 1 + len(others)


def test_the_fingerprint_is_equal_for_equal_layouts():
    specs = [spec(4, name="a"), spec(4, name="b")]
    # Two caps that close nothing give the same layout, and so do strides that no view can copy.
    assert (
        plan_of(specs, caps=(10**6,)).fingerprint() == plan_of(specs, caps=(10**7,)).fingerprint()
    )
    gaps = [ParamSpec.of(s.name, torch.empty(8)[::2]) for s in specs]
    assert plan_of(specs).fingerprint() == plan_of(gaps).fingerprint()


def test_the_table_names_each_bucket_and_its_ends():
    plan = plan_of([spec(16, name="last.weight"), spec(4, name="mid"), spec(12, name="first")])
    head, *lines = plan.describe().splitlines()
    assert head == "3 parameters in 2 buckets"
    assert len(lines) == 2
    assert lines[0].endswith("last.weight")
    assert "mid .. first" in lines[1]
    assert "float32" in lines[1]


# ---------------------------------------------------------------- for every model


@st.composite
def models(draw):
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    kinds = st.sampled_from(DTYPES)
    devices = st.sampled_from([CPU, META])
    described = draw(st.lists(st.tuples(shapes, kinds, devices), min_size=1, max_size=25))
    specs = [
        spec(*shape, dtype=kind, device=device, name=f"p{i}")
        for i, (shape, kind, device) in enumerate(described)
    ]
    order = draw(st.permutations(range(len(specs))))
    caps = tuple(draw(st.lists(st.integers(1, 300), min_size=1, max_size=4)))
    packed_below = draw(st.integers(0, 200))
    return specs, list(order), caps, packed_below


@given(models())
def test_every_element_has_exactly_one_place(model):
    specs, order, caps, packed_below = model
    plan = plan_of(specs, order, caps, packed_below)
    assert sorted(plan.order) == list(range(len(specs)))
    for bucket in plan.buckets:
        taken = []
        for index, offset in zip(bucket.params, bucket.offsets, strict=True):
            taken += range(offset, offset + specs[index].buffer_numel)
        assert sorted(taken) == list(range(bucket.numel))


@given(models())
def test_a_buffer_holds_one_dtype_on_one_device(model):
    specs, order, caps, packed_below = model
    for bucket in plan_of(specs, order, caps, packed_below).buckets:
        assert {(specs[i].dtype, specs[i].device) for i in bucket.params} == {
            (specs[bucket.params[0]].dtype, bucket.device)
        }
        assert {specs[i].buffer_dtype for i in bucket.params} == {bucket.dtype}
        assert not bucket.dtype.is_complex
        assert bucket.nbytes == sum(specs[i].nbytes for i in bucket.params)


@given(models())
def test_the_packed_front_holds_exactly_the_small_ones(model):
    specs, order, caps, packed_below = model
    for bucket in plan_of(specs, order, caps, packed_below).buckets:
        small = [i for i in bucket.params if specs[i].nbytes < packed_below]
        assert bucket.packed_numel == sum(specs[i].buffer_numel for i in small)
        for index, offset in zip(bucket.params, bucket.offsets, strict=True):
            end = offset + specs[index].buffer_numel
            if index in small:
                assert end <= bucket.packed_numel
            else:
                assert offset >= bucket.packed_numel


@given(models())
def test_buckets_close_at_their_cap_and_leave_when_they_are_full(model):
    specs, order, caps, packed_below = model
    plan = plan_of(specs, order, caps, packed_below)
    place = {index: position for position, index in enumerate(order)}
    last_places = [place[bucket.params[-1]] for bucket in plan.buckets]
    assert last_places == sorted(last_places)
    seen = {}
    for bucket in plan.buckets:
        assert list(bucket.params) == sorted(bucket.params, key=place.__getitem__)
        key = (specs[bucket.params[0]].dtype, bucket.device)
        position = seen[key] = seen.get(key, -1) + 1
        cap = Caps(caps).at(position)
        assert bucket.nbytes - specs[bucket.params[-1]].nbytes < cap
        later = [i for i in order[last_places[bucket.index] + 1 :] if specs[i].dtype == key[0]]
        if any(specs[i].device == bucket.device for i in later):
            assert bucket.nbytes >= cap


@given(models(), st.data())
def test_only_permutations_are_planned(model, data):
    specs, order, caps, packed_below = model
    place = data.draw(st.integers(0, len(order) - 1))
    wrong = data.draw(st.integers(-2, len(order) + 1).filter(lambda i: i != order[place]))
    with pytest.raises(ValueError, match="order must name"):
        plan_of(specs, [*order[:place], wrong, *order[place + 1 :]], caps, packed_below)


@given(models())
def test_the_same_model_gives_the_same_plan(model):
    specs, order, caps, packed_below = model
    one, other = (plan_of(specs, list(order), caps, packed_below) for _ in range(2))
    assert one == other
    assert one.fingerprint() == other.fingerprint()


@given(models())
def test_strides_of_views_visit_every_element_once(model):
    for described in model[0]:
        if math.prod(described.shape):
            places = torch.arange(described.numel).as_strided(
                described.shape, described.view_stride
            )
            assert sorted(places.flatten().tolist()) == list(range(described.numel))
