"""Exchanges that no node waits for, up to a bound: a stale-synchronous variant of the schedules.

A round is the steps between two exchanges. After its round r, a node sends its outer gradient of
that round alone, d(r): the parameters at the start of the round minus those at its end. It goes on
at once, and waits only if the mean of round r - `max_staleness` has not arrived. G(k), the
exchanged parameters, is G(k - 1) after an outer step by the mean of d(k) over nodes. So all nodes
pass through the same G(0), G(1), ... with the same bits, only at different times. After round r, a
node that has k starts its next round from G(k) - d(k + 1) - ... - d(r): from all that has arrived,
with its own changes.

    max_staleness 1, node 1 is slower    (waits: for round 0 of node 1; for its round 1)
    node 0    round 0 | round 1 | waits | round 2 | waits     | round 3
    node 1    round 0         | round 1           | round 2           | round 3

Sources: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", NIPS 2013, for the bound; Liu et al., "Asynchronous Local-SGD Training for Language
Modeling", 2024 (arXiv 2401.09135), for outer steps by what nodes send at different times. There, a
server takes an outer step for each node that arrives; here, for each round of all nodes.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero.collectives import Collectives
from zero.exchange.local_sgd import (
    EXCHANGED,
    DiLoCoSchedule,
    ExchangeAgreement,
    OuterSchedule,
    is_finite,
)
from zero.exchange.node_means import Message
from zero.exchange.schedule import Exchanged
from zero.exchange.sparse_loco import SparseLoCoSchedule


class _Round(NamedTuple):
    """The exchange of a round, in flight."""

    messages: list[Message]
    agreement: ExchangeAgreement
    own: dict[Tensor, Tensor]  # outer gradients of this node

    @property
    def nbytes(self) -> int:
        own = sum(tensor.nbytes for tensor in self.own.values())
        return own + sum(message.nbytes for message in self.messages)

    def arrived(self) -> bool:
        """Return whether it can be applied without a wait for other nodes. Local.

        False for a round that is not finite: it is an error, which all ranks raise after the same
        step.
        """
        return all([self.agreement.passed(), *(message.arrived() for message in self.messages)])


class StaleSchedule(OuterSchedule):
    """Exchange every `every` steps, and wait for a round at most `max_staleness` rounds later.

    By default what local SGD exchanges; the classes below combine it with other schedules, of which
    it has the arguments. Replicas are independent after the warm-up.
    """

    def __init__(self, *groups: Collectives, max_staleness: int, **options: Any) -> None:
        super().__init__(*groups, **options)
        self._max_staleness = max_staleness
        self._sent: deque[_Round] = deque()  # in the order of rounds
        self._between_rounds = False
        self._peak = 0  # bytes in flight

    def independent(self, step: int) -> bool:
        """Return True after the warm-up."""
        return step >= self._warmup

    def before_update(self, step: int, tensors: Sequence[Tensor], *, equal: bool) -> None:
        """Copy the parameters that the first step after the warm-up finds. Collective."""
        super().before_update(step, tensors, equal=equal)
        self._between_rounds = (step - self._warmup) % self._every == 0

    def after_update(self, step: int, tensors: Sequence[Tensor]) -> Exchanged:
        """Send the round that ends, and apply those that have arrived. Collective in the node.

        Waits for other nodes only beyond the bound. Raises NonFiniteGradientError on all ranks,
        after the last step in which the round may be waited for, for what is not finite on any.
        """
        if not self.exchange_due(step):
            return Exchanged.NOTHING
        self._send(tensors)
        self._apply(self._ready())
        for tensor in tensors:
            tensor.copy_(self._round_start(tensor))
        return Exchanged.SOME

    def exchange(self, tensors: Sequence[Tensor]) -> None:
        """Apply what is in flight, and exchange the steps of a round that has begun. Collective."""
        self.settle()
        if not self._between_rounds:
            super().exchange(tensors)
            return
        for tensor in tensors:
            tensor.copy_(self._outer[tensor][EXCHANGED])

    def settling_changes(self) -> bool:
        """Return whether rounds are in flight."""
        return bool(self._sent)

    def settle(self) -> None:
        """Apply all rounds in flight, also within a round. Collective, if there are any."""
        if not self._sent:
            return
        since = {tensor: self._drift(tensor) for tensor in self._outer}
        self._apply(len(self._sent))
        for tensor, drift in since.items():
            tensor.copy_(self._outer[tensor][EXCHANGED] - drift)

    def load_state(self, tensor: Tensor, state: Mapping[str, Tensor]) -> None:
        """Restore the outer state, and drop what is in flight."""
        self._sent.clear()
        super().load_state(tensor, state)

    def nbytes(self) -> int:
        """Return the bytes of the outer state, and of what was in flight at the peak."""
        return super().nbytes() + self._peak

    def expected_nbytes(self, tensors: Sequence[Tensor]) -> int:
        """Return the most bytes: a node sends a round before it waits for that of the bound."""
        own = sum(tensor.nbytes for tensor in tensors)
        in_flight = (1 + self._max_staleness) * (own + self._means.nbytes(tensors, self._code))
        return super().expected_nbytes(tensors) + in_flight

    def _forget(self) -> None:
        super()._forget()
        self._sent.clear()

    def _round_start(self, tensor: Tensor) -> Tensor:
        """Return a tensor as this node's current round has found it: a new one."""
        start = self._outer[tensor][EXCHANGED].clone()
        for sent in self._sent:
            if tensor in sent.own:  # otherwise it has been added since
                start.sub_(sent.own[tensor])
        return start

    def _drift(self, tensor: Tensor) -> Tensor:
        """Return this node's outer gradient of the current round."""
        return self._round_start(tensor).sub_(tensor)

    def _send(self, tensors: Sequence[Tensor]) -> None:
        """Start the exchange of the round that ends. Collective; does not wait."""
        finite = True
        own: dict[Tensor, Tensor] = {}

        def value(tensor: Tensor) -> Tensor:
            nonlocal finite
            own[tensor] = self._drift(tensor)
            sent = self._value(tensor, own[tensor])
            finite = is_finite(sent) and finite
            return sent

        keep, weight = self._keep if self._code else None, self._weight()
        self.load_weights(())
        messages = [*self._means.send(tensors, value, self._code, keep, weight=weight)]
        agreement = self._agree(weight, finite=finite)
        self._sent.append(_Round(messages, agreement, own))
        self._peak = max(self._peak, sum(sent.nbytes for sent in self._sent))

    def _ready(self) -> int:
        """Return how many of the oldest rounds to apply, alike on the node. Collective in it.

        Those that have arrived on all of its ranks, and those of the bound.
        """
        arrived = [float(sent.arrived()) for sent in self._sent]
        ranks = torch.tensor(arrived, dtype=torch.float64)
        self.sharding.all_reduce(ranks).wait()
        ready = [*takewhile(lambda count: count == self.sharding.size, ranks.tolist())]
        return max(len(ready), len(self._sent) - self._max_staleness)

    def _apply(self, count: int) -> None:
        """Take the outer steps of the oldest rounds. Collective; waits for them.

        Raises NonFiniteGradientError on all ranks before any is taken.
        """
        scales = [sent.agreement.check() for sent in [*self._sent][:count]]
        for scale in scales:
            for message in self._sent.popleft().messages:
                for tensor, mean in message.means(scale):
                    self._outer_step(tensor, mean)


class StaleDiLoCoSchedule(StaleSchedule, DiLoCoSchedule):
    """DiLoCo, in which no node waits for a round before it is `max_staleness` rounds old."""


class StaleSparseLoCoSchedule(StaleSchedule, SparseLoCoSchedule):
    """SparseLoCo, in which no node waits for a round before it is `max_staleness` rounds old."""
