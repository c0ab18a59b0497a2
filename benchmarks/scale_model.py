"""Formulas: times of published collectives on many nodes, and of a training step with buckets.

A message takes a latency, and its bytes the rate of a node's link, which the ranks of the node
share. Steps within a node and sums take no time. P ranks on N nodes are numbered node by node.

SOURCE is that of the algorithms, and of the sizes at which MPICH chooses between them.
"""

import math
from dataclasses import dataclass

SOURCE = (
    "R. Thakur, R. Rabenseifner, W. Gropp: Optimization of Collective Communication Operations in "
    "MPICH, International Journal of High Performance Computing Applications 19(1), 2005, pages 49 "
    "to 66"
)
SHORT, SHORT_BROADCAST, LONG = 2 << 10, 12 << 10, 512 << 10  # bytes: where MPICH changes algorithms


@dataclass(frozen=True)
class Call:
    """A collective of so many bytes, on nodes of so many ranks each, over one kind of link."""

    nodes: int
    per_node: int
    nbytes: int
    latency_s: float
    rate: float

    @property
    def levels(self) -> int:
        """The least number of latencies, as of a binary tree of nodes."""
        return math.ceil(math.log2(self.nodes))

    @property
    def bytes_s(self) -> float:
        """The time in which a node's link carries what each other node needs of the tensor."""
        return self.nbytes * (self.nodes - 1) / self.nodes / self.rate

    @property
    def tree_s(self) -> float:
        """The time of so many latencies."""
        return self.levels * self.latency_s

    def bound_s(self, verb: str) -> float:
        """Return the latencies of a tree, and the time of the bytes that a node must receive."""
        if verb == "broadcast":
            return self.tree_s + self.nbytes / self.rate
        return self.tree_s + self.bytes_s * (2 if verb == "all_reduce" else 1)

    def ring_s(self, verb: str) -> float:
        """Return the time of one ring of all ranks, which passes parts on; of two rounds."""
        ranks = self.nodes * self.per_node
        round_s = (ranks - 1) * (self.latency_s + self.nbytes / ranks / self.rate)
        if verb == "broadcast":  # the parts are scattered down a tree first
            return self.tree_s + self.bytes_s + round_s
        return round_s * (2 if verb == "all_reduce" else 1)

    def halving_s(self, verb: str) -> float:
        """Return the time of recursive halving or doubling, or both.

        An all-reduce halves between near ranks first. Otherwise, each rank of a node sends parts of
        the tensor to other nodes, and not the node once.
        """
        if verb == "all_reduce":
            return 2 * (self.tree_s + self.bytes_s)
        scattered_s = self.tree_s + self.bytes_s if verb == "broadcast" else 0.0
        return scattered_s + self.tree_s + self.per_node * self.bytes_s

    def mpich_s(self, verb: str) -> float:
        """Return the time of the algorithm that MPICH chooses for this verb and size."""
        whole_s = self.nbytes / self.rate
        if verb == "all_reduce" and self.nbytes <= SHORT:  # doubles, with all bytes in each round
            return self.tree_s + self.levels * self.per_node * whole_s
        if verb == "broadcast" and self.nbytes < SHORT_BROADCAST:
            return self.tree_s + self.levels * whole_s
        if verb == "all_reduce" or self.nbytes < LONG:
            return self.halving_s(verb)
        if verb == "reduce_scatter":  # each pair of ranks exchanges a part
            pairs = self.nodes * self.per_node - 1
            return pairs * self.latency_s + self.per_node * self.bytes_s
        return self.ring_s(verb)


@dataclass(frozen=True)
class Step:
    """A training step: seconds of forward and backward, and of the collectives of each bucket."""

    forward_s: float
    backward_s: float
    buckets: int

    def reduced_s(self, seconds: float) -> float:
        """Return the exposed time of reductions, which start as backward fills their buckets."""
        end_s = 0.0
        for bucket in range(1, self.buckets + 1):
            end_s = max(end_s, self.backward_s * bucket / self.buckets) + seconds
        return end_s - self.backward_s

    def exposed_s(
        self, reduce_s: float, gather_s: float, *, overlap_forward: bool = False
    ) -> float:
        """Return the exposed time of a step whose parameters travel back in `gather_s` a bucket."""
        exposed_s, gathered_s = self.reduced_s(reduce_s), self.buckets * gather_s
        if not overlap_forward:
            return exposed_s + gathered_s
        end_s = 0.0
        for bucket in range(1, self.buckets + 1):
            end_s = max(end_s, bucket * gather_s) + self.forward_s / self.buckets
        return exposed_s + end_s - self.forward_s

    def share(self, exposed_s: float) -> float:
        """Return the exposed share of the step."""
        return exposed_s / (self.forward_s + self.backward_s + exposed_s)
