"""The topology of a world: its ranks split into node groups and cross groups. Pure.

world of 6 ranks on 2 nodes                cross groups (same local rank, one a node)

node 0:   rank 0   rank 1   rank 2         {0, 3}   {1, 4}   {2, 5}
node 1:   rank 3   rank 4   rank 5
local rank:  0        1        2           rank 0 and rank 3 are the leaders
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Topology:
    """The ranks of every node: each rank once, ascending in a node, nodes by their first rank.

    Slots, the indices of the ranks' shards, go by lane, then by node, then by local rank, where
    lane k of K = `smallest_node` serves the local ranks k, k + K, ... of every node. So the shards
    that travel on a lane lie end to end. With 2 nodes of 2 ranks (ranks 0, 1 and 2, 3):

        lanes        | lane 0            | lane 1            |
        nodes        | node 0  | node 1  | node 0  | node 1  |
        slots        | 0       | 1       | 2       | 3       |
        owners       | rank 0  | rank 2  | rank 1  | rank 3  |
    """

    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        """Check the invariants."""
        ranks = [rank for node in self.nodes for rank in node]
        assert sorted(ranks) == list(range(len(ranks)))
        assert all(node and list(node) == sorted(node) for node in self.nodes)
        assert [node[0] for node in self.nodes] == sorted(node[0] for node in self.nodes)

    @classmethod
    def from_hosts(cls, hosts: Sequence[Hashable], ranks_per_node: int | None = None) -> "Topology":
        """Group ranks by the key of their host: hosts[rank] is equal where memory is shared.

        With `ranks_per_node`, each host's ranks are cut, in order, into virtual nodes of that many
        ranks (the last may have fewer).
        """
        by_host: dict[Hashable, list[int]] = {}
        for rank, host in enumerate(hosts):
            by_host.setdefault(host, []).append(rank)
        nodes = [
            tuple(ranks[low : low + (ranks_per_node or len(ranks))])
            for ranks in by_host.values()
            for low in range(0, len(ranks), ranks_per_node or len(ranks))
        ]
        return cls(tuple(sorted(nodes)))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._positions)

    @cached_property
    def _positions(self) -> dict[int, tuple[int, int]]:
        """Rank to (node, local rank)."""
        return {
            rank: (node, local)
            for node, ranks in enumerate(self.nodes)
            for local, rank in enumerate(ranks)
        }

    def node(self, rank: int) -> int:
        """Return the index of a rank's node."""
        return self._positions[rank][0]

    def local_rank(self, rank: int) -> int:
        """Return a rank's index in its node group; 0 is the leader."""
        return self._positions[rank][1]

    def node_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks on the same node, by local rank."""
        return self.nodes[self.node(rank)]

    def cross_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with the same local rank, by node; nodes without one are left out."""
        local = self.local_rank(rank)
        return tuple(node[local] for node in self.nodes if len(node) > local)

    @cached_property
    def smallest_node(self) -> int:
        """The number of ranks of the smallest node: the number of lanes that reach every node."""
        return min(len(node) for node in self.nodes)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Slot to rank: a permutation of the ranks."""
        lanes = self.smallest_node
        return tuple(
            rank for lane in range(lanes) for node in self.nodes for rank in node[lane::lanes]
        )

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Rank to slot: the inverse of `owners`."""
        slots = [0] * self.size
        for slot, rank in enumerate(self.owners):
            slots[rank] = slot
        return tuple(slots)

    @cached_property
    def lane_slots(self) -> tuple[int, ...]:
        """The bounds of the lanes in the order of slots: lane k has slots [k] to [k + 1]."""
        lanes = self.smallest_node
        counts = (sum(len(node[lane::lanes]) for node in self.nodes) for lane in range(lanes))
        return (0, *accumulate(counts))

    def __str__(self) -> str:
        """Return a short description: "4 ranks on 2 nodes of 2"."""
        counts = [len(node) for node in self.nodes]
        shape = str(counts[0]) if len(set(counts)) == 1 else "+".join(map(str, counts))
        ranks = f"{self.size} rank" + "s" * (self.size != 1)
        nodes = f"{len(self.nodes)} node" + "s" * (len(self.nodes) != 1)
        return f"{ranks} on {nodes} of {shape}"
