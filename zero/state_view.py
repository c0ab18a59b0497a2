"""The optimizer's state by parameter, where the torch optimizer updates other tensors."""

from collections import defaultdict
from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import Tensor

from zero.shard import OptimizerShard

_ABSENT = object()


class StateByParameter(MutableMapping[Any, Any]):
    """The torch optimizer's state, in which a parameter stands for what is updated of it.

    Changes are those of the torch optimizer. Keys are the parameters that this rank owns whole, and
    the slices of others. Any use of a parameter of which this rank owns a part or nothing raises
    RuntimeError.
    """

    def __init__(self, owned: OptimizerShard, by_tensor: defaultdict[Any, Any]) -> None:
        self._owned, self.by_tensor = owned, by_tensor

    def _key(self, key: Any) -> Any:
        return self._owned.updated(key) if isinstance(key, Tensor) else key

    def __getitem__(self, key: Any) -> Any:
        """Return the state under a key; a new one if there is none, as in the torch optimizer."""
        return self.by_tensor[self._key(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Replace the state under a key."""
        self.by_tensor[self._key(key)] = value

    def __delitem__(self, key: Any) -> None:
        """Remove the state under a key."""
        del self.by_tensor[self._key(key)]

    def __contains__(self, key: object) -> bool:
        """Return whether there is a state under a key."""
        return self._key(key) in self.by_tensor

    def __iter__(self) -> Iterator[Any]:
        """Yield the keys."""
        parameters = {tensor: parameter for parameter, tensor in self._owned.owned_whole.items()}
        for key in self.by_tensor:
            yield parameters.get(key, key) if isinstance(key, Tensor) else key

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self.by_tensor)

    def __repr__(self) -> str:
        return repr(dict(self))

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state under a key, or `default`."""
        return self.by_tensor.get(self._key(key), default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return the state under a key; `default`, from now on, if there is none."""
        return self.by_tensor.setdefault(self._key(key), default)

    def pop(self, key: Any, default: Any = _ABSENT) -> Any:
        """Remove the state under a key and return it, or `default`."""
        given = () if default is _ABSENT else (default,)
        return self.by_tensor.pop(self._key(key), *given)

    def __reduce__(self) -> Any:
        """Copy and pickle as a dictionary."""
        return dict, (dict(self),)
