"""The four verbs over MPI: which algorithms there are, and which one `auto` takes."""

from collections.abc import Callable

from mntrain.collectives.algorithm import Algorithm, Groups
from mntrain.collectives.flat import Flat
from mntrain.collectives.naive import Naive
from mntrain.collectives.two_level import TwoLevel
from mntrain.collectives.world import WorldCollectives

__all__ = ["ALGORITHMS", "Algorithm", "Groups", "WorldCollectives", "choose"]

ALGORITHMS: dict[str, Callable[[Groups], Algorithm]] = {
    "naive": Naive,
    "flat": Flat,
    "leader": TwoLevel.leader,
    "lanes": TwoLevel.lanes,
}


def choose(name: str) -> str:
    """The algorithm that a name stands for: `auto` is lanes.

    On one node, or with one rank a node, lanes are the flat algorithm; where a node has a single
    rank they are the leader's. Raises ValueError for an unknown name.
    """
    if name != "auto" and name not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {name!r}: choose auto, {', '.join(ALGORITHMS)}")
    return "lanes" if name == "auto" else name
