"""Bytes that an optimizer holds on a rank, by role: predicted from the plan, and measured.

Bytes for each parameter with Adam on N ranks, without the working tensors of stage 2:

    stage   fp32            16 bits, fp32 master weights
    0       4 + 4 + 8       2 + 6 + 12
    1       4 + 4 + 8/N     2 + 2 + 12/N              (N of 2 and more; 1 as at stage 0)
    2       4 + 12/N        2 + 14/N, in the update and with accumulation 2 + 16/N

One rank holds at every stage what stage 0 holds.

The torch optimizer reads fp32 gradients. At stage 1 they are made in the memory of the 16-bit ones,
where a rank owns no more than half of a bucket. A `gather_dtype` of 16 bits adds 4/N for master
weights of fp32 parameters, and 2 for the copies that travel.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from zero.gradients.stages import padded_numel, working_sizes
from zero.layout import Bucket, ParameterSlice
from zero.precision import is_16_bit, master_dtype, narrower

FP32 = torch.float32.itemsize


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. The roles do not overlap."""

    parameters: int  # those that are trained
    gradients: int  # kept, at the peak
    buckets: int  # tensors through which gradients and parameters travel
    master: int  # master weights
    state: int  # tensors of the torch optimizer, and of the sync schedule
    hook: int = 0  # the communication hook's state

    @property
    def total(self) -> int:
        """The sum of all roles."""
        return sum(astuple(self))


def predict(
    plan: Sequence[Bucket],
    optimizer_class: Callable[..., torch.optim.Optimizer],
    stage: int,
    slot: int,
    options: Mapping[str, dict[str, Any]],
    *,
    gather_dtype: torch.dtype | None,
) -> Memory:
    """Return the bytes of the rank that owns a slot of planned buckets. Local.

    `options` are those of the parameter groups, by parameter name; `gather_dtype` is None at stage
    0. The optimizer's state is measured on small tensors (see `_trial_bytes`), without that of the
    sync schedule.
    """
    size = len(plan[0].bounds) - 1
    stage = stage if size > 1 else 0
    gradients = travelling = master = state = 0
    for bucket in plan:
        start, stop = (0, bucket.numel) if stage == 0 else bucket.shard(slot)
        owned = stop - start
        if stage == 2:
            gradients += owned * max(FP32, bucket.dtype.itemsize)
        else:
            numel = padded_numel(bucket) if stage else bucket.numel
            narrow = numel * bucket.dtype.itemsize
            wide = owned * FP32 if is_16_bit(bucket.dtype) else 0
            gradients += narrow + (wide if wide > narrow else 0)
        dtype = master_dtype(bucket.dtype, gather_dtype)
        if dtype:
            master += owned * dtype.itemsize
        if size > 1 and (dtype := narrower(gather_dtype, bucket.dtype)):
            travelling += bucket.numel * dtype.itemsize
        for piece in bucket.pieces(start, stop):
            state += _trial_bytes(optimizer_class, piece, options[piece.spec.name])
    return Memory(
        parameters=sum(bucket.nbytes for bucket in plan),
        gradients=gradients,
        buckets=travelling + (sum(working_sizes(plan)) if stage == 2 else 0),
        master=master,
        state=state,
    )


def state_bytes(states: Iterable[dict[str, Any]]) -> int:
    """Return the bytes of all tensors in the states of a torch optimizer."""
    values = [value for state in states for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def _trial_bytes(
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
            total += value.nbytes
    return total
