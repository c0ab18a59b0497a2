"""Weights of the ranks in a step's mean."""

import math


class BatchWeight:
    """This rank's weight in a step, in samples or tokens. Local.

    A step uses one of two ways to state it. `state(n)`: the gradient that accumulates is a mean
    over n samples, and is multiplied by n (`scale`) before the sum over ranks. `add(n)`: the loss
    was multiplied by n already. Without either, each rank has weight 1. With `every_micro_batch`
    the gradient of each micro-batch is summed over ranks by itself.

    Multipliers are divided by `unit`, the power of two nearest below the weight that `ranks` ranks
    had together in the previous step. With `ranks` the size of the group and equal weights that are
    powers of two, the sum is the mean, and no pass over memory is left to divide it. fp16 has a
    small range, so there `ranks` is 1, and addends have the size of means. A power of two changes
    no bits, so `unit` is not part of the state of a run.
    """

    def __init__(self, ranks: int, *, every_micro_batch: bool = False) -> None:
        self._ranks, self._usual = ranks, 1.0
        self._every_micro_batch = every_micro_batch
        self.unit = _power_of_two(ranks)
        self._added: float | None = None
        self._used: list[float] = []  # stated for gradients that have arrived
        self._stated: float | None = None  # for the gradient to come, or the latest that arrived
        self._gradient_arrived = False  # since the latest statement

    @property
    def weight(self) -> float:
        """This rank's weight in the step so far, in samples."""
        return sum(self._statements) if self._added is None else self._added

    @property
    def divisor(self) -> float:
        """This rank's weight, or the mean of its statements where micro-batches are summed alone.

        Losses of accumulated micro-batches were divided by their number already.
        """
        alone = self._every_micro_batch and self._added is None
        return self.weight / (len(self._statements) if alone else 1)

    @property
    def scale(self) -> float:
        """The multiplier of this rank's gradient before the sum over ranks."""
        if self._added is not None:
            return 1.0
        return (self._statements[-1] if self._every_micro_batch else self.weight) / self.unit

    @property
    def _statements(self) -> list[float]:
        stated = self._used if self._stated is None else [*self._used, self._stated]
        return stated or [1.0]

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
            self._used.append(self._stated)
        self._stated, self._gradient_arrived = count, False

    def add(self, weight: float) -> float:
        """Add the weight of a loss, and return its multiplier. RuntimeError after `state`."""
        _check(weight)
        if self._stated is not None or self._used:
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
        self._added, self._used = None, []
        if self._gradient_arrived:
            self._stated, self._gradient_arrived = None, False

    def reset(self, usual: float) -> None:
        """Start a new step; `usual` is the mean weight of a rank in the last one."""
        if usual:
            self._usual = usual
            self.unit = _power_of_two(usual * self._ranks)
        self._added, self._used, self._stated = None, [], None
        self._gradient_arrived = False


def _power_of_two(count: float) -> float:
    """Return the largest power of two that is not larger."""
    return 2.0 ** math.floor(math.log2(count))


def _check(count: float) -> None:
    if not 0 <= count < math.inf:
        raise ValueError(f"a share of {count} samples: give a finite number, 0 or more")
