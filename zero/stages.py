"""What each ZeRO stage keeps of a bucket: small policies behind one step.

    stage   gradients             optimizer state   parameters   traffic of a step
    0       all, summed           all               all          all-reduce
    1       all; shard summed     shard             all          reduce-scatter + all-gather
    2       shard                 shard             all          a reduce-scatter a micro-batch
                                                                 + all-gather

An all-reduce is a reduce-scatter and an all-gather: stage 1 moves the bytes of stage 0. In a world
of one there is nothing to shard, and no stage moves or copies anything.

Source of the stages: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC 2020 (arXiv 1910.02054).
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zero.alone import Alone, AloneByRound
from zero.collectives import Collectives, Work
from zero.flat_gradients import FlatGradients
from zero.gradients import Gradients
from zero.layout import Bucket
from zero.parameters import FlatParameters, ParameterGathers, StorageGuard
from zero.sharded_gradients import ShardedGradients


class Stage(Protocol):
    """How gradients are reduced, what of a bucket this rank updates, and how others get it."""

    gradients: Gradients
    every_micro_batch: bool  # whether gradients leave in every micro-batch, not once a step
    sharded: bool

    def owned(self, bucket: Bucket) -> tuple[int, int]:
        """The elements, from and to, that this rank updates."""

    def add(
        self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]
    ) -> Sequence[Tensor | None]:
        """Take parameters in, by name; give each bucket's flat parameters, where they are flat."""

    def settle(self) -> None:
        """Return when all parameters are what the last update made of them, on every rank."""

    def publish(self) -> None:
        """Hand updated parameters to the ranks that lack them. Collective, asynchronous."""

    def close(self) -> None:
        """Settle, and take all hooks from the model."""


class ReplicatedStage:
    """Stage 0: nothing sharded. Every rank keeps the whole sum and updates every parameter."""

    every_micro_batch = False
    sharded = False

    def __init__(
        self, collectives: Collectives, model: nn.Module | None, wire: torch.dtype | None
    ) -> None:
        self._collectives, self._wire = collectives, wire
        self.gradients: Gradients = FlatGradients(collectives, self._reduce, sharded=False)

    def owned(self, bucket: Bucket) -> tuple[int, int]:
        """See `Stage.owned`: all."""
        return 0, bucket.numel

    def add(
        self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]
    ) -> Sequence[Tensor | None]:
        """See `Stage.add`: parameters stay where they are."""
        return [None] * len(buckets)

    def settle(self) -> None:
        """See `Stage.settle`."""

    def publish(self) -> None:
        """See `Stage.publish`: every rank has made the same update."""

    def close(self) -> None:
        """See `Stage.close`."""

    def _reduce(self, bucket: Bucket, flat: Tensor) -> Work:
        return self._collectives.all_reduce(flat, wire=narrower(self._wire, flat.dtype))


class ShardedStateStage:
    """Stage 1: every rank sums, updates, and keeps optimizer state for, its shards only."""

    every_micro_batch = False
    sharded = True

    def __init__(
        self, collectives: Collectives, model: nn.Module | None, wire: torch.dtype | None
    ) -> None:
        self._collectives, self._wire = collectives, wire
        self._slot = collectives.slot(collectives.rank)
        self._parameters = FlatParameters(collectives)
        self._gathers = ParameterGathers(collectives, self._parameters, model)
        self.gradients: Gradients = FlatGradients(collectives, self._reduce, sharded=True)

    def owned(self, bucket: Bucket) -> tuple[int, int]:
        """See `Stage.owned`: its shard."""
        return bucket.shard(self._slot)

    def add(
        self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]
    ) -> Sequence[Tensor | None]:
        """See `Stage.add`: parameters become views into flat buckets."""
        flats = self._parameters.add(buckets, parameters)
        self._gathers.watch()
        return flats

    def settle(self) -> None:
        """See `Stage.settle`."""
        self._gathers.wait()
        self._parameters.check()

    def publish(self) -> None:
        """See `Stage.publish`: all-gathers, which the next forward waits for."""
        self._gathers.launch()

    def close(self) -> None:
        """See `Stage.close`."""
        self._gathers.close()

    def _reduce(self, bucket: Bucket, flat: Tensor) -> Work:
        wire = narrower(self._wire, flat.dtype)
        return self._collectives.reduce_scatter(flat, bucket.bounds, wire=wire)


class ShardedGradientStage(ShardedStateStage):
    """Stage 2: besides, no rank holds more gradients than its shards and a few buckets."""

    every_micro_batch = True

    def __init__(
        self, collectives: Collectives, model: nn.Module | None, wire: torch.dtype | None
    ) -> None:
        super().__init__(collectives, model, wire)
        self.gradients = ShardedGradients(collectives, self._reduce)


class Single:
    """Any stage in a world of one: its shard is all there is, and stays where it is.

    What a stage promises holds all the same: when gradients are taken off their parameters, and
    that parameters stay in their memory. So what trains alone trains on many ranks.
    """

    def __init__(self, stage: int) -> None:
        self.sharded = stage > 0
        self.every_micro_batch = stage == 2
        self.gradients: Gradients = AloneByRound() if self.every_micro_batch else Alone()
        self._homes = StorageGuard()

    def owned(self, bucket: Bucket) -> tuple[int, int]:
        """See `Stage.owned`: all."""
        return 0, bucket.numel

    def add(
        self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]
    ) -> Sequence[Tensor | None]:
        """See `Stage.add`: parameters stay where they are."""
        for name, parameter in parameters.items() if self.sharded else ():
            self._homes.add(name, parameter)
        return [None] * len(buckets)

    def settle(self) -> None:
        """See `Stage.settle`."""
        self._homes.check()

    def publish(self) -> None:
        """See `Stage.publish`: nobody lacks them."""

    def close(self) -> None:
        """See `Stage.close`."""


WIRES = (None, torch.float32, torch.bfloat16, torch.float16)
STAGES: dict[int, type[ReplicatedStage | ShardedStateStage]] = {
    0: ReplicatedStage,
    1: ShardedStateStage,
    2: ShardedGradientStage,
}


def make_stage(
    stage: int,
    collectives: Collectives,
    model: nn.Module | None,
    wire: torch.dtype | None = None,
) -> Stage:
    """The policy of a stage, whose sums travel in `wire`. ValueError for what does not exist."""
    if wire not in WIRES:
        known = ", ".join(map(str, WIRES))
        raise ValueError(f"wire_dtype is {wire!r}: choose one of {known}")
    if type(stage) is not int or stage not in STAGES:
        known = ", ".join(map(str, STAGES))
        raise ValueError(f"ZeRO stage {stage!r} does not exist here: choose one of {known}")
    if collectives.size == 1:
        return Single(stage)
    return STAGES[stage](collectives, model, wire)


def narrower(wire: torch.dtype | None, own: torch.dtype) -> torch.dtype | None:
    """The wire's dtype where it saves bytes; else None: a tensor travels in its own."""
    return wire if wire is not None and wire.itemsize < own.itemsize else None
