"""What a sampler writes into a checkpoint, and the checks before it is believed.

The state is global: it counts the samples that all ranks took together, so it says nothing of any one rank, is the same
on all of them, and can be loaded on another number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final, Self

from rankstep.errors import DataError

STATE_VERSION: Final = 1
# Where two states may differ and still be the same epoch: how far it is, and on how many ranks it is walked.
_MAY_DIFFER: Final = frozenset({"version", "epoch", "global_consumed", "world_size"})
_TYPES: Final = {"int": int, "bool": bool, "str": str}
_LEAST: Final = {"dataset_len": 0, "global_consumed": 0, "seed": 0, "world_size": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """A place in an epoch, and all that fixes which samples are left from there.

    Args:
        seed: The sampler's seed.
        epoch: The epoch that is being walked.
        shuffle: Whether the order is random.
        drop_last: Whether the uneven tail is left out.
        pad: How the uneven tail is filled ("repeat" or "none").
        order: Which random order ("torch" or "streaming").
        dataset_len: Samples in the dataset.
        global_consumed: Samples that all ranks together took in this epoch, padding included.
        world_size: Ranks at the time of saving.
        version: The layout of this record.
    """

    seed: int
    epoch: int
    shuffle: bool
    drop_last: bool
    pad: str
    order: str
    dataset_len: int
    global_consumed: int
    world_size: int
    version: int = STATE_VERSION

    @classmethod
    def parse(cls, raw: object) -> Self:
        """Return the state in a dict that came back from a file.

        Args:
            raw: What `DistributedSampler.state_dict` returned, perhaps by way of JSON. Further keys are ignored.

        Raises:
            DataError: No dict, an unknown version, a missing key, or a value that no sampler could have written.
        """
        if not isinstance(raw, Mapping):
            raise DataError(f"a sampler's state is a dict, got {raw!r} ({type(raw).__name__})")
        if raw.get("version", STATE_VERSION) != STATE_VERSION:
            raise DataError(
                f"the sampler state has version {raw['version']!r}, this Rankstep reads version {STATE_VERSION}; "
                "load it with the Rankstep that wrote it"
            )
        names = [field.name for field in fields(cls)]
        if missing := sorted(set(names) - set(raw)):
            raise DataError(
                f"the sampler state lacks {', '.join(missing)} (it has: {', '.join(map(str, raw)) or 'nothing'}); "
                "was it written by another sampler?"
            )
        for field in fields(cls):
            _check(field.name, raw[field.name], _TYPES[str(field.type)])
        state = cls(**{name: raw[name] for name in names})
        state._refuse_impossible_count()
        return state

    def refuse_unless_same_epoch(self, own: SamplerState) -> None:
        """Raise where the rest of this state's epoch would not be the rest that the sampler walks.

        Args:
            own: The state of the sampler that is about to load this one.

        Raises:
            DataError: Names each setting that differs, with both sides.
        """
        different = [
            f"{field.name} is {getattr(self, field.name)!r} in the state and {getattr(own, field.name)!r} here"
            for field in fields(self)
            if field.name not in _MAY_DIFFER
            and getattr(self, field.name) != getattr(own, field.name)
        ]
        if different:
            raise DataError(
                f"the sampler state belongs to another epoch than this sampler walks: {'; '.join(different)}. "
                "Build the sampler as it was when the state was saved, or do not load the state to begin afresh"
            )

    def _refuse_impossible_count(self) -> None:
        most = self.dataset_len
        if self.pad == "repeat" and not self.drop_last:
            most += self.world_size - 1
        if self.global_consumed > most:
            raise DataError(
                f"the sampler state says {self.global_consumed} samples were consumed, beyond the end of its epoch: "
                f"{self.dataset_len} samples on {self.world_size} ranks give {most} at most"
            )


def _check(name: str, value: object, kind: type) -> None:
    if type(value) is not kind:
        raise DataError(f"{name} in the sampler state must be {kind.__name__}, got {value!r}")
    if isinstance(value, int) and value < _LEAST.get(name, value):
        raise DataError(f"{name} in the sampler state must be at least {_LEAST[name]}, got {value}")
