"""The arithmetic of shares, the rules for optimizers, and memory that knows which pages were written."""

from __future__ import annotations

import itertools
import mmap
import os

import pytest
import torch

from rankstep.buckets import Caps, ParamSpec, make_plan
from rankstep.errors import ModelError, ModelTypeError
from rankstep.parallel.sharded_layout import CHUNK_NUMEL, GRAIN_NUMEL, chunks, share_bounds
from rankstep.parallel.sharded_pages import PAGE, Private
from rankstep.parallel.sharded_rules import check_optimizer


@pytest.fixture(autouse=True)
def compiler_cache(monkeypatch, tmp_path):
    """An optimizer's first step loads torch's compiler, which sets this variable where it is not set."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def bucket(*sizes):
    specs = [ParamSpec.of(str(i), torch.zeros(size)) for i, size in enumerate(sizes)]
    plan = make_plan(specs, range(len(specs)), Caps((1 << 40,)), packed_below_bytes=16384)
    return plan.buckets[0], plan.params


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("sizes", [(10,), (5000, 30, 70000), (100, 0, 200, 300), (1,) * 9])
def test_shares_cover_a_bucket_once(sizes, world_size):
    spec, params = bucket(*sizes)
    bounds = share_bounds(spec, params, world_size)
    assert len(bounds) == world_size + 1
    assert (bounds[0], bounds[-1]) == (0, spec.numel)
    assert list(bounds) == sorted(bounds)


def test_large_parameters_are_cut_at_grains_and_small_ones_not_at_all():
    spec, params = bucket(1001, 1003, 90001)
    starts = dict(zip(spec.params, spec.offsets, strict=True))
    for world_size in range(2, 40):
        for cut in share_bounds(spec, params, world_size)[1:-1]:
            assert cut in starts.values() or (cut - starts[2]) % GRAIN_NUMEL == 0
    # The twin: an even split would cut elsewhere.
    assert (spec.numel // 2 - starts[2]) % GRAIN_NUMEL


def test_chunks_do_not_depend_on_the_shares():
    whole = list(chunks(7, 7, 7 + 3 * CHUNK_NUMEL + 5))
    first = list(chunks(7, 7, 7 + CHUNK_NUMEL // 2))
    second = list(chunks(7, 7 + CHUNK_NUMEL // 2, 7 + 3 * CHUNK_NUMEL + 5))
    edges = {edge for pair in (*first, *second) for edge in pair}
    assert {edge for pair in whole for edge in pair} <= edges
    assert all(a[1] == b[0] for a, b in itertools.pairwise(whole))


class Norm(torch.optim.SGD):
    """Divides by the norm of the whole parameter."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.div_(param.grad.norm())
        return super().step(closure)


class Elementwise(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (torch.optim.LBFGS, "vector of all parameters"),
        (torch.optim.Adafactor, "rows and columns"),
        (Norm, "the results differ"),
        (Elementwise, "elementwise=True"),
    ],
)
def test_optimizers_that_are_refused(kind, says):
    with pytest.raises(ModelError, match=f"rank 3: {kind.__name__}.*{says}"):
        check_optimizer(
            kind, {"lr": 0.1} if kind is not torch.optim.LBFGS else {}, 3, vouched=False
        )


def test_a_word_is_taken_unless_it_is_shown_to_be_wrong():
    check_optimizer(Elementwise, {"lr": 0.1}, 0, vouched=True)
    with pytest.raises(ModelError, match="the results differ"):
        check_optimizer(Norm, {"lr": 0.1}, 0, vouched=True)
    with pytest.raises(ModelTypeError, match="class of an optimizer"):
        check_optimizer("AdamW", {}, 0, vouched=True)
    with pytest.raises(ModelError, match="differentiable"):
        check_optimizer(torch.optim.SGD, {"lr": 0.1, "differentiable": True}, 0, vouched=True)


def test_what_has_a_value_for_each_element():
    assert check_optimizer(torch.optim.AdamW, {}, 0, vouched=False) == {
        "step": False,
        "exp_avg": True,
        "exp_avg_sq": True,
    }


def test_written_pages_are_known_and_given_back():
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, 8 * PAGE)
        private = Private(fd, 8 * PAGE)
        shared = mmap.mmap(fd, 8 * PAGE)
    finally:
        os.close(fd)
    shared[3 * PAGE] = 7
    assert private.bytes[3 * PAGE] == 7
    assert private.written() == []
    private.bytes[3 * PAGE + 1] = 9
    private.bytes[5 * PAGE] = 1
    assert private.written() == [(3 * PAGE, 4 * PAGE), (5 * PAGE, 6 * PAGE)]
    assert shared[3 * PAGE + 1] == 0
    private.drop(3 * PAGE, 4 * PAGE)
    assert private.bytes[3 * PAGE + 1] == 0
    assert private.written() == [(5 * PAGE, 6 * PAGE)]
