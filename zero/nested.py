"""Nested containers, such as an optimizer's state, and the values in them."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

Path = tuple[Any, ...]  # keys and indices, from the outermost container on

_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, deque)


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield whatever is no container, with its path. Objects of other classes count as values."""
    if type(value) not in _CONTAINERS:
        yield path, value
        return
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(each, (*path, key))


def map_leaves(value: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return new containers of the same classes, with `change(path, value)` for each value."""
    if type(value) not in _CONTAINERS:
        return change(path, value)
    items = value.items() if isinstance(value, dict) else enumerate(value)
    made = {key: map_leaves(each, change, (*path, key)) for key, each in items}
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory, made)
    if isinstance(value, deque):
        return deque(made.values(), value.maxlen)
    return type(value)(made if isinstance(value, dict) else made.values())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among the values."""
    for _, each in leaves(value):
        if isinstance(each, Tensor):
            yield each
