"""Norms of sharded gradients, clipping, and the search for non-finite values."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from zero.collectives import Collectives, gather_objects
from zero.kernels import runs, square_sums

# Rows take a sixth of the time of conversions to fp64, and differ by less than fp32 can tell.
ROW, LEAST_ROWS = 256, 64
EXACT = 1e-20, 1e30  # sums of squares between which fp32 holds all squares that count


class NonFiniteGradientError(ArithmeticError):
    """The gradient holds an infinity or a NaN. Raised by every rank alike; nothing was updated."""


def global_norm(
    collectives: Collectives,
    shards: Iterable[Tensor],
    p: float,
    beside: Tensor | None = None,
) -> float:
    """Return the p-norm of all ranks' shards together; p may be infinite. Collective.

    Sums are made in fp64, so the result depends on the number of ranks by rounding only: of fp32
    tensors on the CPU, squares of ROW elements in fp32, and their sums in fp64. `beside`, a flat
    fp64 tensor, travels with them, and becomes its sum over ranks. Waits for the device.
    """
    shards = [shard.reshape(-1) for shard in shards if shard.numel()]
    shards = [shard.abs() if shard.is_complex() else shard for shard in shards]
    if p == 2 and any(shard.device.type != "cpu" for shard in shards):
        parts = [square_sums(shards).sum()]
    elif p == 2:
        parts = [_square_sum(shard) for shard in shards]
    else:
        parts = [_power_sum(run, p) for shard in shards for run in runs(shard)]
    # Collectives sum, so for a maximum every rank writes into an element of its own.
    total = torch.zeros(collectives.size if math.isinf(p) else 1, dtype=torch.float64, device="cpu")
    if parts and math.isinf(p):
        total[collectives.rank] = torch.stack(parts).max()
    elif parts:
        total[0] = torch.stack(parts).sum()
    message = total if beside is None else torch.cat([total, beside])
    collectives.all_reduce(message).wait()
    if beside is not None:
        beside.copy_(message[len(total) :])
    total = message[: len(total)]
    return float(total.max()) if math.isinf(p) else math.pow(float(total), 1 / p)


def _square_sum(shard: Tensor) -> Tensor:
    """Return the sum of squares of a flat tensor on the CPU: fp64, 0-dim."""
    rows = len(shard) // ROW
    if shard.dtype == torch.float32 and rows >= LEAST_ROWS:
        rest = shard[rows * ROW :]
        norms = torch.linalg.vector_norm(shard[: rows * ROW].unflatten(0, (rows, ROW)), dim=1)
        total: Tensor = norms.double().square().sum() + _power_sum(rest, 2)
        if EXACT[0] < total < EXACT[1]:
            return total
    return torch.stack([_power_sum(run, 2) for run in runs(shard)]).sum()


def _power_sum(run: Tensor, p: float) -> Tensor:
    """Return the sum of p-th powers of a run's elements, or their maximum: fp64, 0-dim."""
    norm: Tensor = torch.linalg.vector_norm(run.double(), p)
    return norm if math.isinf(p) else norm.pow(p)


def nan_unless_finite(gradient: Tensor) -> float | Tensor:
    """Return 0 for a gradient that is finite, else NaN; of a device a tensor, not waited for."""
    if gradient.device.type != "cpu":
        return gradient.sum(dtype=torch.promote_types(gradient.dtype, torch.float32)) * 0
    # A finite sum needs finite addends.
    finite = bool(gradient.sum().isfinite()) or bool(gradient.isfinite().all())
    return 0.0 if finite else math.nan


def find_non_finite(
    collectives: Collectives,
    shards: Iterable[tuple[str, Tensor]],
    names: Iterable[str],
    flag: float | Tensor,
    rank: int,
) -> str:
    """Describe which parameters are not finite, and on which ranks, alike on all. Collective.

    `shards` are the sums over ranks of this rank's shards, with their parameters' names; `names`
    are those of all parameters, in order. `flag` is the sum of `nan_unless_finite` of this rank's
    own gradients. `rank` is the number by which the text calls this rank.
    """
    local_names = {name for name, tensor in shards if not bool(tensor.isfinite().all())}
    local_finite = bool(flag == 0) if collectives.size > 1 else not local_names
    reports = gather_objects(collectives, (rank, local_names, local_finite))
    found = set().union(*(of_rank for _, of_rank, _ in reports))
    ranks = ", ".join(str(other) for other, _, finite in reports if not finite)
    if not found:
        return "finite everywhere, but its powers overflow"
    shown = [name for name in names if name in found]
    shown[5:] = [f"and {len(shown) - 5} more"] if len(shown) > 5 else []
    where = f"on rank {ranks}" if ranks else "where the sum over ranks overflows"
    return f"not finite in {', '.join(shown)}, {where}"
