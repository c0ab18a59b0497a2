"""Parameters that differ between the replicas of a sync schedule: their exchanges and means."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zero.collectives import AllRanksError, Collectives, broadcast_from_rank_0
from zero.comparison import StepComparison
from zero.exchange.exchange import Exchange
from zero.kernels import checksum
from zero.parameter_watch import BUFFERS, dense_parts
from zero.precision import LossScale
from zero.shard import NonFiniteGradientError, OptimizerShard, ParamGroup
from zero.state import LOCAL
from zero.step_message import StepMessage


class Replicas:
    """The parameters of this rank beside those of other replicas, which exchange them.

    `collectives` are those of all replicas. Buffers, and parameters that no optimizer trains,
    become rank 0's when parameters are exchanged.
    """

    def __init__(
        self,
        sync_schedule: Exchange,
        shard: OptimizerShard,
        collectives: Collectives,
        comparison: StepComparison,
        scale: LossScale,
    ) -> None:
        self.sync_schedule, self._shard, self._collectives = sync_schedule, shard, collectives
        self._comparison, self._scale = comparison, scale
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
                "they get their own values back: call this after the block, and catch exceptions "
                "within it"
            )

    def state(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return the sync schedule's state of an updated tensor, and this replica's own values."""
        own = {LOCAL: self._local[tensor]} if self._averaging else {}
        return self.sync_schedule.state(tensor) | own

    def numbers(self) -> list[float]:
        """Return the numbers that this replica has of its own. Local.

        The weight of its steps since the last exchange, its loss scale, and its steps since that
        has changed.
        """
        scale = self._scale.state_dict()
        return [self.sync_schedule.weight, scale["value"], float(scale["good_steps"])]

    def state_dict(self) -> dict[str, Any]:
        """Return entries of the optimizer's state dictionary. Local."""
        return {"in_sync": self.equal, "sync_weights": self.numbers()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; older numbers are the weight alone. Local.

        What is absent stays as it is.
        """
        numbers = state.get("sync_weights", [self.sync_schedule.weight])
        self.sync_schedule.weight = numbers[0] if numbers else 0.0
        if len(numbers) > 1:
            own = {"dynamic": True, "value": numbers[1], "good_steps": numbers[2]}
            self._scale.load_state_dict(own)
        if self.sync_schedule.replicas > 1:
            self.equal = state.get("in_sync", self.equal)

    def compare(
        self,
        groups: Sequence[ParamGroup],
        without: frozenset[str],
        step: int,
        *,
        differ: bool = False,
    ) -> None:
        """Compare what replicas have alike, while they are in sync. Collective over all ranks.

        Raises on all of them what `StepComparison.compare` raises, also if ranks of a replica
        `differ`.
        """
        ranks, in_sync = self._collectives, self.in_sync
        message = StepMessage()
        message.put("differ", differ)
        self._comparison.put_of_replica(message, groups, step, in_sync=in_sync)
        message.send(ranks)
        if message.read()["differ"] or not message.same("replica"):
            self._comparison.compare(ranks, groups, without, step, in_sync=in_sync)

    def before_update(self, step: int) -> None:
        """Copy the parameters that the first step of a replica alone finds. Collective."""
        self.sync_schedule.before_update(step, self._shard.tensors, equal=self.in_sync)

    def end_step(self, step: int, weight: float, *, updated: bool) -> None:
        """Exchange what is due after a step over `weight` samples, and publish. Collective.

        The all-gathers of parameters are in flight on return.
        """
        group = self.sync_schedule.group(step)
        self.equal = self.equal and group.size == self._collectives.size
        own = weight if updated else 0.0
        try:
            exchanged = self.sync_schedule.after_update(step, self._shard.tensors, own)
        except NonFiniteGradientError:  # on all ranks, which keep what they have updated
            self._shard.publish()
            raise
        if exchanged == "all":
            self._overwrite(self._others())
        else:
            constant = self._comparison.constant and group.size == self._shard.sharding.size
            self._shard.watch.overwrite_buffers(group, constant=constant)
        self.equal = self.equal or exchanged == "all"
        if updated or exchanged != "nothing":
            self._shard.publish()

    def exchange(self, step: int) -> None:
        """Exchange parameters and buffers before a step, if they may differ. Collective."""
        self.check_not_averaging()
        if self.in_sync:
            return
        self._complete()
        tensors = self._shard.tensors
        if self.sync_schedule.group(step).size == self._collectives.size:
            self.sync_schedule.average(tensors)  # the state was loaded: steps are synchronous
        else:
            self.sync_schedule.before_update(step, tensors, equal=False)
            self.sync_schedule.exchange(tensors)
        self._overwrite(self._others())
        self.equal = True
        self._shard.publish()

    @contextmanager
    def averaged(self) -> Iterator[bool]:
        """Return a context in which parameters are means over replicas. Collective.

        Yields whether they are other ones outside. Where shards have to be gathered at its end, an
        exception that is no `AllRanksError` is raised without that: it may be of this rank alone,
        and others would be waited for before anyone sees it. Parameters stay means then.
        """
        if self.in_sync:
            yield False
            return
        with torch.no_grad():
            self.apply_sent()
            self._complete()
            tensors = self._shard.tensors
            self._local = {tensor: tensor.detach().clone() for tensor in tensors}
            self.sync_schedule.average(tensors)
            others = self._others()
            own_others = [tensor.clone() for tensor in others]
            self._overwrite(others)
            self._shard.publish()
            self._shard.wait()
        self._averaging = ends = True
        try:
            yield True
        except BaseException as error:
            ends = isinstance(error, AllRanksError) or not self._shard.sharded
            raise
        finally:
            if ends:
                self._averaging = False
                with torch.no_grad():
                    for tensor, own in self._local.items():
                        tensor.copy_(own)
                    for tensor, own in zip(others, own_others, strict=True):
                        tensor.copy_(own)
                    self._local = {}
                    self._shard.publish()

    @torch.no_grad()
    def apply_sent(self) -> None:
        """Wait for exchanges in flight, and apply them. Collective, if there are any."""
        if self.sync_schedule.in_flight:
            self._complete()
            self.sync_schedule.apply_sent()
            self._shard.publish()

    def _others(self) -> list[Tensor]:
        """Return buffers, and untrained parameters of which a rank has other values. Collective."""
        persistent, others = self._shard.watch.buffers()
        buffers = persistent + others
        if self.equal:
            return buffers
        untrained = self._shard.watch.untrained().items()
        parts = [part for name, p in untrained for _, part in dense_parts(name, p)]
        if not parts:
            return buffers
        own = torch.stack([checksum([part]).cpu() for part in parts])
        first = own.clone()
        self._collectives.broadcast(first).wait()
        apart = (own != first).long()
        self._collectives.all_reduce(apart).wait()
        return buffers + [p for p, count in zip(parts, apart.tolist(), strict=True) if count]

    def _overwrite(self, tensors: list[Tensor]) -> None:
        broadcast_from_rank_0(self._collectives.named(BUFFERS), tensors)

    def _complete(self) -> None:
        self._shard.wait()
        self._shard.take_changes()
