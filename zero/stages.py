"""ZeRO stages: what of a bucket a rank owns, and how updated parameters reach other ranks.

    stage   gradients             optimizer state   parameters   traffic of a step
    0       all, summed           all               all          all-reduce
    1       all; shard summed     shard             all          reduce-scatter + all-gather
    2       shard                 shard             all          reduce-scatter a micro-batch
                                                                 + all-gather

An all-reduce is a reduce-scatter and an all-gather, so stage 1 moves the bytes of stage 0.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020 (arXiv 1910.02054).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zero.collectives import Collectives
from zero.gradients import FlatGradients, Gradients
from zero.layout import Bucket
from zero.parameters import FlatParameters, ParameterGathers
from zero.precision import check_travel_dtype
from zero.sharded_gradients import ShardedGradients


class ReplicatedStage:
    """Stage 0: every rank has all gradients and updates all parameters."""

    number = 0
    every_micro_batch = False  # whether buckets are reduced in every micro-batch, not once a step
    sharded = False
    gather_dtype: torch.dtype | None = None  # to which updated parameters are rounded
    gather_bytes = 0  # of memory that only the all-gathers need

    def __init__(self, collectives: Collectives) -> None:
        self.sharding = collectives
        self.gradients: Gradients = FlatGradients(collectives, sharded=False)

    def owned(self, bucket: Bucket) -> tuple[int, int]:
        """Return the range of elements that this rank updates: all."""
        return 0, bucket.numel

    def add(
        self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]
    ) -> Sequence[Tensor | None]:
        """Add parameters by name; return each bucket's flat parameters, None if not flat."""
        return [None] * len(buckets)

    def wait_for_parameters(self) -> None:
        """Return when all parameters hold the last update."""

    def publish(self) -> None:
        """Send updated parameters to other ranks: all have made the same update."""

    def close(self) -> None:
        """Remove all hooks from the model."""


class ShardedStateStage(ReplicatedStage):
    """Stage 1: every rank updates, and has the optimizer state of, its shards only."""

    number = 1
    sharded = True

    def __init__(
        self, collectives: Collectives, model: nn.Module | None, gather_dtype: torch.dtype | None
    ) -> None:
        self.sharding, self.gather_dtype = collectives, gather_dtype
        self._slot = collectives.slot(collectives.rank)
        self._parameters = FlatParameters(collectives, gather_dtype)
        self._gathers = ParameterGathers(collectives, self._parameters, model)
        self.gradients = self._make_gradients(collectives)

    def _make_gradients(self, collectives: Collectives) -> Gradients:
        return FlatGradients(collectives, sharded=True)

    def owned(self, bucket: Bucket) -> tuple[int, int]:
        """Return the range of elements that this rank updates: its shard."""
        return bucket.shard(self._slot)

    def add(
        self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]
    ) -> Sequence[Tensor | None]:
        """Turn parameters into views of flat buckets, and return these. Collective."""
        flats = self._parameters.add(buckets, parameters)
        self.gather_bytes = self._parameters.gather_bytes
        self._gathers.watch()
        return flats

    def wait_for_parameters(self) -> None:
        """Wait for all-gathers in flight; RuntimeError if the model was moved."""
        self._gathers.wait()
        self._parameters.check_addresses()

    def publish(self) -> None:
        """Start the all-gathers, for which the next forward waits. Collective."""
        self._gathers.launch()

    def close(self) -> None:
        """Wait for all-gathers in flight, and remove all hooks from the model."""
        self._gathers.close()


class ShardedGradientStage(ShardedStateStage):
    """Stage 2: a rank keeps gradients of its shards, and of the few buckets in use."""

    number = 2
    every_micro_batch = True

    def _make_gradients(self, collectives: Collectives) -> Gradients:
        return ShardedGradients(collectives)


STAGES = (0, 1, 2)


def check_stage(stage: int) -> None:
    """Raise ValueError for a stage that does not exist."""
    if type(stage) is not int or stage not in STAGES:
        known = ", ".join(map(str, STAGES))
        raise ValueError(f"ZeRO stage {stage!r} does not exist here: choose one of {known}")


def make_stage(
    stage: int,
    collectives: Collectives,
    model: nn.Module | None = None,
    gather_dtype: torch.dtype | None = None,
) -> ReplicatedStage:
    """Return a stage whose shards are those of `collectives`.

    `gather_dtype` is that of parameters in the all-gather of stages 1 and 2. Raises ValueError for
    a stage or dtype that does not exist.
    """
    check_travel_dtype("gather_dtype", gather_dtype)
    check_stage(stage)
    if stage == 0:
        return ReplicatedStage(collectives)
    sharded = ShardedStateStage if stage == 1 else ShardedGradientStage
    return sharded(collectives, model, gather_dtype)
