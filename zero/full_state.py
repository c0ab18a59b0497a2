"""The whole state of an optimizer in the form of torch's `Optimizer.state_dict`."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero.collectives import Collectives, gather_objects
from zero.shard import ParamGroup
from zero.state import MASTER, SYNC, StateSlice

Shape = tuple[int, ...]


class PartOfState(list[dict[str, Any]]):
    """The slices of one rank, which are not the whole state. Refuses to be pickled."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "PartOfState":
        return PartOfState(copy.deepcopy(list(self), memo))

    def __reduce_ex__(self, protocol: object) -> Any:
        """Raise RuntimeError with one sentence that names the ways to save."""
        raise RuntimeError(
            "optimizer.state_dict() has only this rank's slices of the state: save "
            "optimizer.full_state_dict(), which all ranks call, or use world.checkpoints; to save "
            'the slices of every rank in a file of its own, put list(state["slices"]) in their '
            "place"
        )


def whole_tensors(
    collectives: Collectives, names: Iterable[str], slices: Iterable[StateSlice], *, sharded: bool
) -> dict[str, dict[str, Any]]:
    """Return the state of each parameter, by name, on every rank. Collective if `sharded`.

    Tensors have the parameter's shape, and lie in host memory of their own. State of sync schedules
    is left out.
    """
    own: dict[str, list[StateSlice]] = {}
    for piece in slices:
        own.setdefault(piece.name, []).append(piece)
    states = {}
    for name in names:
        parts = [_on_host(piece) for piece in own.get(name, [])]
        if sharded:
            parts = [part for of_rank in gather_objects(collectives, parts) for part in of_rank]
        states[name] = _join(sorted(parts, key=lambda part: part.low))
    return states


def _on_host(piece: StateSlice) -> StateSlice:
    tensors = {k: t.to("cpu", copy=True) for k, t in piece.tensors.items() if SYNC not in k}
    others = {
        k: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else copy.deepcopy(v)
        for k, v in piece.others.items()
    }
    return piece._replace(tensors=tensors, others=others)


def _join(parts: Sequence[StateSlice]) -> dict[str, Any]:
    """Join the slices of one parameter; of one without elements there are none."""
    if not parts:
        return {}
    first = parts[0]
    inverse = sorted(range(len(first.order)), key=first.order.__getitem__)
    state: dict[str, Any] = dict(first.others)
    for key in first.tensors:
        flat = torch.cat([part.tensors[key] for part in parts])
        turned = flat.view([first.shape[dimension] for dimension in first.order])
        state[key] = turned.permute(inverse).reshape(first.shape)
    return state


def to_plain(states: Mapping[str, dict[str, Any]], groups: Sequence[ParamGroup]) -> dict[str, Any]:
    """Return torch's form, in which parameters have numbers, of states by name.

    `groups` have names as "params". Master weights go into an entry that torch ignores.
    """
    plain: dict[str, Any] = {"state": {}, "param_groups": [], MASTER: {}}
    number = 0
    for group in groups:
        numbers = []
        for name in group["params"]:
            state = dict(states.get(name, {}))
            if MASTER in state:
                plain[MASTER][number] = state.pop(MASTER)
            if state:
                plain["state"][number] = state
            numbers.append(number)
            number += 1
        plain["param_groups"].append({**copy.deepcopy(group), "params": numbers})
    return plain


def from_plain(
    plain: Mapping[str, Any],
    given: Sequence[Sequence[str]],
    trained: Sequence[Sequence[str]],
    shapes: Mapping[str, Shape],
) -> tuple[list[StateSlice], list[ParamGroup]]:
    """Return slices and groups with names, from torch's form.

    Its groups have as many parameters as the `given` ones, by name, or as the `trained` ones among
    them, in their order. Raises ValueError for others, and for tensors of other shapes.
    """
    lengths = [len(group["params"]) for group in plain["param_groups"]]
    names = next((n for n in (given, trained) if [*map(len, n)] == lengths), None)
    if names is None:
        raise ValueError(
            f"the state has parameter groups of {lengths} parameters, and this optimizer of "
            f"{[*map(len, given)]}: give it the same groups"
        )
    slices, groups = [], []
    for group, own, kept in zip(plain["param_groups"], names, trained, strict=True):
        groups.append({**group, "params": list(kept)})
        groups[-1].pop("param_names", None)
        for name, number in zip(own, group["params"], strict=True):
            if name not in kept:
                continue
            state = dict(plain["state"].get(number, {}))
            if number in plain.get(MASTER, {}):
                state[MASTER] = plain[MASTER][number]
            slices.append(_slice_of(name, shapes[name], state))
    return slices, groups


def _slice_of(name: str, shape: Shape, state: Mapping[str, Any]) -> StateSlice:
    size = torch.Size(shape)
    tensors, others = {}, {}
    for key, value in state.items():
        by_element = isinstance(value, Tensor) and tuple(value.shape) == shape
        if by_element and (value.dim() or key == MASTER):
            tensors[key] = value.detach().contiguous().reshape(-1)
        else:
            others[key] = value
    long = tuple(place for place, length in enumerate(shape) if length > 1)
    return StateSlice(name, shape, long, 0, size.numel(), tensors, others)
