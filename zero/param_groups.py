"""Parameter groups with names, and the checks on what a user passes."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from zero.parameter_watch import dense_parts
from zero.precision import is_16_bit

Named: TypeAlias = tuple[str, Parameter]

OWN_MEMORY = "make them one Parameter (as tied weights are), or give each its own"
COMPLEX_DTYPES = (torch.complex64, torch.complex128)


def as_groups(given: Iterable[Any], model: nn.Module | None = None) -> list[dict[str, Any]]:
    """Return parameter groups whose "params" are lists of pairs (name, parameter).

    `given` are pairs, or groups of them. With a `model`, also what torch's optimizers take, as a
    single tensor or parameters; names, which may be those within a part of the model, become those
    of the model. Raises ValueError for parameters without names, and with a model for a tensor that
    is none of its parameters.
    """
    names: dict[Tensor, str] = {}
    if model is not None:
        names = {parameter: name for name, parameter in model.named_parameters()}
    groups = list(given)
    if not groups or not all(isinstance(group, dict) for group in groups):
        groups = [{"params": groups}]
    made = []
    for group in groups:
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        if model is not None:
            params = [pair[1] if _is_pair(pair) else pair for pair in params]
            if not all(isinstance(p, Tensor) and p in names for p in params):
                raise ValueError(
                    "a parameter group holds a tensor that is no parameter of the model"
                )
            params = [(names[p], p) for p in params]
        elif not all(map(_is_pair, params)):
            raise ValueError(
                "parameters are needed with their names: give model.named_parameters(), "
                'or groups whose "params" are such pairs'
            )
        options = {key: value for key, value in group.items() if key != "param_names"}
        made.append({**options, "params": params})
    return made


def check_trainable(
    groups: Iterable[dict[str, Any]],
    *,
    sharded: bool,
    known: Mapping[str, Parameter] | None = None,
    model: nn.Module | None = None,
) -> list[dict[str, Any]]:
    """Return named groups with the parameters that require a gradient.

    Local. Construction of an optimizer is collective: where ranks could differ in what they refuse,
    call this first and agree on the result. `known` parameters are trained already.

    Raises ValueError for names or parameters that are given twice, for dtypes that do not train,
    under `torch.inference_mode()`, for parameters on different devices, for several of 16 bits in
    one memory, which have a master weight each, and if there is nothing to train. With `sharded`
    they move to flat memory: then also for one that shares memory with another, with a given one
    that is frozen, with any parameter or buffer of a `model`, or with other processes.
    """
    groups = list(groups)
    found = [{**g, "params": [(n, p) for n, p in g["params"] if p.requires_grad]} for g in groups]
    named = by_name([{"params": (known or {}).items()}, *found])
    if not named:
        raise ValueError("no parameter requires a gradient: there is nothing to train")
    for name, parameter in named.items():
        if not parameter.dtype.is_floating_point and parameter.dtype not in COMPLEX_DTYPES:
            raise ValueError(
                f"parameter {name} is of {parameter.dtype}: only real floats, complex64 and "
                "complex128 train"
            )
        if parameter.is_inference() or torch.is_inference_mode_enabled():
            raise ValueError(
                f"parameter {name} has no gradient under torch.inference_mode(): make the model "
                "and the optimizer outside of it"
            )
    devices = {p.device: name for name, p in named.items()}
    if len(devices) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"parameters lie on different devices ({where}): move the model to one")
    with_master = {name: p for name, p in named.items() if is_16_bit(p.dtype)}
    _check_overlaps(with_master, (), f"and the updates of one would be lost: {OWN_MEMORY}")
    if sharded:
        given = [pair for group in groups for pair in group["params"]]
        tensors = () if model is None else (*model.named_parameters(), *model.named_buffers())
        _check_memory(by_name(found), [*(known or {}).items(), *given, *tensors])
    return found


def by_name(groups: Iterable[dict[str, Any]]) -> dict[str, Parameter]:
    """Return the parameters of named groups by name.

    Raises ValueError where two parameters have one name, or one parameter has two.
    """
    named: dict[str, Parameter] = {}
    names: dict[Parameter, str] = {}
    for name, parameter in (pair for group in groups for pair in group["params"]):
        if name in named:
            raise ValueError(f"two parameters are named {name}: give each a name of its own")
        if parameter in names:
            raise ValueError(f"{names[parameter]} and {name} are one parameter: give it once")
        named[name], names[parameter] = parameter, name
    return named


def _is_pair(pair: Any) -> bool:
    match pair:
        case (str(), Tensor()):
            return True
    return False


def _check_memory(moved: Mapping[str, Parameter], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError for memory that parameters would leave and other `tensors` would keep.

    Also for memory of several parameters, and for that of other processes.
    """
    for name, parameter in moved.items():
        if parameter.device.type == "cpu" and parameter.is_shared():  # on a GPU, all say so
            raise ValueError(
                f"{name} is in memory shared with other processes (share_memory()), which trained "
                "parameters leave at stages 1 and 2: use stage=0, or train a copy.deepcopy(model)"
            )
    own, devices = set(map(id, moved.values())), {p.device for p in moved.values()}
    others = [
        part
        for name, tensor in tensors
        if id(tensor) not in own and tensor.device in devices
        for part in dense_parts(name, tensor)
    ]
    why = "which trained parameters leave at stages 1 and 2"
    _check_overlaps(moved, others, f"{why}: {OWN_MEMORY}, or use stage=0")


def _check_overlaps(
    trained: Mapping[str, Tensor], others: Iterable[tuple[str, Tensor]], why: str
) -> None:
    """Raise ValueError for memory of a trained tensor that another one, or one of others, has.

    A tensor with gaps counts as if it had none, and one on the meta device has no memory.
    """
    every = [*((*pair, True) for pair in trained.items()), *((*pair, False) for pair in others)]
    spans = [(*_span(t), name, mine) for name, t, mine in every if t.numel() and not t.is_meta]
    ends = {True: (0, ""), False: (0, "")}  # the highest so far, of the trained and of the others
    for start, end, name, is_trained in sorted(spans):
        for last, other in (ends[True], ends[False]) if is_trained else (ends[True],):
            if start < last:
                raise ValueError(f"{other} and {name} share memory, {why}")
        ends[is_trained] = max(ends[is_trained], (end, name))


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a strided tensor that has elements, and that behind its last one."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    numel = 1 + sum((length - 1) * stride for length, stride in strides)
    return tensor.data_ptr(), tensor.data_ptr() + numel * tensor.element_size()


def check_undistributed(model: nn.Module, size: int) -> None:
    """Raise ValueError for a model that other code distributes, or whose forward differs by rank.

    As a whole or in part. Local; `size` is the number of ranks.
    """
    fsdp, tensor = (sys.modules.get(f"torch.distributed.{name}") for name in ("fsdp", "tensor"))
    shards = tuple(getattr(fsdp, n, ()) for n in ("FullyShardedDataParallel", "FSDPModule"))
    dtensor = getattr(tensor, "DTensor", ())
    embeddings = nn.Embedding | nn.EmbeddingBag
    for path, module in model.named_modules():
        which, kind = f"model.{path}" if path else "model", type(module).__name__
        of_parts = (isinstance(p, dtensor) for p in module.parameters(recurse=False))
        problem = ""
        if isinstance(module, DistributedDataParallel | DataParallel):
            problem = (
                f"wrapped in {kind}: give the module inside, its .module; the optimizer averages "
                "the gradients"
            )
        elif isinstance(module, shards) or any(of_parts):
            problem = (
                "sharded by torch.distributed: leave fully_shard and the like out, and give the "
                "plain module with stage=1 or 2, which shards optimizer state and gradients"
            )
        elif size > 1 and isinstance(module, embeddings) and module.max_norm is not None:
            problem = (
                f"of type {kind} with max_norm, which changes its weight in forward by the samples "
                "of each rank alone: leave it out, and limit the norms of all rows after "
                "optimizer.step()"
            )
        elif any(map(is_lazy, [*module.parameters(recurse=False), *module.buffers(recurse=False)])):
            problem = f"a {kind} whose tensors have no shape yet: run a forward of the model before"
        if problem:
            raise ValueError(f"{which} is {problem}")


def named_groups(
    groups: Iterable[dict[str, Any]], named: Mapping[str, Parameter]
) -> list[dict[str, Any]]:
    """Return groups of `named` parameters with pairs (name, parameter)."""
    names = {parameter: name for name, parameter in named.items()}
    return [{**group, "params": [(names[p], p) for p in group["params"]]} for group in groups]


def groups_of_names(
    groups: Iterable[dict[str, Any]], named: Mapping[str, Parameter]
) -> list[dict[str, Any]]:
    """Return groups of `named` parameters with names in place of parameters."""
    pairs = named_groups(groups, named)
    return [{**group, "params": [name for name, _ in group["params"]]} for group in pairs]


def unnamed(group: dict[str, Any]) -> dict[str, Any]:
    """Return a named group as torch's optimizers take it."""
    return {**group, "params": [parameter for _, parameter in group["params"]]}


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}
