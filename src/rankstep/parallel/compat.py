"""What libraries and torch's own tests reach for behind torch's wrapper: names under an underscore, with their meaning.

Nothing of Rankstep calls these. They exist because an ``isinstance`` check against torch's class promises them.
"""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from rankstep.buckets import Reducer
from rankstep.buckets.promise import StaticPromise
from rankstep.collectives.wired import exact_of
from rankstep.errors import ModelError
from rankstep.parallel import registration
from rankstep.parallel.buffers import BufferHook, When

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch.distributed as dist

    from rankstep.buckets.comm_hooks import CommHook
    from rankstep.parallel.buffers import Buffers
    from rankstep.parallel.hooks import GradientHooks


class TorchReducer(Reducer):
    """The reducer with the names that callers of torch's reducer use."""

    def _rebuild_buckets(self) -> bool:
        """Nothing to do: the plan is made at the end of the first synced backward."""
        return False

    def prepare_for_forward(self) -> None:
        """Nothing to do: reductions belong to a backward."""

    def prepare_for_backward(self, _outputs: list[torch.Tensor]) -> None:
        """Nothing to do: hooks are always armed."""

    def _delay_all_reduce(self) -> None:
        """Nothing to do: the first backward is reduced at its end in any case."""

    def _get_local_used_map(self) -> torch.Tensor:
        """For each parameter, on how many ranks it was used."""
        used = [0] * len(self.params) if self.line is None else self.line.trailer.read_used()
        return torch.tensor(used, dtype=torch.int32, device=self.specs[0].device)

    def _ddp_graph_static(self) -> bool:
        """Whether every backward so far used the same parameters."""
        return self.firings.always_same

    def _run_allreduce_hook(self, bucket: Any) -> Any:
        """The mean over the ranks of a bucket's buffer, as a future."""
        return self._run_comm_hook(bucket)

    def _run_comm_hook(self, bucket: Any) -> Any:
        """The mean over the ranks of a bucket's buffer, as a future."""
        tensor = bucket.buffer()
        if not self.comm.averages:
            tensor.div_(self.comm.world_size)
        work: Any = exact_of(self.comm).all_reduce(tensor)
        return work.get_future().then(lambda future: future.value()[0])


class TorchSurface(nn.Module):
    """The half-private methods and attributes of torch's wrapper."""

    reducer: TorchReducer
    module: nn.Module
    static_graph: bool
    find_unused_parameters: bool
    forward_sync_buffers: bool
    dim: int
    device_type: str
    _hooks: GradientHooks
    _buffer_sync: Buffers
    _log: dict[str, Any]
    process_group: dist.ProcessGroup

    # ---------------------------------------------------------------- before wrapping

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, names: Iterable[str]
    ) -> None:
        """Leave these parameters and buffers of ``module`` alone; called before wrapping."""
        names = list(names)
        module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
            if name in names:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """The parameters that a wrapper around ``module`` handles."""
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", [])
        for name, param in module.named_parameters():
            if name not in ignored:
                yield (name, param) if named_params else param

    # ---------------------------------------------------------------- before training

    def _set_static_graph(self) -> None:
        """Promise that every backward uses the same parameters."""
        if self.static_graph:
            warnings.warn(
                "You've set static_graph to be True, no need to set it again.", stacklevel=2
            )
            return
        if self.reducer.reductions or self.reducer.forwards:
            self._raise(
                RuntimeError(
                    "set_static_graph() should be called before training loop starts and after "
                    "DistributedDataParallel is constructed."
                )
            )
        self.static_graph = True
        self.reducer.promise = StaticPromise(self.reducer.comm.rank)

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, torch.Tensor]], Any],
        comm_hook_location: Any = None,
    ) -> None:
        """Let ``hook(state, {name: buffer})`` replace the copy of rank 0's buffers."""
        if not callable(hook):
            raise TypeError(f"a buffer hook must be callable, not {hook!r}")
        before = getattr(comm_hook_location, "name", "POST_FORWARD") == "PRE_FORWARD"
        self._buffer_sync.hook = BufferHook(
            state, hook, When.PRE_FORWARD if before else When.POST_FORWARD
        )

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Use one of torch's builtin hooks."""
        self._use_hook(registration.builtin_hook(comm_hook_type, self.process_group))
        self._log["comm_hook"] = str(comm_hook_type)

    def _use_hook(self, hook: CommHook | None) -> None:
        raise NotImplementedError

    def _register_fused_optim(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refused: it needs the internals of torch's own reducer."""
        raise ModelError(
            "_register_fused_optim needs the internals of torch's reducer. Use "
            "torch.distributed.optim._apply_optimizer_in_backward, which works with this wrapper"
        )

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Accepted: outputs are never passed through anything here."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Accepted if valid: the record is always up to date here."""
        if sample_rate < 1:
            self._raise(
                ValueError("DDP runtime logging sampling rate should be equal or greater than 1")
            )

    # ---------------------------------------------------------------- while training

    def _remove_autograd_hooks(self) -> None:
        self._hooks.remove()

    def _check_reducer_finalized(self) -> None:
        """Raise if the last backward did not end well."""
        self.reducer.enter_forward(counts=False)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """The record, as torch keeps it, of the wrapper as one flat dict."""
        reducer = self.reducer
        facts = reducer.last_step
        plan = reducer.plan
        comm = reducer.comm
        sizes = "" if plan is None else ", ".join(str(b.nbytes) for b in plan.buckets)
        dtypes = dict.fromkeys(str(s.dtype).removeprefix("torch.") for s in reducer.specs)
        names = {
            "float32": "float",
            "float64": "double",
            "float16": "c10::Half",
            "bfloat16": "c10::BFloat16",
        }
        return {
            "world_size": comm.world_size,
            "rank": comm.rank,
            "iteration": reducer.reductions,
            "module_name": type(self.module).__name__,
            "backend_name": comm.name,
            "device_ids": ", ".join(str(d) for d in getattr(self, "device_ids", None) or ()),
            "output_device": str(getattr(self, "output_device", None)),
            "dtypes": ", ".join(names.get(d, d) for d in dtypes),
            "num_parameter_tensors": len(reducer.params),
            "total_parameter_size_bytes": sum(s.nbytes for s in reducer.specs),
            "bucket_cap_bytes": max(reducer.caps.cap_bytes),
            "bucket_sizes": sizes,
            "rebuilt_bucket_sizes": sizes,
            "has_rebuilt_buckets": int(plan is not None and not self.find_unused_parameters),
            "num_buckets_reduced": facts.all_reduces if facts is not None else 0,
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(bool(getattr(self, "gradient_as_bucket_view", False))),
            "static_graph": int(self.static_graph),
            "can_set_static_graph": reducer.firings.always_same,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "unused_parameter_size": sum(
                s.nbytes for s in reducer.specs if facts is not None and s.name in facts.unused
            ),
            "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in self.module.modules())),
            "has_error": int("error" in self._log),
            **self._log,
        }

    def _raise(self, error: Exception) -> NoReturn:
        """Raise, and remember the text for the record."""
        self._note_error(error)
        raise error

    def _note_error(self, error: BaseException) -> None:
        self._log["error"] = str(error)

    # ---------------------------------------------------------------- torch's helpers

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """Split inputs along ``dim`` over devices, as torch does."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: Any) -> Any:
        """Move inputs to a device, as torch does."""
        return _to_kwargs(
            inputs,
            kwargs,
            torch.device(self.device_type, device_id),
            use_side_stream_for_tensor_copies=False,
        )

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Collect outputs on a device along ``dim``, as torch does."""
        return gather(outputs, output_device, dim=self.dim)

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        """The synchronised buffers."""
        return list(self._buffer_sync.named().values())

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        """The synchronised buffers by name."""
        return self._buffer_sync.named()

    def _default_broadcast_coalesced(
        self,
        bufs: list[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Copy buffers from one rank to all."""
        from rankstep.parallel import replicate

        replicate.copy_from(
            self.modules_buffers if bufs is None else bufs,
            self.reducer.comm,
            authoritative_rank,
            bucket_size or replicate.CHUNK_BYTES,
        )
