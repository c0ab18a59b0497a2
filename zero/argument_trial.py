"""A trial that shows whether a torch optimizer accepts its arguments: a step on small tensors."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from zero.precision import is_16_bit


def check_arguments(
    kind: Callable[..., torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    groups: Iterable[Mapping[str, Any]],
    *,
    leaves: bool = False,
) -> None:
    """Raise ValueError for what an optimizer refuses when it is made, or in a step. Local.

    `groups` are parameter groups with their own arguments; the parameters stay as they are. With
    `leaves`, the optimizer updates tensors that require a gradient, as at stage 0. Some arguments
    are looked at in a step only, as the number of Adam's betas. The error names the arguments
    without which the trial passes.
    """
    for group in groups:
        own = {name: value for name, value in group.items() if name != "params"}
        kinds = {(p.dim(), p.dtype, p.device): None for p in group["params"]}

        def refusal(
            arguments: Mapping[str, Any],
            own: Mapping[str, Any],
            kinds: Iterable[tuple[int, torch.dtype, torch.device]] = tuple(kinds),
        ) -> Exception | None:
            return _refusal(kind, arguments, own, kinds, leaves=leaves)

        error = refusal(arguments, own)
        if error is None:
            continue
        given = {**arguments, **own}
        wrong = [n for n in given if refusal(_without(arguments, n), _without(own, n)) is None]
        raise ValueError(_sentence(kind, {n: given[n] for n in wrong or given}, error)) from error


def _refusal(
    kind: Callable[..., torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    own: Mapping[str, Any],
    kinds: Iterable[tuple[int, torch.dtype, torch.device]],
    *,
    leaves: bool,
) -> Exception | None:
    """Return the error of an optimizer and its first step, None if there is none."""
    tensors = []
    for dims, dtype, device in kinds:
        wide = torch.float32 if is_16_bit(dtype) else dtype
        tensors.append(torch.zeros([2] * dims, dtype=wide, device=device, requires_grad=leaves))
        tensors[-1].grad = torch.zeros_like(tensors[-1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            optimizer = kind([{"params": tensors, **own}], **arguments)
            if not isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
                optimizer.step()
        except Exception as error:  # torch raises whatever its code meets
            return error
    return None


def _without(arguments: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if key != name}


def _sentence(kind: Callable[..., object], refused: Mapping[str, Any], error: Exception) -> str:
    name = getattr(kind, "__name__", "the optimizer")
    given = ", ".join(f"{key}={value!r}" for key, value in refused.items()) or "its arguments"
    known = list(inspect.signature(kind).parameters.values())[1:]
    defaults = {p.name: p.default for p in known if p.default is not p.empty}
    usual = ", ".join(f"{key}={defaults[key]!r}" for key in refused if key in defaults)
    taken = f"its default is {usual}" if usual else f"it takes {', '.join(p.name for p in known)}"
    reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
    return f"{name} refuses {given} ({reason}); {taken}"
