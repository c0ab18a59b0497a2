"""One level: the world as it comes, wherever its ranks are."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from mntrain.collectives.algorithm import Groups, shard_bounds
from mntrain.collectives.messages import Group, Part


class Flat:
    """Every verb over all ranks at once; shards lie in the order of ranks.

    Bytes sent by a rank, of S, with its own shard of P (S/N where shards are equal): a
    reduce-scatter S - P, an all-gather (N-1) P, an all-reduce 2 S (N-1)/N.
    """

    def __init__(self, groups: Groups) -> None:
        self._world = Group(groups.world)
        self._size = groups.world.size
        self.slots = tuple(range(self._size))

    def all_reduce(self, tensor: Tensor) -> None:
        """See `Algorithm.all_reduce`."""
        self._world.all_reduce(tensor)

    def reduce_scatter(self, tensor: Tensor, bounds: Sequence[int] | None = None) -> None:
        """See `Algorithm.reduce_scatter`."""
        self._world.reduce_scatter(tensor, self._shards(tensor, bounds))

    def all_gather(self, tensor: Tensor, bounds: Sequence[int] | None = None) -> None:
        """See `Algorithm.all_gather`."""
        self._world.all_gather(tensor, self._shards(tensor, bounds))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """See `Algorithm.broadcast`."""
        self._world.broadcast(tensor, root)

    def _shards(self, tensor: Tensor, bounds: Sequence[int] | None) -> list[Part]:
        return list(pairwise(shard_bounds(len(tensor), self._size, bounds)))
