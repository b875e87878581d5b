"""How long one collective takes, from 4 KiB to 64 MiB: gloo's own against the communicator that Rankstep picks.

On one host that is shared memory; between hosts (`network.sh`) messages of its own for reduce-scatter and all-gather,
and shared memory inside each host if it has several ranks. Tensors are of float32 and lie where the communicator wants
gradients to lie. Between hosts an all-reduce with bfloat16 on the wire takes part, too.
"""

from __future__ import annotations

import functools
import gc
import statistics
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import common
from rankstep.collectives import communicator_for
from rankstep.collectives.wired import WiredCommunicator

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankstep.collectives import Communicator

EXAMPLE = "python benchmarks/allreduce.py --kib 4 1024 25600 --json allreduce.json"
GLOO, OWN, HALVES = "gloo", "rankstep", "rankstep bf16 wire"
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all_reduce", "reduce_scatter", "all_gather"
SIZES_KIB = (4, 16, 64, 256, 1024, 4096, 16384, 25600, 65536)
CPU = torch.device("cpu")
MS = 1e3
BARS = {25600: 0.25, 4: 1.00}
"""All-reduce of 2 ranks on one host: for so many KiB, at most this share of gloo's time."""

TURN_BYTES = 8 * 1024 * 1024
MOST_CALLS = 64


class Calls:
    """One collective, so often in a row that it can be timed."""

    def __init__(self, call: Callable[[], None], calls: int) -> None:
        self._call = call
        self._calls = calls

    def prepare(self) -> None:
        """Nothing is outside the clock."""

    def timed(self) -> None:
        """Run it."""
        for _ in range(self._calls):
            self._call()


def of_gloo(what: str, numel: int) -> Callable[[], None]:
    """The process group's own methods, below torch's functions and their checks."""
    group = dist.distributed_c10d._get_default_group()
    flat = torch.zeros(numel)
    parts = list(flat.chunk(group.size()))
    own = torch.zeros_like(parts[0])
    start: Callable[[], Any] = {
        ALL_REDUCE: lambda: group.allreduce([flat]),
        REDUCE_SCATTER: lambda: group.reduce_scatter(own, parts),
        ALL_GATHER: lambda: group.allgather([parts], [own]),
    }[what]
    return lambda: start().wait()


def of_ours(comm: Communicator, what: str, numel: int) -> Callable[[], None]:
    """The communicator's, on memory that it allocates, in place."""
    flat = comm.allocate(numel, torch.float32, CPU)
    parts = list(flat.chunk(comm.world_size))
    own = parts[comm.rank]
    start: Callable[[], Any] = {
        ALL_REDUCE: lambda: comm.all_reduce(flat),
        REDUCE_SCATTER: lambda: comm.reduce_scatter(own, parts),
        ALL_GATHER: lambda: comm.all_gather(parts, own),
    }[what]
    return lambda: start().wait()


def job(what: str, sizes_kib: list[int], rounds: int, repeats: int) -> dict[str, Any]:
    comm = communicator_for(dist.distributed_c10d._get_default_group(), CPU)
    told = {}
    for kib in sizes_kib:
        # A whole number of elements for each rank.
        numel = kib * 256 // comm.world_size * comm.world_size
        calls = max(1, min(MOST_CALLS, TURN_BYTES // (kib * 1024)))
        made = {GLOO: of_gloo(what, numel), OWN: of_ours(comm, what, numel)}
        if what == ALL_REDUCE and common.hosts() > 1:
            made[HALVES] = of_ours(WiredCommunicator(comm, torch.bfloat16), what, numel)
        trials = {name: Calls(call, calls) for name, call in made.items()}
        told[str(kib)] = {
            "calls": calls,
            "numel": numel,
            "rounds": common.take_turns(trials, rounds, repeats),
        }
    way = getattr(comm, "way", "sockets")
    del comm, made, trials
    gc.collect()
    return {"way": way, "sizes": told}


def figures(kib: int, way: str, told: list[dict[str, Any]]) -> common.Table:
    """What is told about one size."""
    calls, numel = told[0]["calls"], told[0]["numel"]
    rounds = common.Rounds.of([each["rounds"] for each in told], statistics.median)
    return common.Table(
        {
            name: {
                "wall_ms": common.Spread.of(MS * value / calls for value in each),
                "cpu_ms_per_rank": common.Spread.of(
                    MS * value / calls for value in rounds.cpu[name]
                ),
                "ratio_to_gloo": common.paired(each, rounds.wall[GLOO]),
            }
            for name, each in rounds.wall.items()
        },
        rounds.told(),
        {"kib": kib, "numel": numel, "calls": calls, "way": way},
    )


def main() -> None:
    parser = common.parser(__doc__, EXAMPLE)
    parser.add_argument(
        "--collective",
        choices=[ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER],
        default=ALL_REDUCE,
        help="default: %(default)s",
    )
    parser.add_argument(
        "--kib",
        nargs="+",
        type=common.count,
        metavar="KIB",
        default=list(SIZES_KIB),
        help="sizes of the whole tensor; default: 4 KiB to 64 MiB",
    )
    common.add_ranks(parser)
    parser.add_argument("--rounds", type=common.count, default=12, help="default: %(default)s")
    parser.add_argument(
        "--repeats", type=common.count, default=3, help="in a turn; default: %(default)s"
    )
    args = parser.parse_args()
    common.require_quiet(args.ranks, allow_busy=args.allow_busy)
    machine = common.machine()
    common.tell_machine(machine)

    told = common.on_ranks(args.ranks, job, args.collective, args.kib, args.rounds, args.repeats)
    way = told[0]["way"]
    results = {
        f"{kib} KiB": figures(kib, way, [each["sizes"][str(kib)] for each in told])
        for kib in args.kib
    }
    rows = []
    for size, result in results.items():
        for name, own in result.variants.items():
            cells = map(functools.partial(common.cell, spec=".3f"), list(own.values()))
            rows.append((size if name == GLOO else "", name, *cells))
    common.tell_table(
        f"{args.collective} of float32, {common.ranks(args.ranks)}; Rankstep goes through {way}",
        ("", "", "wall ms", "CPU ms of a rank", "of gloo"),
        rows,
    )
    disturbed = sum(result.rounds["disturbed"] for result in results.values())
    dropped = sum(result.rounds["dropped"] for result in results.values())
    print(f"{len(results) * args.rounds - dropped} of {len(results) * args.rounds} rounds kept")
    if disturbed > dropped:
        common.warn(
            "Too few rounds were quiet, so disturbed ones count too: DO NOT QUOTE THESE FIGURES."
        )
    bars = []
    if args.collective == ALL_REDUCE and args.ranks == 2 and common.hosts() == 1:
        for kib, limit in BARS.items():
            if kib in args.kib:
                what = f"all-reduce of {kib} KiB as a share of gloo's"
                place = (f"{kib} KiB", OWN, "ratio_to_gloo")
                bars.append(common.bar_at(what, limit, results, place))
    common.tell_bars(bars)
    settings = common.settings(args, "collective", "ranks", "rounds", "repeats")
    settings["hosts"] = common.hosts()
    common.write_result(args.json, "allreduce", machine, settings, results, bars)


if __name__ == "__main__":
    main()
