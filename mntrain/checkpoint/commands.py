"""`python -m mntrain ckpt`: look at checkpoints, compare and export them. One process, no MPI."""

import argparse
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mntrain.checkpoint import tables
from mntrain.checkpoint.compare import compare
from mntrain.checkpoint.discovery import check, checkpoints_of, opened
from mntrain.checkpoint.export import ENDINGS, check_target, export
from mntrain.checkpoint.manifest import FILE, Manifest
from mntrain.metrics.terminal import plain, stdout

UNSOUND = 1  # from list, show and verify
DIFFERENT = 1
REFUSED = 2  # from diff and export

_NAMED = "a checkpoint, or a run: its newest"


def run(words: Sequence[str]) -> int:
    """Do what the words say; gives the exit code: 0 when all that was named is sound, or equal.

    SystemExit with 2 for words that say nothing of the kind, with 0 after --help.
    """
    options = _parser().parse_args(words)
    code: int = options.does(options, stdout())
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mntrain ckpt", description="Look at checkpoints, compare and export them."
    )
    commands = parser.add_subparsers(required=True, metavar="{list,show,verify,diff,export}")

    def add(
        name: str, does: Callable[[Namespace, Console], int], about: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=about, description=about)
        command.set_defaults(does=does)
        return command

    command = add("list", _list, "the checkpoints of a run, the newest first")
    command.add_argument("path", type=Path, help="the folder of a run")

    command = add("show", _show, "what a checkpoint holds")
    command.add_argument("path", type=Path, help=_NAMED)

    command = add(
        "verify", _verify, "compare every byte with its checksum; the exit code is 1 if one is not"
    )
    command.add_argument("paths", metavar="path", type=Path, nargs="+", help=_NAMED)

    command = add(
        "diff",
        _diff,
        "what differs between two checkpoints; the exit code is 0 if their models and optimizers "
        "are equal, bit for bit, 1 if not, 2 if one cannot be read",
    )
    command.add_argument("first", metavar="A", type=Path, help=_NAMED)
    command.add_argument("second", metavar="B", type=Path, help=_NAMED)

    command = add(
        "export",
        _export,
        "the model as one plain file: a safetensors file, or a state_dict for torch.load",
    )
    command.add_argument("path", metavar="CKPT", type=Path, help=_NAMED)
    command.add_argument(
        "out", metavar="OUT", type=Path, help=f"a new file; its ending is {' or '.join(ENDINGS)}"
    )
    command.add_argument("--force", action="store_true", help="replace OUT if it exists")
    return parser


def _list(options: Namespace, console: Console) -> int:
    try:
        paths = checkpoints_of(options.path)
    except OSError as error:
        return _refuse(f"{options.path}: {_said(error)}", UNSOUND)
    if not paths:
        return _refuse(
            f"{options.path} has no checkpoints: give the folder of a run that has some", UNSOUND
        )
    code, found = 0, dict[Path, Manifest | None]()
    for path in paths:
        try:
            found[path] = opened(path)
        except (OSError, ValueError) as error:
            found[path] = None
            code = _refuse(f"{path}: {_said(error)}", UNSOUND)
    console.print(tables.listed(found))
    return code


def _show(options: Namespace, console: Console) -> int:
    try:
        _print(console, tables.facts(*_found(options.path)))
    except (OSError, ValueError) as error:
        return _refuse(_said(error), UNSOUND)
    return 0


def _verify(options: Namespace, console: Console) -> int:
    code = 0
    for path in options.paths:
        try:
            place, content = _found(path)
        except ValueError as error:
            code = _refuse(str(error), UNSOUND)
            continue
        try:
            check(place, content)
        except (OSError, ValueError) as error:
            code = _refuse(f"{path}: {_said(error)}", UNSOUND)
        else:
            _print(console, [f"{place}: sound, {content.nbytes / 1e6:.1f} MB"])
    return code


def _diff(options: Namespace, console: Console) -> int:
    try:
        first, second = _found(options.first), _found(options.second)
        paths = (first[0], second[0])
        found = compare(paths, (first[1], second[1]))
    except (OSError, ValueError) as error:
        return _refuse(_said(error), REFUSED)
    _print(console, tables.difference(paths, found, console.encoding))
    return 0 if found.same_state else DIFFERENT


def _export(options: Namespace, console: Console) -> int:
    try:
        check_target(options.out, force=options.force)
        path, content = _found(options.path)
        nbytes = export(path, content, options.out)
    except ValueError as error:
        return _refuse(str(error), REFUSED)
    except OSError as error:
        return _refuse(f"{options.out} was not written: {error.strerror or error}", REFUSED)
    _print(console, [f"{options.out}: the model of {path}, {nbytes / 1e6:.1f} MB"])
    return 0


def _found(path: Path) -> tuple[Path, Manifest]:
    """The checkpoint that is named, or the newest of the run that is. ValueError that names it."""
    try:
        if (path / FILE).exists():
            return path, opened(path)
        paths = checkpoints_of(path)
        if not paths:
            raise ValueError("no checkpoint, and no run that has one")
        return paths[0], opened(paths[0])
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {_said(error)}") from error


def _print(console: Console, lines: Iterable[str | Table]) -> None:
    for line in lines:
        if isinstance(line, str):
            console.print(plain(line, console.encoding), soft_wrap=True)
        else:
            console.print(line)


def _said(error: Exception) -> str:
    """What an error says; the system's with its file and without its number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def _refuse(why: str, code: int) -> int:
    print(f"mntrain: {why}", file=sys.stderr)
    return code
