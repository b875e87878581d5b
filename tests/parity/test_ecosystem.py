"""What libraries and public scripts do with a wrapper behind an isinstance check, done here without those libraries.

Each test names whose steps it takes. Where torch's wrapper can take the same steps, it does so beside ours.
"""

from __future__ import annotations

import contextlib
import copy
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parity_models import CNN, batch, build, grads_of, loss_of, share, state_of
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel as Torchs
from torch.profiler import ProfilerActivity, profile

from rankstep import DistributedDataParallel as Ours
from rankstep.testing import (
    assert_bitwise_equal,
    assert_close_to,
    assert_same_on_all,
    first_difference,
)

SMALL = 0.002


def part(me, step):
    return share(batch("MLP 1", me.world_size, step, torch.float64), me.rank)


def wrapped(kind=Ours, **options):
    return kind(build("MLP 1", torch.float64), bucket_cap_mb=SMALL, **options)


def whole(*steps, world=2):
    model = build("MLP 1", torch.float64)
    for step in steps:
        loss_of(model, *batch("MLP 1", world, step, torch.float64)).backward()
    return grads_of(model)


# ---------------------------------------------------------------- Accelerate


def extract(model, *, keep_compiled=False):
    """``accelerate.utils.extract_model_from_parallel``, what it does for this class."""
    while isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
        model = model.module
    return model


def accelerate(me):
    """accumulate() with no_sync by duck typing, trigger_sync_in_backward, unwrap, and kwargs by name."""
    # DistributedDataParallelKwargs passes these, and nothing else.
    kwargs = {
        "dim": 0,
        "bucket_cap_mb": 25,
        "find_unused_parameters": False,
        "check_reduction": False,
        "gradient_as_bucket_view": False,
        "static_graph": False,
    }
    results = []
    for kind in (Ours, Torchs):
        run = kind(build("MLP 1", torch.float64), device_ids=None, output_device=None, **kwargs)
        assert extract(run) is run.module
        assert extract(nn.Linear(2, 2)).__class__ is nn.Linear
        no_sync = getattr(run, "no_sync", contextlib.nullcontext)
        history = []
        with no_sync():
            loss_of(run, *part(me, 0)).backward()
            loss = loss_of(run, *part(me, 1))
        # The forward ran inside, its backward is to be synchronised all the same.
        before = run.require_backward_grad_sync, run.require_forward_param_sync
        run.require_backward_grad_sync = True
        run.require_forward_param_sync = True
        run.reducer.prepare_for_backward([])
        try:
            loss.backward()
        finally:
            run.require_backward_grad_sync, run.require_forward_param_sync = before
        history.append(grads_of(run))
        run.zero_grad()
        loss_of(run, *part(me, 2)).backward()
        history.append(grads_of(run))
        results.append((history, list(run.state_dict()), before))
    return results


def test_accelerates_steps(ranks):
    outcomes = ranks(2).run(accelerate)
    for ours, torchs in outcomes:
        assert_bitwise_equal(ours[0][1], torchs[0][1])
        assert ours[1:] == torchs[1:]
        assert_close_to(ours[0][0], whole(0, 1), rel=1e-13)
    assert_same_on_all([ours[0] for ours, _ in outcomes])


def prepared(me):
    """A wrapped model is marked as prepared by a plain attribute, and Join gets it as one of several joinables."""
    run = wrapped()
    run._is_accelerate_prepared = True
    assert run._is_accelerate_prepared
    assert isinstance(run, Joinable)
    assert not hasattr(run.module, "_is_accelerate_prepared")
    assert (run.join_process_group, str(run.join_device)) == (dist.group.WORLD, "cpu")
    with Join([run]):
        for step in range(1 + me.rank):
            run.zero_grad()
            loss_of(run, *part(me, step)).backward()
    # The mixed-precision wrapper of forward that Accelerate puts on the inner or outer module.
    inner = run.forward
    run.forward = lambda *args: inner(*args).float()
    assert run(part(me, 0)[0]).dtype == torch.float32
    run.zero_grad()
    nn.functional.cross_entropy(run(part(me, 5)[0]), part(me, 5)[1]).backward()
    del run.forward
    return grads_of(run)


def test_marks_joins_and_a_forward_that_is_replaced(ranks):
    outcomes = ranks(2).run(prepared)
    assert_same_on_all(outcomes)
    assert_close_to(outcomes[0], whole(5), rel=1e-5)


def name_replaced(me, places):
    """The class looked up by name at call time, and replaced there for a while."""
    modules = [torch.nn.parallel, torch.nn.parallel.distributed]
    with contextlib.ExitStack() as stack:
        for module in modules[:places]:
            stack.enter_context(mock.patch.object(module, "DistributedDataParallel", Ours))
        run = torch.nn.parallel.DistributedDataParallel(build("MLP 1", torch.float64))
        assert isinstance(run, torch.nn.parallel.DistributedDataParallel)
        loss_of(run, *part(me, 0)).backward()
    assert isinstance(run, Torchs)
    assert type(run) is Ours
    return grads_of(run)


@pytest.mark.parametrize("places", [1, 2])
def test_the_class_under_torchs_name(ranks, places):
    for grads in ranks(2).run(name_replaced, places):
        assert_close_to(grads, whole(0), rel=1e-13)


# ---------------------------------------------------------------- Lightning


def find_tensors(value):
    """``lightning.pytorch.overrides.distributed._find_tensors``."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in find_tensors(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in find_tensors(item)]
    return []


def lightning(me, static):
    """Manual optimization: sync off in forward, then prepare by hand; teardown reads the record and unwraps."""
    results = []
    for kind in (Ours, Torchs):
        run = wrapped(kind, static_graph=static, find_unused_parameters=False)
        run.register_comm_hook(state=None, hook=mean_hook)
        history = []
        for step in range(3):
            run.zero_grad()
            # LightningModule.training_step in manual optimization runs inside forward with sync off.
            run.require_backward_grad_sync = False
            loss = loss_of(run, *part(me, step))
            run.require_backward_grad_sync = True
            # DDPStrategy.pre_backward -> prepare_for_backward.
            if torch.is_grad_enabled() and run.require_backward_grad_sync:
                run.require_forward_param_sync = True
                args = (
                    find_tensors(loss)
                    if run.find_unused_parameters and not run.static_graph
                    else []
                )
                reducer = run.reducer
                reducer._rebuild_buckets()
                reducer.prepare_for_backward(args)
            else:
                run.require_forward_param_sync = False
            # DDPStrategy.post_backward for a static graph.
            if run.static_graph and step == 0 and kind is Ours:
                run.reducer._delay_all_reduce()
            loss.backward()
            history.append(grads_of(run))
        data = run._get_ddp_logging_data()
        # torch keeps this record only when it looks for unused parameters; it must at least be there to read.
        results.append((history, data.get("can_set_static_graph") or kind is Torchs))
        if static:
            break
    assert isinstance(run.module, nn.Module)
    assert isinstance(run.parameters_to_ignore, set)
    return results


def mean_hook(_, bucket):
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda f: f.value()[0])


@pytest.mark.parametrize("static", [False, True])
def test_lightnings_manual_optimization(ranks, static):
    outcomes = ranks(2).run(lightning, static)
    for results in outcomes:
        for history, can_be_static in results:
            for step, grads in enumerate(history):
                assert_close_to(grads, whole(step), rel=1e-13)
            assert can_be_static
    assert_same_on_all([results[0][0] for results in outcomes])


def never_static(me):
    """The record says that the graph was not static once it was not; a run without any step tears down, too."""
    run = wrapped()
    before = run._get_ddp_logging_data()
    last = run.module.layers[-1]
    for step in range(3):
        run.zero_grad()
        loss = loss_of(run, *part(me, step))
        rest = [p for p in run.parameters() if all(p is not q for q in last.parameters())]
        torch.autograd.backward(loss, inputs=rest if step == 2 else None)
    after = run._get_ddp_logging_data()
    return bool(before["can_set_static_graph"]), bool(after["can_set_static_graph"])


def test_the_record_knows_whether_the_graph_was_static(ranks):
    assert ranks(2).run(never_static) == [(True, False)] * 2


def record(me):
    """The keys of torch's record that libraries and logs read, and their values where they must agree."""
    keys = [
        "module_name",
        "world_size",
        "rank",
        "backend_name",
        "dtypes",
        "num_parameter_tensors",
        "total_parameter_size_bytes",
        "bucket_cap_bytes",
        "find_unused_parameters",
        "gradient_as_bucket_view",
        "static_graph",
        "broadcast_buffers",
        "has_sync_bn",
        "iteration",
        "has_rebuilt_buckets",
    ]
    found = []
    for kind in (Ours, Torchs):
        run = wrapped(kind)
        run._set_ddp_runtime_logging_sample_rate(1)
        with pytest.raises(ValueError, match="equal or greater than 1"):
            run._set_ddp_runtime_logging_sample_rate(0)
        for step in range(3):
            run.zero_grad()
            loss_of(run, *part(me, step)).backward()
        run(part(me, 0)[0])
        data = run._get_ddp_logging_data()
        # torch leaves the switches out that were never on.
        found.append({key: data.get(key, 0) for key in keys if key != "iteration"})
        assert data["iteration"] >= 3
    return found


def test_the_record_is_torchs(ranks):
    for ours, torchs in ranks(2).run(record):
        assert ours == torchs


# ---------------------------------------------------------------- torch's own users of the class


def pipeline(me):
    """torch.distributed.pipelining: no_sync for all micro-batches, then prepare and one more backward."""
    run = wrapped()
    with run.no_sync():
        for step in range(2):
            loss_of(run, *part(me, step)).backward()
    loss = loss_of(run, *part(me, 2))
    run.reducer.prepare_for_backward([loss])
    loss.backward()
    return grads_of(run)


def test_pipeline_stages(ranks):
    for grads in ranks(2).run(pipeline):
        assert_close_to(grads, whole(0, 1, 2), rel=1e-13)


def profiled(me):
    """Labels that profiles are searched for: forward, one all-reduce for each bucket, the look for unused ones."""
    seen = []
    for kind in (Ours, Torchs):
        run = kind(build("MLP 1"), find_unused_parameters=True, bucket_cap_mb=25)
        for step in range(3):
            x, y = share(batch("MLP 1", 2, step), me.rank)
            with profile(activities=[ProfilerActivity.CPU]) as found:
                # One head of the graph unused, so that torch has something to look for.
                nn.functional.cross_entropy(run(x), y).backward()
        names = [event.name for event in found.events()]
        seen.append(
            {
                "forward": names.count("DistributedDataParallel.forward"),
                "all_reduce": names.count("gloo:all_reduce"),
                "search": any("search_unused_parameters" in name for name in names),
            }
        )
        del run
    return seen


def test_labels_in_profiles(ranks):
    for ours, torchs in ranks(2).run(profiled):
        assert ours["forward"] == torchs["forward"] == 1
        assert ours["search"] is torchs["search"] is True
        # One bucket, one all-reduce; torch needs a second one for the map of used parameters.
        assert ours["all_reduce"] == 1
        assert torchs["all_reduce"] == 2


def active(me):
    """The class attribute that the compiler reads is set during forward only, and restored for nested wrappers."""

    class Looks(nn.Module):
        def __init__(self, inner=None):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.inner = inner
            self.seen = []

        def forward(self, x):
            self.seen.append(Torchs._active_ddp_module)
            x = self.layer(x)
            if self.inner is not None:
                x = self.inner(x)
                self.seen.append(Torchs._active_ddp_module)
            return x

    inner = Ours(Looks())
    outer = Ours(Looks(inner))
    outer(torch.ones(1, 2)).sum().backward()
    assert outer.module.seen == [outer, outer]
    assert inner.module.seen == [inner]
    assert Torchs._active_ddp_module is None
    with contextlib.suppress(RuntimeError):
        outer(torch.ones(1, 3))
    assert Torchs._active_ddp_module is None
    assert outer.bucket_bytes_cap >= 1024 * 1024
    return True


def test_the_active_module(ranks):
    assert ranks(2).run(active) == [True, True]


def same_state(me):
    """A helper of torch's that copies states works on the wrapper's module."""
    torch.manual_seed(me.rank)
    run = Ours(CNN(batch_norm=True))
    with torch.no_grad():
        run.module.head.weight.fill_(float(me.rank))
    _sync_module_states(run.module, dist.group.WORLD, 1024, 0, params_and_buffers_to_ignore=set())
    return state_of(run)


def test_torchs_helper_copies_states(ranks):
    assert_same_on_all(ranks(2).run(same_state))


# ---------------------------------------------------------------- public scripts


def micro_steps(me):
    """Scripts write ``require_backward_grad_sync`` around micro-steps and use no context manager."""
    results = []
    for kind in (Ours, Torchs):
        run = wrapped(kind)
        stepper = torch.optim.AdamW(run.parameters(), lr=0.01)
        for step in range(3):
            for micro in range(4):
                run.require_backward_grad_sync = micro == 3
                (loss_of(run, *part(me, 10 * step + micro)) / 4).backward()
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        results.append(state_of(run))
    return results


def test_micro_steps_by_attribute(ranks):
    outcomes = ranks(2).run(micro_steps)
    for ours, torchs in outcomes:
        assert_bitwise_equal(ours, torchs)
    assert_same_on_all([ours for ours, _ in outcomes])


def detection_script(me):
    """Attributes set on the wrapper and read back, ``.module`` behind checks, a straight call of forward, an EMA."""
    run = wrapped()
    ema = copy.deepcopy(run.module).eval()
    for param in ema.parameters():
        param.requires_grad_(False)
    run.nc, run.hyp, run.names = 80, {"lr": 0.1}, ["a", "b"]
    run.class_weights = torch.ones(80) * me.rank
    assert (run.nc, run.hyp["lr"], run.names[1]) == (80, 0.1, "b")
    stepper = torch.optim.SGD(run.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    accumulates = hasattr(run, "no_sync")
    is_fsdp2 = hasattr(run, "set_requires_gradient_sync")
    for step in range(4):
        x, y = part(me, step)
        out = run.forward(x)
        nn.functional.cross_entropy(out, y).backward()
        for name, param in run.named_parameters():
            if name == "module.layers.0.weight" and step == 1:
                param.grad = None
        stepper.step()
        stepper.zero_grad()
        inner = run.module if hasattr(run, "module") else run
        with torch.no_grad():
            for name, tensor in ema.state_dict().items():
                tensor.mul_(0.9).add_(inner.state_dict()[name].detach(), alpha=0.1)
    matched = [name for name, _ in run.named_parameters() if name.startswith("module.layers")]
    checked = isinstance(run, (nn.parallel.DataParallel, nn.parallel.DistributedDataParallel))
    # This check an ABC registration cannot satisfy; such scripts then read from the wrapper, which falls through.
    by_type = type(run) in (nn.parallel.DataParallel, nn.parallel.DistributedDataParallel)
    plain = run.module if by_type else run
    return (
        state_of(run),
        {name: tensor.clone() for name, tensor in ema.state_dict().items()},
        (
            accumulates,
            is_fsdp2,
            checked,
            by_type,
            len(matched) == len(list(plain.layers.parameters())),
        ),
    )


def test_a_detection_script(ranks):
    outcomes = ranks(2).run(detection_script)
    assert_same_on_all(outcomes)
    assert outcomes[0][2] == (True, False, True, False, True)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, z):
        return self.layer(z).tanh()


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)


def adversarial(me):
    """Two wrappers: critic steps on real and fake, generator steps through a critic that is frozen meanwhile."""
    results = []
    for kind in (Ours, Torchs):
        torch.manual_seed(6)
        generator, critic = kind(Generator().double()), kind(Critic().double())
        steppers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (generator, critic)]
        for step in range(4):
            draw = torch.Generator().manual_seed(100 * step + me.rank)
            z = torch.randn(5, 3, dtype=torch.float64, generator=draw)
            real = torch.randn(5, 4, dtype=torch.float64, generator=draw)
            critic.requires_grad_(True)
            steppers[1].zero_grad()
            fake = generator(z)
            # One forward for both halves: two forwards of one wrapper before one backward are torch's to refuse.
            scores = critic(torch.cat([real, fake.detach()]))
            (scores[5:].mean() - scores[:5].mean()).backward()
            steppers[1].step()
            critic.requires_grad_(False)
            steppers[0].zero_grad()
            (-critic.module(generator(z)).mean()).backward()
            steppers[0].step()
        critic.requires_grad_(True)
        results.append((state_of(generator), state_of(critic)))
    return results


def test_an_adversarial_pair(ranks):
    outcomes = ranks(2).run(adversarial)
    for ours, torchs in outcomes:
        assert_bitwise_equal(ours, torchs)
    assert_same_on_all([ours for ours, _ in outcomes])


class Momentum(nn.Module):
    """An encoder, its slow copy behind ``.data``, and a queue that rank 0 shares, as in contrastive learning."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.encoder = nn.Linear(6, 4)
        self.slow = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("queue", torch.randn(4, 8))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        query = self.encoder(x)
        with torch.no_grad():
            for fast, slow in zip(self.encoder.parameters(), self.slow.parameters(), strict=True):
                slow.data = slow.data * 0.9 + fast.data * 0.1
            key = self.slow(x)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone()], dim=1)
        with torch.no_grad():
            at = int(self.place)
            self.queue[:, at : at + 2] = key[:2].t()
            self.place[0] = (at + 2) % 8
        return logits


def contrastive(me):
    results = []
    for kind in (Ours, Torchs):
        run = kind(Momentum().double())
        stepper = torch.optim.SGD(run.module.encoder.parameters(), lr=0.1)
        for step in range(6):
            draw = torch.Generator().manual_seed(100 * step + me.rank)
            x = torch.randn(3, 6, dtype=torch.float64, generator=draw)
            stepper.zero_grad()
            logits = run(x)
            nn.functional.cross_entropy(logits, torch.zeros(3, dtype=torch.long)).backward()
            stepper.step()
        results.append({n: p.detach() for n, p in run.module.named_parameters()})
    return results


def test_a_slow_encoder_and_a_queue(ranks):
    outcomes = ranks(2).run(contrastive)
    for ours, torchs in outcomes:
        assert_bitwise_equal(ours, torchs)
    assert_same_on_all([ours for ours, _ in outcomes])


def wrappers_in_a_dict(me):
    """Encoder into predictor, two wrappers in one backward, put back as parts of a larger model."""

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(8)
            self.encoder = nn.Linear(6, 5)
            self.predictor = nn.Linear(5, 2)

        def forward(self, x):
            return self.predictor(self.encoder(x).tanh())

    results = []
    for kind in (Ours, Torchs):
        model = Whole().double()
        # The wrappers take the place of the plain modules in the model that owns them.
        model.encoder = kind(model.encoder)
        model.predictor = kind(model.predictor)
        stepper = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            draw = torch.Generator().manual_seed(100 * step + me.rank)
            x = torch.randn(3, 6, dtype=torch.float64, generator=draw)
            stepper.zero_grad()
            model(x).square().mean().backward()
            stepper.step()
        results.append((list(model.state_dict()), [p.detach() for p in model.parameters()]))
    return results


def test_wrappers_put_back_into_a_model(ranks):
    outcomes = ranks(2).run(wrappers_in_a_dict)
    for ours, torchs in outcomes:
        assert_bitwise_equal(ours, torchs)
    assert_same_on_all([ours for ours, _ in outcomes])


def no_sync_forward_only(me):
    """no_sync around the forward alone: here the backward after it is reduced, so that nothing stays local."""
    results = []
    for kind in (Ours, Torchs):
        run = wrapped(kind)
        for step in range(3):
            with run.no_sync() if step < 2 else contextlib.nullcontext():
                loss = loss_of(run, *part(me, step))
            loss.backward()
        results.append(grads_of(run))
    return results


def test_no_sync_around_forward_only_ends_at_the_same_gradient(ranks):
    for ours, torchs in ranks(2).run(no_sync_forward_only):
        # torch leaves the two backwards local and reduces their sum with the third: the same total.
        assert_close_to(ours, whole(0, 1, 2), rel=1e-13)
        assert_close_to(ours, torchs, rel=1e-13)


def evaluation_script(me):
    """Save with torch's prefix, strip it as evaluation scripts do, load into a plain model."""
    run = wrapped()
    loss_of(run, *part(me, 0)).backward()
    saved = {"state_dict": run.state_dict(), "epoch": 3}
    stripped = {key.removeprefix("module."): value for key, value in saved["state_dict"].items()}
    assert all(key.startswith("module.") for key in saved["state_dict"])
    model = build("MLP 2", torch.float64)
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading"):
        model.load_state_dict(stripped)
    model = build("MLP 1", torch.float64)
    for param in model.parameters():
        param.data.zero_()
    model.load_state_dict(stripped)
    run.eval()
    with torch.no_grad():
        assert_bitwise_equal(model(part(me, 1)[0]), run(part(me, 1)[0]))
    # And back into a fresh wrapper, with the prefix and without it.
    for state in (saved["state_dict"], stripped):
        fresh = wrapped()
        fresh.load_state_dict(state)
        assert_bitwise_equal(state_of(fresh), state_of(run))


def test_an_evaluation_script(ranks):
    ranks(2).run(evaluation_script)


def drop_path(me):
    """Layers dropped at random, other ones on each rank, without any flag: as stochastic depth does it."""
    run = wrapped()
    draw = random.Random(me.rank)
    history = []
    for _ in range(6):
        run.zero_grad()
        x, y = part(me, 3)
        for layer in run.module.layers[:-1]:
            x = layer(x).tanh()
        heads = run.module.layers[-1](x)
        scale = draw.choice([0.0, 1.0])
        loss = nn.functional.cross_entropy(heads if scale else heads.detach(), y)
        if scale == 0.0:
            loss = loss + run.module.layers[0].weight.sum() * 0
        # Around the wrapper, as some scripts do.
        loss.backward()
        history.append((scale, grads_of(run)))
    return history


def test_layers_dropped_at_random(ranks):
    first, second = ranks(2).run(drop_path)
    local = {}
    for rank in range(2):
        model = build("MLP 1", torch.float64)
        loss_of(model, *share(batch("MLP 1", 2, 3, torch.float64), rank)).backward()
        local[rank] = grads_of(model)
    seen = set()
    for (a, ours), (b, theirs) in zip(first, second, strict=True):
        assert first_difference(ours, theirs) is None
        seen.add((a, b))
        for name, grad in ours.items():
            wanted = a * local[0][name] / 2 + b * local[1][name] / 2
            if grad is None:
                assert not wanted.any(), name
            elif wanted.any():
                assert_close_to(grad, wanted, rel=1e-13)
            else:
                assert not grad.any(), name
    assert len(seen) > 1
