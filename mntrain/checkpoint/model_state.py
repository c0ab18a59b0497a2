"""The entries of a model's state dict: its own tensors, and copies that modules put into it."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from zero.kernels import without_repeats

_EXTRA_STATE = "_extra_state"  # the last part of the name of what `get_extra_state` returns


def copies_in(model: nn.Module, state: Mapping[str, Tensor]) -> set[str]:
    """Return the entries that are no memory of a parameter or buffer. Local.

    What is written into them changes no module: extra states, and what hooks have put there.
    """
    return {*state} - _over(chain(model.parameters(), model.buffers()), state)


def parameters_in(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Return the entries that are memory of a parameter, in their order. Local."""
    found = _over(model.parameters(), state)
    return [name for name in state if name in found]


def _over(tensors: Iterable[Tensor], state: Mapping[str, Tensor]) -> set[str]:
    """Return the entries over the memory of tensors. An extra state is over that of none."""
    own = set(map(_memory, tensors))
    return {
        name
        for name, tensor in state.items()
        if _memory(tensor) in own and name.rpartition(".")[2] != _EXTRA_STATE
    }


@torch.no_grad()
def load_values(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give a model values for all entries of its state dict, in place and in its dtypes. Local.

    By `load_state_dict`, so that extra states are set and hooks run. Raises ValueError, after some
    are loaded, if it raises RuntimeError, or takes no notice of a copy (`copies_in`). Other entries
    that it leaves out, such as those that a hook has renamed, are written as they are.
    """
    state: dict[str, Any] = model.state_dict()
    copies = copies_in(model, state)
    expanded = [n for n, t in state.items() if n not in copies and without_repeats(t) is not t]
    given = OrderedDict((name, values[name]) for name in state if name not in expanded)
    if hasattr(state, "_metadata"):  # the versions of modules
        given._metadata = state._metadata  # type: ignore[attr-defined]
    try:
        result = model.load_state_dict(given, strict=False)
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise ValueError(f"the model's load_state_dict refuses its own state: {text}") from error
    left = [*getattr(result, "unexpected_keys", ()), *expanded]
    if lost := [name for name in left if name in copies]:
        raise ValueError(
            f"the model's state has {lost[0]}, which is no parameter or buffer, and its "
            "load_state_dict does not take it: make it a buffer, or define set_extra_state or a "
            "hook that loads it"
        )
    for name in left:
        target = without_repeats(state[name])
        target.copy_(values[name][tuple(map(slice, target.shape))])


def check_restorable(model: nn.Module, trained: Iterable[Tensor]) -> None:
    """Raise ValueError for a model whose state dict would not restore it. Local.

    If it has copies, they are given back to the model. `trained` parameters must be in it.
    """
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"the model's state has {name}, a {type(value).__name__}: a checkpoint holds "
                "tensors; make it one, or save no checkpoints"
            )
    lacking = {_memory(tensor) for tensor in trained}.difference(map(_memory, state.values()))
    if names := [name for name, p in model.named_parameters() if _memory(p) in lacking]:
        raise ValueError(
            f"the model's state_dict() has no entry over the memory of {names[0]}, which "
            "the optimizer trains, so no checkpoint would restore it: leave parameters in it"
        )
    if copies_in(model, state):
        load_values(model, state)


def _memory(tensor: Tensor) -> int:
    """Return a number of the storage, for as long as it lives."""
    return int(tensor.untyped_storage()._cdata)
