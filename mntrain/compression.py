"""Compressions of gradients between nodes, by the names of `--comm.compress`."""

from typing import Any

# ruff: noqa: PLC0415 - zero imports torch, which --help does without

NAMES = ("int8",)


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
    from zero.comm_hooks.between_nodes import Int8Hook

    return {"int8": Int8Hook}[compress]()
