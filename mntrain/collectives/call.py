"""What is asked of a world, and what all of its collectives have in common."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from mntrain.collectives.board import Board
from mntrain.collectives.choice import Choice
from mntrain.collectives.near import Tools
from mntrain.collectives.plan import Scheme

Verb = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]


@dataclass
class Shared:
    """What all collectives of a world have in common. One thread uses it."""

    tools: Tools
    schemes: dict[str, Scheme]  # by algorithm; naive has none
    board: Board  # of the ranks of this node
    owners: tuple[int, ...]  # slot to rank
    count: int = 0  # of pieces so far, on all ranks alike

    def number(self, count: int) -> int:
        """The number of the first of so many pieces."""
        first = self.count
        self.count += count
        return first


class Call(NamedTuple):
    """What was asked for, the same on all ranks."""

    verb: Verb
    choice: Choice
    bounds: tuple[int, ...]  # of shards
    root: int = 0
    wire: torch.dtype | None = None
