"""The names by which gradients are compressed between nodes, and how they go with other options."""

from typing import Any, Literal

# Of hooks in `zero.comm_hooks`, but for "none"; "bf16" is the wire dtype of that name.
Compression = Literal["none", "bf16", "int8"]


def select_hook(compress: str, wire_dtype: str, comm_hook: Any) -> tuple[Any, str]:
    """Return the communication hook and the wire dtype of an optimizer.

    `comm_hook` is what the user gave for it, or None. Raises ValueError if a compression is given
    as well.
    """
    if compress == "none":
        return comm_hook, wire_dtype
    if comm_hook is not None:
        raise ValueError(
            f"compress {compress} and a comm_hook both say how gradients cross nodes: give one of "
            "the two"
        )
    return (None, "bf16") if compress == "bf16" else (compress, wire_dtype)
