"""The asynchronous collectives of a world: handed to the communication thread, waited for here."""

import copy
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from mntrain.collectives.board import Board
from mntrain.collectives.choice import ALGORITHMS, Table
from mntrain.collectives.memory import NodeMemory
from mntrain.collectives.near import Tools
from mntrain.collectives.operation import Call, Shared, WorldOperation
from mntrain.collectives.plan import Scheme, world_slots
from mntrain.collectives.progress import Progress, Ticket
from mntrain.collectives.scratch import Scratch
from mntrain.collectives.sums import Adder
from mntrain.device import Lender
from mntrain.mpi import Communicator
from mntrain.topology import Topology
from zero.collectives import Done, Work
from zero.layout import split


class WorldCollectives:
    """`zero.collectives.Collectives` over MPI: any flat tensor, in host or CUDA memory.

    `table` says by which algorithm. Construction is collective over the world, on its
    communication thread; `node` are the ranks of this rank's node.
    """

    def __init__(
        self, comm: Communicator, node: Communicator, topology: Topology, progress: Progress
    ) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.table = Table.always("lanes")
        self.waited_s = 0.0  # by callers, for collectives
        self._slots = world_slots(topology)
        self._progress = progress
        self._memory = NodeMemory(node)
        self._lender = Lender()
        owners = [0] * self.size
        for rank, slot in enumerate(self._slots):
            owners[slot] = rank
        schemes = {
            name: Scheme.of(name, topology, self.rank) for name in ALGORITHMS if name != "naive"
        }
        tools = Tools(comm, Scratch(), Adder())
        board = Board(self._memory, node.rank, node.size)
        self._shared = Shared(tools, schemes, board, tuple(owners))

    @property
    def why_messages(self) -> str:
        """Why this node's ranks share no memory and send messages; empty where they do share."""
        return self._memory.why_not

    @property
    def shared_bytes(self) -> int:
        """Bytes that this rank has allocated in memory shared with its node."""
        return self._memory.own_bytes

    @property
    def busy_s(self) -> float:
        """Seconds in which a collective was under way, so far."""
        return self._progress.busy_s

    def using(self, table: Table) -> "WorldCollectives":
        """The same world's collectives, by other choices. Local."""
        other = copy.copy(self)
        other.table = table
        return other

    def slot(self, rank: int) -> int:
        """See `Collectives.slot`."""
        return self._slots[rank]

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Collectives.allocate`."""
        if device.type != "cpu":
            return torch.zeros(numel, dtype=dtype, device=device)
        nbytes = numel * dtype.itemsize
        return self._progress.call(lambda: self._memory.allocate(nbytes)).wait().view(dtype)

    def all_reduce(self, tensor: Tensor, wire: torch.dtype | None = None) -> Work:
        """See `Collectives.all_reduce`."""
        return self._start("all_reduce", tensor, None, wire=wire)

    def reduce_scatter(
        self,
        tensor: Tensor,
        bounds: Sequence[int] | None = None,
        wire: torch.dtype | None = None,
    ) -> Work:
        """See `Collectives.reduce_scatter`."""
        return self._start("reduce_scatter", tensor, bounds, wire=wire)

    def all_gather(self, tensor: Tensor, bounds: Sequence[int] | None = None) -> Work:
        """See `Collectives.all_gather`."""
        return self._start("all_gather", tensor, bounds)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Work:
        """See `Collectives.broadcast`."""
        if not 0 <= root < self.size:
            raise ValueError(f"root {root} is no rank of this world: 0 to {self.size - 1}")
        return self._start("broadcast", tensor, None, root=root)

    def _cut(self, bounds: Sequence[int] | None, numel: int) -> tuple[int, ...]:
        """The caller's bounds, in a copy that nobody changes while the collective is under way."""
        if bounds is None:
            return split(numel, self.size)
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

    def _start(
        self,
        verb: Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"],
        tensor: Tensor,
        bounds: Sequence[int] | None,
        *,
        root: int = 0,
        wire: torch.dtype | None = None,
    ) -> Work:
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"a collective takes a flat contiguous tensor, not one of shape "
                f"{tuple(tensor.shape)}: use tensor.view(-1)"
            )
        cut = self._cut(bounds, tensor.numel())
        if self.size == 1:
            self._progress.expect_open()
            return Done()
        choice = self.table.of(tensor.numel() * tensor.element_size())
        call = Call(verb, choice, cut, root, wire)
        loan = self._lender.lend(tensor.detach())
        ticket = self._progress.submit(WorldOperation(self._shared, call, loan))
        return Collective(self, ticket)


class Collective:
    """A collective under way: first on the communication thread, then on the device."""

    def __init__(self, collectives: WorldCollectives, ticket: Ticket[Work]) -> None:
        self._collectives, self._ticket = collectives, ticket

    def wait(self) -> None:
        """See `Work.wait`."""
        if self._ticket.settled:
            self._ticket.wait().wait()
            return
        start = time.perf_counter()
        self._ticket.wait().wait()
        self._collectives.waited_s += time.perf_counter() - start
