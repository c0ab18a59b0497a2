"""Exchanges of parameters between nodes that train alone for some steps, composed of parts.

    step                                0         1         2         3
    every 2 steps after 1 of warm-up    world     node      node      node
    exchange after it                                       yes

Each node is a replica: its ranks average gradients in every step, and state is sharded over them.

Sources: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020 (arXiv 1808.07217),
for the warm-up; Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019 (arXiv
1805.09767); Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
2023 (arXiv 2311.08105); Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo",
2025 (arXiv 2508.15706). With a staleness: Ho et al., "More Effective Distributed ML via a Stale
Synchronous Parallel Parameter Server", NIPS 2013, for the bound; Liu et al., "Asynchronous
Local-SGD Training for Language Modeling", 2024 (arXiv 2401.09135), for outer steps by what nodes
send at different times: there of each node that arrives, here of a round of all nodes.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, takewhile
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from zero.collectives import Collectives
from zero.comm_hooks.codes import Code
from zero.exchange.node_means import MeansInFlight, NodeMeans
from zero.shard import NonFiniteGradientError
from zero.state import SYNC, UNSENT
from zero.step_message import StepMessage
from zero.sync_schedule import EveryStep

RESIDUAL = 0.95  # the part of what a code has lacked that the next one is given
LEAST_WEIGHT = 1e-6  # of a replica without samples, so that a mean of such is defined
DRIFT = "the difference between the parameters and those after the last exchange"
REFUSED = "a gradient or loss since the last exchange"
EXCHANGED, MOMENTUM = f"{SYNC}exchanged", f"{SYNC}momentum"  # keys of the outer state

# The extent of the exchange after a step. After "some", parameters have changed, and may still
# differ between replicas; after "all", replicas hold the same parameters.
Exchanged: TypeAlias = Literal["nothing", "some", "all"]


class OuterSGD:
    """Steps of the exchanged parameters by mean outer gradients; by default they are subtracted.

    With a momentum, steps are those of torch.optim.SGD with nesterov=True. Another outer optimizer
    has the same methods, and other `keys`: of the tensors of its state, which begin as zeros.
    """

    def __init__(self, lr: float = 1.0, momentum: float | None = None) -> None:
        self.keys = () if momentum is None else (MOMENTUM,)
        self._lr, self._momentum = lr, momentum

    def step(self, state: Mapping[str, Tensor], mean: Tensor) -> None:
        """Update the exchanged parameters in a state by a mean, which may be overwritten."""
        if self._momentum is not None:
            momentum = state[MOMENTUM].mul_(self._momentum).add_(mean)
            mean.add_(momentum, alpha=self._momentum)
        state[EXCHANGED].add_(mean, alpha=-self._lr)


class SentExchange(NamedTuple):
    """The messages of an exchange, of which one tells all ranks whether everything is finite.

    Codes of what is not finite would pass for numbers, so nothing is applied before `check`.
    """

    message: StepMessage  # with the answers, and what others have put into it
    what: str  # is exchanged
    messages: Sequence[MeansInFlight] = ()
    own: Mapping[Tensor, Tensor] = MappingProxyType({})  # the node's outer gradients in them

    @property
    def nbytes(self) -> int:
        """Bytes of the messages and of the node's own outer gradients."""
        own = sum(tensor.nbytes for tensor in self.own.values())
        return own + sum(message.nbytes for message in self.messages)

    def arrived(self) -> bool:
        """Return whether all can be applied without a wait for other nodes. Local.

        False for what is not finite: it is an error, which all ranks raise after the same step.
        """
        if not self.message.arrived or not all(m.work.done() for m in self.messages):
            return False
        sums = self.message.read()
        return not (sums[REFUSED] or sums[DRIFT])

    def check(self) -> float:
        """Wait for the answers, and return 1 / the mean weight of nodes.

        With it, a mean of what nodes have multiplied by their weights is the weighted mean. Raises
        NonFiniteGradientError on all ranks if one answer is no.
        """
        sums = self.message.read()
        if sums[REFUSED]:
            raise NonFiniteGradientError(f"{REFUSED} is not finite on {self._where(REFUSED)}")
        if sums[DRIFT]:
            raise NonFiniteGradientError(
                f"{self.what} is not finite in fp32 on {self._where(DRIFT)}, and was not "
                "exchanged: continue from a checkpoint, with a lower learning rate"
            )
        return self.message.ranks / sums["weight of nodes"]

    def _where(self, answer: str) -> str:
        by_rank = self.message.by_rank(answer)
        return ", ".join(f"rank {rank} of node {int(n) - 1}" for rank, n in by_rank.items() if n)


class Exchange(EveryStep):
    """Exchange parameters over nodes every `every` steps, after `warmup` synchronous steps.

    Gradients, batch weights and buffers of a step are exchanged over `group(step)` alone; state is
    sharded over `sharding`, the ranks of this node, in every step. If no rank of a group has a
    sample in a step, the group updates nothing.

    A round is the steps between two exchanges. Nothing crosses nodes in it: a node that has a step
    that is not finite updates nothing in it. If that is an error, all ranks learn of it, and raise,
    in the exchange.

    Between exchanges, parameters, buffers and optimizer state differ between nodes, the replicas.
    The tensors below are those that this rank updates, flat slices or whole parameters, in fp32 or
    wider: the same ones on ranks with the same slot in their node. All ranks get the same answers
    from `group`, `exchange_due` and `after_update`.

    `means` sends what is exchanged between nodes. With `weighted`, a node counts in a mean in
    proportion to the weights of its steps since the last exchange, such as its samples; else all
    nodes count the same.

    Without an `outer` optimizer, nodes send their parameters, which become the mean. With one, they
    keep the parameters after the last exchange, with the same bits on all of them, and send outer
    gradients: these minus the parameters now, which are small, and lose less to rounding. A `code`
    encodes outer gradients together with `RESIDUAL` times what it has lacked before, which is kept
    under the key `zero.state.UNSENT`.

    With a `max_staleness`, which needs an outer optimizer, no node waits for an exchange, up to a
    bound. After its round r, a node sends its outer gradient of that round alone,
    d(r): the parameters at the start of the round minus those at its end. It goes on at once, and
    waits only if the mean of round r - `max_staleness` has not arrived. G(k), the exchanged
    parameters, is G(k - 1) after an outer step by the mean of d(k) over nodes. So all nodes pass
    through the same G(0), G(1), ... with the same bits, only at different times, and a checkpoint
    has one copy. After round r, a node that has k starts its next round from
    G(k) - d(k + 1) - ... - d(r): from all that has arrived, with its own changes.

        max_staleness 1, node 1 is slower    (waits: for round 0 of node 1; for its round 1)
        node 0    round 0 | round 1 | waits | round 2 | waits     | round 3
        node 1    round 0         | round 1           | round 2           | round 3
    """

    def __init__(
        self,
        world: Collectives,
        means: NodeMeans,
        *,
        every: int,
        warmup: int = 0,
        weighted: bool = False,
        outer: OuterSGD | None = None,
        code: Code | None = None,
        max_staleness: int = 0,
    ) -> None:
        super().__init__(means.node)
        self.replica, self.replicas = means.cross.rank, means.cross.size
        self._world, self._means, self._warmup = world, means, warmup
        self.every, self.weighted, self.max_staleness = every, weighted, max_staleness
        self.message = StepMessage()
        """The message of the next exchange, into which others may put numbers."""
        self._outer, self._code = outer, code
        self._keys = (*outer.keys, *([UNSENT] if code else [])) if outer else ()
        self.weight = 0.0
        """Weight of the steps since the last exchange, the same on all ranks of a replica."""
        self._refused = False  # a step since the last exchange was not finite, which is an error
        self._state: dict[Tensor, dict[str, Tensor]] = {}
        self._flying: list[SentExchange] = []  # in the order in which they were sent
        self._peak = 0  # bytes in flight
        self._between_rounds = False

    def group(self, step: int) -> Collectives:
        """Return the ranks of a step: all in the warm-up, then the node's."""
        return self._world if step < self._warmup else self.sharding

    def alone(self, step: int) -> bool:
        """Return whether a replica takes a step by itself: several do, after the warm-up. Local."""
        return self.replicas > 1 and step >= self._warmup

    def exchange_due(self, step: int) -> bool:
        """Return whether a step is followed by an exchange, also if it is skipped."""
        return self.rounds(step + 1) > self.rounds(step)

    def rounds(self, steps: int) -> int:
        """Return the number of rounds that have ended after so many steps of the run. Local."""
        return max(0, steps - self._warmup) // self.every

    def refuse(self, why: str) -> None:
        """Let the exchange raise on all ranks, for a step of this replica. Local.

        Called by all ranks of the replica; its first one warns, once between two exchanges.
        """
        if not self._refused and self.sharding.rank == 0:
            warnings.warn(f"{why}: the next exchange raises on all ranks", stacklevel=4)
        self._refused = True

    def before_update(self, step: int, tensors: Sequence[Tensor], *, equal: bool) -> None:
        """Copy the parameters that the first step after the warm-up finds. Collective.

        `equal` states that all replicas hold the same.
        """
        self._between_rounds = (step - self._warmup) % self.every == 0
        if step < self._warmup:  # drop the state of an earlier job, whose warm-up was shorter
            self._state.clear()
            self._flying.clear()
            return
        new = [tensor for tensor in tensors if tensor not in self._state]
        if self._outer is None or not new:
            return
        for tensor in new:
            self._state[tensor] = {EXCHANGED: tensor.detach().clone()} | self._zeros(tensor)
        if not equal:  # they were loaded, from a run of another sync schedule
            # All ranks with these tensors, and not others: nothing else may be agreed on.
            for exchanged, mean in self._means.of([self._state[t][EXCHANGED] for t in new], _same):
                exchanged.copy_(mean)

    def after_update(self, step: int, tensors: Sequence[Tensor], weight: float) -> Exchanged:
        """Exchange parameters, if that is due. Collective.

        `weight` is that of the step of this node alone, such as its samples; 0 if it was skipped.
        Raises NonFiniteGradientError on all ranks, before anything is sent or applied, for what is
        not finite on any of them. With a staleness, collective in the node, and raises after the
        last step in which the round may be waited for.
        """
        self.weight = 0.0 if step < self._warmup else self.weight + weight
        if not self.exchange_due(step):
            return "nothing"
        if self.max_staleness:
            self._end_round(tensors)
            return "some"
        self._exchange(tensors)
        return "all"

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over nodes. Collective.

        Raises NonFiniteGradientError on all ranks if a node has refused a step since the exchange.
        """
        weight = self._weight()
        scale = self._agree(weight, "a parameter", finite=True).check()
        for tensor, mean in self._means.of(tensors, _same, weight=weight, scale=scale):
            tensor.copy_(mean)

    def exchange(self, tensors: Sequence[Tensor]) -> None:
        """Apply what is in flight, and exchange all parameters. Collective.

        With a staleness, nothing is exchanged between two rounds. Raises NonFiniteGradientError on
        all ranks, before anything is sent or kept, if what is to be sent is not finite on any of
        them.
        """
        self.apply_sent()
        if self.max_staleness and self._between_rounds:
            for tensor in tensors:
                tensor.copy_(self._state[tensor][EXCHANGED])
            return
        self._exchange(tensors)

    @property
    def in_flight(self) -> bool:
        """True if `apply_sent` will change parameters. The same on all ranks of the replica."""
        return bool(self._flying)

    def apply_sent(self) -> None:
        """Wait for exchanges in flight, and apply them. Collective, if there are any."""
        if not self.in_flight:
            return
        since = {tensor: self._drift(tensor) for tensor in self._state}
        for tensor, mean in self._receive(len(self._flying)):
            self._outer_step(tensor, mean)
        for tensor, drift in since.items():
            tensor.copy_(self._state[tensor][EXCHANGED] - drift)

    def state(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return the outer state. Local.

        After `apply_sent`. The same on all replicas, but for the keys in `zero.state.PER_REPLICA`.
        """
        return self._state.get(tensor, {})

    def load_state(self, tensor: Tensor, state: Mapping[str, Tensor]) -> None:
        """Restore the outer state; without any, the next step copies the parameters.

        Of another sync schedule, what this one keeps beside begins with zeros.
        """
        self._state.pop(tensor, None)
        if self._outer is None or EXCHANGED not in state:
            return
        given = {
            key: torch.empty_like(tensor, requires_grad=False).copy_(state[key])
            for key in (EXCHANGED, *self._keys)
            if key in state
        }
        self._state[tensor] = self._zeros(tensor) | given

    def begin_anew(self) -> None:
        """Forget what is in flight, and steps that were refused, after states were loaded. Local.

        On all ranks, also on those that own nothing.
        """
        self._flying.clear()
        self._refused = False

    def nbytes(self) -> int:
        """Return the bytes of the outer state, and of what was in flight at the peak."""
        kept = chain.from_iterable(state.values() for state in self._state.values())
        return sum(tensor.nbytes for tensor in kept) + self._peak

    def _agree(self, weight: float, what: str, *, finite: bool) -> SentExchange:
        """Send this rank's answers, and the weight of its node. Collective."""
        message, self.message = self.message, StepMessage()
        message.put("weight of nodes", weight)
        # By rank, 1 + its node if that is not finite, else 0.
        message.put(REFUSED, self._refused * (1.0 + self.replica), "max")
        message.put(DRIFT, (not finite and not self._refused) * (1.0 + self.replica), "max")
        message.send(self._world)
        return SentExchange(message, what)

    def _weight(self) -> float:
        """Return this node's weight in a mean."""
        return max(self.weight, LEAST_WEIGHT) if self.weighted else 1.0

    def _exchange(self, tensors: Sequence[Tensor]) -> None:
        parameters, weight = self._outer is None, self._weight()
        value, what = (_same, "a parameter") if parameters else (self._value, DRIFT)
        finite = all(is_finite(value(tensor)) for tensor in tensors)
        sent, self._refused = self._agree(weight, what, finite=finite), False
        scale = sent.check()
        means = self._means.of(
            tensors, value, code=self._code, keep=self._keep, weight=weight, scale=scale
        )
        for tensor, mean in means:
            if parameters:
                tensor.copy_(mean)
            else:
                self._outer_step(tensor, mean)
        self.weight = 0.0

    def _send(self, own: Mapping[Tensor, Tensor]) -> None:
        """Start the exchange of this node's outer gradients of a round, by tensor. Collective.

        Does not wait.
        """
        finite, weight = True, self._weight()
        self.weight = 0.0

        def value(tensor: Tensor) -> Tensor:
            nonlocal finite
            found = self._value(tensor, own[tensor])
            finite = is_finite(found) and finite
            return found

        sending = self._means.send([*own], value, code=self._code, keep=self._keep, weight=weight)
        messages = [*sending]
        sent, self._refused = self._agree(weight, DRIFT, finite=finite), False
        self._flying.append(sent._replace(messages=messages, own=own))
        self._peak = max(self._peak, sum(sent.nbytes for sent in self._flying))

    def _value(self, tensor: Tensor, drift: Tensor | None = None) -> Tensor:
        drift = self._drift(tensor) if drift is None else drift
        if self._code is None:
            return drift
        return drift.add(self._state[tensor][UNSENT], alpha=RESIDUAL)

    def _keep(self, tensor: Tensor, left: Tensor) -> None:
        self._state[tensor][UNSENT].copy_(left)

    def _drift(self, tensor: Tensor) -> Tensor:
        """Return a tensor at the start of the node's current round minus that now: a new one."""
        return self._round_start(tensor).sub_(tensor)

    def _round_start(self, tensor: Tensor) -> Tensor:
        start = self._state[tensor][EXCHANGED].clone()
        for sent in self._flying:
            if tensor in sent.own:  # otherwise it has been added since
                start.sub_(sent.own[tensor])
        return start

    def _end_round(self, tensors: Sequence[Tensor]) -> None:
        """Send a round, and apply those that have arrived on all ranks of the node.

        Waits for those of the bound.
        """
        self._send({tensor: self._drift(tensor) for tensor in tensors})
        arrived = [float(sent.arrived()) for sent in self._flying]
        ranks = torch.tensor(arrived, dtype=torch.float64, device="cpu")
        self.sharding.all_reduce(ranks).wait()
        ready = [*takewhile(lambda count: count == self.sharding.size, ranks.tolist())]
        count = max(len(ready), len(self._flying) - self.max_staleness)
        for tensor, mean in self._receive(count):
            self._outer_step(tensor, mean)
        for tensor in tensors:
            tensor.copy_(self._round_start(tensor))

    def _receive(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Wait for what was sent first, and yield each tensor with its mean. Collective.

        Raises NonFiniteGradientError on all ranks before anything is applied.
        """
        flying = self._flying[:count]
        scales = [sent.check() for sent in flying]
        del self._flying[:count]
        for sent, scale in zip(flying, scales, strict=True):
            for message in sent.messages:
                yield from message.means(scale)

    def _outer_step(self, tensor: Tensor, mean: Tensor) -> None:
        assert self._outer is not None
        state = self._state[tensor]
        self._outer.step(state, mean)
        tensor.copy_(state[EXCHANGED])

    def _zeros(self, tensor: Tensor) -> dict[str, Tensor]:
        return {key: torch.zeros_like(tensor, requires_grad=False) for key in self._keys}


def is_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite in fp32. Waits for the device."""
    if tensor.dtype in (torch.float64, torch.complex128):
        tensor = tensor.to(torch.complex64 if tensor.is_complex() else torch.float32)
    return bool(tensor.isfinite().all())


def _same(tensor: Tensor) -> Tensor:
    return tensor
