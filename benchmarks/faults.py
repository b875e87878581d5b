"""The fault table, row by row: what Rankstep says, on which ranks, after how long, and what torch's DDP says.

For every fault a training of three ranks is started by the wrapper's own launcher, and rank 1 does something in step 3
(`faults_training.py`). Rankstep meets the bar if every surviving rank has said what is wrong less than 5 s after the
alarm time, the exit code is the right one, and no process, port, segment or temporary file is left. torch's side runs
for comparison. `docs/faults.md` quotes it. Rows 8 and 15 need root, row 22 a C compiler.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from faults_jobs import BEYOND_S, Outcome, Row, run, spoken
from faults_training import ODD

import common

if TYPE_CHECKING:
    from collections.abc import Sequence

EXAMPLE = "python benchmarks/faults.py --rows 1 5 11 --wrappers rankstep --runs 3"
OURS = "rankstep"
ERRORS = re.compile(r"Error|Exception|exitcode|Signal|terminat|Warning")
KILLED = r"cause: rank 1 did not come: its process was killed by signal 9"
ALARMS = "cause:|failed:"
TABLE = (
    Row(
        1,
        "forward",
        "exception in forward",
        r"rank 1 failed: ValueError: cannot use.* in do_forward",
    ),
    Row(2, "backward", "exception in backward", r"rank 1 failed: MemoryError: no room.* in fail"),
    Row(3, "worker", "exception in a data-loading worker", r"rank 1 failed: OSError.*cannot read"),
    Row(4, "hook", "exception in a communication hook", r"rank 1 failed: KeyError.* in hook"),
    Row(5, "kill", "kill -9 while computing", KILLED, code=137, dead=(ODD,)),
    Row(6, "inside", "kill -9 inside an all-reduce", KILLED, code=137, dead=(ODD,)),
    Row(
        7,
        "stop",
        "SIGSTOP for 12 s",
        r"cause: rank 1 has not come: a signal has stopped",
        code=0,
        # It says so, too, once it can.
        alone=(ODD,),
    ),
    Row(8, "memory", "killed for its memory", KILLED, code=137, dead=(ODD,)),
    Row(
        9,
        "more",
        "one batch too many",
        r"cause: rank 1 did not come: its work is done",
        dead=(ODD,),
    ),
    Row(10, "skip", "a rank leaves out a batch", r"SkippedBatchWarning: .*rank 1 drew 2"),
    Row(10, "stale", "the same, but it updates its weights", r"DriftError: .*rank 1 differs"),
    Row(
        10,
        "blind",
        "the same, unseen: its data come from elsewhere",
        r"cause: rank 1 did not come: its work is done",
        dead=(ODD,),
    ),
    Row(11, "hidden", "a collective hidden in evaluation", r"cause: rank 1 has stood elsewhere"),
    Row(12, "branch", "branches with different collectives", r"cause: rank 1 has stood elsewhere"),
    Row(13, "shapes", "another shape of parameters", r"ModelMismatchError: .*parameter 0"),
    Row(13, "order", "another order of parameters", r"ModelMismatchError: .*parameter 0"),
    Row(14, "absent", "a rank never starts", r"rank 1 did not arrive", dead=(ODD,)),
    Row(
        15, "cut", "a host is cut off", r"cause: rank 1 has not come: nothing|store does not answer"
    ),
    Row(
        16,
        "disk",
        "slow disk on rank 0",
        r"waiting in rank_zero_first\(\) for 30 s",
        code=0,
        alone=(0,),
        never=ALARMS,
    ),
    Row(17, "nan", "NaN on one rank", r"NonFiniteGradientWarning: .*rank 1 in", code=0),
    Row(18, "drift", "weights changed silently", r"DriftError: .*rank 1 differs"),
    Row(19, "endless", "Ctrl-C once", r"stopped by SIGINT", 130, (1, 2), never=ALARMS),
    Row(19, "stubborn", "Ctrl-C twice", r"stopped by SIGINT", 130, (1, 2), never=ALARMS),
    Row(20, "preempted", "SIGTERM", r"stopped by SIGTERM", 143, (1, 2), never=ALARMS),
    Row(21, "port", "two jobs, one port", r"port \d+ is taken by process \d+ \("),
    Row(
        22,
        "clock",
        "the clock jumps by hours",
        r"cause: rank 1 has not come: .*time\.sleep",
        code=0,
    ),
)


# ---------------------------------------------------------------- what is told


def seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


def described(wrapper: str, row: Row, outcome: Outcome) -> str:
    """One line about an outcome, with the verdict on it where it is Rankstep's."""
    end = "stands still, ended" if outcome.code is None else f"exit code {outcome.code}"
    text = f"{end} after {outcome.ended_s:.1f} s"
    if wrapper != OURS:
        first = (
            "nothing"
            if outcome.first_s is None
            else f"the first word after {outcome.first_s:.1f} s"
        )
        return f"torch: {text}; {first}"
    if outcome.told_s is None:
        said = f"ranks {outcome.silent} never said it"
    else:
        beyond_s = max(0.0, outcome.told_s - outcome.allowed_s(row) + BEYOND_S)
        said = f"all said it after {outcome.told_s:.1f} s, {beyond_s:.1f} s beyond the alarm"
    left = ", ".join(outcome.left) or "nothing"
    wrong = f"; WRONG: {'; '.join(outcome.wrong)}" if outcome.wrong else ""
    mark = "meets the bar" if outcome.meets(row) else "MISSES the bar"
    return f"rankstep: {mark}: {said}; {text}; left behind: {left}{wrong}"


def told_of(row: Row, wrapper: str, outcome: Outcome) -> str:
    """The line that says most, for the summary."""
    lines = [spoken(line)[0] for line in outcome.lines]
    wanted = row.said if wrapper == OURS else ERRORS.pattern
    return next((line for line in lines if re.search(wanted, line)), "(nothing)")[:110]


class Run:
    """All that was asked for, once.

    Attributes:
        missed: Rows that miss the bar.
        told: For each fault and wrapper what became of it.
    """

    def __init__(self, rows: Sequence[Row], wrappers: Sequence[str], *, quiet: bool) -> None:
        self.missed: set[int] = set()
        self.told: dict[str, dict[str, Outcome]] = {wrapper: {} for wrapper in wrappers}
        for row in rows:
            print(f"\n=== {row.row}. {row.title}", flush=True)
            for wrapper in wrappers:
                self._run(row, wrapper, quiet=quiet)

    def _run(self, row: Row, wrapper: str, *, quiet: bool) -> None:
        try:
            outcome = run(wrapper, row)
        except RuntimeError as error:
            outcome = Outcome(wrong=[f"not run: {error}"])
        self.told[wrapper][row.fault] = outcome
        print(f"--- {described(wrapper, row, outcome)}", flush=True)
        misses = wrapper == OURS and not outcome.meets(row)
        if misses:
            self.missed.add(row.row)
        if misses or not quiet:
            print("\n".join(outcome.lines), flush=True)


def tell_summary(rows: Sequence[Row], runs: Sequence[Run]) -> None:
    """One line for each fault: what both sides said in the last run."""
    for wrapper, told in runs[-1].told.items():
        lines = [
            (
                f"{row.row}. {row.title}",
                told_of(row, wrapper, told[row.fault]),
                seconds(told[row.fault].told_s if wrapper == OURS else told[row.fault].first_s),
                str(told[row.fault].code),
            )
            for row in rows
        ]
        common.tell_table(f"{wrapper}:", ("fault", "says", "after", "exit code"), lines)


def tables(rows: Sequence[Row], runs: Sequence[Run]) -> dict[str, common.Table]:
    """Put together what ``--json`` writes."""
    return {
        wrapper: common.Table(
            {
                row.fault: figures(row, [each.told[wrapper][row.fault] for each in runs])
                for row in rows
            },
            facts={
                row.fault: [asdict(each.told[wrapper][row.fault]) for each in runs] for row in rows
            },
        )
        for wrapper in runs[0].told
    }


def figures(row: Row, outcomes: Sequence[Outcome]) -> dict[str, common.Spread | float | None]:
    """One fault's, over the runs."""

    def spread(name: str) -> common.Spread | None:
        values = [getattr(outcome, name) for outcome in outcomes]
        return None if None in values else common.Spread.of(values)

    return {
        "row": row.row,
        "meets": sum(outcome.meets(row) for outcome in outcomes),
        "told_s": spread("told_s"),
        "first_s": spread("first_s"),
        "ended_s": spread("ended_s"),
        "exit_code": outcomes[-1].code,
        "left": sum(len(outcome.left) for outcome in outcomes),
    }


def main() -> int:
    numbers = sorted({row.row for row in TABLE})
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog=f"Example: {EXAMPLE}"
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        type=int,
        choices=numbers,
        default=numbers,
        metavar="ROW",
        help="1 to 22",
    )
    parser.add_argument("--wrappers", nargs="+", choices=[OURS, "torch"], default=[OURS, "torch"])
    parser.add_argument("--runs", type=int, default=1, help="how often to run it all")
    parser.add_argument("--quiet", action="store_true", help="do not show what the jobs said")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    args = parser.parse_args()
    machine = common.machine()
    common.tell_machine(machine)
    rows = [row for row in TABLE if row.row in args.rows]
    wanted = len({row.row for row in rows})
    runs: list[Run] = []
    bars = []
    for number in range(1, args.runs + 1):
        runs.append(Run(rows, args.wrappers, quiet=args.quiet))
        if OURS in args.wrappers:
            missed = runs[-1].missed
            bars.append(common.Bar(f"run {number}: rows that miss the bar", 0, len(missed)))
            which = f"; missed: {', '.join(map(str, sorted(missed)))}" if missed else ""
            print(f"\nrun {number}: {wanted - len(missed)} of {wanted}{which}", flush=True)
    tell_summary(rows, runs)
    if OURS in args.wrappers:
        worst = max(len(each.missed) for each in runs)
        print(f"\n{wanted - worst} of {wanted}")
    asked = common.settings(args, "rows", "wrappers", "runs")
    common.write_result(args.json, "faults", machine, asked, tables(rows, runs), bars)
    return 0 if all(bar.held for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
