"""Sums over ranks that nobody waits for."""

from collections.abc import Mapping, Sequence
from itertools import count

from mntrain.comm.collectives import WorldCollectives
from zero.optimizer import ZeroOptimizer
from zero.step_message import StepMessage

_numbers = count()


class DelayedSums:
    """Sums over all ranks that are started in one step of an own loop, and read in the next.

    Read at once, they would wait behind the parameters that the last step has sent. They travel in
    the next message of the only one of `optimizers`, if it is over all ranks; else by themselves,
    as at stage 2, where ranks may have announced a micro-batch before.
    """

    def __init__(self, collectives: WorldCollectives, optimizers: Sequence[ZeroOptimizer]) -> None:
        self._collectives, self._optimizers = collectives, optimizers
        self._prefix = f"delayed {next(_numbers)}: "  # others put numbers into the same message
        self._message: StepMessage | None = None
        self._names: list[str] = []

    def start(self, values: Mapping[str, float]) -> None:
        """Start sums of values by name. Collective; the same names in the same order."""
        carrying = self._carrying()
        self._message = carrying.step_message if carrying else StepMessage()
        self._names = list(values)
        for name, value in values.items():
            self._message.put(self._prefix + name, value)
        if not carrying:
            self._message.send(self._collectives)

    def take(self) -> dict[str, float]:
        """Return the sums that were last started, once; empty if there are none. Collective."""
        message, self._message = self._message, None
        if message is None:
            return {}
        if not message.sent:  # there was no backward in between
            message.send(self._collectives)
        sums = message.read()
        return {name: sums[self._prefix + name] for name in self._names}

    def _carrying(self) -> ZeroOptimizer | None:
        """Return the optimizer whose next message has the sums, if there is one. Local."""
        several = [optimizer for optimizer in self._optimizers if not optimizer.closed]
        if len(several) != 1:
            return None
        [one] = several
        everywhere = one.schedule.replicas == 1 and one.group.size == self._collectives.size
        return one if everywhere and not one.announces else None
