"""What each rank has for itself: packed into bytes for the way to rank 0, and found again by rank."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch

from rankstep.checkpoint.files import parse_json, require_safetensors
from rankstep.checkpoint.tree import Tensors, decode, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

_HEAD_BYTES = 8


def pack(state: dict[str, Any]) -> bytes:
    """Return a state dict as bytes: a length, JSON, and the safetensors format.

    Raises:
        CheckpointError: Something in it cannot be saved.
    """
    tensors = Tensors()
    tree = json.dumps(encode(state, "this rank's own state", tensors)).encode()
    plain = {name: tensor.cpu().contiguous() for name, tensor in tensors.named.items()}
    data: bytes = require_safetensors().save(plain)
    return len(tree).to_bytes(_HEAD_BYTES, "little") + tree + data


def merge(packed: Sequence[bytes]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Return all ranks' trees, and their tensors under names that begin with the rank."""
    trees: list[Any] = []
    tensors: dict[str, torch.Tensor] = {}
    for rank, data in enumerate(packed):
        end = _HEAD_BYTES + int.from_bytes(data[:_HEAD_BYTES], "little")
        trees.append(parse_json(data[_HEAD_BYTES:end], f"the state of rank {rank}"))
        named = require_safetensors().load(data[end:])
        tensors |= {f"{rank}/{name}": tensor for name, tensor in named.items()}
    return trees, tensors


def unpack(trees: Sequence[Any], data: bytes, rank: int) -> dict[str, Any]:
    """Return the state dict of one rank.

    Args:
        trees: All ranks', as :func:`merge` gave them.
        data: Its tensors, in the safetensors format.
        rank: Whose.

    Raises:
        CheckpointError: It is malformed.
    """
    prefix = f"{rank}/"
    tensors = {
        name.removeprefix(prefix): tensor
        for name, tensor in require_safetensors().load(data).items()
        if name.startswith(prefix)
    }
    state: dict[str, Any] = decode(trees[rank], tensors)
    return state


def digest(tensors: dict[str, torch.Tensor]) -> bytes:
    """A checksum over tensors, equal where they are."""
    total = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        total.update(name.encode())
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        total.update(plain.view(torch.uint8).numpy().data)
    return total.digest()
