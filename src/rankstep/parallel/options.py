"""The arguments of torch's wrapper: what each one means here, checked once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankstep.buckets import Caps
from rankstep.errors import ModelError, ModelTypeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

MIB = 1024 * 1024


def caps_from(bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None) -> Caps:
    """Bucket caps from torch's two arguments.

    Args:
        bucket_cap_mb: MiB for every bucket; None takes 1 MiB for the first and 25 MiB for the others.
        bucket_cap_mb_list: MiB for each bucket in turn, the last one repeating; wins over ``bucket_cap_mb``.

    Raises:
        ModelTypeError: A cap is no positive number.
    """
    values: list[Any]
    if bucket_cap_mb_list is not None:
        values = list(bucket_cap_mb_list)
    elif bucket_cap_mb is not None:
        values = [bucket_cap_mb]
    else:
        return Caps()
    if not values or any(not isinstance(v, int | float) or not v > 0 for v in values):
        raise ModelTypeError(
            f"bucket caps are positive numbers of MiB, not {values!r}; leave them out for 1 MiB, then 25 MiB"
        )
    return Caps(tuple(max(1, int(value * MIB)) for value in values))


def refuse_unsupported(**arguments: Any) -> None:
    """Raise for arguments of torch's wrapper that cannot be honoured; nothing is accepted and ignored.

    Raises:
        ModelError: One of them was given.
    """
    for name, (value, reason) in arguments.items():
        if value:
            raise ModelError(
                f"{name} is not supported by rankstep.DistributedDataParallel: {reason}"
            )


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
