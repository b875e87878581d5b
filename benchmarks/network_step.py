"""How long a whole training step takes where a slow link lies between the ranks, and what fewer bytes cost in accuracy.

Run it in `network.sh`, which makes two hosts and a link on one machine, or by torchrun on real hosts. Four limits take
part: ``local`` is the same step without any communication; ``all-reduce alone`` sends the gradients in one piece by gloo
and computes nothing; ``link alone`` moves between the hosts only the bytes of one exchange; ``the larger`` of the first
and the last is what no exact way can beat unless it goes on into the next step, or packs what it sends.

Variants that send less than the exact gradient are compared with it: the error of one step's gradient, as a norm (L2)
and at its largest, each relative to the exact gradient's. PowerSGD keeps what it left out and adds it in the next step,
so its error in a single step is not what a training sees.
"""

from __future__ import annotations

import copy
import functools
import gc
import logging
import os
import statistics
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from step import (
    ALL_REDUCE,
    LOCAL,
    MODELS,
    MS,
    SHARDED,
    TUNED,
    AllReduce,
    Step,
    gradients,
    tell_steps,
)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import common
import rankstep

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

EXAMPLE = "benchmarks/network.sh network_step.py --model mlp --json network-mlp.json"
LINK = "link alone"
LIMIT = "the larger"
AUTO = "rankstep, auto"
PACKED = "rankstep packed wire"
AUTO_STEPS = 14
"""After so many steps it has measured, and has its buckets."""
BARS = {
    common.RANKSTEP: {2: (LIMIT, 1.05), 4: (common.TORCH, 0.75)},
    SHARDED: {2: (LIMIT, 1.05)},
    PACKED: {2: (LIMIT, 1.05), 4: (common.TORCH, 0.75)},
    "rankstep bf16 wire": {2: (common.TORCH, 0.70)},
}
"""For so many ranks on two hosts: compared with what, and at most so much of it."""


def with_hook(
    wrapper: Callable[[nn.Module], Any], hook: Callable[..., Any], state: Callable[[], Any]
) -> Callable[[nn.Module], nn.Module]:
    """Make a variant that reduces by a communication hook."""

    def wrap(model: nn.Module) -> nn.Module:
        wrapped = wrapper(model)
        wrapped.register_comm_hook(state(), hook)
        return wrapped

    return wrap


def power_sgd() -> powerSGD_hook.PowerSGDState:
    """Start at once, where torch by default waits for the thousandth step."""
    return powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2
    )


OURS = rankstep.DistributedDataParallel
EXACT: dict[str, Callable[[nn.Module], nn.Module]] = {
    common.RANKSTEP: OURS,
    "rankstep, 1 MiB": functools.partial(OURS, bucket_cap_mb=1),
    AUTO: functools.partial(OURS, bucket_cap_mb="auto"),
    SHARDED: OURS,
    PACKED: functools.partial(OURS, wire_dtype="packed"),
    common.TORCH: TorchDDP,
} | {
    f"torch all three, {cap} MiB": functools.partial(TorchDDP, bucket_cap_mb=cap, **TUNED)
    for cap in (1, 5, 25, 100)
}
LOSSY: dict[str, Callable[[nn.Module], nn.Module]] = {
    "rankstep bf16 wire": functools.partial(OURS, wire_dtype=torch.bfloat16),
    "rankstep fp16 wire": functools.partial(OURS, wire_dtype=torch.float16),
    "rankstep PowerSGD 2": with_hook(OURS, powerSGD_hook.powerSGD_hook, power_sgd),
    "torch fp16 hook": with_hook(TorchDDP, default_hooks.fp16_compress_hook, lambda: None),
    "torch PowerSGD 2": with_hook(TorchDDP, powerSGD_hook.powerSGD_hook, power_sgd),
}
WRAPPERS = EXACT | LOSSY
ORDERLESS = {"rankstep PowerSGD 2", "torch PowerSGD 2"}
"""Left out of more than two ranks unless asked for: on four, gloo ends with "Received data size doesn't match expected
size", in torch's own wrapper, too. The hook starts the second and third all-reduce of a bucket in callbacks, so with
several buckets nothing fixes their order, by which gloo pairs them."""


class Link:
    """Only what has to cross between the hosts: each sends its sum of half of the gradients, and half of the result.

    The first ranks of two hosts exchange it; the others wait for them, since a time is the mean over all ranks.
    """

    def __init__(self, model: nn.Module, hosts: int, ranks_per_host: int) -> None:
        numel = sum(param.numel() for param in model.parameters())
        rank = dist.get_rank()
        self._chunks: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._peers = [host * ranks_per_host for host in range(hosts)]
        if rank in self._peers:
            self._peers.remove(rank)
            for chunk in torch.zeros(2 * numel // hosts).split(2**18):
                self._chunks.append((chunk, torch.empty_like(chunk)))

    def prepare(self) -> None:
        """Nothing is outside the clock."""

    def timed(self) -> None:
        """Exchange."""
        works = []
        for tag, (out, into) in enumerate(self._chunks):
            for peer in self._peers:
                works.append(dist.irecv(into, peer, tag=tag))
                works.append(dist.isend(out, peer, tag=tag))
        for work in works:
            work.wait()
        dist.barrier()


def job(model: str, names: list[str], rounds: int, repeats: int) -> dict[str, Any]:
    make = MODELS[model]
    hosts = common.hosts()
    trials: dict[str, common.Trial] = {LOCAL: Step(make(), lambda plain: plain)}
    trials |= {name: Step(make(), WRAPPERS[name], sharded=name == SHARDED) for name in names}
    trials[ALL_REDUCE] = AllReduce(make())
    if hosts > 1:
        trials[LINK] = Link(make(), hosts, dist.get_world_size() // hosts)
    for _ in range(AUTO_STEPS if AUTO in trials else 0):
        trials[AUTO].timed()
    told = common.take_turns(trials, rounds, repeats)
    del trials
    gc.collect()
    return {
        "rounds": told,
        "errors": {name: error_of(make, WRAPPERS[name]) for name in names if name in LOSSY},
    }


def error_of(
    make: Callable[[], Any], wrap: Callable[[nn.Module], nn.Module], steps: int = 6
) -> dict[str, float]:
    """Compare the gradient that a variant leaves after some steps with the exact one of the same weights and batch."""
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(1000 + dist.get_rank())
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for _ in range(steps):
        inputs, labels = model.batch()
        plain = copy.deepcopy(model)
        plain.zero_grad()
        functional.cross_entropy(plain(inputs), labels).backward()
        exact = torch.cat([param.grad.flatten() for param in plain.parameters()])
        optimizer.zero_grad()
        functional.cross_entropy(wrapped(inputs), labels).backward()
        found = torch.cat([param.grad.flatten() for param in model.parameters()])
        optimizer.step()
    dist.all_reduce(exact)
    exact /= dist.get_world_size()
    off = (found - exact).double()
    told = {
        "error_l2": (off.norm() / exact.double().norm()).item(),
        "error_largest": (off.abs().max() / exact.abs().max()).item(),
    }
    del wrapped, optimizer, model, plain
    gc.collect()
    return told


def figures(model: str, rounds: common.Rounds, errors: dict[str, dict[str, float]]) -> common.Table:
    """All that is told about one model."""
    wall = dict(rounds.wall)
    link = wall.get(LINK, wall[ALL_REDUCE])
    limit = [max(pair) for pair in zip(wall[LOCAL], link, strict=True)]
    tuned = [name for name in wall if name in EXACT and name.startswith("torch")]
    best = min(tuned, key=lambda name: statistics.median(wall[name]))
    exact = wall.get(common.RANKSTEP, wall[best])
    return common.Table(
        {
            name: {
                "wall_ms": common.Spread.of(value * MS for value in each),
                "cpu_ms_per_rank": common.Spread.of(value * MS for value in rounds.cpu[name]),
                "ratio_to_torch_default": common.paired(each, wall[common.TORCH]),
                "ratio_to_torch_best": common.paired(each, wall[best]),
                "ratio_to_limit": common.paired(each, limit),
                "saved_ms": common.Spread.of(
                    MS * (before - after) for before, after in zip(exact, each, strict=True)
                ),
            }
            | errors.get(name, {})
            for name, each in wall.items()
        }
        | {LIMIT: {"wall_ms": common.Spread.of(value * MS for value in limit)}},
        rounds.told(),
        gradients(model) | {"torch_best": best},
    )


def bars_of(model: str, ranks: int, table: common.Table) -> list[common.Bar]:
    """What the project has set itself for the MLP."""
    if model != "mlp" or common.hosts() == 1:
        return []
    found = []
    for name, by_ranks in BARS.items():
        if ranks in by_ranks and name in table.variants:
            against, limit = by_ranks[ranks]
            key = "ratio_to_limit" if against == LIMIT else "ratio_to_torch_default"
            what = f"{model}, {os.environ.get('RANKSTEP_BENCH_LINK', '')}: {name} as a share of {against}"
            found.append(common.bar_at(what, limit, {model: table}, (model, name, key)))
    return found


def main() -> None:
    # PowerSGD tells about every bucket of every rank.
    logging.getLogger("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook").disabled = True
    parser = common.parser(__doc__, EXAMPLE)
    parser.add_argument("--model", choices=[*MODELS], default="mlp", help="default: %(default)s")
    common.add_ranks(parser)
    parser.add_argument("--rounds", type=common.count, default=8, help="default: %(default)s")
    parser.add_argument(
        "--repeats", type=common.count, default=2, help="steps in a turn; default: %(default)s"
    )
    common.add_variants(parser, WRAPPERS, default="all, without PowerSGD on more than two ranks")
    args = parser.parse_args()
    wanted = args.variants or (WRAPPERS if args.ranks <= 2 else WRAPPERS.keys() - ORDERLESS)
    names = [name for name in WRAPPERS if name in {*wanted, common.TORCH}]
    common.require_quiet(args.ranks, allow_busy=args.allow_busy)
    machine = common.machine()
    common.tell_machine(machine)

    told = common.on_ranks(args.ranks, job, args.model, names, args.rounds, args.repeats)
    rounds = common.Rounds.of([each["rounds"] for each in told], statistics.median)
    result = figures(args.model, rounds, told[0]["errors"])
    tell_steps(args.model, args.ranks, result, "exact torch", "limit", LIMIT)
    common.tell_rounds(rounds)
    if any(name in LOSSY for name in names):
        common.tell_table(
            "what fewer bytes lose and save: error of one step's gradient, relative to the exact one's; time against "
            "the exact Rankstep",
            ("", "error, L2", "error, largest", "ms saved"),
            [
                (
                    name,
                    f"{own['error_l2']:.2e}",
                    f"{own['error_largest']:.2e}",
                    common.cell(own["saved_ms"], ".1f"),
                )
                for name, own in result.variants.items()
                if "error_l2" in own
            ],
        )
    bars = bars_of(args.model, args.ranks, result)
    common.tell_bars(bars)
    settings = common.settings(args, "model", "ranks", "rounds", "repeats")
    settings["hosts"] = common.hosts()
    tables = {args.model: result}
    common.write_result(args.json, "network_step", machine, settings, tables, bars)


if __name__ == "__main__":
    main()
