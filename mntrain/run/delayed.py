"""Sums over ranks that nobody waits for."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mntrain.comm.collectives import WorldCollectives
from zero.collectives import Work


class DelayedSum:
    """Sums over all ranks that are started in one step and read in the next.

    Read at once, they would wait behind the parameters that the last step has sent.
    """

    def __init__(self, collectives: WorldCollectives) -> None:
        self._collectives = collectives
        self._pending: tuple[Tensor, Work] | None = None

    def start(self, values: Sequence[float]) -> None:
        """Start elementwise sums in fp64 over all ranks. Collective; equal lengths."""
        totals = torch.tensor(values, dtype=torch.float64)
        self._pending = totals, self._collectives.all_reduce(totals)

    def take(self) -> list[float]:
        """Return the sums that were last started, once; empty if there are none. Collective."""
        if self._pending is None:
            return []
        totals, work = self._pending
        self._pending = None
        work.wait()
        return [float(total) for total in totals]
