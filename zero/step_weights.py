"""Weights of the ranks in a step's mean, and the all-reduce in which ranks agree on them."""

import math
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

from zero.collectives import Collectives


class BatchWeight:
    """This rank's weight in a step, in samples or tokens. Local.

    A step uses one of two ways to state it. `state(n)`: the gradient that accumulates is a mean
    over n samples, and is multiplied by n (`scale`) before the sum over ranks. `add(n)`: the loss
    was multiplied by n already. Without either, each rank has weight 1.

    Multipliers are divided by `unit`, the power of two nearest below the weight that `ranks` ranks
    had together in the previous step. With `ranks` the size of the group and equal weights that are
    powers of two, the sum is the mean, and no pass over memory is left to divide it. fp16 has a
    small range, so there `ranks` is 1, and addends have the size of means. A power of two changes
    no bits, so `unit` is not part of the state of a run.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks, self._usual = ranks, 1.0
        self.unit = _power_of_two(ranks)
        self._added: float | None = None
        self._used_weight: float | None = None  # stated for gradients that have arrived
        self._stated: float | None = None  # for the gradient to come, or the latest that arrived
        self._gradient_arrived = False  # since the latest statement
        self._statements = 0  # in `_used_weight`

    @property
    def scale(self) -> float:
        """The multiplier of this rank's accumulated gradient before the sum over ranks."""
        return 1.0 if self._added is not None else self.weight / self.unit

    @property
    def weight(self) -> float:
        """This rank's weight in the step so far, in samples."""
        if self._added is not None:
            return self._added
        if self._used_weight is None and self._stated is None:
            return 1.0
        return (self._used_weight or 0.0) + (self._stated or 0.0)

    @property
    def micro_batch_scale(self) -> float:
        """The multiplier of the latest micro-batch's gradient, where each one is summed alone."""
        if self._added is not None:
            return 1.0
        return (1.0 if self._stated is None else self._stated) / self.unit

    @property
    def micro_batch_weight(self) -> float:
        """The mean of the statements of a step, the divisor where micro-batches are summed alone.

        Losses of accumulated micro-batches were divided by their number already.
        """
        if self._added is not None or self._stated is None:
            return self.weight
        return self.weight / (self._statements + 1)

    def state(self, count: float | None) -> None:
        """State the weight of the gradient to come; None takes back an unused statement.

        Weights of accumulated micro-batches add up. A statement that no gradient followed is
        replaced. Raises RuntimeError after `add`, and ValueError for a negative or infinite count.
        """
        if count is not None:
            _check(count)
        if self._added is not None:
            raise RuntimeError("share() and backward(weight=...) are two ways of one statement")
        if self._gradient_arrived and self._stated is not None:
            if count is None:
                return
            self._used_weight = (self._used_weight or 0.0) + self._stated
            self._statements += 1
        self._stated, self._gradient_arrived = count, False

    def add(self, weight: float) -> float:
        """Add the weight of a loss, and return its multiplier. RuntimeError after `state`."""
        _check(weight)
        if self._stated is not None or self._used_weight is not None:
            raise RuntimeError("share() and backward(weight=...) are two ways of one statement")
        self._added = (self._added or 0.0) + weight
        return weight / self.unit

    def limit_to_means(self) -> None:
        """Keep addends at the size of means from now on, for the small range of fp16."""
        self._ranks, self.unit = 1, _power_of_two(self._usual)

    def note_gradient(self) -> None:
        """Record that a gradient has arrived."""
        self._gradient_arrived = True

    def discard(self) -> None:
        """Forget the weights of gradients that have arrived; an unused statement stays."""
        self._added, self._used_weight, self._statements = None, None, 0
        if self._gradient_arrived:
            self._stated, self._gradient_arrived = None, False

    def reset(self, usual: float) -> None:
        """Start a new step; `usual` is the mean weight of a rank in the last one."""
        if usual:
            self._usual = usual
            self.unit = _power_of_two(usual * self._ranks)
        self._added, self._used_weight, self._stated = None, None, None
        self._gradient_arrived, self._statements = False, 0


def _power_of_two(count: float) -> float:
    """Return the largest power of two that is not larger."""
    return 2.0 ** math.floor(math.log2(count))


def _check(count: float) -> None:
    if not 0 <= count < math.inf:
        raise ValueError(f"a share of {count} samples: give a finite number, 0 or more")


class StepTotals(NamedTuple):
    """Sums over the ranks of a step's group."""

    running: float  # ranks that have another micro-batch
    weight: float  # samples
    divisor: float  # of the sum of gradients
    missing: float  # parameters without a gradient, counted on every rank


class StepConsensus:
    """The small all-reduce that ends a step, or announces another micro-batch of it.

    Where every micro-batch is reduced by itself, ranks may have different numbers of them. A rank
    announces each one. Ranks that have finished contribute zeros until every rank is done:

        rank 0   announce   buckets   announce   buckets   done
        rank 1   announce   buckets   done       zeros     done

    `group` returns the ranks of the current step.
    """

    def __init__(
        self, group: Callable[[], Collectives], weight: BatchWeight, *, every_micro_batch: bool
    ) -> None:
        self._group, self._weight = group, weight
        self._every_micro_batch = every_micro_batch

    def announce(self) -> None:
        """Announce a micro-batch. Collective; does not wait."""
        self._group().all_reduce(torch.tensor([1.0, 0, 0, 0], dtype=torch.float64))

    def finish(self, missing: int, contribute_zeros: Callable[[], None]) -> StepTotals:
        """Wait until all ranks have finished, and return their totals. Collective.

        `missing` is the number of parameters that got no gradient on this rank; `contribute_zeros`
        takes part in a micro-batch of other ranks.
        """
        weight = self._weight.weight
        divisor = self._weight.micro_batch_weight if self._every_micro_batch else weight
        while True:
            counts = torch.tensor([0, weight, divisor, missing], dtype=torch.float64)
            self._group().all_reduce(counts).wait()
            totals = StepTotals(*counts.tolist())
            if not totals.running:
                return totals
            contribute_zeros()

    def unused(self, names: Collection[str], used: Collection[str]) -> frozenset[str]:
        """Return the names that are in no rank's `used`. Collective; `names` are of all ranks."""
        flags = torch.tensor([name in used for name in names], dtype=torch.float64)
        self._group().all_reduce(flags).wait()
        return frozenset(
            name for name, ranks in zip(names, flags.tolist(), strict=True) if not ranks
        )
