"""The four verbs over MPI."""

from mntrain.collectives.choice import ALGORITHMS, Choice, Table
from mntrain.collectives.world import WorldCollectives

__all__ = ["ALGORITHMS", "Choice", "Table", "WorldCollectives"]
