"""One bucket: gradients go in divided, travel as one buffer, and come out as views of it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.overrides import TorchFunctionMode

from rankstep.buckets.bucket import _LEGAL, Bucket, BucketState, Kept, grad_view
from rankstep.buckets.plan import Caps, ParamSpec, make_plan
from rankstep.testing import (
    DelayedCommunicator,
    RecordingCommunicator,
    assert_bitwise_equal,
)

FILLING, READY = BucketState.FILLING, BucketState.READY
IN_FLIGHT, REDUCED = BucketState.IN_FLIGHT, BucketState.REDUCED
LARGE_BYTES = 32


def bucket_of(tensors, comm=None, *, extra=0, packed_below=LARGE_BYTES):
    """One bucket with all the tensors, those below 32 bytes packed."""
    specs = [ParamSpec.of(f"p{i}", tensor) for i, tensor in enumerate(tensors)]
    plan = make_plan(specs, range(len(specs)), Caps((10**9,)), packed_below_bytes=packed_below)
    (planned,) = plan.buckets
    comm = comm or RecordingCommunicator(2)
    bucket = Bucket(planned, specs, tensors, comm, extra)
    bucket.scale = 1.0 if comm.averages else 1.0 / comm.world_size
    bucket.begin_step(len(tensors))
    return bucket, specs


def params(*shapes, dtype=torch.float32):
    return [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


def give(tensors, start=1.0):
    """Give every parameter a gradient of its own; return copies."""
    numbers = itertools.count(start)
    for tensor in tensors:
        values = [next(numbers) for _ in range(tensor.numel())]
        tensor.grad = torch.tensor(values, dtype=tensor.dtype).view(tensor.shape)
    return [tensor.grad.clone() for tensor in tensors]


def launch(bucket):
    """Launch the whole buffer, without a user's hook."""
    bucket.launch(None, is_last=True, tail_only=False)


def send(bucket):
    """Move a filled bucket through the rest of its life."""
    bucket.move(READY)
    launch(bucket)
    bucket.wait()
    bucket.hand_back()


# ---------------------------------------------------------------- states


def test_only_the_four_moves_of_a_step_and_an_early_launch_are_legal():
    for start, goal in itertools.product(list(BucketState), list(BucketState)):
        legal = {
            (FILLING, READY),
            (READY, IN_FLIGHT),
            (IN_FLIGHT, REDUCED),
            (REDUCED, FILLING),
            # A dead step launches zeros from wherever the bucket was.
            (FILLING, IN_FLIGHT),
        }
        bucket, _ = bucket_of(params(2))
        bucket.state = start
        if (start, goal) in legal:
            bucket.move(goal)
            assert bucket.state is goal
        else:
            with pytest.raises(AssertionError, match="bucket 0"):
                bucket.move(goal)
            assert bucket.state is start


def test_every_state_has_its_moves():
    assert set(_LEGAL) == set(BucketState)


def test_a_step_moves_through_all_states_and_back():
    tensors = params(2, 9)
    bucket, _ = bucket_of(tensors)
    seen = [bucket.state]
    for _ in range(2):
        give(tensors)
        bucket.copy_in(1, tensors[1])
        assert bucket.gather(at_end=False)
        for move in (lambda: bucket.move(READY), lambda: launch(bucket), bucket.wait):
            move()
            seen.append(bucket.state)
        bucket.hand_back()
        bucket.begin_step(2)
        seen.append(bucket.state)
    assert seen == [FILLING, *[READY, IN_FLIGHT, REDUCED, FILLING] * 2]


def test_launching_twice_or_waiting_before_launching_is_a_mistake():
    bucket, _ = bucket_of(params(2))
    with pytest.raises(AssertionError):
        bucket.wait()
    launch(bucket)
    with pytest.raises(AssertionError):
        launch(bucket)
    bucket.wait()
    with pytest.raises(AssertionError):
        bucket.wait()


def test_begin_step_forgets_the_step_before():
    tensors = params(9, 2)
    bucket, _ = bucket_of(tensors)
    give(tensors)
    bucket.copy_in(0, tensors[0])
    assert bucket.copied == {0}
    bucket.begin_step(1)
    assert (bucket.copied, bucket.left) == (set(), 1)
    # What was copied in before does not count as this step's: the large one has none now.
    assert not bucket.gather(at_end=False)


# ---------------------------------------------------------------- filling


def test_gather_divides_and_takes_every_gradient_away():
    tensors = params(2, (0, 3), (2, 2), ())
    bucket, _ = bucket_of(tensors)
    grads = give(tensors)
    assert bucket.gather(at_end=False)
    assert [tensor.grad for tensor in tensors] == [None] * 4
    for view, grad in zip(bucket.views, grads, strict=True):
        assert_bitwise_equal(view, grad / 2)


def test_gather_with_one_gradient_missing_changes_nothing():
    tensors = params(2, 3)
    bucket, _ = bucket_of(tensors)
    give(tensors)
    bucket.flat.fill_(7.0)
    kept = tensors[0].grad
    tensors[1].grad = None
    assert not bucket.gather(at_end=False)
    assert tensors[0].grad is kept
    assert_bitwise_equal(kept, torch.tensor([1.0, 2.0]))
    assert torch.all(bucket.views[1] == 7.0)


def test_gather_waits_for_the_large_ones():
    tensors = params(2, 8)
    bucket, _ = bucket_of(tensors)
    grads = give(tensors)
    assert bucket.large == {1}
    assert not bucket.gather(at_end=False)
    assert_bitwise_equal(tensors[0].grad, grads[0])
    bucket.copy_in(1, tensors[1])
    assert bucket.gather(at_end=False)
    assert_bitwise_equal(bucket.flat, torch.cat(grads) / 2)


def test_copy_in_takes_a_large_gradient_and_add_adds_to_it():
    tensors = params(8)
    bucket, _ = bucket_of(tensors)
    bucket.flat.fill_(9.0)
    (first,) = give(tensors)
    bucket.copy_in(0, tensors[0])
    assert tensors[0].grad is None
    assert_bitwise_equal(bucket.views[0], first / 2)
    (second,) = give(tensors, start=100.0)
    bucket.add(0, tensors[0])
    assert tensors[0].grad is None
    assert_bitwise_equal(bucket.views[0], first / 2 + second / 2)


def test_no_gradient_is_no_contribution():
    tensors = params(8)
    bucket, _ = bucket_of(tensors)
    bucket.copy_in(0, tensors[0])
    assert bucket.copied == set()
    bucket.flat.fill_(3.0)
    bucket.add(0, tensors[0])
    assert torch.all(bucket.flat == 3.0)


def test_gaps_become_zeros_and_what_was_there_is_kept():
    tensors = params(2, 2, 2, 8)
    bucket, _ = bucket_of(tensors)
    bucket.flat.fill_(5.0)
    grads = give(tensors)
    bucket.copy_in(3, tensors[3])
    tensors[1].grad = None
    old = tensors[2].grad
    # Parameter 0 fired, 1 has none, 2 has an old gradient that nothing reached, 3 is in the bucket.
    unused = bucket.gather_with_gaps([1, 0, 0, 1])
    assert set(unused) == {1, 2}
    assert unused[1] == Kept(None)
    assert unused[2].grad is old
    assert not unused[2].in_bucket
    assert_bitwise_equal(old, torch.tensor([5.0, 6.0]))
    assert [tensor.grad for tensor in tensors] == [None] * 4
    expected = [grads[0] / 2, torch.zeros(2), grads[2] / 2, grads[3] / 2]
    for view, value in zip(bucket.views, expected, strict=True):
        assert_bitwise_equal(view, value)


def test_an_old_gradient_in_the_bucket_itself_is_copied_before_it_is_divided():
    tensors = params(2, 2)
    bucket, _ = bucket_of(tensors)
    give(tensors)
    assert bucket.gather(at_end=False)
    send(bucket)
    bucket.begin_step(2)
    in_bucket = tensors[1].grad
    assert in_bucket is bucket.views[1]
    before = in_bucket.clone()
    tensors[0].grad = torch.ones(2)
    unused = bucket.gather_with_gaps([1, 0])
    assert unused[1].in_bucket
    assert_bitwise_equal(unused[1].grad, before)
    assert_bitwise_equal(bucket.views[1], before / 2)
    bucket.move(READY)
    launch(bucket)
    bucket.wait()
    bucket.hand_back()
    bucket.restore(1, unused[1])
    assert tensors[1].grad is bucket.views[1]
    assert_bitwise_equal(tensors[1].grad, before)


def test_restore_gives_back_the_very_tensor_or_none():
    tensors = params(2, 2)
    bucket, _ = bucket_of(tensors)
    give(tensors)
    own = tensors[0].grad
    tensors[1].grad = None
    unused = bucket.gather_with_gaps([0, 0])
    send(bucket)
    assert tensors[1].grad is bucket.views[1]
    bucket.restore(0, unused[0])
    bucket.restore(1, unused[1])
    assert tensors[0].grad is own
    assert tensors[1].grad is None


def test_zero_contributes_nothing_also_in_the_tail():
    tensors = params(2)
    bucket, _ = bucket_of(tensors, extra=3)
    (grad,) = give(tensors)
    bucket.flat.fill_(4.0)
    bucket.zero()
    assert_bitwise_equal(bucket.flat, torch.zeros(5))
    assert_bitwise_equal(tensors[0].grad, grad)


def test_division_has_the_bits_of_a_multiplication_by_the_reciprocal():
    for world in [1, 2, 3, 5]:
        # As torch's reducer does it; a true division differs in the last bit for 3 and 5.
        tensors = params(5, 400)
        bucket, _ = bucket_of(tensors, RecordingCommunicator(world))
        for tensor in tensors:
            tensor.grad = torch.randn(tensor.shape)
        grads = [tensor.grad.clone() for tensor in tensors]
        bucket.copy_in(1, tensors[1])
        assert bucket.gather(at_end=False)
        assert_bitwise_equal(bucket.flat, torch.cat(grads) * (1.0 / world))
        if world in (3, 5):
            assert not torch.equal(bucket.flat, torch.cat(grads) / world)


def test_a_collective_that_averages_gets_undivided_gradients():
    tensors = params(5, 40)
    bucket, _ = bucket_of(tensors, RecordingCommunicator(4, averages=True))
    grads = give(tensors)
    bucket.copy_in(1, tensors[1])
    assert bucket.gather(at_end=False)
    assert_bitwise_equal(bucket.flat, torch.cat(grads))
    more = torch.ones(40)
    tensors[1].grad = more.clone()
    bucket.add(1, tensors[1])
    assert_bitwise_equal(bucket.views[1], grads[1] + more)
    send(bucket)
    assert_bitwise_equal(tensors[0].grad, grads[0] / 4)


def test_half_types_do_not_overflow_in_the_sum():
    most = torch.finfo(torch.float16).max
    tensors = params(2, dtype=torch.float16)
    others = torch.full((2,), most / 2, dtype=torch.float16)
    bucket, _ = bucket_of(tensors, RecordingCommunicator(2, peers=lambda _: [others]))
    tensors[0].grad = torch.full((2,), most, dtype=torch.float16)
    assert bucket.gather(at_end=False)
    send(bucket)
    assert torch.all(torch.isfinite(tensors[0].grad))
    assert_bitwise_equal(tensors[0].grad, others + others)


def test_gradients_that_require_grad_are_taken_as_values():
    tensors = params(2, 8, 3)
    bucket, _ = bucket_of(tensors)
    grads = give(tensors)
    for tensor in tensors:
        tensor.grad.requires_grad_()
    bucket.copy_in(1, tensors[1])
    unused = bucket.gather_with_gaps([1, 1, 0])
    for view, grad in zip(bucket.views, grads, strict=True):
        assert_bitwise_equal(view, grad / 2)
        assert not view.requires_grad
    assert set(unused) == {2}
    tensors[1].grad = torch.ones(8, requires_grad=True)
    bucket.add(1, tensors[1])
    assert_bitwise_equal(bucket.views[1], grads[1] / 2 + 0.5)


# ---------------------------------------------------------------- many small ones


def many(count=8):
    """Parameters of every kind, enough of two kinds for concatenation."""
    shapes = [(3, 2), (5,)] * count
    shapes[2:2] = [(), (0, 3), (2, 2, 2)]
    tensors = params(*shapes)
    columns = torch.nn.Parameter(torch.zeros(4, 3).t())
    return [*tensors[:4], columns, *tensors[4:]]


def test_many_small_gradients_are_concatenated_into_their_views():
    tensors = many()
    bucket, _ = bucket_of(tensors, packed_below=10**6)
    grads = give(tensors)
    # Equal rows in other strides, too, as autograd may leave them.
    tensors[0].grad = grads[0].t().contiguous().t()
    with CatSpy() as spy:
        assert bucket.gather(at_end=False)
    assert spy.counts == [8, 8]
    for view, grad in zip(bucket.views, grads, strict=True):
        assert_bitwise_equal(view, grad / 2)
    assert [tensor.grad for tensor in tensors] == [None] * len(tensors)


def test_fewer_than_eight_of_a_kind_are_copied_view_by_view():
    tensors = many(7)
    bucket, _ = bucket_of(tensors, packed_below=10**6)
    grads = give(tensors)
    with CatSpy() as spy:
        assert bucket.gather(at_end=False)
    assert spy.counts == []
    for view, grad in zip(bucket.views, grads, strict=True):
        assert_bitwise_equal(view, grad / 2)


class CatSpy(TorchFunctionMode):
    """Counts how many tensors each ``torch.cat`` joins."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.cat:
            self.counts.append(len(args[0]))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("missing", [0, 1, 6, 19])
def test_one_of_many_without_a_gradient_leaves_all_gradients_as_they_were(missing):
    tensors = many()
    bucket, _ = bucket_of(tensors, packed_below=10**6)
    grads = give(tensors)
    tensors[missing].grad = None
    held = [tensor.grad for tensor in tensors]
    assert not bucket.gather(at_end=False)
    for tensor, grad, value in zip(tensors, held, grads, strict=True):
        assert tensor.grad is grad
        assert grad is None or torch.equal(grad, value)
    unused = bucket.gather_with_gaps([1] * len(tensors))
    assert set(unused) == {missing}
    for index, (view, grad) in enumerate(zip(bucket.views, grads, strict=True)):
        assert_bitwise_equal(view, torch.zeros_like(grad) if index == missing else grad / 2)


def test_one_sparse_gradient_among_many_is_left_to_the_careful_way():
    tensors = many()
    bucket, _ = bucket_of(tensors, packed_below=10**6)
    grads = give(tensors)
    place = next(i for i in range(6, 20) if tensors[i].dim() == 2)
    tensors[place].grad = grads[place].to_sparse()
    assert not bucket.gather(at_end=False)
    assert bucket.gather_with_gaps([1] * len(tensors)) == {}
    for view, grad in zip(bucket.views, grads, strict=True):
        assert_bitwise_equal(view, grad / 2)


def settled(tensors):
    """A bucket that has been through one step, so that every ``.grad`` lies in it."""
    bucket, _ = bucket_of(tensors, packed_below=10**6)
    give(tensors)
    assert bucket.gather(at_end=True)
    send(bucket)
    bucket.begin_step(len(tensors))
    assert all(t.grad is view for t, view in zip(tensors, bucket.views, strict=True))
    return bucket


@pytest.mark.parametrize("at_end", [False, True])
def test_many_gradients_that_lie_in_the_bucket_are_not_copied(at_end):
    tensors = many()
    bucket = settled(tensors)
    before = bucket.flat.clone()
    with CatSpy() as spy:
        assert bucket.gather(at_end=at_end)
    assert spy.counts == []
    assert_bitwise_equal(bucket.flat, before / 2)
    # Before the end of backward a late gradient must land beside the buffer.
    assert all((tensor.grad is None) is not at_end for tensor in tensors)
    send(bucket)
    assert all(t.grad is view for t, view in zip(tensors, bucket.views, strict=True))


@pytest.mark.parametrize("fresh", [[0], [7], [1, 4, 8, 9]])
def test_some_of_many_in_the_bucket_and_some_beside_it(fresh):
    tensors = many()
    bucket = settled(tensors)
    for index in fresh:
        tensors[index].grad = torch.full_like(tensors[index].grad, 100.0 + index)
    expected = [tensor.grad.clone() / 2 for tensor in tensors]
    assert bucket.gather(at_end=True)
    send(bucket)
    for tensor, view, value in zip(tensors, bucket.views, expected, strict=True):
        assert tensor.grad is view
        assert_bitwise_equal(view, value)


@pytest.mark.parametrize("moved", [[5], range(20)], ids=["one", "all"])
def test_gradients_moved_out_of_the_bucket_are_brought_back(moved):
    tensors = many()
    bucket = settled(tensors)
    for index in moved:
        # As a conversion of the module does it: the same tensor object, other memory.
        tensors[index].grad.data = tensors[index].grad.data + 1.0
    expected = [tensor.grad.clone() / 2 for tensor in tensors]
    assert bucket.gather(at_end=True)
    send(bucket)
    for index, (tensor, value) in enumerate(zip(tensors, expected, strict=True)):
        assert tensor.grad is bucket.views[index]
        assert_bitwise_equal(tensor.grad, value)
    bucket.flat.zero_()
    assert not any(tensor.grad.any() for tensor in tensors)


def test_views_moved_between_gathering_and_handing_back_are_made_anew():
    tensors = many()
    bucket = settled(tensors)
    old = tensors[0].grad
    grads = give(tensors)
    assert bucket.gather(at_end=False)
    # Somebody has kept the last step's gradient and moves it now.
    old.data = torch.full_like(old, 77.0)
    send(bucket)
    assert tensors[0].grad is not old
    assert_bitwise_equal(tensors[0].grad, grads[0] / 2)


def test_a_gradient_with_other_rows_than_planned_is_refused_before_it_travels():
    tensors = params(*[(3, 2)] * 8)
    bucket, _ = bucket_of(tensors, packed_below=10**6)
    give(tensors)
    tensors[3].data = torch.zeros(5, 2)
    tensors[3].grad = torch.ones(5, 2)
    with (
        pytest.warns(UserWarning, match="resized"),
        pytest.raises(RuntimeError, match="must match"),
    ):
        bucket.gather(at_end=False)


def test_handing_back_happens_once_in_a_step_and_can_be_undone():
    tensors = many()
    bucket, _ = bucket_of(tensors, packed_below=10**6)
    give(tensors)
    bucket.take_back()
    assert all(tensor.grad is not None for tensor in tensors)
    assert bucket.gather(at_end=True)
    bucket.move(READY)
    launch(bucket)
    bucket.hand_back()
    assert all(t.grad is view for t, view in zip(tensors, bucket.views, strict=True))
    own = torch.ones_like(tensors[0])
    tensors[0].grad = own
    bucket.hand_back()
    assert tensors[0].grad is own
    bucket.take_back()
    assert [tensor.grad for tensor in tensors] == [None] * len(tensors)


# ---------------------------------------------------------------- travelling


def test_the_whole_buffer_travels_in_one_call_and_the_result_is_handed_back():
    peer = torch.arange(10.0)
    comm = RecordingCommunicator(2, peers=lambda _: [peer])
    tensors = params(2, (2, 3))
    bucket, _ = bucket_of(tensors, comm, extra=2)
    grads = give(tensors)
    assert bucket.gather(at_end=False)
    bucket.flat[8:] = 50.0
    send(bucket)
    assert [(call.name, call.numel) for call in comm.calls] == [("all_reduce", 10)]
    expected = torch.cat([grad.flatten() for grad in grads]) / 2 + peer[:8]
    assert_bitwise_equal(tensors[0].grad, expected[:2])
    assert_bitwise_equal(tensors[1].grad, expected[2:].view(2, 3))
    assert_bitwise_equal(bucket.flat[8:], torch.tensor([58.0, 59.0]))


def test_nothing_is_handed_back_before_the_wait():
    peer = torch.ones(2)
    comm = DelayedCommunicator(RecordingCommunicator(2, peers=lambda _: [peer]))
    tensors = params(2)
    bucket, _ = bucket_of(tensors, comm)
    (grad,) = give(tensors)
    assert bucket.gather(at_end=False)
    bucket.move(READY)
    launch(bucket)
    assert tensors[0].grad is None
    assert_bitwise_equal(bucket.flat, grad / 2)
    bucket.wait()
    assert comm.events == ["start 0", "wait 0", "finish 0"]
    assert_bitwise_equal(bucket.flat, grad / 2 + 1)


def test_a_gradient_that_comes_in_flight_lands_beside_the_buffer():
    comm = DelayedCommunicator(RecordingCommunicator(2))
    tensors = params(2)
    bucket, _ = bucket_of(tensors, comm)
    give(tensors)
    assert bucket.gather(at_end=False)
    bucket.move(READY)
    launch(bucket)
    # This is what autograd does with a parameter whose `.grad` is None.
    tensors[0].grad = torch.tensor([8.0, 8.0])
    # Raises if the buffer was written meanwhile.
    bucket.wait()
    assert_bitwise_equal(bucket.flat, torch.tensor([0.5, 1.0]))


def test_a_second_round_adds_late_gradients_to_the_result():
    parts = [torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), torch.tensor([0.0, 0.0, 10.0, 20.0, 30.0])]
    comm = RecordingCommunicator(2, peers=lambda call: [parts[call]])
    tensors = params(2, 3)
    bucket, specs = bucket_of(tensors, comm)
    first = give(tensors)
    assert bucket.gather(at_end=False)
    bucket.move(READY)
    launch(bucket)
    bucket.wait()
    late = give(tensors, start=100.0)
    bucket.second_round([1], specs, 0.5)
    assert [call.numel for call in comm.calls] == [5, 5]
    # Parameter 0 was not late: its gradient stays where it is.
    assert_bitwise_equal(tensors[0].grad, late[0])
    assert tensors[1].grad is None
    bucket.hand_back()
    assert_bitwise_equal(tensors[0].grad, first[0] / 2 + parts[0][:2])
    assert_bitwise_equal(
        tensors[1].grad, first[1] / 2 + parts[0][2:] + (late[1] / 2 + parts[1][2:])
    )


def test_a_rank_without_late_gradients_takes_part_with_zeros():
    parts = [torch.zeros(4), torch.tensor([0.0, 0.0, 7.0, 9.0])]
    comm = RecordingCommunicator(2, peers=lambda call: [parts[call]])
    tensors = params(2, 2)
    bucket, specs = bucket_of(tensors, comm, extra=0)
    grads = give(tensors)
    assert bucket.gather(at_end=False)
    bucket.move(READY)
    launch(bucket)
    bucket.wait()
    # A number of another bucket's parameter may be in the list.
    bucket.second_round([5], specs, 0.5)
    bucket.hand_back()
    assert_bitwise_equal(tensors[0].grad, grads[0] / 2)
    assert_bitwise_equal(tensors[1].grad, grads[1] / 2 + torch.tensor([7.0, 9.0]))


def test_a_second_round_leaves_the_tail_alone():
    comm = RecordingCommunicator(2, peers=lambda call: [torch.ones((5, 2)[call])])
    tensors = params(2)
    bucket, specs = bucket_of(tensors, comm, extra=3)
    give(tensors)
    assert bucket.gather(at_end=False)
    bucket.move(READY)
    launch(bucket)
    bucket.wait()
    give(tensors)
    bucket.second_round([0], specs, 0.5)
    assert_bitwise_equal(bucket.flat[2:], torch.ones(3))
    assert_bitwise_equal(bucket.flat[:2], torch.tensor([3.0, 4.0]))


# ---------------------------------------------------------------- views


def test_views_lie_in_the_buffer_at_their_offsets():
    tensors = params(8, 2, (2, 2))
    bucket, _ = bucket_of(tensors, extra=4)
    base = bucket.flat.data_ptr()
    for view, offset in zip(bucket.views, bucket.spec.offsets, strict=True):
        assert view.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()
        assert view.data_ptr() == base + 4 * offset
    assert bucket.view_of == dict(enumerate(bucket.views))
    bucket.flat.copy_(torch.arange(18.0))
    assert_bitwise_equal(bucket.views[1], torch.tensor([0.0, 1.0]))
    assert_bitwise_equal(bucket.views[2], torch.tensor([[2.0, 3.0], [4.0, 5.0]]))
    assert_bitwise_equal(bucket.views[0], torch.arange(6.0, 14.0))


def test_views_are_no_autograd_views():
    tensors = params(2)
    bucket, _ = bucket_of(tensors)
    view = bucket.views[0]
    assert not view._is_view()
    # Old training loops do this, and torch refuses it for its own views.
    assert view.detach_() is view
    with pytest.raises(RuntimeError, match="detach"):
        bucket.flat[:2].detach_()


def test_a_view_keeps_dense_strides():
    memory_format = torch.channels_last
    tensors = [
        torch.nn.Parameter(torch.zeros(2, 3, 4, 4).contiguous(memory_format=memory_format)),
        torch.nn.Parameter(torch.zeros(3, 5).t()),
        torch.nn.Parameter(torch.zeros(6, 4)[:, ::2]),
    ]
    bucket, _ = bucket_of(tensors, packed_below=0)
    assert bucket.views[0].is_contiguous(memory_format=memory_format)
    assert bucket.views[1].stride() == tensors[1].stride() == (1, 5)
    assert bucket.views[2].stride() == (2, 1)
    values = [torch.randn(tensor.shape) for tensor in tensors]
    for index, (tensor, value) in enumerate(zip(tensors, values, strict=True)):
        tensor.grad = value.clone()
        bucket.copy_in(index, tensor)
    assert bucket.gather(at_end=False)
    send(bucket)
    for tensor, value in zip(tensors, values, strict=True):
        assert_bitwise_equal(tensor.grad, value * 0.5)


def test_complex_gradients_travel_as_pairs_of_reals():
    for dtype, packed_below in itertools.product([torch.complex64, torch.complex128], [0, 10**6]):
        tensors = [torch.nn.Parameter(torch.zeros(s, dtype=dtype)) for s in ((3,), (), (2, 2))]
        comm = RecordingCommunicator(2)
        bucket, _ = bucket_of(tensors, comm, packed_below=packed_below)
        grads = [torch.randn(t.shape, dtype=dtype) for t in tensors]
        for index, (tensor, grad) in enumerate(zip(tensors, grads, strict=True)):
            tensor.grad = grad.clone()
            if packed_below == 0:
                bucket.copy_in(index, tensor)
        assert bucket.gather(at_end=False)
        send(bucket)
        assert comm.calls[0].dtype == dtype.to_real()
        assert comm.calls[0].numel == 16
        for tensor, grad in zip(tensors, grads, strict=True):
            assert tensor.grad.dtype == dtype
            assert_bitwise_equal(tensor.grad, grad / 2)


def test_a_view_of_a_buffer_that_begins_inside_a_storage():
    storage = torch.arange(12.0)
    real = ParamSpec.of("p", torch.zeros(2, 2))
    assert_bitwise_equal(grad_view(storage[4:], 2, real), torch.tensor([[6.0, 7.0], [8.0, 9.0]]))
    pair = ParamSpec.of("p", torch.zeros(2, dtype=torch.complex64))
    assert_bitwise_equal(grad_view(storage[4:], 2, pair), torch.tensor([6 + 7j, 8 + 9j]))


def test_every_dtype_goes_through_unchanged():
    for dtype in [torch.float64, torch.bfloat16, torch.float16]:
        tensors = params(3, 40, dtype=dtype)
        bucket, _ = bucket_of(tensors)
        for tensor in tensors:
            tensor.grad = torch.randn(tensor.shape, dtype=dtype)
        grads = [tensor.grad.clone() for tensor in tensors]
        bucket.copy_in(1, tensors[1])
        assert bucket.gather(at_end=False)
        send(bucket)
        for tensor, grad in zip(tensors, grads, strict=True):
            assert_bitwise_equal(tensor.grad, grad / 2)


def test_gradients_that_already_lie_in_the_bucket_are_divided_in_place():
    tensors = params(2, 8)
    bucket, _ = bucket_of(tensors)
    give(tensors)
    bucket.copy_in(1, tensors[1])
    assert bucket.gather(at_end=False)
    send(bucket)
    bucket.begin_step(2)
    # The second step adds in place, as autograd does when gradients were not set to None.
    for tensor in tensors:
        tensor.grad.add_(1.0)
    before = bucket.flat.clone()
    bucket.copy_in(1, tensors[1])
    assert bucket.gather(at_end=False)
    assert_bitwise_equal(bucket.flat, before / 2)
