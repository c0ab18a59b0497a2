"""The registry of collective algorithms.

Each module of this package is one algorithm, and the module's name is the algorithm's name. To add
an algorithm, add a module: configuration, benchmarks and automatic selection find it here. It
defines

    AUTO                 whether automatic selection may choose it
    make(world)          return a `collective_call.Algorithm` for a `WorldContext`. Local
"""

import importlib
import pkgutil
from types import ModuleType


def names() -> tuple[str, ...]:
    """Return the names of all algorithms, sorted. Imports none of them."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def check_name(name: str) -> None:
    """Raise ValueError unless there is an algorithm of this name."""
    if name not in names():
        raise ValueError(f"unknown algorithm {name!r}: choose auto, {', '.join(names())}")


def load(name: str) -> ModuleType:
    """Import an algorithm's module. Raises ValueError for an unknown name."""
    check_name(name)
    return importlib.import_module(f"{__name__}.{name}")


def candidates() -> tuple[str, ...]:
    """Return the names of the algorithms that automatic selection may choose, sorted."""
    return tuple(name for name in names() if load(name).AUTO)
