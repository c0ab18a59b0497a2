"""Schedules: over which ranks a step is averaged. Those of rarer exchanges: `zero.exchange`."""

from zero.collectives import Collectives


class EveryStep:
    """The schedule that averages every step over all ranks, which are one replica."""

    mode = "every-step"  # its name in reports
    replica, replicas = 0, 1
    every, max_staleness, weighted = 1, 0, False

    def __init__(self, sharding: Collectives) -> None:
        self.sharding = sharding

    def group(self, step: int) -> Collectives:
        """Return the ranks of step number `step`, from 0: all, or those of a replica."""
        return self.sharding

    def alone(self, step: int) -> bool:
        """Return whether a replica takes a step by itself. Local."""
        return False

    def exchange_due(self, step: int) -> bool:
        """Return whether a step is followed by an exchange, also if it is skipped."""
        return self.rounds(step + 1) > self.rounds(step)

    def rounds(self, steps: int) -> int:
        """Return the number of rounds that have ended after so many steps of the run. Local."""
        return 0
