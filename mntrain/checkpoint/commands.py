"""`python -m mntrain ckpt`: list, show, verify, compare and export checkpoints.

One process, no MPI. Names from checkpoints are printed without control characters.
"""

import argparse
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mntrain.checkpoint.compare import (
    CheckpointComparison,
    FileComparison,
    TensorDifference,
    compare,
)
from mntrain.checkpoint.export import ENDINGS, check_target, export
from mntrain.checkpoint.format import open_tensors
from mntrain.checkpoint.manifest import (
    FILE,
    FILES,
    MODEL,
    OPTIMIZER,
    Manifest,
    describe_writers,
)
from mntrain.checkpoint.reader import inspect, list_checkpoints, verify
from mntrain.metrics.report import plain, stdout

DAMAGED = 1  # exit code of list, show and verify
DIFFERENT = 1
REFUSED = 2  # exit code of diff and export

_PATH_HELP = "a checkpoint, or a run, which stands for its newest checkpoint"
_MAX_ITEMS = 20  # rows of a table of changes, and names in a line


def run(words: Sequence[str]) -> int:
    """Run a command line and return its exit code: 0 if every checkpoint is sound, or equal.

    Raises SystemExit, with 2 for a malformed command line and 0 after --help.
    """
    options = _parser().parse_args(words)
    code: int = options.command(options, stdout())
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mntrain ckpt", description="Look at checkpoints, compare and export them."
    )
    commands = parser.add_subparsers(required=True, metavar="{list,show,verify,diff,export}")
    for function, description, arguments in _COMMANDS:
        name = function.__name__.removeprefix("_")
        command = commands.add_parser(name, help=description, description=description)
        command.set_defaults(command=function)
        for argument, text in arguments.items():
            command.add_argument(argument, type=Path, help=text)
        if function is _verify:
            command.add_argument("paths", metavar="path", type=Path, nargs="+", help=_PATH_HELP)
        elif function is _export:
            command.add_argument("--force", action="store_true", help="replace OUT if it exists")
    return parser


def _list(options: Namespace, console: Console) -> int:
    try:
        paths = list_checkpoints(options.path)
    except OSError as error:
        return _fail(f"{options.path}: {_message(error)}", DAMAGED)
    if not paths:
        return _fail(
            f"{options.path} has no checkpoints: give the folder of a run that has some", DAMAGED
        )
    code = 0
    table = Table("checkpoint", "step", "saved (UTC)", "ranks", "MB", "eval loss", "files")
    for path in paths:
        try:
            content = inspect(path)
        except (OSError, ValueError) as error:
            table.add_row(path.name, "", "", "", "", "", "unsound")
            code = _fail(f"{path}: {_message(error)}", DAMAGED)
        else:
            table.add_row(
                path.name,
                str(content.step),
                content.date[:16].replace("T", " "),
                str(content.world["ranks"]),
                f"{content.nbytes / 1e6:.1f}",
                "" if content.eval_loss is None else f"{content.eval_loss:.4f}",
                "complete",
            )
    console.print(table)
    return code


def _show(options: Namespace, console: Console) -> int:
    try:
        path, content = _find(options.path)
        lines = [*_describe(path, content)]
    except (OSError, ValueError) as error:
        return _fail(_message(error), DAMAGED)
    _print(console, lines)
    return 0


def _describe(path: Path, content: Manifest) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in content.versions.items())
    writers = describe_writers(content.world)
    yield str(path)
    yield f"after step {content.step}, saved {content.date} by {writers}; {versions}"
    yield f"task {content.config['task']}, {content.samples} training samples"
    for name in (MODEL, OPTIMIZER):
        count, nbytes = len(open_tensors(path / name).keys()), (path / name).stat().st_size
        yield f"{name}: {count} tensors, {nbytes / 1e6:.1f} MB"


def _verify(options: Namespace, console: Console) -> int:
    code = 0
    for given in options.paths:
        try:
            path, content = _find(given, FILES)
        except ValueError as error:
            code = _fail(str(error), DAMAGED)
        else:
            _print(console, [f"{path}: sound, {content.nbytes / 1e6:.1f} MB"])
    return code


def _diff(options: Namespace, console: Console) -> int:
    try:
        first, second = (_find(p, (MODEL, OPTIMIZER)) for p in (options.A, options.B))
        paths = (first[0], second[0])
        comparison = compare(paths, (first[1], second[1]))
    except (OSError, ValueError) as error:
        return _fail(_message(error), REFUSED)
    _print(console, _describe_comparison(paths, comparison, console.encoding))
    return 0 if comparison.same_state else DIFFERENT


def _export(options: Namespace, console: Console) -> int:
    try:
        check_target(options.OUT, force=options.force)
        path, _ = _find(options.CKPT, (MODEL,))
        nbytes = export(path, options.OUT)
    except ValueError as error:
        return _fail(str(error), REFUSED)
    except OSError as error:
        return _fail(f"{options.OUT} was not written: {error.strerror or error}", REFUSED)
    _print(console, [f"{options.OUT}: the model of {path}, {nbytes / 1e6:.1f} MB"])
    return 0


_COMMANDS: Sequence[tuple[Callable[[Namespace, Console], int], str, Mapping[str, str]]] = (
    (_list, "list the checkpoints of a run, the newest first", {"path": "the folder of a run"}),
    (_show, "show what a checkpoint holds", {"path": _PATH_HELP}),
    (_verify, "compare all bytes with their checksums; exit code 1 if any differ", {}),
    (
        _diff,
        "compare two checkpoints; exit code 0 if models and optimizers are equal bit for bit, "
        "1 if they differ, 2 if a checkpoint cannot be read",
        {"A": _PATH_HELP, "B": _PATH_HELP},
    ),
    (
        _export,
        "write the model as one plain file: safetensors, or a state_dict for torch.load",
        {"CKPT": _PATH_HELP, "OUT": f"a new file, whose ending is {' or '.join(ENDINGS)}"},
    ),
)


def _find(path: Path, files: Sequence[str] = ()) -> tuple[Path, Manifest]:
    """Return the checkpoint at a path, or a run's newest, after verifying some of its files.

    Raises ValueError, which begins with the path.
    """
    found = path
    try:
        if not (path / FILE).exists():
            paths = list_checkpoints(path)
            if not paths:
                raise ValueError("neither a checkpoint nor a run that has one")
            found = paths[0]
        content = inspect(found)
        verify(found, content, files)
    except (OSError, ValueError) as error:
        raise ValueError(f"{found}: {_message(error)}") from error
    return found, content


def _describe_comparison(
    paths: Sequence[Path], comparison: CheckpointComparison, encoding: str
) -> Iterator[str | Table]:
    yield from (f"{label}: {path}" for label, path in zip("AB", paths, strict=True))
    first, second = comparison.steps
    yield f"step: {first} in both" if first == second else f"step: {first} and {second}"
    yield from (f"{flag}: {a} and {b}" for flag, (a, b) in comparison.options.items())
    for name, file in comparison.files.items():
        yield from _describe_file(name, file, encoding)
    yield from (_describe_values(key, by_name) for key, by_name in comparison.values.items())


def _describe_file(name: str, file: FileComparison, encoding: str) -> Iterator[str | Table]:
    common = file.equal + len(file.changes) + len(file.mismatched)
    yield f"{name}: {common} tensors in both, {file.equal} of them equal bit for bit"
    for label, names in zip("AB", file.only, strict=True):
        if names:
            yield f"  only in {label}: {_shorten(names)}"
    if file.mismatched:
        kinds = [f"{tensor} is {a} and {b}" for tensor, (a, b) in file.mismatched.items()]
        yield f"  mismatched: {_shorten(kinds)}"
    if file.changes:
        yield _change_table(file.changes[:_MAX_ITEMS], encoding)
        if len(file.changes) > _MAX_ITEMS:
            yield f"  and {len(file.changes) - _MAX_ITEMS} more"


def _change_table(changes: Iterable[TensorDifference], encoding: str) -> Table:
    table = Table()
    table.add_column("tensor", overflow="fold")
    table.add_column("largest difference", justify="right")
    table.add_column("relative (L2)", justify="right")
    for change in changes:
        name = plain(change.name, encoding)
        table.add_row(name, f"{change.largest:.4g}", f"{change.relative:.4g}")
    return table


def _describe_values(key: str, by_name: Mapping[str, tuple[Any, Any]]) -> str:
    """Describe an optimizer value, such as a step count, that differs for some parameters."""
    (name, (first, second)), *others = by_name.items()
    values = "differs" if isinstance(first, list) else f"{first} and {second}"
    more = f", and differs for {len(others)} more" if others else ""
    return f"{key} in the optimizer: {values} for {name}{more}"


def _shorten(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _MAX_ITEMS} more" if len(texts) > _MAX_ITEMS else ""
    return ", ".join(texts[:_MAX_ITEMS]) + more


def _print(console: Console, lines: Iterable[str | Table]) -> None:
    for line in lines:
        if isinstance(line, str):
            console.print(plain(line, console.encoding), soft_wrap=True)
        else:
            console.print(line)


def _message(error: Exception) -> str:
    """Return the text of an error; of an OSError without its number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def _fail(reason: str, code: int) -> int:
    print(f"mntrain: {reason}", file=sys.stderr)
    return code
