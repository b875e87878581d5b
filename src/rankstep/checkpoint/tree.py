"""State dicts as JSON and named tensors, so that nothing in a checkpoint is ever unpickled.

A state dict is a nest of containers. Its tensors go into a safetensors file, each under a name; everything else becomes
JSON, with a reference where a tensor was. What JSON lacks becomes an object with a key that begins with ``$``:

    {"$tensor": "optimizer.fc.weight.exp_avg"}    {"$tuple": [0.9, 0.999]}    {"$float": "inf"}

Only the kinds listed here exist. An object of any other class is refused when it is saved, by its place and its class,
and an unknown ``$`` is refused when it is loaded: no file can reach the constructor of any other class.
"""

from __future__ import annotations

import base64
import binascii
import math
import types
from collections import Counter, OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from rankstep.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Named = Mapping[str, torch.Tensor]

DEEPEST: Final = 64
"""So many containers may lie in each other; a state dict has five."""

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_SEQUENCES: dict[type, str] = {
    tuple: "$tuple",
    torch.Size: "$size",
    set: "$set",
    frozenset: "$frozenset",
}
_MAPPINGS: dict[type, str] = {
    dict: "$dict",
    defaultdict: "$dict",
    OrderedDict: "$ordered",
    Counter: "$counter",
}
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_DTYPES: Final = frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
)
"""Those that the safetensors format has; other complex ones are written as pairs."""


class Tensors:
    """The tensors of a state dict, each under its name; one that appears twice is kept once.

    Attributes:
        named: What is to be written.
    """

    def __init__(self) -> None:
        self.named: dict[str, torch.Tensor] = {}
        self._seen: dict[tuple[Any, ...], str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> str:
        """Take a tensor in; return the name that it is kept under."""
        key = (
            *(tensor.data_ptr(), tensor.dtype, tensor.device),
            *(tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg()),
        )
        if tensor.numel() and key in self._seen:
            return self._seen[key]
        free, number = name, 1
        while free in self.named or free == "__metadata__":
            number += 1
            free = f"{name}#{number}"
        self._seen[key] = free
        self.named[free] = tensor
        return free


# ---------------------------------------------------------------- out


def encode(value: Any, place: str, tensors: Tensors, depth: int = 0) -> Any:
    """Return ``value`` as JSON has it.

    Args:
        value: A nest of containers, numbers, texts and tensors.
        place: What it is called in messages, and how its tensors' names begin.
        tensors: Takes the tensors.
        depth: How many containers are around it.

    Raises:
        CheckpointError: Something in it cannot be saved; names its place and class.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if isinstance(value, torch.Tensor):
        return _tensor_out(value, place, tensors)
    if depth >= DEEPEST:
        raise CheckpointError(
            f"{place} lies in more than {DEEPEST} containers; a state dict is no deeper than a few. "
            "Next: see whether it contains itself."
        )
    if kind is list or kind in _SEQUENCES:
        # Sets have no order of their own.
        items = sorted(value, key=repr) if kind in (set, frozenset) else value
        coded = [encode(each, f"{place}.{i}", tensors, depth + 1) for i, each in enumerate(items)]
        return coded if kind is list else {_SEQUENCES[kind]: coded}
    if kind in _MAPPINGS:
        return _mapping_out(value, place, tensors, depth)
    return _value_out(value, place)


def _mapping_out(value: Mapping[Any, Any], place: str, tensors: Tensors, depth: int) -> Any:
    # As torch's schedulers do it: a function stays with whoever was built with it.
    pairs = [
        (key, encode(item, f"{place}.{key}", tensors, depth + 1))
        for key, item in value.items()
        if not isinstance(item, _FUNCTIONS)
    ]
    if type(value) is dict and all(
        type(key) is str and not key.startswith("$") for key, _ in pairs
    ):
        return dict(pairs)
    return {
        _MAPPINGS[type(value)]: [
            [encode(key, f"a key of {place}", tensors, depth + 1), item] for key, item in pairs
        ]
    }


def _tensor_out(value: torch.Tensor, place: str, tensors: Tensors) -> dict[str, Any]:
    value = value.detach()
    if type(value) not in _TENSORS:
        raise CheckpointError(
            f"{place} is a {type(value).__module__}.{type(value).__qualname__}; checkpoints hold plain tensors. "
            "Next: give its parts in state_dict()."
        )
    if value.layout is torch.sparse_coo:
        value = value.coalesce()
        return {
            "$sparse": [
                _tensor_out(value.indices(), f"{place}.indices", tensors),
                _tensor_out(value.values(), f"{place}.values", tensors),
            ],
            "shape": list(value.shape),
        }
    plain = value.layout is torch.strided and not value.is_meta and not value.is_quantized
    if not plain or not (value.dtype in _DTYPES or value.is_complex()):
        raise CheckpointError(
            f"{place} is a tensor that the safetensors format does not have ({value.layout}, {value.device}, "
            f"{value.dtype}). Next: convert it in state_dict()."
        )
    facts: dict[str, Any] = {}
    if value.dtype not in _DTYPES:
        value, facts["complex"] = torch.view_as_real(value.resolve_conj()), True
    elif not value.is_contiguous() and _dense(value.shape, value.stride()):
        # Arithmetic on other strides may round otherwise in the last bit.
        facts["stride"] = list(value.stride())
    if value.device.type == "cpu":
        facts["on"] = "cpu"
    return {"$tensor": tensors.add(place, value), **facts}


def _value_out(value: Any, place: str) -> Any:
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biufc":
        tag = "$array" if isinstance(value, np.ndarray) else "$scalar"
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode("ascii")
        return {tag: data, "dtype": value.dtype.str, "shape": list(value.shape)}
    for kind, tag, text in _TEXTS:
        if isinstance(value, kind):
            return {tag: text(value)}
    raise CheckpointError(
        f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which could only be pickled, and a "
        "checkpoint holds no pickles. Next: turn it into numbers, texts, lists, dicts or tensors in state_dict()."
    )


_TEXTS: tuple[tuple[type | tuple[type, ...], str, Callable[[Any], Any]], ...] = (
    (float, "$float", repr),
    (complex, "$complex", lambda value: [value.real.hex(), value.imag.hex()]),
    ((bytes, bytearray), "$bytes", lambda value: base64.b64encode(value).decode("ascii")),
    (torch.dtype, "$dtype", lambda value: str(value).removeprefix("torch.")),
    (torch.device, "$device", str),
)


def _dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor's elements fill one block of memory, each once."""
    expected = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


# ---------------------------------------------------------------- back


def tensor_facts(value: Any, depth: int = 0) -> dict[str, dict[str, Any]]:
    """Find the references to tensors in encoded JSON: for each name, what was noted with it.

    Raises:
        CheckpointError: A reference is malformed.
    """
    if depth > 4 * DEEPEST:
        raise CheckpointError("its state is nested deeper than any state dict")
    found: dict[str, dict[str, Any]] = {}
    if isinstance(value, dict) and "$tensor" in value:
        if not isinstance(value["$tensor"], str):
            raise CheckpointError(f"a tensor's name is {value['$tensor']!r}, no text")
        found[value["$tensor"]] = value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inner:
        found |= tensor_facts(item, depth + 1)
    return found


def decode(value: Any, tensors: Named) -> Any:
    """Return what :func:`encode` was given, with ``tensors`` by their names.

    Raises:
        CheckpointError: The JSON is none of ours, or names a tensor that is not there.
    """
    try:
        return _back(value, tensors)
    except CheckpointError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, binascii.Error) as error:
        raise CheckpointError(
            f"its state is malformed ({type(error).__name__}: {error})"
        ) from error


def _back(value: Any, tensors: Named) -> Any:
    if isinstance(value, list):
        return [_back(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: _back(item, tensors) for key, item in value.items()}
    if tag not in _MAKERS:
        raise CheckpointError(f"its state holds a {tag!r}, which this Rankstep does not know")
    return _MAKERS[tag](value, tensors)


def _tensor_back(value: Mapping[str, Any], tensors: Named) -> torch.Tensor:
    name = value["$tensor"]
    if name not in tensors:
        raise CheckpointError(f"its state names a tensor {name!r}, which is in none of its files")
    tensor = tensors[name]
    if value.get("complex"):
        tensor = torch.view_as_complex(tensor)
    if "stride" in value:
        strides = value["stride"]
        if not _dense(tensor.shape, strides):
            raise CheckpointError(f"tensor {name!r} has impossible strides {strides}")
        shaped = torch.empty_strided(
            tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
        )
        tensor = shaped.copy_(tensor)
    return tensor


def _sparse_back(value: Mapping[str, Any], tensors: Named) -> torch.Tensor:
    indices, values = (_back(part, tensors) for part in value["$sparse"])
    made = torch.sparse_coo_tensor(indices, values, value["shape"], check_invariants=True)
    return made.coalesce()


def _array_back(value: Mapping[str, Any], _: Named) -> Any:
    dtype = np.dtype(value["dtype"])
    if dtype.kind not in "biufc":
        raise CheckpointError(f"an array has the dtype {dtype}")
    data = value["$array"] if "$array" in value else value["$scalar"]
    array = np.frombuffer(base64.b64decode(data, validate=True), dtype=dtype).copy()
    array = array.reshape(value["shape"])
    return array if "$array" in value else array[()]


def dtype_named(name: str) -> torch.dtype:
    """The dtype that torch calls so.

    Raises:
        CheckpointError: There is none.
    """
    # Not by getattr: some of torch's names import a module when they are looked up.
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{name!r} is no dtype")
    return dtype


def _sequence(tag: str, make: Callable[[Any], Any]) -> Callable[[Mapping[str, Any], Named], Any]:
    return lambda value, tensors: make(_back(item, tensors) for item in value[tag])


def _pairs(tag: str, make: Callable[[Any], Any]) -> Callable[[Mapping[str, Any], Named], Any]:
    return lambda value, tensors: make(
        {_back(key, tensors): _back(item, tensors) for key, item in value[tag]}
    )


def _text(tag: str, make: Callable[[Any], Any]) -> Callable[[Mapping[str, Any], Named], Any]:
    return lambda value, _: make(value[tag])


_MAKERS: dict[str, Callable[[Mapping[str, Any], Named], Any]] = {
    "$tensor": _tensor_back,
    "$sparse": _sparse_back,
    "$array": _array_back,
    "$scalar": _array_back,
    **{tag: _sequence(tag, kind) for kind, tag in _SEQUENCES.items()},
    "$dict": _pairs("$dict", dict),
    "$ordered": _pairs("$ordered", OrderedDict),
    "$counter": _pairs("$counter", Counter),
    "$float": _text("$float", float),
    "$complex": _text("$complex", lambda parts: complex(*map(float.fromhex, parts))),
    "$bytes": _text("$bytes", lambda text: base64.b64decode(text, validate=True)),
    "$dtype": _text("$dtype", dtype_named),
    "$device": _text("$device", torch.device),
}
