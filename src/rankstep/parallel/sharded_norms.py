"""Norms of gradients that are dealt to the ranks: each rank's part, and one small all-reduce."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from rankstep.collectives.failures import naming_failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankstep.parallel.sharded_home import Home
    from rankstep.parallel.sharded_shares import Shares

_ADVICE = "; every rank must take part in norms and GradScaler.unscale_"


class Norms:
    """The norms of the gradients of one step.

    Args:
        shares: Whose gradients.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._of_each: dict[float, dict[int, torch.Tensor]] = {}

    def forget(self) -> None:
        """Gradients have changed."""
        self._of_each.clear()

    def of(self, home: Home, order: float) -> torch.Tensor:
        """The norm of one gradient, in its dtype; the first call for an ``order`` is collective and finds all."""
        if order not in self._of_each:
            homes = [each for each in self._shares.homes.values() if each.has_grad]
            self._shares.finish()
            found = self._combined([each.numbers for each in homes], order)
            self._of_each[order] = {
                id(each): norm.to(each.region.dtype)
                for each, norm in zip(homes, found, strict=True)
            }
        return self._of_each[order][id(home)]

    def total(
        self, regions: Sequence[torch.Tensor], order: float, device: torch.device
    ) -> torch.Tensor:
        """The norm of all of a list of gradients, in float64; collective.

        Args:
            regions: This rank's share of each.
            order: Of the norm.
            device: Where they are.
        """
        zero = torch.zeros((), dtype=torch.float64, device=device)
        local = _joined(torch.stack([zero, *(_powers(each, order) for each in regions)]), order)
        return _rooted(self._gathered(local.reshape(1)), order)[0]

    def found_on_any(self, found: torch.Tensor) -> None:
        """Make a scalar nonzero on all ranks if it is on one; collective."""
        everywhere = self._gathered(found.detach().double().reshape(1))
        found.copy_(everywhere.amax(0).reshape(found.shape))

    def _combined(self, regions: Sequence[torch.Tensor], order: float) -> torch.Tensor:
        local = torch.stack([_powers(region, order) for region in regions])
        return _rooted(self._gathered(local), order)

    def _gathered(self, mine: torch.Tensor) -> torch.Tensor:
        """One row for each rank."""
        comm = self._shares.comm
        if comm.world_size == 1:
            return mine[None]
        # Nobody else adds to this rank's row, so the sum is every rank's row.
        rows = mine.new_zeros(comm.world_size, len(mine))
        rows[comm.rank] = mine
        with naming_failure(
            comm, "sharded/norms", f"agreeing on norms or infinities of sharded gradients{_ADVICE}"
        ):
            comm.all_reduce(rows.view(-1)).wait()
        return rows * comm.world_size if comm.averages else rows


def _powers(region: torch.Tensor, order: float) -> torch.Tensor:
    """This part's summand of a norm: the sum of powers; for the infinite norm the largest."""
    if not region.numel():
        return torch.zeros((), dtype=torch.float64, device=region.device)
    wide = torch.complex128 if region.is_complex() else torch.float64
    norm: torch.Tensor = torch.linalg.vector_norm(region, order, dtype=wide)
    return norm if math.isinf(order) or not order else norm.pow(order)


def _joined(powers: torch.Tensor, order: float) -> torch.Tensor:
    return powers.amax(0) if math.isinf(order) else powers.sum(0)


def _rooted(rows: torch.Tensor, order: float) -> torch.Tensor:
    joined = _joined(rows, order)
    return joined if math.isinf(order) or not order else joined.pow(1 / order)
