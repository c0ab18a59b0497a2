"""Which rank sits on which node: the world split into node groups and cross groups. Pure.

world of 6 ranks on 2 nodes                cross groups (same local rank, one a node)

node 0:   rank 0   rank 1   rank 2         {0, 3}   {1, 4}   {2, 5}
node 1:   rank 3   rank 4   rank 5
local rank:  0        1        2           rank 0 and rank 3 are the leaders
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Topology:
    """The ranks of every node: each rank once, ascending in a node, nodes by their first rank."""

    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        """Check what the class promises."""
        ranks = [rank for node in self.nodes for rank in node]
        assert sorted(ranks) == list(range(len(ranks)))
        assert all(node and list(node) == sorted(node) for node in self.nodes)
        assert [node[0] for node in self.nodes] == sorted(node[0] for node in self.nodes)

    @classmethod
    def from_hosts(cls, hosts: Sequence[Hashable], ranks_per_node: int | None = None) -> "Topology":
        """Group ranks by their host's key: hosts[rank] is equal where memory is shared.

        With ranks_per_node, each host's ranks are cut, in order, into virtual nodes of that many
        (the last may have fewer). Raises ValueError when it is not positive.
        """
        if ranks_per_node is not None and ranks_per_node < 1:
            raise ValueError(f"ranks per node is {ranks_per_node}: it must be at least 1")
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
        return len(self._places)

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """Rank to (node, local rank)."""
        return {
            rank: (node, local)
            for node, ranks in enumerate(self.nodes)
            for local, rank in enumerate(ranks)
        }

    def node(self, rank: int) -> int:
        """The index of the node that a rank is on."""
        return self._places[rank][0]

    def local_rank(self, rank: int) -> int:
        """A rank's place in its node group; 0 is the leader."""
        return self._places[rank][1]

    def node_group(self, rank: int) -> tuple[int, ...]:
        """The ranks on the same node, by local rank."""
        return self.nodes[self.node(rank)]

    def cross_group(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same local rank, by node; fewer than nodes when these are unequal."""
        local = self.local_rank(rank)
        return tuple(node[local] for node in self.nodes if len(node) > local)

    @property
    def smallest_node(self) -> int:
        """The number of ranks on the node that has fewest: so many lanes reach every node."""
        return min(len(node) for node in self.nodes)

    def __str__(self) -> str:
        """As a person says it: "4 ranks on 2 nodes of 2"."""
        counts = [len(node) for node in self.nodes]
        shape = str(counts[0]) if len(set(counts)) == 1 else "+".join(map(str, counts))
        ranks = f"{self.size} rank" + "s" * (self.size != 1)
        nodes = f"{len(self.nodes)} node" + "s" * (len(self.nodes) != 1)
        return f"{ranks} on {nodes} of {shape}"


@dataclass(frozen=True)
class LaneLayout:
    """How a two-level algorithm cuts a tensor: into lanes, lanes into nodes' blocks, into shards.

    Lane k is owned, on every node, by the rank with local rank k; a rank whose local rank l is not
    below `count` is served by lane l modulo count. Slots, the places of shards, go by lane, then
    by node, then by local rank. With 2 nodes of 2 ranks (ranks 0, 1 and 2, 3):

        lanes = 2    | lane 0            | lane 1            |
        blocks       | node 0  | node 1  | node 0  | node 1  |
        slots        | 0       | 1       | 2       | 3       |
        owner        | rank 0  | rank 2  | rank 1  | rank 3  |

    One lane is the leader's scheme: blocks are nodes, slots go by node.
    """

    topology: Topology
    count: int

    def __post_init__(self) -> None:
        """Check that every lane has an owner on every node."""
        assert 1 <= self.count <= self.topology.smallest_node

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Slot to rank; a permutation of the ranks."""
        return tuple(
            rank
            for lane in range(self.count)
            for node in self.topology.nodes
            for rank in node[lane :: self.count]
        )

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Rank to slot: the inverse of `owners`."""
        slots = [0] * len(self.owners)
        for slot, rank in enumerate(self.owners):
            slots[rank] = slot
        return tuple(slots)

    def lane_of(self, rank: int) -> int:
        """The lane that a rank's shard travels on."""
        return self.topology.local_rank(rank) % self.count

    @cached_property
    def lane_slots(self) -> tuple[tuple[int, int], ...]:
        """Lane to its first slot and the one after its last."""
        return _runs(
            [sum(len(n[k :: self.count]) for n in self.topology.nodes) for k in range(self.count)],
            0,
        )

    def block_slots(self, lane: int) -> tuple[tuple[int, int], ...]:
        """Node to the first slot of its block in a lane, and the one after its last."""
        lengths = [len(node[lane :: self.count]) for node in self.topology.nodes]
        return _runs(lengths, self.lane_slots[lane][0])


def _runs(lengths: Sequence[int], start: int) -> tuple[tuple[int, int], ...]:
    runs = []
    for length in lengths:
        runs.append((start, start + length))
        start += length
    return tuple(runs)
