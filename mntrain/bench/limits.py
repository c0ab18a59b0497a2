"""How fast a verb could be, and how often it is worth measuring. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SHORT_S = 0.1  # what is shorter is repeated until it takes about so long,
MOST = 20  # but at most so many times as often as asked for
LEAST_WEIGHT = 1 << 20  # bytes: smaller tensors get as much of the time as one of this size


@dataclass(frozen=True)
class HardwareLimits:
    """What the machine allows. Speeds are in bytes/s, and the same on every rank."""

    ranks: tuple[int, ...]  # of every node
    link: float | None  # what a node sends and at once receives; None on one node
    copy: Mapping[int, float]  # by size: what the slowest rank copies while all copy

    def seconds(self, verb: str, nbytes: int) -> float:
        """The shortest time of a verb on a tensor of so many bytes.

        Between nodes: what some node must send or receive at least, over the link. On one node:
        the time in which every rank could copy the tensor once, all at the same time. That is a
        yardstick, not a bound: a verb in which a rank touches less than the whole tensor may beat
        it.
        """
        if self.link is None:
            return nbytes / self.copy[nbytes]
        return crossing_at_least(verb, self.ranks) * nbytes / self.link

    @property
    def meaning(self) -> str:
        """What shares are of, in words."""
        if self.link is None:
            return (
                "what a copy of the tensor takes in this node's memory while all ranks copy at "
                "once; a verb that touches less of it may be faster"
            )
        nodes, smallest, size = len(self.ranks), min(self.ranks), sum(self.ranks)
        others = "(M-1)/M S"
        if smallest < max(self.ranks):
            others = f"{size - smallest}/{size} S, all but the shards of the smallest node"
        return (
            "what a node must send or receive at least, over the measured link; of S bytes over "
            f"M = {nodes} nodes: all_reduce 2(M-1)/M S, broadcast S, reduce_scatter and all_gather "
            f"{others}"
        )


def crossing_at_least(verb: str, ranks: Sequence[int]) -> float:
    """What of the tensor some node must send or receive at least: 1.0 is all of it.

    `ranks`: of every node; each rank has a shard of the same length.
    """
    nodes = len(ranks)
    beyond = 1 - min(ranks) / sum(ranks)  # the shards that are not the smallest node's
    return {
        "all_reduce": 2 * (nodes - 1) / nodes,
        "reduce_scatter": beyond,
        "all_gather": beyond,
        "broadcast": float(nodes > 1),
    }[verb]


def weight(nbytes: int) -> int:
    """What part of the time a measurement at this size may take, relative to others."""
    return max(nbytes, LEAST_WEIGHT)


def predicted(limits: HardwareLimits, verb: str, once_s: float, nbytes: int, larger: int) -> float:
    """Seconds that a verb takes at a larger size, where it took `once_s` at a smaller one.

    Rather too few than too many: what is measured corrects it, what is left out stays unknown. So:
    in proportion, but no slower than half the limit's speed for the bytes that are added.
    """
    in_proportion = once_s * weight(larger) / weight(nbytes)
    added_s = limits.seconds(verb, larger) - limits.seconds(verb, nbytes)
    return max(once_s, min(in_proportion, once_s + 2 * added_s))


def repeats(once_s: float, allowed_s: float, wanted: int) -> int:
    """How often to measure what takes `once_s` in all, where `allowed_s` is left for it."""
    often = max(wanted, min(MOST * wanted, int(SHORT_S / once_s)))
    return max(1, min(often, int(allowed_s / once_s)))
