"""How soon a sampler hands out its first index, and how much memory that takes.

Three ways to deal a shuffled epoch to 8 ranks, measured on one of them: Rankstep's streaming order, Rankstep with torch's
order, and torch's own sampler. Each measurement is a fresh process, the three take turns, and the memory is what the
process grew by at its highest (resident pages, so allocations of torch and numpy count too).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

WORLD_SIZE = 8
CASES = ("rankstep streaming", "rankstep torch order", "torch")
EXAMPLE = """example:
  python benchmarks/sampler.py --length 1000000 --streaming-length 1000000 --runs 3
"""


class OnlyALength:
    """A dataset of which nothing but the length is real."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length


def memory_bytes(field):
    """Read one of Linux's counters for this process (VmRSS: now, VmHWM: at its highest)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(case, length):
    """Print the time and memory of one sampler in this process; everything is imported before the clock starts."""
    from torch.utils.data.distributed import DistributedSampler as TorchSampler

    from rankstep.data import DistributedSampler

    makers = {
        "rankstep streaming": lambda data: DistributedSampler(
            data, WORLD_SIZE, 0, order="streaming"
        ),
        "rankstep torch order": lambda data: DistributedSampler(data, WORLD_SIZE, 0),
        "torch": lambda data: TorchSampler(data, WORLD_SIZE, 0),
    }
    make = makers[case]
    next(iter(make(OnlyALength(WORLD_SIZE))))  # loads what is loaded on first use
    before_bytes = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text(
        "5", encoding="ascii"
    )  # forget the highest mark so far
    start_ns = time.perf_counter_ns()
    indices = iter(make(OnlyALength(length)))
    next(indices)
    ready_ms = (time.perf_counter_ns() - start_ns) / 1e6
    peak_mib = max(memory_bytes("VmHWM") - before_bytes, 0) / 2**20
    print(json.dumps({"ready_ms": ready_ms, "peak_mib": peak_mib}))


def run_fresh(case, length):
    command = [sys.executable, __file__, "--one", case, "--length", str(length)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def spread(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def compare(lengths, runs):
    taken = {case: [] for case in lengths}
    for _ in range(runs):
        for case, length in lengths.items():
            taken[case].append(run_fresh(case, length))
    return {
        case: {
            "length": lengths[case],
            **{key: spread([one[key] for one in ones]) for key in ("ready_ms", "peak_mib")},
        }
        for case, ones in taken.items()
    }


def show(report):
    versions = report["versions"]
    print(
        f"Rankstep {versions['rankstep']}, torch {versions['torch']}, Python {versions['python']}; "
        f"rank 0 of {WORLD_SIZE}, {report['runs']} runs, median (min-max)\n"
    )
    print(f"{'sampler':<22}{'samples':>14}{'ready, ms':>28}{'peak, MiB':>28}")
    for case, row in report["cases"].items():
        cells = (
            "{median:.2f} ({min:.2f}-{max:.2f})".format(**row[key])
            for key in ("ready_ms", "peak_mib")
        )
        print(f"{case:<22}{row['length']:>14,}" + "".join(f"{cell:>28}" for cell in cells))


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--length", type=int, default=10**7, help="samples for both torch orders (default: 10**7)"
    )
    parser.add_argument(
        "--streaming-length",
        type=int,
        default=10**9,
        help="samples for the streaming order (default: 10**9)",
    )
    parser.add_argument("--runs", type=int, default=5, help="runs of each (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if min(arguments.length, arguments.streaming_length, arguments.runs) < 1:
        parser.error("--length, --streaming-length and --runs must be at least 1")
    return arguments


def main():
    arguments = parse_arguments()
    if arguments.one:
        measure(arguments.one, arguments.length)
        return

    import torch

    import rankstep

    lengths = dict.fromkeys(CASES, arguments.length)
    lengths["rankstep streaming"] = arguments.streaming_length
    report = {
        "versions": {
            "rankstep": rankstep.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "world_size": WORLD_SIZE,
        "runs": arguments.runs,
        "cases": compare(lengths, arguments.runs),
    }
    show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
