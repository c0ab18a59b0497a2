"""Means over ranks."""

import math
from typing import SupportsFloat

import torch
from torch import Tensor

from mntrain.comm.collectives import WorldCollectives
from mntrain.errors import AgreedError, combined_refusals


def weighted_mean(
    collectives: WorldCollectives, value: float | Tensor, weight: float
) -> float | Tensor:
    """Return the mean of all ranks' values by weight. Collective. See `World.mean`."""
    number = value if isinstance(value, Tensor) else to_float(value)
    problem = weight_problem(weight)
    if number is None:
        problem = f"the value is {value!r}: give a number or a tensor"
    own = torch.as_tensor(0.0 if number is None else number).detach().to("cpu", torch.float64)
    sums = torch.zeros(own.numel() + 1, dtype=torch.float64)
    if problem:
        sums[-1] = math.nan  # which all ranks see in the sum
    elif weight:
        sums[:-1], sums[-1] = own.flatten() * weight, weight
    collectives.all_reduce(sums).wait()
    total = float(sums[-1])
    if not total > 0:
        problems = collectives.gather_objects(problem, "world.mean").wait()
        text = combined_refusals(problems) if any(problems) else "the weights of all ranks are 0"
        raise AgreedError(f"world.mean: {text}", collectives.rank)
    mean = (sums[:-1] / total).view(own.shape)
    return mean.to(value.device) if isinstance(value, Tensor) else float(mean)


def to_float(value: object) -> float | None:
    """Return a number, or a tensor's only element, as a float; None for anything else. Local."""
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
