"""The resources of a collective: its tensor, reusable buffers, and the context of all calls."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mntrain.comm.engine import Pipelined, Steps
from mntrain.comm.mpi import Communicator, Traffic
from mntrain.comm.shared_memory import SharedFlags
from mntrain.comm.ticket import Ticket
from mntrain.comm.topology import Topology
from zero.kernels import Add

if TYPE_CHECKING:
    from mntrain.comm.mpi import Bytes

MIN_BYTES = 4 << 10
MAX_VIEWS = 64  # kept for one buffer: the lengths of a program's chunks are few


def as_bytes(tensor: Tensor) -> "Bytes":
    """Return a view of a flat contiguous tensor, in the form that MPI takes.

    A tensor in host memory may still be resized.
    """
    assert tensor.dim() == 1
    assert tensor.is_contiguous()
    if tensor.is_cuda:
        return tensor.view(torch.uint8)
    if not len(tensor):  # it has no address
        return np.empty(0, np.uint8)
    place, shape = (tensor.data_ptr(), False), (tensor.nbytes,)
    interface = {"data": place, "shape": shape, "typestr": "|u1", "version": 3}
    # Tensor.numpy() would forbid the storage to be resized. The array keeps the tensor alive.
    return np.asarray(SimpleNamespace(__array_interface__=interface, tensor=tensor))


class TensorAccess:
    """A tensor as one collective accesses it, on the communication thread: a host tensor, in place.

    `host` is the memory that the collective works on, valid after `begin`, and `bounds` are those
    of the shards in it.
    """

    reachable = True  # whether the node's other ranks may access `host` if it is shared memory

    def __init__(self, tensor: Tensor, bounds: tuple[int, ...]) -> None:
        self.host, self.bounds = tensor, bounds

    def begin(self) -> None:
        """Start to copy the content to `host`, in the order of the collectives. Does not wait."""

    def here(self) -> bool:
        """Return True when `host` holds the content."""
        return True

    def give_back(self) -> torch.cuda.Event | None:
        """Start to copy the result back, and return the end; None: it is here."""
        return None


class BufferView(NamedTuple):
    """A flat tensor, and its memory in the form that MPI takes; for rows, a tensor of each."""

    tensor: Tensor
    bytes: "Bytes"
    tensors: Sequence[Tensor] = ()


# Returns an uninitialized flat tensor of (numel, dtype), or with a third argument so many, end to
# end.
Take = Callable[..., BufferView]
_Buffer = tuple[Tensor, dict[tuple[int, int, torch.dtype], BufferView]]  # memory, and its views


class BufferPool:
    """Buffers on one device whose sizes are powers of two. One thread at a time uses it.

    A buffer keeps its views, since creating one takes some time. `traffic` counts its bytes.
    """

    def __init__(self, traffic: Traffic, device: torch.device | None = None) -> None:
        self._traffic, self._device = traffic, device or torch.device("cpu")
        self._free: dict[int, list[_Buffer]] = defaultdict(list)

    @contextmanager
    def lease(self) -> Iterator[Take]:
        """Yield a `Take`, whose buffers return to the pool together when the `with` block ends.

        After an error they do not: MPI may still write to them, and the engine keeps them.
        """
        taken: list[_Buffer] = []

        def take(numel: int, dtype: torch.dtype, rows: int = 1) -> BufferView:
            nbytes = rows * numel * dtype.itemsize
            size = max(MIN_BYTES, 1 << (nbytes - 1).bit_length() if nbytes else 0)
            free = self._free[size]
            memory, views = free.pop() if free else (self._allocate(size), {})
            taken.append((memory, views))
            view = views.get((rows, numel, dtype))
            if view is None:
                if len(views) >= MAX_VIEWS:
                    views.clear()
                view = views[rows, numel, dtype] = _view(memory[:nbytes], rows, numel, dtype)
            return view

        yield take
        for memory, views in taken:
            self._free[len(memory)].append((memory, views))

    def _allocate(self, size: int) -> Tensor:
        self._traffic.buffer_bytes += size
        memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        if memory.is_cuda:  # kernels that used this memory before may still run; MPI does not wait
            torch.cuda.current_stream(self._device).synchronize()
        return memory


def _view(memory: Tensor, rows: int, numel: int, dtype: torch.dtype) -> BufferView:
    tensor = memory.view(dtype)
    return BufferView(tensor, as_bytes(tensor), tensor.view(rows, numel).unbind())


def no_fence() -> Steps[None]:
    """Return at once: what the host has computed is in memory."""
    yield from ()


def run_here(steps: Steps[None]) -> Steps[None]:
    """Return the steps themselves: host memory has no queue of work."""
    return steps


@dataclass(frozen=True)
class CommContext:
    """Resources of a world's collectives for one kind of memory. One thread at a time uses it."""

    comm: Communicator
    topology: Topology
    flags: SharedFlags  # of this node
    buffers: BufferPool
    add: Add
    fence: Callable[[], Steps[None]] = no_fence
    """Wait until everything computed so far is in memory, so that MPI may send it."""
    run: Callable[[Steps[None]], Steps[None]] = run_here
    """Run a chunk's steps where this memory's work is queued, for example on a side stream."""


# One call by an algorithm, on this rank. All-reduce and reduce-scatter must sum in one order,
# wherever in a tensor an element lies, so that all ranks and both verbs get the same bits.
Algorithm = Callable[
    [Ticket, TensorAccess, CommContext], Pipelined | Steps[torch.cuda.Event | None]
]
