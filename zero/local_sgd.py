"""Schedules of nodes that train alone and exchange parameters every few steps.

Each node is a replica: its ranks average gradients in every step, and state is sharded over them.

    stage 0      a rank averages its part of each tensor over the nodes,
                 and the ranks of a node gather the parts
    stages 1, 2  a rank averages over the nodes what it updates

Sources: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020 (arXiv 1808.07217),
for the warm-up; Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019 (arXiv
1805.09767); Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
2023 (arXiv 2311.08105).
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero.collectives import Collectives, Work
from zero.comm_hooks import ChainedWork
from zero.layout import MIB, split
from zero.state import SYNC
from zero.sync_schedule import SyncSchedule

MESSAGE_BYTES = 25 * MIB  # that travel together
EXCHANGED, MOMENTUM = f"{SYNC}exchanged", f"{SYNC}momentum"  # keys of the outer state


class LocalSGDSchedule(SyncSchedule):
    """Average the parameters over nodes every `every` steps, after `warmup` synchronous steps.

    `node` are the ranks of this node, and `cross` one rank of each node, in the order of nodes.
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
    ) -> None:
        self.sharding, self.replica, self.replicas = node, cross.rank, cross.size
        self._world, self._cross = world, cross
        self._sharded, self._every, self._warmup = sharded, every, warmup

    def group(self, step: int) -> Collectives:
        """Return all ranks in the warm-up, and the node's after it."""
        return self._world if step < self._warmup else self.sharding

    def exchange_due(self, step: int) -> bool:
        """Return whether `every` steps have passed since the last exchange."""
        return step >= self._warmup and (step - self._warmup + 1) % self._every == 0

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over nodes. Collective."""
        for tensor, mean in self._means(tensors, lambda tensor: tensor):
            tensor.copy_(mean)

    def _means(
        self, tensors: Sequence[Tensor], value: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor, and the mean over nodes of what `value` returns for it. Collective.

        The mean is new, and has the tensor's shape. One message travels while another is used.
        """
        pending: deque[tuple[list[Tensor], Tensor, Work]] = deque()
        messages = list(_messages(tensors))
        while messages or pending:
            if messages:
                message = messages.pop(0)
                flat = torch.cat([value(tensor).detach().reshape(-1) for tensor in message])
                pending.append((message, flat, ChainedWork(self._sum(flat))))
            if len(pending) > 1 or not messages:
                message, flat, work = pending.popleft()
                work.wait()
                flat.div_(self.replicas)
                parts = flat.split([tensor.numel() for tensor in message])
                for tensor, part in zip(message, parts, strict=True):
                    yield tensor, part.view(tensor.shape)

    def _sum(self, flat: Tensor) -> Iterator[Work]:
        """Sum a flat tensor over nodes, in place. At stage 0, each rank of a node sums a part."""
        node = self.sharding
        if self._sharded or node.size == 1:
            yield self._cross.all_reduce(flat)
            return
        bounds, slot = split(flat.numel(), node.size), node.slot(node.rank)
        yield self._cross.all_reduce(flat[bounds[slot] : bounds[slot + 1]])
        yield node.all_gather(flat, bounds)


class DiLoCoSchedule(LocalSGDSchedule):
    """Take a step of Nesterov momentum, every `every` steps, towards the mean of the nodes.

    Its gradient is the difference between the parameters after the last exchange and the mean of
    the nodes' parameters now. Its update is that of torch.optim.SGD with nesterov=True. The other
    arguments are those of `LocalSGDSchedule`.
    """

    state_copies = 2

    def __init__(
        self, *groups: Collectives, outer_lr: float, outer_momentum: float, **options: Any
    ) -> None:
        super().__init__(*groups, **options)
        self._lr, self._momentum = outer_lr, outer_momentum
        self._outer: dict[Tensor, dict[str, Tensor]] = {}

    def before_update(self, step: int, tensors: Sequence[Tensor], *, equal: bool) -> None:
        """Copy the parameters that the first step after the warm-up finds. Collective."""
        if step < self._warmup:
            self._outer.clear()  # of an earlier job, whose warm-up was shorter
        new = [tensor for tensor in tensors if tensor not in self._outer]
        if step < self._warmup or not new:
            return
        for tensor in new:
            copy = tensor.detach().clone()
            self._outer[tensor] = {EXCHANGED: copy, MOMENTUM: torch.zeros_like(copy)}
        if not equal:  # they were loaded, from a run of another schedule
            self.average([self._outer[tensor][EXCHANGED] for tensor in new])

    def exchange(self, tensors: Sequence[Tensor]) -> None:
        """Take the outer step. Collective."""
        outer = self._outer
        for tensor, gradient in self._means(tensors, lambda t: outer[t][EXCHANGED] - t):
            exchanged, momentum = outer[tensor][EXCHANGED], outer[tensor][MOMENTUM]
            momentum.mul_(self._momentum).add_(gradient)
            exchanged.add_(gradient.add_(momentum, alpha=self._momentum), alpha=-self._lr)
            tensor.copy_(exchanged)

    def state(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return the parameters after the last exchange, and the momentum."""
        return self._outer.get(tensor, {})

    def load_state(self, tensor: Tensor, state: Mapping[str, Tensor]) -> None:
        """Restore the outer state; without any, the next step copies the parameters."""
        self._outer.pop(tensor, None)
        if state.keys() >= {EXCHANGED, MOMENTUM}:
            self._outer[tensor] = {
                key: torch.empty_like(tensor, requires_grad=False).copy_(state[key])
                for key in (EXCHANGED, MOMENTUM)
            }


def _messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield consecutive tensors of one dtype and device that travel together."""
    message: list[Tensor] = []
    nbytes = 0
    for tensor in tensors:
        same = message and (tensor.dtype, tensor.device) == (message[0].dtype, message[0].device)
        if message and not (same and nbytes + tensor.nbytes <= MESSAGE_BYTES):
            yield message
            message, nbytes = [], 0
        message.append(tensor)
        nbytes += tensor.nbytes
    if message:
        yield message
