"""Sums over ranks that travel in the message of a step, or of an exchange."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from zero.collectives import Collectives
from zero.optimizer import ZeroOptimizer
from zero.step_message import StepMessage, Value


class Sums(NamedTuple):
    """Sums over all ranks by name, and the own values of each by name and rank."""

    sums: dict[str, float]
    by_rank: dict[str, dict[str, float]]


class _Started(NamedTuple):
    """Values in a message, whose names there have a prefix."""

    optimizer: ZeroOptimizer | None  # whose message it is
    message: StepMessage
    # Rounds of steps that must have ended before they count, once the message was sent; None if
    # that is as soon as they are asked for.
    rounds: int | None
    prefix: str
    values: Mapping[str, Value]
    own: Mapping[str, Value]

    def put(self) -> None:
        for name, value in self.values.items():
            self.message.put(self.prefix + name, value)
        for name, value in self.own.items():
            self.message.put(self.prefix + name, value, "max")

    def take_back(self) -> None:
        """Take the values out of a message that was not sent."""
        if not self.message.sent:
            for name in [*self.values, *self.own]:
                self.message.take_back(self.prefix + name)

    def read(self) -> Sums:
        sums = self.message.read()
        return Sums(
            {name: sums[self.prefix + name] for name in self.values},
            {name: self.message.by_rank(self.prefix + name) for name in self.own},
        )


class DelayedSums:
    """Sums over all ranks that are started after one step of a loop, and taken after a later one.

    They travel in what all ranks send next: in the message of the next step, or where nodes train
    alone, in that of the exchange at the end of the round, and count then; with a `max_staleness`,
    so many rounds later. If the loop takes no steps until they are taken, or those of another
    optimizer, they have a message of their own. All methods are called alike on all ranks.
    """

    def __init__(
        self, collectives: Collectives, name: str, latest: Callable[[], ZeroOptimizer | None]
    ) -> None:
        """Make sums of a `name` that no others have, the same on all ranks. Local.

        `latest` returns the optimizer that takes the steps of the loop, if there is one.
        """
        self._collectives, self._name, self._latest = collectives, name, latest
        self._steps: int | None = None  # of the optimizer, at the last `take`
        self._started: list[_Started] = []
        self._number = 0  # of what was started

    @property
    def waiting(self) -> bool:
        """True if anything that was started is not sent yet. Local."""
        return any(not one.message.sent for one in self._started)

    @property
    def delay(self) -> int:
        """The most steps from a message to the one in which the next message counts. Local."""
        optimizer = self._latest()
        exchange = optimizer.coming_exchange if optimizer is not None else None
        return 1 if exchange is None else (exchange.max_staleness + 1) * exchange.every

    def start(self, values: Mapping[str, Value], own: Mapping[str, Value] | None = None) -> None:
        """Start sums of values by name; all ranks learn the values in `own` of each. Collective.

        The same names on all ranks, in any order. Functions are called when they are sent.
        """
        optimizer, message, rounds = self._latest(), StepMessage(), None
        if optimizer is not None:
            exchange, steps = optimizer.coming_exchange, optimizer.accumulation.steps
            if exchange is not None:
                message, rounds = exchange.message, 0
                if exchange.max_staleness:
                    rounds = exchange.rounds(steps) + 1 + exchange.max_staleness
            elif optimizer.group.size == self._collectives.size:
                message = optimizer.accumulation.message
            else:
                optimizer = None
        self._number += 1
        prefix = f"{self._name} {self._number}: "
        ordered = dict(sorted(values.items())), dict(sorted((own or {}).items()))
        self._started.append(_Started(optimizer, message, rounds, prefix, *ordered))
        self._started[-1].put()
        if optimizer is None:
            message.send(self._collectives)

    def take(self) -> list[Sums]:
        """Return the sums that count now, in the order of their starts. Collective.

        At most once after each step.
        """
        optimizer = self._latest()
        steps = optimizer.accumulation.steps if optimizer else None
        idle, self._steps = steps == self._steps, steps
        rounds = 0
        if optimizer is not None and optimizer.replicas is not None:
            rounds = optimizer.replicas.sync_schedule.rounds(optimizer.accumulation.steps)
        number = 0
        for one in self._started:
            waits = not (one.message.sent and rounds >= (one.rounds or 0))
            if waits and one.rounds is not None and not idle and one.optimizer is optimizer:
                break
            number += 1
        return self._take(number)

    def take_all(self) -> list[Sums]:
        """Return all sums that were started and not taken. Collective; waits for them."""
        return self._take(len(self._started))

    def drop(self) -> None:
        """Forget all sums that were started and not taken. Local."""
        for one in self._started:
            one.take_back()
        self._started.clear()

    def _take(self, number: int) -> list[Sums]:
        """Return the sums that were started first, those that were not sent in one message."""
        taken, self._started = self._started[:number], self._started[number:]
        message = StepMessage()
        for index, one in enumerate(taken):
            if one.message.ranks != self._collectives.size:
                one.take_back()
                taken[index] = again = one._replace(message=message)
                again.put()
        if any(one.message is message for one in taken):
            message.send(self._collectives)
        return [one.read() for one in taken]
