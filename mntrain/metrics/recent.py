"""Values of the most recent steps of a job, without those of its warm-up."""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")

WARMUP_STEPS = 3  # in which caches fill and compilation runs: no rate is computed from them


class RecentSteps(Generic[T]):
    """A value for each of the last `most` steps; those of the warm-up, until the first other one.

    `values` is empty before the first step.
    """

    def __init__(self, most: int) -> None:
        self._steps = 0
        self.values: deque[T] = deque(maxlen=most)

    @property
    def warm(self) -> bool:
        """True if the values are of steps after the warm-up."""
        return self._steps > WARMUP_STEPS

    def add(self, value: T) -> None:
        """Add the value of the next step."""
        self._steps += 1
        if self._steps == WARMUP_STEPS + 1:
            self.values.clear()
        self.values.append(value)
