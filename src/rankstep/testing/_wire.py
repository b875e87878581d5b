"""How functions, arguments and results travel between a test and its ranks.

Plain pickle between our own processes, with two additions. Tensors are copied as bytes: torch's own way shares memory
through file descriptors, which leak when a rank is killed. And the files of all modules that are named go along, so that
a rank can import a test file although test folders are no packages.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import pickle
import sys
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Packed:
    """A pickled value and the files of the modules that it names."""

    payload: bytes
    modules: dict[str, str]


def pack(value: Any) -> Packed:
    """Pickle a value for another process.

    Raises:
        TypeError: Something in it cannot be found by name in another process, like a lambda or a local function.
    """
    buffer = io.BytesIO()
    packer = _Packer(buffer)
    try:
        packer.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"this cannot be sent between a test and its ranks: {error}. Functions and classes must be defined at the "
            "top level of a module (no lambda, no closure); results must be plain data or tensors."
        ) from error
    return Packed(buffer.getvalue(), packer.modules)


def unpack(packed: Packed) -> Any:
    """Read a value back, importing the modules it names first."""
    for name, file in packed.modules.items():
        _import(name, file)
    return pickle.loads(packed.payload)  # noqa: S301 (written by our own other process)


class _Packer(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.modules: dict[str, str] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (FunctionType, type)):
            file = getattr(sys.modules.get(value.__module__), "__file__", None)
            if file is not None and value.__module__ != "__main__":
                self.modules[value.__module__] = file
        elif isinstance(value, torch.Tensor):
            buffer = io.BytesIO()
            # A clone, because saving a view would save all the memory behind it.
            torch.save(value.detach().cpu().clone(), buffer)
            is_parameter = isinstance(value, torch.nn.Parameter)
            return _tensor, (buffer.getvalue(), value.requires_grad, is_parameter)
        return NotImplemented


def _tensor(saved: bytes, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    tensor: torch.Tensor = torch.load(io.BytesIO(saved), weights_only=True)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def _import(name: str, file: str) -> None:
    loaded = sys.modules.get(name)
    if loaded is None:
        try:
            loaded = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != name.partition(".")[0]:
                raise
            loaded = _import_file(name, file)
    if getattr(loaded, "__file__", file) != file:
        raise ImportError(
            f"module {name!r} is {file} in the test but {loaded.__file__} in the rank; give the file another name"
        )


def _import_file(name: str, file: str) -> ModuleType:
    """Import a file under a name that no search path leads to, as pytest does with ``--import-mode=importlib``."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {name!r} from {file}")
    parents = name.split(".")[:-1]
    for depth in range(1, len(parents) + 1):
        # Pickle imports a module's parents before it.
        parent = ".".join(parents[:depth])
        sys.modules.setdefault(parent, ModuleType(parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
