"""Optimizer state that is not by element, encoded for the manifest of a checkpoint.

Numbers, strings, and tensors of a few elements, such as step counts, are entries of their own. All
else is one entry, as of a small object (`objects`), and its tensors go into a file:

    {"step": {"dtype": "F32", "value": 3.0}, "": {"type": "dict", "items": [["row_var", ...]]}}
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mntrain.checkpoint.format import DTYPE_NAMES, DTYPES
from mntrain.checkpoint.objects import UNNAMED, decode, encode

_REST = ""  # the key of what has no entry of its own
_FEW = 16  # elements of a tensor in the manifest


def encode_values(values: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return optimizer state for JSON, and its tensors by the names that stand in their place.

    Raises ValueError for what a checkpoint does not hold.
    """
    encoded: dict[str, Any] = {}
    rest: dict[Any, Any] = {}
    tensors: dict[str, Tensor] = {}
    for key, value in values.items():
        few = isinstance(value, Tensor) and value.numel() <= _FEW and value.dtype in DTYPE_NAMES
        if type(key) is not str or key == _REST:
            rest[key] = value
        elif few:
            wide = value.detach().cpu().double() if value.is_floating_point() else value.cpu()
            encoded[key] = {"dtype": DTYPE_NAMES[value.dtype], "value": wide.tolist()}
        elif value is None or type(value) in (bool, int, float, str):
            encoded[key] = {"value": value}
        else:
            rest[key] = value
    if rest:
        encoded[_REST] = encode(rest, UNNAMED, tensors)
    _check_dtypes(tensors)
    return encoded, tensors


def decode_values(values: Mapping[str, Any], read: Callable[[str], Tensor]) -> dict[Any, Any]:
    """Invert `encode_values`; `read` returns a tensor by name."""
    decoded: dict[Any, Any] = {}
    for key, value in values.items():
        if key == _REST:
            decoded |= decode(value, read)
        elif "dtype" in value:
            dtype = DTYPES[value["dtype"]]
            decoded[key] = torch.tensor(value["value"], dtype=dtype, device="cpu")
        else:
            decoded[key] = value["value"]
    return decoded


def check_values(state: Mapping[Any, Any]) -> None:
    """Raise ValueError for state that a checkpoint does not hold. `state` has that of tensors."""
    for key, value in state.items():
        tensors: dict[str, Tensor] = {}
        encode(value if isinstance(key, Tensor) else {key: value}, UNNAMED, tensors)
        _check_dtypes(tensors)


def _check_dtypes(tensors: Mapping[str, Tensor]) -> None:
    for tensor in tensors.values():
        if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided:
            raise ValueError(
                f"the optimizer's state has a tensor of {tensor.dtype} and {tensor.layout}, and "
                f"a checkpoint holds dense ones of {', '.join(map(str, DTYPE_NAMES))}"
            )
