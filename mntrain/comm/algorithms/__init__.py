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


@cache
def names() -> tuple[str, ...]:
    """Return the names of all algorithms, sorted. Imports none of them."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def load(name: str) -> ModuleType:
    """Import an algorithm's module."""
    return importlib.import_module(f"{__name__}.{name}")
