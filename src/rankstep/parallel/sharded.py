"""An optimizer that is dealt to the ranks: each keeps and steps its share, and the new values travel behind the next forward.

Read ``sharded_shares`` for the story of a step. ``sharded_bucket`` reduces, ``sharded_stepper`` steps, ``sharded_memory``
and ``sharded_host`` hold the values, ``sharded_params`` makes whoever reads one wait, ``sharded_gradient`` is what
``.grad`` is in between, and ``sharded_state`` puts the state together again. ``docs/design/sharded-step.md`` has the reasons.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from rankstep.buckets import Caps, ParamSpec
from rankstep.buckets.states import ReducerState
from rankstep.collectives.wired import WiredCommunicator
from rankstep.errors import ModelError, ModelTypeError, ShardedGradientError
from rankstep.parallel.ddp import DistributedDataParallel
from rankstep.parallel.mixed import CastingCommunicator
from rankstep.parallel.sharded_compiled import is_compiled, wrapper_is_compiled
from rankstep.parallel.sharded_params import ShardedParameter
from rankstep.parallel.sharded_rules import check_optimizer
from rankstep.parallel.sharded_shares import Shares
from rankstep.parallel.sharded_state import dealt_state, whole_state
from rankstep.parallel.sharded_stepper import Groups, Stepper, made

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

State = dict[str, Any]

_DEALT = {"dealt": True}
"""What ``optimizer.state`` shows of a parameter that has state."""

CAP_BYTES = 1024 * 1024
"""Where gradients and values travel: small buckets, so that the link is never idle."""

HOST_CAP_BYTES = 32 * 1024 * 1024
"""On one host nothing travels, and a bucket more is a meeting more."""


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps a wrapped model with the ranks' work and memory shared out.

    Backward reduces each bucket's gradients to the rank that owns them; :meth:`step` updates this rank's 1/N of all
    elements, with 1/N of the optimizer's state; the new values travel while the next forward already runs. On one host
    parameters lie in memory that its ranks share, and nothing travels. The result is that of the plain optimizer on the
    wrapped model: the same bits on two ranks, and within rounding on more.

    Reading a parameter waits until its new values are here: forward, ``state_dict``, a copy, a parameter in a list of your
    own. Only memory that was taken hold of earlier (``w = p.data`` before ``step``) cannot wait: call :meth:`synchronize`.

    ``.grad`` is dealt to the ranks as well. Clipping works as ever, and so does a ``GradScaler``; anything else that would
    read it raises :class:`rankstep.errors.ShardedGradientError`, unless :meth:`gather_gradients` was called.

    All ranks call its methods at the same points of the program, those that only look excepted.

    Args:
        model: The ``rankstep.DistributedDataParallel``.
        optimizer_class: ``torch.optim.AdamW``, or any other class that treats every element by itself.
        params: Parameters or groups of them, as the class takes them; default: all of the model's.
        elementwise: Your word for a class that is not torch's: that the update of each element depends on that element's
            value, gradient and history alone.
        share_parameters: False: each rank keeps parameters of its own also where the ranks could share memory.
        **options: For ``optimizer_class``: ``lr`` and so on.

    Raises:
        ModelTypeError: An argument is of the wrong kind.
        ModelError: The model or the optimizer cannot be sharded; says why.

    Source: Rajbhandari et al., "ZeRO", SC 2020 (sharded state); Zhang et al., "DeAR", 2023 (gathering in forward).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        params: Iterable[Any] | None = None,
        *,
        elementwise: bool = False,
        share_parameters: bool = True,
        **options: Any,
    ) -> None:
        wrapper = _wrapper_of(model)
        reducer = wrapper.reducer
        self._rank = reducer.comm.rank
        _check_wrapper(wrapper)
        self._per_element = check_optimizer(
            optimizer_class, options, self._rank, vouched=elementwise
        )
        self._kind, self._options = optimizer_class, options
        self._wrapper = wrapper
        chosen = list(wrapper.module.parameters() if params is None else params)
        stand_in = made(optimizer_class, options, [{}], [[torch.zeros(0)]])
        super().__init__(chosen, stand_in.defaults)
        self._complete_groups()
        self._check_parameters(self.param_groups)
        if reducer.sharding is not None:
            reducer.sharding.retire()
        self._shares = Shares(reducer, may_share=share_parameters)
        if reducer.caps == Caps():
            reducer.caps = Caps((HOST_CAP_BYTES if self._shares.on_one_host else CAP_BYTES,))
        self._model = model
        self._modules = tuple(model.modules())
        reducer.sharding = self._shares
        if reducer.line is not None:
            reducer.relearn([spec.name for spec in reducer.specs], reducer.params)
            wrapper.adopted(reducer.params)
        self._stepper: Stepper | None = None
        self._layout = 0
        self._whole: dict[torch.Tensor, State] | None = {}

    # ---------------------------------------------------------------- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's share, and send the new values on their way; collective.

        Args:
            closure: Computes the loss anew, with its gradients, and is called once.

        Raises:
            ShardedGradientError: The gradients are this rank's own: every backward since the last reduction ran under
                ``no_sync``.
            CommunicationError: A rank is gone.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_usable()
        if any(self._wrapper.reducer.firings.accumulated):
            raise ShardedGradientError(
                f"rank {self._rank}: step() in the middle of an accumulation window: since the last reduction backward ran under "
                "no_sync alone, so its gradients are this rank's own. Leave no_sync for the last backward before step()"
            )
        stepper = self._current()
        self._shares.open()
        stepped = stepper.step(self.param_groups)
        # A graph that was kept must not be run again with new values unnoticed.
        torch.autograd.graph.increment_version(stepped)
        for param in stepped:
            self.state.setdefault(param, dict(_DEALT))
        compiled = is_compiled(self._modules) or wrapper_is_compiled()
        self._shares.publish(defers=not compiled)
        return loss

    def synchronize(self) -> None:
        """Return when all parameters hold their new values.

        Needed only before a read that cannot wait by itself: of memory that was taken hold of before :meth:`step`
        (``w = p.data``), or by code in C++ that is given parameters of another module.
        """
        self._shares.synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as every optimizer does."""
        for group in self.param_groups:
            self._shares.drop(group["params"], set_to_none=set_to_none)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients so that the norm of all of them together is at most ``max_norm``; collective.

        The same as ``torch.nn.utils.clip_grad_norm_`` on the whole gradients, for one small all-reduce; the scaling itself
        happens in :meth:`step`, in the same pass.

        Args:
            max_norm: The bound.
            norm_type: Which norm; positive, or infinity.
            error_if_nonfinite: Raise if the norm is NaN or infinite.

        Returns:
            The norm before.

        Raises:
            ModelTypeError: No such norm.
            RuntimeError: ``error_if_nonfinite`` (torch's text).
        """
        order = float(norm_type)
        if not order > 0:
            raise ModelTypeError(
                f"rank {self._rank}: norm_type must be positive, and is {norm_type}"
            )
        return self._shares.clip(self._params(), float(max_norm), order, error_if_nonfinite)

    def gather_gradients(self) -> None:
        """Make every ``.grad`` the whole global gradient, a plain tensor, until the next backward; collective.

        For logging, for clipping of your own, for hooks of libraries. What you change is what :meth:`step` uses; change it
        on all ranks alike.
        """
        self._check_usable()
        self._shares.gather_gradients()

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The whole state, of the form that the plain optimizer's has; collective.

        Every rank gets all of it, and it loads into the plain optimizer, or here on any number of ranks.
        """
        self._check_usable()
        before = self.state
        self.state = _as_state(self._whole_state())
        try:
            return super().state_dict()
        finally:
            self.state = before

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a whole state, from here or from the plain optimizer, of any number of ranks; not collective.

        Raises:
            ValueError: Its groups are not like these (torch's text).
        """
        super().load_state_dict(state_dict)
        self._whole = dict(self.state)
        self.state = _as_state({param: dict(_DEALT) for param in self._whole})
        self._stepper = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, as in every optimizer."""
        super().add_param_group(param_group)
        if hasattr(self, "_stepper"):  # not while torch's constructor adds the first ones
            self._complete_groups()
            self._check_parameters(self.param_groups[-1:])
            self._layout = -1

    def __getstate__(self) -> NoReturn:
        raise ModelError(
            f"rank {self._rank}: a ShardedOptimizer can be neither pickled nor copied, because this rank has its share only. "
            "Save optimizer.state_dict(), on all ranks, and load it into a new one"
        )

    def __repr__(self) -> str:
        text = super().__repr__()
        return text.replace("ShardedOptimizer (", f"ShardedOptimizer of {self._kind.__name__} (", 1)

    # ---------------------------------------------------------------- inside

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _current(self) -> Stepper:
        """The stepper of the present layout, with all state; collective when there is a new one."""
        stepper = self._stepper
        homes = self._shares.homes
        # A parameter that was thawed a moment ago is in no bucket yet.
        new = [p for p in self._params() if id(p) not in homes and p.grad is not None]
        known = stepper is not None and all(id(param) in stepper.parts for param in new)
        if stepper is not None and known and self._layout == self._shares.layout:
            return stepper
        whole = self._whole_state()
        loose = {
            id(param): ParamSpec.of("", param) for param in (*new, *whole) if id(param) not in homes
        }
        self._modules = tuple(self._model.modules())
        stepper = Stepper(self._kind, self._options, self.param_groups, self._shares, loose)
        state: dict[Any, State] = dict(stepper.inner.state)
        for param, entries in whole.items():
            state.update(dealt_state(stepper.parts[id(param)], entries, self._per_element))
        stepper.take_state(state)
        self._stepper, self._layout, self._whole = stepper, self._shares.layout, None
        return stepper

    def _whole_state(self) -> dict[torch.Tensor, State]:
        """By parameter; collective unless it was loaded a moment ago."""
        stepper = self._stepper
        if self._whole is not None or stepper is None:
            return self._whole or {}
        parts = list(stepper.parts.values())
        found = whole_state(parts, stepper.inner.state, self._per_element, self._shares.comm)
        return {parts[number].param: found[number] for number in sorted(found)}

    def _complete_groups(self) -> None:
        """Give every group all options that the class's own would have."""
        stand_in = made(
            self._kind,
            self._options,
            self.param_groups,
            [[torch.zeros(0)] for _ in self.param_groups],
        )
        for group, own in zip(self.param_groups, stand_in.param_groups, strict=True):
            for key, value in own.items():
                group.setdefault(key, value)

    # ---------------------------------------------------------------- what cannot be

    def _check_usable(self) -> None:
        if self._shares.retired:
            raise ModelError(
                f"rank {self._rank}: another ShardedOptimizer was made for this model, and has taken over its gradients. "
                "Use that one"
            )

    def _check_parameters(self, groups: Groups) -> None:
        known = {id(param) for param in self._wrapper.module.parameters()}
        for group in groups:
            for param in group["params"]:
                if id(param) not in known:
                    raise ModelTypeError(
                        f"rank {self._rank}: there is a parameter of shape {tuple(param.shape)} that is none of the "
                        "model's. Give it to an optimizer of its own"
                    )
                if type(param) is not nn.Parameter and not isinstance(param, ShardedParameter):
                    raise ModelTypeError(
                        f"rank {self._rank}: a parameter of shape {tuple(param.shape)} is a {type(param).__name__}; only "
                        "torch.nn.Parameter itself can be sharded"
                    )


def _as_state(by_param: dict[Any, State]) -> Any:
    state: defaultdict[Any, State] = defaultdict(dict)
    state.update(by_param)
    return state


def _wrapper_of(model: Any) -> DistributedDataParallel:
    if not isinstance(model, DistributedDataParallel):
        model = getattr(model, "_orig_mod", model)  # torch.compile's
    if not isinstance(model, DistributedDataParallel):
        raise ModelTypeError(
            f"ShardedOptimizer takes the model as rankstep.DistributedDataParallel wraps it, not a {type(model).__name__}. "
            "Wrap it first"
        )
    return model


def _check_wrapper(wrapper: DistributedDataParallel) -> None:
    reducer = wrapper.reducer
    start = f"rank {reducer.comm.rank}: ShardedOptimizer cannot be used"
    if reducer.state is not ReducerState.IDLE:
        raise ModelError(f"{start} while a backward runs or after one that failed")
    if reducer.hook is not None:
        raise ModelError(
            f"{start} with a communication hook, which reduces every gradient on every rank. Leave the hook out"
        )
    if reducer.auto is not None:
        raise ModelError(
            f'{start} with bucket_cap_mb="auto", which measures all-reduces. Leave it out, or give MiB'
        )
    if reducer._sparse:
        raise ModelError(
            f"{start} with sparse gradients ({', '.join(sorted(reducer._sparse)[:4])}). Make the embedding with sparse=False"
        )
    if isinstance(reducer.comm, CastingCommunicator):
        raise ModelError(f"{start} with mixed_precision's reduce_dtype. Leave reduce_dtype out")
    if isinstance(reducer.comm, WiredCommunicator):
        raise ModelError(f"{start} with wire_dtype, which is for all-reduces. Leave wire_dtype out")
    if any(getattr(param, "_in_backward_optimizers", None) for param in reducer.params):
        raise ModelError(
            f"{start} with optimizers that step inside backward (_apply_optimizer_in_backward). Use one or the other"
        )
    if len({param.device for param in reducer.params}) > 1:
        raise ModelError(f"{start} with parameters on several devices")
