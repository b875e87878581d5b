"""The wrapper that users see: torch's constructor and behaviour, Rankstep's reducer behind it."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import weakref
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.utils import _to_kwargs
from torch.profiler import record_function

from rankstep.buckets.promise import StaticPromise
from rankstep.buckets.trailer import Mode
from rankstep.buckets.window import checked_count
from rankstep.collectives import communicator_for
from rankstep.errors import CountError, ModelError
from rankstep.parallel import changes, observers, options, registration, replicate, wiring
from rankstep.parallel.buffers import Buffers, When
from rankstep.parallel.compat import TorchReducer
from rankstep.parallel.hooks import GradientHooks, inside_backward
from rankstep.parallel.join import ShadowHook
from rankstep.parallel.mixed import MixedPrecision
from rankstep.parallel.upkeep import Upkeep
from rankstep.trace.events import ForwardBegan, ForwardEnded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from rankstep.buckets.comm_hooks import CommHook
    from rankstep.collectives import Communicator
    from rankstep.parallel.optim import OptimizersInBackward

_made = itertools.count(1)

# Kept, since libraries put other classes, ours among them, in the place of torch's name.
_known_to_compiler = torch.nn.parallel.DistributedDataParallel


class DistributedDataParallel(Upkeep):
    """Trains one module on many processes as if they were one.

    Every rank builds the same module, wraps it, and runs forward, ``loss.backward()`` and its optimizer on its own
    samples. While backward runs, gradients are gathered in buckets and averaged over the ranks; when it returns, every
    ``.grad`` holds the mean of the ranks' gradients, so the same optimizer step everywhere keeps the replicas equal.

    What needs a flag or fails in torch's wrapper is right here by default: unused parameters, several backwards of one
    forward, reentrant checkpoints, the inner module called directly, parameters that are thawed, replaced or added.
    Gradients are views of the buckets. An attribute that the wrapper does not have is looked up in the module.

    A rolling checksum tells when the ranks' weights drift apart; ``RANKSTEP_DRIFT_ALARM=0`` turns it off.

    Args:
        module: The same on every rank; rank 0's parameters and buffers are copied to all.
        device_ids: None, or the one GPU that holds the module; inputs are then moved there.
        output_device: Kept as an attribute, as in torch; outputs are not moved.
        dim: Kept as an attribute, as in torch.
        broadcast_buffers: The old name of ``forward_sync_buffers``; False also leaves buffers out at construction.
        init_sync: False skips the comparison and the copy at construction; the ranks' modules must be equal already.
        process_group: The ranks; None takes the default group, as ``rankstep.world()`` opens it.
        bucket_cap_mb: Upper bound of a bucket in MiB; None takes 1 for the first and 25 for the others; ``"auto"`` the
            buckets that measurements in the first steps find best.
        find_unused_parameters: Accepted; unused parameters are always handled, at no cost.
        check_reduction: Accepted and without meaning, as in torch.
        gradient_as_bucket_view: Accepted; gradients always are views of the buckets.
        static_graph: A promise that every backward uses the same parameters; it is checked.
        delay_all_reduce_named_params: (name, parameter) pairs to reduce behind all others; needs
            ``param_to_hook_all_reduce``.
        param_to_hook_all_reduce: In torch the parameter whose gradient sets them off; here they leave, at the latest,
            when backward ends.
        mixed_precision: torch's ``_MixedPrecision``: dtypes for forward and backward, for buckets, and for buffers.
        device_mesh: A 1-D mesh instead of ``process_group``.
        skip_all_reduce_unused_params: Buckets that this rank did not use at all are not reduced; the ranks must then
            agree on what is unused.
        bucket_cap_mb_list: MiB for each bucket in turn, the last one repeating.
        batched_grad_copy: Accepted; small gradients are always copied together.
        forward_sync_buffers: False: buffers are not copied from rank 0. Default True.
        wire_dtype: ``torch.bfloat16`` or ``torch.float16``: CPU gradients travel between hosts as such and are summed in
            float32. ``"packed"``: they travel without loss in a seventh fewer bytes.

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
        bucket_cap_mb: float | Literal["auto"] | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,  # noqa: ARG002 - what it asks for is the rule here
        forward_sync_buffers: bool | None = None,
        wire_dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        self._log: dict[str, Any] = {}
        options.check_arguments(
            check_reduction, delay_all_reduce_named_params, param_to_hook_all_reduce
        )
        self.process_group = options.group_from(process_group, device_mesh)
        self.device_mesh = device_mesh
        self.parameters_to_ignore: set[str] = set(
            getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        )
        self.module = module
        everything = self._everything()
        options.check_parameters(everything)
        trained = [(name, param) for name, param in everything if param.requires_grad]
        self.device = trained[0][1].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({param.device for _, param in everything}) > 1
        self.device_ids = options.device_ids_from(
            device_ids, output_device, self.device_type, self.is_multi_device_module
        )
        self.output_device = output_device
        if output_device is None and self.device_ids:
            self.output_device = self.device_ids[0]
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.mixed_precision = mixed_precision
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.wire_dtype = wiring.checked(wire_dtype, mixed_precision)
        self.forward_sync_buffers = options.sync_buffers_wanted(
            broadcast_buffers, forward_sync_buffers
        )
        self.require_forward_param_sync = True
        self.broadcast_bucket_size = replicate.CHUNK_BYTES
        self.logger = None
        self._caps = options.caps_from(bucket_cap_mb, bucket_cap_mb_list)
        self.bucket_bytes_cap = max(self._caps.cap_bytes)
        self.bucket_bytes_cap_list = (
            list(self._caps.cap_bytes) if bucket_cap_mb_list is not None else []
        )
        self._has_hook = False
        self._delayed = options.delayed_names(delay_all_reduce_named_params, everything)
        self._init_buffers = broadcast_buffers is not False
        self._connect(init_sync=init_sync)

    def _connect(self, *, init_sync: bool) -> None:
        """Everything that lives only in this process: communicator, reducer, hooks."""
        comm: Communicator = communicator_for(self.process_group, self.device)
        everything = self._everything()
        trained = [(name, param) for name, param in everything if param.requires_grad]
        # Copies may be made on one rank only, and are not compared: they all have the number 0.
        wrapper = next(_made) if init_sync else 0
        self._buffer_sync = Buffers(
            self.module, self.parameters_to_ignore, comm, self.broadcast_bucket_size
        )
        if init_sync:
            wrapper = replicate.compare_models(
                self._compared(), self._settings(), comm, self.device, wrapper
            )
            state: list[torch.Tensor] = [param for _, param in everything]
            state += self._buffer_sync.named().values() if self._init_buffers else []
            replicate.copy_from(state, comm, chunk_bytes=self.broadcast_bucket_size)
        self._mixed: MixedPrecision | None = None
        if self.mixed_precision is not None:
            self._mixed = MixedPrecision(
                self.module, self.mixed_precision, self.parameters_to_ignore
            )
        kinds = (self.wire_dtype, self.mixed_precision)
        comm = wiring.for_gradients(comm, *kinds, self.device, together=init_sync)
        names, params = zip(*trained, strict=True)
        self.reducer = TorchReducer(
            names, params, comm, self._caps, wrapper, options.sparse_names(self.module, comm)
        )
        self.reducer.delayed = frozenset(self._delayed)
        self.reducer.owner = weakref.ref(self)
        self.reducer.skips_unused = self.skip_all_reduce_unused_params
        self.reducer.shows_joined = self.gradient_as_bucket_view
        self.reducer.promise = StaticPromise(comm.rank) if self.static_graph else None
        self.reducer.looks_for_nonfinite = os.environ.get("RANKSTEP_REPORT_NONFINITE") == "1"
        if self.find_unused_parameters:
            self.reducer.looking_for_unused = lambda: record_function("search_unused_parameters")
        self._hooks = GradientHooks(self.reducer, params, self._frozen())
        self._hooks.remove_with(self)
        self._authoritative_rank = self.buffer_source = 0
        self._optimizers: OptimizersInBackward | None = None
        self._watch_weights()
        changes.watch(self.module, self)
        changes.take_over(params, self)
        for tell in observers.on_wrap:
            tell(self)

    # ---------------------------------------------------------------- a step

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's inputs; first copy rank 0's buffers where that is wanted."""
        with record_function("DistributedDataParallel.forward"):
            recorder = self.reducer.recorder
            if recorder is not None:
                recorder(ForwardBegan(self.reducer.reductions, time.perf_counter_ns()))
            syncs = torch.is_grad_enabled() and self.require_backward_grad_sync
            outside = not inside_backward()
            if outside:
                self._enter(counts=False)
            # Raises under join(throw_on_early_termination=True): such a forward is none, and is not counted.
            work = Join.notify_join_context(self)
            if work is not None:
                work.wait()
            if outside and torch.is_grad_enabled() and self.training:
                self._enter(counts=True)
            self._sync_buffers_before_forward(live=True)
            if self._join_config.enable:
                self._anyone_syncs(live=True)
            if self.device_ids:
                device = torch.device(self.device_type, torch.device(self.device_ids[0]).index)
                moved, moved_kwargs = _to_kwargs(
                    inputs, kwargs, device, use_side_stream_for_tensor_copies=False
                )
                inputs, kwargs = moved[0], moved_kwargs[0]
            with self._active():
                if self._mixed is not None:
                    output = self._mixed.forward(inputs, kwargs)
                else:
                    output = self.module(*inputs, **kwargs)
            if self._syncs_buffers_now():
                self._buffer_sync.sync(When.POST_FORWARD, self._authoritative_rank)
            self.require_forward_param_sync = syncs
            if recorder is not None:
                recorder(ForwardEnded(self.reducer.reductions, time.perf_counter_ns()))
            return output

    def backward(
        self, loss_sum: torch.Tensor | None, *, count: float, retain_graph: bool | None = None
    ) -> None:
        """Leave the gradient of (sum of all losses) / (sum of all counts) in every ``.grad``.

        The sums go over all ranks and all micro-batches since the last synced backward: exact for any local batch size,
        any number of micro-batches under ``no_sync``, and ranks that have nothing. The counts ride with the last
        bucket, so this costs no further collective. Use it for every micro-batch of a step, or for none.

        Args:
            loss_sum: The sum, not the mean, of this micro-batch's losses; may be scaled by a GradScaler. None, or a
                tensor without a graph: this rank has nothing to add.
            count: How many samples or tokens it sums over; 0 or more.
            retain_graph: As in ``torch.Tensor.backward``.

        Raises:
            CountError: The count is no number, negative, NaN or infinite (the other ranks are told), or all ranks' counts
                are 0.
            RankSkewError: Another rank called plain ``loss.backward()`` in this step.
        """
        reducer = self.reducer
        try:
            reducer.weigh(checked_count(count, reducer.comm.rank))
        except CountError as error:
            self._note_error(error)
            if self.require_backward_grad_sync:
                reducer.abandon()
            raise
        except ModelError as error:
            self._note_error(error)
            reducer.abandon(Mode.MIXED)
            raise
        before = reducer.reductions
        reducer.weighing = True
        try:
            if loss_sum is not None and loss_sum.requires_grad:
                loss_sum.backward(retain_graph=retain_graph)
            if self.require_backward_grad_sync and reducer.reductions == before:
                reducer.settle_nothing()
        finally:
            reducer.weighing = False

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

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Let ``hook(state, bucket)`` reduce each bucket; torch's own hooks run unchanged.

        Args:
            state: Passed on to the hook.
            hook: Gets an object with the methods of ``torch.distributed.GradBucket``, whose gradients nobody has divided;
                returns a future of the reduced tensor.

        Raises:
            TypeError: It cannot be called, or its backend is missing.
            ValueError: Its annotations name other types.
            RuntimeError: There is a hook already.

        Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
        """
        try:
            self._use_hook(registration.checked_hook(state, hook, self.reducer.comm))
        except Exception as error:
            self._note_error(error)
            raise
        self._log["comm_hook"] = getattr(hook, "__qualname__", type(hook).__name__)

    def _use_hook(self, hook: CommHook | None) -> None:
        if self._has_hook:
            raise ModelError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        if hook is not None:
            self.reducer.use_hook(hook)
            # Hooks may well leave the ranks different for a while (post-local SGD).
            self.reducer.exchange.alarm = None
        self._has_hook = True

    # ---------------------------------------------------------------- uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Let ranks run out of inputs at different times; those that have go on to shadow the others.

        Args:
            divide_by_initial_world_size: True: a rank that has run out counts as a zero gradient. False: the mean goes
                over the ranks that still have inputs.
            enable: False turns the context off.
            throw_on_early_termination: Raise on all ranks as soon as one has run out.

        Source: https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What ``Join`` calls once this rank has run out."""
        self.reducer.exchange.divides_by_live = not kwargs.get("divide_by_initial_world_size", True)
        self._log["join_uneven_inputs"] = True
        return ShadowHook(self)

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` puts its own small tensors."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group that ``Join`` talks to."""
        return self.process_group

    # ---------------------------------------------------------------- inside

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        """Let torch.compile split the module's graph at bucket boundaries, so that buckets leave before backward ends."""
        before = _known_to_compiler._active_ddp_module
        _known_to_compiler._active_ddp_module = self  # type: ignore[assignment]
        try:
            yield
        finally:
            _known_to_compiler._active_ddp_module = before
