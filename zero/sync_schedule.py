"""Sync schedules: over which ranks a step is averaged. Those with rounds: `zero.exchange`."""

from zero.collectives import Collectives


class EveryStep:
    """The sync schedule that averages every step over all ranks, which are one replica."""

    mode = "every-step"  # its name in reports
    replica, replicas = 0, 1

    def __init__(self, sharding: Collectives) -> None:
        self.sharding = sharding

    def group(self, step: int) -> Collectives:
        """Return the ranks of step number `step`, from 0: all, or those of a replica."""
        return self.sharding
