"""The samples of steps whose number follows a cadence. Nothing in this module communicates.

plan:     10, 10 micro-batches             10, 40
steps:    [ 20 ][ 20 ][ 20 ] ... [ 20 ]    [    50    ][    50    ] ...
samples:  the order of an epoch, without a gap
"""

from dataclasses import replace

from mntrain.balance.cadence import Cadence
from mntrain.data.sampling import Position, SamplingPlan


class CadenceSampling:
    """The order in which a job with a cadence sees its samples, from `origin` on. Local.

    Each plan of a cadence is a `SamplingPlan` with another batch size, which continues at the
    sample where the one before has ended, as a run does that is resumed with another
    --train.batch-size. With `drop_last` the smaller last batch of an epoch is left out. Every rank
    holds an equal one, and the order of samples is that of any other run.
    """

    def __init__(
        self, cadence: Cadence, samples: int, seed: int, *, drop_last: bool, origin: Position
    ) -> None:
        self._cadence, self.seed = cadence, seed
        size = cadence.samples(0)
        self._plans = [
            SamplingPlan(samples, size, seed, drop_last=drop_last, origin=origin, shares=cadence)
        ]

    def at(self, step: int) -> SamplingPlan:
        """Return the plan of a step, 0 for the first of the run."""
        index = self._cadence.index(step)
        while (number := len(self._plans)) <= index:
            before, size = self._plans[-1], self._cadence.samples(number)
            begin = before.position(self._cadence.plans[number].first)
            self._plans.append(replace(before, batch_size=size, origin=begin))
        return self._plans[index]
