"""How far the ranks are, on standard error: one line that changes on a terminal, a line per part elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rankstep.explain import numbers
from rankstep.explain.parts import ORDER
from rankstep.explain.texts import texts

if TYPE_CHECKING:
    from rankstep.explain.request import Request


class Progress:
    """Shown by rank 0, and before the ranks are there by the command itself.

    Args:
        request: What is run.
        shown: False says nothing.
    """

    def __init__(self, request: Request, *, shown: bool = True) -> None:
        self._request = request
        self._text = texts(request.lang)
        self._shown = shown
        self._moves = sys.stderr.isatty()

    def show(self, what: str) -> None:
        """Say that this has begun.

        Args:
            what: A part, ``"start"``, ``"job"`` or ``"nodes"``.
        """
        number = f"{ORDER.index(what) + 1}/{len(ORDER)} " if what in ORDER else ""
        told = self._text(
            f"progress.{what}",
            ranks=self._request.ranks,
            tensors=numbers.count(self._request.tensors),
        )
        self._write(f"{number}{told}")

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
