"""A job: what a user gives so that Rankstep can run the user's own model for a few steps."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter, is_lazy

from rankstep.explain.blame import JobError, calling, told

DEFAULT_FUNCTION = "job"

Loss: TypeAlias = Callable[[nn.Module, Any], torch.Tensor]
OptimizerFactory: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Collate: TypeAlias = Callable[[list[Any]], Any]

_numbers = itertools.count()


@runtime_checkable
class Samples(Sized, Protocol):
    """A dataset with a length, whose samples are found by their number."""

    def __getitem__(self, index: int, /) -> Any:
        """Return one sample."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a job function returns: a model, samples and a loss, as plain PyTorch as they can be.

    ::

        # job.py
        from rankstep.explain import Job


        def job():
            return Job(model=make_model(), dataset=make_dataset(), loss=mean_loss)

    A dict with these keys or an object with these attributes does as well, so that a job file need not import
    Rankstep. The function is called on every rank, with the same seed, and must return the same job on each. It opens no
    process group, wraps nothing and moves nothing to a device: that is done with what it returns.

    Args:
        model: A plain module, on the CPU.
        dataset: Has a length and gives a sample by its number.
        loss: Called as ``loss(model, batch)``; returns the mean loss over the samples of that batch, as a scalar.
        optimizer: Makes an optimizer for parameters: ``lambda params: torch.optim.AdamW(params, lr=1e-3)``. None:
            AdamW as it comes.
        batch_size: Samples that one rank takes in one step.
        collate: Makes a batch from a list of samples; None: torch's default, as in a DataLoader.
    """

    model: nn.Module
    dataset: Samples
    loss: Loss
    optimizer: OptimizerFactory | None = None
    batch_size: int = 16
    collate: Collate | None = None


def split_spec(spec: str) -> tuple[Path, str]:
    """Return the file and the function that ``job.py:job`` names.

    Args:
        spec: A path, a colon and a function's name; without these two the function is ``job``.

    Raises:
        JobError: There is no such file, or it is no Python file.
    """
    path, colon, function = spec.rpartition(":")
    if not colon:
        path, function = spec, DEFAULT_FUNCTION
    file = Path(path)
    if not function.isidentifier() or file.suffix != ".py":
        raise JobError(
            f"{spec!r} names no job. Next: give a Python file and a function in it, such as job.py:job."
        )
    if not file.is_file():
        raise JobError(
            f"there is no file {path} (looked in {Path.cwd()}). Next: give the path of the file with the job function."
        )
    return file.resolve(), function


def check_source(spec: str) -> None:
    """See, without running anything, that a job's file is there and is Python.

    Args:
        spec: ``job.py:job``.

    Raises:
        JobError: It is not; a syntax error is shown with its line.
    """
    file, _ = split_spec(spec)
    try:
        compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    except SyntaxError as error:
        shown = "".join(traceback.format_exception_only(error)).rstrip()
        raise JobError(f"{file.name} is no Python that can be imported:\n{shown}") from error
    except (OSError, ValueError) as error:
        raise JobError(f"{file.name} cannot be read: {told(error)}") from error


def load_job(spec: str) -> Job:
    """Import a job file, call its function and return the job.

    The file's folder is put on the import path, as for a script that Python runs, so the job may import its neighbours.

    Args:
        spec: ``job.py:job``.

    Raises:
        JobError: The file, the function or what it returns is not as a job needs it; the cause is chained where the
            user's code raised.
    """
    file, name = split_spec(spec)
    module = _import(file)
    function = getattr(module, name, None)
    if not callable(function):
        there = [
            word
            for word, thing in vars(module).items()
            if inspect.isfunction(thing) and thing.__module__ == module.__name__
        ]
        found = f"it has {', '.join(there)}" if there else "it defines no functions"
        raise JobError(
            f"{file.name} has no function {name!r}; {found}. Next: name one that returns a job, such as {file.name}:job."
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise JobError(
            f"{file.name}:{name} cannot be called without arguments ({error}). Next: give it none, or defaults."
        ) from error
    except ValueError:  # built-in functions may have no signature to look at
        pass
    return as_job(calling(f"{file.name}:{name}", function), f"{file.name}:{name}")


def as_job(value: object, place: str = "the job") -> Job:
    """Make a checked job from what a job function returned.

    Args:
        value: A `Job`, a mapping with its fields as keys, or an object with them as attributes.
        place: Which function that was, for messages.

    Raises:
        JobError: A field is missing, unknown or of a wrong kind.
    """
    if isinstance(value, Job):
        job = value
    elif isinstance(value, Mapping):
        unknown = sorted(map(str, set(value) - {field.name for field in fields(Job)}))
        if unknown:
            raise JobError(
                f"{place} returned a dict with {', '.join(unknown)}, which a job does not have. Next: its keys are "
                f"{', '.join(field.name for field in fields(Job))}."
            )
        job = _built(dict(value), place, "key")
    else:
        names = [field.name for field in fields(Job) if hasattr(value, field.name)]
        if not names:
            what = type(value).__name__
            if isinstance(value, (tuple, list)):
                what = f"a {what} of {len(value)}"
            raise JobError(
                f"{place} returned {what}, which is no job. Next: return a rankstep.explain.Job, or a dict or object with "
                "model, dataset and loss by name."
            )
        job = _built({name: getattr(value, name) for name in names}, place, "attribute")
    _check(job, place)
    return job


def _import(file: Path) -> Any:
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    name = f"rankstep_job_{next(_numbers)}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise JobError(f"{file.name} cannot be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and annotations look their module up by name.
    sys.modules[name] = module
    loader = spec.loader
    calling(f"importing {file.name}", lambda: loader.exec_module(module))
    return module


def _built(values: dict[str, Any], place: str, kind: str) -> Job:
    for field in fields(Job):
        if field.default is MISSING and field.name not in values:
            raise JobError(
                f"{place} returned a job without the {kind} {field.name!r}. Next: a job has model, dataset and loss, and "
                "may have optimizer, batch_size and collate."
            )
    return Job(**values)


def _check(job: Job, place: str) -> None:
    """Refuse what cannot work, by looking alone: nothing of the user's is called."""
    _check_model(job.model, place)
    if not isinstance(job.dataset, Samples):
        raise JobError(
            f"{place}: dataset is {type(job.dataset).__name__}, which has no length or no samples by number. Next: give "
            "one with __len__ and __getitem__; an iterable dataset has no order that could be dealt."
        )
    if calling(f"{place}: len(dataset)", lambda: len(job.dataset)) == 0:
        raise JobError(f"{place}: the dataset is empty. Next: give one with samples in it.")
    if not callable(job.loss):
        raise JobError(
            f"{place}: loss is {type(job.loss).__name__}, which cannot be called. Next: give a function loss(model, batch) "
            "that returns the mean loss."
        )
    # What a user's dict held may be anything, whatever the annotations say.
    optimizer: object = job.optimizer
    size: object = job.batch_size
    if isinstance(optimizer, torch.optim.Optimizer) or not (
        optimizer is None or callable(optimizer)
    ):
        raise JobError(
            f"{place}: optimizer is {type(job.optimizer).__name__}, not a function that makes one. Next: give "
            "lambda params: torch.optim.AdamW(params, lr=1e-3); it is called for several copies of the model."
        )
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise JobError(
            f"{place}: batch_size is {job.batch_size!r}. Next: give a whole number from 1."
        )
    if job.collate is not None and not callable(job.collate):
        raise JobError(
            f"{place}: collate is {type(job.collate).__name__}, which cannot be called. Next: give a function that makes a "
            "batch from a list of samples, or leave it out."
        )


def _check_model(model: object, place: str) -> None:
    if not isinstance(model, nn.Module):
        raise JobError(
            f"{place}: model is {type(model).__name__}, no torch.nn.Module. Next: return the module itself, unwrapped."
        )
    # Torch's wrapper, or ours.
    if any(kind.__name__ == "DistributedDataParallel" for kind in type(model).__mro__):
        raise JobError(
            f"{place}: the model is wrapped already. Next: return the plain module; explain wraps copies of it."
        )
    if any(isinstance(p, UninitializedParameter) or is_lazy(p) for p in model.parameters()):
        raise JobError(
            f"{place}: the model has lazy parameters without a shape. Next: run one batch through it before you return it."
        )
    if not any(param.requires_grad for param in model.parameters()):
        raise JobError(
            f"{place}: the model has no trainable parameters. Next: return one with parameters that require gradients."
        )
