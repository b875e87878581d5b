"""What a checkpoint is made of: the user's model, optimizers and so on, to state dicts and back."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rankstep.checkpoint.names import load_named_state, named_parameters, named_state
from rankstep.checkpoint.tree import Tensors, decode, encode
from rankstep.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from rankstep.checkpoint.files import TensorFacts

_SHOWN = 5


class Stateful(Protocol):
    """Anything whose state can be taken and given back, as torch.distributed.checkpoint knows it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take the state over."""


@dataclass(frozen=True, slots=True)
class Collected:
    """The state of all parts at one moment; its tensors are the live ones.

    Attributes:
        state: Everything but tensors, as JSON.
        model: The model's tensors, in the module's own names.
        training: All other tensors.
    """

    state: dict[str, Any]
    model: dict[str, torch.Tensor]
    training: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Parts:
    """What the user has given.

    Attributes:
        model: As the user has it, wrapped or not.
        optimizers: Those that train it.
        schedulers: Of learning rates.
        others: Whatever else has a state that is the same on all ranks; by name.
    """

    model: nn.Module
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Any] = ()
    others: Mapping[str, Stateful] = field(default_factory=dict)

    def devices(self) -> set[torch.device]:
        """Where the model lives."""
        return {tensor.device for tensor in (*self.model.parameters(), *self.model.buffers())}

    # ---------------------------------------------------------------- taking

    def collect(self) -> Collected:
        """Take the state of all parts; every rank calls it, since a state may be spread over the ranks.

        Raises:
            CheckpointError: Something in it cannot be saved.
        """
        training = Tensors()
        model, weights = self._model_state()
        state = {
            "model": model,
            "optimizers": [
                self._optimizer_state(number, optimizer, training)
                for number, optimizer in enumerate(self.optimizers)
            ],
            "schedulers": [
                {
                    "class": type(scheduler).__qualname__,
                    "state": encode(scheduler.state_dict(), f"scheduler.{number}", training),
                }
                for number, scheduler in enumerate(self.schedulers)
            ],
            "others": {
                name: encode(other.state_dict(), name, training)
                for name, other in self.others.items()
            },
        }
        return Collected(state, weights.named, training.named)

    def _model_state(self) -> tuple[dict[str, Any], Tensors]:
        weights = Tensors()
        state = named_state(self.model)
        return {name: encode(value, name, weights) for name, value in state.items()}, weights

    def weights(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """The model's tensors by name, and for each further name of one that is tied, which it is."""
        state, weights = self._model_state()
        named = {
            name: value.get("$tensor") for name, value in state.items() if isinstance(value, dict)
        }
        aliases = {name: kept for name, kept in named.items() if kept is not None and kept != name}
        return weights.named, aliases

    def _optimizer_state(self, number: int, optimizer: Any, training: Tensors) -> dict[str, Any]:
        state: dict[str, Any] = optimizer.state_dict()
        prefix = "optimizer" if len(self.optimizers) == 1 else f"optimizer.{number}"
        groups = self._names(optimizer)
        names = dict(enumerate(name for group in groups for name in group))
        return {
            "names": groups,
            "keys": _hyperparameters(state),
            # A tensor is found under its parameter's name, not its number.
            "state": [
                [
                    encode(key, f"a key of {prefix}", training),
                    encode(value, f"{prefix}.{names.get(key, key)}", training),
                ]
                for key, value in state.get("state", {}).items()
            ],
            "rest": encode(
                {key: value for key, value in state.items() if key != "state"}, prefix, training
            ),
        }

    def _names(self, optimizer: Any) -> list[list[str]]:
        """The module's names of an optimizer's parameters, group by group, in the optimizer's order."""
        known = {id(param): name for name, param in named_parameters(self.model)}
        return [
            [
                known.get(id(param), f"(outside the model {tuple(param.shape)})")
                for param in group["params"]
            ]
            for group in getattr(optimizer, "param_groups", ())
        ]

    # ---------------------------------------------------------------- giving back

    def refuse_foreign(self, state: Mapping[str, Any], facts: Sequence[TensorFacts]) -> None:
        """Raise unless a saved state is that of such parts; nothing has been changed then.

        Args:
            state: What :class:`Collected` calls so, from a file.
            facts: The tensors of the model's file.

        Raises:
            CheckpointError: It is that of another model, optimizer or scheduler; names what differs.
        """
        problems = self._model_differences(state, facts)
        if problems:
            more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise CheckpointError(
                f"it is that of another model: {'; '.join(problems[:_SHOWN])}{more}. "
                "Next: build the model as it was, or give this run a directory of its own."
            )
        for what, saved, own in (
            ("optimizers", state["optimizers"], self.optimizers),
            ("schedulers", state["schedulers"], self.schedulers),
        ):
            if len(saved) != len(own):
                raise CheckpointError(f"it has {len(saved)} {what}, and {len(own)} were given here")
        for number, (saved, optimizer) in enumerate(
            zip(state["optimizers"], self.optimizers, strict=True)
        ):
            self._compare_optimizer(number, saved, optimizer)
        for saved, scheduler in zip(state["schedulers"], self.schedulers, strict=True):
            if saved["class"] != type(scheduler).__qualname__:
                raise CheckpointError(
                    f"its scheduler is a {saved['class']}, and here it is a {type(scheduler).__qualname__}"
                )
        if set(state["others"]) != set(self.others):
            raise CheckpointError(
                f"besides model and optimizer it has {_listed(state['others'])}, and here there is {_listed(self.others)}"
            )

    def _model_differences(
        self, state: Mapping[str, Any], facts: Sequence[TensorFacts]
    ) -> list[str]:
        in_file = {fact.name: (fact.shape, fact.dtype) for fact in facts}
        saved: dict[str, Any] = {}
        for name, value in state["model"].items():
            known = in_file.get(value.get("$tensor", "")) if isinstance(value, dict) else None
            plain = known is not None and "complex" not in value
            saved[name] = known if plain else None
        own = named_state(self.model)
        problems = [f"only the checkpoint has {name!r}" for name in saved.keys() - own.keys()]
        problems += [f"only the model here has {name!r}" for name in own.keys() - saved.keys()]
        for name, value in own.items():
            theirs = saved.get(name)
            if theirs is None or not isinstance(value, torch.Tensor):
                continue
            ours = (tuple(value.shape), value.dtype)
            if ours != theirs:
                problems.append(
                    f"{name!r} is {theirs[1]} {list(theirs[0])} there and {ours[1]} {list(ours[0])} here"
                )
        return sorted(problems)

    def _compare_optimizer(self, number: int, saved: Mapping[str, Any], optimizer: Any) -> None:
        which = "its optimizer" if len(self.optimizers) == 1 else f"its optimizer {number}"
        names = self._names(optimizer)
        if names and saved["names"] != names:
            there = [name for group in saved["names"] for name in group]
            here = [name for group in names for name in group]
            first = next(
                (
                    f"parameter {index} is {a!r} there and {b!r} here"
                    for index, (a, b) in enumerate(zip(there, here, strict=False))
                    if a != b
                ),
                f"{len(there)} parameters in {len(saved['names'])} groups there, {len(here)} in {len(names)} here",
            )
            raise CheckpointError(
                f"{which} trains other parameters, or in another order: {first}. Next: build it as it was."
            )
        # Not its state: that of a sharded one is gathered from all ranks.
        own_keys = _hyperparameters({"param_groups": getattr(optimizer, "param_groups", ())})
        for theirs, ours in zip(map(set, saved["keys"]), map(set, own_keys), strict=False):
            # Later versions of torch add some; another class has others.
            if theirs - ours and ours - theirs:
                raise CheckpointError(
                    f"{which} is of another kind: only there it has {_listed(theirs - ours)}, only here "
                    f"{_listed(ours - theirs)}"
                )

    def places(self) -> dict[str, torch.device]:
        """Where each tensor of the model lives on this rank."""
        return {
            name: tensor.device
            for name, tensor in named_state(self.model).items()
            if isinstance(tensor, torch.Tensor)
        }

    def apply(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Give every part its state; every rank calls it.

        Args:
            state: What :class:`Collected` calls so, from a file.
            tensors: The tensors of both files, on their devices.

        Raises:
            CheckpointError: A part does not take it; says which and why.
        """
        weights = {name: decode(value, tensors) for name, value in state["model"].items()}
        _give(functools.partial(load_named_state, self.model), weights, "the model")
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            whole = decode(saved["rest"], tensors)
            whole["state"] = {
                decode(key, tensors): decode(value, tensors) for key, value in saved["state"]
            }
            _give(optimizer.load_state_dict, whole, "the optimizer")
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            _give(scheduler.load_state_dict, decode(saved["state"], tensors), "the scheduler")
        for name, other in self.others.items():
            _give(other.load_state_dict, decode(state["others"][name], tensors), name)

    def overwrite(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give single tensors of the model other values, those that this rank alone has."""
        own = named_state(self.model)
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)


def _give(load: Callable[[dict[str, Any]], Any], state: dict[str, Any], what: str) -> None:
    try:
        load(state)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{what} does not take its state ({type(error).__name__}: {error})"
        ) from error


def _hyperparameters(state: Mapping[str, Any]) -> list[list[str]]:
    return [sorted(map(str, group)) for group in state.get("param_groups", ())]


def _listed(names: Any) -> str:
    return ", ".join(sorted(map(str, names))) or "nothing"
