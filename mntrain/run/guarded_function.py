"""A check before each call of a function of another library, also if that is imported later."""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class GuardedFunction(MetaPathFinder):
    """The function `name` of a module, which first gives its arguments to `check`, until `close`.

    `name` may be that of a method, such as "Class.method". What a module lacks is not guarded.
    """

    def __init__(self, module: str, name: str, check: Callable[..., None]) -> None:
        self._module, self._check = module, check
        self._owner, _, self._name = name.rpartition(".")
        self._places: list[tuple[Any, Callable[..., Any], Callable[..., Any]]] = []
        if module in sys.modules:
            self._replace(sys.modules[module])
        else:
            sys.meta_path.insert(0, self)

    def close(self) -> None:
        """Restore the function, unless others have replaced it since. Local."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for owner, function, guarded in self._places:
            if getattr(owner, self._name) is guarded:
                setattr(owner, self._name, function)
        self._check = lambda *args, **kwargs: None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Let the module's function be replaced once it has been imported; know no others."""
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            self._replace(module)

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec

    def _replace(self, module: Any) -> None:
        owner = getattr(module, self._owner, None) if self._owner else module
        function = getattr(owner, self._name, None)
        if function is None:
            return

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self._check(*args, **kwargs)
            return function(*args, **kwargs)

        self._places.append((owner, function, guarded))
        setattr(owner, self._name, guarded)
