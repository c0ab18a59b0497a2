"""Small values that the ranks of a world exchange."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from mntrain.comm.collectives import WorldCollectives
from mntrain.comm.pending import Future
from mntrain.comm.waits import Waits
from mntrain.run.means import weighted_mean

T = TypeVar("T")


class Exchanges:
    """Gathers, sums and means of small values over all ranks. Base class of `World`."""

    collectives: WorldCollectives
    waits: Waits

    def mean(self, value: float | Tensor, weight: float = 1.0) -> float | Tensor:
        """Return the mean over all ranks, in fp64, weighted for example by samples. Collective.

        For a number a float; for a tensor, of the same shape on all ranks, a new one, elementwise.
        A rank of weight 0 does not count, whatever its value. Raises AgreedError (a ValueError) on
        all ranks for what is no number, for a weight below 0 or not finite, and if all are 0.
        """
        return weighted_mean(self.collectives, value, weight)

    def barrier(self) -> None:
        """Wait until all ranks are here. Collective."""
        self.gather(None)

    def gather(self, value: T) -> list[T]:
        """Return every rank's object, by rank. Collective; for small picklable objects."""
        gathered = self.gather_later(value)
        with self.waits.waiting(gather=True):
            return gathered.wait()

    def gather_later(self, value: T) -> Future[list[T]]:
        """Start a `gather`, and return a future whose `wait` returns its result. Collective."""
        return self.collectives.gather_objects(value, "world.gather")

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return elementwise sums over all ranks, in fp64. Collective; equal lengths."""
        totals = torch.tensor(values, dtype=torch.float64)
        self.collectives.named("world.sum").all_reduce(totals).wait()
        return [float(total) for total in totals]
