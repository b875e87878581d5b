"""A user's job: what is taken, and what is said about one that cannot work."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from rankstep.cli.main import main
from rankstep.explain import Job, JobError
from rankstep.explain.blame import calling, is_users, users_traceback
from rankstep.explain.job import as_job, check_source, load_job, split_spec
from rankstep.explain.measure.probe import probe
from rankstep.explain.measure.stage import Stage


def mean_loss(model, batch):
    return model(batch).square().mean()


def pieces(**changed):
    return {
        "model": nn.Linear(3, 1),
        "dataset": torch.ones(8, 3),
        "loss": mean_loss,
    } | changed


def stage(**changed):
    job = as_job(pieces(**changed))
    here = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"), is_main=True)
    return Stage(
        world=here,
        job=job,
        base=job.model,
        peers=None,
        seed=0,
        steps=2,
        tensors=1,
        local_batch=2,
    )


@pytest.mark.parametrize("make", [Job, dict, SimpleNamespace])
def test_a_job_is_taken_from_a_job_a_dict_or_an_object(make):
    given = pieces(batch_size=4)
    job = as_job(make(**given))
    assert job.model is given["model"]
    assert (job.batch_size, job.optimizer, job.collate) == (4, None, None)


def test_a_job_file_may_import_its_neighbours_and_leave_the_function_out(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", ["before"])
    (tmp_path / "neighbour_of_job.py").write_text("SIZE = 5\n", encoding="utf-8")
    file = tmp_path / "my job.py"
    file.write_text(
        "import torch\nfrom neighbour_of_job import SIZE\n"
        "def job():\n"
        "    return {'model': torch.nn.Linear(SIZE, 1), 'dataset': torch.ones(9, SIZE), 'loss': len}\n",
        encoding="utf-8",
    )
    job = load_job(str(file))
    assert job.model.in_features == 5


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.py:job", "there is no file nowhere.py"),
        ("nowhere", "names no job"),
        ("job.txt:job", "names no job"),
        ("job.py:a b", "names no job"),
    ],
)
def test_a_job_that_is_not_there_is_named(spec, message):
    with pytest.raises(JobError, match=message) as caught:
        split_spec(spec)
    assert "Next: give" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def train(): pass\n", "has no function 'job'; it has train"),
        ("", "has no function 'job'; it defines no functions"),
        ("job = 3\n", "has no function 'job'"),
        ("import not_there_at_all\n", "importing job.py raised ModuleNotFoundError"),
        ("def job(size): pass\n", "cannot be called without arguments"),
        ("def job(): raise KeyError('weights')\n", "job.py:job raised KeyError: 'weights'"),
        ("def job(): pass\n", "returned NoneType, which is no job"),
        ("def job(): return 1, 2\n", "returned a tuple of 2, which is no job"),
        ("import sys\nsys.exit('usage: ...')\n", "ended the process with exit('usage: ...')"),
        ("def job(): raise SystemExit\n", "job.py:job ended the process with exit(None)"),
    ],
)
def test_a_job_file_that_cannot_work_is_told_why(source, message, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", ["before"])
    (tmp_path / "job.py").write_text(source, encoding="utf-8")
    with pytest.raises(JobError) as caught:
        load_job(str(tmp_path / "job.py:job"))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"def job(:\n", "line 1"),
        (b"if True:\njob\n", "IndentationError"),
        (b"job = '\xff'\n", "no Python that can be imported"),
        (b"job = 1\0\n", "null bytes"),
    ],
)
def test_a_file_that_is_no_python_is_refused_before_a_rank_is_started(
    source, message, tmp_path, capsys
):
    (tmp_path / "job.py").write_bytes(source)
    assert main(["explain", str(tmp_path / "job.py:job")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rankstep explain: job.py ")
    assert message in error
    assert "Traceback" not in error
    assert "starting" not in error


def test_a_file_that_is_python_is_not_run_for_that(tmp_path):
    (tmp_path / "job.py").write_text("raise SystemError\n", encoding="utf-8")
    check_source(str(tmp_path / "job.py"))


def deep():
    raise KeyError("weights")


def test_a_users_traceback_has_no_frames_of_ours():
    with pytest.raises(JobError) as caught:
        calling("it", deep)
    assert str(caught.value) == "it raised KeyError: 'weights'"
    shown = users_traceback(caught.value.__cause__)
    assert "in deep" in shown
    assert "blame.py" not in shown
    assert is_users(caught.value)


def test_an_error_of_ours_is_no_users():
    with pytest.raises(JobError) as caught:
        split_spec("nowhere")
    ours = caught.value.with_traceback(caught.tb.tb_next)
    assert not is_users(ours)
    assert users_traceback(ours).startswith("rankstep.explain.blame.JobError: ")


class DistributedDataParallel(nn.Linear):
    """Stands for torch's wrapper, which needs a process group."""


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": DistributedDataParallel(3, 1)}, "the model is wrapped already"),
        ({"model": 3}, "model is int, no torch.nn.Module"),
        ({"model": nn.LazyLinear(1)}, "lazy parameters"),
        ({"model": nn.ReLU()}, "no trainable parameters"),
        ({"model": nn.Linear(3, 1).requires_grad_(False)}, "no trainable parameters"),
        ({"dataset": iter([1])}, "has no length or no samples by number"),
        ({"dataset": []}, "the dataset is empty"),
        ({"loss": 0.5}, "loss is float, which cannot be called"),
        ({"optimizer": "adam"}, "optimizer is str, not a function"),
        ({"optimizer": torch.optim.SGD([torch.ones(1)])}, "optimizer is SGD, not a function"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"collate": []}, "collate is list, which cannot be called"),
        ({"optimiser": torch.optim.SGD}, "optimiser, which a job does not have"),
    ],
)
def test_a_piece_that_cannot_work_is_named(changed, message):
    with pytest.raises(JobError) as caught:
        as_job(pieces(**changed), "job.py:job")
    assert message in str(caught.value)
    assert str(caught.value).startswith("job.py:job")


@pytest.mark.parametrize("make", [dict, SimpleNamespace])
def test_a_missing_piece_is_named(make):
    given = pieces()
    del given["loss"]
    with pytest.raises(JobError, match=r"without the (key|attribute) 'loss'"):
        as_job(make(**given))


class Refusing(nn.Linear):
    def __deepcopy__(self, memo):
        raise TypeError("cannot be copied")


def other_weights(params):
    return torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=1.0)


def broken(samples):
    raise ValueError("cannot be collated")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss": lambda m, b: m(b)}, "returned a tensor of shape (2, 1)"),
        ({"loss": lambda m, b: 0.5}, "returned float"),
        ({"loss": lambda m, b: m(b).mean() * 1j}, "returned a torch.complex64 scalar"),
        ({"loss": lambda m, b: m(b).mean().detach()}, "it has no graph"),
        ({"loss": lambda m, b: m(b).mean() * float("nan")}, "the loss of the first batch is nan"),
        ({"loss": lambda m, b: m(b).mean() * 0}, "is zero everywhere"),
        ({"loss": lambda m, b: functional.cross_entropy(m(b), b)}, "raised RuntimeError"),
        ({"collate": broken}, "raised ValueError: cannot be collated"),
        ({"model": Refusing(3, 1)}, "copying the model raised TypeError"),
        ({"optimizer": lambda params: None}, "optimizer(params) returned NoneType"),
        ({"optimizer": torch.optim.LBFGS}, "optimizer.step() raised"),
        ({"optimizer": other_weights}, "with 2 parameters that it was not given"),
        ({"loss": lambda m, b: m(b.to("nowhere"))}, "raised RuntimeError"),
    ],
)
def test_a_job_that_does_not_run_is_told_why(changed, message):
    with pytest.raises(JobError) as caught:
        probe(stage(**changed))
    assert message in str(caught.value)


def test_a_job_that_runs_passes_the_probe():
    assert probe(stage()) > 0
    assert probe(stage(optimizer=lambda params: torch.optim.SGD(list(params)[:1], lr=1.0))) > 0
    assert probe(stage(optimizer=torch.optim.SGD)) > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nproc-per-node", "1"], "this is a story about ranks"),
        (["--steps", "1"], "--steps 1"),
        (["--tensors", "0"], "--tensors 0"),
        (["--seed", "-1"], "--seed -1"),
        (["--seconds", "0"], "--seconds 0"),
        (["--seconds", "nan"], "--seconds nan"),
        (["--device", "cuda", "--nproc-per-node", "999"], "--device cuda: PyTorch has"),
        (["--html", "same", "--json", "./same"], "name the same file"),
        (["--json", "nowhere/numbers.json"], "nowhere/numbers.json: cannot write there"),
        (["--html", "."], "cannot write there"),
        (["nowhere.py:job"], "there is no file nowhere.py"),
    ],
)
def test_flags_that_cannot_work_are_refused_before_a_rank_is_started(words, message, capsys):
    assert main(["explain", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rankstep explain: ")
    assert message in error
    assert "Traceback" not in error


def test_help_shows_examples_and_what_a_job_is(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["explain", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "rankstep explain --lang zh --html ddp.html" in text
    assert "def job():" in text
