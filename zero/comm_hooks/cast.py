"""Hooks that sum gradients as they are, or cast to a narrower dtype between nodes."""

from functools import partial

import torch

from zero.collectives import Work
from zero.comm_hooks import CommHook, ReducibleBucket
from zero.precision import narrower


class CastHook(CommHook):
    """All-reduce or reduce-scatter in which sums travel between nodes in `wire_dtype`.

    The collectives round each node's sum and add the rounded sums in fp32; within a node nothing is
    rounded. Buckets whose dtype is no wider than `wire_dtype` travel as they are.
    """

    def __init__(self, wire_dtype: torch.dtype | None) -> None:
        self.wire_dtype = wire_dtype

    def __call__(self, bucket: ReducibleBucket) -> Work:
        """Start the collective."""
        return bucket.reduce(narrower(self.wire_dtype, bucket.gradients.dtype))


HOOKS = {
    "uncompressed": partial(CastHook, None),
    "fp32": partial(CastHook, torch.float32),  # narrower than fp64 gradients
    "bf16": partial(CastHook, torch.bfloat16),
    "fp16": partial(CastHook, torch.float16),
}
