"""Checks of what a user registers as communication: clear errors now instead of strange ones inside backward."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket

from rankstep.buckets.comm_hooks import CommHook
from rankstep.errors import ModelError

if TYPE_CHECKING:
    from rankstep.collectives import Communicator

_BF16_HOOKS = ("bf16_compress_hook", "bf16_compress_wrapper_hook")


def checked_hook(state: Any, hook: Any, comm: Communicator) -> CommHook:
    """A communication hook that has the form torch asks for.

    Args:
        state: Passed to the hook as its first argument.
        hook: ``hook(state, bucket) -> Future[Tensor]``.
        comm: Its backend may not be able to do what the hook needs.

    Raises:
        TypeError: It cannot be called, or needs a backend that this group does not have.
        ValueError: An annotation names another type (torch's texts).
        KeyError: Its second parameter is not called ``bucket``.
    """
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    signature = inspect.signature(hook)
    bucket = signature.parameters["bucket"].annotation
    if bucket not in (inspect.Parameter.empty, GradBucket, "dist.GradBucket", "GradBucket"):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    returned = signature.return_annotation
    allowed = (inspect.Signature.empty, torch.futures.Future[torch.Tensor], torch.futures.Future)
    if returned not in allowed and not isinstance(returned, str):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor] or "
            "torch._C.Future."
        )
    if getattr(hook, "__name__", "") in _BF16_HOOKS and comm.name != "nccl":
        raise TypeError(
            "BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+, or XPU and XCCL."
        )
    return CommHook(state, hook)


def builtin_hook(kind: Any, group: dist.ProcessGroup) -> CommHook | None:
    """The Python form of one of torch's builtin hooks; None for the all-reduce that happens without a hook.

    Args:
        kind: A ``dist.BuiltinCommHookType``.
        group: The ranks.

    Raises:
        ModelError: Unknown kind.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if kind == BuiltinCommHookType.ALLREDUCE:
        return None
    if kind == BuiltinCommHookType.FP16_COMPRESS:
        return CommHook(group, default_hooks.fp16_compress_hook)
    raise ModelError(f"unknown builtin communication hook {kind!r}")
