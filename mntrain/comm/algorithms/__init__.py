"""The registry of collective algorithms.

Each module of this package is one algorithm, and the module's name is the algorithm's name. To add
an algorithm, add a module: configuration and benchmarks find it here. It defines one of

    plan(topology, rank)   return a rank's `chunk_plan.HierarchyPlan`, for the hierarchical steps
    run                    a `resources.Algorithm` on host memory: device tensors are staged there
"""

import importlib
import pkgutil
from functools import cache
from types import ModuleType
from typing import NamedTuple

CHUNK_BYTES = 512 << 10
# A lane is cut into at least so many chunks, unless they get very short: the wire idles while the
# first one is summed within the node, and while the last one is distributed there.
MIN_CHUNKS = 8
LONG_LANE_BYTES = 24 << 20  # from here on, the first and the last chunk matter less than CPU time


class AlgorithmChoice(NamedTuple):
    """An algorithm and the chunks into which it cuts a tensor."""

    algorithm: str
    chunk_bytes: int = CHUNK_BYTES  # at most, of a lane, over all nodes
    min_chunks: int = MIN_CHUNKS  # of a lane
    concurrent: bool = False  # whether other tensors are in flight at the same time

    def among_others(self) -> "AlgorithmChoice":
        """Return the same choice for one of several tensors that are in flight together.

        The others keep the wire busy, so fewer chunks suffice, which cost less CPU time.
        """
        return self._replace(chunk_bytes=2 * self.chunk_bytes, min_chunks=2, concurrent=True)

    def for_lane(self, nbytes: int) -> "AlgorithmChoice":
        """Return the same choice for a lane of so many bytes: a long one gets longer chunks."""
        if self.concurrent or nbytes < LONG_LANE_BYTES:
            return self
        return self._replace(chunk_bytes=2 * self.chunk_bytes)


@cache
def names() -> tuple[str, ...]:
    """Return the names of all algorithms, sorted. Imports none of them."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def load(name: str) -> ModuleType:
    """Import an algorithm's module."""
    return importlib.import_module(f"{__name__}.{name}")
