"""What a wrapper does besides a step: buffers, uneven inputs, changes of the module, the drift alarm."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.modules.batchnorm import _NormBase

from rankstep.buckets.drift import DriftAlarm
from rankstep.collectives import C10dCommunicator
from rankstep.errors import ModelError
from rankstep.parallel import changes, options, replicate, wiring
from rankstep.parallel.buffers import When
from rankstep.parallel.compat import TorchSurface
from rankstep.parallel.join import highest
from rankstep.parallel.optim import OptimizersInBackward

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch
    import torch.distributed as dist

    from rankstep.buckets.plan import Caps
    from rankstep.collectives.wired import WireReport


_OF_THIS_PROCESS = (
    "process_group",
    "reducer",
    "logger",
    "_hooks",
    "_buffer_sync",
    "_mixed",
    "_optimizers",
    "_join_config",
)


class Upkeep(TorchSurface, Joinable):
    """The part of the wrapper that the reducer and ``join`` call; see :class:`rankstep.DistributedDataParallel`."""

    device: torch.device
    parameters_to_ignore: set[str]
    require_forward_param_sync: bool
    require_backward_grad_sync: Any
    broadcast_bucket_size: int
    _caps: Caps
    _delayed: list[str]
    _init_buffers: bool
    _has_hook: bool
    process_group: dist.ProcessGroup
    _authoritative_rank: int
    buffer_source: int
    _optimizers: OptimizersInBackward | None
    wire_dtype: torch.dtype | str | None

    def settled(self, *, gave: bool) -> None:
        """A backward's gradients are in place: step optimizers that belong into backward, sync buffers."""
        if self._optimizers is not None and gave:
            self._optimizers.step()
        if self._syncs_buffers_now():
            self._buffer_sync.settle(self._authoritative_rank)

    def failed(self, error: BaseException) -> None:
        """A step raises: keep the text for the record that torch's callers read."""
        self._note_error(error)

    def agreed_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """The module has changed: compare it over the ranks, copy rank 0's new parameters, return what is trained."""
        comm = self.reducer.comm
        everything = self._everything()
        replicate.compare_models(
            self._compared(),
            self._settings() | {"new since it was wrapped": self._new_names()},
            comm,
            self.device,
            self.reducer.wrapper,
        )
        known = {id(param) for param in self.reducer.params}
        trained: list[tuple[str, torch.Tensor]] = [(n, p) for n, p in everything if p.requires_grad]
        replicate.copy_from([p for _, p in trained if id(p) not in known], comm)
        return trained

    def report_nonfinite(self, enabled: bool = True) -> None:
        """Look for NaN and infinity in each rank's gradients before they are summed; warn once, on every rank.

        The warning names the rank and the parameter, which nobody can tell any more after the sum. It costs one pass
        over the gradients, and on a GPU a wait per bucket. ``RANKSTEP_REPORT_NONFINITE=1`` does the same from outside.

        Args:
            enabled: False stops looking.
        """
        self.reducer.looks_for_nonfinite = enabled
        if self.reducer.line is not None:
            self.reducer.line.looks_for_nonfinite = enabled

    def measure_wire(self) -> AbstractContextManager[WireReport]:
        """Find out what ``wire_dtype`` loses and saves: in the body, every all-reduce runs exactly as well.

        One step inside is enough, on every rank::

            with model.measure_wire() as report:
                loss_of(model(inputs)).backward()
            print(report)

        Returns:
            A context that gives a :class:`rankstep.collectives.wired.WireReport`: the error of the step's gradients
            against the exact sum, bytes, and times. Nothing overlaps backward meanwhile.

        Raises:
            ModelError: On entry: the module was wrapped without ``wire_dtype``.
        """
        return wiring.measuring(self.reducer.comm)

    def has_lost(self, params: Sequence[torch.Tensor]) -> bool:
        """Whether one of these parameters is no longer in the module."""
        present = {id(param) for _, param in self._everything()}
        return any(id(param) not in present for param in params)

    def adopted(self, params: Sequence[torch.Tensor]) -> None:
        """The reducer has other parameters than before: hook them, and watch the submodules that came with them."""
        self._hooks.watch(params, self._frozen())
        self._watch_weights()
        changes.watch(self.module, self)
        changes.take_over(params, self)

    def taken_over(self, newer: Any, params: set[int]) -> None:
        """The module, or a part of it, was wrapped again: the newer wrapper reduces those parameters.

        If it has all of them, this wrapper goes on as another name for the newer one; otherwise it keeps the rest.
        """
        left = [
            (s.name, p)
            for s, p in zip(self.reducer.specs, self.reducer.params, strict=True)
            if id(p) not in params
        ]
        self._hooks.remove()
        if left:
            self.reducer.relearn([name for name, _ in left], [param for _, param in left])
            self._hooks.watch(self.reducer.params, self._frozen())
        else:
            self.reducer, self._hooks = newer.reducer, newer._hooks

    def buffers_changed(self) -> None:
        """A buffer was assigned somewhere inside the module."""
        self._buffer_sync.forget()

    def module_changed(self, new: Any) -> None:
        """A parameter or submodule was assigned somewhere inside the module."""
        self._buffer_sync.forget()
        self.reducer.note_change()
        known = self.reducer.param_ids
        added = list(new.parameters()) if isinstance(new, nn.Module) else [new]
        self._hooks.watch_new(
            p for p in added if isinstance(p, nn.Parameter) and id(p) not in known
        )

    def _everything(self) -> list[tuple[str, nn.Parameter]]:
        return [
            (n, p) for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore
        ]

    def _compared(self) -> list[tuple[str, torch.Tensor]]:
        """What must be equal on all ranks: parameters, and buffers unless they are the ranks' own."""
        named: list[tuple[str, torch.Tensor]] = [*self._everything()]
        return named + (list(self._buffer_sync.named().items()) if self._init_buffers else [])

    def _new_names(self) -> list[str]:
        known = {id(param) for param in self.reducer.params}
        return [name for name, p in self._everything() if p.requires_grad and id(p) not in known]

    def _settings(self) -> dict[str, Any]:
        caps = options.AUTO if self._caps.measured else self._caps.cap_bytes
        return {"caps": caps, "delayed": self._delayed, "wire_dtype": str(self.wire_dtype)}

    def _frozen(self) -> list[nn.Parameter]:
        return [param for _, param in self._everything() if not param.requires_grad]

    def _watch_weights(self) -> None:
        comm = self.reducer.comm
        if (
            comm.world_size == 1
            or self.reducer.hook is not None
            or os.environ.get("RANKSTEP_DRIFT_ALARM") == "0"
        ):
            self.reducer.exchange.alarm = None
            return
        named: list[tuple[str, torch.Tensor]] = [*self._everything()]
        versions: list[int | None] = [None] * len(named)
        if self._init_buffers and not self.forward_sync_buffers:
            # Buffers that are copied from rank 0 each step cannot drift; those that were copied only once may.
            # Norms write their statistics where autograd's version counter does not see it.
            statistics = {
                id(buffer)
                for part in self.module.modules()
                if isinstance(part, _NormBase)
                for buffer in part.buffers(recurse=False)
            }
            buffers = {
                n: b for n, b in self._buffer_sync.named().items() if id(b) not in statistics
            }
            named += buffers.items()
            versions += [buffer._version for buffer in buffers.values()]
        self.reducer.exchange.alarm = DriftAlarm(named, versions)

    def _enter(self, *, counts: bool) -> None:
        if self._optimizers is None:
            self._optimizers = OptimizersInBackward(self.reducer.params)
        try:
            self.reducer.enter_forward(counts=counts)
        except RuntimeError as error:
            self._note_error(error)
            raise

    # ---------------------------------------------------------------- uneven inputs

    def _anyone_syncs(self, *, live: bool) -> bool:
        """Under join: whether the ranks that still have inputs reduce this iteration."""
        return bool(
            highest(int(live and self.require_backward_grad_sync), self.reducer.comm, self.device)
        )

    def _copy_state_from(self, src: int) -> None:
        state: list[torch.Tensor] = [param for _, param in self._everything()]
        state += self._buffer_sync.named().values() if self.forward_sync_buffers else []
        replicate.copy_from(state, self.reducer.comm, src, self.broadcast_bucket_size)

    # ---------------------------------------------------------------- buffers

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward copies rank 0's buffers; not after one without grad or under ``no_sync``."""
        return self.require_forward_param_sync and self._syncs_buffers_now()

    def _syncs_buffers_now(self) -> bool:
        return self.forward_sync_buffers and bool(self._buffer_sync.named())

    def _sync_buffers_before_forward(self, *, live: bool) -> None:
        if not self.will_sync_module_buffers():
            return
        comm = self.reducer.comm
        if self._join_config.enable:
            # Rank 0 may have run out, and its buffers be old.
            self._authoritative_rank = highest(comm.rank if live else -1, comm, self.device)
        else:
            self._authoritative_rank = self.buffer_source
        self._buffer_sync.sync(When.PRE_FORWARD, self._authoritative_rank)

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
        except AttributeError as error:
            raise AttributeError(
                f"neither {type(self).__name__} nor the {type(self.module).__name__} in it has {name!r}"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what lives in this process only; the copy connects itself to the default group again."""
        default = C10dCommunicator().group
        if self.process_group is not default:
            raise ModelError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, when "
                "you have called init_process_group and have not passed process_group argument to DDP constructor"
            )
        state = dict(self.__dict__)
        for name in _OF_THIS_PROCESS:
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        Joinable.__init__(self)
        self.process_group = C10dCommunicator().group
        self.logger = None
        self.__dict__.setdefault("require_forward_param_sync", True)
        # A comm hook stays with the original, as in torch: the copy may have one of its own.
        self._has_hook = False
        self._connect(init_sync=False)
