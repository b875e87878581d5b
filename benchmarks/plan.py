"""Does a step take as long as `bucket_cap_mb="auto"` predicts, with its own buckets and with others?

A new wrapper measures the group and its first steps, and predicts the step with the plan it adopts and with caps of 1,
5, 25 and 100 MiB. Then steps with all of these take turns. That is one round; what was predicted is held against what
was measured right after it.

Starts two ranks on this host. Under `network.sh` or torchrun it is one of the ranks, over whatever link they have.
RANKSTEP_SHARED_MEMORY=0 sends gradients through loopback sockets instead of shared memory.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import asdict

import step

import common
from rankstep import DistributedDataParallel
from rankstep.buckets.autoplan import MEASURED, WARM_UP

EXAMPLE = "python benchmarks/plan.py --model gpt --json plan-gpt.json"
AUTO = "auto"
CAPS_MIB = (1, 5, 25, 100)
BAR = 0.10
MS = 1e3
NS = 1e9


class Step(step.Step):
    """A training step that reports how its wrapper has planned."""

    def __init__(self, model, cap) -> None:
        self.wrapper: DistributedDataParallel
        super().__init__(model, lambda plain: self._wrapped(plain, cap))

    def _wrapped(self, model, cap) -> DistributedDataParallel:
        self.wrapper = DistributedDataParallel(model, bucket_cap_mb=cap)
        return self.wrapper


def job(model: str, rounds: int, repeats: int) -> dict:
    make = step.MODELS[model]
    others: dict[str, common.Trial] = {f"{cap} MiB": Step(make(), cap) for cap in CAPS_MIB}
    told, forecasts = [], []
    for number in range(rounds):
        auto = Step(make(), AUTO)
        for _ in range(WARM_UP + MEASURED + 1):
            auto.timed()
        plan = auto.wrapper.reducer.plan
        forecasts.append(asdict(plan.forecast))
        # Each round in another order, the same on all ranks.
        trials = list({AUTO: auto, **others}.items())
        random.Random(number).shuffle(trials)
        told += common.take_turns(dict(trials), 1, repeats, warm_up=1)
    comm = auto.wrapper.reducer.comm
    return {
        "rounds": told,
        "forecasts": forecasts,
        "plan": plan.describe(),
        "way": getattr(comm, "way", comm.name),
    }


def figures(rounds: common.Rounds, forecasts: list[dict]) -> dict:
    """Hold what was predicted in each round against what was measured in it."""
    told = {}
    for place, name in enumerate([AUTO, *(f"{cap} MiB" for cap in CAPS_MIB)]):
        outlooks = [f["plan"] if place == 0 else f["others"][place - 1] for f in forecasts]
        predicted = [outlook["step_ns"] / NS for outlook in outlooks]
        walls = rounds.wall[name]
        told[name] = {
            "buckets": outlooks[-1]["buckets"],
            "predicted_ms": common.Spread.of(MS * seconds for seconds in predicted),
            "measured_ms": common.Spread.of(MS * wall for wall in walls),
            "predicted_of_measured": common.paired(predicted, walls),
            "ratio_to_auto": common.paired(walls, rounds.wall[AUTO]),
        }
    return told


def kept(forecasts: list[dict], rounds: common.Rounds) -> list[dict]:
    """Those of the rounds that count."""
    if not rounds.dropped:
        return forecasts
    pairs = zip(forecasts, rounds.foreign, strict=True)
    return [forecast for forecast, cores in pairs if cores <= common.QUIET_CORES]


def error(figure: dict) -> float:
    """By which share of the measured step the prediction is off."""
    return abs(figure["predicted_of_measured"].median - 1)


def main() -> None:
    parser = common.parser(__doc__, EXAMPLE)
    parser.add_argument(
        "--model", choices=[*step.MODELS, "all"], default="all", help="default: %(default)s"
    )
    common.add_ranks(parser)
    parser.add_argument("--rounds", type=common.count, default=10, help="default: %(default)s")
    parser.add_argument(
        "--repeats", type=common.count, default=5, help="steps in a turn; default: %(default)s"
    )
    args = parser.parse_args()
    common.require_quiet(args.ranks, allow_busy=args.allow_busy)
    machine = common.machine()
    common.tell_machine(machine)

    results, bars = {}, []
    for model in step.MODELS if args.model == "all" else [args.model]:
        told = common.on_ranks(args.ranks, job, model, args.rounds, args.repeats)
        rounds = common.Rounds.of([own["rounds"] for own in told], statistics.median)
        first = told[0]
        own = figures(rounds, kept(first["forecasts"], rounds))
        results[model] = common.Table(
            own, rounds.told(), {"way": first["way"], "forecasts": first["forecasts"]}
        )
        print(f"\n{model}, {first['way']}, the last round's plan: {first['plan']}")
        common.tell_table(
            f"{model}: one step, {common.ranks(args.ranks)}",
            ("", "buckets", "predicted ms", "measured ms", "predicted / measured", "of auto"),
            [
                (
                    name,
                    str(figure["buckets"]),
                    common.cell(figure["predicted_ms"], ".1f"),
                    common.cell(figure["measured_ms"], ".1f"),
                    common.cell(figure["predicted_of_measured"], ".3f"),
                    common.cell(figure["ratio_to_auto"], ".3f"),
                )
                for name, figure in own.items()
            ],
        )
        common.tell_rounds(rounds)
        bars.append(common.Bar(f"{model}: error of the prediction for auto", BAR, error(own[AUTO])))
        worst = max((name for name in own if name != AUTO), key=lambda name: error(own[name]))
        bars.append(
            common.Bar(f"{model}: largest error for other caps, {worst}", BAR, error(own[worst]))
        )
    common.tell_bars(bars)
    settings = common.settings(args, "model", "ranks", "rounds", "repeats")
    common.write_result(args.json, "plan", machine, settings, results, bars)


if __name__ == "__main__":
    main()
