"""What the guard costs: the same training step of the same wrapper with the guard off and on, in turns.

Nothing else differs: one model, one optimizer, one process group; between turns the guard's threads are ended and started,
outside the clock. Also counted: the collectives of a step with the guard on and off, and what the guard asks of the store
while steps go by.
"""

from __future__ import annotations

import time

import step
import torch
from torch.nn import functional

import common
import rankstep
from rankstep import doctor
from rankstep.collectives.hub import Hub
from rankstep.doctor import channel, hooks
from rankstep.testing.calls import noted_collectives

EXAMPLE = "python benchmarks/guard.py --model mlp --json guard-mlp.json"
OFF, ON = "guard off", "guard on"
BAR = 1.005
MS = 1e3
SETTLED_S = 0.5


class Switched:
    """The step, with the guard off or on."""

    def __init__(self, shared, *, on: bool) -> None:
        self._wrapper, self._optimizer, self._inputs, self._labels = shared
        self._on = on

    def prepare(self) -> None:
        """Switch the guard, outside the clock."""
        guard = doctor.current()
        if self._on and guard is None:
            doctor.on_wrap(self._wrapper)
            # Until it knows the other ranks: that is paid for once in a job.
            time.sleep(SETTLED_S)
        elif not self._on and guard is not None:
            guard.close()
            hooks._post.guard = None

    def timed(self) -> None:
        """Run the step."""
        self._optimizer.zero_grad()
        functional.cross_entropy(self._wrapper(self._inputs), self._labels).backward()
        self._optimizer.step()


def job(model: str, rounds: int, repeats: int) -> dict:
    bare = step.MODELS[model]()
    inputs, labels = bare.batch()
    wrapper = rankstep.DistributedDataParallel(bare)
    optimizer = torch.optim.SGD(bare.parameters(), lr=1e-3, momentum=0.9, foreach=True)
    shared = (wrapper, optimizer, inputs, labels)
    trials = {OFF: Switched(shared, on=False), ON: Switched(shared, on=True)}
    told = common.take_turns(trials, rounds, repeats)
    counted = {}
    for name, trial in trials.items():
        trial.prepare()
        with noted_collectives(Hub) as called, noted_calls() as asked:
            for _ in range(repeats):
                trial.timed()
        counted[name] = (len(called), len(asked))
    trials[OFF].prepare()
    return {"rounds": told, "counted": counted, "tensors": len(wrapper.reducer.params)}


class noted_calls:  # noqa: N801 - used as a function
    """Collect what a guard asks of the store."""

    def __enter__(self) -> list[str]:
        self._before = channel.Mouth.__call__
        asked: list[str] = []

        def noting(mouth, method, *args):
            asked.append(method)
            return self._before(mouth, method, *args)

        channel.Mouth.__call__ = noting
        return asked

    def __exit__(self, *_: object) -> None:
        channel.Mouth.__call__ = self._before


def main() -> None:
    parser = common.parser(__doc__, EXAMPLE)
    parser.add_argument("--model", choices=step.MODELS, default="mlp", help="default: %(default)s")
    parser.add_argument("--ranks", type=common.count, default=2, help="default: %(default)s")
    parser.add_argument("--rounds", type=common.count, default=12, help="default: %(default)s")
    parser.add_argument(
        "--repeats", type=common.count, default=80, help="steps in a turn; default: %(default)s"
    )
    args = parser.parse_args()
    common.require_quiet(args.ranks, allow_busy=args.allow_busy)
    machine = common.machine()
    common.tell_machine(machine)
    told = common.on_ranks(args.ranks, job, args.model, args.rounds, args.repeats)
    rounds = common.Rounds.of([rank["rounds"] for rank in told], min)
    ratio = common.paired(rounds.wall[ON], rounds.wall[OFF])
    cpu = common.paired(rounds.cpu[ON], rounds.cpu[OFF])
    wall_ms = {v: common.Spread.of(s * MS for s in each) for v, each in rounds.wall.items()}
    counted = told[0]["counted"]
    common.tell_table(
        f"{args.model}: {told[0]['tensors']} tensors, {common.ranks(args.ranks)}",
        ("", "ms", "of off", "CPU of off", f"collectives in {args.repeats} steps", "store calls"),
        [
            (OFF, common.cell(wall_ms[OFF]), "1", "1", *map(str, counted[OFF])),
            (
                ON,
                common.cell(wall_ms[ON]),
                common.cell(ratio, ".4f"),
                common.cell(cpu, ".4f"),
                *map(str, counted[ON]),
            ),
        ],
    )
    common.tell_rounds(rounds)
    more = counted[ON][0] - counted[OFF][0] + counted[ON][1]
    tables = {
        args.model: common.Table(
            {
                name: {
                    "wall_ms": wall_ms[name],
                    "collectives": counted[name][0],
                    "store_calls": counted[name][1],
                }
                for name in (OFF, ON)
            },
            rounds.told(),
            {"tensors": told[0]["tensors"]},
        )
    }
    tables[args.model].variants[ON] |= {"ratio_to_off": ratio, "cpu_ratio_to_off": cpu}
    what = f"{args.model}: step with the guard on / off"
    bars = [
        common.bar_at(what, BAR, tables, (args.model, ON, "ratio_to_off")),
        common.Bar(f"{args.model}: collectives and store calls of the guard", 0, more),
    ]
    common.tell_bars(bars)
    settings = common.settings(args, "model", "ranks", "rounds", "repeats")
    common.write_result(args.json, "guard", machine, settings, tables, bars)


if __name__ == "__main__":
    main()
