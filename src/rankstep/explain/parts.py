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

# In which they are measured: the single all-reduces take whatever time is left, hence last.
ORDER: Final = (*(part for part in PARTS if part != "whatif"), "whatif")
