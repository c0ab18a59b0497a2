"""Schedules of nodes that train alone and exchange parameters every few steps.

Each node is a replica: its ranks average gradients in every step, and state is sharded over them.
What is exchanged travels as `zero.exchange.node_means` has it.

Sources: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020 (arXiv 1808.07217),
for the warm-up; Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019 (arXiv
1805.09767); Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
2023 (arXiv 2311.08105).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero.collectives import Collectives, Work
from zero.comm_hooks.codes import Code
from zero.exchange.node_means import NodeMeans
from zero.exchange.schedule import SyncSchedule
from zero.norms import NonFiniteGradientError
from zero.state import SYNC

LEAST_WEIGHT = 1e-6  # of a replica without samples, so that a mean of such is defined
DRIFT = "the difference between the parameters and those after the last exchange"
EXCHANGED, MOMENTUM = f"{SYNC}exchanged", f"{SYNC}momentum"  # keys of the outer state


class LocalSGDSchedule(SyncSchedule):
    """Average the parameters over nodes every `every` steps, after `warmup` synchronous steps.

    `node` are the ranks of this node, and `cross` one rank of each node, in the order of nodes.
    With `weighted`, a node counts in a mean in proportion to the weights of its steps since the
    last exchange, such as its samples; else all nodes count the same.
    """

    def __init__(
        self,
        world: Collectives,
        node: Collectives,
        cross: Collectives,
        *,
        sharded: bool,
        every: int,
        warmup: int = 0,
        weighted: bool = False,
    ) -> None:
        self.sharding, self.replica, self.replicas = node, cross.rank, cross.size
        self.weighted = weighted
        self._steps_weight = 0.0  # of the steps since the last exchange
        self._world, self._every, self._warmup = world, every, warmup
        self._means = NodeMeans(node, cross, sharded=sharded)

    def group(self, step: int) -> Collectives:
        """Return all ranks in the warm-up, and the node's after it."""
        return self._world if step < self._warmup else self.sharding

    def exchange_due(self, step: int) -> bool:
        """Return whether `every` steps have passed since the last exchange."""
        return step >= self._warmup and (step - self._warmup + 1) % self._every == 0

    def note_weight(self, step: int, weight: float) -> None:
        """Add the weight of a step of this node alone."""
        if step < self._warmup:
            self.load_weights(())
        else:
            self._steps_weight += weight

    def weights(self) -> list[float]:
        """Return the weight of the steps since the last exchange."""
        return [self._steps_weight] if self.weighted else []

    def load_weights(self, weights: Sequence[float]) -> None:
        """Continue from a weight; of several, from that of the oldest exchange."""
        self._steps_weight = max(weights, default=0.0)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over nodes. Collective."""
        weight = self._weight()
        scale = self._agree(weight).check() if self.weighted else 1.0
        self._average(tensors, weight, scale)

    def exchange(self, tensors: Sequence[Tensor]) -> None:
        """Replace parameters by their means over nodes. Collective.

        Raises NonFiniteGradientError on all ranks, before anything is sent, for parameters that are
        not finite on any of them.
        """
        finite = all(is_finite(tensor) for tensor in tensors)
        weight = self._weight()
        scale = self._agree(weight, finite=finite, what="a parameter").check()
        self.load_weights(())
        self._average(tensors, weight, scale)

    def _average(self, tensors: Sequence[Tensor], weight: float, scale: float) -> None:
        """Replace tensors by means over nodes, of which this one has a weight. Collective."""
        of_nodes = self._means.of(tensors, lambda tensor: tensor, weight=weight, scale=scale)
        for tensor, mean in of_nodes:
            tensor.copy_(mean)

    def _weight(self) -> float:
        """Return this node's weight in a mean of what steps since the last exchange made."""
        return max(self._steps_weight, LEAST_WEIGHT) if self.weighted else 1.0

    def _agree(
        self, weight: float, *, finite: bool = True, what: str = DRIFT
    ) -> "ExchangeAgreement":
        """Start to agree with all ranks on an exchange. Collective."""
        return ExchangeAgreement(
            self._world, replica=self.replica, weight=weight, finite=finite, what=what
        )


class OuterSchedule(LocalSGDSchedule):
    """Base class of schedules that keep the parameters after the last exchange.

    The difference between them and the parameters now is the outer gradient of a node. The copies
    have the same bits on all nodes. By default an exchange subtracts the mean outer gradient.
    """

    # Keys of what else is kept of each tensor; at first zeros.
    _beside: tuple[str, ...] = ()
    _code: Code | None = None  # of what is sent

    def __init__(self, *groups: Collectives, **options: Any) -> None:
        super().__init__(*groups, **options)
        self._outer: dict[Tensor, dict[str, Tensor]] = {}

    def before_update(self, step: int, tensors: Sequence[Tensor], *, equal: bool) -> None:
        """Copy the parameters that the first step after the warm-up finds. Collective."""
        if step < self._warmup:
            self._forget()  # of an earlier job, whose warm-up was shorter
        new = [tensor for tensor in tensors if tensor not in self._outer]
        if step < self._warmup or not new:
            return
        for tensor in new:
            copy = tensor.detach().clone()
            self._outer[tensor] = {EXCHANGED: copy} | self._zeros(tensor)
        if not equal:  # they were loaded, from a run of another schedule
            # All ranks with these tensors, and not others: nothing else may be agreed on.
            self._average([self._outer[tensor][EXCHANGED] for tensor in new], 1.0, 1.0)

    def exchange(self, tensors: Sequence[Tensor]) -> None:
        """Take the outer step. Collective.

        Raises NonFiniteGradientError on all ranks, before anything is sent or kept, if what is to
        be sent is not finite on any of them.
        """

        def value(tensor: Tensor) -> Tensor:
            return self._value(tensor, self._drift(tensor))

        finite = all(is_finite(value(tensor)) for tensor in tensors)
        weight = self._weight()
        scale = self._agree(weight, finite=finite).check()
        self.load_weights(())
        keep = self._keep if self._code else None
        for tensor, mean in self._means.of(
            tensors, value, self._code, keep, weight=weight, scale=scale
        ):
            self._outer_step(tensor, mean)
            tensor.copy_(self._outer[tensor][EXCHANGED])

    def state(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return the parameters after the last exchange, and what else is kept."""
        return self._outer.get(tensor, {})

    def load_state(self, tensor: Tensor, state: Mapping[str, Tensor]) -> None:
        """Restore the outer state; without any, the next step copies the parameters.

        Of another schedule's, what this one keeps beside begins with zeros.
        """
        self._outer.pop(tensor, None)
        if EXCHANGED in state:
            own = self._zeros(tensor)
            self._outer[tensor] = {
                key: torch.empty_like(tensor, requires_grad=False).copy_(state[key])
                if key in state
                else own[key]
                for key in (EXCHANGED, *self._beside)
            }

    def nbytes(self) -> int:
        """Return the bytes of the outer state."""
        return sum(kept.nbytes for outer in self._outer.values() for kept in outer.values())

    def expected_nbytes(self, tensors: Sequence[Tensor]) -> int:
        """Return the bytes of the outer state of all tensors."""
        return (1 + len(self._beside)) * sum(tensor.nbytes for tensor in tensors)

    def _zeros(self, tensor: Tensor) -> dict[str, Tensor]:
        return {key: torch.zeros_like(tensor, requires_grad=False) for key in self._beside}

    def _forget(self) -> None:
        """Drop the outer state."""
        self._outer.clear()

    def _drift(self, tensor: Tensor) -> Tensor:
        """Return this node's outer gradient of a tensor: a new one."""
        return self._outer[tensor][EXCHANGED] - tensor

    def _value(self, tensor: Tensor, drift: Tensor) -> Tensor:
        """Return what this node is to send for a tensor with an outer gradient, which is kept."""
        return drift

    def _keep(self, tensor: Tensor, left: Tensor) -> None:
        """Keep what the code of a tensor lacks."""
        raise NotImplementedError

    def _outer_step(self, tensor: Tensor, mean: Tensor) -> None:
        """Update the copy of a tensor by the mean of what was sent, which may be overwritten."""
        self._outer[tensor][EXCHANGED].sub_(mean)


class DiLoCoSchedule(OuterSchedule):
    """Take a step of Nesterov momentum, every `every` steps, towards the mean of the nodes.

    Its gradient is the difference between the parameters after the last exchange and the mean of
    the nodes' parameters now. Its update is that of torch.optim.SGD with nesterov=True. The other
    arguments are those of `LocalSGDSchedule`.
    """

    _beside: tuple[str, ...] = (MOMENTUM,)

    def __init__(
        self, *groups: Collectives, outer_lr: float, outer_momentum: float, **options: Any
    ) -> None:
        super().__init__(*groups, **options)
        self._lr, self._momentum = outer_lr, outer_momentum

    def _outer_step(self, tensor: Tensor, mean: Tensor) -> None:
        """Update the copy of a tensor by the mean outer gradient, which is overwritten."""
        exchanged, momentum = self._outer[tensor][EXCHANGED], self._outer[tensor][MOMENTUM]
        momentum.mul_(self._momentum).add_(mean)
        exchanged.add_(mean.add_(momentum, alpha=self._momentum), alpha=-self._lr)


class ExchangeAgreement:
    """Agreement of all ranks on an exchange, in flight: is it finite, and what do nodes weigh.

    Codes of what is not finite would pass for numbers, so nothing is applied before `check`.
    """

    def __init__(
        self,
        world: Collectives,
        *,
        replica: int,
        weight: float,
        finite: bool,
        what: str,
    ) -> None:
        """Send this rank's answer; `what` is the text for what is exchanged. Collective.

        `weight` is that of this rank's node.
        """
        self._what, self._ranks = what, world.size
        # The weight, and by rank 1 + its node if that is not finite, else 0.
        self._answers = torch.zeros(1 + world.size, dtype=torch.float64)
        self._answers[0] = weight
        if not finite:
            self._answers[1 + world.rank] = 1 + replica
        self._work: Work = world.all_reduce(self._answers)

    def passed(self) -> bool:
        """Return whether all answers have arrived and are yes. Local."""
        if not self._work.done():
            return False
        self._work.wait()
        return not bool(self._answers[1:].any())

    def check(self) -> float:
        """Wait for the answers, and return 1 / the mean weight of nodes.

        With it, a mean of what nodes have multiplied by their weights is the weighted mean. Raises
        NonFiniteGradientError on all ranks if one answer is no.
        """
        self._work.wait()
        weights = float(self._answers[0])
        failed = self._answers[1:].tolist()
        if any(failed):
            where = ", ".join(
                f"rank {rank} of node {int(node) - 1}" for rank, node in enumerate(failed) if node
            )
            raise NonFiniteGradientError(
                f"{self._what} is not finite in fp32 on {where}, and was not exchanged: continue "
                "from a checkpoint, with a lower learning rate"
            )
        return self._ranks / weights


def is_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite in fp32. Waits for the device."""
    if tensor.dtype in (torch.float64, torch.complex128):
        tensor = tensor.to(torch.complex64 if tensor.is_complex() else torch.float32)
    return bool(tensor.isfinite().all())
