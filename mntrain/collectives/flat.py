"""One level: the world as it comes, wherever its ranks are."""

from torch import Tensor

from mntrain.collectives.algorithm import Groups
from mntrain.collectives.messages import Group, Part, equal_parts


class Flat:
    """Every verb over all ranks at once; shards lie in the order of ranks.

    Bytes sent by a rank, of S: reduce-scatter and all-gather S (N-1)/N each, all-reduce both.
    """

    def __init__(self, groups: Groups) -> None:
        self._world = Group(groups.world)
        self._size = groups.world.size
        self.slots = tuple(range(self._size))

    def all_reduce(self, tensor: Tensor) -> None:
        """See `Algorithm.all_reduce`."""
        self._world.all_reduce(tensor)

    def reduce_scatter(self, tensor: Tensor) -> None:
        """See `Algorithm.reduce_scatter`."""
        self._world.reduce_scatter(tensor, self._shards(tensor))

    def all_gather(self, tensor: Tensor) -> None:
        """See `Algorithm.all_gather`."""
        self._world.all_gather(tensor, self._shards(tensor))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """See `Algorithm.broadcast`."""
        self._world.broadcast(tensor, root)

    def _shards(self, tensor: Tensor) -> list[Part]:
        return equal_parts(len(tensor), self._size)
