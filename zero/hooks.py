"""Hooks on a module of the user's."""

from collections.abc import Callable
from typing import Any


class ModuleHook:
    """A function that torch calls, and that stays behind when the module is copied or saved.

    In a copy it does nothing: a copy has memory of its own, of which no optimizer knows.
    """

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        """Called by torch, with what it gives to a hook of its kind."""
        if self._function is not None:
            self._function(*args)

    def __reduce__(self) -> tuple[type["ModuleHook"], tuple[()]]:
        """What copies and pickles are made of."""
        return ModuleHook, ()
