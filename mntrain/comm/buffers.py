"""Memory for what arrives, lent piece by piece and kept for the next one."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from mntrain.comm.reduction import as_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mntrain.comm.mpi import Bytes

LEAST_BYTES = 4 << 10
MOST_VIEWS = 64  # of one room: the lengths of a program's pieces are few


class BufferView(NamedTuple):
    """Flat elements, and the same memory as MPI takes it."""

    tensor: Tensor
    bytes: "Bytes"


class BufferRows(NamedTuple):
    """Flat tensors of one length that lie end to end, and the same memory as MPI takes it.

    `arrays` are numpy's views of them: none of a dtype that numpy lacks, or on a device.
    """

    tensors: Sequence[Tensor]
    bytes: "Bytes"
    arrays: Sequence["NDArray[Any]"]


class Buffer:
    """Memory for elements of any dtype. Keeps its views, since to make one takes its time."""

    def __init__(self, memory: Tensor) -> None:
        self._memory, self.nbytes = memory, len(memory)
        self._rows: dict[tuple[int, int, torch.dtype], BufferRows] = {}

    def rows(self, count: int, numel: int, dtype: torch.dtype) -> BufferRows:
        """So many times so many elements, of undefined content."""
        rows = self._rows.get((count, numel, dtype))
        if rows is None:
            tensor = self._memory[: count * numel * dtype.itemsize].view(dtype)
            if len(self._rows) >= MOST_VIEWS:
                self._rows.clear()
            tensors = tensor.view(count, numel).unbind()
            rows = BufferRows(tensors, as_bytes(tensor), _arrays(tensors))
            self._rows[count, numel, dtype] = rows
        return rows


class BufferPool:
    """Rooms of sizes that are powers of two, on one device. One thread uses it."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        self._free: dict[int, list[Buffer]] = defaultdict(list)

    def lend(self) -> "Lease":
        """Rooms until the block is left: `with scratch.lend() as lent`."""
        return Lease(self)

    def take(self, nbytes: int) -> Buffer:
        """A room for so many bytes, which is to come back."""
        size = max(LEAST_BYTES, 1 << (nbytes - 1).bit_length() if nbytes else 0)
        free = self._free[size]
        return free.pop() if free else Buffer(self._new(size))

    def take_back(self, rooms: Iterable[Buffer]) -> None:
        """Have rooms for others again."""
        for room in rooms:
            self._free[room.nbytes].append(room)

    def _new(self, size: int) -> Tensor:
        room = torch.empty(size, dtype=torch.uint8, device=self._device)
        if room.is_cuda:  # kernels may be under way that use what lay there, which MPI knows not
            torch.cuda.current_stream(self._device).synchronize()
        return room


class Lease:
    """Rooms that come back together."""

    def __init__(self, scratch: BufferPool) -> None:
        self._scratch = scratch
        self._rooms: list[Buffer] = []

    def data(self, numel: int, dtype: torch.dtype) -> BufferView:
        """So many flat elements, of undefined content."""
        rows = self.rows(1, numel, dtype)
        return BufferView(rows.tensors[0], rows.bytes)

    def rows(self, count: int, numel: int, dtype: torch.dtype) -> BufferRows:
        """So many tensors of so many elements, of undefined content."""
        room = self._scratch.take(count * numel * dtype.itemsize)
        self._rooms.append(room)
        return room.rows(count, numel, dtype)

    def __enter__(self) -> Self:
        """These."""
        return self

    def __exit__(self, *error: object) -> None:
        """Give them back."""
        self._scratch.take_back(self._rooms)


def _arrays(tensors: Sequence[Tensor]) -> Sequence["NDArray[Any]"]:
    """Views of tensors by numpy, or nothing where it has none."""
    try:
        return [tensor.numpy() for tensor in tensors]
    except TypeError:  # of a dtype that numpy lacks, or on a device
        return []
