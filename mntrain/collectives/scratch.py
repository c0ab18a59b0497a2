"""Memory for what arrives, lent piece by piece and kept for the next one."""

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor

from mntrain.collectives.sums import as_bytes

if TYPE_CHECKING:
    from mntrain.mpi import Bytes

LEAST_BYTES = 4 << 10
MOST_VIEWS = 64  # of one room: the lengths of a program's pieces are few


class Data(NamedTuple):
    """Flat elements, and the same memory as MPI takes it."""

    tensor: Tensor
    bytes: "Bytes"


class Room:
    """Memory for elements of any dtype. Keeps its views, since to make one takes its time."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._data: dict[tuple[int, torch.dtype], Data] = {}

    def data(self, numel: int, dtype: torch.dtype) -> Data:
        """So many elements, of undefined content."""
        data = self._data.get((numel, dtype))
        if data is None:
            tensor = self.memory[: numel * dtype.itemsize].view(dtype)
            if len(self._data) >= MOST_VIEWS:
                self._data.clear()
            data = self._data[numel, dtype] = Data(tensor, as_bytes(tensor))
        return data


class Scratch:
    """Rooms of sizes that are powers of two, on one device. One thread uses it."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        self._free: dict[int, list[Room]] = defaultdict(list)

    def lend(self) -> "Lent":
        """Rooms until the block is left: `with scratch.lend() as lent`."""
        return Lent(self)

    def take(self, nbytes: int) -> Room:
        """A room for so many bytes, which is to come back."""
        size = max(LEAST_BYTES, 1 << (nbytes - 1).bit_length() if nbytes else 0)
        free = self._free[size]
        return free.pop() if free else Room(self._new(size))

    def take_back(self, rooms: Iterable[Room]) -> None:
        """Have rooms for others again."""
        for room in rooms:
            self._free[len(room.memory)].append(room)

    def _new(self, size: int) -> Tensor:
        room = torch.empty(size, dtype=torch.uint8, device=self._device)
        if room.is_cuda:  # kernels may be under way that use what lay there, which MPI knows not
            torch.cuda.current_stream(self._device).synchronize()
        return room


class Lent:
    """Rooms that come back together."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._rooms: list[Room] = []

    def data(self, numel: int, dtype: torch.dtype) -> Data:
        """So many flat elements, of undefined content."""
        room = self._scratch.take(numel * dtype.itemsize)
        self._rooms.append(room)
        return room.data(numel, dtype)

    def __enter__(self) -> Self:
        """These."""
        return self

    def __exit__(self, *error: object) -> None:
        """Give them back."""
        self._scratch.take_back(self._rooms)
