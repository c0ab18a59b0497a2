"""Leader: ranks of a node share memory; local rank 0 alone exchanges messages with other nodes."""

from mntrain.comm.chunk_plan import HierarchyPlan
from mntrain.comm.chunked import HierarchicalAlgorithm
from mntrain.comm.collective_call import Algorithm, WorldContext
from mntrain.comm.topology import Topology

AUTO = True


def plan(topology: Topology, rank: int) -> HierarchyPlan:
    """Return the plan of one lane, owned by the leaders."""
    return HierarchyPlan(topology, 1, topology.slots, rank)


def make(world: WorldContext) -> Algorithm:
    """Return the algorithm for a world."""
    return HierarchicalAlgorithm(world, plan(world.topology, world.comm.rank))
