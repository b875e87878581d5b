"""What the ranks are asked to do, as a small file in a folder of their own."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
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
        seconds: That the whole command is to take at most.
        began: When the command began, by ``time.monotonic``, which is one clock for all processes of a machine.
    """

    job: str | None = None
    ranks: int = 4
    lang: str = "en"
    device: str = "cpu"
    seed: int = 0
    steps: int | None = None
    tensors: int = 10_000
    seconds: float = 60.0
    began: float = field(default_factory=time.monotonic)

    def write(self, folder: Path) -> None:
        """Leave it in a folder."""
        (folder / _NAME).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Find it there."""
        return cls(**json.loads((folder / _NAME).read_text(encoding="utf-8")))
