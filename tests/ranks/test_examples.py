"""The examples, started as a newcomer starts them: what they reach, report and refuse."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RANKSTEP = "import sys; from rankstep.cli.main import main; sys.exit(main())"
STARTERS = {
    1: [sys.executable],
    2: [sys.executable, "-c", RANKSTEP, "run", "--nproc-per-node", "2"],
    4: [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"],
}
EPOCHS = 8
STEPS_PER_EPOCH = 22


def start(ranks, example, *words, **variables):
    """Run an example to its end: plainly on 1 rank, by `rankstep run` on 2, by torchrun on 4."""
    return subprocess.run(
        [*STARTERS[ranks], EXAMPLES / example, *words],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        timeout=100,
    )


def run(folder, ranks, example, *words):
    """Run an example that must succeed; return its report and what it printed."""
    file = folder / "result.json"
    done = start(ranks, example, "--json", file, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in folder.iterdir()] == [file.name]
    return json.loads(file.read_text(encoding="utf-8")), done.stdout


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Give ``digits(ranks)``, the report of a whole run, made once."""

    @functools.cache
    def report(ranks):
        return run(tmp_path_factory.mktemp("digits"), ranks, "digits.py")[0]

    return report


def largest_difference(losses, others):
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_digits_are_learned_on_any_number_of_ranks(digits, ranks):
    report = digits(ranks)
    assert report["test_accuracy"] >= 0.97
    assert report["weights_identical"] is True
    assert (report["world_size"], report["global_batch"]) == (ranks, 64)
    assert (report["epochs"], len(report["losses"])) == (EPOCHS, EPOCHS * STEPS_PER_EPOCH)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_step_takes_one_all_reduce_per_bucket_and_some_leave_early(digits, ranks):
    report = digits(ranks)
    assert report["all_reduces_per_step"] == report["buckets"] == 3
    assert 1 <= report["launched_before_backward_ended"] < report["buckets"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_together_take_the_steps_of_one_process(digits, ranks):
    assert largest_difference(digits(1)["losses"], digits(ranks)["losses"]) < 1e-4


def test_another_seed_takes_other_steps(digits, tmp_path):
    other, _ = run(tmp_path, 1, "digits.py", "--seed", "8", "--epochs", "1")
    assert largest_difference(digits(1)["losses"][:STEPS_PER_EPOCH], other["losses"]) > 1e-2


def test_the_gpt_learns_and_writes_on_two_ranks(tmp_path):
    report, printed = run(tmp_path, 2, "char_gpt.py", "--epochs", "1", "--global-batch", "128")
    losses = report["losses"]
    assert sum(losses[-10:]) < 0.75 * sum(losses[:10])
    assert report["test_accuracy"] > 0.2
    assert report["weights_identical"] is True
    assert report["all_reduces_per_step"] == report["buckets"] > 1
    assert report["launched_before_backward_ended"] >= 1
    assert "\nThe statement " in printed


@pytest.mark.parametrize(
    ("ranks", "words", "message"),
    [
        (2, ["--global-batch", "63"], "cannot be shared evenly by 2 ranks. Next: take 62 or 64."),
        (1, ["--global-batch", "2000"], "--global-batch 2000: there are 1437 samples to train on"),
        (1, ["--epochs", "0"], "--epochs 0: take at least 1"),
        (1, ["--json", "missing/result.json"], "--json missing/result.json: cannot write there"),
    ],
)
def test_switches_that_cannot_work_are_refused_before_training(ranks, words, message):
    refused = start(ranks, "digits.py", *words)
    assert refused.returncode == 2
    # One rank speaks for all; under the launcher its words may follow once more, as the first failure's last lines.
    assert refused.stderr.startswith("error: ")
    assert refused.stderr.count("error: ") <= ranks
    assert message in refused.stderr.splitlines()[0]
    assert "Traceback" not in refused.stderr
    assert refused.stdout == ""


def test_a_missing_scikit_learn_is_named_with_the_command_that_installs_it(tmp_path):
    (tmp_path / "sklearn.py").write_text("raise ImportError", encoding="utf-8")
    refused = start(1, "digits.py", PYTHONPATH=str(tmp_path))
    assert refused.returncode == 2
    assert refused.stderr.count("pip install scikit-learn") == 1
    assert "Traceback" not in refused.stderr
