"""`rankstep explain` on two real ranks: its numbers hold what they must, its texts show them, failures are told."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from rankstep.collectives import C10dCommunicator
from rankstep.explain import Job, numbers
from rankstep.explain.claims import judge
from rankstep.explain.measure import gradients
from rankstep.explain.measure.peers import Peers
from rankstep.explain.measure.stage import Stage
from rankstep.explain.page import page
from rankstep.explain.parts import PARTS
from rankstep.explain.screen import show
from rankstep.explain.tell import tell
from rankstep.world import world

RANKSTEP = "import sys; from rankstep.cli.main import main; sys.exit(main())"
LIMIT = 110
RANKS = 2
STEPS = 4
TENSORS = 300


def command(*words):
    return [sys.executable, "-c", RANKSTEP, "explain", "--nproc-per-node", str(RANKS), *words]


def environment():
    return os.environ | {"OMP_NUM_THREADS": "1"}


def explain(*words):
    return subprocess.run(
        [*map(str, command(*words))],
        check=False,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=LIMIT,
    )


@dataclass(frozen=True)
class Told:
    """One run: its numbers, what it printed, its page."""

    facts: dict
    printed: str
    progress: str
    page: str


def told(folder, code, *words):
    done = explain("--json", folder / "n.json", "--html", folder / "p.html", *words)
    assert done.returncode == code, done.stdout + done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["n.json", "p.html"]
    return Told(
        json.loads((folder / "n.json").read_text("utf-8")),
        done.stdout,
        done.stderr,
        (folder / "p.html").read_text("utf-8"),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run of the built-in job, for all tests that only look."""
    folder = tmp_path_factory.mktemp("explain")
    return told(folder, 0, "--steps", str(STEPS), "--tensors", str(TENSORS))


@pytest.fixture(scope="module")
def facts(run):
    return run.facts


# ---------------------------------------------------------------- the numbers


def test_every_rank_has_the_whole_model_of_rank_0(facts):
    ranks = facts["world"]["ranks"]
    assert [(r["rank"], r["local_rank"], r["node"]) for r in ranks] == [(0, 0, 0), (1, 1, 0)]
    assert len({r["pid"] for r in ranks}) == RANKS
    assert {r["parameter_bytes"] for r in ranks} == {ranks[0]["parameters"] * 4}
    assert ranks[0]["optimizer_bytes"] >= 2 * ranks[0]["parameter_bytes"]  # two moments of Adam
    assert ranks[0]["digest_before"] != ranks[1]["digest_before"]
    assert ranks[0]["digest_after"] == ranks[1]["digest_after"] == ranks[0]["digest_before"]


def test_every_sample_is_dealt_once(facts):
    samples = facts["samples"]
    length = samples["dataset_samples"]
    assert (samples["dealt_least"], samples["dealt_most"], samples["dealt"]) == (1, 1, length)
    assert sum(rank["samples"] for rank in samples["ranks"]) == length
    assert samples["padded_dealt"] == -(-length // RANKS) * RANKS
    assert samples["padded_twice"] == samples["padded_dealt"] - length
    assert set(samples["owners_epoch_0"]) == {0, 1}
    assert samples["owners_epoch_0"] != samples["owners_epoch_1"]


def test_set_epoch_changes_the_order(facts):
    for rank in facts["samples"]["ranks"]:
        assert rank["same_places_without_set_epoch"] == rank["places"]
        assert rank["same_places_with_set_epoch"] < 0.05 * rank["places"]
    assert "set_epoch" in facts["samples"]["warning"]


def test_the_mean_of_the_gradients_is_that_of_one_process(facts):
    gradients = facts["gradients"]
    assert gradients["difference_relative"] < 1e-6
    assert gradients["wrapper_difference_relative"] < 1e-6
    assert 1 < gradients["largest_angle"] < 180
    first, second = gradients["ranks"]
    assert not set(first["samples"]) & set(second["samples"])
    mean = (first["element"] + second["element"]) / 2
    assert gradients["element_mean"] == pytest.approx(mean, rel=1e-5)
    assert gradients["element_wrapper"] == pytest.approx(mean, rel=1e-5)
    losses = (first["loss"] + second["loss"]) / 2
    assert gradients["one_process_loss"] == pytest.approx(losses, rel=1e-5)


def test_counts_make_uneven_batches_exact(facts):
    uneven = facts["gradients"]["uneven"]
    assert len(set(uneven["sizes"])) == RANKS
    assert uneven["exact_relative"] < 1e-6
    assert uneven["mean_of_means_relative"] > 1e-3


def test_ranks_part_without_synchronisation_only(facts):
    drift = facts["drift"]
    assert len(drift["alone"]) == STEPS
    assert all(apart > 0 for apart in drift["alone"])
    assert drift["alone_checksums"] == [RANKS] * STEPS
    assert drift["together"] == [0.0] * STEPS
    assert drift["together_checksums"] == [1] * STEPS


def test_averaging_weights_is_the_same_for_linear_steps_only(facts):
    rows = {row["optimizer"]: row for row in facts["averaging"]["optimizers"]}
    for name in ("SGD", "SGD momentum=0.9"):
        assert rows[name]["apart_every_step_relative"] < 1e-4
        assert rows[name]["apart_every_few_relative"] > 1e-3
    for name in ("Adam", "AdamW"):
        assert rows[name]["apart_every_step_relative"] > 1e-2
    assert rows["SGD"]["states_apart_relative"] is None
    assert rows["SGD momentum=0.9"]["states_apart_relative"] > 1e-2


def test_one_backward_is_recorded_on_every_rank(facts):
    backward = facts["backward"]
    parameters = set(range(len(backward["names"])))
    buckets = [bucket["bucket"] for bucket in backward["plan"]]
    assert backward["all_reduces"] == len(buckets) >= 3
    assert 1 <= backward["launched_in_backward"] < len(buckets)
    assert {i for bucket in backward["plan"] for i in bucket["params"]} == parameters
    for rank in backward["ranks"]:
        assert {event["param"] for event in rank["ready"]} == parameters
        assert [bucket["bucket"] for bucket in rank["buckets"]] == buckets
        for bucket in rank["buckets"]:
            assert bucket["filled"] <= bucket["launched"] <= bucket["finished"]
            assert bucket["launched"] <= rank["backward"][1] <= rank["step"][1]
        assert rank["began"] >= 0
        parts = rank["overlap"]["hidden"] + rank["overlap"]["exposed"]
        assert parts == pytest.approx(rank["overlap"]["in_flight"])
    # Backward begins at the loss: the last layer's gradients are there before the first layer's.
    order = [event["param"] for event in backward["ranks"][0]["ready"]]
    assert order.index(max(parameters)) < order.index(0)


def test_other_ways_take_other_numbers_of_all_reduces(facts):
    for model in ("job", "many"):
        found = facts["whatif"][model]
        ways = {way["way"]: way for way in found["ways"]}
        assert list(ways) == ["per_parameter", "after_backward", "one_bucket", "plan"]
        assert ways["per_parameter"]["all_reduces"] == found["tensors"]
        assert ways["one_bucket"]["all_reduces"] == 1
        assert ways["plan"]["all_reduces"] == ways["after_backward"]["all_reduces"]
        assert all(way["difference_relative"] < 1e-6 for way in ways.values())
        assert all(way["milliseconds"] > 0 for way in ways.values())
    assert facts["whatif"]["many"]["tensors"] == TENSORS


def test_optimizer_steps_come_out_the_same_on_all_ranks(facts):
    steps = facts["steps"]
    assert [row["checksums"] for row in steps["rows"]] == [1] * STEPS
    assert steps["state_checksums"] == 1
    assert len({rank["digest"] for rank in steps["ranks"]}) == 1
    assert steps["one_process_losses"] == pytest.approx(
        [row["loss"] for row in steps["rows"]], rel=1e-4
    )
    assert steps["one_process_apart_relative"] < 1e-2


# ---------------------------------------------------------------- the claims


def test_all_claims_hold(facts):
    assert facts["held"] is True
    assert [claim["claim"] for claim in facts["claims"] if not claim["held"]] == []
    assert {claim["claim"].partition(".")[0] for claim in facts["claims"]} == set(PARTS)


BREAKS = [
    ("world.whole", lambda f: f["world"]["ranks"][1].update(parameter_bytes=1)),
    ("world.copied", lambda f: f["world"]["ranks"][1].update(digest_after="other")),
    ("samples.once", lambda f: f["samples"].update(dealt_most=2)),
    ("samples.padded", lambda f: f["samples"].update(padded_least=0)),
    (
        "samples.set_epoch",
        lambda f: f["samples"]["ranks"][0].update(same_places_without_set_epoch=0),
    ),
    ("gradients.mean", lambda f: f["gradients"].update(difference_relative=1e-3)),
    ("gradients.mean", lambda f: f["gradients"].update(difference_relative=None)),
    ("gradients.wrapper", lambda f: f["gradients"].update(wrapper_difference_relative=1e-3)),
    ("gradients.uneven", lambda f: f["gradients"]["uneven"].update(exact_relative=1e-3)),
    ("drift.alone", lambda f: f["drift"]["alone_checksums"].append(1)),
    ("drift.together", lambda f: f["drift"]["together_checksums"].append(2)),
    ("averaging.sgd", lambda f: optimizer(f, 0).update(apart_every_step_relative=0.5)),
    ("averaging.momentum", lambda f: optimizer(f, 1).update(apart_every_step_relative=0.5)),
    ("averaging.adam", lambda f: optimizer(f, 2).update(apart_every_step_relative=0.0)),
    ("averaging.adamw", lambda f: optimizer(f, 3).update(apart_every_step_relative=None)),
    ("backward.once", lambda f: f["backward"]["ranks"][1]["ready"].append({"param": 0, "at": 0})),
    ("backward.filled", lambda f: f["backward"]["ranks"][0]["ready"][0].update(at=1e9)),
    ("backward.order", lambda f: f["backward"]["ranks"][0]["buckets"].reverse()),
    ("backward.count", lambda f: f["backward"].update(all_reduces=99)),
    ("whatif.count", lambda f: f["whatif"]["many"]["ways"][0].update(all_reduces=3)),
    ("whatif.same", lambda f: f["whatif"]["job"]["ways"][1].update(difference_relative=0.1)),
    ("steps.weights", lambda f: f["steps"]["rows"][2].update(checksums=2)),
    ("steps.state", lambda f: f["steps"].update(state_checksums=2)),
]


def optimizer(facts, row):
    return facts["averaging"]["optimizers"][row]


@pytest.mark.parametrize(("name", "spoil"), BREAKS, ids=[name for name, _ in BREAKS])
def test_a_number_that_is_wrong_breaks_its_claim_alone(facts, name, spoil):
    spoiled = copy.deepcopy(facts)
    spoil(spoiled)
    assert [claim["claim"] for claim in judge(spoiled) if not claim["held"]] == [name]


# ---------------------------------------------------------------- what is told


def plain(facts, lang):
    written = io.StringIO()
    show(tell(facts, lang), Console(file=written, width=100, color_system=None))
    return written.getvalue()


def squeezed(text):
    return re.sub(r"\s+", "", text)


def measured(facts):
    """Numbers that both languages must show."""
    rows = facts["averaging"]["optimizers"]
    return [
        facts["world"]["ranks"][1]["digest_before"][:8],
        numbers.count(facts["samples"]["dataset_samples"]),
        " ".join(map(str, facts["samples"]["ranks"][1]["epoch_1"])),
        *(numbers.plain(rank["element"], 8) for rank in facts["gradients"]["ranks"]),
        numbers.small(facts["gradients"]["difference_relative"]),
        numbers.share(facts["gradients"]["uneven"]["mean_of_means_relative"]),
        *(numbers.share(share) for share in facts["drift"]["alone_relative"]),
        *(numbers.share(row["apart_every_step_relative"]) for row in rows),
        numbers.milliseconds(facts["backward"]["ranks"][0]["ready"][3]["at"] / 1e3),
        numbers.share(facts["backward"]["ranks"][0]["overlap"]["hidden_share"]),
        *(numbers.milliseconds(way["milliseconds"]) for way in facts["whatif"]["job"]["ways"]),
        *(numbers.plain(row["loss"], 6) for row in facts["steps"]["rows"]),
        facts["steps"]["ranks"][0]["digest"][:16],
    ]


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_story_shows_the_measured_numbers(facts, lang):
    text = squeezed(plain(facts, lang))
    assert [number for number in measured(facts) if squeezed(number) not in text] == []


def test_a_pipe_gets_plain_text_and_the_progress_goes_to_stderr(run):
    assert "\x1b" not in run.printed + run.progress
    assert squeezed(run.printed) == squeezed(plain(run.facts, "en"))
    assert not [line for line in run.printed.splitlines() if line != line.rstrip()]
    assert f"1/{len(PARTS)} " in run.progress
    assert f"{len(PARTS)}/{len(PARTS)} " in run.progress


class Elements(HTMLParser):
    """Collects what a page would load, its text, and whether its elements are closed."""

    def __init__(self):
        super().__init__()
        self.loads, self.text, self.open, self.names = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "srcset", "data")]
        self.loads += [v for n, v in attrs if n == "href" and not v.startswith("#")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def elements(text):
    parser = Elements()
    parser.feed(text)
    assert parser.open == []
    return parser


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_page_shows_the_measured_numbers_and_loads_nothing(facts, lang):
    text = page(tell(facts, lang), facts)
    parsed = elements(text)
    assert parsed.loads == []
    assert not {"script", "link", "img", "iframe"} & set(parsed.names)
    assert not re.search(r"url\(|@import", text)
    assert f'<html lang="{"zh-CN" if lang == "zh" else "en"}">' in text
    shown = squeezed("".join(parsed.text))
    assert [number for number in measured(facts) if squeezed(number) not in shown] == []


def test_the_page_of_a_run_is_written(run):
    assert run.page == page(tell(run.facts, "en"), run.facts)


def test_what_comes_from_the_user_is_escaped(facts):
    hostile = copy.deepcopy(facts)
    hostile["job"] = {**facts["job"], "name": "</p><script>alert(1)</script>", "built_in": False}
    hostile["backward"]["names"] = ["<img src=x>" for _ in facts["backward"]["names"]]
    text = page(tell(hostile, "en"), hostile)
    assert not {"script", "img"} & set(elements(text).names)
    assert "&lt;img src=x&gt;" in text


# ---------------------------------------------------------------- a user's job

JOB = """
import torch
from torch import nn

torch.manual_seed(3)


def job():
    def loss(model, batch):
        return (model(batch[:, :4]) - batch[:, 4:]).square().mean()

    return {
        "model": nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)),
        "dataset": torch.randn(64, 5),
        "loss": loss,
        "optimizer": lambda params: torch.optim.RMSprop(params, lr=1e-3),
        "batch_size": 8,
    }
"""


def test_a_claim_that_fails_for_a_users_model_is_told_with_its_cause(tmp_path):
    job = tmp_path / "job.py"
    job.write_text(JOB, encoding="utf-8")
    folder = tmp_path / "out"
    folder.mkdir()
    found = told(folder, 1, f"{job}:job", "--lang", "zh", "--steps", "2", "--tensors", "20")
    failed = {c["claim"]: c for c in found.facts["claims"] if not c["held"]}
    assert set(failed) == {"gradients.mean", "gradients.wrapper", "gradients.uneven"}
    assert failed["gradients.mean"]["causes"] == [
        {"cause": "batch_statistics", "modules": ["1 (BatchNorm1d)"]}
    ]
    assert found.facts["steps"]["optimizer"] == "RMSprop"
    assert found.facts["averaging"]["optimizers"][-1]["optimizer"] == "RMSprop (job)"
    text = squeezed(found.printed)
    assert found.facts["job"]["name"] == "job.py:job"
    assert "✗不成立" in text
    assert "1(BatchNorm1d)" in text
    assert "超出舍入误差" in text
    assert found.page == page(tell(found.facts, "zh"), found.facts)


def mean_loss(model, batch):
    return model(batch).square().mean()


def sum_loss(model, batch):
    return model(batch).square().sum()


def gradients_on_rank(me, layer, loss):
    """Run the part about gradients alone, with a small model."""
    torch.manual_seed(0)
    job = Job(nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 1)), torch.randn(40, 3), loss)
    with world() as here:
        stage = Stage(
            world=here,
            job=job,
            base=job.model,
            peers=Peers(C10dCommunicator(), here.device),
            seed=0,
            steps=2,
            tensors=1,
            local_batch=8,
        )
        return gradients.measure(stage)[1]


@pytest.mark.parametrize(
    ("layer", "loss", "causes"),
    [
        (nn.Tanh(), mean_loss, []),
        (nn.Dropout(0.5), mean_loss, ["draws"]),
        (nn.BatchNorm1d(4), mean_loss, ["batch_statistics"]),
        (nn.Tanh(), sum_loss, ["loss_no_mean"]),
    ],
    ids=["none", "dropout", "batch norm", "sum"],
)
def test_the_cause_of_another_gradient_is_found_by_further_runs(ranks, layer, loss, causes):
    found = ranks(2).run(gradients_on_rank, layer, loss)
    assert [[cause["cause"] for cause in shared["causes"]] for shared in found] == [causes] * 2
    for shared in found:
        assert (shared["difference_relative"] <= shared["tolerance"]) is not bool(causes)


def test_a_job_that_does_not_run_is_refused_without_a_report_of_the_launcher(tmp_path):
    job = tmp_path / "job.py"
    job.write_text(JOB.replace(".mean()\n", ".men()\n"), encoding="utf-8")
    done = explain(f"{job}:job")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "rankstep explain: loss(model, batch) raised AttributeError" in done.stderr
    assert 'job.py", line 10, in loss' in done.stderr  # the user's own traceback
    assert "failed first" not in done.stderr


def test_ctrl_c_ends_all_ranks(tmp_path):
    job = tmp_path / "job.py"
    pids = tmp_path / "pids"
    pids.mkdir()
    job.write_text(
        f"import os, pathlib, time\n"
        f"def job():\n    pathlib.Path({str(pids)!r}, str(os.getpid())).touch()\n    time.sleep(60)\n",
        encoding="utf-8",
    )
    process = subprocess.Popen(
        command(str(job)), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
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
