"""Division of a checkpoint among the ranks.

A rank saves the optimizer state of its own shard, and an equal part of everything that all ranks
hold in full: the model, and at stage 0 the optimizer state.
"""

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mntrain.checkpoint import manifest, random_state
from mntrain.checkpoint.format import FileLayout
from mntrain.checkpoint.manifest import MODEL, OPTIMIZER, RANDOM, ParameterState
from mntrain.checkpoint.snapshot import TensorRange
from mntrain.world import World
from zero.layout import split
from zero.optimizer import ZeroOptimizer
from zero.state import StateSlice

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
# A slice without its tensors, and their dtypes.
SliceOutline = tuple[StateSlice, dict[str, torch.dtype]]


@dataclass(frozen=True)
class ShardOutline:
    """Description of what one rank saves, without the tensors. Exchanged between ranks."""

    slices: list[SliceOutline]
    random: dict[str, int]  # bytes of the random states, by source
    token: str  # unique; rank 0's is part of the temporary folder's name
    error: str | None = None  # the reason why it cannot be saved


class CheckpointShard:
    """Views of the tensors that this rank saves."""

    def __init__(self, world: World, model: nn.Module, optimizer: ZeroOptimizer) -> None:
        self._rank, self._size = world.rank, world.size
        self._model: dict[str, Tensor] = dict(model.state_dict())
        self._slices = _values_on_host(self._own_slices(optimizer))
        self._random = random_state.capture(world.device)

    @property
    def nbytes(self) -> int:
        """Approximate number of bytes."""
        state = sum(tensor.nbytes for piece in self._slices for tensor in piece.tensors.values())
        model = sum(tensor.nbytes for tensor in self._model.values()) // self._size
        return state + model + sum(tensor.nbytes for tensor in self._random.values())

    def outline(self) -> ShardOutline:
        """Describe this shard to the other ranks."""
        sizes = {key: len(state) for key, state in self._random.items()}
        token = secrets.token_hex(4)
        try:
            return ShardOutline([_outline(piece) for piece in self._slices], sizes, token)
        except ValueError as error:
            return ShardOutline([], sizes, token, str(error))

    def ranges(self) -> Iterator[TensorRange]:
        """Yield all ranges to write. They are views, but for parameters that are not contiguous."""
        for piece in self._slices:
            for key, tensor in piece.tensors.items():
                yield TensorRange(OPTIMIZER, f"{piece.name}/{key}", tensor, piece.low)
        tensors = list(self._model.items())
        for index, low, high in self._equal_part([tensor.numel() for _, tensor in tensors]):
            name, tensor = tensors[index]
            yield TensorRange(MODEL, name, tensor.detach().reshape(-1)[low:high], low)
        for key, state in self._random.items():
            yield TensorRange(RANDOM, f"{self._rank}/{key}", state, 0)

    def layouts(self, outlines: Sequence[ShardOutline]) -> dict[str, FileLayout]:
        """Lay out the files of the whole checkpoint. Raises ValueError as `FileLayout.of`."""
        random_shapes: Shapes = {
            f"{rank}/{key}": (torch.uint8, (length,))
            for rank, outline in enumerate(outlines)
            for key, length in outline.random.items()
        }
        return {
            MODEL: FileLayout.of(shapes_of(self._model)),
            OPTIMIZER: FileLayout.of(_state_shapes(outlines)),
            RANDOM: FileLayout.of(random_shapes),
        }

    def _own_slices(self, optimizer: ZeroOptimizer) -> Iterator[StateSlice]:
        slices = list(optimizer.slices())
        if optimizer.sharded:
            yield from slices
            return
        for index, low, high in self._equal_part([piece.high for piece in slices]):
            piece = slices[index]
            tensors = {key: tensor[low:high] for key, tensor in piece.tensors.items()}
            yield piece._replace(low=low, high=high, tensors=tensors)

    def _equal_part(self, lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield (index, low, high) of this rank's equal, contiguous part of items end to end."""
        first, last = split(sum(lengths), self._size)[self._rank : self._rank + 2]
        start = 0
        for index, length in enumerate(lengths):
            low, high = max(first - start, 0), min(last - start, length)
            if low < high:
                yield index, low, high
            start += length


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    """Return the dtypes and shapes of tensors, by name."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def parameter_states(outlines: Iterable[ShardOutline]) -> dict[str, ParameterState]:
    """Return the manifest's record of each parameter's optimizer state."""
    states: dict[str, ParameterState] = {}
    for outline in outlines:
        for piece, dtypes in outline.slices:
            states.setdefault(
                piece.name, ParameterState(piece.shape, piece.order, tuple(dtypes), piece.others)
            )
    return states


def _values_on_host(slices: Iterable[StateSlice]) -> list[StateSlice]:
    """Return the slices with small values, such as step counts, moved from a GPU to the host.

    All values of one dtype are copied at once: each copy waits for the GPU.
    """
    slices = list(slices)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for piece in slices:
        for value in piece.others.values():
            if isinstance(value, Tensor) and value.is_cuda:
                by_dtype.setdefault(value.dtype, []).append(value)
    copies: dict[int, Tensor] = {}
    for tensors in by_dtype.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
        parts = flat.split([tensor.numel() for tensor in tensors])
        copies |= {id(t): part.view(t.shape) for t, part in zip(tensors, parts, strict=True)}
    return [
        piece._replace(others={key: copies.get(id(v), v) for key, v in piece.others.items()})
        for piece in slices
    ]


def _outline(piece: StateSlice) -> SliceOutline:
    dtypes = {key: tensor.dtype for key, tensor in piece.tensors.items()}
    return piece._replace(tensors={}, others=manifest.encode_values(piece.others)), dtypes


def _state_shapes(outlines: Iterable[ShardOutline]) -> Shapes:
    shapes: Shapes = {}
    for outline in outlines:
        for piece, dtypes in outline.slices:
            # A row-major tensor gets the parameter's shape; one in another memory order stays flat.
            row_major = list(piece.order) == sorted(piece.order)
            shape = piece.shape if row_major else (torch.Size(piece.shape).numel(),)
            shapes |= {f"{piece.name}/{key}": (dtype, shape) for key, dtype in dtypes.items()}
    return shapes
