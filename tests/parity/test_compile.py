"""torch.compile, both ways round: the gradients of the eager model, and buckets that leave while backward runs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Torchs

from rankstep import DistributedDataParallel as Ours
from rankstep.testing import (
    assert_bitwise_equal,
    assert_close_to,
    assert_same_on_all,
)

# One weight is 1 MiB, which is the smallest cap that torch's splitting of graphs takes.
WIDTH = 512
CAP = 1


class Net(nn.Module):
    """A module of the user's: what torch itself defines is skipped by the compiler."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def net():
    torch.manual_seed(4)
    return Net()


def data(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2, WIDTH, generator=generator)


def grads_of(model):
    return {
        name.replace("module.", "").replace("_orig_mod.", ""): param.grad
        for name, param in model.named_parameters()
    }


WAYS = {
    "outside": lambda kind, model, backend: torch.compile(
        kind(model, bucket_cap_mb=CAP), backend=backend
    ),
    "inside": lambda kind, model, backend: kind(
        torch.compile(model, backend=backend), bucket_cap_mb=CAP
    ),
}


def compiled(me, way):
    """Three steps of the compiled and of the eager model; the graphs that the compiler was given."""
    graphs = []

    def backend(graph, inputs):
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.debugging import boxed_nop

        graphs.append(sum(node.op != "placeholder" for node in graph.graph.nodes))
        return aot_autograd(fw_compiler=boxed_nop)(graph, inputs)

    torch._dynamo.reset()
    try:
        run = WAYS[way](Ours, net(), backend)
        wrapper = run._orig_mod if way == "outside" else run
        eager = Ours(net(), bucket_cap_mb=CAP)
        facts = []
        for step in range(3):
            for each in (run, eager):
                each.zero_grad()
                each(data(me.rank, step)).square().mean().backward()
            assert_close_to(
                {n: g for n, g in grads_of(run).items() if g is not None},
                {n: g for n, g in grads_of(eager).items() if g is not None},
                rel=1e-6,
            )
            last = wrapper.reducer.last_step
            facts.append((last.all_reduces, last.launched_in_backward, last.unused))
            if step == 0:
                compilations = len(graphs)
        assert len(graphs) == compilations
        named = [n.replace("_orig_mod.", "") for n in facts[-1][2]]
        return grads_of(run), facts, named, len(wrapper.reducer.buckets), compilations
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_the_eager_model(ranks, way):
    outcomes = ranks(2).run(compiled, way)
    assert_same_on_all([grads for grads, *_ in outcomes])
    for grads, facts, unused, buckets, compilations in outcomes:
        assert buckets == 5
        assert unused == ["unused.weight", "unused.bias"]
        assert grads["unused.weight"] is None
        # Learned in the first step; then buckets leave while backward runs, because the graph was split.
        assert facts[0][:2] == (5, 0)
        assert all(all_reduces == 5 and early >= 3 for all_reduces, early, _ in facts[1:])
        assert compilations > 1


def like_torch(me):
    """The graphs that the compiler gets are those that it gets under torch's wrapper."""
    counts = {}
    for way, wrap in WAYS.items():
        for kind in (Ours, Torchs):
            graphs = []

            def backend(graph, inputs, graphs=graphs):
                graphs.append([node.op for node in graph.graph.nodes])
                return graph.forward

            torch._dynamo.reset()
            model = net()
            del model.unused
            run = wrap(kind, model, backend)
            run(data(me.rank, 0)).square().mean().backward()
            counts[way, kind.__module__] = graphs
    torch._dynamo.reset()
    return counts


def test_graphs_are_split_as_under_torchs_wrapper(ranks):
    for counts in ranks(2).run(like_torch):
        for way in WAYS:
            ours = counts[way, "rankstep.parallel.ddp"]
            assert ours == counts[way, "torch.nn.parallel.distributed"]
            assert len(ours) > 1


def uncompiled_parts(me):
    """no_sync, counts, copies and state_dict of a compiled model."""
    torch._dynamo.reset()
    try:
        run = Ours(torch.compile(net(), backend="eager"), bucket_cap_mb=CAP)
        plain = Ours(net(), bucket_cap_mb=CAP)
        for each in (run, plain):
            with each.no_sync():
                each.backward(each(data(me.rank, 0)).square().sum(), count=2)
            each.backward(each(data(me.rank, 1)).square().sum(), count=1 + me.rank)
        assert_close_to(
            {n: g for n, g in grads_of(run).items() if g is not None},
            {n: g for n, g in grads_of(plain).items() if g is not None},
            rel=1e-6,
        )
        # Another forward under no_grad, and a change of mode, recompile and stay right.
        run.eval()
        with torch.no_grad():
            out = run(data(0, 2))
        assert_close_to(out, plain(data(0, 2)).detach(), rel=1e-6)
        assert Torchs._active_ddp_module is None
        names = list(run.state_dict())
        other = copy.deepcopy(plain)
        assert_bitwise_equal(
            dict(zip(names, other.state_dict().values(), strict=True)), dict(run.state_dict())
        )
        return names[0]
    finally:
        torch._dynamo.reset()


def test_the_rest_of_a_compiled_model(ranks):
    assert ranks(2).run(uncompiled_parts) == ["module._orig_mod.layers.0.weight"] * 2
