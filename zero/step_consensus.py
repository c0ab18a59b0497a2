"""What a step is over, summed over ranks; and whether all ranks are through with it."""

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

from zero.collectives import Collectives
from zero.step_weights import BatchWeight


class StepTotals(NamedTuple):
    """What a step is over: sums over ranks."""

    going: float  # ranks that are in another micro-batch
    weight: float  # samples
    divisor: float  # by which the sum of gradients is to be divided
    missing: float  # parameters without a gradient, counted on every rank


class StepConsensus:
    """One small all-reduce, in which a rank says that it is done with a step, or goes on.

    Where gradients leave in every micro-batch (`every_micro_batch`), ranks may differ in how many
    they have. Who begins another one announces it. Who is done takes part, with zeros, in what
    others announce, until all are:

        rank 0   announce   buckets   announce   buckets   done
        rank 1   announce   buckets   done       zeros     done
    """

    def __init__(
        self, collectives: Collectives, share: BatchWeight, *, every_micro_batch: bool
    ) -> None:
        self._collectives, self._share = collectives, share
        self._every_micro_batch = every_micro_batch

    def announce(self) -> None:
        """Go on. Collective; does not wait."""
        self._collectives.all_reduce(torch.tensor([1.0, 0, 0, 0], dtype=torch.float64))

    def done(self, missing: int, answer: Callable[[], None]) -> StepTotals:
        """Be done, with so many parameters that got no gradient here. Collective.

        `answer` takes part in a micro-batch of others.
        """
        share = self._share
        divisor = share.mean_weight if self._every_micro_batch else share.weight
        while True:
            counts = torch.tensor([0, share.weight, divisor, missing], dtype=torch.float64)
            self._collectives.all_reduce(counts).wait()
            totals = StepTotals(*counts.tolist())
            if not totals.going:
                return totals
            answer()

    def unused(self, names: Collection[str], used: Collection[str]) -> frozenset[str]:
        """Those of all parameters' names that are in no rank's `used`. Collective."""
        flags = torch.tensor([name in used for name in names], dtype=torch.float64)
        self._collectives.all_reduce(flags).wait()
        return frozenset(
            name for name, ranks in zip(names, flags.tolist(), strict=True) if not ranks
        )
