"""Parameter groups with names, and the checks on what a user passes."""

import functools
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import Parameter

Named: TypeAlias = tuple[str, Parameter]

PARTITIONS = ("element", "parameter")

# Optimizers whose update of an element depends on others of its parameter: on rows of a matrix, or
# on the norm of the whole.
NEED_WHOLE_PARAMETERS = frozenset(
    {"Muon", "Adafactor", "Lamb", "LARS", "Shampoo", "DistributedShampoo", "SOAP", "CAME"}
    | {"Adam_mini", "AdamMini", "NovoGrad", "SM3", "GaLore", "GaLoreAdamW", "Kron"}
)


def named_groups(
    parameters: Iterable[Named] | Iterable[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return parameter groups whose "params" are pairs (name, parameter) that require a gradient.

    Raises ValueError for parameters without names, for names that are not unique, for dtypes that
    are not real floating point, and for parameters on different devices.
    """
    given = list(parameters)
    groups = [{**g, "params": list(g["params"])} for g in given if isinstance(g, dict)]
    if groups and len(groups) == len(given):
        pairs = [pair for group in groups for pair in group["params"]]
    else:
        pairs = given
        groups = [{"params": given}]
    if not all(_is_pair(pair) for pair in pairs):
        raise ValueError(
            "parameters are needed with their names: give model.named_parameters(), "
            'or groups whose "params" are such pairs'
        )
    groups = [{**g, "params": [(n, p) for n, p in g["params"] if p.requires_grad]} for g in groups]
    named = by_name(groups)
    for name, parameter in named.items():
        if not parameter.dtype.is_floating_point:
            raise ValueError(f"parameter {name} is of {parameter.dtype}: only real floats train")
    devices = {p.device: name for name, p in named.items()}
    if len(devices) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"parameters lie on different devices ({where}): move the model to one")
    return groups


def by_name(groups: Iterable[dict[str, Any]]) -> dict[str, Parameter]:
    """Return the parameters of named groups by name.

    Raises ValueError where two parameters have one name, or one parameter has two.
    """
    named: dict[str, Parameter] = {}
    for group in groups:
        for name, parameter in group["params"]:
            if name in named:
                raise ValueError(f"two parameters are named {name}: give each a name of its own")
            named[name] = parameter
    names: dict[Parameter, str] = {}
    for name, parameter in named.items():
        if (other := names.setdefault(parameter, name)) != name:
            raise ValueError(f"{other} and {name} are one parameter: give it once")
    return named


def check_trainable(
    parameters: Iterable[Named] | Iterable[dict[str, Any]], *, sharded: bool
) -> list[dict[str, Any]]:
    """Return `named_groups`, if an optimizer can be constructed with them. Local.

    Construction is collective: where ranks could differ in what they refuse, call this first and
    agree on the result. Raises ValueError as `named_groups`, if there is nothing to train, and,
    with `sharded`, if parameters share memory, since both cannot be moved to flat memory.
    """
    groups = named_groups(parameters)
    named = by_name(groups)
    if not named:
        raise ValueError("no parameter requires a gradient: there is nothing to train")
    if sharded:
        refuse_shared_memory(named)
    return groups


def refuse_shared_memory(parameters: Mapping[str, Parameter]) -> None:
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


def check_added(
    param_group: dict[str, Any],
    known: Mapping[str, Parameter],
    device: torch.device,
    *,
    sharded: bool,
) -> tuple[dict[str, Any], dict[str, Parameter]]:
    """Return a group that is to be added, and its parameters by name. Local.

    Raises ValueError as `named_groups`, and for names that are `known` or another device.
    """
    (group,) = named_groups([param_group])
    named = by_name([group])
    if repeated := [name for name in named if name in known]:
        raise ValueError(f"the optimizer has parameters named {', '.join(repeated)} already")
    if far := [name for name, p in named.items() if p.device != device]:
        raise ValueError(
            f"parameters lie on different devices ({', '.join(far)} not on "
            f"{device}): move the model to one"
        )
    if sharded:
        refuse_shared_memory(named)
    return group, named


def _is_pair(pair: Any) -> bool:
    return (
        isinstance(pair, tuple)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], torch.Tensor)
    )


def unnamed(group: dict[str, Any]) -> dict[str, Any]:
    """Return a named group as torch's optimizers take it."""
    return {**group, "params": [parameter for _, parameter in group["params"]]}


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def needs_whole_parameters(optimizer_class: Callable[..., torch.optim.Optimizer]) -> str | None:
    """Return the name under which an optimizer is known to need whole parameters, or None."""
    while isinstance(optimizer_class, functools.partial):
        optimizer_class = optimizer_class.func
    known = {name.lower() for name in NEED_WHOLE_PARAMETERS}
    names = [kind.__name__ for kind in getattr(optimizer_class, "__mro__", [])]
    return next((name for name in names if name.lower() in known), None)


def is_positive(value: object) -> bool:
    """Return whether a value is a number above 0, including infinity; True does not count."""
    return isinstance(value, Real) and not isinstance(value, bool) and float(value) > 0


def check_partition(
    partition: str, optimizer_class: Callable[..., torch.optim.Optimizer], *, sharded: bool
) -> None:
    """Raise ValueError for an unknown partition, or one that an optimizer does not allow."""
    if partition not in PARTITIONS:
        raise ValueError(f"partition {partition!r} is unknown: choose {' or '.join(PARTITIONS)}")
    name = needs_whole_parameters(optimizer_class)
    if sharded and partition == "element" and name:
        raise ValueError(
            f'{name} needs whole parameters, and partition "element" cuts them: give '
            'partition="parameter"'
        )


def difference(saved: list[list[Any]], own: list[list[str]]) -> str:
    """Describe how two lists of groups of names differ."""
    if len(saved) != len(own):
        return f"it has {len(saved)} and the optimizer {len(own)}"
    words = []
    for index, (saved_names, own_names) in enumerate(zip(saved, own, strict=True)):
        lacking = [name for name in own_names if name not in saved_names]
        extra = [name for name in saved_names if name not in own_names]
        if lacking:
            words.append(f"group {index} lacks {', '.join(lacking)}")
        if extra:
            words.append(f"group {index} has {', '.join(map(str, extra))} besides")
        if saved_names != own_names and not lacking and not extra:
            words.append(f"the parameters of group {index} come in another order")
    return "; ".join(words)


def name_parameters(
    model: nn.Module, groups: Iterable[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return torch's parameter groups with each parameter replaced by (name, parameter)."""
    if groups is None:
        return [{"params": list(model.named_parameters())}]
    names = {parameter: name for name, parameter in model.named_parameters()}
    try:
        return [{**g, "params": [(names[p], p) for p in _parameters(g)]} for g in groups]
    except KeyError:
        raise ValueError(
            "a parameter group holds a tensor that is no parameter of the model"
        ) from None


def _parameters(group: dict[str, Any]) -> Iterable[Any]:
    """Return the parameters of a group; torch accepts a single tensor, too."""
    params: Iterable[Any] = group["params"]
    return [params] if isinstance(params, torch.Tensor) else params
