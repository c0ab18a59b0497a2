"""The parts that every collective is made of: the call, its context, and the algorithm's interface.

call       verb, bounds, root, wire dtype: the same on all ranks
access     the tensor, where the algorithm works on it (`staging.TensorAccess`)
context    buffers and sums in the memory where the tensor lies
world      communicator, topology, and the flags of this node
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from mntrain.comm.algorithm_table import AlgorithmChoice
from mntrain.comm.intranode import CommContext
from mntrain.comm.mpi import TAGS, Communicator
from mntrain.comm.pending import NumberedChunk, Operation, Steps
from mntrain.comm.shared_flags import SharedFlags
from mntrain.comm.staging import TensorAccess
from mntrain.comm.topology import Topology
from zero.collectives import Work

Verb = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]


class CollectiveCall(NamedTuple):
    """The arguments of a collective, the same on all ranks."""

    verb: Verb
    choice: AlgorithmChoice
    bounds: tuple[int, ...]  # of the shards
    root: int = 0
    wire: torch.dtype | None = None  # None: the tensor's own
    small: bool = False  # whether every rank may gather the tensors of all ranks
    wakes_thread: bool = True  # whether the engine's thread progresses it while nobody waits


@dataclass
class WorldContext:
    """What the collectives of a world share. One thread at a time uses it."""

    comm: Communicator
    topology: Topology
    flags: SharedFlags  # of this node
    chunks_started: int = 0  # the same on all ranks

    @property
    def owners(self) -> tuple[int, ...]:
        """Slot to rank."""
        return self.topology.owners

    def number_chunks(self, count: int) -> int:
        """Reserve numbers for `count` chunks and return the first."""
        first = self.chunks_started
        self.chunks_started += count
        return first


class Algorithm(Protocol):
    """How the collectives of a world move one tensor. Made by `algorithms.load(name).make`.

    All-reduce and reduce-scatter must sum in one order, wherever in a tensor an element lies, so
    that all ranks and both verbs get the same bits.
    """

    host_only: bool  # whether it works on host memory only: device tensors are staged there

    def operation(
        self, call: CollectiveCall, access: TensorAccess, context: CommContext
    ) -> Operation[Work]:
        """Plan one collective on this rank. Local; the engine runs what is returned."""


class SingleChunkOperation:
    """An `Operation` of one chunk, in which every rank takes part and no node flags are used.

    `steps(call, tensor, tag)` yields tests, as every chunk does; `tag` is for its messages.
    """

    max_in_flight = 8

    def __init__(
        self,
        world: WorldContext,
        call: CollectiveCall,
        access: TensorAccess,
        steps: Callable[[CollectiveCall, Tensor, int], Steps[None]],
    ) -> None:
        self._world, self._call, self._access, self._steps = world, call, access, steps
        self.wakes_thread = call.wakes_thread
        self.latency_bound = not call.choice.concurrent

    def begin(self) -> None:
        """Start to bring the tensor into place."""
        self._access.begin()

    def enter(self) -> bool:
        """Return whether the tensor is in place."""
        return self._access.here()

    def all_entered(self) -> bool:
        """Return True: messages wait for their receivers themselves."""
        return True

    def chunks(self) -> Iterator[NumberedChunk]:
        """Yield the only chunk."""
        number = self._world.number_chunks(1)
        yield number, self._steps(self._call, self._access.host, number % TAGS)

    def leave(self) -> None:
        """Do nothing: no other rank accesses this tensor."""

    def all_left(self) -> bool:
        """Return True: no other rank accesses this tensor."""
        return True

    def finish(self) -> Work:
        """Bring the result back to the caller's tensor."""
        return self._access.give_back()
