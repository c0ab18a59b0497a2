"""States of the small objects that a checkpoint holds: learning-rate schedulers, data positions.

A state is encoded for JSON; what JSON lacks is tagged:

    Counter({30: 1})  ->  {"type": "Counter", "items": [[30, 1]]}
"""

import base64
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mntrain.checkpoint.format import DTYPE_NAMES, DTYPES

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
    return {name: _encode(value.state_dict(), name) for name, value in objects.items()}


def encode_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group for JSON: tensors and numbers of NumPy are encoded."""
    return {
        key: _encode(value, key) if isinstance(value, Tensor | np.ndarray | np.generic) else value
        for key, value in group.items()
    }


def decode_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `encode_options`. Tensors are on the CPU."""
    return {
        key: _decode(value) if isinstance(value, dict) and "data" in value else value
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


def select(merged: Mapping[str, Any], name: str, rank: int, size: int) -> dict[str, Any]:
    """Return an object's state as it was on a rank.

    Raises ValueError for an object that is not in the checkpoint, and for a state that was not the
    same on all ranks if their number has changed.
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
    state: dict[str, Any] = _decode(entry)
    return state


def _encode(value: Any, where: str) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if kind in _ITEMS:
        items = [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return {"type": kind.__name__, "items": items}
    if kind in _MAPPINGS:
        pairs = [[_encode(k, where), _encode(v, f"{where}.{k}")] for k, v in value.items()]
        return {"type": kind.__name__, "items": pairs}
    data: bytes | None = None
    described: dict[str, Any] = {}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        described = {"type": "array", "dtype": value.dtype.str, "shape": list(value.shape)}
        data = value.tobytes()
    elif isinstance(value, Tensor) and value.dtype in DTYPE_NAMES:
        flat = value.detach().cpu().contiguous().reshape(-1)
        shape = list(value.shape)
        described = {"type": "tensor", "dtype": DTYPE_NAMES[value.dtype], "shape": shape}
        data = flat.view(torch.uint8).numpy().tobytes()
    elif kind is bytes:
        described, data = {"type": "bytes"}, value
    if data is None:
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


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value["type"]
    if kind in _BY_NAME:
        return _BY_NAME[kind](map(_decode, value["items"]))
    data = bytearray(base64.b64decode(value["data"]))
    if kind == "bytes":
        return bytes(data)
    if kind == "array":
        array = np.frombuffer(data, dtype=value["dtype"]).reshape(value["shape"])
        return array if value["shape"] else array[()]
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(DTYPES[value["dtype"]]).reshape(value["shape"])
