"""Parameters that differ between the replicas of a sync schedule: their means and exchanges."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from zero.collectives import broadcast_from_rank_0
from zero.reducing_optimizer import ReducingOptimizer
from zero.state import LOCAL


class AveragingOptimizer(ReducingOptimizer):
    """The part of `ZeroOptimizer` that makes one model of the replicas of a sync schedule."""

    _buffers: Collection[Tensor]
    _in_sync = True
    _averaging = False  # within `averaged`, with parameters that differ outside of it
    _local: dict[Tensor, Tensor]  # then: this replica's own, by updated tensor
    _local_buffers: list[Tensor]

    @property
    def in_sync(self) -> bool:
        """True if all ranks hold the same parameters: False from a step of a group to an exchange.

        An exchange of a part of the parameters leaves it False. Also True in a block of `averaged`.
        Local; the same on all ranks.
        """
        return self._in_sync or self._averaging

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange parameters and buffers now, if they may differ between ranks. Collective.

        Between steps, for example after the last one. It changes the course of the training, but
        not after which steps the sync schedule exchanges. Raises RuntimeError in a block of
        `averaged`.
        """
        self._check_open()
        self._check_not_averaging()
        if self.in_sync:
            return
        self.wait_for_parameters()
        self._owned.sync_from_parameters()
        tensors = self._updated_tensors()
        if self.group.size == self._collectives.size:  # the state was loaded: steps are synchronous
            self.schedule.average(tensors)
        else:
            self.schedule.before_update(self._reduction.steps, tensors, equal=False)
            self.schedule.exchange(tensors)
        broadcast_from_rank_0(self._collectives, self._buffers)
        self._in_sync = True
        self._publish_parameters()

    @contextmanager
    def averaged(self) -> Iterator[bool]:
        """Return a context in which all ranks hold the means of their parameters. Collective.

        Buffers are rank 0's in it. At its end every rank gets back its own. Yields whether they
        differ; if the sync schedule has just exchanged them, nothing happens. For evaluation and
        saving: parameters must not be changed in it.
        """
        if self.in_sync:
            yield False
            return
        self._begin_averaging()
        try:
            yield True
        finally:
            self._end_averaging()

    @torch.no_grad()
    def publish_loaded(self) -> None:
        """Send parameters that `load_state_dict` has restored to where they are read. Collective.

        Nothing at stage 0. Needed only for a state that was made in a block of `averaged`.
        """
        self._publish_parameters()
        self.wait_for_parameters()

    @torch.no_grad()
    def _settle(self) -> None:
        """Wait for exchanges in flight. Collective, if there are any."""
        changes = self.schedule.settling_changes()
        if changes:
            self.wait_for_parameters()
            self._owned.sync_from_parameters()
        self.schedule.settle()
        if changes:
            self._publish_parameters()

    @torch.no_grad()
    def _begin_averaging(self) -> None:
        self._settle()
        self.wait_for_parameters()
        self._owned.sync_from_parameters()
        tensors = self._updated_tensors()
        self._local = {tensor: tensor.detach().clone() for tensor in tensors}
        self._local_buffers = [buffer.clone() for buffer in self._buffers]
        self.schedule.average(tensors)
        broadcast_from_rank_0(self._collectives, self._buffers)
        self._publish_parameters()
        self.wait_for_parameters()
        self._averaging = True

    @torch.no_grad()
    def _end_averaging(self) -> None:
        self._averaging = False
        for tensor, own in self._local.items():
            tensor.copy_(own)
        for buffer, own in zip(self._buffers, self._local_buffers, strict=True):
            buffer.copy_(own)
        self._local, self._local_buffers = {}, []
        self._publish_parameters()

    def _publish_parameters(self) -> None:
        """Send what this rank updates to where it is read; in flight on return. Collective."""
        self._owned.copy_to_parameters()
        self._owned.parameters.launch()

    def _updated_tensors(self) -> Sequence[Tensor]:
        """Return the tensors that the torch optimizer updates on this rank."""
        return [owned.tensor for owned in self._owned.pieces]

    def _sync_state(self, tensor: Tensor) -> dict[str, Tensor]:
        """Add the replica's own parameters to what the sync schedule keeps."""
        own = {LOCAL: self._local[tensor]} if self._averaging else {}
        return super()._sync_state(tensor) | own

    def _check_not_averaging(self) -> None:
        if self._averaging:
            raise RuntimeError(
                "parameters are means over nodes in a block of optimizer.averaged(), after which "
                "they get their own values back: call this after the block"
            )
