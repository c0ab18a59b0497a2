"""The entries of a model's state dict: its own tensors, and copies that modules put into it."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from mntrain.alike.naming import first_names
from zero.kernels import without_repeats

_EXTRA_STATE = "_extra_state"  # the last part of the name of what `get_extra_state` returns
_SHOWN = 5  # entries in an error

Buffers = dict[str, dict[str, Tensor | None]]  # of each module, by its path


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
        if isinstance(tensor, Tensor)
        and _memory(tensor) in own
        and name.rpartition(".")[2] != _EXTRA_STATE
    }


@torch.no_grad()
def load_values(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give a model values for all entries of its state dict, in place and in its dtypes. Local.

    By `load_state_dict`, so that extra states are set and hooks run. Raises ValueError, after some
    are loaded, if it raises RuntimeError, or takes no notice of a copy (`copies_in`). Other entries
    that it leaves out, such as those that a hook has renamed, are written as they are. Other names
    and shapes than the model's are such that `why_not_taken` has no reason against them.
    """
    state: dict[str, Any] = model.state_dict()
    copies = copies_in(model, state)
    expanded = [n for n, t in state.items() if n not in copies and without_repeats(t) is not t]
    try:
        result = _load(model, {n: value for n, value in values.items() if n not in expanded})
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
    state = model.state_dict()
    for name in left:
        target = without_repeats(state[name])
        target.copy_(values[name][tuple(map(slice, target.shape))])


def _load(model: nn.Module, values: Mapping[str, Tensor]) -> Any:
    """Return what `load_state_dict` returns for values, with the versions of the modules."""
    given, state = OrderedDict(values), model.state_dict()
    if hasattr(state, "_metadata"):
        given._metadata = state._metadata  # type: ignore[attr-defined]
    return model.load_state_dict(given, strict=False)


@torch.no_grad()
def why_not_taken(
    model: nn.Module, values: Mapping[str, Tensor], buffers: Buffers | None = None
) -> str:
    """Return why a model would not take values of other names or shapes; "" if it does. Local.

    Its `load_state_dict` is tried on copies of its buffers, or on `buffers` in their place, with
    its own values of parameters, and must leave a state of these names, shapes and values. The
    model is unchanged then, but for extra states and such (`copies_in`), which are set to what
    they were.
    """
    before = model.state_dict()
    values = {**values, **{name: before[name] for name in parameters_in(model, before)}}
    copies = {name: before[name].clone() for name in copies_in(model, before)}
    modules = dict(model.named_modules())
    kept = {path: dict(module._buffers) for path, module in modules.items()}
    try:
        for path, module in modules.items():
            for name, own in kept[path].items():
                module._buffers[name] = None if own is None else own.clone()
            if buffers is not None:
                _register(module, buffers.get(path, {}))
        refused = ""
        try:
            _load(model, values)
        except RuntimeError as error:  # raised for what could not be loaded, after the rest was
            refused = " ".join(str(error).split())
        after = model.state_dict()
        wrong = [
            name
            for name in {**after, **values}
            if name not in after
            or name not in values
            or not (name in copies or _equal(after[name], values[name]))
        ]
        return f"it does not set {first_names(wrong, _SHOWN)}" if wrong else refused
    except Exception as error:  # of the modules' own code, of any kind
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    finally:
        for path, module in modules.items():
            module._buffers.clear()
            module._buffers.update(kept[path])
        if copies:
            load_values(model, before | copies)


def _register(module: nn.Module, buffers: Mapping[str, Tensor | None]) -> None:
    """Let a module have these persistent buffers, and no others."""
    for name in _persistent(module).keys() - buffers.keys():
        del module._buffers[name]
    module._buffers.update(buffers)


def _persistent(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers of a module that are in its state, with those that are None."""
    left = module._non_persistent_buffers_set
    return {name: own for name, own in module._buffers.items() if name not in left}


def _equal(tensor: Tensor, value: Tensor) -> bool:
    """Return whether a tensor has the shape and, in its dtype, the bits of a value."""
    value = value.to(tensor.device, tensor.dtype)
    return tensor.shape == value.shape and torch.equal(_bits(tensor), _bits(value))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class MadeModel:
    """The entries of a model as it was made, into which the state of a run is to be restored."""

    def __init__(self, model: nn.Module) -> None:
        state = model.state_dict()
        self._entries = self._restorable = _shapes(model, state)
        self._parameters = parameters_in(model, state)
        self._buffers = {
            path: {
                name: None if own is None else (own.shape, own.dtype, own.device)
                for name, own in _persistent(module).items()
            }
            for path, module in model.named_modules()
        }

    @torch.no_grad()
    def check(self, model: nn.Module) -> None:
        """Raise ValueError for a state of the model that would not be restored. Local.

        Where its buffers are others now, or of other shapes, `load_state_dict` is tried with zeros
        in the shapes of before.
        """
        state, made = model.state_dict(), self._entries
        now = _shapes(model, state)
        if now in (made, self._restorable):
            return
        changed = [n for n in {**made, **now} if n not in made or n not in now or made[n] != now[n]]
        buffers: Buffers = {
            path: {
                name: kind and torch.zeros(kind[0], dtype=kind[1], device=kind[2])
                for name, kind in own.items()
            }
            for path, own in self._buffers.items()
        }
        present = {path: _persistent(module) for path, module in model.named_modules()}
        if not {*self._parameters, *parameters_in(model, state)}.isdisjoint(changed):
            reason = "parameters have changed"
        elif any(
            own and path not in other
            for one, other in ((buffers, present), (present, buffers))
            for path, own in one.items()
        ):
            reason = "modules were added or removed"
        else:
            reason = why_not_taken(model, state, buffers)
        if reason:
            absent = "absent"
            shown = [f"{n} is {now.get(n, absent)}, and was {made.get(n, absent)}" for n in changed]
            raise ValueError(
                f"the model is not as it was made: {first_names(shown, _SHOWN)}; its "
                f"load_state_dict would not restore this ({reason}): give each entry its last "
                "shape when the model is made, or define _load_from_state_dict to take others"
            )
        self._restorable = now


def _shapes(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes of entries; None of copies, which may be of any."""
    copies = copies_in(model, state)
    return {n: None if n in copies else tuple(t.shape) for n, t in state.items()}


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
