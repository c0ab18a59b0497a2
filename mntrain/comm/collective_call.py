"""The parts of every collective: the call, the context in which it runs, and the algorithm."""

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
from mntrain.comm.ticket import Ticket
from mntrain.comm.topology import Topology
from zero.collectives import Work

Verb = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]


class CollectiveCall(NamedTuple):
    """The arguments of a collective, the same on all ranks."""

    verb: Verb
    choice: AlgorithmChoice
    bounds: tuple[int, ...]  # of the shards; of the tensor if the verb has no shards
    root: int
    wire: torch.dtype | None  # None: the tensor's own
    small: bool  # whether every rank may gather the tensors of all ranks
    ticket: Ticket


def no_fence() -> Steps[None]:
    """Return at once: what the host has computed is in memory."""
    yield from ()


def unchanged(steps: Steps[None]) -> Steps[None]:
    """Return the steps as they are."""
    return steps


@dataclass(frozen=True)
class CommContext:
    """Resources of a world's collectives for one kind of memory. One thread at a time uses it."""

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


# One call by an algorithm, on this rank: chunks that the engine drives among those of other calls,
# or steps that run alone. All-reduce and reduce-scatter must sum in one order, wherever in a tensor
# an element lies, so that all ranks and both verbs get the same bits.
Algorithm = Callable[[CollectiveCall, TensorAccess, CommContext], Operation[Work] | Steps[Work]]
