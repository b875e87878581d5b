"""What data parallelism costs per parameter: zero_grad + backward of 1,000 tiny parameters, over the plain model.

Half of the parameters are 8x8, half have 8 elements: so little arithmetic that what remains is the machinery around
each gradient: a hook, a copy into a bucket, a hand-back. The graph is built outside the clock; zero_grad and backward
are timed as one, since releasing a gradient only moves between the two. With one rank this is the price of the hooks
alone, with two ranks every variant also sends its buckets.
"""

from __future__ import annotations

import torch
from torch import nn

import common

EXAMPLE = "python benchmarks/hook_overhead.py --ranks 2 --json hook_overhead.json"
SIDE = 8
US = 1e6


class Bank(nn.Module):
    """Small layers side by side: each parameter gets one gradient, and no value vanishes on a long way."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(layers))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Sum everything up."""
        return torch.stack([layer(inputs) for layer in self.layers]).sum()


class Backward:
    """zero_grad and backward of one variant."""

    def __init__(self, name: str, parameters: int, *, set_to_none: bool) -> None:
        bank = Bank(parameters // 2)
        self._model = common.WRAPPERS[name](bank) if name != common.PLAIN else bank
        self._optimizer = torch.optim.SGD(bank.parameters(), lr=0.0, foreach=True)
        self._inputs = torch.randn(4, SIDE)
        self._set_to_none = set_to_none

    def prepare(self) -> None:
        """Build the graph."""
        self._loss = self._model(self._inputs)

    def timed(self) -> None:
        """What a training loop calls."""
        self._optimizer.zero_grad(set_to_none=self._set_to_none)
        self._loss.backward()


def job(parameters: int, set_to_none: bool, rounds: int, repeats: int) -> list:
    trials = {
        name: Backward(name, parameters, set_to_none=set_to_none)
        for name in (common.PLAIN, *common.WRAPPERS)
    }
    return common.take_turns(trials, rounds, repeats)


def costs(times: dict[str, list[float]], parameters: int) -> dict[str, list[float]]:
    """Microseconds per parameter over plain, in each round."""
    return {
        name: [
            (own - plain) / parameters * US
            for own, plain in zip(each, times[common.PLAIN], strict=True)
        ]
        for name, each in times.items()
        if name != common.PLAIN
    }


def figures(rounds: common.Rounds, parameters: int) -> common.Table:
    """All that is told about one way to call zero_grad."""
    wall, cpu = costs(rounds.wall, parameters), costs(rounds.cpu, parameters)
    spreads = {name: common.Spread.of(each) for name, each in wall.items()}
    tuned = [name for name in wall if name not in {common.RANKSTEP, common.TORCH}]
    best = min([common.TORCH, *tuned], key=lambda name: spreads[name].median)
    plain = [value / parameters * US for value in rounds.wall[common.PLAIN]]
    return common.Table(
        {
            name: {
                "wall_us_per_parameter": spreads[name],
                "cpu_us_per_parameter": common.Spread.of(cpu[name]),
                "ratio_to_torch_default": common.paired(each, wall[common.TORCH]),
                "ratio_to_torch_best": common.paired(each, wall[best]),
            }
            for name, each in wall.items()
        },
        rounds.told(),
        {"plain_us_per_parameter": common.Spread.of(plain), "torch_best": best},
    )


def tell(result: common.Table, rounds: common.Rounds, ranks: int, *, set_to_none: bool) -> None:
    rows = [
        (
            name,
            f"{told['wall_us_per_parameter'].min:.2f}",
            common.cell(told["wall_us_per_parameter"]),
            common.cell(told["cpu_us_per_parameter"]),
            common.cell(told["ratio_to_torch_default"]),
            common.cell(told["ratio_to_torch_best"]),
        )
        for name, told in result.variants.items()
    ]
    common.tell_table(
        f"zero_grad(set_to_none={set_to_none}) + backward, {common.ranks(ranks)}: "
        f"us per parameter over plain, which takes {result.facts['plain_us_per_parameter'].median:.2f}; "
        f"quickest torch: {result.facts['torch_best'].removeprefix('torch ')}",
        ("", "min", "wall", "CPU of a rank", "of torch default", "of quickest torch"),
        rows,
    )
    common.tell_rounds(rounds)


def bar_of(modes: dict[str, common.Table], ranks: int) -> common.Bar:
    """The figure that the project promises: one for each number of ranks."""
    if ranks == 1:
        what, limit, figure = "us per parameter over plain, 1 rank", 2.0, "wall_us_per_parameter"
    else:
        what = f"cost as a share of torch default's, {ranks} ranks"
        limit, figure = 0.5, "ratio_to_torch_default"
    return common.bar_at(what, limit, modes, ("set_to_none=True", common.RANKSTEP, figure))


def main() -> None:
    parser = common.parser(__doc__, EXAMPLE)
    parser.add_argument("--ranks", type=common.count, default=1, help="default: %(default)s")
    parser.add_argument(
        "--parameters", type=common.count, default=1000, help="default: %(default)s"
    )
    parser.add_argument("--rounds", type=common.count, default=30, help="default: %(default)s")
    parser.add_argument(
        "--repeats", type=common.count, default=5, help="backwards in a turn; default: %(default)s"
    )
    args = parser.parse_args()
    if args.parameters % 2:
        parser.error("--parameters: every layer has two, so the number must be even")
    common.require_quiet(args.ranks, allow_busy=args.allow_busy)
    machine = common.machine()
    common.tell_machine(machine)

    modes = {}
    for set_to_none in (True, False):
        told = common.on_ranks(
            args.ranks, job, args.parameters, set_to_none, args.rounds, args.repeats
        )
        # Whatever disturbs a repetition makes it longer, so the quickest of a turn is the truest.
        rounds = common.Rounds.of(told, min)
        result = figures(rounds, args.parameters)
        tell(result, rounds, args.ranks, set_to_none=set_to_none)
        modes[f"set_to_none={set_to_none}"] = result
    bars = [bar_of(modes, args.ranks)]
    common.tell_bars(bars)
    settings = common.settings(args, "ranks", "parameters", "rounds", "repeats")
    common.write_result(args.json, "hook_overhead", machine, settings, modes, bars)


if __name__ == "__main__":
    main()
