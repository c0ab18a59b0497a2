"""One collective as an operation of the engine: its call, its context, and the steps of all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mntrain.comm.algorithms import AlgorithmChoice
from mntrain.comm.buffers import BufferPool
from mntrain.comm.mpi import Communicator
from mntrain.comm.pending import Operation, Steps
from mntrain.comm.shared_memory import SharedFlags
from mntrain.comm.staging import TensorAccess
from mntrain.comm.topology import Topology
from zero.collectives import Work

Verb = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]


class CollectiveCall(NamedTuple):
    """The arguments of a collective, the same on all ranks."""

    verb: Verb
    choice: AlgorithmChoice
    bounds: tuple[int, ...]  # of the shards; of the tensor if the verb has no shards
    root: int = 0
    wire: torch.dtype | None = None  # None: the tensor's own
    small: bool = False  # whether every rank may gather the tensors of all ranks
    wakes_thread: bool = True  # whether the engine's thread progresses it while nobody waits


def no_fence() -> Steps[None]:
    """Return at once: what the host has computed is in memory."""
    yield from ()


def unchanged(steps: Steps[None]) -> Steps[None]:
    """Return the steps as they are."""
    return steps


@dataclass(frozen=True)
class CommContext:
    """What the collectives of a world use in one kind of memory. One thread at a time uses it."""

    comm: Communicator
    topology: Topology
    flags: SharedFlags  # of this node
    buffers: BufferPool
    add: Callable[[Sequence[Tensor], Tensor], None]
    """Leave the sum of addends, in their order, in a tensor; see `zero.kernels.Kernels.add`."""
    fence: Callable[[], Steps[None]] = no_fence
    """Wait until everything computed so far is in memory, so that MPI may send it."""
    run: Callable[[Steps[None]], Steps[None]] = unchanged
    """Run a chunk's steps where this memory's work is queued, for example on a side stream."""


# The collectives of a world by one algorithm; the tensor is where `TensorAccess` has brought it.
# All-reduce and reduce-scatter must sum in one order, wherever in a tensor an element lies, so that
# all ranks and both verbs get the same bits.
Algorithm = Callable[[CollectiveCall, TensorAccess, CommContext], Operation[Work]]


class CollectiveOperation:
    """The part of an `Operation` that all algorithms share; subclasses define `chunks`.

    `flags` are given where ranks of the node access each other's tensors.
    """

    max_in_flight = 8

    def __init__(
        self,
        call: CollectiveCall,
        access: TensorAccess,
        context: CommContext,
        flags: SharedFlags | None = None,
    ) -> None:
        self._call, self._access, self._context, self._flags = call, access, context, flags
        self.wakes_thread = call.wakes_thread
        self.latency_bound = not call.choice.concurrent
        self._number = 0  # of this collective among those of the flags

    def begin(self) -> None:
        """Start to bring the tensor into place."""
        self._access.begin()

    def enter(self) -> bool:
        """Enter the node's flags once the tensor is in place."""
        if not self._access.here():
            return False
        if self._flags is not None:
            self._number = self._flags.enter(self._access.host, reachable=self._access.reachable)
        return True

    def all_entered(self) -> bool:
        """Return whether all ranks of the node have entered."""
        return self._flags is None or self._flags.all_entered(self._number)

    def leave(self) -> None:
        """Leave the node's flags."""
        if self._flags is not None:
            self._flags.leave()

    def all_left(self) -> bool:
        """Return whether all ranks of the node have left."""
        return self._flags is None or self._flags.all_left(self._number)

    def finish(self) -> Work:
        """Return the work that brings the result back to the caller's tensor."""
        return self._access.give_back()
