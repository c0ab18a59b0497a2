"""Tasks: a model, its data and its loss. `load` imports one by name."""

import importlib
import inspect
import sys
from pathlib import Path

from mntrain.config import Config
from mntrain.tasks.base import Loss, Split, Task

__all__ = ["Loss", "Split", "Task", "load"]


def load(name: str, config: Config) -> Task:
    """Return a new task by name: "lm", or "package.module:Class" for one of your own.

    The current directory is added to sys.path, as `python -m` does, and stays there: data-loader
    workers import the class again. Raises ValueError for a name that is not of a task. Exceptions
    of the task's constructor are not caught.
    """
    full_name = "mntrain.tasks.lm:LanguageModel" if name == "lm" else name
    module_name, _, class_name = full_name.partition(":")
    if not module_name or not class_name or module_name.startswith("."):
        raise ValueError(f'task {name!r} is neither "lm" nor of the form "package.module:Class"')
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"task {name!r}: module {module_name!r} does not import: "
            f"{type(error).__name__}: {error} (searched from {folder})"
        ) from error
    return _checked_class(name, getattr(module, class_name, None), module_name, class_name)(config)


def _checked_class(name: str, found: object, module_name: str, class_name: str) -> type[Task]:
    """Return the attribute of that name if it is a complete task, else raise ValueError."""
    if found is None:
        raise ValueError(f"task {name!r}: module {module_name!r} has no {class_name!r}")
    if not inspect.isclass(found):
        raise ValueError(f"task {name!r}: {class_name!r} is not a class but {found!r}")
    if not issubclass(found, Task):
        missing = sorted(m for m in Task.__abstractmethods__ if not hasattr(found, m))
        lacks = f" and lacks {', '.join(missing)}" if missing else ""
        raise ValueError(
            f"task {name!r}: {class_name} does not derive from mntrain.tasks.Task{lacks}"
        )
    if missing := sorted(found.__abstractmethods__):
        raise ValueError(f"task {name!r}: {class_name} lacks {', '.join(missing)}")
    return found
