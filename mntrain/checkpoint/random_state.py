"""States of this process's random generators, as tensors of bytes."""

import random
import struct

import numpy as np
import torch
from torch import Tensor

_PYTHON = struct.Struct("<?d")  # whether random.gauss has a cached value, and the value
_NUMPY = struct.Struct("<i?d")  # position, whether there is a cached normal value, the value


def capture(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the generators of torch, Python and numpy, by source."""
    version, words, gauss = random.getstate()
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    python_words = np.array([version, *words], dtype="<u4").tobytes()
    numpy_head = _NUMPY.pack(state["state"]["pos"], bool(state["has_gauss"]), state["gauss"])
    states = {
        "torch": torch.get_rng_state(),
        "python": _as_tensor(_PYTHON.pack(gauss is not None, gauss or 0.0) + python_words),
        "numpy": _as_tensor(numpy_head + state["state"]["key"].astype("<u4").tobytes()),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore(states: dict[str, Tensor], device: torch.device) -> None:
    """Set the generators to states from `capture`."""
    torch.set_rng_state(states["torch"])
    data = states["python"].numpy().tobytes()
    has_gauss, gauss = _PYTHON.unpack_from(data)
    version, *words = np.frombuffer(data[_PYTHON.size :], dtype="<u4").tolist()
    random.setstate((version, tuple(words), gauss if has_gauss else None))
    data = states["numpy"].numpy().tobytes()
    position, has_gauss, gauss = _NUMPY.unpack_from(data)
    keys = np.frombuffer(data[_NUMPY.size :], dtype="<u4")
    np.random.set_state(("MT19937", keys, position, int(has_gauss), gauss))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
