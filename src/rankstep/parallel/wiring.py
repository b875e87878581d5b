"""The option that gradients travel in fewer bytes than they are kept in."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from rankstep.collectives import C10dCommunicator
from rankstep.collectives.wire import DTYPES, PACKED, WireType
from rankstep.collectives.wired import WiredCommunicator, WireReport
from rankstep.errors import ModelError, ModelTypeError
from rankstep.parallel.mixed import CastingCommunicator

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from rankstep.collectives import Communicator

_ADVICE = (
    "On GPUs, register torch's hook instead: model.register_comm_hook(None, "
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook)"
)


def checked(wire_dtype: Any, mixed_precision: Any) -> WireType | None:
    """The dtype in which gradients travel; "packed": without loss; None: as they are.

    Raises:
        ModelTypeError: It is none that can travel, or mixed precision names one as well.
    """
    if wire_dtype is not None and wire_dtype not in (*DTYPES, PACKED):
        names = " or ".join(map(str, DTYPES))
        raise ModelTypeError(
            f'wire_dtype={wire_dtype!r}: gradients travel as {names}, or without loss as "{PACKED}"; leave it out to send '
            "them as they are"
        )
    reduce_dtype = getattr(mixed_precision, "reduce_dtype", None)
    if wire_dtype is not None and reduce_dtype is not None:
        raise ModelTypeError(
            f"wire_dtype={wire_dtype} and mixed_precision with reduce_dtype={reduce_dtype} both say how gradients travel. "
            "Give wire_dtype to sum them in float32, or reduce_dtype to sum them in that type, too"
        )
    return wire_dtype  # type: ignore[no-any-return]


def for_gradients(
    comm: Communicator,
    wire_dtype: WireType | None,
    mixed_precision: Any,
    device: torch.device,
    *,
    together: bool,
) -> Communicator:
    """What reduces the buckets, given what does everything else.

    Args:
        comm: Does everything else.
        wire_dtype: Of gradients on their way, or "packed"; None: their own.
        mixed_precision: torch's ``_MixedPrecision``, or None.
        device: Of the gradients.
        together: All ranks are here and may open connections now; otherwise the first reduction does it.

    Raises:
        ModelError: The gradients do not travel by gloo.
    """
    reduce_dtype = getattr(mixed_precision, "reduce_dtype", None)
    if reduce_dtype is not None:
        return CastingCommunicator(comm, reduce_dtype)
    if wire_dtype is None:
        return comm
    if not isinstance(comm, C10dCommunicator) or not comm.can_go_direct(device):
        raise ModelError(
            f"rank {comm.rank}: wire_dtype={wire_dtype} converts gradients on the CPU, on their way through gloo, and this "
            f"module is on {device} with a process group of {comm.name}. {_ADVICE}"
        )
    wired = WiredCommunicator(comm, wire_dtype)
    if together:
        wired.connect()
    return wired


@contextlib.contextmanager
def measuring(comm: Communicator) -> Iterator[WireReport]:
    """See :meth:`rankstep.DistributedDataParallel.measure_wire`."""
    if not isinstance(comm, WiredCommunicator):
        raise ModelError(
            f"rank {comm.rank}: gradients travel as they are, so nothing is lost. Wrap the module with "
            'wire_dtype=torch.bfloat16 or torch.float16, or "packed", to measure what that costs and saves'
        )
    with comm.measuring() as report:
        yield report
