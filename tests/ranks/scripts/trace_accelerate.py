"""Train under Accelerate; with a directory as the argument, record what happens in the loop into it."""

from __future__ import annotations

import contextlib
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import rankstep


def main() -> None:
    """Take 12 batches a rank, two for each step."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    layers = torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
    model = rankstep.DistributedDataParallel(torch.nn.Sequential(*layers))
    # Accelerate would wrap it once more, with torch's class.
    model._is_accelerate_prepared = True
    optimizer = torch.optim.AdamW(model.parameters())
    data = DataLoader(TensorDataset(torch.randn(192, 16), torch.randn(192, 4)), batch_size=8)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    block = rankstep.trace(sys.argv[1]) if sys.argv[1:] else contextlib.nullcontext()
    with block:
        for inputs, targets in data:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main()
