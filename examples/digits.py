"""Train a small CNN on real handwritten digits, on any number of ranks.

Examples:
  python examples/digits.py
  rankstep run --nproc-per-node 2 examples/digits.py
  torchrun --nproc-per-node 2 examples/digits.py --epochs 5 --json result.json

Whatever the number of ranks, the steps are the same: the ranks share a global batch whose size does not change.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import common
import rankstep


def load_images() -> tuple[TensorDataset, TensorDataset]:
    """Load the 1,797 images that scikit-learn ships: every fifth of each digit is for testing, the rest for training.

    Raises:
        UserError: scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise common.UserError(
            "this example takes its images from scikit-learn: pip install scikit-learn"
        ) from error
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(digits)
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    is_test[labels.argsort(stable=True)[::5]] = True
    return (
        TensorDataset(images[~is_test], labels[~is_test]),
        TensorDataset(images[is_test], labels[is_test]),
    )


def make_net() -> nn.Module:
    """Build the CNN.

    It normalises each image by itself: with batch statistics, the result would depend on how a batch is shared by the
    ranks. And it is smooth (GELU and averages, no ReLU or maximum), so that differences in the last digit, from sums
    taken in another order, stay in the last digit.
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.GELU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.GroupNorm(8, 64),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def main() -> None:
    """Train, test and report."""
    options = common.parse_options(__doc__, epochs=8, global_batch=64, lr=0.004, bucket_cap_mb=0.03)
    # On GPUs, convolve in full float32 and the same way each time, so that runs can be compared.
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    torch.backends.cudnn.deterministic = True

    with rankstep.world() as world:
        with common.all_ranks_ready(world):
            train, test = load_images()
            common.check_options(options, world, samples=len(train))
            local_batch = world.local_batch(options.global_batch)
            rankstep.seed_everything(options.seed)

        # The ranks' seeds differ, and so do their first weights: the wrapper copies rank 0's to all.
        net = make_net().to(world.device)
        model = rankstep.DistributedDataParallel(net, bucket_cap_mb=options.bucket_cap_mb)

        # Both leave out what fills no global batch: a step has the same samples on any number of ranks.
        sampler = rankstep.DistributedSampler(
            train, shuffle=True, seed=options.seed, drop_last=True
        )
        loader = DataLoader(train, batch_size=local_batch, sampler=sampler, drop_last=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=options.epochs * len(loader)
        )

        losses = []
        with common.Display(world, options.epochs, len(loader)) as display:
            for epoch in range(options.epochs):
                sampler.set_epoch(epoch)  # another order each epoch, the same on all ranks
                local_losses = []
                for images, labels in loader:
                    logits = model(images.to(world.device))
                    loss = functional.cross_entropy(logits, labels.to(world.device))
                    optimizer.zero_grad()
                    loss.backward()  # when it returns, gradients are the mean over all ranks
                    optimizer.step()
                    schedule.step()
                    local_losses.append(loss.detach())
                    display.step()
                losses += common.mean_over_ranks(local_losses)
                display.epoch(epoch, losses[-len(loader) :])

        test_loss, test_accuracy = evaluate(net, test, world.device)
        common.report(
            world,
            options,
            model,
            losses=losses,
            test_loss=test_loss,
            test_accuracy=test_accuracy,
            seconds=display.seconds,
        )


@torch.no_grad()
def evaluate(net: nn.Module, test: TensorDataset, device: torch.device) -> tuple[float, float]:
    """Return loss and accuracy over all test images; each is looked at once, on one rank.

    It takes the bare net: some ranks may have a batch more than others, and nothing is to be synchronised per batch.
    """
    sampler = rankstep.DistributedSampler(test, shuffle=False, pad="none")
    loss = correct = total = 0.0
    net.eval()
    for images, labels in DataLoader(test, batch_size=128, sampler=sampler):
        logits = net(images.to(device))
        targets = labels.to(device)
        loss += functional.cross_entropy(logits, targets, reduction="sum").item()
        correct += (logits.argmax(1) == targets).sum().item()
        total += len(labels)
    sums = torch.tensor([loss, correct, total], dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    loss, correct, total = sums.tolist()
    return loss / total, correct / total


if __name__ == "__main__":
    main()
