"""The seam between what is reduced and how bytes move."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when the result may be used by the caller's thread and its current CUDA stream.

        Raises what the collective raised. May be called again: it returns at once.
        """


class Collectives(Protocol):
    """Four verbs over the world, each in place on one flat tensor.

    Every method but `slot` is collective: all ranks make the same calls in the same order, the
    verbs with tensors of the same length and dtype. Verbs return at once; the tensor belongs to the
    collective until its `Work` has been waited for. Sums accumulate in fp32 or wider. Nothing
    divides: collectives sum.

    A tensor of n elements is cut into `size` shards: at the elements ``i * n // size``, or where
    the caller says. `bounds` are size + 1 element indices that never decrease, from 0 to n: slot s
    is the elements bounds[s] to bounds[s + 1]. Shards may be empty, and of any lengths; all ranks
    give the same bounds. Shards lie in the order of slots, and the rank that owns a slot is given
    by `slot`: after a two-level reduce-scatter the natural order of shards is not the order of
    ranks.

    `wire` is the dtype in which a sum travels between nodes; None: the tensor's own. A 16-bit wire
    rounds each node's sum to it; these are summed in fp32 in the order of nodes, and the result is
    rounded to it once more, the same bits on every rank.

    The same data leave the same bits from `all_reduce` and from `reduce_scatter`, whatever the
    bounds, and wherever in a tensor an element lies.
    """

    @property
    def rank(self) -> int:
        """This rank, 0 to size - 1."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def slot(self, rank: int) -> int:
        """The place of a rank's shard among the shards: a bijection of 0 to size - 1."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make a flat tensor of zeros, in memory from which these collectives move fastest.

        Collective, with the same arguments on every rank. The caller owns it and what it holds; it
        keeps its memory for as long as it is referred to.
        """

    def all_reduce(self, tensor: Tensor, wire: torch.dtype | None = None) -> Work:
        """Sum over all ranks; afterwards every rank holds the sum, the same bits on each."""

    def reduce_scatter(
        self,
        tensor: Tensor,
        bounds: Sequence[int] | None = None,
        wire: torch.dtype | None = None,
    ) -> Work:
        """Sum over all ranks; afterwards this rank's shard is the sum, the rest is undefined.

        Raises ValueError for bounds that do not cut the tensor into `size` shards.
        """

    def all_gather(self, tensor: Tensor, bounds: Sequence[int] | None = None) -> Work:
        """Hand this rank's shard to all; afterwards every rank holds every shard.

        Raises ValueError for bounds that do not cut the tensor into `size` shards.
        """

    def broadcast(self, tensor: Tensor, root: int = 0) -> Work:
        """Hand root's tensor to all."""


class CompletedWork:
    """Work that had nothing to do."""

    def wait(self) -> None:
        """Return at once."""


class SingleProcessCollectives:
    """A world of one: the sum of one tensor is that tensor."""

    rank = 0
    size = 1

    def slot(self, rank: int) -> int:
        """See `Collectives.slot`."""
        return rank

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Collectives.allocate`."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor, wire: torch.dtype | None = None) -> Work:
        """See `Collectives.all_reduce`."""
        return CompletedWork()

    def reduce_scatter(
        self,
        tensor: Tensor,
        bounds: Sequence[int] | None = None,
        wire: torch.dtype | None = None,
    ) -> Work:
        """See `Collectives.reduce_scatter`."""
        return CompletedWork()

    def all_gather(self, tensor: Tensor, bounds: Sequence[int] | None = None) -> Work:
        """See `Collectives.all_gather`."""
        return CompletedWork()

    def broadcast(self, tensor: Tensor, root: int = 0) -> Work:
        """See `Collectives.broadcast`."""
        return CompletedWork()
