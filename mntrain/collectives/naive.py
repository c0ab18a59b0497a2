"""The oracle: everyone sends everything to everyone, and adds in the order of ranks."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mntrain.collectives.algorithm import Groups, shard_bounds
from mntrain.collectives.messages import as_bytes, sum_dtype


class Naive:
    """The shortest correct implementation of the four verbs.

    Messages a rank: N - 1, each of the whole tensor, whatever the verb (broadcast: the root's).
    """

    def __init__(self, groups: Groups) -> None:
        self._world = groups.world
        self.slots = tuple(range(groups.world.size))

    def all_reduce(self, tensor: Tensor) -> None:
        """See `Algorithm.all_reduce`."""
        first, *others = self._everyone(tensor)
        total = first.to(sum_dtype(tensor.dtype))
        for theirs in others:  # torch's own sum has an order that depends on the place
            total += theirs
        tensor.copy_(total)

    def reduce_scatter(self, tensor: Tensor, bounds: Sequence[int] | None = None) -> None:
        """See `Algorithm.reduce_scatter`: everybody keeps all shards."""
        self.all_reduce(tensor)

    def all_gather(self, tensor: Tensor, bounds: Sequence[int] | None = None) -> None:
        """See `Algorithm.all_gather`."""
        shards = pairwise(shard_bounds(len(tensor), self._world.size, bounds))
        everyone = zip(self._everyone(tensor), shards, strict=True)
        tensor.copy_(torch.cat([theirs[low:high] for theirs, (low, high) in everyone]))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """See `Algorithm.broadcast`."""
        data = as_bytes(tensor)
        others = [peer for peer in range(self._world.size) if peer != root]
        if self._world.rank == root:
            self._world.exchange([(peer, data) for peer in others], [])
        else:
            self._world.exchange([], [(root, data)])

    def _everyone(self, tensor: Tensor) -> list[Tensor]:
        rank, size = self._world.rank, self._world.size
        everyone = [tensor.clone() for _ in range(size)]
        others = [peer for peer in range(size) if peer != rank]
        self._world.exchange(
            [(peer, as_bytes(tensor)) for peer in others],
            [(peer, as_bytes(everyone[peer])) for peer in others],
        )
        return everyone
