"""The arguments of torch's wrapper: what each one means here, checked once."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed import ProcessGroup

from rankstep.buckets import Caps
from rankstep.collectives import C10dCommunicator
from rankstep.errors import ModelError, ModelTypeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from rankstep.collectives import Communicator

MIB = 1024 * 1024
AUTO = "auto"


def _is_cap(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value > 0
    )


def caps_from(
    bucket_cap_mb: float | str | None, bucket_cap_mb_list: Sequence[float] | None
) -> Caps:
    """Bucket caps from torch's two arguments.

    Args:
        bucket_cap_mb: MiB for every bucket; None takes 1 MiB for the first and 25 MiB for the others; ``"auto"`` finds
            the best by measurement.
        bucket_cap_mb_list: MiB for each bucket in turn, the last one repeating; wins over a number.

    Raises:
        ModelTypeError: A cap is no positive number, or both a list and ``"auto"`` were given.
    """
    values: list[Any]
    if bucket_cap_mb_list is not None and bucket_cap_mb == AUTO:
        raise ModelTypeError(
            f'bucket_cap_mb="auto" chooses the caps, and bucket_cap_mb_list={bucket_cap_mb_list!r} names them: give one '
            "of the two"
        )
    if bucket_cap_mb_list is not None:
        values = list(bucket_cap_mb_list)
    elif bucket_cap_mb == AUTO:
        return Caps(measured=True)
    elif bucket_cap_mb is not None:
        values = [bucket_cap_mb]
    else:
        return Caps()
    if not values or not all(map(_is_cap, values)):
        raise ModelTypeError(
            f"bucket caps are positive numbers of MiB, not {values!r}; leave them out for 1 MiB, then 25 MiB, or pass "
            'bucket_cap_mb="auto" to have them chosen by measurement'
        )
    return Caps(tuple(max(1, int(value * MIB)) for value in values))


def check_arguments(check_reduction: bool, delayed: Any, param_to_hook: Any) -> None:
    """Raise for arguments that contradict each other.

    Raises:
        ModelTypeError: Only one of the two arguments for delayed parameters was given.
    """
    if check_reduction:
        warnings.warn(
            "The check_reduction argument has no meaning and is kept for old code",
            FutureWarning,
            stacklevel=3,
        )
    if (delayed is None) != (param_to_hook is None):
        raise ModelTypeError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
        )


def delayed_names(delayed: Any, named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Names of the parameters to reduce behind all others.

    Raises:
        ModelTypeError: The module has no such parameter.
    """
    known = {name for name, _ in named}
    names = [name for name, _ in delayed or ()]
    for name in names:
        if name not in known:
            raise ModelTypeError(
                f"delay_all_reduce_named_params names {name!r}, but the module has no such parameter; names are those "
                "of module.named_parameters()"
            )
    return names


def sparse_names(module: nn.Module, comm: Communicator) -> frozenset[str]:
    """Names of the parameters whose gradients are sparse, where the backend can reduce sparse tensors.

    Elsewhere such a gradient is made dense on its way into the bucket: the same values, more bytes.
    """
    if comm.name == "nccl":
        return frozenset()
    return frozenset(
        f"{prefix}.weight" if prefix else "weight"
        for prefix, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
    )


def group_from(
    process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None
) -> dist.ProcessGroup:
    """The ranks that share the work.

    Raises:
        ModelError: Both were given, or the mesh has several dimensions.
        ModelTypeError: Neither was given and no group is open.
    """
    if process_group is not None and device_mesh is not None:
        raise ModelError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise ModelError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        return device_mesh.get_group(mesh_dim=0)
    if process_group is not None:
        if not isinstance(process_group, ProcessGroup):
            raise ModelTypeError(
                f"process_group is {process_group!r}: this rank is no member of it. Wrap the module on its members only"
            )
        return process_group
    try:
        return C10dCommunicator().group
    except ValueError as error:
        raise ModelTypeError(
            f"{error} No process group is open: wrap the module inside `with rankstep.world():`, or call "
            "torch.distributed.init_process_group first."
        ) from error


def device_ids_from(
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    device_type: str,
    is_multi_device: bool,
) -> list[int | torch.device] | None:
    """The one GPU of the module, or None.

    Raises:
        ModelTypeError: Several ids, or ids for a module that is not on one GPU.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ModelTypeError("device_ids can only be None or contain a single element.")
    if (device_ids or output_device is not None) and (is_multi_device or device_type == "cpu"):
        raise ModelTypeError(
            "DistributedDataParallel device_ids and output_device arguments only work with single-device/multiple-"
            f"device GPU modules or CPU modules, but got device_ids {device_ids}, output_device {output_device}, and "
            f"a module on {device_type}. Leave them out."
        )
    return list(device_ids) if device_ids else None


def sync_buffers_wanted(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> bool:
    """Whether buffers are copied from rank 0, from the new argument and its old name."""
    if broadcast_buffers is not None:
        message = "broadcast_buffers is deprecated, use forward_sync_buffers"
        if forward_sync_buffers is not None:
            message += "; both were given, broadcast_buffers is not used"
        warnings.warn(message, FutureWarning, stacklevel=3)
    if forward_sync_buffers is not None:
        return forward_sync_buffers
    return broadcast_buffers is not False


def check_parameters(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise for a module that cannot be trained.

    Raises:
        ModelError: No parameter requires grad, or one is lazy or without memory.
        ModelTypeError: Parameters live on several types of device.
    """
    from torch.nn.parameter import UninitializedParameter

    parameters = list(named)
    for name, param in parameters:
        if isinstance(param, UninitializedParameter):
            raise ModelError(
                "Modules with uninitialized parameters can't be used with `DistributedDataParallel`: "
                f"{name!r} has no shape yet. Run a dummy forward pass to correctly initialize the modules"
            )
        if param.is_meta:
            raise ModelError(
                f"parameter {name!r} is on the meta device and has no values to train. Materialise the module first: "
                "module.to_empty(device=...), then initialise its weights"
            )
    if not any(param.requires_grad for _, param in parameters):
        raise ModelError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient. "
            "Use the module itself, or unfreeze a parameter before wrapping it"
        )
    by_type: dict[str, str] = {}
    for name, param in parameters:
        by_type.setdefault(param.device.type, name)
    if len(by_type) > 1:
        where = ", ".join(f"{name!r} is on {kind}" for kind, name in by_type.items())
        raise ModelTypeError(
            "DistributedDataParallel's input module must be on the same type of devices, but "
            f"{where}. Move the whole module to one type of device"
        )
