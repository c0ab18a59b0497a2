"""Norms of what lies in shards, the same number however it is cut."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from zero.collectives import Collectives
from zero.kernels import Kernels

# On the CPU elements are widened in runs that stay in the cache.
RUN = 1 << 16
# So many squares are summed in fp32, and their sums in fp64: the norm is right to about 1e-7, as
# elements are, in less than half the time.
ROW = 128
# Where fp32 is not enough: root mean squares below this vanish in part, as squares.
LEAST_RMS = 2.0**-48


def global_norm(
    collectives: Collectives,
    shards: Iterable[Tensor],
    p: float,
    kernels: Kernels,
) -> float:
    """The p-norm of all ranks' shards together; p may be infinite. Collective.

    Each rank tells its part in fp64, so the number of ranks does not show. Waits for the device.
    `kernels` sum squares on a device other than the CPU.
    """
    shards = [shard for shard in shards if shard.numel()]
    mine = None
    if p == 2 and any(shard.device.type != "cpu" for shard in shards):
        mine = [kernels.square_sums(shards).sum()]
    elif p == 2:
        mine = _in_fp32(shards)
    if mine is None:
        mine = [_power(run, p) for shard in shards for run in _runs(shard)]
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


def _in_fp32(shards: Sequence[Tensor]) -> list[Tensor] | None:
    """The sum of squares of shards on the CPU, in one fp64 number; None where fp32 will not do."""
    if any(shard.dtype == torch.float64 for shard in shards):
        return None
    rows = [row for shard in shards for row in _rows(shard)]
    if not rows:
        return []
    norm = torch.linalg.vector_norm(torch.cat(rows).double())
    least = LEAST_RMS * math.sqrt(sum(shard.numel() for shard in shards))
    return [norm.square()] if least < float(norm) < math.inf else None


def _rows(shard: Tensor) -> Iterator[Tensor]:
    """The 2-norms of the rows that a shard is cut into, in fp32, with what is left over."""
    for run in (shard,) if shard.dtype == torch.float32 else _runs(shard):
        wide, left = run.float(), run.numel() % ROW
        if left:
            yield torch.linalg.vector_norm(wide[-left:]).view(1)
            wide = wide[:-left]
        if len(wide):
            yield torch.linalg.vector_norm(wide.view(-1, ROW), dim=1)


def _runs(shard: Tensor) -> Iterable[Tensor]:
    return shard.split(RUN) if shard.device.type == "cpu" else (shard,)


def _power(run: Tensor, p: float) -> Tensor:
    """The sum of p-th powers of a run's elements, or their maximum: fp64, 0-dim."""
    norm: Tensor = torch.linalg.vector_norm(run.double(), p)
    return norm if math.isinf(p) else norm.pow(p)
