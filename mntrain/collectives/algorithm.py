"""What an algorithm is, and what it is given."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mntrain.mpi import Communicator
from mntrain.topology import Topology
from zero.layout import split


@dataclass(frozen=True)
class Groups:
    """The communicators of one world, and who is where."""

    topology: Topology
    world: Communicator
    node: Communicator  # by local rank
    cross: Communicator  # by node


class Algorithm(Protocol):
    """The four verbs of `zero.collectives.Collectives`, blocking, on flat tensors in host memory.

    `slots[rank]` is the place of a rank's shard. Every verb is collective and in place. `bounds` is
    trusted: `WorldCollectives` has checked it.

    An element is summed in an order that depends on the world alone, not on where the tensor is
    cut: so an all-reduce and a reduce-scatter leave the same bits, with any bounds.
    """

    slots: tuple[int, ...]

    def all_reduce(self, tensor: Tensor) -> None:
        """Every rank ends with the sum, the same bits on each."""

    def reduce_scatter(self, tensor: Tensor, bounds: Sequence[int] | None = None) -> None:
        """This rank's shard ends as the sum; the rest is undefined."""

    def all_gather(self, tensor: Tensor, bounds: Sequence[int] | None = None) -> None:
        """Every rank ends with every rank's shard."""

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Every rank ends with root's tensor."""


def shard_bounds(numel: int, size: int, bounds: Sequence[int] | None = None) -> Sequence[int]:
    """Where the shards of numel elements begin and end: as given, else equal to within one."""
    return split(numel, size) if bounds is None else bounds
