"""What an optimizer holds on a rank, in bytes by role: predicted from the plan, and measured.

Bytes a parameter with Adam on N ranks, besides the working tensors of stage 2:

    stage   fp32            16 bits, fp32 masters
    0       4 + 4 + 8       2 + 6 + 12
    1       4 + 4 + 8/N     2 + 2 + 12/N              (N of 2 and more; of 1 as at stage 0)
    2       4 + 12/N        2 + 14/N, in the update and with accumulation 2 + 16/N

The torch optimizer reads fp32 gradients. At stage 1 they are made in the memory of the 16-bit ones,
where a rank owns no more than half of a bucket. A world of one has no working tensors.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero.alone import alone_bytes
from zero.flat_gradients import held_bytes
from zero.layout import MIB, Bucket, ParameterSlice, ParameterSpec, plan_buckets
from zero.param_groups import check_partition
from zero.precision import needs_master
from zero.sharded_gradients import working_bytes
from zero.tensor_views import nbytes

FP32 = torch.float32.itemsize


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. `total` is their sum: the roles do not overlap."""

    parameters: int  # those that are trained
    gradients: int  # what is kept of them, at the worst moment
    buckets: int  # working tensors that gradients pass through
    master: int  # fp32 masters of 16-bit parameters
    state: int  # the torch optimizer's tensors

    @property
    def total(self) -> int:
        """All of it."""
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
    **kwargs: Any,
) -> Memory:
    """The bytes on the rank that owns a slot, of a job that has not begun. Local.

    `specs` are the model's trained parameters; the rest is as for `ZeroOptimizer`, and refused with
    ValueError as there. What an optimizer keeps is found by trying it on small tensors (see
    `tried_bytes`).
    """
    if stage not in (0, 1, 2):
        raise ValueError(f"ZeRO stage {stage!r} does not exist here: choose one of 0, 1, 2")
    if not 0 <= slot < size:
        raise ValueError(f"slot {slot} is none of {size} ranks': 0 to {size - 1}")
    check_partition(partition, optimizer_class, sharded=stage > 0)
    loads = [0] * size if partition == "parameter" else None
    plan = plan_buckets(specs, bucket_bytes, size, loads)
    make = partial(optimizer_class, **kwargs)
    return predict_for_plan(plan, make, stage, slot, {spec.name: {} for spec in specs})


def predict_for_plan(
    plan: Sequence[Bucket],
    optimizer_class: Callable[..., torch.optim.Optimizer],
    stage: int,
    slot: int,
    options: Mapping[str, dict[str, Any]],
) -> Memory:
    """The same for buckets as they were laid, with the groups' options by parameter name."""
    parts = [(0, b.numel) if stage == 0 else b.shard(slot) for b in plan]
    owned = [stop - start for start, stop in parts]
    alone = all(len(bucket.bounds) == 2 for bucket in plan)
    masters = sum(n * FP32 for n, b in zip(owned, plan, strict=True) if needs_master(b.dtype))
    if stage == 2:
        kept = sum(n * max(FP32, b.dtype.itemsize) for n, b in zip(owned, plan, strict=True))
    elif alone:
        kept = sum(map(alone_bytes, plan))
    else:
        kept = sum(held_bytes(bucket, n) for n, bucket in zip(owned, plan, strict=True))
    pieces = [p for b, part in zip(plan, parts, strict=True) for p in b.pieces(*part)]
    return Memory(
        parameters=sum(bucket.nbytes for bucket in plan),
        gradients=kept,
        buckets=sum(working_bytes(plan)) if stage == 2 and not alone else 0,
        master=masters,
        state=sum(tried_bytes(optimizer_class, p, options[p.spec.name]) for p in pieces),
    )


def state_bytes(states: Iterable[dict[str, Any]]) -> int:
    """The bytes of all tensors in the states of a torch optimizer."""
    values = [value for state in states for value in state.values()]
    return sum(nbytes(value) for value in values if isinstance(value, Tensor))


def tried_bytes(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    piece: ParameterSlice,
    options: dict[str, Any],
) -> int:
    """The bytes of state of one piece, found by a step on a few elements of as many dimensions.

    What is as long as the trial along a dimension, is taken to be as long as the piece there.
    """
    shape = piece.spec.shape if piece.whole else (piece.numel,)
    trial = tuple(map(min, shape, (2, 3, 5, *[2] * len(shape))))
    wide = torch.float32 if needs_master(piece.spec.dtype) else piece.spec.dtype
    tensor = torch.zeros(trial, dtype=wide)
    optimizer = optimizer_class([{"params": [tensor], **options}])
    tensor.grad = torch.ones_like(tensor)
    optimizer.step()
    total = 0
    for value in optimizer.state[tensor].values():
        if isinstance(value, Tensor) and value.dim() == len(trial):
            sides = zip(value.shape, trial, shape, strict=True)
            grown = [full if side == tried else side for side, tried, full in sides]
            total += value.element_size() * math.prod(grown)
        elif isinstance(value, Tensor):
            total += nbytes(value)
    return total
