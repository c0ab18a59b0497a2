"""The samples of steps whose number follows a cadence.

    plan:     10, 10 micro-batches             10, 40
    steps:    [ 20 ][ 20 ][ 20 ] ... [ 20 ]    [    50    ][    50    ] ...
    samples:  the order of an epoch, without a gap

Each plan of a cadence is a `SamplingPlan` with another batch size, which continues at the sample
where the one before has ended, as a run does that is resumed with another --train.batch-size.

Nothing in this module communicates.
"""

from dataclasses import replace

from mntrain.balance.cadence import Cadence, CountedParts
from mntrain.data.sampling import Position, SamplingPlan


class CadenceSampling:
    """The order in which a job with a cadence sees its samples, from `origin` on. Local.

    A step takes the next samples of the epoch: for each rank its number of whole micro-batches. The
    last batch of an epoch is smaller, and divided in the same proportion; with `drop_last` it is
    left out. Every rank holds an equal one, and the order of samples is that of any other run.
    """

    def __init__(
        self, cadence: Cadence, samples: int, seed: int, *, drop_last: bool, origin: Position
    ) -> None:
        self._cadence, self.seed = cadence, seed
        parts = self._parts(0)
        self._plans = [
            SamplingPlan(
                samples, parts.samples, seed, drop_last=drop_last, origin=origin, shares=parts
            )
        ]

    def at(self, step: int) -> SamplingPlan:
        """Return the plan of a step, 0 for the first of the run."""
        index = self._cadence.index(step)
        while len(self._plans) <= index:
            number = len(self._plans)
            parts, before = self._parts(number), self._plans[-1]
            begin = before.position(self._cadence.plans[number].first)
            self._plans.append(
                replace(before, batch_size=parts.samples, origin=begin, shares=parts)
            )
        return self._plans[index]

    def position(self, step: int) -> Position:
        """Return where a step begins."""
        return self.at(step).position(step)

    def length(self, step: int) -> int:
        """Return the number of samples in a step's global batch."""
        return self.at(step).length(step)

    def share_length(self, step: int, rank: int, size: int) -> int:
        """Return the number of samples in a rank's part of a step."""
        return self.at(step).share_length(step, rank, size)

    def micro_batch_count(self, step: int, rank: int, size: int, micro_batch_size: int) -> int:
        """Return the number of a rank's micro-batches in a step, without computing them."""
        return self.at(step).micro_batch_count(step, rank, size, micro_batch_size)

    def micro_batches(
        self, step: int, rank: int, size: int, micro_batch_size: int
    ) -> list[list[int]]:
        """Return a rank's samples of a step by micro-batch; the step's plan is final from then."""
        self._cadence.drawn = max(self._cadence.drawn, step)
        return self.at(step).micro_batches(step, rank, size, micro_batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in one pass over the samples under the latest plan."""
        return self.at(self._cadence.latest.first).steps_per_epoch

    def _parts(self, index: int) -> CountedParts:
        return CountedParts(self._cadence.plans[index].counts, self._cadence.micro_batch)
