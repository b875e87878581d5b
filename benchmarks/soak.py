"""A training on digits that is disturbed by random faults and must end with the bits of the undisturbed one.

Two ranks train under `rankstep run --max-restarts` with a `rankstep.Checkpoint` every two or three steps. Faults come one
after another, at random moments: ranks, loader workers and the launcher are killed, stopped and told to end, exceptions
are raised in forward, backward and the data, checkpoints are cut off while they are written, damaged, or find the disk
full. Where the launcher has used up its restarts, or is gone itself, the same command is started once more.

Compared with a run that nobody disturbs and that saves nothing: the bits of every step's loss and the checksum of its
samples on each rank, as often as a step is taken; and at the end the bits of weights, optimizer, scheduler and random
numbers. Looked for whenever a launcher has ended: processes, listening ports, named shared memory, temporary files.

`soak_training.py` is what the ranks run, `soak_faults.py` what befalls them, `soak_job.py` starts, hears and searches. The
exit code is 0 if all faults were done, all is equal and nothing was left, else 1.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from soak_faults import (
    KINDS,
    LONG_STOPPED_S,
    End,
    Fault,
    Whom,
    damage,
    kill_all,
    stopped_s,
    whole,
)
from soak_job import RANKS, DifferentError, EndedError, Job, LimitError, WrongError, differences
from soak_training import BATCH, DATA, TRAININGS, Training

import common

STARTING_S = 3.0
"""So long after a rank's start it may be killed: about as long as that takes."""


# ---------------------------------------------------------------- the soak


@dataclass
class Outcome:
    """What became of a fault.

    Args:
        fault: Which.
        training: In which training.
        step: The last one taken before it.
        resumed: The step behind which training went on.
        anew: The command was started once more.
        seconds: Until training went on.
        named: Whether the cause stood on the screen; None: nobody could say it.
        said: The line that says it, or what was done.
    """

    fault: Fault
    training: str
    step: int
    resumed: int = 0
    anew: bool = False
    seconds: float = 0.0
    named: bool | None = None
    said: str = ""


@dataclass
class Ending:
    """How a training ended.

    Args:
        training: Which.
        steps: So long it is.
        lives: Times that ranks have begun.
        starts: Times that the command was started.
        repeated: Steps that were taken again.
        compared: Things whose bits were compared, on all ranks.
        differ: Those that are not equal.
        sha256: Of rank 0's things, by name.
    """

    training: str
    steps: int
    lives: int
    starts: int
    repeated: int
    compared: int
    differ: list[str]
    sha256: dict[str, str]


@dataclass
class Soak:
    """All faults of one soak.

    Args:
        seed: Of faults and trainings.
        folder: To work in.
        deadline: When its time is over.
        done: What became of the faults so far.
        endings: What became of the trainings that have come to their ends.
        differ: What has other bits than undisturbed.
        problems: What else must not be.
        left: What was left behind.
    """

    seed: int
    folder: Path
    deadline: float
    done: list[Outcome] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    differ: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)

    def plan(self, count: int, kinds: list[str], trainings: list[Training]) -> list[list[Fault]]:
        """Draw the faults of each training: all kinds that it knows equally often, in random order."""
        drawn, number = [], 0
        for place, training in enumerate(trainings):
            share = count * (place + 1) // len(trainings) - number
            known = [kind for kind in kinds if KINDS[kind].only(training)]
            bag: list[str] = []
            while len(bag) < share:
                bag += self.dice.sample(known, len(known))
            drawn.append([self._fault(number + i + 1, kind) for i, kind in enumerate(bag[:share])])
            number += share
        return drawn

    def _fault(self, number: int, kind: str) -> Fault:
        dice = self.dice
        return Fault(
            number,
            kind,
            rank=0 if KINDS[kind].whom is Whom.WRITER else dice.randrange(RANKS),
            after=dice.randint(1, 6),
            delay_s=dice.uniform(0.0, 0.05),
            detail=dice.randrange(1 << 30),
        )

    # ---------------------------------------------------------------- one training

    def train(self, training: Training, faults: list[Fault], total: int) -> None:
        """Train twice, once undisturbed, and compare."""
        steps_per_epoch = save_digits(self.folder / DATA) // BATCH
        least = sum(KINDS[fault.kind].steps for fault in faults)
        epochs = 1 + math.ceil(least / steps_per_epoch)
        undisturbed = self._job(training, epochs, "whole")
        try:
            undisturbed.start(0)
            self._finish(undisturbed, "the run that nobody disturbs")
            results = undisturbed.results()
        finally:
            undisturbed.close()
        steps = sum(rank == 0 for rank, _ in undisturbed.told)
        print(
            f"\n{training.name}: {training.story}; {steps} steps, {len(faults)} faults", flush=True
        )
        job = self._job(training, epochs, "disturbed", undisturbed.told)
        try:
            self._start(job)
            job.wait(lambda: job.lives, "the first start")
            for fault in faults:
                outcome = self.disturb(job, fault)
                self.done.append(outcome)
                tell(outcome, total)
            self._finish(job, "the disturbed run")
            differ = differences(results, job.results())
            self.differ += [f"{training.name}: {name}" for name in differ]
            if missing := undisturbed.told.keys() - job.told.keys():
                self.problems.append(f"{training.name}: {len(missing)} steps were never taken")
        finally:
            job.close()
        self.endings.append(
            Ending(
                training.name,
                steps,
                job.lives,
                job.starts,
                job.repeated,
                sum(map(len, results)) + len(undisturbed.told),
                differ,
                results[0],
            )
        )
        same = "all equal" if not differ else f"DIFFERENT: {', '.join(differ)}"
        print(
            f"{training.name}: {job.lives} lives, {job.starts} starts of the command, {job.repeated} steps taken again; "
            f"weights {results[0]['weights 0.weight'][:16]}..., {same}",
            flush=True,
        )

    def _job(
        self,
        training: Training,
        epochs: int,
        name: str,
        told: dict[tuple[int, int], tuple[str, int]] | None = None,
    ) -> Job:
        folder = self.folder / f"{training.name}-{name}"
        folder.mkdir(mode=0o700)
        (folder / DATA).hardlink_to(self.folder / DATA)
        return Job(
            folder,
            training,
            seed=self.seed,
            epochs=epochs,
            whole=told,
            deadline=self.deadline,
        )

    def _start(self, job: Job) -> None:
        job.start(self.dice.randint(1, 8))

    def _finish(self, job: Job, what: str) -> None:
        """Wait for the end of a training."""
        job.wait(lambda: job.ended() is not None, what, patience_s=math.inf)
        job.drain()
        self._search(job, what)
        if job.ended() != 0:
            raise WrongError(f"{what} ended with {job.ended()}; last words: {job.said[-3:]}")

    def _search(self, job: Job, when: str) -> None:
        known = {each.partition(": ")[2] for each in self.left}
        found = [each for each in job.left() if each not in known]
        self.left += [f"{job.training.name}, {when}: {each}" for each in found]

    # ---------------------------------------------------------------- one fault

    def disturb(self, job: Job, fault: Fault) -> Outcome:
        """Do it, see the training go on, and check what that began with.

        Raises:
            WrongError: It does not go on.
            LimitError: The time is over.
        """
        kind = KINDS[fault.kind]
        job.wait(
            lambda: job.since >= fault.after, f"step {fault.after} before fault {fault.number}"
        )
        job.pause(fault.delay_s)
        job.traces.look()
        if fault.kind == "damage":
            # One must be left to go on from.
            job.wait(lambda: len(whole(job)) > 1, "two whole checkpoints")
        job.forget()
        outcome = Outcome(fault, job.training.name, job.newest)
        expected: tuple[int, list[str]] | None = None
        if fault.kind == "kill_starting":
            self._kill_and_await(job, fault)
        began = time.monotonic()
        lives = job.lives
        pids = {job.begun["pid"], *job.ranks().values()}
        kind.act(job, fault)
        if fault.kind == "damage":
            before, names, outcome.said = damage(job, fault.detail)
            expected = before, names
        if kind.end is End.NOTHING:
            self._goes_on(job, fault, lives)
        else:
            outcome.anew = self._resumes(job, fault, pids)
        outcome.seconds = time.monotonic() - began
        self._check(job, outcome, expected)
        self._hear(job, outcome, expected[1][-1] if expected else "")
        job.since = 0
        return outcome

    def _kill_and_await(self, job: Job, fault: Fault) -> None:
        """Kill all ranks, and wait for a moment in the start of the next ones."""
        old = set(job.ranks().values())
        kill_all(job, fault)
        try:
            job.wait(lambda: new_rank(job, fault.rank, old), "new ranks")
        except EndedError:
            self._anew(job, fault)
            job.wait(lambda: new_rank(job, fault.rank, old), "new ranks")
        job.pause(STARTING_S * (fault.detail % 1000) / 1000)

    def _goes_on(self, job: Job, fault: Fault, lives: int) -> None:
        """Wait until the same ranks have taken further steps."""
        job.since = 0
        full = fault.kind == "fill_disk"
        job.wait(lambda: not full or len(job.unsaved) == RANKS, "a checkpoint that is not written")
        job.since = 0
        job.wait(lambda: job.since >= 2, "further steps")
        if job.lives != lives:
            raise WrongError(f"fault {fault.number} ({fault.kind}) has ended the ranks")

    def _resumes(self, job: Job, fault: Fault, pids: set[int]) -> bool:
        """Wait until other ranks have begun; returns whether the command had to be started once more."""

        def others() -> bool:
            return job.begun["pid"] not in pids

        anew = False
        try:
            job.wait(others, f"ranks after fault {fault.number}", needs_launcher=True)
        except EndedError:
            self._anew(job, fault)
            anew = True
            job.wait(others, f"ranks after fault {fault.number}")
        if KINDS[fault.kind].end is End.LAUNCHER and not anew:
            raise WrongError(f"fault {fault.number} ({fault.kind}) has not ended the launcher")
        return anew

    def _anew(self, job: Job, fault: Fault) -> None:
        """The launcher has ended: look at its exit code and for what it has left, and start the command again."""
        code, wanted = job.ended(), KINDS[fault.kind].code
        if code != wanted:
            self.problems.append(
                f"fault {fault.number} ({fault.kind}): exit code {code}, not {wanted}"
            )
        self._search(job, f"after fault {fault.number} ({fault.kind})")
        self._start(job)

    def _check(
        self, job: Job, outcome: Outcome, expected: tuple[int, list[str]] | None = None
    ) -> None:
        """Look at where the training went on."""
        fault = outcome.fault
        where = f"fault {fault.number} ({fault.kind})"
        if orders := job.orders():
            self.problems.append(f"{where}: nobody has taken {orders}")
        if KINDS[fault.kind].end is End.NOTHING:
            outcome.resumed = outcome.step
            return
        begun = job.begun
        outcome.step, outcome.resumed = begun["newest"], begun["step"]
        least, most = begun["saved"], begun["newest"]
        if fault.kind in ("preempt", "preempt_rank"):
            least = most
        if expected is not None:
            least = most = expected[0]
            if begun["ignored"] != expected[1]:
                self.problems.append(f"{where}: passed over {begun['ignored']}, not {expected[1]}")
        if not least <= outcome.resumed <= most:
            self.problems.append(
                f"{where}: went on behind step {outcome.resumed}, not behind one of {least} to {most}"
            )

    @staticmethod
    def _hear(job: Job, outcome: Outcome, name: str) -> None:
        """Find the line on the screen that names the fault."""
        fault, wanted = outcome.fault, KINDS[outcome.fault.kind].says
        short = fault.kind == "stop" and stopped_s(fault) < LONG_STOPPED_S
        if short or not wanted:
            return
        pattern = re.compile(wanted.format(rank=fault.rank, number=fault.number, name=name))
        found = next(filter(None, map(pattern.search, [*job.said, *job.unsaved])), None)
        outcome.named = found is not None
        if found is not None:
            outcome.said += f"{'; ' * bool(outcome.said)}{found.string[found.start() :]}"


def new_rank(job: Job, rank: int, old: set[int]) -> bool:
    pid = job.ranks().get(rank)
    return pid is not None and pid not in old


def save_digits(file: Path) -> int:
    """Save the training images that `examples/digits.py` uses, once; returns how many there are."""
    if not file.exists():
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise SystemExit(
                "the images come from scikit-learn: pip install scikit-learn"
            ) from error
        pixels, labels = load_digits(return_X_y=True)
        tests = np.zeros(len(labels), dtype=bool)
        tests[labels.argsort(kind="stable")[::5]] = True
        images = pixels[~tests].astype(np.float32).reshape(-1, 1, 8, 8) / 16
        np.savez(file, images=images, labels=labels[~tests])
    with np.load(file, allow_pickle=False) as data:
        return len(data["labels"])


# ---------------------------------------------------------------- telling


def tell(outcome: Outcome, total: int) -> None:
    fault, kind = outcome.fault, KINDS[outcome.fault.kind]
    if kind.end is End.NOTHING:
        went = "went on"
    else:
        went = (
            f"{'started anew' if outcome.anew else 'restarted'}, went on behind {outcome.resumed}"
        )
    whom = "" if kind.whom is Whom.ALL else f", rank {fault.rank}"
    said = f': "{outcome.said[:110]}"' if outcome.said else ""
    print(
        f"{fault.number:4}/{total}  {kind.story}{whom}, in step {outcome.step + 1}; "
        f"{went} after {outcome.seconds:.1f} s{said}",
        flush=True,
    )


def tell_kinds(done: list[Outcome]) -> None:
    rows = []
    for name, kind in KINDS.items():
        ours = [outcome for outcome in done if outcome.fault.kind == name]
        if not ours:
            continue
        ends = kind.end is not End.NOTHING
        named = [outcome.named for outcome in ours if outcome.named is not None]
        rows.append(
            (
                kind.story,
                str(len(ours)),
                str(sum(not outcome.anew for outcome in ours)) if ends else "-",
                str(sum(outcome.anew for outcome in ours)) if ends else "-",
                str(sum(outcome.step - outcome.resumed for outcome in ours)),
                f"{sum(named)} of {len(named)}" if named else "-",
                f"{statistics.median(outcome.seconds for outcome in ours):.1f}",
            )
        )
    head = ("fault", "done", "restarted", "anew", "steps lost", "named", "median s")
    common.tell_table("faults by kind", head, rows)


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="example:\n  python benchmarks/soak.py --faults 20 --seed 7 --trainings momentum windows\n\nkinds of faults:\n"
        + "\n".join(f"  {name:15}{kind.story}" for name, kind in KINDS.items())
        + "\n\ntrainings:\n"
        + "\n".join(f"  {training.name:15}{training.story}" for training in TRAININGS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--faults", type=common.count, default=100, help="so many; default: %(default)s"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="of faults and trainings; default: %(default)s"
    )
    names = [training.name for training in TRAININGS]
    parser.add_argument(
        "--trainings", nargs="+", metavar="NAME", choices=names, default=names, help="default: all"
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        metavar="KIND",
        choices=KINDS,
        default=list(KINDS),
        help="default: all",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="ends it, with exit code 1, if the faults are not done by then; default: %(default).0f",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    parser.add_argument(
        "--keep", action="store_true", help="keep the folder with checkpoints and all output"
    )
    args = parser.parse_args(words)
    for training in TRAININGS:
        if training.name in args.trainings and not any(
            KINDS[kind].only(training) for kind in args.kinds
        ):
            parser.error(f"no fault of these kinds can happen to the training {training.name!r}")
    return args


def run(args: argparse.Namespace, folder: Path) -> Soak:
    """Do all faults, or as many as there is time for."""
    soak = Soak(args.seed, folder, time.monotonic() + args.limit)
    trainings = [training for training in TRAININGS if training.name in args.trainings]
    trainings = trainings[: args.faults]
    try:
        for training, faults in zip(
            trainings, soak.plan(args.faults, args.kinds, trainings), strict=True
        ):
            soak.train(training, faults, args.faults)
    except LimitError:
        soak.problems.append(f"the limit of {args.limit:g} s came first")
    except DifferentError as error:
        soak.differ.append(str(error))
    except WrongError as error:
        soak.problems.append(str(error))
    except EndedError as error:
        soak.problems.append(f"a training was over before its faults were done: {error}")
    return soak


def main(words: list[str] | None = None) -> int:
    args = parse(words)
    facts = common.machine()
    common.tell_machine(facts)
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="rankstep-soak-"))
    try:
        soak = run(args, folder)
    finally:
        if args.keep:
            print(f"kept: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    seconds = time.monotonic() - began
    tell_kinds(soak.done)
    # What was not compared is not known to be equal.
    known = soak.differ or len(soak.endings) == len(args.trainings[: args.faults])
    bars = [
        common.Bar("faults that were not done", 0, args.faults - len(soak.done)),
        common.Bar("things that differ", 0, len(soak.differ) if known else None),
        common.Bar("things left behind", 0, len(soak.left)),
        common.Bar("other things that must not be", 0, len(soak.problems)),
    ]
    print(
        f"\n{len(soak.done)} of {args.faults} faults done, {len(soak.endings)} trainings ended, "
        f"{sum(e.compared for e in soak.endings):,} things compared in {seconds:.0f} s"
    )
    for text in [*soak.problems, *soak.differ, *(f"left behind: {each}" for each in soak.left)]:
        common.warn(text)
    common.tell_bars(bars)
    asked = common.settings(args, "faults", "seed", "trainings", "kinds", "limit")
    common.write_result(args.json, "soak", facts, asked, tables(soak), bars)
    return 0 if all(bar.held for bar in bars) else 1


def tables(soak: Soak) -> dict[str, common.Table]:
    """Put together what ``--json`` writes."""
    kinds = {}
    for name in KINDS:
        ours = [outcome for outcome in soak.done if outcome.fault.kind == name]
        if ours:
            kinds[name] = {
                "done": len(ours),
                "anew": sum(outcome.anew for outcome in ours),
                "steps_lost": sum(outcome.step - outcome.resumed for outcome in ours),
                "not_named": sum(outcome.named is False for outcome in ours),
                "seconds": common.Spread.of(outcome.seconds for outcome in ours),
            }
    trainings = {
        each.training: {
            "steps": each.steps,
            "lives": each.lives,
            "starts": each.starts,
            "steps_repeated": each.repeated,
            "compared": each.compared,
            "differ": len(each.differ),
        }
        for each in soak.endings
    }
    facts = {"problems": soak.problems, "left": soak.left}
    return {
        "faults": common.Table(kinds, None, {"each": [asdict(each) for each in soak.done]}),
        "trainings": common.Table(
            trainings, None, facts | {"each": [asdict(each) for each in soak.endings]}
        ),
    }


if __name__ == "__main__":
    sys.exit(main())
