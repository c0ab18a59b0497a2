"""What an algorithm is, and what it is given."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mntrain.mpi import Communicator
from mntrain.topology import Topology


@dataclass(frozen=True)
class Groups:
    """The communicators of one world, and who is where."""

    topology: Topology
    world: Communicator
    node: Communicator  # by local rank
    cross: Communicator  # by node


class Algorithm(Protocol):
    """The four verbs of `zero.collectives.Collectives`, blocking, on flat tensors in host memory.

    `slots[rank]` is the place of a rank's shard. Every verb is collective and in place.
    """

    slots: tuple[int, ...]

    def all_reduce(self, tensor: Tensor) -> None:
        """Every rank ends with the sum, the same bits on each."""

    def reduce_scatter(self, tensor: Tensor) -> None:
        """This rank's shard ends as the sum; the rest is undefined."""

    def all_gather(self, tensor: Tensor) -> None:
        """Every rank ends with every rank's shard."""

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Every rank ends with root's tensor."""
