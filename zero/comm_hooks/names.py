"""Communication hooks by their names."""

from collections.abc import Callable
from functools import partial

import torch

from zero.comm_hooks import CommHook
from zero.comm_hooks.between_nodes import Int8Hook
from zero.precision import check_travel_dtype

HOOKS: dict[str, Callable[[], CommHook]] = {
    "uncompressed": CommHook,
    "fp32": partial(CommHook, torch.float32),  # narrower than fp64 gradients
    "bf16": partial(CommHook, torch.bfloat16),
    "fp16": partial(CommHook, torch.float16),
    "int8": Int8Hook,
}


def make_hook(hook: str | CommHook | None, wire_dtype: torch.dtype | None = None) -> CommHook:
    """Return a hook by name, or as it is; by default the one that casts to a wire dtype.

    Raises ValueError for an unknown name or wire dtype, and for a wire dtype beside a hook.
    """
    check_travel_dtype("wire_dtype", wire_dtype)
    if hook is None:
        return CommHook(wire_dtype)
    if wire_dtype not in (None, torch.float32):
        raise ValueError("a communication hook decides the wire dtype: give one of the two")
    if isinstance(hook, CommHook):
        return hook
    if not isinstance(hook, str):
        raise ValueError(
            f"comm_hook is of type {type(hook).__name__}: give a name or a zero.comm_hooks.CommHook"
        )
    if hook not in HOOKS:
        raise ValueError(f"comm_hook {hook!r} is unknown: choose one of {', '.join(sorted(HOOKS))}")
    return HOOKS[hook]()
