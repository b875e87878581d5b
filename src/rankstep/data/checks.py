"""The checks of single arguments that the files of this folder share."""

from __future__ import annotations

import operator
from typing import SupportsIndex, cast

from rankstep.errors import DataError


def whole_number(value: object, name: str, *, least: int | None = None) -> int:
    """Return `value` as a plain int, or say what is wrong with it.

    Accepts what Python accepts as an index (int, a numpy integer, a tensor of one integer). A bool is refused: by
    position it is nearly always an argument in the wrong place.

    Args:
        value: What the caller passed.
        name: How the caller knows it; begins the error's text.
        least: The smallest value allowed; None for no bound.

    Raises:
        DataError: `value` is no whole number, or is below `least`.
    """
    try:
        number = operator.index(cast("SupportsIndex", value))
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise DataError(f"{name} must be a whole number, got {value!r} ({type(value).__name__})")
    if least is not None and number < least:
        raise DataError(f"{name} must be at least {least}, got {number}")
    return number
