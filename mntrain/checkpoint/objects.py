"""States of the small objects that a checkpoint holds, and of others by names that no object has.

A state is encoded for JSON; what JSON lacks is tagged:

    Counter({30: 1})  ->  {"type": "Counter", "items": [[30, 1]]}

The tensors of a hook go, by rank, to the file of random states, which like them are restored on the
same ranks only. The manifest has the name of a tensor in the place of each.
"""

import base64
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mntrain.checkpoint.format import DTYPE_NAMES, DTYPES

HOOK = "comm_hook"  # the name of the state of the communication hook
UNNAMED = "optimizer.state"  # the name of optimizer state of no parameter
_EMPTY = {"type": "dict", "items": []}
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
    """Return a hook's encoded state under its name, without tensors, and its tensors by name.

    Both are empty for a hook without a state. Raises ValueError as `encode_objects`.
    """
    tensors: dict[str, Tensor] = {}
    used = state["state"] or state["used"]
    return {HOOK: encode(state, HOOK, tensors)} if used else {}, tensors


def names_of_objects(merged: Mapping[str, Any]) -> list[str]:
    """Return the names of what a loop has given, without the hook's and the optimizer's state."""
    return [name for name in merged if name not in (HOOK, UNNAMED)]


def hook_tensor(rank: int, name: str) -> str:
    """Return the name in the file of a rank's tensor."""
    return f"{HOOK}/{rank}/{name}"


def other_tensor(parameter: str, name: str) -> str:
    """Return the name in the file of a tensor of optimizer state that is not by element."""
    return f"other/{parameter}/{name}"


def encode_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group for JSON. Raises ValueError for an option that a file cannot hold.

    Its key is a string, and its value as those of `encode_objects`.
    """
    if wrong := [key for key in group if type(key) is not str]:
        raise ValueError(
            f"a parameter group has the option {wrong[0]!r}, a {type(wrong[0]).__name__}: a "
            "checkpoint holds options that are named by strings"
        )
    return {key: encode(value, f"{key} of a parameter group") for key, value in group.items()}


def decode_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `encode_options`. Tensors are on the CPU."""
    return {key: decode(value) for key, value in group.items()}


def merge(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one entry for each object, from the encoded states of all ranks: see `select`.

    A rank without an entry that others have has an empty state.
    """
    merged = {}
    for name in dict.fromkeys(chain.from_iterable(by_rank)):
        states = [encoded.get(name, _EMPTY) for encoded in by_rank]
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
    if name == UNNAMED and name not in merged:
        return {}
    if name not in merged:
        names = sorted(names_of_objects(merged))
        held = f"it has that of {', '.join(names)}" if names else "it has none"
        raise ValueError(f"the checkpoint has no state of {name} ({held}): leave out {name}=")
    entry = merged[name]
    if "by_rank" in entry:
        states = entry["by_rank"]
        if len(states) != size:
            other = f", or leave out {name}=" if name != UNNAMED else ""
            raise ValueError(
                f"the state of {name} differed between the {len(states)} ranks that saved it, so "
                f"{size} cannot restore it: use {len(states)} ranks{other}"
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
    if isinstance(value, list):
        return [decode(item, read) for item in value]
    # Earlier versions did not encode the dictionaries in options of groups.
    if not isinstance(value, dict) or "type" not in value or not value.keys() & {"items", "data"}:
        return value
    kind = value["type"]
    if kind in _BY_NAME:
        items = decode(value["items"], read)
        if read and kind == "dict" and len(items) == 1 and items[0][0] == _TENSOR:
            return read(items[0][1])
        return _BY_NAME[kind](items)
    data = bytearray(base64.b64decode(value["data"]))
    if kind == "bytes":
        return bytes(data)
    return (_array if kind == "array" else _tensor)(data, value["dtype"], value["shape"])


def _array(data: bytearray, dtype: str, shape: list[int]) -> Any:
    array = np.frombuffer(data, dtype=dtype).reshape(shape)
    return array if shape else array[()]


def _tensor(data: bytearray, dtype: str, shape: list[int]) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else empty
    return flat.view(DTYPES[dtype]).reshape(shape)
