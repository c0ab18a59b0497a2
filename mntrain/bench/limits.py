"""The time that the hardware allows for a collective."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HardwareLimits:
    """Measured speeds in bytes/s, the same on every rank."""

    ranks: tuple[int, ...]
    """Number of ranks on each node."""
    link: float | None
    """Speed at which a node sends and, at the same time, receives. None on a single node."""
    copy: Mapping[int, float]
    """By size: the memory bandwidth of the slowest rank while all ranks copy at once."""

    def seconds(self, verb: str, nbytes: int) -> float:
        """Return the limit for a collective on a tensor of `nbytes` bytes.

        Between nodes: the bytes that some node must send or receive, over the link's speed. Within
        one node: the time in which all ranks at once copy the tensor. The latter is a yardstick,
        not a bound: a collective may beat it if each rank touches only a part of the tensor.
        """
        if self.link is None:
            return nbytes / self.copy[nbytes]
        return minimum_traffic(verb, self.ranks) * nbytes / self.link

    @property
    def description(self) -> str:
        """The limit in words."""
        if self.link is None:
            return (
                "the time of a copy of the tensor in this node's memory while all ranks copy at "
                "once; a collective that touches less of it may be faster"
            )
        nodes, smallest, size = len(self.ranks), min(self.ranks), sum(self.ranks)
        shards = "(M-1)/M S"
        if smallest < max(self.ranks):
            shards = f"{size - smallest}/{size} S (all shards but those of the smallest node)"
        return (
            "the bytes that a node must send or receive, over the speed of the measured link; for "
            f"S bytes on M = {nodes} nodes: all_reduce 2(M-1)/M S, broadcast S, reduce_scatter and "
            f"all_gather {shards}"
        )


def minimum_traffic(verb: str, ranks: Sequence[int]) -> float:
    """Return the part of the tensor that some node must send or receive at least.

    `ranks` has the number of ranks on each node; every rank has a shard of the same length.
    """
    nodes = len(ranks)
    outside_smallest = 1 - min(ranks) / sum(ranks)
    return {
        "all_reduce": 2 * (nodes - 1) / nodes,
        "reduce_scatter": outside_smallest,
        "all_gather": outside_smallest,
        "broadcast": float(nodes > 1),
    }[verb]
