"""How far the ranks are, on standard error: one line that changes on a terminal, a line per part elsewhere."""

from __future__ import annotations

import sys

from rankstep.explain.parts import PARTS
from rankstep.explain.texts import texts


class Progress:
    """Shown by rank 0, and before the ranks are there by the command itself.

    Args:
        lang: Of the texts.
        shown: False says nothing.
    """

    def __init__(self, lang: str, *, shown: bool = True) -> None:
        self._text = texts(lang)
        self._shown = shown
        self._moves = sys.stderr.isatty()

    def show(self, what: str) -> None:
        """Say that this has begun.

        Args:
            what: A part, ``"start"`` or ``"job"``.
        """
        number = f"{PARTS.index(what) + 1}/{len(PARTS)} " if what in PARTS else ""
        self._write(f"{number}{self._text(f'progress.{what}')}")

    def clear(self) -> None:
        """Take the line away."""
        if self._shown and self._moves:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _write(self, line: str) -> None:
        if not self._shown:
            return
        line = f"rankstep explain: {line}"
        sys.stderr.write(f"\r\x1b[K{line} ..." if self._moves else f"{line}\n")
        sys.stderr.flush()
