"""Copies, checkpoints and attributes: what people do with a wrapped model besides training it."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from parity_models import CNN, RandomMLP, batch, build, grads_of, loss_of, share, state_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as Torchs
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rankstep import DistributedDataParallel as Ours
from rankstep.testing import (
    assert_bitwise_equal,
    assert_close_to,
    assert_same_on_all,
    first_difference,
)

SMALL = 0.002


def one_step(run, me, step):
    run.zero_grad()
    loss_of(run, *share(batch("MLP 1", me.world_size, step, torch.float64), me.rank)).backward()
    return grads_of(run)


def whole_batch(step, world=2, model=None):
    model = build("MLP 1", torch.float64) if model is None else model
    model.zero_grad()
    loss_of(model, *batch("MLP 1", world, step, torch.float64)).backward()
    return grads_of(model)


def wrapped(kind=Ours, **options):
    return kind(build("MLP 1", torch.float64), bucket_cap_mb=SMALL, **options)


# ---------------------------------------------------------------- copies that train


def saved_and_loaded(run):
    file = io.BytesIO()
    torch.save(run, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda run: pickle.loads(pickle.dumps(run)),  # noqa: S301 (our own)
    "torch.save": saved_and_loaded,
}


def copied(me, way, steps):
    """The copy and the original train on their own, and each is right."""
    run = wrapped(static_graph=True, find_unused_parameters=True)
    first = [one_step(run, me, step) for step in range(steps)]
    twin = WAYS[way](run)
    assert type(twin) is Ours
    assert twin.reducer is not run.reducer
    assert twin.process_group is dist.group.WORLD
    kept = ("bucket_bytes_cap", "static_graph", "find_unused_parameters", "forward_sync_buffers")
    assert [getattr(twin, name) for name in kept] == [getattr(run, name) for name in kept]
    own = {param.data_ptr() for param in run.parameters()}
    assert own.isdisjoint(param.data_ptr() for param in twin.parameters())
    with torch.no_grad():
        for param in twin.parameters():
            param.mul_(1.5)
    grads = []
    for step in range(steps, steps + 2):
        # In turn, so that a hook left on the wrong parameter would be seen.
        before = grads_of(run)
        in_twin = one_step(twin, me, step)
        assert_bitwise_equal(grads_of(run), before)
        in_run = one_step(run, me, step)
        assert_bitwise_equal(grads_of(twin), in_twin)
        grads.append((in_run, in_twin))
    assert len(twin.reducer.buckets) == len(run.reducer.buckets) > 1
    assert twin.reducer.last_step.launched_in_backward > 0
    return first, grads


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_trains_on_its_own(ranks, way, steps):
    outcomes = ranks(2).run(copied, way, steps)
    assert_same_on_all(outcomes)
    first, grads = outcomes[0]
    for step, found in enumerate(first):
        assert_close_to(found, whole_batch(step), rel=1e-13)
    scaled = build("MLP 1", torch.float64)
    with torch.no_grad():
        for param in scaled.parameters():
            param.mul_(1.5)
    for step, (in_run, in_twin) in enumerate(grads, steps):
        assert_close_to(in_run, whole_batch(step), rel=1e-13)
        assert_close_to(in_twin, whole_batch(step, model=scaled), rel=1e-13)


def copied_without_sync(me):
    """Sync state, hooks and other groups: as torch has it."""
    said = []
    for kind in (Ours, Torchs):
        run = wrapped(kind)
        run.register_comm_hook(None, default_hooks.allreduce_hook)
        twin = copy.deepcopy(run)
        # The hook stays with the original; the copy may have one of its own.
        twin.register_comm_hook(None, default_hooks.fp16_compress_hook)
        rough = one_step(twin, me, 0)
        exact = one_step(run, me, 0)
        grouped = wrapped(kind, process_group=dist.new_group([0, 1]))
        try:
            pickle.dumps(grouped)
        except RuntimeError as error:
            said.append((rough, exact, str(error)))
    return said


def test_hooks_and_groups_are_not_copied(ranks):
    for ours, torchs in ranks(2).run(copied_without_sync):
        assert_bitwise_equal(ours[:2], torchs[:2])
        assert first_difference(ours[0], ours[1]) is not None
        assert "default process group" in ours[2]
        assert ours[2][:60] == torchs[2][:60]


def only_on_rank_0(me):
    """rank 0 keeps a copy for evaluation; later copies and wrappers on all ranks must not notice."""
    run = wrapped()
    if me.rank == 0:
        kept = copy.deepcopy(run)
        assert kept.module.layers[0].weight.shape == run.module.layers[0].weight.shape
    twin = copy.deepcopy(run)
    unsynced = wrapped(init_sync=False)
    fresh = wrapped()
    return [one_step(each, me, 0) for each in (run, twin, unsynced, fresh)]


def test_a_copy_on_one_rank_disturbs_nobody(ranks):
    outcomes = ranks(2).run(only_on_rank_0)
    assert_same_on_all(outcomes)
    for grads in outcomes[0]:
        assert_close_to(grads, whole_batch(0), rel=1e-13)


def averaged_models(me):
    """Averages of weights over steps, as torch's swa_utils keep them, beside torch's wrapper."""
    results = []
    for kind in (Ours, Torchs):
        run = wrapped(kind)
        stepper = torch.optim.SGD(run.parameters(), lr=0.1)
        swa = AveragedModel(run)
        ema = AveragedModel(run.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for step in range(3):
            one_step(run, me, step)
            stepper.step()
            swa.update_parameters(run)
            ema.update_parameters(run.module)
        x, _ = batch("MLP 1", 2, 9, torch.float64)
        with torch.no_grad():
            outputs = swa(x), ema(x)
        results.append((list(swa.state_dict()), state_of(swa.module), outputs, grads_of(run)))
        assert not any(param.grad is not None for param in swa.parameters())
    return results


def test_averaged_models(ranks):
    for ours, torchs in ranks(2).run(averaged_models):
        assert_bitwise_equal(ours, torchs)
        assert ours[0][1].startswith("module.module.layers.0")


def stateless(me):
    """functional_call on the wrapper: other weights, and their gradients, reach nobody else."""
    run = wrapped()
    twice = {name: (param * 2).detach().requires_grad_() for name, param in run.named_parameters()}
    x, y = share(batch("MLP 1", 2, 0, torch.float64), me.rank)
    out = torch.func.functional_call(run, twice, (x,))
    nn.functional.cross_entropy(out, y).backward()
    assert all(param.grad is None for param in run.parameters())
    local = {name.removeprefix("module."): tensor.grad for name, tensor in twice.items()}
    # Its own parameters through it: as always.
    run.zero_grad()
    same = dict(run.named_parameters())
    out = torch.func.functional_call(run, same, (x,))
    nn.functional.cross_entropy(out, y).backward()
    return local, grads_of(run)


def test_functional_call(ranks):
    for rank, (local, grads) in enumerate(ranks(2).run(stateless)):
        doubled = build("MLP 1", torch.float64)
        with torch.no_grad():
            for param in doubled.parameters():
                param.mul_(2)
        loss_of(doubled, *share(batch("MLP 1", 2, 0, torch.float64), rank)).backward()
        assert_bitwise_equal(local, grads_of(doubled))
        assert_close_to(grads, whole_batch(0), rel=1e-13)


# ---------------------------------------------------------------- state_dict


def forms(me):
    """Keys, order and values of both forms, and loading of either into either."""
    torch.manual_seed(me.rank)
    model = CNN(batch_norm=True)
    run = Ours(copy.deepcopy(model))
    theirs = Torchs(copy.deepcopy(model))
    prefixed, plain = run.state_dict(), run.module.state_dict()
    assert list(prefixed) == list(theirs.state_dict())
    assert list(prefixed) == [f"module.{name}" for name in plain]
    assert_bitwise_equal(prefixed, dict(theirs.state_dict()))
    assert [name for name, _ in run.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert [name for name, _ in run.named_modules()] == [n for n, _ in theirs.named_modules()]
    other = CNN(batch_norm=True)
    with torch.no_grad():
        for param in other.parameters():
            param.fill_(0.5)
    with_prefix = {f"module.{name}": tensor for name, tensor in other.state_dict().items()}
    loaded = []
    for state in (other.state_dict(), with_prefix):
        target = Ours(copy.deepcopy(model))
        result = target.load_state_dict(state)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        loaded.append(target.module.state_dict())
    assert_bitwise_equal(loaded[0], other.state_dict())
    assert_bitwise_equal(loaded[1], other.state_dict())
    # torch's form loads into a plain model by torch's own helper, and a plain one into torch's wrapper.
    nn.modules.utils.consume_prefix_in_state_dict_if_present(prefixed, "module.")
    CNN(batch_norm=True).load_state_dict(prefixed)
    return list(with_prefix)


def test_both_forms_of_a_state(ranks):
    first, second = ranks(2).run(forms)
    assert first == second


def loading_what_does_not_fit(me):
    run, theirs = wrapped(), wrapped(Torchs)
    said = []
    whole = run.state_dict()
    short = dict(list(whole.items())[1:])
    for state in (short, {**whole, "module.more": torch.ones(1)}, {}):
        errors = []
        for target in (run, theirs):
            try:
                target.load_state_dict(state)
            except RuntimeError as error:
                errors.append(str(error).partition(":\n")[2])
            loose = target.load_state_dict(state, strict=False)
            errors.append((loose.missing_keys, loose.unexpected_keys))
        said.append(errors)
    plain = {name.removeprefix("module."): tensor for name, tensor in short.items()}
    loose = run.load_state_dict(plain, strict=False)
    said.append(loose.missing_keys)
    return said


def test_loading_what_does_not_fit_is_told_as_torch_does(ranks):
    for *both, plain in ranks(2).run(loading_what_does_not_fit):
        for ours, our_loose, torchs, torchs_loose in both:
            assert ours == torchs
            assert our_loose == torchs_loose
        assert plain == ["layers.0.weight"]


def checkpoint_keys(me):
    """torch.distributed.checkpoint finds the names of the plain model behind the wrapper."""
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_state_dict,
        set_model_state_dict,
    )

    found = []
    for kind in (Ours, Torchs):
        run = wrapped(kind)
        stepper = torch.optim.AdamW(run.parameters(), lr=0.1)
        one_step(run, me, 0)
        stepper.step()
        model_state, optimizer_state = get_state_dict(run, stepper)
        assert list(get_model_state_dict(run)) == list(model_state)
        found.append((dict(model_state), optimizer_state["state"], list(optimizer_state)))
        fresh = wrapped(kind)
        set_model_state_dict(fresh, model_state)
        assert_bitwise_equal(state_of(fresh), state_of(run))
    return found


def test_keys_of_distributed_checkpoints(ranks):
    for ours, torchs in ranks(2).run(checkpoint_keys):
        assert_bitwise_equal(ours, torchs)
        assert "layers.0.weight" in ours[0]


def resumed(me):
    """Save in the middle, build anew, load, go on: the same bits as without the break."""
    histories = []
    for stops in (False, True):
        run = wrapped()
        stepper = torch.optim.AdamW(run.parameters(), lr=0.01)
        history = []
        for step in range(6):
            if stops and step == 3:
                saved = copy.deepcopy((run.state_dict(), stepper.state_dict()))
                run = wrapped()
                stepper = torch.optim.AdamW(run.parameters(), lr=0.01)
                run.load_state_dict(saved[0])
                stepper.load_state_dict(saved[1])
            history.append(one_step(run, me, step))
            stepper.step()
        histories.append((history, state_of(run)))
    assert_bitwise_equal(histories[0], histories[1])
    return histories[1]


def test_resuming_gives_the_same_bits(ranks):
    assert_same_on_all(ranks(2).run(resumed))


# ---------------------------------------------------------------- inside other modules


class Pair(nn.Module):
    """Wrappers as parts of a larger module, one of them in use twice."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(5)
        self.body = kind(RandomMLP(1).double(), bucket_cap_mb=SMALL)
        self.head = kind(nn.Linear(5, 5).double())
        self.loose = nn.Linear(5, 5).double()

    def forward(self, x):
        return self.loose(self.head(self.head(self.body(x)).tanh()))


def inside(me):
    results = []
    for kind in (Ours, Torchs):
        whole = Pair(kind)
        assert [type(m) for m in whole.modules()].count(kind) == 2
        for step in range(2):
            whole.zero_grad()
            x, y = share(batch("MLP 1", 2, step, torch.float64), me.rank)
            nn.functional.cross_entropy(whole(x), y).backward()
        results.append((list(whole.state_dict()), grads_of(whole)))
    return results


def test_wrappers_inside_a_larger_module(ranks):
    outcomes = ranks(2).run(inside)
    for ours, torchs in outcomes:
        assert_bitwise_equal(ours, torchs)
        assert ours[0][0] == "body.module.layers.0.weight"
    first, second = (ours[1] for ours, _ in outcomes)
    assert_bitwise_equal(first["head.module.weight"], second["head.module.weight"])
    # What was not wrapped stays each rank's own.
    assert not torch.equal(first["loose.weight"], second["loose.weight"])


# ---------------------------------------------------------------- attributes


class Talkative(nn.Module):
    """A module with attributes of every kind."""

    kind = "of the class"

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(3.0))
        self.names = ["cat", "dog"]

    def forward(self, x):
        return self.layer(x)

    def describe(self, word):
        return f"{word}: {len(self.names)}"

    @property
    def count(self):
        return len(self.names)

    @property
    def broken(self):
        raise ValueError("why it is broken")

    @property
    def misses(self):
        return self.something_else


def attributes(me):
    run = Ours(Talkative())
    assert (run.kind, run.names, run.count) == ("of the class", ["cat", "dog"], 2)
    assert run.describe("animals") == "animals: 2"
    assert run.layer is run.module.layer
    assert run.table is run.module.table
    # What is set on the wrapper stays on the wrapper, and hides what the module has.
    run.nc = 80
    run.names = ["horse"]
    run.class_weights = torch.ones(3)
    assert (run.nc, run.names) == (80, ["horse"])
    assert run.module.names == ["cat", "dog"]
    assert not hasattr(run.module, "nc")
    assert not hasattr(run.module, "class_weights")
    assert run.describe("animals") == "animals: 2"
    del run.names
    assert run.names == ["cat", "dog"]
    # The wrapper's own come first.
    run.module.dim = "the module's"
    assert run.dim == 0
    # FSDP2 is known by this name; pipelines and others ask for no_sync.
    assert not hasattr(run, "set_requires_gradient_sync")
    assert hasattr(run, "no_sync")
    assert not hasattr(run, "nothing_like_this")
    assert getattr(run, "nothing_like_this", 3) == 3
    said = []
    for name in ("broken", "misses", "nothing_like_this", "__fspath__"):
        try:
            getattr(run, name)
        except (ValueError, AttributeError) as error:
            cause = error.__cause__
            said.append((type(error).__name__, str(error), "" if cause is None else str(cause)))
    # A copy keeps what was set on the wrapper.
    twin = copy.deepcopy(run)
    assert twin.nc == 80
    assert torch.equal(twin.class_weights, torch.ones(3))
    assert "Talkative" in repr(run)
    return said


def test_attributes_fall_through_to_the_module(ranks):
    for said in ranks(2).run(attributes):
        broken, misses, nothing, magic = said
        assert broken == ("ValueError", "why it is broken", "")
        # Python hides which attribute a property missed; what torch says of the module is kept as the cause.
        assert misses[0] == "AttributeError"
        assert "misses" in misses[1]
        assert "Talkative" in misses[2]
        assert nothing[0] == "AttributeError"
        assert "DistributedDataParallel" in nothing[1]
        assert "Talkative" in nothing[1]
        assert magic[0] == "AttributeError"


def by_class(me):
    """isinstance against torch's class holds, without inheritance, and nothing else becomes an instance."""
    run, theirs = wrapped(), wrapped(Torchs)
    assert isinstance(run, Torchs)
    assert issubclass(Ours, Torchs)
    assert Torchs not in Ours.__mro__
    assert not isinstance(theirs, Ours)
    assert not isinstance(run.module, Torchs)
    assert isinstance(run, torch.nn.parallel.DistributedDataParallel)
    assert isinstance(run, torch.distributed.algorithms.Joinable)
    assert isinstance(run, nn.Module)
    assert Ours.__name__ == Torchs.__name__
    return type(run).__mro__[0].__module__


def test_isinstance_checks_hold(ranks):
    assert ranks(2).run(by_class) == ["rankstep.parallel.ddp"] * 2


OPT_OUT = """
import torch, rankstep
ours, torchs = rankstep.DistributedDataParallel, torch.nn.parallel.DistributedDataParallel
print(issubclass(ours, torchs))
"""


@pytest.mark.parametrize(("value", "registered"), [(None, True), ("0", False), ("1", True)])
def test_the_registration_can_be_left_out(value, registered):
    env = {name: text for name, text in os.environ.items() if name != "RANKSTEP_REGISTER"}
    if value is not None:
        env["RANKSTEP_REGISTER"] = value
    done = subprocess.run(
        [sys.executable, "-c", OPT_OUT], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(registered)]


class Counts(Ours):
    """A subclass that adds to forward and to the constructor, as projects do."""

    def __init__(self, module, *args, purpose="training", **kwargs):
        super().__init__(module, *args, **kwargs)
        self.purpose = purpose
        self.calls = 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        return super().forward(*args, **kwargs)

    def __getattr__(self, name):
        if name == "answer":
            return 42
        return super().__getattr__(name)


def subclassed(me):
    run = Counts(build("MLP 1", torch.float64), None, None, 0, purpose="test", bucket_cap_mb=SMALL)
    assert isinstance(run, Torchs)
    grads = [one_step(run, me, step) for step in range(2)]
    twin = copy.deepcopy(run)
    assert (type(twin), twin.purpose, twin.calls, twin.answer) == (Counts, "test", 2, 42)
    grads.append(one_step(twin, me, 2))
    assert (run.calls, twin.calls) == (2, 3)
    return grads


def test_a_subclass(ranks):
    outcomes = ranks(2).run(subclassed)
    assert_same_on_all(outcomes)
    for step, grads in enumerate(outcomes[0]):
        assert_close_to(grads, whole_batch(step), rel=1e-13)


def modes(me):
    """train, eval, to, apply, requires_grad_ and friends are the module's."""
    run = Ours(Talkative())
    run.eval()
    assert not run.module.training
    assert run.train() is run
    assert run.module.training
    run.requires_grad_(False)
    assert not any(param.requires_grad for param in run.module.parameters())
    run.requires_grad_(True)
    seen = []
    run.apply(lambda module: seen.append(type(module).__name__))
    assert seen == ["Linear", "Talkative", "DistributedDataParallel"]
    assert run.to(torch.float32) is run
    assert sum(1 for _ in run.children()) == 1
    assert len(run.state_dict()) == 3
    run.zero_grad()
    with torch.no_grad():
        assert run(torch.ones(1, 2)).shape == (1, 2)
    assert run.forward(torch.ones(1, 2)).shape == (1, 2)
    assert run.get_submodule("module.layer") is run.module.layer
    assert run.get_parameter("module.layer.weight") is run.module.layer.weight
    return True


def test_it_is_a_module(ranks):
    assert ranks(2).run(modes) == [True, True]
