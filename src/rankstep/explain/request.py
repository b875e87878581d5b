"""What the ranks are asked to do, as a small file in a folder of their own."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path

_NAME = "request.json"


@dataclass(frozen=True, slots=True)
class Request:
    """One run of ``rankstep explain``.

    Args:
        job: ``job.py:job``; None: the built-in job.
        ranks: How many.
        lang: ``"en"`` or ``"zh"``.
        device: ``"cpu"`` or ``"cuda"``.
        seed: Fixes weights, order and draws.
        steps: For the parts that train; None: as many as the model is quick for.
        tensors: Of the model of many small tensors.
    """

    job: str | None = None
    ranks: int = 4
    lang: str = "en"
    device: str = "cpu"
    seed: int = 0
    steps: int | None = None
    tensors: int = 10_000

    def write(self, folder: Path) -> None:
        """Leave it in a folder."""
        (folder / _NAME).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Find it there."""
        return cls(**json.loads((folder / _NAME).read_text(encoding="utf-8")))
