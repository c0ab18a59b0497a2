"""What is asked of a world, and what all of its collectives have in common."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from mntrain.comm.algorithms.chunk_plan import HierarchyPlan
from mntrain.comm.algorithms.selection import AlgorithmChoice
from mntrain.comm.intranode import CommTools
from mntrain.comm.shared_flags import SharedFlags

Verb = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]


@dataclass
class CollectiveContext:
    """What all collectives of a world have in common. One thread uses it."""

    tools: CommTools
    schemes: dict[str, HierarchyPlan]  # by algorithm; naive has none
    board: SharedFlags  # of the ranks of this node
    owners: tuple[int, ...]  # slot to rank
    count: int = 0  # of pieces so far, on all ranks alike

    def number(self, count: int) -> int:
        """The number of the first of so many pieces."""
        first = self.count
        self.count += count
        return first


class CollectiveCall(NamedTuple):
    """What was asked for, the same on all ranks."""

    verb: Verb
    choice: AlgorithmChoice
    bounds: tuple[int, ...]  # of shards
    root: int = 0
    wire: torch.dtype | None = None
