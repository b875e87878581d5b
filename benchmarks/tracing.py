"""What recording costs: the same training step of the same wrapper with the recorder off and on, in turns.

Nothing else differs: one model, one optimizer, one process group. A step is a batch from a DataLoader, zero_grad, forward,
backward and SGD with momentum. When on, everything that a recording does inside the loop is paid for: the events, the
taps on loaders, backward calls and optimizers, and the writing after every tenth step.
"""

from __future__ import annotations

import tempfile

import step
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import common
import rankstep
from rankstep.trace import record

EXAMPLE = "python benchmarks/tracing.py --model gpt --json tracing-gpt.json"
OFF, ON = "recorder off", "recorder on"
BAR = 1.01
MS = 1e3


class Switched:
    """The step, with the recorder off or on."""

    def __init__(self, shared, *, on: bool) -> None:
        self._model, self._optimizer, self._batches, self._labels, self._recording = shared
        self._on = on

    def prepare(self) -> None:
        """Switch the recorder, outside the clock."""
        if self._recording._on != self._on:
            self._recording._switch(on=self._on)
            taps = self._recording._taps
            (taps.open if self._on else taps.close)()

    def timed(self) -> None:
        """Run the step."""
        (inputs,) = next(self._batches)
        self._optimizer.zero_grad()
        functional.cross_entropy(self._model(inputs), self._labels).backward()
        self._optimizer.step()


def endless(inputs: torch.Tensor):
    """The same batch again and again, through a loader."""
    loader = DataLoader(TensorDataset(inputs[None]), batch_size=None)
    while True:
        yield from loader


def job(model: str, rounds: int, repeats: int) -> dict:
    bare = step.MODELS[model]()
    inputs, labels = bare.batch()
    wrapper = rankstep.DistributedDataParallel(bare)
    optimizer = torch.optim.SGD(bare.parameters(), lr=1e-3, momentum=0.9, foreach=True)
    with tempfile.TemporaryDirectory(prefix="rankstep-tracing-") as folder, record(folder) as own:
        shared = (wrapper, optimizer, endless(inputs), labels, own)
        trials = {OFF: Switched(shared, on=False), ON: Switched(shared, on=True)}
        told = common.take_turns(trials, rounds, repeats)
        trials[ON].prepare()
        own.close()
        return {
            "rounds": told,
            "bytes": own.path.stat().st_size,
            "tensors": len(wrapper.reducer.params),
        }


def main() -> None:
    parser = common.parser(__doc__, EXAMPLE)
    parser.add_argument(
        "--model", choices=[*step.MODELS, "all"], default="all", help="default: %(default)s"
    )
    parser.add_argument("--ranks", type=common.count, default=2, help="default: %(default)s")
    parser.add_argument("--rounds", type=common.count, default=20, help="default: %(default)s")
    parser.add_argument(
        "--repeats", type=common.count, default=20, help="steps in a turn; default: %(default)s"
    )
    args = parser.parse_args()
    common.require_quiet(args.ranks, allow_busy=args.allow_busy)
    machine = common.machine()
    common.tell_machine(machine)
    models, bars = {}, []
    for name in step.MODELS if args.model == "all" else [args.model]:
        told = common.on_ranks(args.ranks, job, name, args.rounds, args.repeats)
        rounds = common.Rounds.of([rank["rounds"] for rank in told], min)
        ratio = common.paired(rounds.wall[ON], rounds.wall[OFF])
        cpu = common.paired(rounds.cpu[ON], rounds.cpu[OFF])
        recorded = args.rounds * (args.repeats + 1)
        wall_ms = {v: common.Spread.of(s * MS for s in each) for v, each in rounds.wall.items()}
        bytes_per_step = told[0]["bytes"] / recorded
        models[name] = common.Table(
            {
                OFF: {"wall_ms": wall_ms[OFF]},
                ON: {"wall_ms": wall_ms[ON], "ratio_to_off": ratio, "cpu_ratio_to_off": cpu},
            },
            rounds.told(),
            {"tensors": told[0]["tensors"], "bytes_per_step": bytes_per_step},
        )
        what = f"{name}: step with the recorder on / off"
        bars.append(common.bar_at(what, BAR, models, (name, ON, "ratio_to_off")))
        common.tell_table(
            f"{name}: {told[0]['tensors']} tensors, {common.ranks(args.ranks)}; "
            f"{bytes_per_step:.0f} bytes recorded per step",
            ("", "ms", "of off", "CPU of off"),
            [
                (OFF, common.cell(wall_ms[OFF]), "1", "1"),
                (
                    ON,
                    common.cell(wall_ms[ON]),
                    common.cell(ratio, ".4f"),
                    common.cell(cpu, ".4f"),
                ),
            ],
        )
        common.tell_rounds(rounds)
    common.tell_bars(bars)
    settings = common.settings(args, "model", "ranks", "rounds", "repeats")
    common.write_result(args.json, "tracing", machine, settings, models, bars)


if __name__ == "__main__":
    main()
