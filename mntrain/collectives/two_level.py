"""Two levels: within the node, then between nodes, then within the node again.

    node 0:  rank 0 ──┐      ┌── rank 2  :node 1         1  reduce-scatter over the node: lanes
             rank 1 ─┐│      │┌─ rank 3                  2  all-reduce over nodes, lane by lane
                     ││      ││                          3  all-gather over the node
              lane 0 │└──────┘│  lane 0
              lane 1 └────────┘  lane 1

With one lane this is the classic scheme: reduce to the leader, all-reduce among leaders, broadcast
over the node. With a lane for every local rank all ranks work, and the node's memory and the wire
between nodes are crossed by every byte once.

Sources: Traff and Hunold, "Decomposing Collectives for Exploiting Multi-lane Communication", 2019
(arXiv 1910.13373), for the lanes; Mikami et al., arXiv 1811.05233, for the same on GPU clusters.
"""

from collections.abc import Sequence

from torch import Tensor

from mntrain.collectives.algorithm import Groups, shard_bounds
from mntrain.collectives.messages import Group, Move, Part
from mntrain.topology import Lanes


class TwoLevel:
    """The verbs over lanes: one lane (`leader`), or one for every local rank (`lanes`).

    With M nodes of L ranks, S bytes and K lanes, an owner of a lane sends 2 (M-1)/M S/K bytes
    between nodes in an all-reduce, half of that in a reduce-scatter or an all-gather; others send
    nothing there. Within the node a rank sends, in an all-reduce, S less its own lane, and its
    own lane to each of the others. Nodes may have unequal numbers of ranks: lanes are as many as
    the smallest has, and ranks beyond them are served by an owner. Where bounds are given, a lane
    is as long as its shards are together.

    An element is summed over each node in the order of local ranks, then over nodes in theirs.
    """

    def __init__(self, groups: Groups, count: int) -> None:
        self._plan = Lanes(groups.topology, count)
        self._node, self._cross = Group(groups.node), Group(groups.cross)
        self._topology = groups.topology
        self._rank = groups.world.rank
        self._local_rank = groups.node.rank
        self._owns_lane = self._local_rank < count
        self.slots = self._plan.slots

    @classmethod
    def leader(cls, groups: Groups) -> "TwoLevel":
        """Node-local reduce to the leader, inter-node all-reduce, node-local broadcast."""
        return cls(groups, 1)

    @classmethod
    def lanes(cls, groups: Groups) -> "TwoLevel":
        """As many lanes as the smallest node has ranks."""
        return cls(groups, groups.topology.smallest_node)

    def all_reduce(self, tensor: Tensor) -> None:
        """See `Algorithm.all_reduce`."""
        lanes = self._lanes(self._bounds(tensor))
        self._node.reduce_scatter(tensor, lanes)
        if self._owns_lane:
            self._cross.all_reduce(tensor[slice(*lanes[self._local_rank])])
        self._node.all_gather(tensor, lanes)

    def reduce_scatter(self, tensor: Tensor, bounds: Sequence[int] | None = None) -> None:
        """See `Algorithm.reduce_scatter`."""
        bounds = self._bounds(tensor, bounds)
        self._node.reduce_scatter(tensor, self._lanes(bounds))
        if self._owns_lane:
            self._cross.reduce_scatter(tensor, self._blocks(bounds))
        self._node.move(tensor, self._deliveries(bounds))

    def all_gather(self, tensor: Tensor, bounds: Sequence[int] | None = None) -> None:
        """See `Algorithm.all_gather`."""
        bounds = self._bounds(tensor, bounds)
        self._node.move(tensor, [(to, source, p) for source, to, p in self._deliveries(bounds)])
        if self._owns_lane:
            self._cross.all_gather(tensor, self._blocks(bounds))
        self._node.all_gather(tensor, self._lanes(bounds))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """See `Algorithm.broadcast`: over root's node, between leaders, over the other nodes."""
        root_node = self._topology.node(root)
        here = self._topology.node(self._rank) == root_node
        if here:
            self._node.broadcast(tensor, self._topology.local_rank(root))
        if self._local_rank == 0:
            self._cross.broadcast(tensor, root_node)
        if not here:
            self._node.broadcast(tensor, 0)

    def _bounds(self, tensor: Tensor, bounds: Sequence[int] | None = None) -> Sequence[int]:
        return shard_bounds(len(tensor), self._topology.size, bounds)

    def _lanes(self, bounds: Sequence[int]) -> list[Part]:
        """Local rank to the lane that it owns, or nothing."""
        idle = len(self._topology.node_group(self._rank)) - self._plan.count
        return [*_elements(bounds, self._plan.lane_slots), *[(0, 0)] * idle]

    def _blocks(self, bounds: Sequence[int]) -> list[Part]:
        """Node to its block of this rank's lane."""
        return _elements(bounds, self._plan.block_slots(self._local_rank))

    def _deliveries(self, bounds: Sequence[int]) -> list[Move]:
        """The shards of ranks beyond the lanes, from the owners that serve them."""
        return [
            (self._plan.lane_of(rank), local, (bounds[slot], bounds[slot + 1]))
            for local, rank in enumerate(self._topology.node_group(self._rank))
            for slot in [self._plan.slots[rank]]
        ]


def _elements(bounds: Sequence[int], slots: Sequence[tuple[int, int]]) -> list[Part]:
    return [(bounds[low], bounds[high]) for low, high in slots]
