"""The buffers of a model that are in its state dict."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn


class PersistentBuffers(Iterable[Tensor]):
    """The buffers of a model that are in its state dict, each once, as they are when iterated over.

    A module may assign another tensor to a buffer, and `model.double()` does. Buffers outside of
    the state dict are taken for constants, which are equal on all ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        persistent = model.state_dict().keys()
        modules = dict(model.named_modules())
        self._places: list[tuple[dict[str, Any], str]] = []  # holders, and the keys in them
        for path, _ in model.named_buffers():
            if path in persistent:
                module, _, key = path.rpartition(".")
                self._places.append((modules[module]._buffers, key))

    def __iter__(self) -> Iterator[Tensor]:
        held = (holder.get(key) for holder, key in self._places)
        return (buffer for buffer in held if buffer is not None)
