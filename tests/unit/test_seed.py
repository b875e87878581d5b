from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from rankstep.data import seed_everything, worker_init_fn
from rankstep.errors import DataError


@pytest.fixture(autouse=True)
def keep_random_state():
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    yield
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
    torch.set_rng_state(torch_state)


@pytest.fixture(autouse=True)
def no_group(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.delenv("RANK", raising=False)


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def on_rank(monkeypatch, rank, seed, **options):
    monkeypatch.setenv("RANK", str(rank))
    derived = seed_everything(seed, **options)
    return derived, draw()


def test_one_seed_gives_one_stream_in_every_library():
    first = seed_everything(1)
    numbers = draw()
    assert seed_everything(1) == first
    assert draw() == numbers
    assert seed_everything(2) != first
    assert all(a != b for a, b in zip(draw(), numbers, strict=True))


def test_ranks_draw_different_numbers_in_every_library(monkeypatch):
    results = [on_rank(monkeypatch, rank, 1) for rank in range(8)]
    assert len({derived for derived, _ in results}) == 8
    for numbers in zip(*(drawn for _, drawn in results), strict=True):
        assert len(set(numbers)) == 8


def test_seeds_and_ranks_do_not_run_into_each_other(monkeypatch):
    derived = {
        on_rank(monkeypatch, rank, seed)[0] for rank in range(8) for seed in (*range(8), 2**32)
    }
    assert len(derived) == 72
    assert all(0 <= seed < 2**63 for seed in derived)


def test_derived_seeds_never_change(monkeypatch):
    """A run of today must be repeatable in years; so these numbers may not be edited."""
    assert [on_rank(monkeypatch, rank, 1)[0] for rank in (0, 1)] == [
        4215923173971654960,
        2021340933837429789,
    ]


def test_the_open_process_group_knows_the_rank_better_than_the_environment(monkeypatch):
    expected = on_rank(monkeypatch, 3, 1)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    assert (seed_everything(1), draw()) == expected


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 - 1])
def test_without_per_rank_all_get_the_seed_itself(monkeypatch, seed):
    derived, numbers = on_rank(monkeypatch, 3, seed, per_rank=False)
    assert derived == seed
    assert on_rank(monkeypatch, 0, seed, per_rank=False) == (seed, numbers)
    torch.manual_seed(seed)
    assert float(torch.rand(())) == numbers[2]


def test_without_per_rank_numpy_draws_as_a_plain_script_does():
    seed_everything(7, per_rank=False)
    ours = draw()[1]
    np.random.seed(7)  # noqa: NPY002
    assert float(np.random.rand()) == ours  # noqa: NPY002


def test_seeds_that_differ_in_their_upper_bits_alone_differ_where_the_library_can(monkeypatch):
    seeds = (5 + 2**40, 5 + 2**41)
    low, high = (on_rank(monkeypatch, 0, seed, per_rank=False)[1] for seed in seeds)
    assert low[0] != high[0]
    assert low[1] != high[1]
    assert low[2] == high[2]  # torch's generator on the CPU reads 32 bits
    low, high = (on_rank(monkeypatch, 0, seed)[1] for seed in seeds)
    assert all(a != b for a, b in zip(low, high, strict=True))


@pytest.mark.parametrize(
    ("seed", "text"),
    [
        (-1, "seed must be at least 0, got -1"),
        (1.0, r"seed must be a whole number, got 1.0 \(float\)"),
        ("1", "seed must be a whole number, got '1'"),
        (True, "seed must be a whole number, got True"),
        (2**63, r"seed must be below 2\*\*63"),
    ],
)
def test_bad_seeds_are_named_and_seed_nothing(seed, text):
    before = torch.get_rng_state()
    with pytest.raises(DataError, match=text):
        seed_everything(seed)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("rank", ["", "x", "-1", "1.5"])
def test_a_rank_that_is_none_is_named(monkeypatch, rank):
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(DataError, match="in the environment is no rank"):
        seed_everything(1)
    assert seed_everything(1, per_rank=False) == 1


# --- workers ---------------------------------------------------------------------------------------


class Draws(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(draw(), dtype=torch.float64)


def draws_of_workers(seed):
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(
        Draws(),
        num_workers=2,
        worker_init_fn=worker_init_fn,
        generator=generator,
        multiprocessing_context="fork",
    )
    return torch.cat(list(loader))


# Newer Pythons warn of any fork in a process with threads, and the time limit of the tests is one.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_of_ranks_that_were_seeded_alike_draw_different_numbers(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    rank_0 = draws_of_workers(1)
    assert torch.equal(draws_of_workers(1), rank_0)
    monkeypatch.setenv("RANK", "1")
    rank_1 = draws_of_workers(1)
    for library in range(3):
        assert torch.cat([rank_0, rank_1])[:, library].unique().numel() == 8


def test_outside_of_a_worker_it_says_how_it_is_used():
    with pytest.raises(DataError, match=r"outside of a loader's worker; pass it on: DataLoader\("):
        worker_init_fn(0)
