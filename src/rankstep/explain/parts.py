"""The parts of the story, in the tutorial's order."""

from __future__ import annotations

from typing import Final

PARTS: Final = (
    "world",
    "samples",
    "gradients",
    "drift",
    "averaging",
    "backward",
    "whatif",
    "steps",
)
