"""Parameters that differ between the replicas of a sync schedule: their exchanges and means."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zero.collectives import Collectives, broadcast_from_rank_0
from zero.exchange.exchange import Exchange
from zero.norms import NonFiniteGradientError
from zero.shard import OptimizerShard
from zero.state import LOCAL


class Replicas:
    """The parameters of this rank beside those of other replicas of a sync schedule.

    `collectives` are those of all replicas. The buffers of `model` follow the parameters.
    """

    def __init__(
        self,
        schedule: Exchange,
        shard: OptimizerShard,
        collectives: Collectives,
        model: nn.Module | None,
    ) -> None:
        self._schedule, self._shard = schedule, shard
        self._collectives = collectives
        self._buffers = persistent_buffers(model) if model is not None else list[Tensor]
        self.equal = True  # outside of `averaged`, all replicas have the same parameters
        self._local: dict[Tensor, Tensor] = {}  # within: this replica's own, by updated tensor
        self._averaging = False

    @property
    def in_sync(self) -> bool:
        """True if all ranks hold the same parameters."""
        return self.equal or self._averaging

    def check_not_averaging(self) -> None:
        """Raise RuntimeError within `averaged`."""
        if self._averaging:
            raise RuntimeError(
                "parameters are means over nodes in a block of optimizer.averaged(), after which "
                "they get their own values back: call this after the block"
            )

    def state(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return what the schedule keeps for an updated tensor, and this replica's own values."""
        own = {LOCAL: self._local[tensor]} if self._averaging else {}
        return self._schedule.state(tensor) | own

    def end_step(self, step: int, weight: float, *, updated: bool) -> None:
        """Exchange what is due after a step over `weight` samples, and publish. Collective.

        The all-gathers of parameters are in flight on return.
        """
        schedule, group = self._schedule, self._schedule.group(step)
        self.equal = self.equal and group.size == self._collectives.size
        schedule.note_weight(step, weight if updated else 0.0)
        try:
            exchanged = schedule.after_update(step, self._shard.tensors)
        except NonFiniteGradientError:  # on all ranks, which keep what they have updated
            self._shard.publish()
            raise
        nothing = exchanged == "nothing"
        of_replica = nothing or schedule.independent(step)
        broadcast_from_rank_0(group if of_replica else self._collectives, self._buffers())
        self.equal = self.equal or exchanged == "all"
        if updated or not nothing:
            self._shard.publish()

    def exchange(self, step: int) -> None:
        """Exchange parameters and buffers before a step, if they may differ. Collective."""
        self.check_not_averaging()
        if self.in_sync:
            return
        self._complete()
        tensors = self._shard.tensors
        if self._schedule.group(step).size == self._collectives.size:
            self._schedule.average(tensors)  # the state was loaded: steps are synchronous
        else:
            self._schedule.before_update(step, tensors, equal=False)
            self._schedule.exchange(tensors)
        broadcast_from_rank_0(self._collectives, self._buffers())
        self.equal = True
        self._shard.publish()

    @contextmanager
    def averaged(self) -> Iterator[bool]:
        """Return a context in which parameters are means over replicas. Collective.

        Yields whether they are other ones outside.
        """
        if self.in_sync:
            yield False
            return
        with torch.no_grad():
            self.settle()
            self._complete()
            tensors = self._shard.tensors
            self._local = {tensor: tensor.detach().clone() for tensor in tensors}
            local_buffers = [buffer.clone() for buffer in self._buffers()]
            self._schedule.average(tensors)
            broadcast_from_rank_0(self._collectives, self._buffers())
            self._shard.publish()
            self._shard.wait()
        self._averaging = True
        try:
            yield True
        finally:
            self._averaging = False
            with torch.no_grad():
                for tensor, own in self._local.items():
                    tensor.copy_(own)
                for buffer, own in zip(self._buffers(), local_buffers, strict=True):
                    buffer.copy_(own)
                self._local = {}
                self._shard.publish()

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for exchanges in flight. Collective, if there are any."""
        if self._schedule.unsettled:
            self._complete()
        if self._schedule.settle():
            self._shard.publish()

    def _complete(self) -> None:
        self._shard.wait()
        self._shard.take_changes()


def persistent_buffers(model: nn.Module) -> Callable[[], list[Tensor]]:
    """Return a function of the buffers in a model's state dict, each once, as they are when called.

    A module may assign another tensor to a buffer, and `model.double()` does. Buffers outside of
    the state dict are taken for constants, which are equal on all ranks.
    """
    modules = [module for module in model.modules() if module._buffers]

    def held() -> list[Tensor]:
        found = [
            buffer
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
        return list(dict.fromkeys(found))

    return held
