"""An optimizer's state between the form of its class, whole and by parameter, and the ranks' shares."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import torch

from rankstep.collectives.failures import naming_failure
from rankstep.errors import ModelError
from rankstep.parallel.sharded_memory import in_order, numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rankstep.collectives import Communicator
    from rankstep.parallel.sharded_stepper import Part

State = dict[str, Any]
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def whole_state(
    parts: Sequence[Part],
    state: Mapping[torch.Tensor, State],
    per_element: Mapping[str, bool],
    comm: Communicator,
) -> dict[int, State]:
    """Every parameter's whole state; collective.

    Args:
        parts: What this rank steps of each parameter; the same parameters in the same order on every rank.
        state: Of this rank's pieces.
        per_element: For each entry whether it has a value for each element.
        comm: The ranks.

    Returns:
        By the number of the parameter in ``parts``; those without state are left out.
    """
    told: list[list[Any]] = []
    data: list[torch.Tensor] = []
    for number, part in enumerate(parts):
        if part.home is None and comm.rank:
            continue  # every rank has the same
        keys = dict.fromkeys(key for piece in part.pieces for key in state.get(piece, {}))
        told += [_tell(number, key, part, state, per_element.get(key), data) for key in keys]
    device = parts[0].param.device if parts else torch.device("cpu")
    mine = torch.cat([_bytes(each).to(device) for each in data]) if data else _nothing(device)
    result: dict[int, State] = {}
    for rank in range(comm.world_size):
        facts, values = _from(rank, told, mine, comm)
        at = 0
        for number, key, start, form, dtype, shape, value in facts:
            entry = result.setdefault(number, {})
            if form == "value":
                entry.setdefault(key, value)
                continue
            kind = _DTYPES[dtype]
            count = 1
            for size in shape:
                count *= size
            raw = values[at : at + count * kind.itemsize]
            at += count * kind.itemsize
            # A copy, because the bytes before it may end anywhere.
            found = raw.clone().view(kind).view(shape)
            if form == "whole":
                entry.setdefault(key, found)
                continue
            spec = parts[number].spec
            if key not in entry:
                entry[key] = torch.empty_strided(
                    spec.shape, spec.view_stride, dtype=kind, device=device
                )
            entry[key].as_strided((spec.numel,), (1,))[start : start + count] = found
    return result


def _tell(
    number: int,
    key: str,
    part: Part,
    state: Mapping[torch.Tensor, State],
    per_element: bool | None,
    data: list[torch.Tensor],
) -> list[Any]:
    """Describe one entry of one parameter, and put its values on the pile."""
    values = [state[piece][key] for piece in part.pieces]
    first = values[0]
    if not isinstance(first, torch.Tensor):
        try:
            json.dumps(first)
        except TypeError as error:
            raise ModelError(
                f"the optimizer's state of {part.spec.name!r} has {key!r}, a {type(first).__name__}, which cannot travel "
                "between ranks: only tensors, numbers, strings, lists and dicts of these can"
            ) from error
        return [number, key, 0, "value", "", [], first]
    if per_element is None:
        per_element = all(v.shape == p.shape for v, p in zip(values, part.pieces, strict=True))
    dtype = str(first.dtype)
    if not per_element:
        data.append(first)
        return [number, key, 0, "whole", dtype, list(first.shape), None]
    data.extend(values)
    count = sum(value.numel() for value in values)
    start = part.start * part.spec.numel // part.spec.buffer_numel
    return [number, key, start, "elements", dtype, [count], None]


def _from(
    rank: int, told: list[list[Any]], mine: torch.Tensor, comm: Communicator
) -> tuple[list[list[Any]], torch.Tensor]:
    """What a rank has told, and its bytes."""
    if comm.world_size == 1:
        return told, mine
    text = json.dumps(told).encode() if rank == comm.rank else b""
    sizes = torch.tensor([len(text), len(mine)], dtype=torch.int64, device=mine.device)
    with naming_failure(
        comm, "sharded/state", "collecting the optimizer's state (state_dict() is collective)"
    ):
        comm.broadcast(sizes, rank).wait()
        text_bytes, data_bytes = sizes.tolist()
        if rank == comm.rank:
            raw = (
                torch.frombuffer(bytearray(text), dtype=torch.uint8).to(mine.device)
                if text
                else mine
            )
            values = mine
        else:
            raw = torch.empty(text_bytes, dtype=torch.uint8, device=mine.device)
            values = torch.empty(data_bytes, dtype=torch.uint8, device=mine.device)
        comm.broadcast(raw, rank).wait()
        if data_bytes:
            comm.broadcast(values, rank).wait()
    return json.loads(raw.cpu().numpy().tobytes()), values


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _nothing(device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device)


def dealt_state(
    part: Part, whole: Mapping[str, Any], per_element: Mapping[str, bool]
) -> Iterable[tuple[torch.Tensor, State]]:
    """A parameter's whole state cut to this rank's pieces.

    Args:
        part: What this rank steps of it.
        whole: As the optimizer's class has it.
        per_element: For each entry whether it has a value for each element.

    Returns:
        Each piece and its state, all of it copies.
    """
    at = part.start * part.spec.numel // max(1, part.spec.buffer_numel)
    flat = {
        key: numbers(in_order(value, part.spec), value.dtype)
        for key, value in whole.items()
        if isinstance(value, torch.Tensor)
        and per_element.get(key, value.ndim > 0)
        and value.shape == part.spec.shape
    }
    for piece in part.pieces:
        own: State = {}
        for key, value in whole.items():
            if key in flat:
                own[key] = flat[key][at : at + piece.numel()].clone()
            elif isinstance(value, torch.Tensor):
                own[key] = value.clone()
            else:
                own[key] = copy.deepcopy(value)
        at += piece.numel()
        yield piece, own
