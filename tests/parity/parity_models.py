"""Models, data and optimizers that the parity tests train."""

from __future__ import annotations

import itertools
import random

import torch
from torch import nn
from torch.nn import functional

LOCAL_BATCH = 4


class RandomMLP(nn.Module):
    """Layers of drawn widths, so that parameters of many sizes meet the bucket caps."""

    def __init__(self, seed):
        super().__init__()
        draw = random.Random(seed)
        widths = [12, *(draw.randint(1, 90) for _ in range(draw.randint(3, 6))), 5]
        self.layers = nn.ModuleList(
            nn.Linear(a, b, bias=draw.random() < 0.8) for a, b in itertools.pairwise(widths)
        )

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = layer(x).tanh()
        return self.layers[-1](x)


class CNN(nn.Module):
    """Convolutions with a norm; batch norm brings buffers, group norm none."""

    def __init__(self, *, batch_norm):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(8) if batch_norm else nn.GroupNorm(2, 8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(16) if batch_norm else nn.GroupNorm(4, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = functional.max_pool2d(self.norm1(self.conv1(x)).relu(), 2)
        x = self.norm2(self.conv2(x)).relu().mean((2, 3))
        return self.head(x)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small one; the head shares the weight of the embedding."""

    def __init__(self, vocabulary=23, width=24, length=10):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width, 3) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


MODELS = {
    "MLP 1": lambda: RandomMLP(1),
    "MLP 2": lambda: RandomMLP(2),
    "CNN": lambda: CNN(batch_norm=True),
    "CNN without buffers": lambda: CNN(batch_norm=False),
    "GPT": GPT,
}
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.003),
}


def build(name, dtype=torch.float32):
    """The same model everywhere."""
    torch.manual_seed(11)
    return MODELS[name]().to(dtype)


def batch(name, world, step, dtype=torch.float32):
    """The global batch of a step: inputs and targets."""
    generator = torch.Generator().manual_seed(step)
    size = LOCAL_BATCH * world
    if name == "GPT":
        tokens = torch.randint(23, (size, 11), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    shape = (size, 1, 8, 8) if name.startswith("CNN") else (size, 12)
    x = torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)
    return x, torch.randint(5, (size,), generator=generator)


def share(tensors, rank):
    """One rank's part of a global batch."""
    return [tensor[rank * LOCAL_BATCH : (rank + 1) * LOCAL_BATCH] for tensor in tensors]


def loss_of(model, inputs, targets):
    """The mean over the batch, so that the mean over equal shares is the mean over the whole."""
    return functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def grads_of(model):
    """Name to gradient, None where there is none."""
    return {
        name.removeprefix("module."): None if param.grad is None else param.grad.clone()
        for name, param in model.named_parameters()
    }


def state_of(model):
    """Name to parameter."""
    return {
        name.removeprefix("module."): param.detach().clone()
        for name, param in model.named_parameters()
    }


def buffers_of(model):
    """Name to buffer."""
    return {name.removeprefix("module."): b.detach().clone() for name, b in model.named_buffers()}
