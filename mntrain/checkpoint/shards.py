"""The part of a checkpoint that a rank saves, and its snapshot.

A rank saves the optimizer state of its own shard, its random generators, the state of its
communication hook, and an equal part of everything that all ranks hold in full: the model, and at
stage 0 the optimizer state. Replicas of a sync schedule save states of their own, and replica 0
what all share. Training may change the tensors while their snapshot is written. On a GPU, only the
snapshot's consumers wait:

    training stream   ... step | E1 | forward, backward        | wait E2, step ...
    side stream             wait E1 | copy to pinned memory | E2 |
    writing thread                                       waits E2 | writes
"""

import math
import random
import secrets
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mntrain.checkpoint.format import (
    MODEL,
    OPTIMIZER,
    RANDOM,
    FileLayout,
    ParameterState,
    Shapes,
    encode_values,
    replica_name,
)
from mntrain.checkpoint.hook_state import split_state, tensor_name
from mntrain.checkpoint.objects import Stateful, encode_objects
from mntrain.comm.device_copy import pin
from mntrain.ranks import Ranks
from zero.layout import split
from zero.optimizer import ZeroOptimizer
from zero.state import MASTER, PER_REPLICA, SYNC, StateSlice

_ALIGNMENT = 64  # bytes, of a tensor in a snapshot
_PYTHON = struct.Struct("<?d")  # whether random.gauss has a cached value, and the value
_NUMPY = struct.Struct("<i?d")  # position, whether there is a cached normal value, the value


class TensorRange(NamedTuple):
    """Consecutive elements of a tensor in a file, flat, from element `low` on."""

    file: str
    name: str
    flat: Tensor
    low: int


class ShardOutline(NamedTuple):
    """Description of what one rank saves, without the tensors. Exchanged between ranks."""

    # Slices without their tensors, and the tensors' dtypes by key.
    slices: list[tuple[StateSlice, dict[str, torch.dtype]]]
    random: dict[str, int]  # bytes of the random states, by source
    token: str  # unique; rank 0's is part of the temporary folder's name
    objects: dict[str, Any]  # encoded states
    hook: dict[str, Any]  # state of the communication hook without tensors, if it has one
    hook_shapes: Shapes  # of its tensors, by name
    replica: int
    sync_weights: list[float]  # of the replica
    error: str | None = None  # the reason why it cannot be saved


class CheckpointShard:
    """Views of the tensors that this rank saves."""

    def __init__(
        self,
        world: Ranks,
        model: nn.Module,
        optimizer: ZeroOptimizer,
        objects: Mapping[str, Stateful],
    ) -> None:
        self._rank, self._size = world.rank, world.size
        self._model: dict[str, Tensor] = dict(model.state_dict())
        self._slices = list(_own_slices(optimizer))
        self._random = random_states(world.device)
        self._objects = objects
        self._hook = optimizer.hook_state.state_dict()
        self._replica = optimizer.schedule.replica
        self._sync_weights = optimizer.schedule.weights()

    def outline(self) -> ShardOutline:
        """Describe this shard to the other ranks, with copies of all that is not a tensor in it."""
        sizes = {key: len(state) for key, state in self._random.items()}
        token = secrets.token_hex(4)
        slices = []
        try:
            for piece in self._slices:
                dtypes = {key: tensor.dtype for key, tensor in piece.tensors.items()}
                others = encode_values(piece.others)
                slices.append((piece._replace(tensors={}, others=others), dtypes))
            objects = encode_objects(self._objects)
            hook, tensors = split_state(self._hook)
        except ValueError as error:
            return ShardOutline([], sizes, token, {}, {}, {}, 0, [], str(error))
        own = self._replica, self._sync_weights
        return ShardOutline(slices, sizes, token, objects, hook, shapes_of(tensors), *own)

    def ranges(self) -> Iterator[TensorRange]:
        """Yield all ranges to write: views, except for parameters that are not contiguous."""
        for piece in self._slices:
            for key, tensor in piece.tensors.items():
                yield TensorRange(OPTIMIZER, f"{piece.name}/{key}", tensor, piece.low)
        tensors = list(self._model.items())
        sizes = [tensor.numel() for _, tensor in tensors]
        for index, low, high in _equal_part(sizes, self._rank, self._size):
            name, tensor = tensors[index]
            yield TensorRange(MODEL, name, tensor.detach().reshape(-1)[low:high], low)
        for key, state in self._random.items():
            yield TensorRange(RANDOM, f"{self._rank}/{key}", state, 0)
        for key, tensor in split_state(self._hook)[1].items():
            yield TensorRange(RANDOM, tensor_name(self._rank, key), tensor.detach().reshape(-1), 0)

    def layouts(
        self, outlines: Sequence[ShardOutline]
    ) -> tuple[dict[str, FileLayout], dict[str, ParameterState]]:
        """Return the layouts of the whole checkpoint's files, and the parameters' states.

        Raises ValueError as `FileLayout`.
        """
        shapes: Shapes = {}
        random_shapes: Shapes = {}
        states: dict[str, ParameterState] = {}
        for rank, outline in enumerate(outlines):
            for key, length in outline.random.items():
                random_shapes[f"{rank}/{key}"] = (torch.uint8, (length,))
            for key, described in outline.hook_shapes.items():
                random_shapes[tensor_name(rank, key)] = described
            for piece, dtypes in outline.slices:
                state = ParameterState(piece.shape, piece.order, tuple(dtypes), piece.others)
                states.setdefault(piece.name, state)
                # A row-major tensor gets the parameter's shape; in another order it stays flat.
                row_major = list(piece.order) == sorted(piece.order)
                shape = piece.shape if row_major else (math.prod(piece.shape),)
                shapes |= {f"{piece.name}/{key}": (dtype, shape) for key, dtype in dtypes.items()}
        layouts = {
            MODEL: FileLayout(shapes_of(self._model)),
            OPTIMIZER: FileLayout(shapes),
            RANDOM: FileLayout(random_shapes),
        }
        return layouts, states


def _own_slices(optimizer: ZeroOptimizer) -> Iterator[StateSlice]:
    """Yield the slices that this rank saves, of its replica, under the names in the file."""
    replica = optimizer.schedule.replica
    for piece in _cut_slices(optimizer):
        shared = {k for k in piece.tensors if replica and is_shared(k)}
        tensors = {key: tensor for key, tensor in piece.tensors.items() if key not in shared}
        yield piece._replace(name=replica_name(piece.name, replica), tensors=tensors)


def _cut_slices(optimizer: ZeroOptimizer) -> Iterator[StateSlice]:
    """Yield this rank's part of the state of its replica."""
    slices = list(optimizer.slices())
    if optimizer.sharded:
        yield from slices
        return
    group = optimizer.schedule.sharding
    for index, low, high in _equal_part([p.high for p in slices], group.rank, group.size):
        piece = slices[index]
        tensors = {key: tensor[low:high] for key, tensor in piece.tensors.items()}
        yield piece._replace(low=low, high=high, tensors=tensors)


def is_shared(key: str) -> bool:
    """Return whether the optimizer state under a key is the same in all replicas."""
    return key == MASTER or (key.startswith(SYNC) and key not in PER_REPLICA)


def _equal_part(lengths: Sequence[int], rank: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (index, low, high) of a rank's equal part of items, laid end to end."""
    first, last = split(sum(lengths), size)[rank : rank + 2]
    start = 0
    for index, length in enumerate(lengths):
        low, high = max(first - start, 0), min(last - start, length)
        if low < high:
            yield index, low, high
        start += length


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    """Return the dtypes and shapes of tensors, by name."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


class SnapshotBuffer:
    """Host memory for snapshots, reused because fresh pages would cost more than the copy.

    `device` is that of the tensors; some of them may be on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], object] | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None

    def _reserve(self, nbytes: int) -> None:
        """Allocate this much memory, pinned for copies from a GPU."""
        if self._unpin is not None:
            self._unpin()
        self._memory = torch.empty(0, dtype=torch.uint8)  # frees the old memory first
        self._memory = torch.empty(nbytes, dtype=torch.uint8)
        if self._stream is not None:
            unpin, _ = pin(self._memory, self._device)  # unpinned copies are slower, but correct
            # The finalizer's reference keeps the memory alive until it is unpinned.
            self._unpin = weakref.finalize(self, lambda memory: unpin(), self._memory)

    def copy(
        self,
        ranges: Sequence[TensorRange],
        in_order: Callable[[TensorRange], bool] = lambda item: False,
    ) -> Iterable[TensorRange]:
        """Copy ranges into this memory, over the last snapshot; return them, to iterate over once.

        Copies from host memory are complete on return. Copies from a GPU are enqueued on a side
        stream, and iterating waits for them. Those of ranges that `in_order` selects are enqueued
        on the current stream, because the next forward may change the originals.
        """
        starts, end = [], 0
        for item in ranges:
            starts.append(end)
            end += -(-item.flat.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > self._memory.numel():
            self._reserve(end)
        copies, on_side_stream = [], []
        for item, start in zip(ranges, starts, strict=True):
            target = self._memory[start : start + item.flat.nbytes].view(item.flat.dtype)
            copies.append(item._replace(flat=target))
            if item.flat.is_cuda and not in_order(item):
                on_side_stream.append((target, item.flat))
            else:
                target.copy_(item.flat.detach(), non_blocking=True)
        if self._stream is None:
            return copies
        self._copied = _copy_on(self._stream, on_side_stream)
        return _after(self._copied, copies)

    def before_changes(self) -> None:
        """Make the current stream wait for the copies, before the originals are changed."""
        if self._copied is not None:
            self._copied.wait()
            self._copied = None


def _copy_on(stream: torch.cuda.Stream, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
    """Enqueue copies on a stream after the device's present work; return the event of their end."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    done = torch.cuda.Event(blocking=True)  # a waiting thread sleeps
    with torch.cuda.stream(stream):
        for target, flat in pairs:
            target.copy_(flat.detach(), non_blocking=True)
            flat.record_stream(stream)  # `flat` may be a temporary with no other owner
        done.record(stream)
    return done


def _after(event: torch.cuda.Event, ranges: Iterable[TensorRange]) -> Iterator[TensorRange]:
    """Yield the ranges after waiting for an event, in the thread that iterates."""
    event.synchronize()
    yield from ranges


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return copies of the states of this process's random generators as bytes, by source."""
    version, words, gauss = random.getstate()
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    python_words = np.array([version, *words], dtype="<u4").tobytes()
    numpy_words = state["state"]["key"].astype("<u4").tobytes()
    data = {
        "python": _PYTHON.pack(gauss is not None, gauss or 0.0) + python_words,
        "numpy": _NUMPY.pack(state["state"]["pos"], bool(state["has_gauss"]), state["gauss"])
        + numpy_words,
    }
    states = {k: torch.frombuffer(bytearray(d), dtype=torch.uint8) for k, d in data.items()}
    states["torch"] = torch.get_rng_state()
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set this process's random generators to saved states, by source."""
    torch.set_rng_state(states["torch"])
    data = states["python"].numpy().tobytes()
    has_gauss, gauss = _PYTHON.unpack_from(data)
    version, *words = np.frombuffer(data[_PYTHON.size :], dtype="<u4").tolist()
    random.setstate((version, tuple(words), gauss if has_gauss else None))
    data = states["numpy"].numpy().tobytes()
    position, has_gauss, gauss = _NUMPY.unpack_from(data)
    keys = np.frombuffer(data[_NUMPY.size :], dtype="<u4")
    np.random.set_state(("MT19937", keys, position, int(has_gauss), gauss))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
