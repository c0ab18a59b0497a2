"""Digests of source files, to compare over ranks."""

import sys
from pathlib import Path
from types import ModuleType

from mntrain.alike.sample_digest import hexadecimal

_INSTALLED = {"site-packages", "dist-packages"}
_OURS = {"mntrain", "zero"}  # compared as a whole


def describe_sources(kind: type) -> dict[str, str]:
    """Return a digest of each source file of a class and its bases, to compare over ranks. Local.

    See `module_files`. Nothing of Python's library, mntrain and zero, which have versions.
    """
    files: dict[str, Path] = {}
    for name in dict.fromkeys(base.__module__ for base in kind.__mro__):
        if _is_compared(name):
            files |= module_files(sys.modules[name])
    return {
        f"the source {name}": f"digest {hexadecimal(path.read_bytes())}"
        for name, path in files.items()
    }


def _is_compared(module: str) -> bool:
    return module.partition(".")[0] not in _OURS | sys.stdlib_module_names


def module_files(module: ModuleType) -> dict[str, Path]:
    """Return the files of a module, and of all modules of its folder that are imported by now.

    By their name relative to the folder on sys.path, such as "my_package/my_task.py". Of an
    installed module, only its package counts.
    """
    names, file = module.__name__.split("."), Path(getattr(module, "__file__", None) or "")
    if not file.is_file():  # typed in, or in an archive
        return {}
    root = file.parents[len(names) - (file.name != "__init__.py")]
    package = names[0] if root.name in _INSTALLED else None
    found = {file.relative_to(root).as_posix(): file}
    for name, other in [*sys.modules.items()]:
        path = Path(getattr(other, "__dict__", {}).get("__file__") or "")
        if path.suffix != ".py" or not path.is_relative_to(root) or not _is_compared(name):
            continue
        inside = path.relative_to(root)
        if not path.is_file():  # in an archive, or removed since
            continue
        if package == name.partition(".")[0] or not (package or _INSTALLED & {*inside.parts}):
            found[inside.as_posix()] = path
    return found
