"""How long a whole training step takes on ranks of one host: zero_grad, forward, backward, SGD with momentum.

Three models of different kinds: an MLP (few large gradients), a GPT (many, of all sizes) and a CNN with batch norm
(much arithmetic, few bytes, buffers). ``local`` is the same step without any communication, on all ranks at once;
``all-reduce alone`` sends the same bytes and computes nothing. What a wrapper needs beyond the larger of the two is
its own. Torch comes as it is, tuned, and tuned with other bucket sizes.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import common
import rankstep

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLE = "python benchmarks/step.py --model gpt --json step-gpt.json"
MB = 1e6
MS = 1e3
LOCAL = "local"
ALL_REDUCE = "all-reduce alone"
SHARDED = "rankstep sharded"
BAR = 0.90
SHARDED_BARS = {"mlp": 0.75, "gpt": 0.80, "cnn": 1.00}
TUNED = {"gradient_as_bucket_view": True, "batched_grad_copy": True, "static_graph": True}
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    name: common.WRAPPERS[name.removesuffix(" sharded")]
    for name in (common.RANKSTEP, SHARDED, common.TORCH, "torch view")
} | {
    f"torch all three{f', {cap} MiB' if cap != 25 else ''}": functools.partial(
        TorchDDP, bucket_cap_mb=cap, **TUNED
    )
    for cap in (1, 5, 25, 100)
}


class Mlp(nn.Sequential):
    """25.3 MB in 14 tensors."""

    def __init__(self) -> None:
        widths = [784, *[1048] * 6, 10]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        super().__init__(*layers[:-1])

    @staticmethod
    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        """Draw vectors and classes."""
        return torch.randn(64, 784), torch.randint(10, (64,))


class Block(nn.Module):
    """Causal attention and an MLP, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what goes on to the next block."""
        batch, length, width = x.shape
        heads = self.queries_keys_values(self.norm_attention(x))
        q, k, v = heads.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_mlp(x))


class Gpt(nn.Module):
    """27.4 MB in 77 tensors."""

    def __init__(self, vocabulary: int = 256, context: int = 64, width: int = 304) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, 8) for _ in range(6)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, one row for each token."""
        places = self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(self.tokens(tokens) + places))).flatten(0, 1)

    @staticmethod
    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        """Draw tokens and their successors."""
        tokens = torch.randint(256, (4, 65))
        return tokens[:, :-1], tokens[:, 1:].flatten()


class Cnn(nn.Sequential):
    """9.5 MB in 29 tensors."""

    def __init__(self) -> None:
        widths = [3, 64, 64, 64, 128, 128, 256, 256, 256, 256]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            stride = 2 if after > before > 3 else 1
            layers += [
                nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(),
            ]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))

    @staticmethod
    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        """Draw images and classes."""
        return torch.randn(8, 3, 32, 32), torch.randint(10, (8,))


MODELS = {"mlp": Mlp, "gpt": Gpt, "cnn": Cnn}


class Step:
    """One variant's training step."""

    def __init__(
        self,
        model: Mlp | Gpt | Cnn,
        wrap: Callable[[nn.Module], nn.Module],
        *,
        sharded: bool = False,
    ) -> None:
        self._inputs, self._labels = model.batch()
        self._model = wrap(model)
        options = {"lr": 1e-3, "momentum": 0.9, "foreach": True}
        self._optimizer = (
            rankstep.ShardedOptimizer(self._model, torch.optim.SGD, **options)
            if sharded
            else torch.optim.SGD(model.parameters(), **options)
        )

    def prepare(self) -> None:
        """Nothing is outside the clock."""

    def timed(self) -> None:
        """Run the step."""
        self._optimizer.zero_grad()
        functional.cross_entropy(self._model(self._inputs), self._labels).backward()
        self._optimizer.step()


class AllReduce:
    """The bytes of the gradients in one piece, and nothing else."""

    def __init__(self, model: nn.Module) -> None:
        self._flat = torch.zeros(sum(param.numel() for param in model.parameters()))

    def prepare(self) -> None:
        """Nothing is outside the clock."""

    def timed(self) -> None:
        """Send and sum."""
        dist.all_reduce(self._flat)


def job(model: str, names: list[str], rounds: int, repeats: int) -> list:
    make = MODELS[model]
    trials: dict[str, common.Trial] = {LOCAL: Step(make(), lambda plain: plain)}
    trials |= {name: Step(make(), WRAPPERS[name], sharded=name == SHARDED) for name in names}
    trials[ALL_REDUCE] = AllReduce(make())
    return common.take_turns(trials, rounds, repeats)


def figures(model: str, rounds: common.Rounds) -> common.Table:
    """All that is told about one model."""
    tuned = [name for name in rounds.wall if name.startswith("torch")]
    best = min(tuned, key=lambda name: statistics.median(rounds.wall[name]))
    return common.Table(
        {
            name: {
                "wall_ms": common.Spread.of(value * MS for value in each),
                "cpu_ms_per_rank": common.Spread.of(value * MS for value in rounds.cpu[name]),
                "ratio_to_torch_default": common.paired(each, rounds.wall[common.TORCH]),
                "ratio_to_torch_best": common.paired(each, rounds.wall[best]),
                "ratio_to_local": common.paired(each, rounds.wall[LOCAL]),
            }
            for name, each in rounds.wall.items()
        },
        rounds.told(),
        gradients(model) | {"torch_best": best},
    )


def gradients(model: str) -> dict:
    """Say how many there are of a model, and of how many bytes."""
    params = list(MODELS[model]().parameters())
    return {"tensors": len(params), "gradient_bytes": sum(param.nbytes for param in params)}


def bar_of(model: str, table: common.Table, name: str, limit: float) -> common.Bar:
    """What a variant's step must not exceed."""
    own = "sharded step" if name == SHARDED else "step"
    return common.bar_at(
        f"{model}: {own} as a share of torch default's",
        limit,
        {model: table},
        (model, name, "ratio_to_torch_default"),
    )


def tell_steps(
    model: str, ranks: int, table: common.Table, quickest: str, last: str, but: str = ""
) -> None:
    """Print one model's table.

    Args:
        model: Its name.
        ranks: How many took part.
        table: What was measured.
        quickest: Of which kind the quickest one of torch's is.
        last: What the last ratio is to: ``local`` or ``limit``.
        but: This variant is left out.
    """
    facts = table.facts
    against = {"limit": "the limit"}.get(last, last)
    common.tell_table(
        f"{model}: {facts['gradient_bytes'] / MB:.1f} MB in {facts['tensors']} tensors, {common.ranks(ranks)}, one step; "
        f"quickest {quickest}: {facts['torch_best'].removeprefix('torch ')}",
        (
            "",
            "wall ms",
            "CPU ms of a rank",
            "of torch default",
            "of quickest torch",
            f"of {against}",
        ),
        [
            (
                name,
                common.cell(own["wall_ms"], ".1f"),
                common.cell(own["cpu_ms_per_rank"], ".1f"),
                common.cell(own["ratio_to_torch_default"], ".3f"),
                common.cell(own["ratio_to_torch_best"], ".3f"),
                common.cell(own[f"ratio_to_{last}"], ".3f"),
            )
            for name, own in table.variants.items()
            if name != but
        ],
    )


def main() -> None:
    parser = common.parser(__doc__, EXAMPLE)
    parser.add_argument(
        "--model", choices=[*MODELS, "all"], default="all", help="default: %(default)s"
    )
    parser.add_argument("--ranks", type=common.count, default=2, help="default: %(default)s")
    parser.add_argument("--rounds", type=common.count, default=20, help="default: %(default)s")
    parser.add_argument(
        "--repeats", type=common.count, default=5, help="steps in a turn; default: %(default)s"
    )
    common.add_variants(parser, WRAPPERS)
    args = parser.parse_args()
    # Ratios are to torch as it comes, so it always takes part.
    names = [name for name in WRAPPERS if name in {*args.variants, common.TORCH}]
    common.require_quiet(args.ranks, allow_busy=args.allow_busy)
    machine = common.machine()
    common.tell_machine(machine)

    results, bars = {}, []
    for model in MODELS if args.model == "all" else [args.model]:
        told = common.on_ranks(args.ranks, job, model, names, args.rounds, args.repeats)
        rounds = common.Rounds.of(told, statistics.median)
        results[model] = result = figures(model, rounds)
        tell_steps(model, args.ranks, result, "torch", "local")
        common.tell_rounds(rounds)
        limits = {common.RANKSTEP: BAR, SHARDED: SHARDED_BARS[model]}
        bars += [bar_of(model, result, name, limits[name]) for name in names if name in limits]
    common.tell_bars(bars)
    settings = common.settings(args, "model", "ranks", "rounds", "repeats")
    common.write_result(args.json, "step", machine, settings, results, bars)


if __name__ == "__main__":
    main()
