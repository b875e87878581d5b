"""The wrapper that users see: torch's constructor and behaviour, Rankstep's reducer behind it."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.utils import _to_kwargs
from torch.profiler import record_function

from rankstep.buckets import Reducer
from rankstep.collectives import C10dCommunicator
from rankstep.errors import ModelError, ModelTypeError
from rankstep.parallel import options, replicate
from rankstep.parallel.hooks import GradientHooks, inside_backward

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

_made = itertools.count()


class DistributedDataParallel(nn.Module):
    """Trains one module on many processes as if they were one.

    Every rank builds the same module, wraps it, and runs forward, ``loss.backward()`` and its optimizer on its own
    samples. While backward runs, gradients are gathered in buckets and averaged over the ranks; when it returns, every
    ``.grad`` holds the mean of the ranks' gradients, so the same optimizer step everywhere keeps the replicas equal.

    What needs a flag or fails in torch's wrapper is right here by default: unused parameters, several backwards of one
    forward, reentrant checkpoints, the inner module called directly. Gradients are views of the buckets. An attribute
    that the wrapper does not have is looked up in the module.

    Args:
        module: The same on every rank; rank 0's parameters and buffers are copied to all.
        device_ids: None, or the one GPU that holds the module; inputs are then moved there.
        output_device: Kept as an attribute, as in torch; outputs are not moved.
        dim: Kept as an attribute, as in torch.
        broadcast_buffers: The old name of ``forward_sync_buffers``; False also leaves buffers out at construction.
        init_sync: False skips the comparison and the copy at construction; the ranks' modules must be equal already.
        process_group: The ranks; None takes the default group, as ``rankstep.world()`` opens it.
        bucket_cap_mb: Upper bound of a bucket in MiB; None takes 1 for the first and 25 for the others.
        find_unused_parameters: Accepted; unused parameters are always handled, at no cost.
        check_reduction: Accepted and without meaning, as in torch.
        gradient_as_bucket_view: Accepted; gradients always are views of the buckets.
        static_graph: Accepted; firing counts are always learned.
        delay_all_reduce_named_params: Refused.
        param_to_hook_all_reduce: Refused.
        mixed_precision: Refused; use torch.autocast.
        device_mesh: A 1-D mesh instead of ``process_group``.
        skip_all_reduce_unused_params: Refused.
        bucket_cap_mb_list: MiB for each bucket in turn, the last one repeating.
        batched_grad_copy: Accepted; small gradients are always copied together.
        forward_sync_buffers: False: buffers are not copied from rank 0 before each forward. Default True.

    Raises:
        ModelError: The module or an argument cannot work; says why.
        ModelMismatchError: The ranks hold different modules; names the first difference, on every rank.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,  # noqa: ARG002 - torch's name, without meaning there too
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,  # noqa: ARG002 - what it asks for is the rule here
        forward_sync_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        options.refuse_unsupported(
            delay_all_reduce_named_params=(
                delay_all_reduce_named_params,
                "every gradient is reduced in its bucket",
            ),
            param_to_hook_all_reduce=(
                param_to_hook_all_reduce,
                "every gradient is reduced in its bucket",
            ),
            mixed_precision=(mixed_precision, "use torch.autocast around forward"),
            skip_all_reduce_unused_params=(
                skip_all_reduce_unused_params,
                "ranks need not agree on what is unused",
            ),
        )
        self.process_group = _group(process_group, device_mesh)
        self.parameters_to_ignore: set[str] = set(
            getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        )
        everything = [
            (n, p) for n, p in module.named_parameters() if n not in self.parameters_to_ignore
        ]
        options.check_parameters(everything)
        trained = [(name, param) for name, param in everything if param.requires_grad]
        self.module = module
        self.device = trained[0][1].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({param.device for _, param in everything}) > 1
        self.device_ids = _check_device_ids(
            device_ids, output_device, self.device_type, self.is_multi_device_module
        )
        first_device = self.device_ids[0] if self.device_ids else None
        self.output_device = first_device if output_device is None else output_device
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.forward_sync_buffers = _sync_buffers_wanted(broadcast_buffers, forward_sync_buffers)
        self.require_forward_param_sync = True
        self.broadcast_bucket_size = replicate.CHUNK_BYTES

        comm = C10dCommunicator(self.process_group)
        caps = options.caps_from(bucket_cap_mb, bucket_cap_mb_list)
        self.bucket_bytes_cap = max(caps.cap_bytes)
        wrapper = next(_made)
        if init_sync:
            wrapper = replicate.compare_models(
                everything, {"caps": caps.cap_bytes}, comm, self.device, wrapper
            )
            state: list[torch.Tensor] = [param for _, param in everything]
            if broadcast_buffers is not False:
                state += self._synced_buffers()
            replicate.copy_from(state, comm, chunk_bytes=self.broadcast_bucket_size)
        names, params = zip(*trained, strict=True)
        self.reducer = Reducer(names, params, comm, caps, wrapper)
        self._hooks = GradientHooks(self.reducer, params)
        self._hooks.remove_with(self)

    # ---------------------------------------------------------------- a step

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's inputs; first copy rank 0's buffers where that is wanted."""
        with record_function("DistributedDataParallel.forward"):
            grad_enabled = torch.is_grad_enabled()
            syncs = grad_enabled and self.require_backward_grad_sync
            if not inside_backward():
                self.reducer.enter_forward(counts=syncs and self.training)
            if self.will_sync_module_buffers():
                replicate.copy_from(
                    self._synced_buffers(),
                    self.reducer.comm,
                    chunk_bytes=self.broadcast_bucket_size,
                )
            if self.device_ids:
                device = torch.device(self.device_type, torch.device(self.device_ids[0]).index)
                moved, moved_kwargs = _to_kwargs(
                    inputs, kwargs, device, use_side_stream_for_tensor_copies=False
                )
                inputs, kwargs = moved[0], moved_kwargs[0]
            output = self.module(*inputs, **kwargs)
            self.require_forward_param_sync = syncs
            return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only accumulates this rank's gradients; the first synced one after it reduces their sum.

        What counts is where backward runs. Nests, and restores what was before it also after an exception.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward is reduced; writing it works as :meth:`no_sync` does."""
        return self._hooks.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._hooks.sync = bool(value)

    # ---------------------------------------------------------------- buffers

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward copies rank 0's buffers; not after one without grad or under ``no_sync``."""
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and bool(self._synced_buffers())
        )

    def _synced_buffers(self) -> list[torch.Tensor]:
        # Collected anew each time: modules may put new tensors in their buffers' place.
        return [
            b for name, b in self.module.named_buffers() if name not in self.parameters_to_ignore
        ]

    @property
    def broadcast_buffers(self) -> bool:
        """The old name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    # ---------------------------------------------------------------- as a module

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the wrapper's own form, with ``module.`` before each name, or the plain module's."""
        own = set(self.state_dict())
        wrapped = sum(key in own for key in state_dict)
        plain = sum(f"module.{key}" in own for key in state_dict)
        load = self.module.load_state_dict if plain > wrapped else super().load_state_dict
        return load(state_dict, strict=strict, assign=assign)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or name.startswith("__"):
                raise
        try:
            return getattr(self.module, name)
        except AttributeError:
            raise AttributeError(
                f"neither {type(self).__name__} nor the {type(self.module).__name__} in it has {name!r}"
            ) from None


def _group(
    process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None
) -> dist.ProcessGroup:
    if process_group is not None and device_mesh is not None:
        raise ModelError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise ModelError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        return device_mesh.get_group(mesh_dim=0)
    if process_group is not None:
        return process_group
    try:
        return C10dCommunicator().group
    except ValueError as error:
        raise ModelTypeError(
            f"{error} No process group is open: wrap the module inside `with rankstep.world():`, or call "
            "torch.distributed.init_process_group first."
        ) from error


def _check_device_ids(
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    device_type: str,
    is_multi_device: bool,
) -> list[int | torch.device] | None:
    if device_ids is not None and len(device_ids) > 1:
        raise ModelTypeError("device_ids can only be None or contain a single element.")
    if (device_ids or output_device is not None) and (is_multi_device or device_type == "cpu"):
        raise ModelTypeError(
            "DistributedDataParallel device_ids and output_device arguments only work with single-device/multiple-"
            f"device GPU modules or CPU modules, but got device_ids {device_ids}, output_device {output_device}, and "
            f"a module on {device_type}. Leave them out."
        )
    return list(device_ids) if device_ids else None


def _sync_buffers_wanted(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> bool:
    if broadcast_buffers is not None:
        message = "broadcast_buffers is deprecated, use forward_sync_buffers"
        if forward_sync_buffers is not None:
            message += "; both were given, broadcast_buffers is not used"
        warnings.warn(message, FutureWarning, stacklevel=4)
    if forward_sync_buffers is not None:
        return forward_sync_buffers
    return broadcast_buffers is not False
