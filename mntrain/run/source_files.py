"""Digests of the source files that a job runs."""

import ast
import hashlib
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from mntrain.equal_values import Given

MODULES = 300  # of a task, at most, whose sources are read
_DIGITS = 12
_INSTALLED = {"site-packages", "dist-packages"}
_OURS = {"mntrain", "zero"}  # compared as a whole


def file_digest(path: Path) -> str:
    """Return a digest of a file's content, as hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:_DIGITS]


def describe_sources(kind: type) -> dict[str, Given]:
    """Return a digest of each source file of a class and its bases, to compare over ranks. Local.

    See `module_files`. Nothing of Python's library, mntrain and zero, which have versions.
    """
    modules = dict.fromkeys(base.__module__ for base in kind.__mro__)
    files: dict[str, Path] = {}
    for name in modules:
        if _is_compared(name):
            files |= module_files(sys.modules[name])
    host = socket.gethostname()
    return {
        f"the source {name}": Given(f"digest {file_digest(path)}", f"{path} on {host}")
        for name, path in files.items()
    }


def _is_compared(module: str) -> bool:
    return module.partition(".")[0] not in _OURS | sys.stdlib_module_names


def module_files(module: ModuleType) -> dict[str, Path]:
    """Return the files of a module and of those of its folder or package that it imports.

    By their name relative to the folder on sys.path, such as "my_package/my_task.py". Imports of
    imported modules count, also those inside functions; the files are read, not run. Of an
    installed module, only its package counts. At most `MODULES` files.
    """
    names, file = module.__name__.split("."), Path(getattr(module, "__file__", None) or "")
    if not file.is_file():  # typed in, or in an archive
        return {}
    root = file.parents[len(names) - (file.name != "__init__.py")]
    package = names[0] if root.name in _INSTALLED else None
    found: dict[str, Path] = {}
    queue = [(module.__name__, file)]
    for name, path in queue:
        key = path.relative_to(root).as_posix()
        if key in found or len(found) >= MODULES:
            continue
        found[key] = path
        for imported in _imports(path, name):
            if _is_compared(imported) and package in (None, imported.partition(".")[0]):
                queue += _files_of(imported, root)
    return found


def _imports(path: Path, module: str) -> Iterator[str]:
    """Yield the dotted names that a file imports, relative ones too, which may be of attributes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its text, which Python prints at the import
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # it is compiled, or never imported
        return
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = [*(parents if node.level else []), *([node.module] if node.module else [])]
            yield from (".".join([*base, alias.name]) for alias in node.names)


def _files_of(name: str, root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the modules that the import of a dotted name runs, and their files under `root`."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        base = root.joinpath(*parts[:count])
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if path.is_file():
                yield ".".join(parts[:count]), path
                break
