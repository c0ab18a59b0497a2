"""The optimizer's state by parameter name and element range, independent of ranks, or whole.

    parameter w of 8 elements, on two ranks:

    rank 0   slice(w, 0 to 5)   exp_avg (5)   exp_avg_sq (5)   step
    rank 1   slice(w, 5 to 8)   exp_avg (3)   exp_avg_sq (3)   step

A rank can load any slices that cover what it owns, of any number of ranks and any stage.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero.collectives import Collectives, gather_objects
from zero.kernels import order
from zero.shard import OptimizerShard, OwnedSlice, ParamGroup

MASTER = "master"  # the key of the master weights
SYNC = "sync."  # the beginning of keys of the sync schedule
LOCAL = f"{SYNC}local"  # the key of parameters that differ between replicas
ERROR = f"{SYNC}error"  # of what a replica has not sent yet, since it was rounded
UNSENT = f"{SYNC}unsent"  # since it was not among the largest
RESIDUALS = frozenset({ERROR, UNSENT})
PER_REPLICA = RESIDUALS | {LOCAL}  # the keys of the sync schedule whose tensors replicas differ in


class StateSlice(NamedTuple):
    """The optimizer's state of elements low to high of one parameter.

    Elements are numbered in the order in which the parameter lies in memory.
    """

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    order: tuple[int, ...]  # its dimensions in memory order, as `zero.kernels.order`
    low: int
    high: int
    tensors: dict[str, Tensor]  # flat, high - low elements each
    others: dict[str, Any]  # state that is not by element: step counts, statistics of rows

    @property
    def whole(self) -> bool:
        """True for the whole parameter."""
        return self.high - self.low == torch.Size(self.shape).numel()


def own_slices(
    owned: OptimizerShard,
    state: Mapping[Tensor, dict[str, Any]],
    sync_state: Callable[[Tensor], dict[str, Tensor]],
) -> Iterator[StateSlice]:
    """Yield a slice for each slice that this rank owns, in their order. Local.

    Tensors are the optimizer's own memory, where it has the memory format of the parameter.
    `sync_state` returns what else is kept for an updated tensor, in its shape.
    """
    for own in owned.pieces:
        piece, tensors, others = own.piece, {}, {}
        for key, value in state.get(own.tensor, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape == own.tensor.shape:
                tensors[key] = own.flattened(value.detach())
            else:
                others[key] = value
        if own.has_master:
            tensors[MASTER] = own.flattened(own.tensor)
        tensors |= {k: own.flattened(value) for k, value in sync_state(own.tensor).items()}
        name, shape, memory_order = piece.spec.name, piece.spec.shape, order(own.parameter)
        yield StateSlice(name, shape, memory_order, piece.low, piece.high, tensors, others)


def check_groups(state: Mapping[str, Any], own: list[ParamGroup]) -> list[ParamGroup]:
    """Return the groups of a state dictionary, if they hold the parameter names of `own`. Local.

    Raises ValueError for other groups, and for a dictionary that lacks a key.
    """
    if lacking := {"slices", "param_groups", "loss_scale"} - state.keys():
        raise ValueError(
            f"this is no state_dict of a ZeroOptimizer: it lacks {', '.join(sorted(lacking))}"
        )
    groups: list[ParamGroup] = state["param_groups"]
    if len(groups) != len(own):
        raise ValueError(f"the state has {len(groups)} parameter groups, not {len(own)}")
    for index, (group, own_group) in enumerate(zip(groups, own, strict=True)):
        saved, names = list(map(str, group["params"])), own_group["params"]
        if saved != names:
            differing = ", ".join(sorted({*saved} ^ {*names})) or "the order of its parameters"
            raise ValueError(f"the state's parameter group {index} differs in {differing}")
    return groups


def load_slices(
    owned: OptimizerShard,
    optimizer: torch.optim.Optimizer,
    slices: Iterable[StateSlice],
    shapes: Mapping[str, tuple[int, ...]],
    load_sync_state: Callable[[Tensor, dict[str, Tensor]], None],
    *,
    options: Iterable[Mapping[str, Any]],
) -> None:
    """Copy what this rank owns out of slices, which are read one by one. Local.

    The torch optimizer also loads `options`, one mapping of hyperparameters for each group.
    `shapes` are those of all parameters of the model. Master weights that slices lack become those
    of the parameters, and those that are not needed are ignored. `load_sync_state` gets what
    `sync_state` of `own_slices` returned for each updated tensor. The torch optimizer loads, casts
    and moves the rest. Raises ValueError with every mismatch, before anything is changed.
    """
    assemblers = {piece.piece.spec.name: _SliceAssembler(piece) for piece in owned.pieces}
    mismatches: dict[str, str] = {}
    for part in slices:
        if part.name not in shapes:
            mismatches[part.name] = f"{part.name} is no parameter of this model"
        elif tuple(part.shape) != shapes[part.name]:
            mismatches[part.name] = (
                f"{part.name} has shape {tuple(part.shape)} in the state, {shapes[part.name]} here"
            )
        elif part.name in assemblers:
            assemblers[part.name].add(part)
    for name, assembler in assemblers.items():
        if problem := assembler.problem():
            mismatches.setdefault(name, problem)
    if mismatches:
        raise ValueError(f"the state does not fit this optimizer: {'; '.join(mismatches.values())}")
    states = {}
    for assembler in assemblers.values():
        state, sync_state = assembler.assemble()
        load_sync_state(assembler.owned.tensor, sync_state)
        if state:
            states[id(assembler.owned.tensor)] = state
    numbers: dict[int, int] = {}
    groups = []
    for group, given in zip(optimizer.param_groups, options, strict=True):
        params = [numbers.setdefault(id(tensor), len(numbers)) for tensor in group["params"]]
        groups.append({**group, **given, "params": params})
    numbered = {numbers[tensor]: state for tensor, state in states.items()}
    own = {id(piece.tensor) for piece in owned.pieces}
    stand_ins = {t: state for t, state in optimizer.state.items() if id(t) not in own}
    optimizer.load_state_dict({"state": numbered, "param_groups": groups})
    optimizer.state.update(stand_ins)  # some optimizers make states in their constructor alone


class _SliceAssembler:
    """The state of one owned slice, assembled from saved slices of any extent."""

    def __init__(self, owned: OwnedSlice) -> None:
        self.owned = owned
        self._tensors: dict[str, Tensor] = {}
        self._others: dict[str, Any] = {}
        # Where the state is in another order, it is assembled whole, and turned at the end.
        self._own_order = self._order = order(owned.parameter)
        self._low, self._high = owned.piece.low, owned.piece.high
        self._covered: list[tuple[int, int]] = []
        self._problem = ""

    def add(self, part: StateSlice) -> None:
        """Copy the elements that a slice of the same parameter has in common with this one."""
        if not self._covered and sorted(part.order) == sorted(self._own_order):
            self._begin(tuple(part.order))
        low, high = max(self._low, part.low), min(self._high, part.high)
        if low >= high:
            return
        self._covered.append((low, high))
        self._problem = self._problem or self._mismatch(part)
        if self._problem:
            return
        for key, value in part.others.items():
            self._others.setdefault(key, value.clone() if isinstance(value, Tensor) else value)
        for key, value in part.tensors.items():
            if key not in self._tensors:
                device = self.owned.tensor.device
                numel = self._high - self._low
                self._tensors[key] = torch.empty(numel, dtype=value.dtype, device=device)
            elements = value[low - part.low : high - part.low]
            self._tensors[key][low - self._low : high - self._low] = elements

    def _begin(self, saved_order: tuple[int, ...]) -> None:
        piece, self._order = self.owned.piece, saved_order
        turned = saved_order != self._own_order
        self._low, self._high = (0, piece.spec.numel) if turned else (piece.low, piece.high)

    def problem(self) -> str:
        """Return why the state cannot be assembled, or an empty string."""
        covered = sorted(self._covered)
        ends = [self._low, *(high for _, high in covered)]
        if [low for low, _ in covered] + [self._high] == ends:
            return self._problem
        return (
            f"{self.owned.piece.spec.name} needs the elements {self._low} to {self._high}, each "
            f"once, and the slices hold of them {covered}"
        )

    def _mismatch(self, part: StateSlice) -> str:
        if tuple(part.order) != self._order:
            return f"the slices of {part.name} are in the orders {self._order} and {part.order}"
        for key, value in part.others.items():
            if not isinstance(value, Tensor) or not value.dim():
                if key in self._others and self._others[key] != value:
                    return f"the slices of {part.name} have {key} {self._others[key]} and {value}"
            elif not (self.owned.piece.whole and part.whole):
                return f"{part.name} is cut, and its {key} is of the whole parameter"
        for key, value in part.tensors.items():
            if value.shape != (part.high - part.low,):
                return f"{key} of {part.name} has another length than its slice"
        differing = {*part.others, *part.tensors} ^ {*self._others, *self._tensors}
        if len(self._covered) > 1 and differing:
            return f"not all slices of {part.name} have {', '.join(sorted(differing))}"
        return ""

    def assemble(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the states for the torch optimizer and for the sync schedule.

        Copies the master weights, and parameters of this replica, in place.
        """
        owned = self.owned
        tensors = {key: owned.in_shape(self._turned(value)) for key, value in self._tensors.items()}
        sync_state = {k: tensors.pop(k) for k in self._tensors if k.startswith(SYNC)}
        master, local = tensors.pop(MASTER, None), sync_state.pop(LOCAL, None)
        if master is not None and owned.has_master:
            owned.tensor.copy_(master)
        if local is not None:
            owned.tensor.copy_(local)
            if owned.has_master:
                owned.home.copy_(owned.rounded())
        elif master is None and owned.has_master:
            owned.tensor.copy_(owned.home)
        return {**self._others, **tensors}, sync_state

    def _turned(self, flat: Tensor) -> Tensor:
        """Return the elements of this slice, in the order of its parameter, of an assembled tensor.

        Flat; the tensor itself if it has that order.
        """
        if self._order == self._own_order:
            return flat
        shape, piece = self.owned.piece.spec.shape, self.owned.piece
        saved = flat.view([shape[dimension] for dimension in self._order])
        own = saved.permute([self._order.index(dimension) for dimension in self._own_order])
        return own.reshape(-1)[piece.low : piece.high].clone()


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
    shapes: Mapping[str, tuple[int, ...]],
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


def _slice_of(name: str, shape: tuple[int, ...], state: Mapping[str, Any]) -> StateSlice:
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
