"""The built-in job: a small CNN on handwritten digits, or on made-up ones where scikit-learn is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from rankstep.explain.job import Job

_SIDE = 8
_CLASSES = 10
_MADE_UP = 1_500


def digits() -> Job:
    """Return the job; nothing is downloaded."""
    images = _load()
    return Job(
        model=_net(),
        dataset=_make_up() if images is None else images,
        loss=_mean_loss,
        optimizer=_adamw,
        batch_size=32,
    )


def _net() -> nn.Module:
    """Build the CNN of the digits example: it normalises each image by itself, and is smooth.

    With batch statistics one process on the whole batch would be another model; and with kinks a difference in the
    last digit, from sums in another order, would not stay there.
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.GroupNorm(8, 64),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 128),
        nn.GELU(),
        nn.Linear(128, _CLASSES),
    )


def _load() -> TensorDataset | None:
    """Read the digits out of scikit-learn's folder: importing scikit-learn would take longer than the whole story."""
    package = importlib.util.find_spec("sklearn")
    for folder in package.submodule_search_locations or () if package else ():
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
            images = table[:, :-1].reshape(-1, 1, _SIDE, _SIDE) / 16
            return TensorDataset(images, table[:, -1].long())
    return None


def _make_up() -> TensorDataset:
    """Draw ten patterns, and noisy images of them."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(_CLASSES, 1, _SIDE, _SIDE, generator=generator)
    labels = torch.arange(_MADE_UP) % _CLASSES
    noise = torch.randn(_MADE_UP, 1, _SIDE, _SIDE, generator=generator)
    return TensorDataset(patterns[labels] + 0.3 * noise, labels)


def _mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.002)
