"""Train under Lightning; with a directory as the argument, record what happens in the loop into it."""

from __future__ import annotations

import contextlib
import sys

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

import rankstep


class RankstepStrategy(DDPStrategy):
    """Lightning's own for torch's wrapper, with ours in its place."""

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        devices = self.determine_ddp_device_ids()
        return rankstep.DistributedDataParallel(model, device_ids=devices, **self._ddp_kwargs)


class Net(lightning.LightningModule):
    """A small regression."""

    def __init__(self) -> None:
        super().__init__()
        layers = torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
        self.net = torch.nn.Sequential(*layers)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Compare."""
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Take AdamW."""
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> DataLoader:
        """Make random batches."""
        return DataLoader(TensorDataset(torch.randn(192, 16), torch.randn(192, 4)), batch_size=8)


def main() -> None:
    """Take 12 batches a rank, two for each step."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=RankstepStrategy(process_group_backend="gloo"),
        max_epochs=1,
        accumulate_grad_batches=2,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        logger=False,
    )
    block = rankstep.trace(sys.argv[1]) if sys.argv[1:] else contextlib.nullcontext()
    with block:
        trainer.fit(Net())


if __name__ == "__main__":
    main()
