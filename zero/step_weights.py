"""How much one rank's gradient counts in a step's mean."""

import math


class BatchWeight:
    """This rank's part of the coming step, in samples (or tokens), as it is stated. Local.

    Two ways to state it, one a step. `state`: the gradient that accumulates is a mean over so many
    samples, and is to be multiplied by that number (`scale`) before it is summed over ranks.
    `add`: what accumulates was multiplied already. Without either, every rank counts as one.

    What multiplies is a number of samples over `unit`, a power of two near what `ranks` of them had
    in the step before. With all ranks, and equal shares of a power of two, the sum is the mean: the
    division that is left is by 1. In fp16, whose small numbers are few, it is one rank: addends
    are of the size of means.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.unit = _power_of_two(ranks)
        self._added: float | None = None
        self._settled: float | None = None  # stated for gradients that have arrived
        self._stated: float | None = None  # for those that are to arrive
        self._used = False  # whether a gradient has arrived since the last statement
        self._statements = 0  # that are settled

    @property
    def scale(self) -> float:
        """By what this rank's accumulated gradient is multiplied before the sum over ranks."""
        return 1.0 if self._added is not None else self.weight / self.unit

    @property
    def weight(self) -> float:
        """What this rank's part of the sum counts, in samples."""
        if self._added is not None:
            return self._added
        if self._settled is None and self._stated is None:
            return 1.0
        return (self._settled or 0.0) + (self._stated or 0.0)

    @property
    def latest(self) -> float:
        """By what the gradient of the latest statement alone is multiplied.

        For gradients that are summed over ranks micro-batch by micro-batch.
        """
        if self._added is not None:
            return 1.0
        return (1.0 if self._stated is None else self._stated) / self.unit

    @property
    def mean_weight(self) -> float:
        """What this rank's part of such a sum counts: the mean of the statements, not their sum.

        Accumulated gradients that are to make a mean were divided by their number already.
        """
        if self._added is not None or self._stated is None:
            return self.weight
        return self.weight / (self._statements + 1)

    def state(self, count: float | None) -> None:
        """State the share of the gradient to come; None takes an unused statement back.

        Of micro-batches that accumulate, the shares add up; one that no gradient followed is
        replaced. Raises RuntimeError after `add`, and ValueError for what is no number of samples.
        """
        if count is not None:
            _check(count)
        if self._added is not None:
            raise RuntimeError("share() and backward(weight=...) are two ways of one statement")
        if self._used and self._stated is not None:
            if count is None:
                return
            self._settled = (self._settled or 0.0) + self._stated
            self._statements += 1
        self._stated, self._used = count, False

    def add(self, weight: float) -> float:
        """Count a gradient, and give by what it is to be multiplied. RuntimeError after `state`."""
        _check(weight)
        if self._stated is not None or self._settled is not None:
            raise RuntimeError("share() and backward(weight=...) are two ways of one statement")
        self._added = (self._added or 0.0) + weight
        return weight / self.unit

    def use(self) -> None:
        """Note that a gradient has arrived."""
        self._used = True

    def discard(self) -> None:
        """Forget what was stated for gradients that have arrived; a statement to come stays."""
        self._added, self._settled, self._statements = None, None, 0
        if self._used:
            self._stated, self._used = None, False

    def reset(self, usual: float) -> None:
        """Start a new step, in which nothing has been stated, and a rank is to have the usual."""
        if usual:
            self.unit = _power_of_two(usual * self.ranks)
        self._added, self._settled, self._stated = None, None, None
        self._used, self._statements = False, 0


def _power_of_two(count: float) -> float:
    """The largest that is no larger."""
    return 2.0 ** math.floor(math.log2(count))


def _check(count: float) -> None:
    if not 0 <= count < math.inf:
        raise ValueError(f"a share of {count} samples: give a finite number, 0 or more")
