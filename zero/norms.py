"""Norms of what lies in shards, the same number however it is cut."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from zero.collectives import Collectives

# On the CPU elements are widened to fp64 in runs that stay in the cache.
RUN = 1 << 16


def global_norm(collectives: Collectives, shards: Iterable[Tensor], p: float) -> float:
    """The p-norm of all ranks' shards together; p may be infinite. Collective.

    Summed in fp64, so that cuts and the number of ranks do not show. Waits for the device.
    """
    mine = [_power(run, p) for shard in shards if shard.numel() for run in _runs(shard)]
    if math.isinf(p):
        # Collectives sum: every rank tells its own maximum in a place of its own.
        maxima = torch.zeros(collectives.size, dtype=torch.float64)
        if mine:
            maxima[collectives.rank] = torch.stack(mine).max()
        collectives.all_reduce(maxima).wait()
        return float(maxima.max())
    total = torch.zeros(1, dtype=torch.float64)
    if mine:
        total += torch.stack(mine).sum().cpu()
    collectives.all_reduce(total).wait()
    return math.pow(float(total), 1 / p)


def _runs(shard: Tensor) -> Iterable[Tensor]:
    return shard.split(RUN) if shard.device.type == "cpu" else (shard,)


def _power(run: Tensor, p: float) -> Tensor:
    """The sum of p-th powers of a run's elements, or their maximum: fp64, 0-dim."""
    norm: Tensor = torch.linalg.vector_norm(run.double(), p)
    return norm if math.isinf(p) else norm.pow(p)
