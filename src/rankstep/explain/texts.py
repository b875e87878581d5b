"""The story's texts, apart from its numbers: one table for each language, with the same keys and the same gaps."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

LANGUAGES: Final = ("en", "zh")


class Texts:
    """Texts of one language; call it with a key and what fills the gaps.

    Args:
        lang: Which language.
        table: Its texts.
    """

    def __init__(self, lang: str, table: Mapping[str, str]) -> None:
        self.lang = lang
        self._table = table

    def __call__(self, key: str, /, **values: object) -> str:
        """Return a text with its gaps filled."""
        return self._table[key].format(**values)

    def raw(self, key: str) -> str:
        """Return a text with its gaps as they are."""
        return self._table[key]


def texts(lang: str) -> Texts:
    """Return the texts of a language.

    Args:
        lang: One of `LANGUAGES`.

    Raises:
        KeyError: There is no such language.
    """
    if lang not in LANGUAGES:
        raise KeyError(lang)
    return Texts(lang, importlib.import_module(f"rankstep.explain.texts_{lang}").TEXTS)
