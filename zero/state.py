"""The optimizer's state by parameter name and element range, independent of ranks, or whole.

    parameter w of 8 elements, on two ranks:

    rank 0   slice(w, 0 to 5)   exp_avg (5)   exp_avg_sq (5)   step
    rank 1   slice(w, 5 to 8)   exp_avg (3)   exp_avg_sq (3)   step

A rank can load any slices that cover what it owns, of any number of ranks and any stage.

Tensors of the parameter's shape may lie in containers, as in a list of momenta. What is kept under
a key that is no parameter has no slices, and should be the same on all ranks.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero.collectives import Collectives, gather_objects
from zero.kernels import order
from zero.nested import Path, leaves, map_leaves
from zero.param_groups import hyperparameters
from zero.shard import OptimizerShard, OwnedSlice, ParamGroup

MASTER = "master"  # the key of the master weights
SYNC = "sync."  # the beginning of keys of the sync schedule
LOCAL = f"{SYNC}local"  # the key of parameters that differ between replicas
UNSENT = f"{SYNC}unsent"  # of what a replica has not sent yet
EXACT = f"{SYNC}exact"  # of master weights whose rounded values were loaded into the parameters
ROUNDED = (torch.bfloat16, torch.float16)  # to which master weights may be rounded
PER_REPLICA = frozenset({UNSENT, LOCAL})  # keys of tensors in which replicas differ


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
    others: dict[Any, Any]  # the rest: step counts, statistics of rows, containers
    # Where tensors belong that lie in a container of `others`, which has None there.
    places: Mapping[str, Path] = {}

    @property
    def whole(self) -> bool:
        """True for the whole parameter."""
        return self.high - self.low == torch.Size(self.shape).numel()


def own_slices(
    owned: OptimizerShard,
    state: Mapping[Tensor, dict[str, Any]],
    sync_state: Callable[[Tensor], dict[str, Tensor]] | None = None,
) -> Iterator[StateSlice]:
    """Yield a slice for each slice that this rank owns, in their order. Local.

    Tensors are the optimizer's own memory, where it has the memory format of the parameter.
    `sync_state` returns what else is kept for an updated tensor, in its shape.
    """
    for own in owned.pieces:
        piece, shape = own.piece, own.tensor.shape
        tensors, others, places = _split(state.get(own.tensor, {}), shape, own.flattened)
        if own.has_master:
            tensors[MASTER] = own.flattened(own.tensor)
        if sync_state is not None:
            tensors |= {k: own.flattened(value) for k, value in sync_state(own.tensor).items()}
        name, memory_order = piece.spec.name, order(own.parameter)
        place = piece.spec.shape, memory_order, piece.low, piece.high
        yield StateSlice(name, *place, tensors, others, places)


def _split(
    state: Mapping[Any, Any], shape: Sequence[int], flat: Callable[[Tensor], Tensor]
) -> tuple[dict[str, Tensor], dict[Any, Any], dict[str, Path]]:
    """Return the `tensors`, `others` and `places` of a slice from its state."""
    tensors: dict[str, Tensor] = {}
    places: dict[str, Path] = {}

    def take(path: Path, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.dim() and value.shape == torch.Size(shape)):
            return value
        name = "/".join(map(str, path))
        while name in tensors or name == MASTER or name.startswith(SYNC):
            name = f"own.{name}"
        tensors[name] = flat(value.detach())
        if path != (name,):
            places[name] = path
        return None

    others = map_leaves(dict(state), take)
    return tensors, {k: v for k, v in others.items() if k not in tensors or k in places}, places


def check_state(owned: OptimizerShard, optimizer: torch.optim.Optimizer) -> None:
    """Raise UnsliceableStateError, a RuntimeError, for state that slices cannot hold. Local.

    That of a parameter is a dictionary. Where the parameter is cut, it has tensors of the slice's
    shape, numbers, strings, None, and containers of these.
    """
    state = optimizer.state
    if lost := beyond_state(optimizer):
        raise UnsliceableStateError(lost)
    for own in owned.pieces:
        kept = state.get(own.tensor, {})
        if not isinstance(kept, dict):
            raise UnsliceableStateError(
                f"{type(optimizer).__name__} keeps a {type(kept).__name__} as the state of a "
                "parameter, which has to be a dictionary: choose another optimizer"
            )
        for path, value in () if own.piece.whole else leaves(kept):
            plain = value is None or isinstance(value, bool | int | float | complex | str)
            if not plain and not (
                isinstance(value, Tensor) and value.shape in (own.tensor.shape, torch.Size())
            ):
                kind = type(value).__name__
                shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
                raise UnsliceableStateError(
                    f"its state {'/'.join(map(str, path))} is a {kind}{shape}, which has no part "
                    'for each element, as partition="element" needs'
                )


def beyond_state(optimizer: torch.optim.Optimizer) -> str:
    """Return what `state_dict` of a class of its own does not take from `state` and groups. Local.

    In a sentence; empty if there is none.
    """
    own, hooks = type(optimizer).state_dict, optimizer._optimizer_state_dict_post_hooks
    if own is torch.optim.Optimizer.state_dict and not hooks:
        return ""
    saved = optimizer.state_dict()
    kept = set(_paths(optimizer.state, optimizer.param_groups))
    odd = kept.symmetric_difference(_paths(saved["state"], saved["param_groups"]))
    if not odd:
        return ""
    where = "/".join(map(str, min(odd, key=str)))
    return (
        f"{type(optimizer).__name__}.state_dict() differs from its state and param_groups in "
        f"{where}, which checkpoints would lose: keep it there, or give the optimizer that it wraps"
    )


def _paths(state: Mapping[Any, Any], groups: Iterable[dict[str, Any]]) -> Iterator[Path]:
    """Yield the places of values in a state, by the order of its entries, and in groups."""
    options = [hyperparameters(group) for group in groups]
    for path, _ in leaves({"state": [*state.values()], "param_groups": options}):
        yield path


class UnsliceableStateError(RuntimeError):
    """State of an optimizer that has no slices."""


def unnamed_state(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the entries under keys that are no tensors. Not copied."""
    return {key: value for key, value in state.items() if not isinstance(key, Tensor)}


def _first_difference(some: Any, others: Any) -> str:
    """Return the path of the first value that two containers do not have alike, or nothing."""
    mine, theirs = dict(leaves(some)), dict(leaves(others))
    for path in {**mine, **theirs}:
        if path not in mine or path not in theirs or not _same(mine[path], theirs[path]):
            return "/".join(map(str, path))
    return ""


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal; NaN is equal to NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        one, other = one.cpu(), other.cpu()
        if one.shape != other.shape:
            return False
        return bool(((one == other) | (one.isnan() & other.isnan())).all())
    return repr(one) == repr(other) or (isinstance(one, Real) and one == other)


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
    load_sync_state: Callable[[Tensor, dict[str, Tensor]], None] | None,
    *,
    options: Iterable[Mapping[str, Any]],
    unnamed: Mapping[Any, Any],
) -> None:
    """Copy what this rank owns out of slices, which are read one by one. Local.

    The torch optimizer also loads `options`, one mapping of hyperparameters for each group, and
    gets copies of the `unnamed` state.
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
        if load_sync_state is not None:
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
    plain = {number: map_leaves(state, _for_torch) for number, state in numbered.items()}
    optimizer.load_state_dict({"state": plain, "param_groups": groups})
    for piece in owned.pieces:
        _restore_containers(optimizer.state.get(piece.tensor), states.get(id(piece.tensor), {}))
    owned.forget_rounding()
    optimizer.state.update(stand_ins)  # some optimizers make states in their constructor alone
    optimizer.state.update(_on_devices(unnamed, unnamed_state(optimizer.state), owned))


def _on_devices(
    unnamed: Mapping[Any, Any], replaced: Mapping[Any, Any], owned: OptimizerShard
) -> dict[Any, Any]:
    """Return a copy of the state under keys that are no parameters, on the devices of its tensors.

    Those of a checkpoint are on the CPU. They are moved to where what they replace is; floats that
    replace nothing to where the parameters are.
    """
    before = dict(leaves(replaced))
    device = next((parameter.device for parameter in owned.named.values()), None)

    def moved(path: Path, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if isinstance(old := before.get(path), Tensor):
            return value.to(old.device)
        return value.to(device) if value.is_floating_point() else value

    copied: dict[Any, Any] = map_leaves(copy.deepcopy(dict(unnamed)), moved)
    return copied


def _for_torch(_: Path, value: Any) -> Any:
    """Return None for values that torch would take for containers of tensors, such as strings."""
    return None if isinstance(value, Iterable) and not isinstance(value, Tensor) else value


def _restore_containers(loaded: Any, state: Mapping[Any, Any]) -> None:
    """Put what torch has not loaded as it was, such as strings, into a loaded state, in place."""
    for key, value in state.items():
        if isinstance(value, Iterable) and not isinstance(value, Tensor):
            tensors = {p: t for p, t in leaves(loaded[key], (key,)) if isinstance(t, Tensor)}
            loaded[key] = map_leaves(value, tensors.get, (key,))


class _SliceAssembler:
    """The state of one owned slice, assembled from saved slices of any extent."""

    def __init__(self, owned: OwnedSlice) -> None:
        self.owned = owned
        self._tensors: dict[str, Tensor] = {}
        self._others: dict[Any, Any] = {}
        self._places: Mapping[str, Path] = {}
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
        if len(self._covered) == 1:
            self._others, self._places = map_leaves(part.others, _copied), part.places
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
        for path, value in leaves(part.others):
            rows = isinstance(value, Tensor) and value.dim()
            if rows and not (self.owned.piece.whole and part.whole):
                key = "/".join(map(str, path))
                return f"{part.name} is cut, and its {key} is of the whole parameter"
        for key, tensor in part.tensors.items():
            if tensor.shape != (part.high - part.low,):
                return f"{key} of {part.name} has another length than its slice"
        if len(self._covered) == 1:
            return ""
        differing = sorted(part.tensors.keys() ^ self._tensors.keys())
        return _slices_differ(part.name, differing, (self._others, part.others))

    def assemble(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the states for the torch optimizer and for the sync schedule.

        Copies the master weights, and parameters of this replica, in place.
        """
        owned = self.owned
        tensors = {key: owned.in_shape(self._turned(value)) for key, value in self._tensors.items()}
        others = _filled(self._others, self._places, tensors)
        sync_state = {k: tensors.pop(k) for k in self._tensors if k.startswith(SYNC)}
        master, local = tensors.pop(MASTER, None), sync_state.pop(LOCAL, None)
        if (exact := sync_state.pop(EXACT, None)) is not None:
            master = local = _where_rounded(exact, owned.home)
        if master is not None and owned.has_master:
            owned.tensor.copy_(master)
        if local is not None:
            owned.tensor.copy_(local)
            if owned.has_master:
                owned.home.copy_(owned.rounded())
        elif master is None and owned.has_master:
            owned.tensor.copy_(owned.home)
        return {**others, **tensors}, sync_state

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


def _where_rounded(master: Tensor, parameter: Tensor) -> Tensor:
    """Return master weights, but a parameter's elements where they are not these, rounded."""
    same = [master.to(dtype).to(parameter.dtype) == parameter for dtype in ROUNDED]
    return torch.where(same[0] | same[1], master, parameter.to(master.dtype))


def _copied(_: Path, value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _filled(
    others: Mapping[Any, Any], places: Mapping[str, Path], tensors: dict[str, Tensor]
) -> dict[Any, Any]:
    """Return new containers with the tensors that belong there, which are taken out of `tensors`.

    Others of `tensors` stay.
    """
    placed = {tuple(path): tensors.pop(name) for name, path in places.items() if name in tensors}
    filled: dict[Any, Any] = map_leaves(dict(others), placed.get)
    return filled


def _slices_differ(name: str, lacking: Sequence[str], others: tuple[Any, Any]) -> str:
    """Return a sentence on tensors that not all slices have, or other values, or nothing."""
    if lacking:
        return f"not all slices of {name} have {', '.join(lacking)}"
    path = _first_difference(*others)
    if not path:
        return ""
    values = [str(dict(_named_leaves(each)).get(path, "none")) for each in others]
    return f"the slices of {name} have {path} {' and '.join(values)}"


def _named_leaves(value: Any) -> Iterator[tuple[str, Any]]:
    return (("/".join(map(str, path)), each) for path, each in leaves(value))


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


def whole_states(
    collectives: Collectives, names: Iterable[str], slices: Iterable[StateSlice], *, sharded: bool
) -> dict[str, tuple[dict[Any, Any], Tensor | None]]:
    """Return each parameter's state and master weights, by name, on every rank.

    Collective if `sharded`. Tensors have the parameter's shape, and lie in host memory of their
    own. State of sync schedules is left out. Raises RuntimeError on all ranks for a number that
    differs between the slices of a parameter.
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


def whole_unnamed_state(
    collectives: Collectives, state: Mapping[Any, Any], *, sharded: bool
) -> dict[Any, Any]:
    """Return a copy of `unnamed_state`, in host memory. Collective if `sharded`.

    Raises RuntimeError on all ranks if theirs differ.
    """
    own: dict[Any, Any] = map_leaves(unnamed_state(state), _to_host)
    for other in gather_objects(collectives, own) if sharded else ():
        if path := _first_difference(own, other):
            raise RuntimeError(
                f"optimizer.state has {path} under a key that is no parameter, and it differs "
                "between ranks: world.checkpoints saves that of each rank"
            )
    return own


def _to_host(_: Path, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)


def _on_host(piece: StateSlice) -> StateSlice:
    kept = {k: t for k, t in piece.tensors.items() if not k.startswith(SYNC)}
    tensors, others = map_leaves((kept, piece.others), _to_host)
    return piece._replace(tensors=tensors, others=others)


def _join(parts: Sequence[StateSlice]) -> tuple[dict[Any, Any], Tensor | None]:
    """Join the slices of one parameter; of one without elements there are none."""
    if not parts:
        return {}, None
    first = parts[0]
    inverse = sorted(range(len(first.order)), key=first.order.__getitem__)
    tensors = {}
    for part in parts[1:]:
        lacking = sorted(part.tensors.keys() ^ first.tensors.keys())
        if problem := _slices_differ(first.name, lacking, (first.others, part.others)):
            raise RuntimeError(problem)
    for key in first.tensors:
        flat = torch.cat([part.tensors[key] for part in parts])
        turned = flat.view([first.shape[dimension] for dimension in first.order])
        tensors[key] = turned.permute(inverse).reshape(first.shape)
    master = tensors.pop(MASTER, None)
    return {**_filled(first.others, first.places, tensors), **tensors}, master


def to_torch(
    states: Mapping[str, tuple[dict[Any, Any], Tensor | None]],
    unnamed: Mapping[Any, Any],
    groups: Sequence[ParamGroup],
) -> dict[str, Any]:
    """Return torch's form, in which parameters have numbers, of states by name.

    `groups` have names as "params". Master weights go into an entry that torch ignores.
    """
    made: dict[str, Any] = {"state": {}, "param_groups": [], MASTER: {}}
    number = 0
    for group in groups:
        numbers = []
        for name in group["params"]:
            state, master = states.get(name, ({}, None))
            if master is not None:
                made[MASTER][number] = master
            if state:
                made["state"][number] = state
            numbers.append(number)
            number += 1
        made["param_groups"].append({**copy.deepcopy(group), "params": numbers})
    made["state"].update(unnamed)
    return made


def from_torch(
    saved: Mapping[str, Any],
    given: Sequence[Sequence[str]],
    trained: Sequence[Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[list[StateSlice], list[ParamGroup], dict[Any, Any]]:
    """Return slices, groups with names, and the state of no parameter, from torch's form.

    Its groups have as many parameters as the `given` ones, by name, or as the `trained` ones among
    them, in their order. Raises ValueError for others, and for tensors of other shapes.
    """
    lengths = [len(group["params"]) for group in saved["param_groups"]]
    names = next((n for n in (given, trained) if [*map(len, n)] == lengths), None)
    if names is None:
        raise ValueError(
            f"the state has parameter groups of {lengths} parameters, and this optimizer of "
            f"{[*map(len, given)]}: give it the same groups"
        )
    slices, groups = [], []
    for group, own, kept in zip(saved["param_groups"], names, trained, strict=True):
        groups.append({**group, "params": list(kept)})
        groups[-1].pop("param_names", None)
        for name, number in zip(own, group["params"], strict=True):
            if name not in kept:
                continue
            state, master = saved["state"].get(number, {}), saved.get(MASTER, {}).get(number)
            slices.append(_slice_of(name, shapes[name], state, master))
    numbers = {number for group in saved["param_groups"] for number in group["params"]}
    unnamed = {key: value for key, value in saved["state"].items() if key not in numbers}
    return slices, groups, unnamed


def _slice_of(
    name: str, shape: tuple[int, ...], state: Mapping[Any, Any], master: Tensor | None
) -> StateSlice:
    def flat(tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous().reshape(-1)

    tensors, others, places = _split(state, shape, flat)
    if master is not None and tuple(master.shape) == shape:
        tensors[MASTER] = flat(master)
    long = tuple(place for place, length in enumerate(shape) if length > 1)
    numel = torch.Size(shape).numel()
    return StateSlice(name, shape, long, 0, numel, tensors, others, places)
