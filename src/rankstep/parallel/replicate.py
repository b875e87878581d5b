"""The same model on every rank: compare first, then copy rank 0's values."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from rankstep.collectives.failures import naming_failure
from rankstep.errors import ModelMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rankstep.collectives import Communicator

CHUNK_BYTES = 250 * 1024 * 1024
"""250 MiB, torch's: bounds the memory that copying a whole model takes."""

Fact = list[Any]
"""Name, shape, dtype, strides, requires_grad and kind of one parameter or buffer, as JSON has it."""


def facts_of(named: Iterable[tuple[str, torch.Tensor]]) -> list[Fact]:
    """What must be equal on all ranks, tensor by tensor."""
    return [
        [
            name,
            list(p.shape),
            str(p.dtype),
            list(p.stride()),
            bool(p.requires_grad),
            "parameter" if isinstance(p, nn.Parameter) else "buffer",
        ]
        for name, p in named
    ]


_FIELDS = ("name", "shape", "dtype", "strides", "requires_grad", "kind")


def first_difference(
    mine: Sequence[Fact], theirs: Sequence[Fact], my_rank: int, their_rank: int
) -> str:
    """Name the first tensor in which two models differ, with both sides; empty if there is none."""
    for index, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a == b:
            continue
        field = next(i for i in range(len(_FIELDS)) if a[i] != b[i])
        what = _FIELDS[field]
        text = (
            f"{a[5]} {index}: {what} is {a[field]!r} on rank {my_rank} ({a[5]} {a[0]!r}) "
            f"and {b[field]!r} on rank {their_rank} ({b[5]} {b[0]!r})"
        )
        if what == "name" and sorted(f[0] for f in mine) == sorted(f[0] for f in theirs):
            text += "; the same names are there in another order"
        if what == "shape":
            text += f". params[{index}] in this process with sizes {a[1]} appears not to match sizes of the same param"
        if what == "strides":
            text += (
                f". params[{index}] in this process appears not to match strides of the same param"
            )
        return text
    if len(mine) != len(theirs):
        longer, rank = (mine, my_rank) if len(mine) > len(theirs) else (theirs, their_rank)
        extra = longer[min(len(mine), len(theirs))]
        return f"only rank {rank} has {extra[5]} {extra[0]!r} with shape {extra[1]}"
    return ""


def compare_models(
    named: Sequence[tuple[str, torch.Tensor]],
    options: Mapping[str, Any],
    comm: Communicator,
    device: torch.device,
    wrapper: int,
) -> int:
    """Raise on every rank if any two ranks would train different models.

    One small all-gather when all is well; the whole descriptions travel only to name a difference.

    Args:
        named: All parameters and synchronised buffers with their names, in registration order.
        options: What else must be equal: the bucket caps.
        comm: The ranks.
        device: Where the communicator takes tensors from.
        wrapper: How many wrappers this process made before this one.

    Returns:
        Rank 0's ``wrapper``: the number of this wrapper on all ranks.

    Raises:
        ModelMismatchError: Names the first difference and shows both sides.
    """
    if comm.world_size == 1:
        return wrapper
    facts = facts_of(named)
    text = json.dumps({"params": facts, "options": dict(options)}).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7])
    head = torch.tensor([digest, len(text), wrapper], dtype=torch.int64, device=device)
    heads = [tuple(each.tolist()) for each in _gather(head, comm)]
    if all(each[:2] == heads[0][:2] for each in heads):
        return int(heads[0][2])
    longest = max(each[1] for each in heads)
    padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8).to(device)
    told = [json.loads(bytes(raw.tolist())) for raw in _gather(padded, comm)]
    mine = told[comm.rank]
    # Every rank compares itself with rank 0; rank 0, and ranks equal to it, show the first that differs.
    other = 0 if mine != told[0] else next(r for r, theirs in enumerate(told) if theirs != mine)
    start = (
        f"DDP expects same model across all ranks, but rank {comm.rank} and rank {other} differ: "
    )
    counts = [sum(fact[5] == "parameter" for fact in told[r]["params"]) for r in (comm.rank, other)]
    if counts[0] != counts[1]:
        start = (
            f"DDP expects same model across all ranks, but Rank {comm.rank} has {counts[0]} params, while "
            f"rank {other} has inconsistent {counts[1]} params. "
        )
    difference = first_difference(mine["params"], told[other]["params"], comm.rank, other) or (
        "; ".join(
            f"{name} is {value!r} on rank {comm.rank} and {told[other]['options'].get(name)!r} on rank {other}"
            for name, value in mine["options"].items()
            if value != told[other]["options"].get(name)
        )
    )
    raise ModelMismatchError(
        f"[{comm.rank}]: {start}{difference}. Build the same model, in the same order, on every rank before wrapping it."
    )


def _gather(tensor: torch.Tensor, comm: Communicator) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(comm.world_size)]
    with naming_failure(comm, "compare", "comparing the ranks' models"):
        comm.all_gather(parts, tensor).wait()
    return parts


def copy_from(
    tensors: Iterable[torch.Tensor],
    comm: Communicator,
    src: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Overwrite every rank's tensors with those of group rank ``src``, a few large messages at a time.

    In place, whatever the dtype; autograd does not notice, so that a buffer may change between a forward and its
    backward without "modified by an inplace operation".

    Args:
        tensors: The same list on every rank.
        comm: The ranks.
        src: Whose values count.
        chunk_bytes: Upper bound of one message.
    """
    if comm.world_size == 1:
        return
    with naming_failure(comm, "copy", f"copying parameters or buffers from rank {src}"):
        _copy_all(tensors, comm, src, chunk_bytes)


def _copy_all(
    tensors: Iterable[torch.Tensor], comm: Communicator, src: int, chunk_bytes: int
) -> None:
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for group in groups.values():
        chunk: list[torch.Tensor] = []
        size = 0
        for tensor in group:
            chunk.append(tensor)
            size += tensor.numel() * tensor.element_size()
            if size >= chunk_bytes:
                _copy_chunk(chunk, comm, src)
                chunk, size = [], 0
        if chunk:
            _copy_chunk(chunk, comm, src)


def _copy_chunk(chunk: list[torch.Tensor], comm: Communicator, src: int) -> None:
    flat = torch.cat([t.reshape(-1) for t in chunk])
    # As bytes, every dtype travels alike (gloo lacks bool and some small floats).
    comm.broadcast(flat.view(torch.uint8), src).wait()
    if comm.rank == src:
        return
    start = 0
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(chunk)):
        for tensor in chunk:
            end = start + tensor.numel()
            tensor.copy_(flat[start:end].view(tensor.shape))
            start = end
