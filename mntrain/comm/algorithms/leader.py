"""Leader: ranks of a node share memory; local rank 0 alone exchanges messages with other nodes."""

from functools import partial

from mntrain.comm.chunk_plan import HierarchyPlan
from mntrain.comm.hierarchical import run_hierarchical
from mntrain.comm.resources import Algorithm
from mntrain.comm.topology import Topology

HOST_ONLY = False


def plan(topology: Topology, rank: int) -> HierarchyPlan:
    """Return the plan of one lane, owned by the leaders."""
    return HierarchyPlan(topology, 1, topology.slots, rank)


def make(topology: Topology, rank: int) -> Algorithm:
    """Return the algorithm for a rank."""
    return partial(run_hierarchical, plan(topology, rank))
