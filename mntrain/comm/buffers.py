"""Reusable buffers for messages."""

import atexit
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mntrain.comm.mpi import Bytes

MIN_BYTES = 4 << 10
MAX_VIEWS = 64  # kept for one buffer: the lengths of a program's chunks are few


def as_bytes(tensor: Tensor) -> "Bytes":
    """Return a view of a flat contiguous tensor, in the form that MPI takes."""
    assert tensor.dim() == 1
    assert tensor.is_contiguous()
    data = tensor.view(torch.uint8)
    return data if data.is_cuda else data.numpy()


class BufferView(NamedTuple):
    """A flat tensor, and its memory in the form that MPI takes; for rows, a tensor of each.

    `arrays` are NumPy views of the rows; empty for device memory and for dtypes NumPy lacks.
    """

    tensor: Tensor
    bytes: "Bytes"
    tensors: Sequence[Tensor] = ()
    arrays: Sequence["NDArray[Any]"] = ()


class Buffer:
    """Memory for elements of any dtype. Keeps its views, since creating one takes some time."""

    def __init__(self, memory: Tensor) -> None:
        self._memory, self.nbytes = memory, len(memory)
        self._views: dict[tuple[int, int, torch.dtype], BufferView] = {}

    def rows(self, count: int, numel: int, dtype: torch.dtype) -> BufferView:
        """Return `count` uninitialized tensors of `numel` elements each, end to end."""
        view = self._views.get((count, numel, dtype))
        if view is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # the caller's: it may be driving a collective
                tensor = self._memory[: count * numel * dtype.itemsize].view(dtype)
                tensors = tensor.view(count, numel).unbind()
            view = BufferView(tensor, as_bytes(tensor), tensors, _arrays(tensors))
            self._views[count, numel, dtype] = view
        return view


class BufferPool:
    """Buffers on one device whose sizes are powers of two. One thread at a time uses it."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        self._free: dict[int, list[Buffer]] = defaultdict(list)

    def lease(self) -> "Lease":
        """Return a lease of buffers for one block: `with pool.lease() as lease`."""
        return Lease(self)

    def acquire(self, nbytes: int) -> Buffer:
        """Take a buffer of at least `nbytes` bytes out of the pool, or make one."""
        size = max(MIN_BYTES, 1 << (nbytes - 1).bit_length() if nbytes else 0)
        free = self._free[size]
        return free.pop() if free else Buffer(self._allocate(size))

    def release(self, buffers: Iterable[Buffer]) -> None:
        """Put buffers back into the pool."""
        for buffer in buffers:
            self._free[buffer.nbytes].append(buffer)

    def _allocate(self, size: int) -> Tensor:
        with torch.inference_mode(False):
            memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        if memory.is_cuda:  # kernels that used this memory before may still run; MPI does not wait
            torch.cuda.current_stream(self._device).synchronize()
        return memory


class Lease:
    """Buffers that return to their pool together, when the `with` block ends."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._buffers: list[Buffer] = []

    def buffer(self, numel: int, dtype: torch.dtype) -> BufferView:
        """Return an uninitialized flat tensor."""
        return self.rows(1, numel, dtype)

    def rows(self, count: int, numel: int, dtype: torch.dtype) -> BufferView:
        """Return `count` uninitialized tensors of `numel` elements each, end to end."""
        buffer = self._pool.acquire(count * numel * dtype.itemsize)
        self._buffers.append(buffer)
        return buffer.rows(count, numel, dtype)

    def __enter__(self) -> Self:
        """Return this lease."""
        return self

    def __exit__(self, error_type: object, *error: object) -> None:
        """Put the buffers back into the pool; after an error, keep them: MPI may write to them."""
        if error_type is None:
            self._pool.release(self._buffers)
        else:
            atexit.register(lambda *kept: None, *self._buffers)  # for the life of the process


def _arrays(tensors: Sequence[Tensor]) -> Sequence["NDArray[Any]"]:
    try:
        return [tensor.numpy() for tensor in tensors]
    except TypeError:  # of a dtype that NumPy lacks, or on a device
        return []
