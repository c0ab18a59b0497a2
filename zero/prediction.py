"""Prediction of an optimizer's memory: its layout and a step of it, on tensors without memory."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from zero.collectives import CompletedWork, SingleProcessCollectives
from zero.comm_hooks import ChainedWork
from zero.gradients.single_rank import LocalGradients
from zero.layout import Bucket
from zero.memory import Memory
from zero.param_groups import by_name
from zero.shard import OptimizerShard, update_alone


class OneOfSeveral(SingleProcessCollectives):
    """The owner of a slot among several ranks, of which there are no others."""

    def __init__(self, size: int, slot: int) -> None:
        self.size, self.rank = size, slot


class _OnesForValues(TorchDispatchMode):
    """Ones in place of the numbers of tensors without memory, so that optimizers run on them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def predict(
    buckets: Sequence[Bucket],
    groups: Iterable[dict[str, Any]],
    make: Callable[..., torch.optim.Optimizer],
    *,
    stage: int,
    shards: int,
    slot: int,
    gather_dtype: torch.dtype | None = None,
    chained: bool = False,
    micro_batches: int = 1,
    device: str = "meta",
) -> Memory:
    """Return the bytes that a rank holds at the peak of a step that trains every parameter. Local.

    By the classes that hold the memory in training. `groups` are named groups, whose parameters may
    be on the meta device; only their shapes, strides and dtypes count. `make` makes the torch
    optimizer of groups. The rank owns `slot` of so many `shards` of each of the buckets.
    `chained` says that a communication hook's works are `ChainedWork`. What a hook and a sync
    schedule keep is not predicted. Raises what the torch optimizer raises on tensors without
    memory; on the device "cpu", tensors have memory, and are zeros.
    """
    named_groups = list(groups)
    made = {
        name: Parameter(_like(parameter, device))
        for name, parameter in by_name(named_groups).items()
    }
    for name, parameter in by_name(named_groups).items():
        vars(made[name]).update(vars(parameter))  # which `make` may read
    ranks, alone = OneOfSeveral(shards, slot), shards == 1
    shard = OptimizerShard(stage, ranks, None, gather_dtype, overlap_forward=False, alone=alone)
    shard.add(buckets, made)
    shard.gradients.add(buckets, made)
    if isinstance(shard.gradients, LocalGradients):
        for parameter in made.values():
            parameter.grad = torch.zeros_like(parameter)
    else:
        for index in list(range(len(buckets))) * (micro_batches if stage == 2 else 1):
            shard.gradients.flat(index)
            work = ChainedWork(iter([CompletedWork()])) if chained else CompletedWork()
            shard.gradients.launched(index, work)
        shard.gradients.finish(1.0, frozenset())
    plain = [
        {**_of_any_device(group), "params": [made[name] for name, _ in group["params"]]}
        for group in named_groups
    ]
    if isinstance(make, partial):
        make = partial(make.func, *make.args, **_of_any_device(make.keywords))
    inner = make(shard.groups(plain))
    ones = _OnesForValues()  # type: ignore[no-untyped-call]
    with ones, shard.gradients_set(frozenset()):
        shard.scale_gradients(1.0, frozenset())
        update_alone(inner)
    return shard.memory(inner.state)


def _of_any_device(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options without the kernels that tensors without memory lack; states are the same."""
    return {key: value for key, value in options.items() if key not in ("fused", "capturable")}


def _like(parameter: Tensor, device: str) -> Tensor:
    return torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device
    ).zero_()
