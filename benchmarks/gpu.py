"""How long a training step takes on a GPU, what it needs at most, and where its time goes.

Two models in plain torch: one like ResNet-50 (161 tensors, 102 MB of float32) and one like GPT-2 small (148 tensors,
498 MB). With one rank the step has a wrapper's own cost and NCCL's calls, and no traffic; with two or more, each on a GPU
of its own, also that. Where there are fewer GPUs than ranks, they share them and talk through gloo, since NCCL refuses
that; this shows that it works, not how fast. ``local`` is the same step without a wrapper.

Peak memory is measured apart, one variant alone at a time. ``--device cpu --tiny`` tries the script out without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from step import Block
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import common

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLE = "python benchmarks/gpu.py --ranks 1 --model gpt2 --json gpu-gpt2.json"
LOCAL = "local"
BAR = 1.00
MS = 1e3
MB = 1e6
PROFILED_STEPS = 3
PROFILED = (common.RANKSTEP, common.TORCH)
WRAPPERS = {name: common.WRAPPERS[name] for name in common.WRAPPERS if name != "torch static"}


class Bottleneck(nn.Module):
    """Three convolutions around which the input goes, too."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = 4 * inner
        self.body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, outer, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or channels != outer:
            self.around = nn.Sequential(
                nn.Conv2d(channels, outer, 1, stride=stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what goes on to the next block."""
        return functional.relu(self.body(x) + self.around(x))


class ResNet(nn.Sequential):
    """Like ResNet-50: 25.6 million parameters in 161 tensors."""

    def __init__(self, *, tiny: bool) -> None:
        depths, width, classes = ((1, 1, 1, 1), 8, 10) if tiny else ((3, 4, 6, 3), 64, 1000)
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        channels = width
        for stage, depth in enumerate(depths):
            inner = width * 2**stage
            for block in range(depth):
                layers.append(Bottleneck(channels, inner, 2 if stage and not block else 1))
                channels = 4 * inner
        super().__init__(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
        )
        self._side, self._count, self._classes = (32, 2, classes) if tiny else (224, 64, classes)

    def batch(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw images and classes."""
        images = torch.randn(self._count, 3, self._side, self._side, device=device)
        return images, torch.randint(self._classes, (self._count,), device=device)


class Gpt2(nn.Module):
    """Like GPT-2 small: 124 million parameters in 148 tensors, the tokens' serving twice."""

    def __init__(self, *, tiny: bool) -> None:
        super().__init__()
        self.vocabulary, self.context, width, depth, heads, self._count = (
            (101, 16, 32, 2, 2, 2) if tiny else (50257, 1024, 768, 12, 12, 8)
        )
        self.tokens = nn.Embedding(self.vocabulary, width)
        self.places = nn.Embedding(self.context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, one row for each token."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x))).flatten(0, 1)

    def batch(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw tokens and their successors."""
        shape = (self._count, self.context + 1)
        tokens = torch.randint(self.vocabulary, shape, device=device)
        return tokens[:, :-1], tokens[:, 1:].flatten()


MODELS: dict[str, Callable[..., Any]] = {"resnet50": ResNet, "gpt2": Gpt2}


class Step:
    """One variant's training step: zero_grad, forward, backward, SGD with momentum; the clock stops when it is done."""

    def __init__(
        self,
        model: Any,
        wrap: Callable[[nn.Module], nn.Module],
        device: torch.device,
        autocast: torch.dtype | None,
    ) -> None:
        self._device = device
        self._autocast = autocast
        model.to(device)
        self._inputs, self._labels = model.batch(device)
        if self._inputs.ndim == 4:
            model.to(memory_format=torch.channels_last)
            self._inputs = self._inputs.to(memory_format=torch.channels_last)
        self._model = wrap(model)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)

    def prepare(self) -> None:
        """Let nothing of the variant before be under way."""
        self._synchronize()

    def timed(self) -> None:
        """Run the step."""
        self._optimizer.zero_grad()
        small: Any = contextlib.nullcontext()
        if self._autocast is not None:
            small = torch.autocast(self._device.type, self._autocast)
        with small:
            loss = functional.cross_entropy(self._model(self._inputs), self._labels)
        loss.backward()
        self._optimizer.step()
        self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def job(
    model: str, names: list[str], kind: str, tiny: bool, small: bool, rounds: int, repeats: int
) -> dict[str, Any]:
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    autocast = torch.bfloat16 if small else None
    wrap: dict[str, Callable[[nn.Module], nn.Module]] = {LOCAL: lambda plain: plain}
    wrap |= {name: WRAPPERS[name] for name in names}

    def made(name: str) -> Step:
        return Step(MODELS[model](tiny=tiny), wrap[name], device, autocast)

    told: dict[str, Any] = {
        "backend": dist.get_backend(),
        "peak_bytes": {name: peak(functools.partial(made, name), device) for name in wrap},
    }
    trials = {name: made(name) for name in wrap}
    told["rounds"] = common.take_turns(trials, rounds, repeats)
    told["profile"] = {name: table(trials[name], device) for name in PROFILED if name in trials}
    del trials
    gc.collect()
    return told


def peak(made: Callable[[], Step], device: torch.device) -> int | None:
    """Say what a variant takes at most, in bytes given out by torch's allocator; None where nobody counts them."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    step = made()
    for _ in range(4):
        step.timed()
    torch.cuda.reset_peak_memory_stats(device)
    step.timed()
    found = torch.cuda.max_memory_allocated(device) - before
    del step
    gc.collect()
    return found


def table(step: Step, device: torch.device) -> str:
    """Make torch.profiler's table of a few steps."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiled:
        for _ in range(PROFILED_STEPS):
            step.timed()
    by = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return profiled.key_averages().table(sort_by=by, row_limit=15, max_name_column_width=60)


def figures(told: list[dict[str, Any]]) -> common.Table:
    """All that is told about one model."""
    rounds = common.Rounds.of([each["rounds"] for each in told], statistics.median)
    return common.Table(
        {
            name: {
                "wall_ms": common.Spread.of(value * MS for value in each),
                "cpu_ms_per_rank": common.Spread.of(value * MS for value in rounds.cpu[name]),
                "ratio_to_torch_default": common.paired(each, rounds.wall[common.TORCH]),
                "ratio_to_local": common.paired(each, rounds.wall[LOCAL]),
                "peak_bytes": told[0]["peak_bytes"][name],
            }
            for name, each in rounds.wall.items()
        },
        rounds.told(),
        {"backend": told[0]["backend"], "profile": told[0]["profile"]},
    )


def gpus(kind: str) -> list[str]:
    """Name the GPUs, or end the program if they are asked for and there is none."""
    if kind == "cpu":
        return []
    if not torch.cuda.is_available():
        raise SystemExit(
            "no GPU that torch can use: run this on a machine with one (and a torch built for it), or try the script out "
            "with --device cpu --tiny"
        )
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def main() -> None:
    parser = common.parser(__doc__, EXAMPLE)
    parser.add_argument(
        "--model", choices=[*MODELS, "all"], default="all", help="default: %(default)s"
    )
    parser.add_argument("--ranks", type=common.count, default=1, help="default: %(default)s")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s"
    )
    parser.add_argument("--tiny", action="store_true", help="models that take no time at all")
    parser.add_argument(
        "--float32",
        action="store_true",
        help="no autocast to bfloat16, which is the default on a GPU",
    )
    parser.add_argument("--rounds", type=common.count, default=12, help="default: %(default)s")
    parser.add_argument(
        "--repeats", type=common.count, default=5, help="steps in a turn; default: %(default)s"
    )
    common.add_variants(parser, WRAPPERS)
    args = parser.parse_args()
    names = [name for name in WRAPPERS if name in {*args.variants, common.TORCH}]
    found = gpus(args.device)
    backend = "nccl" if args.ranks <= len(found) else "gloo"
    if found and backend == "gloo":
        common.warn(
            f"{args.ranks} ranks share {len(found)} GPUs through gloo: this shows that it works, not how fast it is."
        )
    common.require_quiet(args.ranks, allow_busy=args.allow_busy)
    facts = common.machine() | {"gpus": ", ".join(found) or "none", "cuda": str(torch.version.cuda)}
    common.tell_machine(facts)
    print(f"GPUs: {facts['gpus']}; CUDA {facts['cuda']}")

    results, bars = {}, []
    for model in MODELS if args.model == "all" else [args.model]:
        small = args.device == "cuda" and not args.float32
        told = common.on_ranks(
            args.ranks,
            job,
            *(model, names, args.device, args.tiny, small, args.rounds, args.repeats),
            backend=backend,
        )
        results[model] = result = figures(told)
        params = list(MODELS[model](tiny=args.tiny).parameters())
        nbytes = sum(param.nbytes for param in params)
        common.tell_table(
            f"{model}: {nbytes / MB:.1f} MB in {len(params)} tensors, {common.ranks(args.ranks)} by {backend}, one step",
            ("", "wall ms", "CPU ms of a rank", "of torch default", "of local", "peak MB"),
            [
                (
                    name,
                    common.cell(own["wall_ms"], ".2f"),
                    common.cell(own["cpu_ms_per_rank"], ".2f"),
                    common.cell(own["ratio_to_torch_default"], ".3f"),
                    common.cell(own["ratio_to_local"], ".3f"),
                    "-" if own["peak_bytes"] is None else f"{own['peak_bytes'] / MB:.1f}",
                )
                for name, own in result.variants.items()
            ],
        )
        for name, of_steps in result.facts["profile"].items():
            print(f"\n{name}: {PROFILED_STEPS} steps of rank 0\n{of_steps}")
        if common.RANKSTEP in names and args.device == "cuda":
            place = (model, common.RANKSTEP, "ratio_to_torch_default")
            what = f"{model}: step as a share of torch default's"
            bars.append(common.bar_at(what, BAR, results, place))
    common.tell_bars(bars)
    settings = common.settings(args, "model", "ranks", "device", "tiny", "rounds", "repeats")
    settings["backend"] = backend
    common.write_result(args.json, "gpu", facts, settings, results, bars)


if __name__ == "__main__":
    main()
