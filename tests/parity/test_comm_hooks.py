"""Communication hooks: torch's own run unchanged and give torch's bits; a user's own are checked, called and obeyed."""

from __future__ import annotations

import copy
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parity_models import batch, build, grads_of, loss_of, share, state_of
from torch import nn
from torch.distributed.algorithms import ddp_comm_hooks as torchs_hooks
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel as Torchs

from rankstep import DistributedDataParallel as Ours
from rankstep.collectives.hub import Hub
from rankstep.testing import (
    assert_bitwise_equal,
    assert_close_to,
    assert_same_on_all,
    first_difference,
    noted_collectives,
)

# About 2 KiB: several buckets in the models here.
SMALL = 0.002
# ---------------------------------------------------------------- torch's own hooks


def power_sgd(batched, **options):
    hook = powerSGD_hook.batched_powerSGD_hook if batched else powerSGD_hook.powerSGD_hook

    def register(run):
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=3, **options)
        run.register_comm_hook(state, hook)

    return register


def post_local_sgd(run):
    # The subgroup of a rank is the rank itself, so that after the start the ranks go their own ways.
    subgroups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    mine = subgroups[dist.get_rank()]
    state = post_localSGD_hook.PostLocalSGDState(None, mine, start_localSGD_iter=3)
    run.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)


def plain(hook):
    return lambda run: run.register_comm_hook(None, hook)


def by_type(name):
    kind = getattr(torchs_hooks.DDPCommHookType, name)
    return lambda run: torchs_hooks.register_ddp_comm_hook(kind, run)


def builtin(name):
    kind = getattr(dist.BuiltinCommHookType, name)
    return lambda run: run._register_builtin_comm_hook(kind)


def wrapped_power_sgd(run):
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=3)
    run.register_comm_hook(state, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook))


HOOKS = {
    "allreduce": plain(default_hooks.allreduce_hook),
    "fp16": plain(default_hooks.fp16_compress_hook),
    "fp16 around allreduce": plain(
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    ),
    "noop": plain(debugging_hooks.noop_hook),
    "power": power_sgd(batched=False),
    "power rank 2, cold": power_sgd(
        batched=False, matrix_approximation_rank=2, warm_start=False, use_error_feedback=True
    ),
    "batched power": power_sgd(batched=True),
    "fp16 around power": wrapped_power_sgd,
    "post-local": post_local_sgd,
    "by type, fp16": by_type("FP16_COMPRESS"),
    "builtin allreduce": builtin("ALLREDUCE"),
    "builtin fp16": builtin("FP16_COMPRESS"),
}
# Those that give what there would be without a hook.
EXACT = {"allreduce", "builtin allreduce"}
# Those that leave each rank to itself, and from which step on.
LOCAL_FROM = {"noop": 0, "post-local": 3}
# Hooks of several stages start collectives from gloo's own threads, in any order: one bucket at a time.
STAGED = {"power", "power rank 2, cold", "batched power", "fp16 around power"}
STEPS = 8


_orthogonalize = powerSGD_hook._orthogonalize


def orthogonalize_also_one(matrices, epsilon=0):
    """The batched hook of torch 2.13 hands one matrix to a function that takes stacks of them."""
    return _orthogonalize(matrices.view(-1, *matrices.shape[-2:]), epsilon)


@mock.patch.object(powerSGD_hook, "_orthogonalize", orthogonalize_also_one)
def beside_torch(me, names):
    """Eight steps under each hook, ours beside torch's."""
    results = {}
    for name in names:
        model = build("MLP 1")
        cap = None if name in STAGED else SMALL
        runs = [kind(copy.deepcopy(model), bucket_cap_mb=cap) for kind in (Ours, Torchs)]
        for run in runs:
            HOOKS[name](run)
        steppers = [torch.optim.SGD(run.parameters(), lr=0.05) for run in runs]
        kinds = []
        for step in range(STEPS):
            parts = [share(batch("MLP 1", 2, step), rank) for rank in range(2)]
            means, mine = {}, {}
            for rank, part in enumerate(parts):
                alone = copy.deepcopy(runs[0].module)
                loss_of(alone, *part).backward()
                for n, grad in grads_of(alone).items():
                    means[n] = means.get(n, 0) + grad * 0.5
                if rank == me.rank:
                    mine = grads_of(alone)
            for run, stepper in zip(runs, steppers, strict=True):
                stepper.zero_grad()
                # The hooks draw their first guesses from the global state.
                torch.manual_seed(step)
                loss_of(run, *parts[me.rank]).backward()
            ours, torchs = map(grads_of, runs)
            assert_bitwise_equal({name: ours}, {name: torchs})
            is_mine, is_mean = (first_difference(ours, other) is None for other in (mine, means))
            kinds.append("mine" if is_mine else "mean" if is_mean else "else")
            for stepper in steppers:
                stepper.step()
        results[name] = state_of(runs[0]), kinds, len(runs[0].reducer.buckets)
    return results


def test_torchs_hooks_give_torchs_bits(ranks):
    first, second = ranks(2).run(beside_torch, list(HOOKS))
    for name in HOOKS:
        (weights, kinds, buckets), (others, _, _) = first[name], second[name]
        assert buckets == 1 if name in STAGED else buckets > 1
        start = LOCAL_FROM.get(name)
        if start is None:
            assert_same_on_all([weights, others])
        else:
            with pytest.raises(AssertionError, match="ranks 0 and 1 differ"):
                assert_same_on_all([weights, others])
        # Each hook did what it is for: the exact mean, this rank's own gradient, or something near the mean.
        if name in EXACT:
            assert kinds == ["mean"] * STEPS, name
        elif start is not None:
            assert kinds == ["mean"] * start + ["mine"] * (STEPS - start), name
        elif name in STAGED and not name.startswith("fp16"):
            assert kinds == ["mean"] * 3 + ["else"] * (STEPS - 3), name
        else:
            assert kinds == ["else"] * STEPS, name


@mock.patch.object(powerSGD_hook, "_orthogonalize", orthogonalize_also_one)
def padded(me):
    """The batched hook pads the buffer in place, here by more than lies behind it, so that its memory moves."""
    torch.manual_seed(3)
    model = nn.Linear(101, 100, bias=False)
    runs = [kind(copy.deepcopy(model)) for kind in (Ours, Torchs)]
    for run in runs:
        HOOKS["batched power"](run)
    history = []
    for step in range(7):
        x = torch.randn(4, 101, generator=torch.Generator().manual_seed(10 * step + me.rank))
        for run in runs:
            run.zero_grad()
            run(x).square().sum().backward()
        assert_bitwise_equal(grads_of(runs[0]), grads_of(runs[1]))
        history.append(grads_of(runs[0]))
    return history


def test_a_hook_that_pads_its_buffer_in_place(ranks):
    assert_same_on_all(ranks(2).run(padded))


def fp16_by_hand(me):
    """What the fp16 hook must give, computed from the ranks' own gradients."""
    model = build("MLP 2")
    run = Ours(copy.deepcopy(model), bucket_cap_mb=SMALL)
    run.register_comm_hook(None, default_hooks.fp16_compress_hook)
    loss_of(run, *share(batch("MLP 2", 2, 0), me.rank)).backward()
    locals_ = []
    for rank in range(2):
        alone = copy.deepcopy(model)
        loss_of(alone, *share(batch("MLP 2", 2, 0), rank)).backward()
        locals_.append(grads_of(alone))
    wanted = {
        n: ((locals_[0][n].half() / 2) + (locals_[1][n].half() / 2)).float() for n in locals_[0]
    }
    assert_bitwise_equal(grads_of(run), wanted)


def test_fp16_by_hand(ranks):
    ranks(2).run(fp16_by_hand)


# ---------------------------------------------------------------- a user's own hook


def seen_by_a_hook(me, cap):
    """Everything that a hook can ask its bucket."""
    model = build("MLP 1", torch.float64)
    run = Ours(copy.deepcopy(model), bucket_cap_mb=cap)
    alone = copy.deepcopy(model)
    parameters = {id(param): name for name, param in run.module.named_parameters()}
    rows = []

    def hook(state, bucket):
        buffer, gradients = bucket.buffer(), bucket.gradients()
        assert buffer.dim() == 1
        assert buffer.numel() == sum(gradient.numel() for gradient in gradients)
        names = [parameters[id(param)] for param in bucket.parameters()]
        for param, gradient in zip(bucket.parameters(), gradients, strict=True):
            assert param.shape == gradient.shape
            # Gradients are views of the buffer.
            assert gradient.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        seen = {name: g.clone() for name, g in zip(names, gradients, strict=True)}
        assert not torch.is_grad_enabled()
        state.append((bucket.index(), bucket.is_last(), seen))
        return default_hooks.allreduce_hook(None, bucket)

    run.register_comm_hook(rows, hook)
    for step in range(3):
        rows.clear()
        run.zero_grad()
        alone.zero_grad()
        part = share(batch("MLP 1", 2, step, torch.float64), me.rank)
        loss_of(run, *part).backward()
        loss_of(alone, *part).backward()
        assert [index for index, _, _ in rows] == list(range(len(rows)))
        assert [last for _, last, _ in rows] == [False] * (len(rows) - 1) + [True]
        # The hook gets what this rank computed: nobody has divided it.
        seen = {name: g for _, _, gradients in rows for name, g in gradients.items()}
        assert_bitwise_equal({name: seen[name] for name in grads_of(alone)}, grads_of(alone))
        assert len(rows) == len(run.reducer.buckets)
    return grads_of(run), len(rows), run.reducer.last_step.launched_in_backward


def whole_batch(step):
    model = build("MLP 1", torch.float64)
    loss_of(model, *batch("MLP 1", 2, step, torch.float64)).backward()
    return grads_of(model)


@pytest.mark.parametrize("cap", [SMALL, None])
def test_a_hook_sees_undivided_gradients_bucket_by_bucket(ranks, cap):
    for grads, buckets, early in ranks(2).run(seen_by_a_hook, cap):
        assert buckets == 1 if cap is None else buckets > 2
        # Buckets reach the hook while backward runs.
        assert early == buckets - 1
        assert_close_to(grads, whole_batch(2), rel=1e-13)


def ready(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def answers(me):
    """A hook may answer with its buffer, with another tensor, with a list, or through ``set_buffer``."""
    results = {}

    def same(_, bucket):
        bucket.buffer().fill_(1.0)
        return ready(bucket.buffer())

    def other(_, bucket):
        return ready(torch.full_like(bucket.buffer(), 2.0))

    def wrapped_in_a_list(_, bucket):
        return ready([torch.full_like(bucket.buffer(), 3.0)])

    def replaced(_, bucket):
        bucket.set_buffer(torch.full_like(bucket.buffer(), 4.0))
        return ready(bucket.buffer())

    def other_dtype(_, bucket):
        return ready(torch.full_like(bucket.buffer(), 5.0).double())

    def chained(_, bucket):
        return default_hooks.allreduce_hook(None, bucket).then(lambda f: f.value() * 0 + 6.0)

    for hook in (same, other, wrapped_in_a_list, replaced, other_dtype, chained):
        run = Ours(build("MLP 1"), bucket_cap_mb=SMALL)
        run.register_comm_hook(None, hook)
        for step in range(2):
            run.zero_grad()
            loss_of(run, *share(batch("MLP 1", 2, step), me.rank)).backward()
        grads = torch.cat([grad.flatten() for grad in grads_of(run).values()])
        results[hook.__name__] = grads.unique().tolist(), str(grads.dtype)
    return results


def test_a_hooks_answer_is_the_gradient(ranks):
    for results in ranks(2).run(answers):
        assert [values for values, _ in results.values()] == [[float(i)] for i in range(1, 7)]
        assert {dtype for _, dtype in results.values()} == {"torch.float32"}


def parts_follow_the_buffer(me):
    """After ``set_buffer`` the gradients are parts of the new buffer, as torch's wrappers of hooks rely on."""
    seen = []

    def hook(_, bucket):
        before = bucket.gradients()
        for kind in (torch.float64, torch.float32):
            moved = bucket.buffer().to(kind, copy=True)
            bucket.set_buffer(moved)
            for old, new in zip(before, bucket.gradients(), strict=True):
                assert new.shape == old.shape
                assert new.dtype == (kind.to_complex() if old.is_complex() else kind)
                assert new.untyped_storage().data_ptr() == moved.untyped_storage().data_ptr()
                assert_bitwise_equal(new, old.to(new.dtype))
        seen.append(sum(gradient.numel() for gradient in bucket.gradients()))
        return ready(moved)

    run = Ours(Mixed())
    run.register_comm_hook(None, hook)
    run(torch.ones(2, dtype=torch.float64)).backward()
    return sum(seen)


def test_gradients_are_parts_of_whatever_the_buffer_is(ranks):
    assert ranks(2).run(parts_follow_the_buffer) == [15, 15]


class Callable:
    """An object may be a hook, too, if it says how it is called."""

    __name__ = "Callable"
    __qualname__ = "Callable"

    def __init__(self):
        self.calls = 0

    def __call__(self, state, bucket):
        self.calls += 1
        return default_hooks.allreduce_hook(state, bucket)


def kinds_of_callables(me):
    grads = []
    for hook in (Callable(), functools.partial(default_hooks.allreduce_hook), Callable().__call__):
        if isinstance(hook, functools.partial):
            hook.__name__ = hook.__qualname__ = "partial"
        run = Ours(build("MLP 1"))
        run.register_comm_hook(None, hook)
        loss_of(run, *share(batch("MLP 1", 2, 0), me.rank)).backward()
        grads.append(grads_of(run))
    assert_bitwise_equal(grads[0], grads[1])
    assert_bitwise_equal(grads[0], grads[2])
    return grads[0]


def test_any_callable_may_be_a_hook(ranks):
    assert_same_on_all(ranks(2).run(kinds_of_callables))


# ---------------------------------------------------------------- what it costs


def collectives(me):
    """The calls on the process group in steady steps, without a hook and with hooks of various kinds."""

    def twice(_, bucket):
        default_hooks.allreduce_hook(None, bucket).wait()
        return default_hooks.allreduce_hook(None, bucket)

    steps = {}
    for name in ("none", "builtin allreduce", "allreduce", "fp16", "noop", "twice"):
        run = Ours(build("MLP 1"), bucket_cap_mb=SMALL)
        if name == "twice":
            run.register_comm_hook(None, twice)
        elif name != "none":
            HOOKS[name](run)
        for step in range(4):
            run.zero_grad()
            with noted_collectives(Hub) as called:
                loss_of(run, *share(batch("MLP 1", 2, step), me.rank)).backward()
        steps[name] = [each.name for each in called], len(run.reducer.buckets)
    return steps


def test_a_hook_costs_one_small_all_reduce_and_none_costs_nothing(ranks):
    for steps in ranks(2).run(collectives):
        for name, (called, buckets) in steps.items():
            assert buckets > 2
            extra = {"none": [], "builtin allreduce": []}.get(name, ["allreduce"])
            each = {"noop": 0, "twice": 2}.get(name, 1)
            assert called == ["allreduce"] * each * buckets + extra, name


def size_of_the_extra_one(me):
    """The additional all-reduce carries flags and rows, and no gradients."""
    run = Ours(build("MLP 1"), bucket_cap_mb=SMALL)
    run.register_comm_hook(None, debugging_hooks.noop_hook)
    for step in range(3):
        loss_of(run, *share(batch("MLP 1", 2, step), me.rank)).backward()
    with noted_collectives(Hub) as called:
        loss_of(run, *share(batch("MLP 1", 2, 3), me.rank)).backward()
    return [each.numel for each in called], sum(param.numel() for param in run.parameters())


def test_the_additional_all_reduce_is_small(ranks):
    for sizes, elements in ranks(2).run(size_of_the_extra_one):
        assert len(sizes) == 1
        assert 0 < sizes[0] < 200 < elements


# ---------------------------------------------------------------- together with everything else


def with_the_rest(me):
    """Under a hook: unused parameters, no_sync, views, a second wrapper, and the steps stay compared."""
    model = build("MLP 1", torch.float64)
    run = Ours(copy.deepcopy(model), bucket_cap_mb=SMALL)
    calls = []

    def hook(_, bucket):
        calls.append(bucket.index())
        return default_hooks.allreduce_hook(None, bucket)

    run.register_comm_hook(None, hook)
    grads = []
    for step in range(2):
        run.zero_grad()
        with run.no_sync():
            part = share(batch("MLP 1", 2, 10 + step, torch.float64), me.rank)
            loss_of(run, *part).backward()
        assert len(calls) == step * len(run.reducer.buckets)
        loss_of(run, *share(batch("MLP 1", 2, step, torch.float64), me.rank)).backward()
        grads.append(grads_of(run))
    # A step that leaves a layer out on one rank only, then on both.
    unused = []
    for users in ((0,), ()):
        run.zero_grad()
        first = run.module.layers[0]
        total = loss_of(run, *share(batch("MLP 1", 2, 5, torch.float64), me.rank))
        if me.rank not in users:
            rest = [p for p in run.parameters() if all(p is not q for q in first.parameters())]
            torch.autograd.backward(total, inputs=rest)
        else:
            total.backward()
        unused.append(grads_of(run))
    return grads, unused


def test_hooks_work_with_the_rest(ranks):
    first, second = ranks(2).run(with_the_rest)
    assert_same_on_all([first, second])
    grads, unused = first
    for step, found in enumerate(grads):
        model = build("MLP 1", torch.float64)
        for number in (10 + step, step):
            loss_of(model, *batch("MLP 1", 2, number, torch.float64)).backward()
        assert_close_to(found, grads_of(model), rel=1e-13)
    only_rank_0, nobody = unused
    model = build("MLP 1", torch.float64)
    loss_of(model, *share(batch("MLP 1", 2, 5, torch.float64), 0)).backward()
    assert_close_to(only_rank_0["layers.0.weight"], model.layers[0].weight.grad / 2, rel=1e-13)
    assert nobody["layers.0.weight"] is None
    assert nobody["layers.1.weight"] is not None


def hook_before_and_after(me, late):
    """A hook may come after the first steps, too."""
    run = Ours(build("MLP 1", torch.float64), bucket_cap_mb=SMALL)
    calls = []

    def hook(_, bucket):
        calls.append(bucket.index())
        return default_hooks.allreduce_hook(None, bucket)

    for step in range(4):
        if step == late:
            run.register_comm_hook(None, hook)
        run.zero_grad()
        loss_of(run, *share(batch("MLP 1", 2, step, torch.float64), me.rank)).backward()
        wanted = 0 if step < late else (step - late + 1) * len(run.reducer.buckets)
        assert len(calls) == wanted
    return grads_of(run)


@pytest.mark.parametrize("late", [0, 2])
def test_a_hook_may_be_registered_while_training(ranks, late):
    for grads in ranks(2).run(hook_before_and_after, late):
        assert_close_to(grads, whole_batch(3), rel=1e-13)


class Mixed(nn.Module):
    """Complex and real parameters of two dtypes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.pairs = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.single = nn.Parameter(torch.randn(7))
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))

    def forward(self, x):
        pairs = torch.view_as_real(self.pairs).sum().double()
        return (pairs * self.single.double().sum() * self.wide.sum() * x).sum()


def buffers_are_real(me):
    kinds = []

    def hook(_, bucket):
        kinds.append((bucket.buffer().dtype, [g.dtype for g in bucket.gradients()]))
        return default_hooks.allreduce_hook(None, bucket)

    runs = [kind(Mixed()) for kind in (Ours, Torchs)]
    runs[0].register_comm_hook(None, hook)
    for run in runs:
        run(torch.full((2,), me.rank + 1.0, dtype=torch.float64)).backward()
    # The product is large, so torch's division before its own sum is the same as the hook's.
    assert_bitwise_equal(grads_of(runs[0]), grads_of(runs[1]))
    return sorted(kinds, key=str)


def test_complex_gradients_reach_a_hook_as_real_buffers(ranks):
    for kinds in ranks(2).run(buffers_are_real):
        assert {buffer for buffer, _ in kinds} == {torch.float32, torch.float64}
        assert torch.complex64 in [dtype for _, dtypes in kinds for dtype in dtypes]


# ---------------------------------------------------------------- refusals and failures


def wrong_bucket(state, bucket: int):
    return bucket


def wrong_return(state, bucket) -> int:
    return 1


def wrong_name(state, gradients):
    return gradients


def right(state, bucket: dist.GradBucket):
    return default_hooks.allreduce_hook(state, bucket)


# The annotations of this file are texts; torch compares the types.
wrong_bucket.__annotations__["bucket"] = int
wrong_return.__annotations__["return"] = int
right.__annotations__["bucket"] = dist.GradBucket


def registrations(me):
    """What each wrapper says of each wrong registration, and that a wrong one leaves room for a right one."""
    said = []
    for kind in (Ours, Torchs):
        rows = {}
        for label, hook in {
            "not callable": 3,
            "bucket annotation": wrong_bucket,
            "return annotation": wrong_return,
            "name": wrong_name,
            "bf16": default_hooks.bf16_compress_hook,
            "bf16 wrapper": default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
        }.items():
            run = kind(build("MLP 1"))
            try:
                run.register_comm_hook(None, hook)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
                rows[label] = [k.__name__ for k in type(error).__mro__], str(error)
            run.register_comm_hook(None, right)
        for first in ("hook", "builtin"):
            for second in ("hook", "builtin"):
                run = kind(build("MLP 1"))
                (plain(right) if first == "hook" else builtin("ALLREDUCE"))(run)
                try:
                    (plain(right) if second == "hook" else builtin("FP16_COMPRESS"))(run)
                except RuntimeError as error:
                    rows[first, second] = ["RuntimeError"], str(error)
        said.append(rows)
    return said


def test_wrong_hooks_are_refused_as_torch_does(ranks):
    for ours, torchs in ranks(2).run(registrations):
        assert list(ours) == list(torchs)
        for label, (kinds, text) in torchs.items():
            assert kinds[0] in ours[label][0], label
            if label == "name":
                assert "bucket" in ours[label][1]
            elif "twice" in text or isinstance(label, tuple):
                assert "can only be called once" in ours[label][1]
            else:
                # Up to the version numbers.
                assert text[:50] in ours[label][1], label


def failing(me, what, cap):
    run = Ours(build("MLP 1"), bucket_cap_mb=cap)
    bad = []

    def hook(_, bucket):
        if bad and bucket.index() == bad[0]:
            if what == "raises":
                raise ZeroDivisionError("a mistake of the user's")
            return 5
        return default_hooks.allreduce_hook(None, bucket)

    run.register_comm_hook(None, hook)
    for step in range(2):
        loss_of(run, *share(batch("MLP 1", 2, step), me.rank)).backward()
    bad.append(len(run.reducer.buckets) - 1)
    said = []
    for step in range(2):
        try:
            loss_of(run, *share(batch("MLP 1", 2, step), me.rank)).backward()
        except Exception as error:  # noqa: BLE001 - compared in the test
            said.append((type(error).__name__, str(error), isinstance(error, RuntimeError)))
    # The process group is whole: another wrapper works on it.
    other = Ours(build("MLP 1"))
    loss_of(other, *share(batch("MLP 1", 2, 0), me.rank)).backward()
    return said, grads_of(other)


@pytest.mark.parametrize("cap", [SMALL, None])
@pytest.mark.parametrize("what", ["raises", "no future"])
def test_an_error_in_a_hook_leaves_backward_and_the_wrapper_says_why(ranks, what, cap):
    outcomes = ranks(2).run(failing, what, cap)
    assert_same_on_all([grads for _, grads in outcomes])
    for said, _ in outcomes:
        (kind, text, _), (later, why, runtime) = said
        if what == "raises":
            assert (kind, text) == ("ZeroDivisionError", "a mistake of the user's")
            # The wrapper is of no use any more, and repeats the reason.
            assert "a mistake of the user's" in why
        else:
            assert kind == "RuntimeError"
            assert "callback must return a torch.futures.Future object, but got int" in text
            assert "torch.futures.Future" in why
        assert later != "AssertionError"
        assert runtime


def failed_future(me):
    """A future that fails later fails the backward, too."""
    run = Ours(build("MLP 1"))

    def broken(future):
        raise KeyError("lost on the way")

    def hook(_, bucket):
        return default_hooks.allreduce_hook(None, bucket).then(broken)

    run.register_comm_hook(None, hook)
    with pytest.raises(Exception, match="lost on the way"):
        loss_of(run, *share(batch("MLP 1", 2, 0), me.rank)).backward()


def test_a_future_that_fails_is_an_error(ranks):
    ranks(2).run(failed_future)


def logged(me):
    """What torch's callers read back."""
    names = []
    for kind in (Ours, Torchs):
        run = kind(build("MLP 1"))
        run.register_comm_hook(None, default_hooks.fp16_compress_hook)
        loss_of(run, *share(batch("MLP 1", 2, 0), me.rank)).backward()
        names.append(run._get_ddp_logging_data()["comm_hook"])
    return names


def test_the_hooks_name_is_in_the_record(ranks):
    for ours, torchs in ranks(2).run(logged):
        assert ours == torchs == "fp16_compress_hook"
