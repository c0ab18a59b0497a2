"""Exchanges that no node waits for, up to a bound: a stale-synchronous variant.

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
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from zero.collectives import Collectives
from zero.exchange.exchange import EXCHANGED, Exchange, Sent
from zero.exchange.schedule import Exchanged


class StaleExchange(Exchange):
    """An `Exchange` with an outer optimizer that waits for a round `max_staleness` rounds later.

    Replicas are independent after the warm-up. It has no fragments.
    """

    def __init__(self, *groups: Collectives, max_staleness: int, **options: Any) -> None:
        super().__init__(*groups, **options)
        self._max_staleness = max_staleness
        # In flight, in their order, with this node's outer gradients.
        self._rounds: deque[tuple[Sent, dict[Tensor, Tensor]]] = deque()
        self._between_rounds = False

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
            return "nothing"
        own = {tensor: self._drift(tensor) for tensor in tensors}
        self._rounds.append((self._send(tensors, 0, own.__getitem__), own))
        self._note_peak()
        self._apply_rounds(self._ready())
        for tensor in tensors:
            tensor.copy_(self._round_start(tensor))
        return "some"

    def exchange(self, tensors: Sequence[Tensor]) -> None:
        """Apply what is in flight, and exchange the steps of a round that has begun. Collective."""
        self.settle()
        if not self._between_rounds:
            super().exchange(tensors)
            return
        for tensor in tensors:
            tensor.copy_(self._state[tensor][EXCHANGED])

    def settling_changes(self) -> bool:
        """Return whether rounds are in flight."""
        return bool(self._rounds)

    def settle(self) -> None:
        """Apply all rounds in flight, also within a round. Collective, if there are any."""
        if not self._rounds:
            return
        since = {tensor: self._drift(tensor) for tensor in self._state}
        self._apply_rounds(len(self._rounds))
        for tensor, drift in since.items():
            tensor.copy_(self._state[tensor][EXCHANGED] - drift)

    def _expected_in_flight(self, tensors: Sequence[Tensor]) -> int:
        """Return the most bytes: a node sends a round before it waits for that of the bound."""
        own = sum(tensor.nbytes for tensor in tensors)
        return (1 + self._max_staleness) * (own + self._means.nbytes(tensors, self._code))

    def _round_start(self, tensor: Tensor) -> Tensor:
        """Return a tensor as this node's current round has found it: a new one."""
        start = self._state[tensor][EXCHANGED].clone()
        for _, own in self._rounds:
            if tensor in own:  # otherwise it has been added since
                start.sub_(own[tensor])
        return start

    def _drift(self, tensor: Tensor) -> Tensor:
        return self._round_start(tensor).sub_(tensor)

    def _ready(self) -> int:
        """Return how many of the oldest rounds to apply, alike on the node. Collective in it.

        Those that have arrived on all of its ranks, and those of the bound.
        """
        arrived = [float(sent.arrived()) for sent, _ in self._rounds]
        ranks = torch.tensor(arrived, dtype=torch.float64)
        self.sharding.all_reduce(ranks).wait()
        ready = [*takewhile(lambda count: count == self.sharding.size, ranks.tolist())]
        return max(len(ready), len(self._rounds) - self._max_staleness)

    def _apply_rounds(self, count: int) -> None:
        """Take the outer steps of the oldest rounds. Collective; waits for them.

        Raises NonFiniteGradientError on all ranks before any is taken.
        """
        scales = [sent.check() for sent, _ in [*self._rounds][:count]]
        for scale in scales:
            sent, _ = self._rounds.popleft()
            for tensor, mean in sent.means(scale):
                self._outer_step(tensor, mean)

    def _note_peak(self) -> None:
        nbytes = [s.nbytes + sum(own.nbytes for own in d.values()) for s, d in self._rounds]
        self._peak = max(self._peak, sum(nbytes))

    def _drop(self, tensor: Tensor | None = None) -> None:
        super()._drop(tensor)
        self._rounds.clear()
