"""model.backward(loss_sum, count=n): the gradient of all losses over all counts, whatever each rank had.

The oracle is one process that sees every sample once: the sum of all losses over the sum of all counts.
"""

from __future__ import annotations

import contextlib
import copy
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rankstep import DistributedDataParallel
from rankstep.collectives.hub import Hub
from rankstep.testing import (
    assert_bitwise_equal,
    assert_close_to,
    assert_same_on_all,
    first_difference,
    noted_collectives,
)

TINY = 0.0001
WIDTH = 6


class Net(nn.Module):
    """Two branches, so that a rank may leave one out."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, names="ab"):
        x = self.stem(x).tanh()
        return sum(getattr(self, name)(x).tanh() for name in names)


def net(dtype=torch.float64):
    torch.manual_seed(3)
    return Net().to(dtype)


def data(rank, step, size, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, WIDTH, dtype=torch.float64, generator=generator).to(dtype)


def loss_sum(model, x, names="ab"):
    return model(x, names).square().sum()


def grads_of(model):
    return {
        name.removeprefix("module."): None if param.grad is None else param.grad.clone()
        for name, param in model.named_parameters()
    }


def state_of(model):
    return {n.removeprefix("module."): p.detach().clone() for n, p in model.named_parameters()}


def wrapped(dtype=torch.float64, cap=TINY, **options):
    return DistributedDataParallel(net(dtype), bucket_cap_mb=cap, **options)


# ---------------------------------------------------------------- windows of any shape

# For each rank the sizes of its micro-batches in a window; 0: it calls with count=0, "none": with None.
WINDOWS = {
    "even": [[3], [3], [3]],
    "uneven": [[1], [5], [2]],
    "long": [[1, 4, 2], [3, 3, 3], [5, 1, 1]],
    "more on one": [[2, 3], [4], [1, 1, 1]],
    "nothing on one": [[3, 2], ["none"], [4]],
    "zero on one": [[0], [3], [2]],
    "nothing at the end": [[3, "none"], [2, 2], [1, 0]],
    "only one has something": [["none"], [5], [0]],
}


def run_window(run, rank, sizes, start):
    """One window: every micro-batch but the last under no_sync."""
    for number, size in enumerate(sizes):
        last = number == len(sizes) - 1
        with contextlib.nullcontext() if last else run.no_sync():
            if size == "none":
                run.backward(None, count=0)
            elif size == 0:
                # A batch without samples still has a graph.
                run.backward(loss_sum(run, data(rank, start + number, 0)), count=0)
            else:
                run.backward(loss_sum(run, data(rank, start + number, size)), count=size)


def exact(model, windows, start):
    """One process over all samples of a window."""
    total = 0
    for rank, sizes in enumerate(windows):
        for number, size in enumerate(sizes):
            if size not in ("none", 0):
                loss_sum(model, data(rank, start + number, size)).backward()
                total += size
    return {name: grad / total for name, grad in grads_of(model).items()}


def naive(model, windows, start):
    """What plain means of means give, as torch's wrapper would."""
    for rank, sizes in enumerate(windows):
        for number, size in enumerate(sizes):
            if size not in ("none", 0):
                (loss_sum(model, data(rank, start + number, size)) / size / len(windows)).backward()
    return grads_of(model)


def all_windows(me, cap):
    results = {}
    for name, for_three in WINDOWS.items():
        windows = for_three[: me.world_size]
        run = wrapped(cap=cap)
        for step in range(3):
            run.zero_grad()
            run_window(run, me.rank, windows[me.rank], 10 * step)
            found = grads_of(run)
            wanted = exact(net(), windows, 10 * step)
            assert_close_to({name: found}, {name: wanted}, rel=1e-14)
        results[name] = found
        assert run.reducer.reductions == 3
    return results


@pytest.mark.parametrize("cap", [TINY, None])
@pytest.mark.parametrize("world", [2, 3])
def test_every_window_is_exact(ranks, world, cap):
    outcomes = ranks(world).run(all_windows, cap)
    assert_same_on_all(outcomes)
    assert len(outcomes[0]) == len(WINDOWS)
    # The twin: where sizes differ, a mean of means is another gradient.
    plain = naive(net(), [sizes[:] for sizes in WINDOWS["uneven"][:world]], 20)
    assert first_difference(plain, outcomes[0]["uneven"]) is not None
    with pytest.raises(AssertionError, match="off by"):
        assert_close_to(plain, outcomes[0]["uneven"], rel=1e-3)


# ---------------------------------------------------------------- without zero_grad


def piling_up(me, to_none, unused):
    """Windows without zero_grad between them add up exactly; also with a branch that some leave out."""
    run, model = wrapped(), net()
    total = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
    for step in range(4):
        if step == 2:
            run.zero_grad(set_to_none=to_none)
            total = {name: torch.zeros_like(grad) for name, grad in total.items()}
        names = (
            [("ab", "a"), ("ab", "ab"), ("a", "a"), ("ab", "b")][step] if unused else ("ab",) * 2
        )
        sizes = [(1 + rank + step) for rank in range(me.world_size)]
        run.backward(
            loss_sum(run, data(me.rank, step, sizes[me.rank]), names[me.rank % 2]),
            count=sizes[me.rank],
        )
        model.zero_grad()
        for rank, size in enumerate(sizes):
            loss_sum(model, data(rank, step, size), names[rank % 2]).backward()
        for name, grad in grads_of(model).items():
            if grad is not None:
                total[name] += grad / sum(sizes)
        found = grads_of(run)
        for name, grad in found.items():
            if grad is None:
                assert not total[name].any(), name
                found[name] = torch.zeros_like(total[name])
        assert_close_to(found, total, rel=1e-13)
    return found


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
def test_windows_add_up_without_zero_grad(ranks, to_none, unused):
    assert_same_on_all(ranks(2).run(piling_up, to_none, unused))


@pytest.mark.parametrize("unused", [False, True])
def test_windows_add_up_on_three_ranks(ranks, unused):
    assert_same_on_all(ranks(3).run(piling_up, True, unused))


def old_gradient_untouched(me):
    """A parameter that no rank used in a window keeps what it had, bit for bit."""
    run = wrapped()
    run.backward(loss_sum(run, data(me.rank, 0, 2 + me.rank)), count=2 + me.rank)
    before = grads_of(run)
    run.backward(loss_sum(run, data(me.rank, 1, 3), "a"), count=3)
    after = grads_of(run)
    assert_bitwise_equal(
        [after["b.weight"], after["b.bias"]], [before["b.weight"], before["b.bias"]]
    )
    assert not torch.equal(after["a.weight"], before["a.weight"])
    return after


def test_what_no_rank_used_keeps_its_old_gradient(ranks):
    assert_same_on_all(ranks(3).run(old_gradient_untouched))


# ---------------------------------------------------------------- with optimizers


def trained(me, name, clip, scale):
    """Uneven windows under an optimizer, with clipping and a GradScaler, beside one process."""
    steppers = {
        "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    }
    run, model = wrapped(), net()
    ours, theirs = steppers[name](run.parameters()), steppers[name](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scale)
    draw = np.random.default_rng(5)
    for step in range(6):
        windows = [
            [int(size) for size in draw.integers(0, 5, size=1 + rank)]
            for rank in range(me.world_size)
        ]
        windows[0][0] += 1
        ours.zero_grad()
        for number, size in enumerate(windows[me.rank]):
            last = number == len(windows[me.rank]) - 1
            with contextlib.nullcontext() if last else run.no_sync():
                total = loss_sum(run, data(me.rank, 10 * step + number, size))
                run.backward(scaler.scale(total), count=size)
        scaler.unscale_(ours)
        theirs.zero_grad()
        for param, grad in zip(
            model.parameters(),
            exact(copy.deepcopy(model), windows, 10 * step).values(),
            strict=True,
        ):
            param.grad = grad
        if clip:
            norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (run, model)]
            assert_close_to(norms[0], norms[1], rel=1e-12)
        scaler.step(ours)
        scaler.update()
        theirs.step()
    assert_close_to(state_of(run), state_of(model), rel=1e-9)
    return state_of(run)


@pytest.mark.parametrize(
    ("name", "clip", "scale"),
    [("SGD", False, False), ("AdamW", True, False), ("AdamW", True, True)],
)
def test_training_is_that_of_one_process(ranks, name, clip, scale):
    assert_same_on_all(ranks(2).run(trained, name, clip, scale))


# ---------------------------------------------------------------- dtypes and counts


def half_types(me):
    """The count is exact whatever the dtype of the gradients."""
    found = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        # Each rank's sum of losses has gradient 1 per sample, so the mean is 1 whatever the counts are.
        model = nn.Linear(4, 3).to(dtype)
        run = DistributedDataParallel(model, bucket_cap_mb=TINY)
        for counts in ((3, 5), (1000, 24), (2049, 2047)):
            run.zero_grad()
            weight = counts[me.rank] / 64
            out = run(torch.ones(1, 4, dtype=dtype)).double().sum() * weight
            run.backward(out, count=weight)
            found[str(dtype), counts] = run.module.weight.grad.double()
    return found


def test_counts_are_exact_in_every_dtype(ranks):
    outcomes = ranks(2).run(half_types)
    assert_same_on_all(outcomes)
    for (dtype, _), grad in outcomes[0].items():
        # Local gradients, their halves and their sum are rounded; the count is not.
        rel = {"torch.bfloat16": 2**-7, "torch.float16": 2**-10, "torch.float32": 2**-22}[dtype]
        assert_close_to(grad, torch.ones(3, 4), rel=rel)


COUNTS = {
    "fractions": (0.125, 0.625),
    "tiny": (1e-30, 3e-30),
    "huge": (7_654_321_123_457, 123_457),
    "very huge": (2.0**80, 2.0**80),
    "numpy": (np.int64(3), np.float32(1.0)),
    "tensors": (torch.tensor(3), torch.tensor([1.0])),
    "booleans": (True, False),
    "one": (1, 0),
}


def counts(me):
    found = {}
    for name, pair in COUNTS.items():
        run = wrapped(cap=TINY)
        for step in range(2):
            run.zero_grad()
            run.backward(loss_sum(run, data(me.rank, step, 2)), count=pair[me.rank])
        model = net()
        for rank in range(2):
            loss_sum(model, data(rank, 1, 2)).backward()
        total = float(pair[0]) + float(pair[1])
        wanted = {n: grad / total for n, grad in grads_of(model).items()}
        assert_close_to({name: grads_of(run)}, {name: wanted}, rel=1e-13)
        found[name] = grads_of(run)
    return found


def test_counts_of_any_size_and_kind(ranks):
    assert_same_on_all(ranks(2).run(counts))


# ---------------------------------------------------------------- what it costs


def collectives(me, weighted):
    """Calls on the process group in steady steps: with flags, counts, comparison of steps and weights."""
    run = wrapped()
    stepper = torch.optim.SGD(run.parameters(), lr=0.1)
    assert run.reducer.exchange.alarm is not None
    steps = []
    for step in range(20):
        stepper.zero_grad()
        # Some steps leave a branch out on one rank, or on both.
        names = ["ab", "ab", "a", "ab" if me.rank else "b"][step % 4]
        with noted_collectives(Hub) as called:
            out = loss_sum(run, data(me.rank, step, 1 + me.rank + step % 3), names)
            if weighted:
                run.backward(out, count=1 + me.rank + step % 3)
            else:
                out.backward()
        stepper.step()
        steps.append([each.name for each in called])
    return steps, len(run.reducer.buckets)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_steady_step_takes_one_all_reduce_per_bucket_and_nothing_else(ranks, weighted):
    for steps, buckets in ranks(2).run(collectives, weighted):
        assert buckets == 3
        assert steps[0] == ["broadcast", *["allreduce"] * buckets]
        assert steps[1:] == [["allreduce"] * buckets] * 19


def nothing_to_give(me):
    """Also for a rank with nothing, and with micro-batches."""
    run = wrapped()
    steps = []
    for step in range(5):
        run.zero_grad()
        with noted_collectives(Hub) as called:
            if me.rank == 1 and step in (2, 4):
                run.backward(None, count=0)
            else:
                with run.no_sync():
                    run.backward(loss_sum(run, data(me.rank, step, 2)), count=2)
                run.backward(loss_sum(run, data(me.rank, step, 3)), count=3)
        steps.append([each.name for each in called])
    return steps[1:]


def test_a_rank_with_nothing_takes_the_same_collectives(ranks):
    assert ranks(2).run(nothing_to_give) == [[["allreduce"] * 3] * 4] * 2


# ---------------------------------------------------------------- together with hooks and other ways


def mean_hook(_, bucket):
    work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def with_hook(me):
    """A hook's answer counts as the mean over the ranks, which is what torch's hooks give."""
    run = wrapped()
    run.register_comm_hook(None, mean_hook)
    for step in range(2):
        run.zero_grad()
        run_window(run, me.rank, WINDOWS["more on one"][me.rank], 10 * step)
    wanted = exact(net(), WINDOWS["more on one"][:2], 10)
    assert_close_to(grads_of(run), wanted, rel=1e-14)
    return grads_of(run)


def test_a_comm_hook_and_counts(ranks):
    assert_same_on_all(ranks(2).run(with_hook))


def odd_graphs(me):
    """retain_graph, a loss that reaches no parameter, a loss of another dtype, a wrapper's second loss."""
    run = wrapped()
    model = net()
    out = loss_sum(run, data(me.rank, 0, 2 + me.rank))
    with run.no_sync():
        run.backward(out, count=1, retain_graph=True)
    run.backward(out, count=1 + me.rank)
    for rank in range(2):
        for _ in range(2):
            loss_sum(model, data(rank, 0, 2 + rank)).backward()
    assert_close_to(grads_of(run), {n: g / 5 for n, g in grads_of(model).items()}, rel=1e-14)
    # A loss with a graph that does not touch the model counts as nothing to add.
    run.zero_grad()
    model.zero_grad()
    if me.rank == 0:
        run.backward(torch.ones(2, requires_grad=True).sum(), count=0)
    else:
        run.backward(loss_sum(run, data(1, 1, 4)), count=4)
    loss_sum(model, data(1, 1, 4)).backward()
    assert_close_to(grads_of(run), {n: g / 4 for n, g in grads_of(model).items()}, rel=1e-14)
    # A constant: the same.
    run.zero_grad()
    if me.rank == 0:
        run.backward(torch.ones(()), count=0)
    else:
        run.backward(loss_sum(run, data(1, 1, 4)).float(), count=4)
    assert_close_to(grads_of(run), {n: g / 4 for n, g in grads_of(model).items()}, rel=1e-6)
    return grads_of(run)


def test_losses_of_every_kind(ranks):
    assert_same_on_all(ranks(2).run(odd_graphs))


def first_step_with_nothing(me, idle):
    """The very first step may be one to which a rank, even rank 0, adds nothing."""
    run = wrapped()
    for step in range(3):
        run.zero_grad()
        if step == 0 and me.rank == idle:
            run.backward(None, count=0)
        else:
            run.backward(loss_sum(run, data(me.rank, step, 3)), count=3)
        givers = [r for r in range(2) if step or r != idle]
        model = net()
        for rank in givers:
            loss_sum(model, data(rank, step, 3)).backward()
        wanted = {n: g / (3 * len(givers)) for n, g in grads_of(model).items()}
        assert_close_to(grads_of(run), wanted, rel=1e-14)
    return grads_of(run)


@pytest.mark.parametrize("idle", [0, 1])
def test_a_rank_may_have_nothing_in_the_first_step(ranks, idle):
    assert_same_on_all(ranks(2).run(first_step_with_nothing, idle))


def one_rank(me):
    run = wrapped()
    for step in range(3):
        run.zero_grad()
        run_window(run, 0, [2, 3], 10 * step)
        assert_close_to(grads_of(run), exact(net(), [[2, 3]], 10 * step), rel=1e-14)


def test_one_rank_alone(ranks):
    ranks(1).run(one_rank)


# ---------------------------------------------------------------- mistakes


def attempt(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001 - looked at in the test
        return type(error).__name__, str(error)
    return None


BAD = {
    "negative": -1,
    "NaN": math.nan,
    "infinite": math.inf,
    "minus infinity": -math.inf,
    "None": None,
    "a word": "many",
    "two elements": torch.ones(2),
    "complex": 1j,
    "a list": [3],
}


def bad_counts(me, first, names):
    """One rank passes a bad count; then all go on and are right."""
    said = {}
    for name in names:
        run = wrapped()
        for step in range(0 if first else 2):
            run.backward(loss_sum(run, data(me.rank, step, 3)), count=3)
        run.zero_grad()
        out = loss_sum(run, data(me.rank, 5, 3))
        count = BAD[name] if me.rank == 1 else 3
        said[name] = attempt(lambda run=run, out=out, count=count: run.backward(out, count=count))
        for step in (6, 7):
            run.zero_grad()
            run_window(run, me.rank, WINDOWS["uneven"][me.rank], step)
            wanted = exact(net(), WINDOWS["uneven"][: me.world_size], step)
            assert_close_to({name: grads_of(run)}, {name: wanted}, rel=1e-14)
    return said


@pytest.mark.parametrize("first", [False, True])
def test_a_bad_count_on_one_rank_is_told_on_all(ranks, first):
    for rank, said in enumerate(ranks(3).run(bad_counts, first, list(BAD))):
        for name, (kind, text) in said.items():
            assert f"rank {rank}" in text
            if rank == 1:
                assert kind == "CountError", name
                assert "count" in text
            else:
                assert kind == "AbandonedBackwardError", name
                assert "rank 1" in text


def bad_and_nothing_more(me, first):
    """The rank with the bad count does nothing at all after it: the others must not wait."""
    run = wrapped()
    for step in range(0 if first else 2):
        run.backward(loss_sum(run, data(me.rank, step, 3)), count=3)
    out = loss_sum(run, data(me.rank, 5, 3))
    return attempt(lambda: run.backward(out, count=-1 if me.rank == 1 else 3))


@pytest.mark.parametrize("first", [False, True])
def test_a_rank_with_a_bad_count_need_not_do_anything_more(ranks, first):
    first_rank, second = ranks(2).outcomes(bad_and_nothing_more, first, timeout_s=20)
    assert second.value[0] == "CountError"
    assert first_rank.value is not None, first_rank
    assert first_rank.value[0] == "AbandonedBackwardError"


def bad_on_all(me):
    run = wrapped()
    kinds = []
    for step in range(4):
        run.zero_grad()
        bad = step in (0, 2)
        out = loss_sum(run, data(me.rank, step, 3))
        said = attempt(lambda out=out, bad=bad: run.backward(out, count=-3 if bad else 3))
        kinds.append(said[0] if said else None)
    return kinds, grads_of(run)


def test_bad_counts_on_all_ranks(ranks):
    outcomes = ranks(2).run(bad_on_all)
    assert_same_on_all(outcomes)
    assert outcomes[0][0] == ["CountError", None, "CountError", None]
    assert_close_to(outcomes[0][1], exact(net(), [[3], [3]], 3), rel=1e-14)


def all_zero(me, way):
    """No samples anywhere: there is no mean, and every rank says so and goes on."""
    run = wrapped()
    said = []
    for step in range(4):
        run.zero_grad()
        empty = step in (0, 2)
        if empty and way == "none":
            said.append(attempt(lambda: run.backward(None, count=0)))
        else:
            size = 0 if empty else 3
            out = loss_sum(run, data(me.rank, step, size))
            said.append(attempt(lambda out=out, size=size: run.backward(out, count=size)))
    return said, grads_of(run)


@pytest.mark.parametrize("way", ["none", "empty batches"])
def test_counts_that_are_all_zero(ranks, way):
    outcomes = ranks(2).run(all_zero, way)
    for said, grads in outcomes:
        assert [each and each[0] for each in said] == ["CountError", None, "CountError", None]
        assert "0 in step 2" in said[2][1]
        assert_close_to(grads, exact(net(), [[3], [3]], 3), rel=1e-14)
    assert_same_on_all([grads for _, grads in outcomes])


OVERFLOWING = {"too large": (1e308, 1e308), "too small": (5e-324, 0)}


def beyond_numbers(me):
    """Each count is a number, but what they make together is none: an error, not a gradient of zeros or infinities."""
    said = {}
    for name, pair in OVERFLOWING.items():
        run = wrapped()
        for step in range(2):
            run.zero_grad()
            out = loss_sum(run, data(me.rank, step, 3))
            said[name, step] = attempt(
                lambda run=run, out=out, pair=pair: run.backward(out, count=pair[me.rank])
            )
    return said


def test_counts_whose_sum_is_no_use(ranks):
    for said in ranks(2).run(beyond_numbers):
        assert {kind for kind, _ in filter(None, said.values())} == {"CountError"}
        assert None not in said.values()


# How each rank spends a window: "w" weighted, "p" plain; all but the last under no_sync.
MIXED = {
    "one rank plain": ("w", "p"),
    "plain then weighted": ("pw", "pw"),
    "weighted then plain": ("wp", "wp"),
    "plain then weighted on one": ("pw", "ww"),
    "weighted then plain on one": ("wp", "ww"),
    "plain in the middle on one": ("wpw", "ww"),
    "weighted then plain beside plain": ("wp", "pp"),
}


def mixing(me, names, first):
    said = {}
    for name in names:
        run = wrapped()
        for step in range(0 if first else 2):
            run.backward(loss_sum(run, data(me.rank, step, 3)), count=3)
        run.zero_grad()

        def window(run=run, name=name):
            kinds = MIXED[name][me.rank]
            for number, kind in enumerate(kinds):
                last = number == len(kinds) - 1
                with contextlib.nullcontext() if last else run.no_sync():
                    out = loss_sum(run, data(me.rank, 5 + number, 3))
                    if kind == "w":
                        run.backward(out, count=3)
                    else:
                        (out / 3).backward()

        said[name] = attempt(window)
        # Then all go on in step.
        for step in (8, 9):
            run.zero_grad()
            run_window(run, me.rank, [2, 1 + me.rank], 10 * step)
            wanted = exact(net(), [[2, 1 + rank] for rank in range(2)], 10 * step)
            assert_close_to({name: grads_of(run)}, {name: wanted}, rel=1e-14)
    return said


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", MIXED)
def test_plain_and_weighted_backwards_do_not_mix(ranks, name, first):
    outcomes = ranks(2).outcomes(mixing, [name], first, timeout_s=20)
    for outcome in outcomes:
        assert outcome.value is not None, outcome
        assert outcome.value[name] is not None, "a wrong gradient, and nobody said so"
        kind, text = outcome.value[name]
        assert kind in ("RankSkewError", "ModelError")
        assert "count" in text


def used_in_turn(me):
    """Whole windows may be of either kind, in any order."""
    run = wrapped()
    for step, kinds in enumerate(["w", "p", "ww", "pp", "p", "w"]):
        run.zero_grad()
        for number, kind in enumerate(kinds):
            last = number == len(kinds) - 1
            with contextlib.nullcontext() if last else run.no_sync():
                out = loss_sum(run, data(me.rank, 10 * step + number, 1 + me.rank))
                if kind == "w":
                    run.backward(out, count=1 + me.rank)
                else:
                    (out / (1 + me.rank)).backward()
        windows = [[1 + rank] * len(kinds) for rank in range(2)]
        wanted = (exact if kinds[0] == "w" else naive)(net(), windows, 10 * step)
        assert_close_to(grads_of(run), wanted, rel=1e-14)
    return grads_of(run)


def test_windows_of_both_kinds_in_turn(ranks):
    assert_same_on_all(ranks(2).run(used_in_turn))


def bad_inside_no_sync(me):
    """A bad micro-batch in the middle of a window raises at once; the window goes on without it."""
    run = wrapped()
    run.backward(loss_sum(run, data(me.rank, 0, 3)), count=3)
    run.zero_grad()
    with run.no_sync():
        run.backward(loss_sum(run, data(me.rank, 1, 2)), count=2)
        said = attempt(lambda: run.backward(loss_sum(run, data(me.rank, 2, 2)), count=-2))
    run.backward(loss_sum(run, data(me.rank, 3, 4)), count=4)
    return said, grads_of(run)


def test_a_bad_count_under_no_sync(ranks):
    outcomes = ranks(2).run(bad_inside_no_sync)
    model = net()
    for rank in range(2):
        for step, size in ((1, 2), (3, 4)):
            loss_sum(model, data(rank, step, size)).backward()
    for said, grads in outcomes:
        assert said[0] == "CountError"
        assert_close_to(grads, {n: g / 12 for n, g in grads_of(model).items()}, rel=1e-14)
