"""Small values that the ranks of a world exchange."""

from collections.abc import Sequence
from io import BytesIO
from numbers import Real
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from mntrain.comm.collectives import WorldCollectives
from mntrain.comm.pending import Future
from mntrain.comm.waits import Waits
from mntrain.run.means import weighted_mean

T = TypeVar("T")


class Exchanges:
    """Values that all ranks get: of each, of rank 0, sums and means. Base class of `World`."""

    collectives: WorldCollectives
    waits: Waits
    device: torch.device
    master: bool

    def mean(self, value: float | Tensor, weight: float = 1.0) -> float | Tensor:
        """Return the mean over all ranks, in fp64, weighted for example by samples. Collective.

        For a number a float; for a tensor, of the same shape on all ranks, a new one, elementwise.
        A rank of weight 0 does not count, whatever its value. Raises AgreedError (a ValueError) on
        all ranks for what is no number, for a weight below 0 or not finite, and if all are 0.
        """
        return weighted_mean(self.collectives, value, weight)

    def barrier(self) -> None:
        """Wait until all ranks are here. Collective."""
        self.gather(None)

    def gather(self, value: T) -> list[T]:
        """Return every rank's object, by rank. Collective; for small picklable objects.

        Tensors among them arrive as new ones, on a device of the name that they had.
        """
        gathered = self.gather_later(value)
        with self.waits.waiting(gather=True):
            return gathered.wait()

    def gather_later(self, value: T) -> Future[list[T]]:
        """Start a `gather`, and return a future whose `wait` returns its result. Collective."""
        return self.collectives.gather_objects(value, "world.gather")

    def broadcast(self, value: T) -> T:
        """Return rank 0's picklable object, or tensor, on every rank. Collective.

        Rank 0 gets its own back, and others a copy, whose tensors are on their own `device` if
        rank 0's are on a GPU. What other ranks give is not used.
        """
        packed: bytes | None = None
        if self.master:
            stream = BytesIO()
            torch.save(value, stream)
            packed = stream.getvalue()
        received = self.gather(packed)[0]
        if self.master:
            return value
        assert received is not None

        def place(storage: Any, location: str) -> Any:
            return storage if location == "cpu" else storage.to(device=self.device)

        loaded: T = torch.load(BytesIO(received), map_location=place, weights_only=False)
        return loaded

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0, as `print` does, and flush. Local; nothing on other ranks."""
        if self.master:
            print(*values, **{"flush": True, **options})

    @overload
    def sum(self, values: float) -> float: ...

    @overload
    def sum(self, values: Tensor) -> Tensor: ...

    @overload
    def sum(self, values: Sequence[float]) -> list[float]: ...

    def sum(self, values: float | Tensor | Sequence[float]) -> float | Tensor | list[float]:
        """Return the sum over all ranks, in fp64. Collective.

        Of a number a float; of a list, of the same length on all ranks, a list, elementwise; of a
        tensor, of the same shape on all ranks, a new one, elementwise.
        """
        if isinstance(values, Tensor):
            totals = values.detach().to(torch.float64, copy=True).contiguous()
        else:
            totals = torch.tensor(values, dtype=torch.float64)
        self.collectives.named("world.sum").all_reduce(totals.view(-1)).wait()
        if isinstance(values, Tensor):
            return totals
        return float(totals) if isinstance(values, Real) else totals.tolist()
