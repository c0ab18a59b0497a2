"""The registry of compressions of gradients between nodes.

Each module of this package is one compression, and the module's name is that of its choice in
`--comm.compress`. To add one, add a module: configuration finds it here. It defines

    make()    return a new communication hook (`zero.comm_hooks.CommHook`). Local
"""

import importlib
import pkgutil
from functools import cache
from typing import Any


@cache
def names() -> tuple[str, ...]:
    """Return the names of all compressions, sorted. Imports none of them."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def select_hook(compress: str, comm_hook: Any) -> Any:
    """Return a new hook of a compression; of "none", the `comm_hook` of the user, or None. Local.

    Raises ValueError if both are given.
    """
    if compress == "none":
        return comm_hook
    if comm_hook is not None:
        raise ValueError(
            f"compress {compress} and a comm_hook both say how gradients cross nodes: give one of "
            "the two"
        )
    return importlib.import_module(f"{__name__}.{compress}").make()
