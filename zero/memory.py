"""Bytes that an optimizer holds on a rank, by role: predicted from the plan, and measured.

Bytes for each parameter with Adam on N ranks, without the working tensors of stage 2:

    stage   fp32            16 bits, fp32 master weights
    0       4 + 4 + 8       2 + 6 + 12
    1       4 + 4 + 8/N     2 + 2 + 12/N              (N of 2 and more; 1 as at stage 0)
    2       4 + 12/N        2 + 14/N, in the update and with accumulation 2 + 16/N

The torch optimizer reads fp32 gradients. At stage 1 they are made in the memory of the 16-bit ones,
where a rank owns no more than half of a bucket. A `gather_dtype` of 16 bits adds 4/N for master
weights of fp32 parameters, and 2 for the copies that travel. One rank has no working tensors and no
such copies.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero.gradients import flat_bytes
from zero.layout import MIB, Bucket, ParameterSlice, ParameterSpec, plan_buckets
from zero.param_groups import check_partition
from zero.parameters import gather_copy_dtype
from zero.precision import check_travel_dtype, is_16_bit, master_dtype
from zero.sharded_gradients import working_sizes
from zero.stages import check_stage
from zero.tensor_views import nbytes

FP32 = torch.float32.itemsize


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. The roles do not overlap."""

    parameters: int  # those that are trained
    gradients: int  # kept, at the peak
    buckets: int  # tensors through which gradients and parameters travel
    master: int  # master weights
    state: int  # tensors of the torch optimizer

    @property
    def total(self) -> int:
        """The sum of all roles."""
        return sum(astuple(self))


def predict(
    specs: Sequence[ParameterSpec],
    optimizer_class: Callable[..., torch.optim.Optimizer],
    *,
    stage: int,
    size: int,
    slot: int = 0,
    partition: str = "element",
    bucket_bytes: int = 25 * MIB,
    gather_dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> Memory:
    """Return the bytes of the rank that owns a slot, before a job has started. Local.

    `specs` describe the model's trained parameters; the other arguments are those of
    `ZeroOptimizer`, and raise its ValueErrors. The optimizer's state is measured on small tensors
    (see `trial_bytes`).
    """
    check_stage(stage)
    check_travel_dtype("gather_dtype", gather_dtype)
    if not 0 <= slot < size:
        raise ValueError(f"slot {slot} is none of {size} ranks': 0 to {size - 1}")
    check_partition(partition, optimizer_class, sharded=stage > 0)
    loads = [0] * size if partition == "parameter" else None
    plan = plan_buckets(specs, bucket_bytes, size, loads)
    make = partial(optimizer_class, **kwargs)
    options: dict[str, dict[str, Any]] = {spec.name: {} for spec in specs}
    gather_dtype = gather_dtype if stage else None
    return predict_for_plan(plan, make, stage, slot, options, gather_dtype=gather_dtype)


def predict_for_plan(
    plan: Sequence[Bucket],
    optimizer_class: Callable[..., torch.optim.Optimizer],
    stage: int,
    slot: int,
    options: Mapping[str, dict[str, Any]],
    *,
    gather_dtype: torch.dtype | None = None,
) -> Memory:
    """Return the bytes for planned buckets, with the options of groups by parameter name."""
    parts = [(0, b.numel) if stage == 0 else b.shard(slot) for b in plan]
    owned = [(stop - start, bucket) for (start, stop), bucket in zip(parts, plan, strict=True)]
    size = len(plan[0].bounds) - 1
    pieces = [p for b, part in zip(plan, parts, strict=True) for p in b.pieces(*part)]
    if stage == 2:
        gradients = sum(n * max(FP32, bucket.dtype.itemsize) for n, bucket in owned)
        travelling = sum(working_sizes(plan, size))
    else:
        gradients = sum(flat_bytes(bucket, n) for n, bucket in owned)
        travelling = 0
    for bucket in plan:
        if dtype := gather_copy_dtype(bucket, gather_dtype, size):
            travelling += bucket.numel * dtype.itemsize
    masters = [(n, master_dtype(bucket.dtype, gather_dtype)) for n, bucket in owned]
    return Memory(
        parameters=sum(bucket.nbytes for bucket in plan),
        gradients=gradients,
        buckets=travelling,
        master=sum(n * dtype.itemsize for n, dtype in masters if dtype),
        state=sum(trial_bytes(optimizer_class, p, options[p.spec.name]) for p in pieces),
    )


def state_bytes(states: Iterable[dict[str, Any]]) -> int:
    """Return the bytes of all tensors in the states of a torch optimizer."""
    values = [value for state in states for value in state.values()]
    return sum(nbytes(value) for value in values if isinstance(value, Tensor))


def trial_bytes(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    piece: ParameterSlice,
    options: dict[str, Any],
) -> int:
    """Return the bytes of a slice's state, from a step on a few elements of equal dimensions.

    A state tensor that is as long as the trial along a dimension counts as long as the slice there.
    """
    shape = piece.spec.shape if piece.whole else (piece.numel,)
    trial = tuple(map(min, shape, (2, 3, 5, *[2] * len(shape))))
    wide = torch.float32 if is_16_bit(piece.spec.dtype) else piece.spec.dtype
    tensor = torch.zeros(trial, dtype=wide)
    optimizer = optimizer_class([{"params": [tensor], **options}])
    tensor.grad = torch.ones_like(tensor)
    optimizer.step()
    total = 0
    for value in optimizer.state[tensor].values():
        if isinstance(value, Tensor) and value.dim() == len(trial):
            sides = zip(value.shape, trial, shape, strict=True)
            full_shape = [full if side == tried else side for side, tried, full in sides]
            total += value.element_size() * math.prod(full_shape)
        elif isinstance(value, Tensor):
            total += nbytes(value)
    return total
