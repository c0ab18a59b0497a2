"""Which rank saves what: of the optimizer's state what it owns, of what all have an equal share."""

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mntrain.checkpoint import manifest, random_state
from mntrain.checkpoint.format import FileLayout
from mntrain.checkpoint.manifest import MODEL, OPTIMIZER, RANDOM, FileContents
from mntrain.checkpoint.snapshot import ByteRange
from mntrain.world import World
from zero.layout import split
from zero.optimizer import ZeroOptimizer
from zero.state import StateSlice

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
Outline = tuple[StateSlice, dict[str, torch.dtype]]  # a slice without its tensors; their dtypes


@dataclass(frozen=True)
class RankContents:
    """What a rank tells the others of its part, without the tensors."""

    outlines: list[Outline]
    random: dict[str, int]  # bytes of its random states
    token: str  # a name that no other has
    refusal: str | None = None  # why it cannot be saved


class RankShare:
    """What this rank has to save, as it is now: views of the tensors."""

    def __init__(self, world: World, model: nn.Module, optimizer: ZeroOptimizer) -> None:
        self._rank, self._size = world.rank, world.size
        self._model: dict[str, Tensor] = dict(model.state_dict())
        self._slices = _on_host(self._own(optimizer))
        self._random = random_state.captured(world.device)

    @property
    def nbytes(self) -> int:
        """Bytes of it, about."""
        state = sum(tensor.nbytes for one in self._slices for tensor in one.tensors.values())
        model = sum(tensor.nbytes for tensor in self._model.values()) // self._size
        return state + model + sum(tensor.nbytes for tensor in self._random.values())

    def told(self) -> RankContents:
        """What the others have to know of it."""
        sizes = {key: len(state) for key, state in self._random.items()}
        token = secrets.token_hex(4)
        try:
            return RankContents([_outline(one) for one in self._slices], sizes, token)
        except ValueError as error:
            return RankContents([], sizes, token, refusal=str(error))

    def ranges(self) -> Iterator[ByteRange]:
        """All of it. Views, but for parameters that do not lie row by row."""
        for one in self._slices:
            for key, tensor in one.tensors.items():
                yield ByteRange(OPTIMIZER, f"{one.name}/{key}", tensor, one.low)
        tensors = list(self._model.items())
        for index, low, high in self._share([tensor.numel() for _, tensor in tensors]):
            name, tensor = tensors[index]
            yield ByteRange(MODEL, name, tensor.detach().reshape(-1)[low:high], low)
        for key, state in self._random.items():
            yield ByteRange(RANDOM, f"{self._rank}/{key}", state, 0)

    def layouts(self, everyone: Sequence[RankContents]) -> dict[str, FileLayout]:
        """Where everything lies in the files. ValueError for a dtype that they do not have."""
        outlines = [one for theirs in everyone for one in theirs.outlines]
        return {
            MODEL: FileLayout.of(shapes(self._model)),
            OPTIMIZER: FileLayout.of(_state_shapes(outlines)),
            RANDOM: FileLayout.of(_random_shapes([theirs.random for theirs in everyone])),
        }

    def _own(self, optimizer: ZeroOptimizer) -> Iterator[StateSlice]:
        slices = list(optimizer.slices())
        if optimizer.sharded:
            yield from slices
            return
        for index, low, high in self._share([one.high for one in slices]):
            one = slices[index]
            tensors = {key: tensor[low:high] for key, tensor in one.tensors.items()}
            yield one._replace(low=low, high=high, tensors=tensors)

    def _share(self, lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """This rank's equal share of what all have, in one run: which of it, from, to."""
        first, last = split(sum(lengths), self._size)[self._rank : self._rank + 2]
        at = 0
        for index, length in enumerate(lengths):
            low, high = max(first - at, 0), min(last - at, length)
            if low < high:
                yield index, low, high
            at += length


def kept(everyone: Sequence[RankContents]) -> dict[str, FileContents]:
    """What the optimizers of all ranks keep of each parameter."""
    found: dict[str, FileContents] = {}
    for theirs in everyone:
        for one, dtypes in theirs.outlines:
            found.setdefault(
                one.name, FileContents(one.shape, one.order, tuple(dtypes), one.others)
            )
    return found


def _on_host(slices: Iterable[StateSlice]) -> list[StateSlice]:
    """The same, with what little lies on a GPU besides the tensors (steps) on the host.

    Of each dtype at once: to ask for one by one is to wait for the GPU so often.
    """
    found = list(slices)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for one in found:
        for value in one.others.values():
            if isinstance(value, Tensor) and value.is_cuda:
                by_dtype.setdefault(value.dtype, []).append(value)
    there: dict[int, Tensor] = {}
    for tensors in by_dtype.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
        parts = flat.split([tensor.numel() for tensor in tensors])
        there |= {id(t): part.view(t.shape) for t, part in zip(tensors, parts, strict=True)}
    return [
        one._replace(others={key: there.get(id(v), v) for key, v in one.others.items()})
        if by_dtype
        else one
        for one in found
    ]


def shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    """The dtypes and shapes of tensors, by name."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def _outline(one: StateSlice) -> Outline:
    others = manifest.written(one.others)
    dtypes = {key: tensor.dtype for key, tensor in one.tensors.items()}
    return one._replace(tensors={}, others=others), dtypes


def _random_shapes(sizes: Sequence[Mapping[str, int]]) -> Shapes:
    return {
        f"{rank}/{key}": (torch.uint8, (length,))
        for rank, theirs in enumerate(sizes)
        for key, length in theirs.items()
    }


def _state_shapes(everyone: Sequence[Outline]) -> Shapes:
    found: Shapes = {}
    for one, dtypes in everyone:
        numel = torch.Size(one.shape).numel()
        # Row by row it has the parameter's shape; in another order of memory it stays flat.
        shape = one.shape if list(one.order) == sorted(one.order) else (numel,)
        for key, dtype in dtypes.items():
            found[f"{one.name}/{key}"] = (dtype, shape)
    return found
