"""Parameter groups with names, and the checks on what a user passes."""

import functools
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import Parameter

Named: TypeAlias = tuple[str, Parameter]

STAGES = (0, 1, 2)
PARTITIONS = ("element", "parameter")

# Optimizers, in lower case, whose update of an element depends on others of its parameter: on rows
# of a matrix, or on the norm of the whole.
NEED_WHOLE_PARAMETERS = frozenset(
    {"muon", "adafactor", "lamb", "lars", "shampoo", "distributedshampoo", "soap", "came"}
    | {"adam_mini", "adammini", "novograd", "sm3", "galore", "galoreadamw", "kron"}
)


def check_trainable(
    parameters: Iterable[Named] | Iterable[dict[str, Any]],
    *,
    sharded: bool,
    known: Mapping[str, Parameter] | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups whose "params" are pairs (name, parameter) that require a gradient.

    Local. Construction of an optimizer is collective: where ranks could differ in what they refuse,
    call this first and agree on the result. `known` parameters are trained already.

    Raises ValueError for parameters without names, for names or parameters that are given twice,
    for dtypes that are not real floating point, for parameters on different devices, and if there
    is nothing to train; with `sharded` also if parameters share memory, since both cannot be moved
    to flat memory.
    """
    given = list(parameters)
    groups = [{**g, "params": list(g["params"])} for g in given if isinstance(g, dict)]
    if not groups or len(groups) < len(given):
        groups = [{"params": given}]
    if not all(_is_pair(pair) for group in groups for pair in group["params"]):
        raise ValueError(
            "parameters are needed with their names: give model.named_parameters(), "
            'or groups whose "params" are such pairs'
        )
    groups = [{**g, "params": [(n, p) for n, p in g["params"] if p.requires_grad]} for g in groups]
    named = by_name([{"params": (known or {}).items()}, *groups])
    if not named:
        raise ValueError("no parameter requires a gradient: there is nothing to train")
    for name, parameter in named.items():
        if not parameter.dtype.is_floating_point:
            raise ValueError(f"parameter {name} is of {parameter.dtype}: only real floats train")
    devices = {p.device: name for name, p in named.items()}
    if len(devices) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"parameters lie on different devices ({where}): move the model to one")
    if sharded:
        _check_memory(named)
    return groups


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
        case (str(), torch.Tensor()):
            return True
    return False


def _check_memory(parameters: Mapping[str, Parameter]) -> None:
    """Raise ValueError if two parameters overlap in memory."""
    spans = sorted(
        (p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name)
        for name, p in parameters.items()
        if p.numel()
    )
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise ValueError(
                f"parameters {name} and {other} share memory: make them one Parameter (as tied "
                "weights are), or give each its own"
            )


def check_sharding(
    stage: int, partition: str, optimizer_class: Callable[..., torch.optim.Optimizer]
) -> None:
    """Raise ValueError for a stage or partition that is unknown or that the optimizer rules out."""
    if type(stage) is not int or stage not in STAGES:
        known = ", ".join(map(str, STAGES))
        raise ValueError(f"ZeRO stage {stage!r} does not exist here: choose one of {known}")
    if partition not in PARTITIONS:
        raise ValueError(f"partition {partition!r} is unknown: choose {' or '.join(PARTITIONS)}")
    if stage == 0 or partition == "parameter":
        return
    while isinstance(optimizer_class, functools.partial):
        optimizer_class = optimizer_class.func
    for kind in getattr(optimizer_class, "__mro__", ()):
        if kind.__name__.lower() in NEED_WHOLE_PARAMETERS:
            raise ValueError(
                f'{kind.__name__} needs whole parameters, and partition "element" cuts them: give '
                'partition="parameter"'
            )


def unnamed(group: dict[str, Any]) -> dict[str, Any]:
    """Return a named group as torch's optimizers take it."""
    return {**group, "params": [parameter for _, parameter in group["params"]]}


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def name_parameters(
    model: nn.Module, groups: Iterable[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return torch's parameter groups with each parameter replaced by (name, parameter).

    None means one group of all parameters. Raises ValueError for a tensor that is none of them.
    """
    if groups is None:
        return [{"params": list(model.named_parameters())}]
    names = {parameter: name for name, parameter in model.named_parameters()}
    named_groups = []
    for group in groups:
        params = group["params"]  # torch accepts a single tensor, too
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        if any(parameter not in names for parameter in params):
            raise ValueError("a parameter group holds a tensor that is no parameter of the model")
        named_groups.append({**group, "params": [(names[p], p) for p in params]})
    return named_groups
