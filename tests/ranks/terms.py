"""What the ranks put into sums."""

import torch


def value(rank, numel, dtype):
    """Small whole numbers for whole types, all sizes otherwise."""
    generator = torch.Generator().manual_seed(100 + rank)
    if not dtype.is_floating_point:
        return torch.randint(0, 20, (numel,), generator=generator).to(dtype)
    return (torch.randn(numel, generator=generator) * 100).to(dtype)
