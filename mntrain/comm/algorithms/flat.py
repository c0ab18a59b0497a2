"""Flat: one level of point-to-point messages between all ranks, as if each were a node."""

from mntrain.comm.chunk_plan import HierarchyPlan
from mntrain.comm.chunked import HierarchicalAlgorithm
from mntrain.comm.collective_call import Algorithm, WorldContext
from mntrain.comm.topology import Topology

AUTO = True


def plan(topology: Topology, rank: int) -> HierarchyPlan:
    """Return the plan of one node per rank and one lane."""
    single_ranks = Topology(tuple((rank,) for rank in range(topology.size)))
    return HierarchyPlan(single_ranks, 1, topology.slots, rank)


def make(world: WorldContext) -> Algorithm:
    """Return the algorithm for a world."""
    return HierarchicalAlgorithm(world, plan(world.topology, world.comm.rank))
