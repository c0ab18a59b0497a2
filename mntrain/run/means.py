"""The mean over ranks by weight, and what is a number and a weight."""

import math
from numbers import Complex
from typing import SupportsFloat

import torch
from torch import Tensor

from mntrain.comm.world_collectives import WorldCollectives
from mntrain.errors import AgreedError, combined_refusals
from mntrain.ranks import as_reals, dense, named_by_shape, wide_dtype


def weighted_mean(
    collectives: WorldCollectives, value: complex | Tensor, weight: float
) -> complex | Tensor:
    """Return the mean of all ranks' values by weight. Collective. See `World.mean`."""
    problem, dtype = weight_problem(weight), wide_dtype(value)
    number: complex | Tensor | None = value
    if not isinstance(value, Tensor):
        is_complex = dtype.is_complex and isinstance(value, Complex)
        number = complex(value) if is_complex else to_float(value)
    if number is None:
        problem, number = f"the value is {value!r}: give a number or a tensor", 0.0
    if isinstance(number, Tensor):
        number = dense(number)
    own = torch.as_tensor(number, dtype=dtype, device="cpu").contiguous()
    parts = as_reals(own)
    sums = torch.zeros(parts.numel() + 1, dtype=torch.float64, device="cpu")
    if problem:
        sums[-1] = math.nan  # which all ranks see in the sum
    elif weight:
        sums[:-1], sums[-1] = parts * weight, weight
    collectives.named(named_by_shape("world.mean", value)).all_reduce(sums).wait()
    total = float(sums[-1])
    if not total > 0:
        problems = collectives.gather_objects(problem, "world.mean").wait()
        text = combined_refusals(problems) if any(problems) else "the weights of all ranks are 0"
        raise AgreedError(f"world.mean: {text}", collectives.rank)
    mean = torch.empty_like(own)
    as_reals(mean).copy_(sums[:-1] / total)
    return mean.to(value.device) if isinstance(value, Tensor) else mean.item()


def to_float(value: object) -> float | None:
    """Return a real number, or a tensor's only element, as a float; None for anything else."""
    if wide_dtype(value).is_complex:
        return None
    if isinstance(value, Tensor):
        return float(value.detach()) if value.numel() == 1 else None
    try:
        return float(value) if isinstance(value, SupportsFloat) else None
    except (TypeError, ValueError):  # of an array
        return None


def weight_problem(weight: object) -> str | None:
    """Return why something is no weight of a rank's values, or None if it is one. Local."""
    number = to_float(weight)
    if number is not None and 0 <= number < math.inf:
        return None
    return f"weight is {weight!r}: give a finite number of samples or tokens, 0 or more"
