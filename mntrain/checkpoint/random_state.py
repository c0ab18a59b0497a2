"""The states of this process's random generators, as tensors of bytes."""

import random
import struct

import numpy as np
import torch
from torch import Tensor

_PYTHON = struct.Struct("<?d")
_NUMPY = struct.Struct("<i?d")


def captured(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's, Python's and numpy's generators, by source."""
    version, words, gauss = random.getstate()
    numbers = np.random.get_state(legacy=False)
    assert isinstance(numbers, dict)
    keys, place = numbers["state"]["key"], numbers["state"]["pos"]
    states = {
        "torch": torch.get_rng_state(),
        "python": _bytes(
            _PYTHON.pack(gauss is not None, gauss or 0.0)
            + np.array([version, *words], dtype="<u4").tobytes()
        ),
        "numpy": _bytes(
            _NUMPY.pack(place, bool(numbers["has_gauss"]), numbers["gauss"])
            + keys.astype("<u4").tobytes()
        ),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore(states: dict[str, Tensor], device: torch.device) -> None:
    """Take back what `captured` gave."""
    torch.set_rng_state(states["torch"])
    data = states["python"].numpy().tobytes()
    has_gauss, gauss = _PYTHON.unpack_from(data)
    version, *words = np.frombuffer(data[_PYTHON.size :], dtype="<u4").tolist()
    random.setstate((version, tuple(words), gauss if has_gauss else None))
    data = states["numpy"].numpy().tobytes()
    place, has, cached = _NUMPY.unpack_from(data)
    keys = np.frombuffer(data[_NUMPY.size :], dtype="<u4")
    np.random.set_state(("MT19937", keys, place, int(has), cached))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
