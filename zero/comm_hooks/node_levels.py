"""The two levels of a group of ranks: within this rank's node, and between nodes."""

from dataclasses import dataclass

from zero.collectives import Collectives
from zero.layout import Bucket


@dataclass(frozen=True)
class NodeLevels:
    """The nodes of a group of ranks, as one of them sees them.

    The slots of the group are ordered by lane, then by node. Lane k consists of the shards that
    local rank k of each node exchanges with the others; there are as many lanes as the smallest
    node has ranks. With nodes of 3 and 2 ranks, and local ranks that are in the order of slots:

        slots          | 0     | 1     | 2      | 3      | 4      |
        owners         | 0.0   | 0.2   | 1.0    | 0.1    | 1.1    |      node.local rank
        lane_slots     0                        3                 5
        own_slots      | of node 0: 0 to 2, 3 to 4; of node 1: 2 to 3, 4 to 5
    """

    node: Collectives  # this rank's node
    cross: Collectives  # the ranks with this local rank, by node
    nodes: tuple[tuple[int, ...], ...]  # the ranks of each
    lane_slots: tuple[int, ...]  # lane k has the slots lane_slots[k] to lane_slots[k + 1]
    own_slots: tuple[tuple[int, int], ...]  # of this node's ranks, by lane

    @property
    def count(self) -> int:
        """The number of nodes."""
        return len(self.nodes)

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return len(self.own_slots)

    @property
    def lane(self) -> int | None:
        """The lane that this rank owns on its node; None for a rank without one."""
        own = self.node.slot(self.node.rank)
        return own if own < self.lanes else None

    def lane_bounds(self, layout: Bucket) -> list[int]:
        """Return the bounds of a bucket's lanes, as shards of the node's ranks."""
        bounds = [layout.bounds[slot] for slot in self.lane_slots]
        return bounds + [layout.numel] * (self.node.size - self.lanes)

    def own_range(self, layout: Bucket) -> tuple[int, int]:
        """Return the elements of a bucket that lie in this rank's lane; empty without one."""
        if self.lane is None:
            return layout.numel, layout.numel
        bounds = self.lane_bounds(layout)
        return bounds[self.lane], bounds[self.lane + 1]

    def node_range(self, layout: Bucket, lane: int) -> tuple[int, int]:
        """Return the elements of a lane that this node's ranks own at stages 1 and 2."""
        first, last = self.own_slots[lane]
        return layout.bounds[first], layout.bounds[last]
