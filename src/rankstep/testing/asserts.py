"""Assertions about tensors, ranks and the order of events, each naming the first thing that is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch


def assert_same_on_all(values: Sequence[Any]) -> None:
    """Require that all ranks hold the same, bit for bit.

    Args:
        values: What each rank holds, by rank: tensors, arrays, plain values, and dicts and lists of these.

    Raises:
        AssertionError: Two differ; names the rank, the place and the difference.
    """
    if not values:
        raise AssertionError("no values to compare")
    for rank, value in enumerate(values):
        difference = first_difference(values[0], value)
        if difference is not None:
            raise AssertionError(f"ranks 0 and {rank} differ at {difference}")


def assert_bitwise_equal(actual: Any, expected: Any) -> None:
    """Require equality of every bit, so that 0.0 differs from -0.0 and a NaN equals itself.

    Args:
        actual: Tensors, arrays, plain values, and dicts and lists of these.
        expected: The same structure.

    Raises:
        AssertionError: They differ; names the place and the difference.
    """
    difference = first_difference(actual, expected)
    if difference is not None:
        raise AssertionError(f"differs at {difference}")


def assert_close_to(actual: Any, expected: Any, rel: float) -> None:
    """Require that no element is further off than ``rel`` times the largest magnitude of its expected tensor.

    Small elements of a gradient carry the rounding of large terms that cancelled, so each is judged by the scale of its
    tensor and not by its own.

    Args:
        actual: Tensors or arrays, and dicts and lists of these.
        expected: The same structure.
        rel: The bound, as a fraction.

    Raises:
        AssertionError: Structures differ, or an element is too far off; names the worst of all.
    """
    worst, worst_rel = "", -1.0
    for place, left, right in _leaves(actual, expected, ""):
        got, want = torch.as_tensor(left).double().cpu(), torch.as_tensor(right).double().cpu()
        if got.shape != want.shape:
            raise AssertionError(f"at {place}: shape {tuple(got.shape)}, not {tuple(want.shape)}")
        if got.numel() == 0:
            continue
        off = (got - want).abs().flatten()
        # Where both are the same infinity or NaN nothing is off.
        off[(got == want).flatten() | (got.isnan() & want.isnan()).flatten()] = 0.0
        off = off.nan_to_num(nan=torch.inf, posinf=torch.inf)
        at = int(off.argmax())
        scale = float(want.abs().max())
        found = float(off[at]) / scale if scale > 0 else float(off[at])
        if found > worst_rel:
            values = f"{got.flatten()[at]:.9g} instead of {want.flatten()[at]:.9g}"
            worst, worst_rel = f"{place} element {at}: {values}, largest {scale:.9g}", found
    if worst_rel < 0:
        raise AssertionError("nothing to compare")
    if worst_rel > rel:
        raise AssertionError(
            f"off by {worst_rel:.3g} of the largest (allowed {rel:.3g}) at {worst}"
        )


def assert_in_order(events: Sequence[Any], *expected: Any) -> None:
    """Require that the expected events happened in this order, whatever came between them.

    Raises:
        AssertionError: One is missing after those before it; shows all events.
    """
    at = 0
    for event in expected:
        try:
            at = list(events).index(event, at) + 1
        except ValueError:
            raise AssertionError(
                f"{event!r} does not follow the events before it: expected {list(expected)}, got {list(events)}"
            ) from None


def first_difference(left: Any, right: Any) -> str | None:
    """Describe the first place where two nested values differ in any bit, or return None."""
    try:
        for place, one, other in _leaves(left, right, ""):
            how = _leaf_difference(one, other)
            if how is not None:
                return f"{place}: {how}"
    except _StructureError as error:
        return str(error)
    return None


class _StructureError(AssertionError):
    """Two nested values do not have the same structure."""


def _leaves(left: Any, right: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    place = path or "the value"
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        if list(left) != list(right):
            raise _StructureError(f"{place}: keys {list(left)}, not {list(right)}")
        for key in left:
            yield from _leaves(left[key], right[key], f"{path}[{key!r}]")
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        if len(left) != len(right):
            raise _StructureError(f"{place}: length {len(left)}, not {len(right)}")
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from _leaves(one, other, f"{path}[{index}]")
    else:
        yield place, left, right


def _leaf_difference(left: Any, right: Any) -> str | None:
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        left, right = torch.from_numpy(left.copy()), torch.from_numpy(right.copy())
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return _tensor_difference(left, right)
    if type(left) is not type(right):
        return f"{type(left).__name__} {left!r}, not {type(right).__name__} {right!r}"
    both_nan = isinstance(left, float) and left != left and right != right  # noqa: PLR0124
    if left == right or both_nan:
        return None
    return f"{left!r}, not {right!r}"


def _tensor_difference(left: torch.Tensor, right: torch.Tensor) -> str | None:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return f"{left.dtype} {tuple(left.shape)}, not {right.dtype} {tuple(right.shape)}"
    left, right = left.detach().cpu().flatten(), right.detach().cpu().flatten()
    size = left.element_size()
    same = (
        (left.contiguous().view(torch.uint8) == right.contiguous().view(torch.uint8))
        .view(-1, size)
        .all(1)
    )
    if bool(same.all()):
        return None
    wrong = torch.nonzero(~same).flatten()
    at = int(wrong[0])
    return f"{len(wrong)} of {left.numel()} elements, first {at}: {left[at].item()!r}, not {right[at].item()!r}"
