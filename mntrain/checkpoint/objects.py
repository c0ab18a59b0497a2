"""States of the small objects that a checkpoint holds, and of the communication hook.

A state is encoded for JSON; what JSON lacks is tagged:

    Counter({30: 1})  ->  {"type": "Counter", "items": [[30, 1]]}

The tensors of a hook go, by rank, to the file of random states, which like them are restored on the
same ranks only. The manifest has the name of a tensor in the place of each.
"""

import base64
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mntrain.checkpoint.format import DTYPE_NAMES, DTYPES

HOOK = "comm_hook"
_TENSOR = "tensor of the file"  # the only key of what stands for a tensor of the hook
_MAX_BYTES = 1 << 20  # of a tensor, an array or bytes

_ITEMS: dict[type, Callable[[Any], Any]] = {tuple: tuple, set: set, frozenset: frozenset}
_MAPPINGS: dict[type, Callable[[Any], Any]] = {
    dict: dict,
    OrderedDict: OrderedDict,
    Counter: lambda items: Counter(dict(items)),
}
_BY_NAME = {kind.__name__: make for kind, make in {**_ITEMS, **_MAPPINGS}.items()}


class Stateful(Protocol):
    """An object with a state, such as a torch.optim.lr_scheduler.LRScheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers, strings and small tensors in plain containers."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Take a state that `state_dict` returned."""


def encode_objects(objects: Mapping[str, Stateful]) -> dict[str, Any]:
    """Return the encoded states of objects, by name. Raises ValueError for one that JSON lacks."""
    return {name: encode(value.state_dict(), name) for name, value in objects.items()}


def encode_hook(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a hook's encoded state without tensors, and its tensors by name.

    The state is empty for a hook without one. Raises ValueError as `encode_objects`.
    """
    tensors: dict[str, Tensor] = {}
    if not (state["state"] or state["used"]):
        state = {"context": [], "state": {}, "used": []}
    return {HOOK: encode(state, HOOK, tensors)}, tensors


def merge_hooks(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entry of the manifest for the hooks of all ranks; empty if none has a state.

    `select` returns a rank's state from it, under the name HOOK.
    """
    merged = merge(by_rank)
    return {} if merged == encode_hook({"state": {}, "used": []})[0] else merged


def hook_tensor(rank: int, name: str) -> str:
    """Return the name in the file of a rank's tensor."""
    return f"{HOOK}/{rank}/{name}"


def other_tensor(parameter: str, name: str) -> str:
    """Return the name in the file of a tensor of optimizer state that is not by element."""
    return f"other/{parameter}/{name}"


def encode_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group for JSON: tensors and numbers of NumPy are encoded."""
    return {
        key: encode(value, key) if isinstance(value, Tensor | np.ndarray | np.generic) else value
        for key, value in group.items()
    }


def decode_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `encode_options`. Tensors are on the CPU."""
    return {
        key: decode(value) if isinstance(value, dict) and "data" in value else value
        for key, value in group.items()
    }


def merge(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one entry for each object, from the encoded states of all ranks: see `select`."""
    merged = {}
    for name in by_rank[0]:
        states = [encoded[name] for encoded in by_rank]
        texts = {repr(state) for state in states}  # in which nan equals nan
        merged[name] = {"by_rank": states} if len(texts) > 1 else states[0]
    return merged


def select(
    merged: Mapping[str, Any],
    name: str,
    rank: int,
    size: int,
    read: Callable[[str], Tensor] | None = None,
) -> dict[str, Any]:
    """Return an object's state as it was on a rank. `read` returns a tensor of the file by name.

    Raises ValueError for an object that the checkpoint lacks, and for a state that differed between
    ranks if their number has changed.
    """
    if name not in merged:
        held = f"it has that of {', '.join(sorted(merged))}" if merged else "it has none"
        raise ValueError(f"the checkpoint has no state of {name} ({held}): leave out {name}=")
    entry = merged[name]
    if "by_rank" in entry:
        states = entry["by_rank"]
        if len(states) != size:
            raise ValueError(
                f"the state of {name} differed between the {len(states)} ranks that saved it, so "
                f"{size} cannot restore it: use {len(states)} ranks, or leave out {name}="
            )
        entry = states[rank]
    state: dict[str, Any] = decode(entry, read)
    return state


def encode(value: Any, where: str, tensors: dict[str, Tensor] | None = None) -> Any:
    """Return a value for JSON. Its tensors are put into `tensors`, if given, in place of JSON.

    Raises ValueError, which names `where`, for what JSON and the tags lack.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [encode(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]
    if kind in _ITEMS:
        return {"type": kind.__name__, "items": encode(list(value), where, tensors)}
    if kind in _MAPPINGS:
        pairs = [[encode(k, where), encode(v, f"{where}.{k}", tensors)] for k, v in value.items()]
        return {"type": kind.__name__, "items": pairs}
    if tensors is not None and isinstance(value, Tensor):
        tensors[name := str(len(tensors))] = value
        return {"type": "dict", "items": [[_TENSOR, name]]}
    described: dict[str, Any] = {"type": "bytes"}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        described = {"type": "array", "dtype": value.dtype.str, "shape": list(value.shape)}
        data = value.tobytes()
    elif isinstance(value, Tensor) and value.dtype in DTYPE_NAMES:
        shape = list(value.shape)
        described = {"type": "tensor", "dtype": DTYPE_NAMES[value.dtype], "shape": shape}
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes()
    elif kind is bytes:
        data = value
    else:
        raise ValueError(
            f"the state has {where}, a {kind.__name__}: a checkpoint holds numbers, strings and "
            "tensors in plain containers"
        )
    if len(data) > _MAX_BYTES:
        raise ValueError(
            f"the state has {where}, of {len(data) / 1e6:.1f} MB: make it a buffer of the model, "
            "whose tensors all ranks save in parallel"
        )
    return {**described, "data": base64.b64encode(data).decode()}


def decode(value: Any, read: Callable[[str], Tensor] | None = None) -> Any:
    """Invert `encode`. `read` returns a tensor by name."""
    if not isinstance(value, dict):
        return [decode(item, read) for item in value] if isinstance(value, list) else value
    kind = value["type"]
    if kind in _BY_NAME:
        items = decode(value["items"], read)
        if read and kind == "dict" and len(items) == 1 and items[0][0] == _TENSOR:
            return read(items[0][1])
        return _BY_NAME[kind](items)
    data = bytearray(base64.b64decode(value["data"]))
    if kind == "bytes":
        return bytes(data)
    if kind == "array":
        array = np.frombuffer(data, dtype=value["dtype"]).reshape(value["shape"])
        return array if value["shape"] else array[()]
    flat = (
        torch.frombuffer(data, dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    return flat.view(DTYPES[value["dtype"]]).reshape(value["shape"])
