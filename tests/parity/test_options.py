"""The constructor's arguments: torch's order and names, and for each one what it does or why it is refused."""

from __future__ import annotations

import copy
import inspect
import warnings

import pytest
import torch
import torch.distributed as dist
from parity_models import CNN, batch, build, grads_of, loss_of, share
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as Torchs
from torch.nn.parallel.distributed import _MixedPrecision

from rankstep import DistributedDataParallel as Ours
from rankstep.collectives.hub import Hub
from rankstep.testing import (
    assert_bitwise_equal,
    assert_close_to,
    assert_same_on_all,
    first_difference,
    noted_collectives,
)

SMALL = 0.002
# ---------------------------------------------------------------- the signature


def test_names_order_kinds_and_defaults_are_torchs():
    ours = inspect.signature(Ours.__init__).parameters
    torchs = inspect.signature(Torchs.__init__).parameters
    if "forward_sync_buffers" in torchs:
        assert list(ours)[: len(torchs)] == list(torchs)
    else:  # An older torch knows fewer.
        assert [name for name in ours if name in torchs] == list(torchs)
    for name, parameter in torchs.items():
        if name != "broadcast_buffers":  # Its default changed from True to None with its new name.
            assert ours[name].default == parameter.default, name
        assert ours[name].kind == parameter.kind, name


def trained(me, kind, args=(), kwargs=None, *, steps=2, flag=None):
    """The gradients of a few steps, and the wrapper."""
    model = build("MLP 1", torch.float64)
    run = kind(model, *args, **(kwargs or {}))
    grads = []
    for step in range(steps):
        run.zero_grad()
        part = share(batch("MLP 1", 2, step, torch.float64), me.rank)
        loss_of(run, *part).backward()
        grads.append(grads_of(run))
    return grads, run


ATTRIBUTES = (
    "device",
    "device_ids",
    "device_type",
    "dim",
    "output_device",
    "is_multi_device_module",
    "broadcast_buffers",
    "forward_sync_buffers",
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "mixed_precision",
    "require_backward_grad_sync",
    "require_forward_param_sync",
    "skip_all_reduce_unused_params",
    "bucket_bytes_cap",
    "bucket_bytes_cap_list",
    "broadcast_bucket_size",
    "parameters_to_ignore",
)

# By position, as torch 2.13 has it: each value differs from its default where it may.
BY_POSITION = (
    None,  # device_ids
    None,  # output_device
    1,  # dim
    None,  # broadcast_buffers
    False,  # init_sync
    None,  # process_group
    SMALL,  # bucket_cap_mb
    True,  # find_unused_parameters
    False,  # check_reduction
    True,  # gradient_as_bucket_view
    False,  # static_graph
    None,  # delay_all_reduce_named_params
    None,  # param_to_hook_all_reduce
    None,  # mixed_precision
    None,  # device_mesh
    False,  # skip_all_reduce_unused_params
    [SMALL, 2 * SMALL],  # bucket_cap_mb_list
    True,  # batched_grad_copy
    False,  # forward_sync_buffers
)

BY_KEYWORD = {
    "device_ids=[]": {"device_ids": []},
    "dim": {"dim": 1},
    "init_sync": {"init_sync": False},
    "bucket_cap_mb": {"bucket_cap_mb": SMALL},
    "bucket_cap_mb=25": {"bucket_cap_mb": 25},
    "bucket_cap_mb_list": {"bucket_cap_mb_list": [SMALL, 0.004]},
    "both caps": {"bucket_cap_mb": 1, "bucket_cap_mb_list": [SMALL]},
    "find_unused_parameters": {"find_unused_parameters": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "skip_all_reduce_unused_params": {"skip_all_reduce_unused_params": True},
    "batched_grad_copy": {"batched_grad_copy": True},
    "forward_sync_buffers": {"forward_sync_buffers": False},
}


def beside_torch(me):
    """Every argument that needs no object of this process: the same attributes and the same gradients."""
    for name, args, kwargs in [
        ("by position", BY_POSITION, {}),
        *((name, (), kwargs) for name, kwargs in BY_KEYWORD.items()),
    ]:
        (ours, run), (torchs, their_run) = (
            trained(me, kind, args, kwargs, steps=3) for kind in (Ours, Torchs)
        )
        assert_bitwise_equal({name: ours}, {name: torchs})
        found = {a: getattr(run, a) for a in ATTRIBUTES}
        assert found == {a: getattr(their_run, a) for a in ATTRIBUTES}, name
    return ours


def test_each_argument_beside_torch(ranks):
    outcomes = ranks(2).run(beside_torch)
    assert_same_on_all(outcomes)


def caps(me):
    """The buckets that the caps give, in bytes."""
    sizes = []
    for kwargs in (
        {"bucket_cap_mb": 0.002},
        {"bucket_cap_mb": 0.008},
        {"bucket_cap_mb_list": [0.002, 0.008]},
        {"bucket_cap_mb": 0.002, "bucket_cap_mb_list": [0.008]},
        {},
    ):
        _, run = trained(me, Ours, (), kwargs)
        sizes.append([bucket.nbytes for bucket in run.reducer.plan.buckets])
    return sizes


def test_caps_make_buckets(ranks):
    outcomes = ranks(2).run(caps)
    assert_same_on_all(outcomes)
    small, large, list_, both, default = outcomes[0]
    assert len(small) > len(large) > len(default) == 1
    # A cap closes a bucket with the parameter that reaches it.
    assert all(size >= 0.002 * 2**20 for size in small[:-1])
    assert all(size >= 0.008 * 2**20 for size in large[:-1])
    assert list_[0] == small[0]
    assert all(size >= 0.008 * 2**20 for size in list_[1:-1])
    assert both == large


# ---------------------------------------------------------------- groups and devices


def groups(me):
    """The default group, one given, one from a mesh: the same gradients, over the ranks of that group."""
    grads = {}
    for name, kwargs in {
        "default": {},
        "given": {"process_group": dist.new_group([0, 1])},
        "mesh": {"device_mesh": init_device_mesh("cpu", (2,))},
    }.items():
        grads[name], run = trained(me, Ours, (), kwargs)
        assert run.process_group.size() == 2
        assert run.device_mesh is kwargs.get("device_mesh")
    alone = [dist.new_group([rank]) for rank in range(2)][me.rank]
    grads["alone"], run = trained(me, Ours, (), {"process_group": alone})
    local = build("MLP 1", torch.float64)
    loss_of(local, *share(batch("MLP 1", 2, 0, torch.float64), me.rank)).backward()
    return grads, grads_of(local)


def test_the_ranks_are_those_of_the_group(ranks):
    outcomes = ranks(2).run(groups)
    for grads, local in outcomes:
        assert_bitwise_equal(grads["given"], grads["default"])
        assert_bitwise_equal(grads["mesh"], grads["default"])
        assert_bitwise_equal(grads["alone"][0], local)
        assert first_difference(grads["alone"], grads["default"]) is not None
    assert_same_on_all([grads["default"] for grads, _ in outcomes])


def subgroup(me):
    """Ranks 0 and 2 of three train together, and rank 0 of the group is where the values come from."""
    members = dist.new_group([0, 2])
    if me.rank == 1:
        return None
    torch.manual_seed(me.rank)
    model = nn.Linear(3, 2).double()
    before = model.weight.detach().clone()
    run = Ours(model, process_group=members)
    run(torch.full((1, 3), me.rank + 1.0, dtype=torch.float64)).sum().backward()
    data = run._get_ddp_logging_data()
    return before, model.weight.detach(), grads_of(run), data["rank"], data["world_size"]


def test_a_group_of_some_of_the_ranks(ranks):
    first, nothing, third = ranks(3).run(subgroup)
    assert nothing is None
    assert_bitwise_equal(third[1], first[0])
    assert not torch.equal(third[0], first[0])
    assert_same_on_all([first[2], third[2]])
    assert_bitwise_equal(first[2]["weight"], torch.full((2, 3), 2.0, dtype=torch.float64))
    assert [each[3:] for each in (first, third)] == [(0, 2), (1, 2)]


# ---------------------------------------------------------------- what is refused


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LazyLinear(3)


def frozen():
    return nn.Linear(2, 2).requires_grad_(False)


def half_on_meta():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].to("meta")
    return model


def linear():
    return nn.Linear(2, 2)


def both_groups():
    return {"process_group": dist.group.WORLD, "device_mesh": init_device_mesh("cpu", (2,))}


# What is passed, the built-in type that torch raises, and words that both say.
REFUSED = {
    "nothing to train": (frozen, dict, RuntimeError, "doesn't have any parameter that requires"),
    "lazy": (Lazy, dict, RuntimeError, "Modules with uninitialized parameters can't be used"),
    "two devices": (half_on_meta, dict, Exception, ""),
    "two ids": (
        linear,
        lambda: {"device_ids": [0, 1]},
        ValueError,
        "device_ids can only be None or contain a single element",
    ),
    "an id on a CPU": (
        linear,
        lambda: {"device_ids": [0]},
        ValueError,
        "device_ids and output_device",
    ),
    "an output on a CPU": (
        linear,
        lambda: {"output_device": 1},
        ValueError,
        "device_ids and output_device",
    ),
    "group and mesh": (
        linear,
        both_groups,
        RuntimeError,
        "Cannot specify both process_group and device_mesh",
    ),
    "a mesh of two dimensions": (
        linear,
        lambda: {"device_mesh": init_device_mesh("cpu", (2, 1))},
        RuntimeError,
        "Only 1D device mesh is supported",
    ),
    "delayed without a hook": (
        linear,
        lambda: {"delay_all_reduce_named_params": []},
        ValueError,
        "need to be set at the same time",
    ),
    "a hook without delayed": (
        linear,
        lambda: {"param_to_hook_all_reduce": nn.Parameter(torch.ones(1))},
        ValueError,
        "need to be set at the same time",
    ),
}


def refusals(me):
    said = {}
    for name, (make, kwargs, _, _) in REFUSED.items():
        for kind in (Ours, Torchs):
            options = kwargs()
            try:
                kind(make(), **options)
            except Exception as error:  # noqa: BLE001 - compared in the test
                bases = [base.__name__ for base in type(error).__mro__]
                said[name, kind.__module__] = bases, str(error)
    # Nothing is left behind that a later wrapper would trip over.
    _, run = trained(me, Ours)
    return said, run.reducer.reductions


def test_what_torch_refuses_is_refused_with_the_reason(ranks):
    for said, reductions in ranks(2).run(refusals):
        assert reductions == 2
        for name, (_, _, *kinds, words) in REFUSED.items():
            for module in ("rankstep.parallel.ddp", "torch.nn.parallel.distributed"):
                bases, text = said[name, module]
                assert any(kind.__name__ in bases for kind in kinds), (name, module, bases)
                assert words in text, (name, module, text)


CAPS = (0, -1, "auto-ish", [], [1, 0], ["a"], float("nan"), object())


def caps_refused(me):
    said = []
    for value in CAPS:
        name = "bucket_cap_mb_list" if isinstance(value, list) else "bucket_cap_mb"
        try:
            Ours(linear(), **{name: value})
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("")
    # A name that no parameter has would never be delayed.
    model = linear()
    try:
        Ours(
            model,
            delay_all_reduce_named_params=[("wieght", model.weight)],
            param_to_hook_all_reduce=model.bias,
        )
    except ValueError as error:
        said.append(str(error))
    return said


def test_impossible_caps_and_names_are_refused(ranks):
    for said in ranks(2).run(caps_refused):
        assert len(said) == len(CAPS) + 1
        assert all("MiB" in text for text in said[:-1]), said
        assert "'wieght'" in said[-1]


def different_caps(me):
    Ours(linear(), bucket_cap_mb=(1, 2)[me.rank])


def test_caps_that_differ_between_ranks_are_refused(ranks):
    for outcome in ranks(2).outcomes(different_caps, reusable=True):
        assert outcome.error_type == "ModelMismatchError"
        assert "1048576" in outcome.error
        assert "2097152" in outcome.error


# ---------------------------------------------------------------- deprecations


def deprecated(me):
    """The warnings of both wrappers, by class and text, and what each argument then means."""
    said = []
    for kwargs in (
        {"broadcast_buffers": True},
        {"broadcast_buffers": False},
        {"broadcast_buffers": False, "forward_sync_buffers": True},
        {"check_reduction": True},
        {},
    ):
        row = []
        for kind in (Ours, Torchs):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run = kind(CNN(batch_norm=True), **kwargs)
            texts = [(w.category.__name__, str(w.message), w.filename) for w in caught]
            row.append((texts, run.forward_sync_buffers, run.broadcast_buffers))
        said.append(row)
    run.broadcast_buffers = False
    assert run.forward_sync_buffers is False
    return said


def test_deprecations_warn_as_torchs(ranks):
    for said in ranks(2).run(deprecated):
        for (ours, *our_flags), (torchs, *their_flags) in said:
            assert our_flags == their_flags
            assert [category for category, _, _ in ours] == [c for c, _, _ in torchs]
            # The caller's line, so that it can be found.
            assert {filename for _, _, filename in ours} <= {__file__}
        (old, _), (off, _), (both, _), (check, _), (nothing, _) = said
        assert "forward_sync_buffers" in old[0][0][1]
        assert "forward_sync_buffers" in off[0][0][1]
        assert "broadcast_buffers" in both[0][0][1]
        assert "check_reduction" in check[0][0][1]
        assert nothing[0] == []


# ---------------------------------------------------------------- what single arguments do


def without_init_sync(me):
    """No collective at construction, and no value is touched."""
    torch.manual_seed(5)
    model = CNN(batch_norm=True)
    if me.rank == 1:
        model.norm1.running_mean.fill_(3.0)
    with noted_collectives(Hub) as called:
        run = Ours(model, init_sync=False)
    with noted_collectives(Hub) as otherwise:
        Ours(CNN(batch_norm=True))
    return called, {each.name for each in otherwise}, float(run.module.norm1.running_mean[0])


def test_without_init_sync_construction_talks_to_nobody(ranks):
    first, second = ranks(2).run(without_init_sync)
    for called, otherwise, _ in (first, second):
        assert called == []
        assert {"broadcast"} <= otherwise
    assert (first[2], second[2]) == (0.0, 3.0)


class Heads(nn.Module):
    """A stem and four heads, each its own bucket under a small cap."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Linear(12, 12)
        self.heads = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, x, used):
        x = self.stem(x).tanh()
        return sum(self.heads[i](x).tanh() for i in used)


def rows(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(3, 12, dtype=torch.float64, generator=generator)


def skipping(me, skip):
    """Heads that nobody uses: with the option their buckets do not travel."""
    model = Heads().double()
    run = Ours(model, bucket_cap_mb=0.0001, skip_all_reduce_unused_params=skip)
    steps = []
    for step, used in enumerate([(0, 1, 2, 3), (0,), (1, 2), (0, 1, 2, 3), ()]):
        run.zero_grad()
        x = rows(me.rank, step)
        out = run(x, used) if used else model.stem(x)
        with noted_collectives(Hub) as called:
            out.sum().backward()
        wanted = Heads().double()
        for rank in range(2):
            x = rows(rank, step)
            out = wanted(x, used) if used else wanted.stem(x)
            (out.sum() / 2).backward()
        assert_close_to(
            {n: g for n, g in grads_of(run).items() if g is not None},
            {n: g for n, g in grads_of(wanted).items() if g is not None},
            rel=1e-14,
        )
        assert [n for n, g in grads_of(run).items() if g is None] == [
            n for n, g in grads_of(wanted).items() if g is None
        ]
        steps.append([each.name for each in called].count("allreduce"))
    return steps, len(run.reducer.buckets)


def test_buckets_that_nobody_uses_are_skipped_when_asked(ranks):
    # Each layer is a bucket of its own, the stem's the last one.
    assert ranks(2).run(skipping, False) == [([5] * 5, 5)] * 2
    assert ranks(2).run(skipping, True) == [([5, 2, 3, 5, 1], 5)] * 2


def delayed(me):
    """Delayed parameters leave last, and get the same gradients; torch's own leaves them to themselves for a while."""
    model = build("MLP 1", torch.float64)
    last = list(model.layers)[-1]
    run = Ours(
        model,
        bucket_cap_mb=0.0001,
        delay_all_reduce_named_params=[
            ("layers.0.weight", model.layers[0].weight),
            (f"layers.{len(model.layers) - 1}.weight", last.weight),
        ],
        param_to_hook_all_reduce=model.layers[1].weight,
    )
    plain = Ours(build("MLP 1", torch.float64), bucket_cap_mb=0.0001)
    for step in range(3):
        for each in (run, plain):
            each.zero_grad()
            part = share(batch("MLP 1", 2, step, torch.float64), me.rank)
            loss_of(each, *part).backward()
        assert_bitwise_equal(grads_of(run), grads_of(plain))
    names = [spec.name for spec in run.reducer.plan.params]
    order = [[names[i] for i in each.reducer.plan.order] for each in (run, plain)]
    return order, run.reducer.last_step.launched_in_backward


def test_delayed_parameters_leave_last(ranks):
    for (delayed_order, plain_order), early in ranks(2).run(delayed):
        late = {"layers.0.weight", plain_order[0], plain_order[1]} & set(delayed_order[-2:])
        assert len(late) == 2
        assert set(delayed_order[-2:]) != set(plain_order[-2:])
        assert sorted(delayed_order) == sorted(plain_order)
        assert early > 0


# ---------------------------------------------------------------- mixed precision


PRECISIONS = {
    "bf16": _MixedPrecision(param_dtype=torch.bfloat16),
    "fp16": _MixedPrecision(param_dtype=torch.float16),
    "reduce": _MixedPrecision(reduce_dtype=torch.float16),
    "all": _MixedPrecision(torch.bfloat16, torch.float16, torch.bfloat16),
    "buffers": _MixedPrecision(buffer_dtype=torch.float64),
    "nothing": _MixedPrecision(),
}


class Normed(nn.Module):
    """A buffer of floats and one of integers, a keyword input, and an integer input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.table = nn.Embedding(9, 6)
        self.layer = nn.Linear(6, 4)
        self.register_buffer("scale", torch.full((4,), 1.5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens, *, shift):
        self.calls += 1
        return self.layer(self.table(tokens) + shift) * self.scale.to(shift.dtype)


def pieces(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(9, (5,), generator=generator)
    return tokens, torch.randn(5, 6, generator=generator)


def in_low_precision(model, config, rank, step):
    """What one rank computes, written out: casts of weights and inputs, gradients in full precision."""
    dtype = config.param_dtype or torch.float32
    tokens, shift = pieces(rank, step)
    small = {name: param.to(dtype) for name, param in model.named_parameters()}
    buffers = {"scale": model.scale.to(config.buffer_dtype or torch.float32)}
    out = torch.func.functional_call(
        model, {**small, **buffers}, (tokens,), {"shift": shift.to(dtype)}
    )
    out.float().square().sum().backward()
    return grads_of(model), out.dtype


def mixed(me, name):
    config = PRECISIONS[name]
    run = Ours(Normed(), mixed_precision=config)
    steps = []
    for step in range(2):
        run.zero_grad()
        tokens, shift = pieces(me.rank, step)
        out = run(tokens, shift=shift)
        out.float().square().sum().backward()
        parts = [in_low_precision(Normed(), config, rank, step)[0] for rank in range(2)]
        reduce_dtype = config.reduce_dtype or torch.float32
        wanted = {
            n: ((parts[0][n] / 2).to(reduce_dtype) + (parts[1][n] / 2).to(reduce_dtype)).float()
            for n in parts[0]
        }
        assert_bitwise_equal(grads_of(run), wanted)
        steps.append((out.dtype, grads_of(run)))
    state = run.state_dict()
    dtypes = {n: tensor.dtype for n, tensor in state.items()}
    inner = run.module
    # The optimizer works on the full weights.
    stepper = torch.optim.SGD(run.parameters(), lr=0.1)
    before = inner.layer.weight.detach().clone()
    stepper.step()
    assert_close_to(inner.layer.weight.detach(), before - 0.1 * inner.layer.weight.grad, rel=1e-6)
    return steps, dtypes, int(inner.calls)


@pytest.mark.parametrize("name", PRECISIONS)
def test_mixed_precision(ranks, name):
    config = PRECISIONS[name]
    outcomes = ranks(2).run(mixed, name)
    assert_same_on_all([[grads for _, grads in steps] for steps, _, _ in outcomes])
    exact = Normed()
    for rank in range(2):
        tokens, shift = pieces(rank, 0)
        (exact(tokens, shift=shift).square().sum() / 2).backward()
    for steps, dtypes, calls in outcomes:
        assert calls == 2
        assert steps[0][0] == (config.param_dtype or torch.float32)
        assert {dtypes["module.layer.weight"], dtypes["module.table.weight"]} == {torch.float32}
        assert dtypes["module.calls"] == torch.int64
        assert dtypes["module.scale"] == (config.buffer_dtype or torch.float32)
        found = steps[0][1]
        if name in ("nothing", "buffers"):
            assert_close_to(found, grads_of(exact), rel=1e-6)
        else:
            # Close to full precision, and not equal to it.
            assert_close_to(found, grads_of(exact), rel=0.05)
            assert first_difference(found, grads_of(exact)) is not None


def mixed_with_the_rest(me):
    """Mixed precision with no_sync, a count, a copy, and ignored parameters."""
    config = PRECISIONS["bf16"]
    run = Ours(Normed(), mixed_precision=config)
    with run.no_sync():
        tokens, shift = pieces(me.rank, 0)
        run.backward(run(tokens, shift=shift).float().square().sum(), count=5)
    tokens, shift = pieces(me.rank, 1)
    run.backward(run(tokens, shift=shift).float().square().sum(), count=2 + me.rank)
    twin = copy.deepcopy(run)
    tokens, shift = pieces(me.rank, 2)
    assert twin(tokens, shift=shift).dtype == torch.bfloat16
    return grads_of(run)


def test_mixed_precision_with_no_sync_and_counts(ranks):
    outcomes = ranks(2).run(mixed_with_the_rest)
    assert_same_on_all(outcomes)
    model = Normed()
    for rank in range(2):
        for step in range(2):
            in_low_precision(model, PRECISIONS["bf16"], rank, step)
    wanted = {n: grad / (5 + 2 + 5 + 3) for n, grad in grads_of(model).items()}
    assert_close_to(outcomes[0], wanted, rel=1e-6)


# ---------------------------------------------------------------- after construction


def static_graph_later(me):
    """``_set_static_graph`` before training, twice, and too late."""
    said = []
    for kind in (Ours, Torchs):
        run = kind(build("MLP 1", torch.float64))
        run._set_static_graph()
        row = [run.static_graph, run._get_ddp_logging_data()["static_graph"]]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run._set_static_graph()
        row.append([str(w.message) for w in caught])
        late = kind(build("MLP 1", torch.float64))
        loss_of(late, *share(batch("MLP 1", 2, 0, torch.float64), me.rank)).backward()
        try:
            late._set_static_graph()
        except RuntimeError as error:
            row.append(str(error)[:60])
        said.append(row)
    return said


def test_a_static_graph_may_be_promised_after_construction(ranks):
    for ours, torchs in ranks(2).run(static_graph_later):
        assert ours == torchs


def ignoring(me):
    """``_set_params_and_buffers_to_ignore_for_model`` of either class serves either wrapper."""
    results = []
    for marker in (Ours, Torchs):
        for kind in (Ours, Torchs):
            torch.manual_seed(me.rank)
            model = CNN(batch_norm=True)
            names = ["head.weight", "norm1.running_mean"]
            marker._set_params_and_buffers_to_ignore_for_model(model, names)
            run = kind(model)
            assert set(run.parameters_to_ignore) == set(names)
            with torch.no_grad():
                model.norm1.running_mean.fill_(me.rank + 1.0)
            generator = torch.Generator().manual_seed(me.rank)
            x = torch.randn(4, 1, 8, 8, generator=generator)
            run.eval()
            run(x).square().mean().backward()
            params = len(list(run._get_data_parallel_params(model)))
            state = run.module.state_dict()
            weights = {n: t for n, t in state.items() if "batches" not in n}
            results.append((params, grads_of(run), weights))
    return results


def test_ignored_names(ranks):
    outcomes = ranks(2).run(ignoring)
    for results in outcomes:
        for result in results[1:]:
            assert_bitwise_equal(result, results[0])
        assert results[0][0] == len(list(CNN(batch_norm=True).parameters())) - 1
    first, second = (results[0] for results in outcomes)
    for name in ("head.weight",):
        assert not torch.equal(first[1][name], second[1][name])
        assert not torch.equal(first[2][name], second[2][name])
    assert not torch.equal(first[2]["norm1.running_mean"], second[2]["norm1.running_mean"])
    assert_bitwise_equal(first[1]["head.bias"], second[1]["head.bias"])
    assert_bitwise_equal(first[2]["norm1.running_var"], second[2]["norm1.running_var"])
