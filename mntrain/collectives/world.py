"""The asynchronous collectives of a world: an algorithm, run on the communication thread."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mntrain.collectives.algorithm import Algorithm
from mntrain.collectives.progress import Progress, Ticket
from mntrain.device import Lender
from zero.collectives import Work


class WorldCollectives:
    """`zero.collectives.Collectives` over MPI: any flat tensor, in host or CUDA memory."""

    def __init__(self, rank: int, size: int, algorithm: Algorithm, progress: Progress) -> None:
        self.rank, self.size = rank, size
        self._algorithm = algorithm
        self._progress = progress
        self._lender = Lender()

    def slot(self, rank: int) -> int:
        """See `Collectives.slot`."""
        return self._algorithm.slots[rank]

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Collectives.allocate`."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor) -> Work:
        """See `Collectives.all_reduce`."""
        return self._start(tensor, self._algorithm.all_reduce)

    def reduce_scatter(self, tensor: Tensor, bounds: Sequence[int] | None = None) -> Work:
        """See `Collectives.reduce_scatter`."""
        cut = self._checked(bounds, tensor.numel())
        return self._start(tensor, lambda host: self._algorithm.reduce_scatter(host, cut))

    def all_gather(self, tensor: Tensor, bounds: Sequence[int] | None = None) -> Work:
        """See `Collectives.all_gather`."""
        cut = self._checked(bounds, tensor.numel())
        return self._start(tensor, lambda host: self._algorithm.all_gather(host, cut))

    def broadcast(self, tensor: Tensor, root: int = 0) -> Work:
        """See `Collectives.broadcast`."""
        if not 0 <= root < self.size:
            raise ValueError(f"root {root} is no rank of this world: 0 to {self.size - 1}")
        return self._start(tensor, lambda host: self._algorithm.broadcast(host, root))

    def _checked(self, bounds: Sequence[int] | None, numel: int) -> tuple[int, ...] | None:
        """The caller's bounds, in a copy that nobody changes while the collective is under way."""
        if bounds is None:
            return None
        cut = tuple(bounds)
        if (
            len(cut) != self.size + 1
            or (cut[0], cut[-1]) != (0, numel)
            or any(low > high for low, high in pairwise(cut))
        ):
            raise ValueError(
                f"bounds {cut} do not cut {numel} elements into {self.size} shards: give "
                f"{self.size + 1} indices that never decrease, from 0 to {numel}"
            )
        return cut

    def _start(self, tensor: Tensor, verb: Callable[[Tensor], None]) -> Work:
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"a collective takes a flat contiguous tensor, not one of shape "
                f"{tuple(tensor.shape)}: use tensor.view(-1)"
            )
        loan = self._lender.lend(tensor.detach())

        def run() -> Work:
            verb(loan.fetch())
            return loan.give_back()

        return Collective(self._progress.submit(run))


class Collective:
    """A collective under way: first on the communication thread, then on the device."""

    def __init__(self, ticket: Ticket[Work]) -> None:
        self._ticket = ticket

    def wait(self) -> None:
        """See `Work.wait`."""
        self._ticket.wait().wait()
