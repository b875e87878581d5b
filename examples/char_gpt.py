"""Train a small GPT, character by character, on a text that Python itself ships, on any number of ranks.

Examples:
  python examples/char_gpt.py
  rankstep run --nproc-per-node 2 examples/char_gpt.py
  torchrun --nproc-per-node 2 examples/char_gpt.py --epochs 1 --json result.json

The text is Python's language reference as `help()` shows it (pydoc_data.topics), some 460,000 characters. Its words
differ a little between versions of Python, and so do the figures.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import common
import rankstep

BLOCK = 32  # characters that the model sees at once
WIDTH = 64
HEADS = 2
LAYERS = 2


def load_text() -> tuple[str, str]:
    """Return the training text and the held-out text: every tenth topic.

    Raises:
        UserError: this Python was installed without its help topics.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise common.UserError(
            "this example reads pydoc_data.topics, which this Python was installed without; "
            "install the whole standard library"
        ) from error
    texts = [topics[name] for name in sorted(topics)]
    held_out = "".join(texts[::10])
    del texts[::10]
    return "".join(texts), held_out


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A text cut into windows: each is `BLOCK` characters, and for each of them the character that follows."""

    def __init__(self, text: str, alphabet: str) -> None:
        number = {character: n for n, character in enumerate(alphabet)}
        self._codes = torch.tensor([number[character] for character in text])

    def __len__(self) -> int:
        return (len(self._codes) - 1) // BLOCK

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self._codes[index * BLOCK :][: BLOCK + 1]
        return window[:-1], window[1:]


class Layer(nn.Module):
    """One layer of a transformer, normalised before each of its halves."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.after_attention = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix each character with the ones before it, then think about it."""
        split = self.query_key_value(self.before_attention(x)).unflatten(-1, (3, HEADS, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.after_attention(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    """From characters to scores for the next one."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, WIDTH)
        self.place = nn.Embedding(BLOCK, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters))
        nn.init.normal_(self.character.weight, std=0.2)
        nn.init.normal_(self.place.weight, std=0.2)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Return scores of shape (batch, length, characters)."""
        x = self.character(codes) + self.place.weight[: codes.shape[1]]
        return self.head(self.layers(x))


def main() -> None:
    """Train, test, report, and let the model write a little."""
    options = common.parse_options(__doc__, epochs=3, global_batch=64, lr=0.006, bucket_cap_mb=0.1)
    with rankstep.world() as world:
        with common.all_ranks_ready(world):
            text, held_out = load_text()
            alphabet = "".join(sorted(set(text + held_out)))
            train, test = Windows(text, alphabet), Windows(held_out, alphabet)
            common.check_options(options, world, samples=len(train))
            local_batch = world.local_batch(options.global_batch)
            rankstep.seed_everything(options.seed)

        # The ranks' seeds differ, and so do their first weights: the wrapper copies rank 0's to all.
        net = GPT(len(alphabet)).to(world.device)
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
                for codes, following in loader:
                    scores = model(codes.to(world.device))
                    loss = functional.cross_entropy(
                        scores.flatten(0, 1), following.to(world.device).flatten()
                    )
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
        if world.is_main:
            print("\n" + write(net, alphabet, "The statement ", 300, world.device))


@torch.no_grad()
def evaluate(net: nn.Module, test: Windows, device: torch.device) -> tuple[float, float]:
    """Return loss and accuracy over all characters of the test windows; each is looked at once, on one rank.

    It takes the bare net: some ranks may have a batch more than others, and nothing is to be synchronised per batch.
    """
    sampler = rankstep.DistributedSampler(test, shuffle=False, pad="none")
    loss = correct = total = 0.0
    net.eval()
    for codes, following in DataLoader(test, batch_size=64, sampler=sampler):
        scores = net(codes.to(device)).flatten(0, 1)
        targets = following.to(device).flatten()
        loss += functional.cross_entropy(scores, targets, reduction="sum").item()
        correct += (scores.argmax(1) == targets).sum().item()
        total += len(targets)
    sums = torch.tensor([loss, correct, total], dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    loss, correct, total = sums.tolist()
    return loss / total, correct / total


@torch.no_grad()
def write(net: nn.Module, alphabet: str, start: str, length: int, device: torch.device) -> str:
    """Let the model continue a text, each character drawn with the probability that the model gives it."""
    codes = torch.tensor([[alphabet.index(character) for character in start]], device=device)
    for _ in range(length):
        scores = net(codes[:, -BLOCK:])[:, -1]
        codes = torch.cat([codes, (scores / 0.7).softmax(1).multinomial(1)], dim=1)
    return "".join(alphabet[code] for code in codes[0].tolist())


if __name__ == "__main__":
    main()
