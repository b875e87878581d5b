"""What the benchmarks share: who is compared, how ranks start, how rounds are timed, and how the result is told.

Times on a shared machine drift by more than the differences that matter here. Three things make them comparable:

* All variants live in one process per rank and take turns. A *round* gives each its turn, in an order drawn anew for
  every two rounds, forwards and then backwards. Variants are compared within a round; the spread is that over rounds.
* Only what is named is timed: each repetition is prepared outside the clock, all ranks start it together, the first of
  a turn does not count (caches belong to the variant before), and the garbage collector runs between rounds only.
* The machine must be quiet. A benchmark refuses to start while others use it, and drops the rounds in which others
  used more than a quarter of one core.

A benchmark starts its ranks itself, or is one of the ranks that a launcher starts (`network.sh`, torchrun): then every
rank runs the whole script, and rank 0 alone tells and writes.
"""

from __future__ import annotations

import argparse
import atexit
import datetime as dt
import functools
import gc
import importlib.metadata
import json
import os
import platform
import random
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from result import Bar, Result, Spread, Table
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import rankstep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

QUIET_CORES = 0.25
"""So many cores may be busy with other programs; more disturbs."""

WATCH_S = 1.0
"""How long a benchmark looks at the machine before it starts."""

PLAIN = "plain"
RANKSTEP = "rankstep"
TORCH = "torch default"

WRAPPERS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    RANKSTEP: rankstep.DistributedDataParallel,
    TORCH: TorchDDP,
    "torch view": functools.partial(TorchDDP, gradient_as_bucket_view=True),
    "torch batched": functools.partial(TorchDDP, batched_grad_copy=True),
    "torch static": functools.partial(TorchDDP, static_graph=True),
    "torch all three": functools.partial(
        TorchDDP, gradient_as_bucket_view=True, batched_grad_copy=True, static_graph=True
    ),
}
"""Rankstep as it comes, and torch as it comes and tuned; `PLAIN` is the model without a wrapper."""


# ---------------------------------------------------------------- the command line


def parser(description: str, example: str) -> argparse.ArgumentParser:
    """Make a parser that has the switches of every benchmark."""
    made = argparse.ArgumentParser(
        description=description.partition("\n")[0],
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    made.add_argument(
        "--allow-busy", action="store_true", help="measure although others use the machine"
    )
    return made


def add_variants(
    to: argparse.ArgumentParser, names: Iterable[str], *, default: str | None = None
) -> None:
    """Let the user choose among ``names``; with a ``default`` that says which, the script has to choose if nobody does."""
    choices = list(names)
    to.add_argument(
        "--variants",
        nargs="+",
        metavar="NAME",
        choices=choices,
        default=None if default else choices,
        help=f"what to compare, of: {', '.join(map(repr, choices))}; default: {default or 'all'}",
    )


def count(text: str) -> int:
    """Read a command line's positive whole number."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def add_ranks(to: argparse.ArgumentParser) -> None:
    """Let the user choose how many ranks; a launcher has chosen already."""
    to.add_argument(
        "--ranks",
        type=count,
        default=int(os.environ["WORLD_SIZE"]) if launched() else 2,
        help="default: 2, or as many as a launcher started",
    )


# ---------------------------------------------------------------- the machine


def machine() -> dict[str, str]:
    """Say what a result was measured on, and by which command."""
    cpu = platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    script, *arguments = sys.argv
    launcher = os.environ.get("RANKSTEP_BENCH_LAUNCHER", "python")
    link = os.environ.get("RANKSTEP_BENCH_LINK")
    return {
        "cpu": cpu,
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rankstep": importlib.metadata.version("rankstep"),
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "command": f"{launcher} benchmarks/{Path(script).name} {shlex.join(arguments)}".strip(),
    } | ({"link": link} if link else {})


def hosts() -> int:
    """Say on how many hosts a launcher started the ranks; 1 without a launcher."""
    return int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]) if launched() else 1


def machine_id() -> str:
    """Tell machines apart, containers and network namespaces on one not."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@dataclass(frozen=True)
class Mark:
    """A moment, in seconds: of the clock, of this process's CPU time, of the busy time of all cores."""

    clock: float
    own: float
    busy: float

    @classmethod
    def now(cls) -> Mark:
        """Look at all three."""
        with Path("/proc/stat").open(encoding="ascii") as stat:
            user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(
                int, stat.readline().split()[1:]
            )
        # Stolen time counts: another machine on the same host disturbs like another program.
        ticks = user + nice + system + irq + softirq + steal
        busy = ticks / os.sysconf("SC_CLK_TCK")
        return cls(time.perf_counter(), time.process_time(), busy)


def foreign_cores(begins: Sequence[Mark], ends: Sequence[Mark]) -> float:
    """Say how many cores were busy with other programs, given the marks of all ranks."""
    own = sum(end.own - begin.own for begin, end in zip(begins, ends, strict=True))
    busy = ends[0].busy - begins[0].busy
    return max(0.0, busy - own) / (ends[0].clock - begins[0].clock)


def require_quiet(world_size: int, *, allow_busy: bool) -> None:
    """End the program if others use too much of the machine right now to measure anything."""
    if launched():
        _join()
        # The others sleep while rank 0 looks: starting up is work, too.
        dist.barrier()
        refusal = ""
        if dist.get_rank() == 0:
            try:
                _look_around(world_size, allow_busy=allow_busy)
            except SystemExit as refused:
                refusal = str(refused)
        refusal = _tell_all(refusal)[0]
        if refusal:
            raise SystemExit(refusal if dist.get_rank() == 0 else 1)
        return
    _look_around(world_size, allow_busy=allow_busy)


def _look_around(world_size: int, *, allow_busy: bool) -> None:
    cores = len(os.sched_getaffinity(0))
    if world_size > cores:
        warn(
            f"{ranks(world_size)} share {cores} cores: this shows that they work, not how fast they are."
        )
    begin = Mark.now()
    time.sleep(WATCH_S)
    foreign = foreign_cores([begin], [Mark.now()])
    if foreign > QUIET_CORES:
        found = f"other programs use {foreign:.2f} cores, more than {QUIET_CORES} disturbs"
        if not allow_busy:
            raise SystemExit(f"{found}. Wait for a quiet machine, or measure with --allow-busy.")
        warn(f"{found}. DO NOT QUOTE THESE FIGURES.")


def warn(text: str) -> None:
    print(f"*** {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- ranks


def launched() -> bool:
    """Say whether a launcher started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _join() -> None:
    """Open the launcher's group, once, and leave telling to rank 0."""
    if dist.is_initialized():
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    atexit.register(dist.destroy_process_group)
    if dist.get_rank():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - until the process ends


def _tell_all(mine: Any) -> list[Any]:
    """Exchange what JSON can hold through the group's store; returns that of all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"told/{rank}", 1)
    store.set(f"told/{rank}/{number}", json.dumps(mine))
    told = [json.loads(store.get(f"told/{other}/{number}")) for other in range(world_size)]
    dist.barrier()
    return told


def on_ranks(
    world_size: int, job: Callable[..., Any], *args: Any, backend: str = "gloo"
) -> list[Any]:
    """Run ``job(*args)`` in so many new processes, the ranks of one group, or on the launcher's ranks.

    Args:
        world_size: How many.
        job: A function at the top level of a module; returns what JSON can hold.
        args: Its arguments.
        backend: Of the group; a launcher's is always gloo.

    Returns:
        What it returned, in rank order.
    """
    if launched():
        _join()
        if world_size != dist.get_world_size():
            raise SystemExit(
                f"--ranks {world_size}, but the launcher started {dist.get_world_size()}: leave --ranks out"
            )
        torch.manual_seed(dist.get_rank())
        result = job(*args)
        gc.collect()
        return _tell_all(result)
    with tempfile.TemporaryDirectory(prefix="rankstep-bench-") as folder:
        multiprocessing.spawn(
            _rank_main, (world_size, folder, job, args, backend), nprocs=world_size
        )
        return [
            json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8"))
            for rank in range(world_size)
        ]


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    job: Callable[..., Any],
    args: Sequence[Any],
    backend: str,
) -> None:
    # One compute thread per rank, so that ranks do not take each other's cores.
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    try:
        result = job(*args)
        # Wrappers hold the group in reference cycles; one that outlives destroy_process_group may abort the process.
        gc.collect()
        dist.barrier()
    finally:
        dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(result), encoding="utf-8")


# ---------------------------------------------------------------- rounds


class Trial(Protocol):
    """One variant, ready to be timed again and again."""

    def prepare(self) -> None:
        """Do what belongs outside the clock."""

    def timed(self) -> None:
        """Do what is measured."""


def take_turns(
    trials: Mapping[str, Trial], rounds: int, repeats: int, *, warm_up: int = 3
) -> list[dict[str, Any]]:
    """Time all trials on this rank, in turns; every rank calls this with the same arguments.

    Args:
        trials: The variants by name.
        rounds: How many turns each gets.
        repeats: Repetitions that count in a turn.
        warm_up: Repetitions of each before the first round; wrappers rebuild their buckets in their first steps.

    Returns:
        For each round its marks, on which machine that was and, for each variant, the seconds of clock and of this
        rank's CPU time of each repetition.
    """
    for trial in trials.values():
        for _ in range(warm_up):
            trial.prepare()
            trial.timed()
    told = []
    gc.collect()
    gc.freeze()
    gc.disable()
    for number in range(rounds):
        dist.barrier()
        begin = Mark.now()
        drawn = {name: _turn(trials[name], repeats) for name in _order(list(trials), number)}
        dist.barrier()
        times = {name: drawn[name] for name in trials}
        told.append(
            {"begin": asdict(begin), "end": asdict(Mark.now()), "times": times, "on": machine_id()}
        )
        gc.collect()
    gc.enable()
    gc.unfreeze()
    return told


def _order(names: list[str], number: int) -> list[str]:
    """Every two rounds a new random order, the same on all ranks: first forwards, then backwards."""
    drawn = random.Random(number // 2).sample(names, len(names))
    return drawn[::-1] if number % 2 else drawn


def _turn(trial: Trial, repeats: int) -> dict[str, list[float]]:
    wall, cpu = [], []
    for repeat in range(repeats + 1):
        trial.prepare()
        dist.barrier()
        own, clock = time.process_time(), time.perf_counter()
        trial.timed()
        clock, own = time.perf_counter() - clock, time.process_time() - own
        if repeat:
            wall.append(clock)
            cpu.append(own)
    return {"wall": wall, "cpu": cpu}


@dataclass(frozen=True)
class Rounds:
    """The rounds that count, as means over ranks.

    Attributes:
        wall: For each variant, seconds of clock in each round.
        cpu: The same in seconds of a rank's CPU time.
        foreign: Cores that other programs used, in every round that was run.
        disturbed: How many rounds had too much of that.
        dropped: How many are left out for it.
    """

    wall: dict[str, list[float]]
    cpu: dict[str, list[float]]
    foreign: list[float]
    disturbed: int
    dropped: int

    @classmethod
    def of(
        cls, told: Sequence[Sequence[dict[str, Any]]], of_turn: Callable[[Iterable[float]], float]
    ) -> Rounds:
        """Put together what the ranks told, and leave disturbed rounds out if enough others remain.

        Args:
            told: What `take_turns` returned on each rank.
            of_turn: From the repetitions of one turn to one number.
        """
        rounds = list(zip(*told, strict=True))
        foreign = [max(_foreign_by_machine(each)) for each in rounds]
        quiet = [each for each, cores in zip(rounds, foreign, strict=True) if cores <= QUIET_CORES]
        disturbed = len(rounds) - len(quiet)
        kept = quiet if 2 * len(quiet) >= len(rounds) else rounds

        def turn(each: Sequence[dict[str, Any]], name: str, kind: str) -> float:
            of_ranks = [r["times"][name][kind] for r in each]
            return of_turn(statistics.fmean(same) for same in zip(*of_ranks, strict=True))

        names = list(rounds[0][0]["times"])
        wall, cpu = (
            {name: [turn(each, name, kind) for each in kept] for name in names}
            for kind in ("wall", "cpu")
        )
        return cls(wall, cpu, foreign, disturbed, len(rounds) - len(kept))

    @property
    def quiet(self) -> bool:
        """Whether no disturbed round is among those that count."""
        return self.disturbed == self.dropped

    def told(self) -> dict[str, Any]:
        """Say how quiet it was."""
        return {
            "run": len(self.foreign),
            "disturbed": self.disturbed,
            "dropped": self.dropped,
            "quiet": self.quiet,
            "foreign_cores": [round(cores, 3) for cores in self.foreign],
        }


def _foreign_by_machine(told: Sequence[dict[str, Any]]) -> list[float]:
    """Say for each machine how many cores were busy with other programs in a round, as its ranks told it."""
    machines: dict[str, list[dict[str, Any]]] = {}
    for each in told:
        machines.setdefault(each.get("on", ""), []).append(each)
    return [
        foreign_cores([Mark(**r["begin"]) for r in of_one], [Mark(**r["end"]) for r in of_one])
        for of_one in machines.values()
    ]


# ---------------------------------------------------------------- figures


def paired(above: Sequence[float], below: Sequence[float]) -> Spread | None:
    """Quotients within each round; None if noise ate every denominator."""
    pairs = [(a, b) for a, b in zip(above, below, strict=True) if b > 0]
    return Spread.of(a / b for a, b in pairs) if pairs else None


def cell(spread: Spread | None, spec: str = ".2f") -> str:
    """Write a figure that may be missing."""
    return "-" if spread is None else format(spread, spec)


def bar_at(
    what: str, limit: float, tables: Mapping[str, Table], place: tuple[str, str, str]
) -> Bar:
    """Hold the figure that stands there against its limit: of a spread, the median."""
    table, variant, name = place
    figure = tables[table].variants[variant][name]
    return Bar(what, limit, figure.median if isinstance(figure, Spread) else figure, place)


# ---------------------------------------------------------------- telling


def ranks(number: int) -> str:
    """Write a number of ranks."""
    return f"{number} rank{'s' * (number != 1)}"


def tell_machine(facts: Mapping[str, str]) -> None:
    print(f"{facts['cpu']}, {facts['cores']} cores; {facts['date']}")
    print(f"python {facts['python']}, torch {facts['torch']}, rankstep {facts['rankstep']}")
    print(f"$ {facts['command']}")
    if "link" in facts:
        print(f"link: {facts['link']}")


def tell_rounds(rounds: Rounds) -> None:
    kept = len(rounds.foreign) - rounds.dropped
    print(f"{kept} of {len(rounds.foreign)} rounds kept; ", end="")
    print(f"other programs used {Spread.of(rounds.foreign):.2f} cores; median (quartiles)")
    if not rounds.quiet:
        warn("Too few rounds were quiet, so disturbed ones count too: DO NOT QUOTE THESE FIGURES.")


def tell_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print columns: the first to the left, the others to the right."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    print(f"\n{title}")
    for line in lines:
        first, *others = (
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *others]).rstrip())


def tell_bars(bars: Iterable[Bar]) -> None:
    print()
    for bar in bars:
        print(bar)


def settings(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Pick what a result says about its command line."""
    return {name: getattr(args, name) for name in names}


def write_result(
    file: Path | None,
    benchmark: str,
    machine: dict[str, str],
    settings: dict[str, Any],
    tables: dict[str, Table],
    bars: Iterable[Bar],
) -> None:
    """Write a `Result` where ``--json`` asks for it."""
    if file is None or (launched() and dist.get_rank()):
        return
    Result(benchmark, machine, settings, tables, tuple(bars)).write(file)
