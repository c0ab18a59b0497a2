"""Leader: ranks of a node share memory; local rank 0 alone exchanges messages with other nodes."""

from mntrain.comm.chunk_plan import HierarchyPlan
from mntrain.comm.topology import Topology


def plan(topology: Topology, rank: int) -> HierarchyPlan:
    """Return the plan of one lane, owned by the leaders."""
    return HierarchyPlan(topology, 1, topology.slots, rank)
