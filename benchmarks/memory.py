"""What gradients cost in memory: everything a step keeps or needs beside the model, as a multiple of the gradients.

A plain model keeps its gradients: 1.00. A wrapper that copies them into buckets of its own keeps 2.00; one whose
gradients are views of its buckets needs no more than the plain model, but for a few numbers that travel with them.
Every variant runs in processes of its own, and is looked at from three sides:

* Python: the memory blocks that the ``.grad`` of all parameters lie in.
* The allocator: bytes in use, buffers that Python cannot see included: after a step (the bar is on this), and at most
  during one, seen whenever a gradient has been computed and not yet been taken in.
* The kernel: resident bytes after a step, and at most during one step in the steady state (activations included) and
  during construction; these come in pages and are a little more.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch
from torch import nn

import common

EXAMPLE = "python benchmarks/memory.py --json memory.json"
MB = 1e6
WARM_STEPS = 3
VARIANTS = (common.PLAIN, common.RANKSTEP, common.TORCH, "torch view", "torch all three")
COLUMNS = {
    "through_grad": "through .grad",
    "in_use": "in use after step",
    "in_use_peak": "in step",
    "in_use_cleared": "after zero_grad",
    "resident": "resident after step",
    "resident_peak": "in step",
    "resident_peak_construction": "in construction",
}


class Training:
    """One variant and its steps; activations are small beside the gradients."""

    def __init__(self, layers: int, side: int) -> None:
        self.model = nn.Sequential(*(nn.Linear(side, side) for _ in range(layers)))
        # Without momentum, so that the optimizer keeps nothing of the gradients' size.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self._called: nn.Module = self.model
        self._inputs = torch.randn(4, side)

    def wrap(self, name: str) -> None:
        """Put the variant's wrapper around the model."""
        if name != common.PLAIN:
            self._called = common.WRAPPERS[name](self.model)

    def step(self) -> None:
        """Run one training step."""
        self.optimizer.zero_grad()
        self._called(self._inputs).square().mean().backward()
        self.optimizer.step()

    def peak_in_use(self) -> int:
        """Run one more step, and return the most bytes in use when any gradient came."""
        seen: list[int] = []
        for param in self.model.parameters():
            param.register_hook(lambda _: seen.append(in_use()))
        self.step()
        return max(seen)

    def bytes_through_grad(self) -> int:
        """Count the whole blocks of memory behind ``.grad``, each block once."""
        blocks = (p.grad.untyped_storage() for p in self.model.parameters() if p.grad is not None)
        return sum({block.data_ptr(): block.nbytes() for block in blocks}.values())


class _Mallinfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def in_use() -> int:
    """Bytes that somebody has allocated and nobody released: in the heaps of all threads, and mapped one by one.

    Torch's profiler would count tensors alone, but it misses what a communication thread releases.
    """
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return info.uordblks + info.hblkhd


def resident(field: str) -> int:
    """Bytes of this process in memory by the kernel: ``VmRSS`` now, ``VmHWM`` at most.

    ``getrusage`` would not do: its maximum is inherited from the parent, and cannot be started anew.
    """
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise LookupError(field)


def settle() -> None:
    """Give back to the kernel what nothing refers to any more, and start its maximum anew."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def job(name: str, layers: int, side: int) -> dict[str, int]:
    """Look at one variant; bytes beside the model and whatever a process needs to run a step at all."""
    warm = Training(2, side)
    warm.wrap(name)
    warm.step()
    training = Training(layers, side)
    settle()
    base_in_use, base_resident = in_use(), resident("VmRSS")
    told = {}
    training.wrap(name)
    told["resident_peak_construction"] = resident("VmHWM") - base_resident
    for _ in range(WARM_STEPS):
        training.step()
    settle()
    training.step()
    told["resident_peak"] = resident("VmHWM") - base_resident
    settle()
    told["in_use"] = in_use() - base_in_use
    told["resident"] = resident("VmRSS") - base_resident
    told["through_grad"] = training.bytes_through_grad()
    training.optimizer.zero_grad()
    told["in_use_cleared"] = in_use() - base_in_use
    told["in_use_peak"] = training.peak_in_use() - base_in_use
    return told


def measure(name: str, ranks: int, layers: int, side: int) -> dict[str, float]:
    """All figures of one variant in gradient bytes, of the rank that needs most."""
    told = common.on_ranks(ranks, job, name, layers, side)
    return {
        column: max(each[column] for each in told) / gradient_bytes(layers, side)
        for column in COLUMNS
    }


def gradient_bytes(layers: int, side: int) -> int:
    """What the gradients of a plain model take."""
    return torch.float32.itemsize * layers * side * (side + 1)


def main() -> None:
    parser = common.parser(__doc__, EXAMPLE)
    parser.add_argument("--ranks", type=common.count, default=1, help="default: %(default)s")
    parser.add_argument("--layers", type=common.count, default=24, help="default: %(default)s")
    parser.add_argument(
        "--side",
        type=common.count,
        default=1024,
        help="of the square weights; default: %(default)s",
    )
    common.add_variants(parser, VARIANTS)
    args = parser.parse_args()
    machine = common.machine()
    common.tell_machine(machine)

    results = {name: measure(name, args.ranks, args.layers, args.side) for name in args.variants}
    nbytes = gradient_bytes(args.layers, args.side)
    common.tell_table(
        f"memory beside a model of {nbytes / MB:.1f} MB, {common.ranks(args.ranks)}; 1.000 = its gradients",
        ("", *COLUMNS.values()),
        [(name, *(f"{value:.3f}" for value in told.values())) for name, told in results.items()],
    )
    tables = {"memory": common.Table(results, None, {"gradient_bytes": nbytes})}
    place = ("memory", common.RANKSTEP, "in_use")
    what = "rankstep: in use after a step, in gradient bytes"
    bars = [common.bar_at(what, 1.05, tables, place)] if common.RANKSTEP in results else []
    common.tell_bars(bars)
    settings = common.settings(args, "ranks", "layers", "side")
    common.write_result(args.json, "memory", machine, settings, tables, bars)


if __name__ == "__main__":
    main()
