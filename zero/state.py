"""The optimizer's state by parameter name and element range, never by rank.

    parameter w of 8 elements, on two ranks:

    rank 0   slice(w, 0 to 5)   exp_avg (5)   exp_avg_sq (5)   step
    rank 1   slice(w, 5 to 8)   exp_avg (3)   exp_avg_sq (3)   step

Any set of slices that covers what a rank owns can be loaded there: of another number of ranks,
another stage, or one slice a parameter as `gathered_slices` gives them.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero.collectives import Collectives
from zero.layout import Bucket
from zero.master_weights import OptimizerShard, OwnedSlice
from zero.objects import gather_objects
from zero.tensor_views import order

MASTER = "master"  # the key of the fp32 master weights


class StateSlice(NamedTuple):
    """What the optimizer keeps for elements low to high of one parameter.

    Elements are counted in the order in which the parameter lies in memory.
    """

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    order: tuple[int, ...]  # its dimensions in that order: see `zero.tensor_views.order`
    low: int
    high: int
    tensors: dict[str, Tensor]  # flat, high - low elements each
    others: dict[str, Any]  # whatever is not by element: step counts, statistics of rows

    @property
    def whole(self) -> bool:
        """Whether it is of all of the parameter."""
        return self.high - self.low == torch.Size(self.shape).numel()


State = MutableMapping[Tensor, dict[str, Any]]


def own_slices(owned: OptimizerShard, state: State) -> Iterator[StateSlice]:
    """The slices of what this rank owns, in the order of its pieces. Local.

    Tensors are the optimizer's own memory, where they lie in it as they do in the parameter.
    """
    for piece in owned.pieces:
        yield _slice(piece, state)


def gathered_slices(
    collectives: Collectives, plan: Sequence[Bucket], owned: OptimizerShard, state: State, root: int
) -> Iterator[StateSlice]:
    """Whole slices, one a parameter, on root; nothing on other ranks. Collective throughout.

    Bucket by bucket, so that besides its own no rank holds the state of more than one.
    """
    for index, bucket in enumerate(plan):
        mine = {p.piece.start: _slice(p, state) for p in owned.pieces if p.index == index}
        yield from _gathered_bucket(collectives, bucket, mine, root, owned.device)


def _gathered_bucket(
    collectives: Collectives,
    bucket: Bucket,
    mine: Mapping[int, StateSlice],
    root: int,
    device: torch.device,
) -> Iterator[StateSlice]:
    """The slices of one bucket; `mine` are this rank's, by where they start in it."""
    # What is not by element is small, and travels with the list of what is.
    outlines = [
        (
            one._replace(tensors={}, others={k: _on_cpu(v) for k, v in one.others.items()}),
            {key: tensor.dtype for key, tensor in one.tensors.items()},
        )
        for one in mine.values()
    ]
    everyone = [one for theirs in gather_objects(collectives, outlines) for one in theirs]
    kinds = sorted({kind for _, dtypes in everyone for kind in dtypes.items()}, key=str)
    whole: dict[tuple[str, torch.dtype], Tensor] = {}
    for key, dtype in kinds:
        flat = torch.zeros(bucket.numel, dtype=dtype, device=device)
        for start, one in mine.items():
            if key in one.tensors and one.tensors[key].dtype == dtype:
                flat[start : start + one.high - one.low] = one.tensors[key]
        collectives.all_gather(flat, bucket.bounds).wait()
        if collectives.rank == root:
            whole[key, dtype] = flat
    if collectives.rank != root:
        return
    by_name = {outline.name: (outline, dtypes) for outline, dtypes in reversed(everyone)}
    for entry in bucket.entries:
        if entry.spec.name in by_name:  # it has elements
            outline, dtypes = by_name[entry.spec.name]
            tensors = {  # copies: who keeps one does not keep the bucket
                kind[0]: whole[kind][entry.start : entry.stop].clone() for kind in dtypes.items()
            }
            yield outline._replace(low=0, high=entry.spec.numel, tensors=tensors)


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def take_slices(
    owned: OptimizerShard,
    optimizer: torch.optim.Optimizer,
    slices: Iterable[StateSlice],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Copy what this rank owns out of slices, which are looked at one by one. Local.

    `shapes` are those of all the model's parameters. A master that slices lack is left as it is,
    one that is not needed is passed over. The torch optimizer loads the rest, and casts and moves
    it as it does. ValueError, before anything is changed, that names all that does not fit.
    """
    takers = {piece.piece.spec.name: _Taker(piece) for piece in owned.pieces}
    wrong: dict[str, str] = {}
    for one in slices:
        if one.name not in shapes:
            wrong[one.name] = f"{one.name} is no parameter of this model"
        elif tuple(one.shape) != shapes[one.name]:
            wrong[one.name] = f"{one.name} is {tuple(one.shape)} there, {shapes[one.name]} here"
        elif one.name in takers:
            takers[one.name].take(one)
    for name, taker in takers.items():
        if problem := taker.problem():
            wrong.setdefault(name, problem)
    if wrong:
        raise ValueError(f"the state does not fit this optimizer: {'; '.join(wrong.values())}")
    states = {id(t.owned.tensor): state for t in takers.values() if (state := t.give())}
    numbers: dict[int, int] = {}
    groups = []
    for group in optimizer.param_groups:
        params = [numbers.setdefault(id(tensor), len(numbers)) for tensor in group["params"]]
        groups.append({**group, "params": params})
    numbered = {numbers[tensor]: state for tensor, state in states.items()}
    optimizer.load_state_dict({"state": numbered, "param_groups": groups})


class _Taker:
    """The state of one piece, while it is put together out of slices."""

    def __init__(self, owned: OwnedSlice) -> None:
        self.owned = owned
        self._found: dict[str, Any] = {}
        self._covered: list[tuple[int, int]] = []
        self._keys: set[str] | None = None
        self._by_element: set[str] = set()
        self._problem = ""

    def take(self, one: StateSlice) -> None:
        """Copy what a slice of this piece's parameter has of the piece."""
        piece = self.owned.piece
        low, high = max(piece.low, one.low), min(piece.high, one.high)
        if low >= high:
            return
        self._covered.append((low, high))
        self._problem = self._problem or self._mismatch(one)
        if self._problem:
            return
        for key, value in one.others.items():
            self._found.setdefault(key, value.clone() if isinstance(value, Tensor) else value)
        for key, value in one.tensors.items():
            if key not in self._found:
                device = self.owned.tensor.device
                self._found[key] = torch.empty(piece.numel, dtype=value.dtype, device=device)
                self._by_element.add(key)
            part = value[low - one.low : high - one.low]
            self._found[key][low - piece.low : high - piece.low] = part

    def problem(self) -> str:
        """What hinders `give`, or nothing."""
        piece, at = self.owned.piece, self.owned.piece.low
        for low, high in sorted(self._covered):
            if low != at:
                break
            at = high
        else:
            if at == piece.high:
                return self._problem
        held = ", ".join(f"{low} to {high}" for low, high in sorted(self._covered)) or "none"
        return (
            f"{piece.spec.name} needs the elements {piece.low} to {piece.high}, each once, and the "
            f"slices hold of them {held}"
        )

    def _mismatch(self, one: StateSlice) -> str:
        """Why a slice does not go with the piece or with those before it; or nothing."""
        if tuple(one.order) != order(self.owned.parameter):
            return (
                f"{one.name} lies in memory in the order {tuple(one.order)} of its dimensions "
                f"there, {order(self.owned.parameter)} here: use the same memory format"
            )
        for key, value in one.others.items():
            if not isinstance(value, Tensor) or not value.dim():
                if key in self._found and self._found[key] != value:
                    return f"the slices of {one.name} have {key} {self._found[key]} and {value}"
            elif not (self.owned.piece.whole and one.whole):
                return f"{one.name} is cut, and its {key} is of the whole parameter"
        for key, value in one.tensors.items():
            if value.shape != (one.high - one.low,):
                return (
                    f"{key} of {one.name} is {tuple(value.shape)}, for the elements {one.low} to "
                    f"{one.high}"
                )
        keys = {*one.others, *one.tensors}
        if self._keys is not None and keys != self._keys:
            odd = ", ".join(sorted(keys ^ self._keys))
            return f"not all slices of {one.name} have {odd}"
        self._keys = keys
        return ""

    def give(self) -> dict[str, Any]:
        """The state, as the torch optimizer has it; the master goes to its place."""
        found = {
            key: self.owned.in_shape(value) if key in self._by_element else value
            for key, value in self._found.items()
        }
        master = found.pop(MASTER, None)
        if master is not None and self.owned.has_master:
            self.owned.tensor.copy_(master)
        return found


def _slice(owned: OwnedSlice, state: State) -> StateSlice:
    piece, tensors, others = owned.piece, {}, {}
    for key, value in state.get(owned.tensor, {}).items():
        if isinstance(value, Tensor) and value.dim() and value.shape == owned.tensor.shape:
            tensors[key] = owned.flattened(value.detach())
        else:
            others[key] = value
    if owned.has_master:
        tensors[MASTER] = owned.flattened(owned.tensor)
    return StateSlice(
        piece.spec.name,
        piece.spec.shape,
        order(owned.parameter),
        piece.low,
        piece.high,
        tensors,
        others,
    )
