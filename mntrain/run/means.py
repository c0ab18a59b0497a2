"""The mean over ranks by weight, and what is a number and a weight."""

import math
from typing import SupportsFloat

import torch
from torch import Tensor

from mntrain.comm.world_collectives import WorldCollectives
from mntrain.errors import AgreedError, combined_refusals
from mntrain.ranks import REAL, Number, dense, is_complex, named_by_shape


def weighted_mean(collectives: WorldCollectives, value: Number, weight: float) -> Number:
    """Return the mean of all ranks' values by weight. Collective. See `World.mean`."""
    problem = weight_problem(weight)
    number: float | Tensor | None = dense(value) if isinstance(value, Tensor) else to_float(value)
    if is_complex(value):
        problem, number = f"the value is complex: {REAL}", 0.0
    elif number is None:
        problem, number = f"the value is {value!r}: give a number or a tensor", 0.0
    own = torch.as_tensor(number, dtype=torch.float64, device="cpu")
    sums = torch.zeros(own.numel() + 1, dtype=torch.float64, device="cpu")
    if problem:
        sums[-1] = math.nan  # which all ranks see in the sum
    elif weight:
        sums[:-1], sums[-1] = own.reshape(-1) * weight, weight
    collectives.named(named_by_shape("world.mean", value)).all_reduce(sums).wait()
    total = float(sums[-1])
    if not total > 0:
        problems = collectives.gather_objects(problem, "world.mean").wait()
        text = combined_refusals(problems) if any(problems) else "the weights of all ranks are 0"
        raise AgreedError(f"world.mean: {text}", collectives.rank)
    mean = (sums[:-1] / total).view(own.shape)
    return mean.to(value.device) if isinstance(value, Tensor) else mean.item()


def to_float(value: object) -> float | None:
    """Return a real number, or a tensor's only element, as a float; None for anything else."""
    if is_complex(value):
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
