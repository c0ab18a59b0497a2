"""Import of a class that an option names."""

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any


def import_class(option: str, name: str) -> type[Any]:
    """Return the class "package.module:Class", which a user names by an option.

    The current directory is added to sys.path, as `python -m` does, and stays there: data-loader
    workers import the class again. Raises ValueError, which names the option, for a name that is
    malformed or of no class, and for a module that does not import.
    """
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name or module_name.startswith("."):
        raise ValueError(f'{option} {name}: is not of the form "package.module:Class"')
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"{option} {name}: module {module_name!r} does not import: "
            f"{type(error).__name__}: {error} (searched from {folder})"
        ) from error
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        raise ValueError(f"{option} {name}: module {module_name!r} has no class {class_name!r}")
    return found
