"""`rankstep explain` with users' jobs: what does not hold is told with its cause, what cannot run is refused in words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from rankstep.collectives import C10dCommunicator
from rankstep.explain import Job, claims, member, nodes
from rankstep.explain.measure import averaging, drift, gradients, whatif
from rankstep.explain.measure.peers import Peers
from rankstep.explain.measure.stage import Stage
from rankstep.explain.page import page
from rankstep.explain.request import Request
from rankstep.explain.run import _document
from rankstep.explain.tell import tell
from rankstep.explain.texts import texts
from rankstep.world import world

RANKSTEP = "import sys; from rankstep.cli.main import main; sys.exit(main())"
LIMIT = 110
RANKS = 2
SECOND = {"nodes": 2, "ranks_per_node": 2, "seconds": 0.1, "ranks": [], "problem": "left out"}

JOB = """
import torch
from torch import nn


def loss(model, batch):
    return (model(batch[:, :4]) - batch[:, 4:]).square().mean()


def job():
    torch.manual_seed(3)
    return {
        "model": nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)),
        "dataset": torch.randn(64, 5),
        "loss": loss,
        "optimizer": lambda params: torch.optim.RMSprop(params, lr=1e-3),
        "batch_size": 8,
    }
"""


def write(folder, source):
    file = folder / "job.py"
    file.write_text(source, encoding="utf-8")
    return f"{file}:job"


# ---------------------------------------------------------------- a whole story, on ranks of the pool


def measured_on_rank(me, request):
    with world() as here:
        found = member._finite(member._measured(request, here))
    return json.loads(json.dumps(found, allow_nan=False))


def explained(ranks, job, **changed):
    """Tell the story of a job without starting processes for it."""
    request = Request(job=job, ranks=RANKS, steps=2, tensors=20, **changed)
    return _document(request, ranks(RANKS).run(measured_on_rank, request), SECOND)


def broken(facts):
    return {claim["claim"]: claim["causes"] for claim in facts["claims"] if not claim["held"]}


def test_a_claim_that_fails_for_a_users_model_is_told_with_its_cause(ranks, tmp_path):
    facts = explained(ranks, write(tmp_path, JOB))
    cause = [{"cause": "batch_statistics", "modules": ["1 (BatchNorm1d)"]}]
    assert broken(facts) == {
        "world.rank": [{"cause": "no_second_world", "said": "left out"}],
        **dict.fromkeys(("gradients.mean", "gradients.wrapper", "gradients.uneven"), cause),
    }
    assert facts["held"] is False
    assert facts["job"]["name"] == "job.py:job"
    assert facts["steps"]["optimizer"] == "RMSprop"
    assert facts["averaging"]["optimizers"][-1]["optimizer"] == "RMSprop (job)"
    for lang in ("en", "zh"):
        text = texts(lang)
        story = tell(facts, lang)
        shown = page(story, facts)
        assert text("gradients.differs") in shown
        assert text("steps.differs") in shown
        assert shown.count("1 (BatchNorm1d)") == 3
        assert text("claim.gradients.mean") in story.ending


def test_the_same_model_without_batch_norm_breaks_nothing(ranks, tmp_path):
    facts = explained(ranks, write(tmp_path, JOB.replace("BatchNorm1d", "LayerNorm")))
    assert set(broken(facts)) == {"world.rank"}
    assert texts("en")("gradients.rounding") in page(tell(facts, "en"), facts)


SPARSE = """
import torch
from torch import nn


def job():
    torch.manual_seed(3)
    return {
        "model": nn.Sequential(nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 1)),
        "dataset": torch.randint(0, 50, (64, 4)),
        "loss": lambda model, batch: model(batch).square().mean(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
    }
"""


def test_sparse_gradients_break_nothing(ranks, tmp_path):
    facts = explained(ranks, write(tmp_path, SPARSE))
    assert set(broken(facts)) == {"world.rank"}


def test_weights_of_few_digits_cannot_show_small_differences(ranks, tmp_path):
    coarse = JOB.replace("nn.BatchNorm1d(8), nn.Linear(8, 1))", "nn.Linear(8, 1)).bfloat16()")
    coarse = coarse.replace("torch.randn(64, 5)", "torch.randn(64, 5).bfloat16()")
    facts = explained(ranks, write(tmp_path, coarse))
    found = broken(facts)
    assert set(found) == {"world.rank", "averaging.adam", "averaging.adamw"}
    assert found["averaging.adam"] == [{"cause": "coarse_weights"}]


# ---------------------------------------------------------------- single parts


def mean_loss(model, batch):
    return model(batch).square().mean()


def sum_loss(model, batch):
    return model(batch).square().sum()


def root_loss(model, batch):
    return (model(batch) * 0).abs().sqrt().mean()


class Noisy(nn.Module):
    """Draws numbers as no module known by name does."""

    def forward(self, x):
        return x + torch.randn_like(x) if self.training else x


class Coarse(nn.Linear):
    """Computes in fewer digits than its weights have."""

    def forward(self, x):
        return functional.linear(x.bfloat16(), self.weight.bfloat16()).float()


class Coupled(nn.Module):
    """Lets samples influence each other in every mode."""

    def forward(self, x):
        return x - x.mean(0)


def stage_of(here, job, **changed):
    given = {"seed": 0, "steps": 2, "tensors": 1, "local_batch": 8} | changed
    peers = Peers(C10dCommunicator(), here.device)
    return Stage(world=here, job=job, base=job.model, peers=peers, **given)


def gradients_on_rank(me, layer, loss):
    """Run the part about gradients alone, with a small model."""
    torch.manual_seed(0)
    job = Job(nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 1)), torch.randn(40, 3), loss)
    with world() as here:
        return gradients.measure(stage_of(here, job))[1]


@pytest.mark.parametrize(
    ("layer", "loss", "causes"),
    [
        (nn.Tanh(), mean_loss, []),
        (nn.Dropout(0.5), mean_loss, ["draws"]),
        (nn.RReLU(), mean_loss, ["draws"]),
        (nn.BatchNorm1d(4), mean_loss, ["batch_statistics"]),
        (nn.Sequential(nn.BatchNorm1d(4), nn.Dropout()), mean_loss, ["batch_statistics", "draws"]),
        (Noisy(), mean_loss, ["training_mode"]),
        (nn.Tanh(), sum_loss, ["loss_no_mean"]),
        (Coarse(4, 4), mean_loss, ["arithmetic"]),
        (Coupled(), mean_loss, ["loss_no_mean"]),
        (nn.Tanh(), root_loss, ["not_finite"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_the_cause_of_another_gradient_is_found_by_further_runs(ranks, layer, loss, causes):
    found = ranks(2).run(gradients_on_rank, layer, loss)
    assert [[cause["cause"] for cause in shared["causes"]] for shared in found] == [causes] * 2
    for shared in found:
        assert (shared["difference_relative"] <= shared["tolerance"]) is not bool(causes)


def parting_on_rank(me, samples):
    """Run the parts in which ranks part, with these samples."""
    torch.manual_seed(0)
    job = Job(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), samples, mean_loss)
    with world() as here:
        stage = stage_of(here, job)
        found = {"gradients": gradients.measure(stage), "drift": drift.measure(stage)}
        found["averaging"] = averaging.measure(stage)
        return found


def test_equal_samples_part_nobody_and_that_is_the_cause(ranks):
    for samples, expected in (
        (torch.randn(40, 3), set()),
        (torch.ones(40, 3), {"equal_gradients"}),
    ):
        found = ranks(2).run(parting_on_rank, samples)
        facts = {part: shared for part, (_, shared) in found[0].items()}
        facts["gradients"]["ranks"] = [of_rank["gradients"][0] for of_rank in found]
        judged = [*claims._drift(facts), *claims._averaging(facts)]
        wrong = {claim["claim"]: claim["causes"] for claim in judged if not claim["held"]}
        names = {"drift.alone", "averaging.adam", "averaging.adamw"} if expected else set()
        assert set(wrong) == names
        assert {cause["cause"] for causes in wrong.values() for cause in causes} == expected


def whatif_on_rank(me, seconds):
    torch.manual_seed(0)
    job = Job(nn.Linear(3, 2), torch.randn(40, 3), mean_loss)
    with world() as here:
        stage = stage_of(here, job, tensors=600, deadline=time.monotonic() + seconds)
        return whatif.measure(stage)[1]["many"]


@pytest.mark.parametrize(("seconds", "run"), [(-1, 250), (60, 600)])
def test_single_all_reduces_are_run_while_there_is_time(ranks, seconds, run):
    for many in ranks(2).run(whatif_on_rank, seconds):
        alone, *others = many["ways"]
        assert alone["way"] == "per_parameter"
        assert (alone["all_reduces"], alone["tensors"], many["tensors"]) == (run, run, 600)
        assert alone["difference_relative"] < 1e-6
        assert all(way["tensors"] == 600 and way["all_reduces"] <= 4 for way in others)


# ---------------------------------------------------------------- jobs that cannot run


def replaced(old, new):
    assert old in JOB
    return JOB.replace(old, new)


LATE = """
class Late:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index in LATE_ONES:
            raise OSError(f"sample {index} is damaged")
        return torch.ones(5) * index


def job():
    return {"model": nn.Linear(4, 1), "dataset": Late(), "loss": loss, "batch_size": 8}
"""

REFUSED = [
    ("raises", replaced("torch.manual_seed(3)", "raise KeyError('weights')"), "job.py:job raised"),
    (
        "exits",
        JOB + "\nimport sys\nsys.exit(4)\n",
        "importing job.py ended the process with exit(4)",
    ),
    ("no file", replaced("import torch\n", "open('nowhere.pt')\n"), "raised FileNotFoundError"),
    ("tuple", replaced("return {", "return 1, 2, {"), "returned a tuple of 3, which is no job"),
    ("no loss", replaced('"loss": loss,', ""), "returned a job without the key 'loss'"),
    ("empty", replaced("torch.randn(64, 5)", "torch.randn(0, 5)"), "the dataset is empty"),
    ("few", replaced("torch.randn(64, 5)", "torch.randn(1, 5)"), "1 samples for 2 ranks"),
    ("endless", replaced("torch.randn(64, 5)", "iter([1])"), "has no length or no samples"),
    (
        "no length",
        replaced("torch.randn(64, 5)", "Unknown()")
        + "\nclass Unknown(list):\n    def __len__(self):\n        raise OSError('offline')\n",
        "len(dataset) raised OSError: offline",
    ),
    ("no scalar", replaced(".mean()", ""), "returned a tensor of shape (8, 1)"),
    ("number", replaced(".mean()", ".mean().item()"), "returned float"),
    ("complex", replaced(".mean()", ".mean() * 1j"), "returned a torch.complex64 scalar"),
    (
        "other weights",
        replaced("RMSprop(params,", "RMSprop(nn.Linear(4, 8).parameters(),"),
        "made an optimizer with 2 parameters that it was not given",
    ),
    (
        "needs a GPU",
        replaced("(model(batch[:, :4])", "(model(batch[:, :4].to('cuda'))"),
        "return a model and samples that work on the CPU",
    ),
    (
        "on a GPU",
        replaced("return {", "torch.ones(1, device='cuda')\n    return {"),
        "return a model and samples that work on the CPU",
    ),
    (
        "other model",
        replaced("torch.manual_seed(3)", "import os; size = 8 + int(os.environ['RANK'])")
        .replace("8), nn", "size), nn")
        .replace("1d(8)", "1d(size)")
        .replace("(8, 1)", "(size, 1)"),
        "models have different parameters",
    ),
    (
        "other samples",
        replaced("torch.manual_seed(3)", "import os; torch.manual_seed(int(os.environ['RANK']))"),
        "datasets hold different samples",
    ),
    (
        "other length",
        replaced(
            "torch.randn(64, 5)", "torch.randn(64, 5)[int(__import__('os').environ['RANK']):]"
        ),
        "different sizes",
    ),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize(
    ("source", "message"), [row[1:] for row in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_a_job_that_cannot_work_is_refused_on_the_ranks(ranks, tmp_path, source, message):
    request = Request(job=write(tmp_path, source), ranks=RANKS)
    found = ranks(RANKS).run(measured_on_rank, request)
    told = [result["problem"] for result in found if result["problem"] is not None]
    assert told
    for problem in told:
        assert message in problem["message"]
        # What is shown of a traceback is the user's own.
        assert "rankstep/explain" not in problem["traceback"]
        assert "importlib" not in problem["traceback"]


def explain(*words):
    return subprocess.run(
        [sys.executable, "-c", RANKSTEP, "explain", "--nproc-per-node", str(RANKS), *words],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=LIMIT,
    )


def test_a_job_that_does_not_run_is_refused_without_a_report_of_the_launcher(tmp_path):
    done = explain(write(tmp_path, replaced(".mean()\n", ".men()\n")))
    assert done.returncode == 2
    assert done.stdout == ""
    assert "rankstep explain: loss(model, batch) raised AttributeError" in done.stderr
    assert 'job.py", line 7, in loss' in done.stderr  # the user's own traceback
    assert "failed first" not in done.stderr
    assert "rankstep/explain" not in done.stderr


def test_what_fails_later_is_told_as_the_jobs_too(tmp_path):
    # Of the samples of a first step, which are tried before, none is damaged.
    late = JOB.partition("def job")[0] + LATE.replace("LATE_ONES", "LATE")
    first = torch.randperm(64, generator=torch.Generator().manual_seed(0)).tolist()[:16]
    done = explain(
        write(tmp_path, late.replace("class", f"LATE = set(range(64)) - {set(first)}\n\nclass", 1))
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    told = done.stderr.rpartition("rankstep explain: ")[2]
    assert "in the part 'drift': the job raised OSError: sample" in told
    assert "in __getitem__" in told
    assert "rankstep/explain" not in done.stderr


# ---------------------------------------------------------------- processes


def test_a_second_world_that_fails_says_why(monkeypatch):
    # One of each is enough to fail.
    for name in ("_TRIES", "NODES", "RANKS_PER_NODE"):
        monkeypatch.setattr(nodes, name, 1)
    found = nodes.two_nodes("rankstep.explain.no_such_module")
    assert found["ranks"] == []
    assert "no_such_module" in found["problem"]


def test_ctrl_c_ends_all_ranks(tmp_path):
    pids = tmp_path / "pids"
    pids.mkdir()
    job = write(
        tmp_path,
        f"import os, pathlib, time\n"
        f"def job():\n    pathlib.Path({str(pids)!r}, str(os.getpid())).touch()\n    time.sleep(60)\n",
    )
    process = subprocess.Popen(
        [sys.executable, "-c", RANKSTEP, "explain", "--nproc-per-node", str(RANKS), job],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        until = time.monotonic() + LIMIT / 2
        while len(list(pids.iterdir())) < RANKS and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert len(found := list(pids.iterdir())) == RANKS
    assert not [pid.name for pid in found if Path("/proc", pid.name).exists()]
