"""`python -m mntrain ckpt`: list, show, verify, compare and export checkpoints.

One process, no MPI. Names from checkpoints are printed without control characters.
"""

import reprlib
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from torch import Tensor

from mntrain.checkpoint.exports import export_file, export_folder
from mntrain.checkpoint.format import FILES, MODEL, OPTIMIZER, Manifest, open_tensors
from mntrain.checkpoint.objects import names_of_objects
from mntrain.checkpoint.reader import find_sound, inspected, scores
from mntrain.metrics.display import printable
from mntrain.metrics.terminal import stdout
from mntrain.options.arguments import CommandParser

DAMAGED = 1  # exit code of list, show and verify
DIFFERENT = 1
REFUSED = 2  # exit code of diff and export

Found = tuple[Path, Manifest]  # a checkpoint


def run(words: Sequence[str]) -> int:
    """Run a command line and return its exit code: 0 if checkpoints are sound, or for diff equal.

    Raises ValueError for a malformed command line, and SystemExit with code 0 after --help.
    """
    parser = CommandParser(
        prog="python -m mntrain ckpt", description="Look at checkpoints, compare and export them."
    )
    commands = parser.add_subparsers(required=True, metavar="{list,show,verify,diff,export}")

    def add(command: Callable[[Namespace, Console], int], text: str) -> Callable[..., Any]:
        added = commands.add_parser(command.__name__.removeprefix("_"), help=text, description=text)
        added.set_defaults(command=command)
        return added.add_argument

    path = "a checkpoint, or a run, which stands for its newest checkpoint"
    argument = add(_list, "list the checkpoints of a run, the newest first")
    argument("path", type=Path, help="the folder of a run")
    add(_show, "show what a checkpoint holds")("path", type=Path, help=path)
    argument = add(_verify, "compare all bytes with their checksums; exit code 1 if any differ")
    argument("paths", metavar="path", type=Path, nargs="+", help=path)
    argument = add(
        _diff,
        "compare two checkpoints; exit code 0 if models and optimizers are equal bit for bit, "
        "1 if they differ, 2 if a checkpoint cannot be read",
    )
    argument("A", type=Path, help=path)
    argument("B", type=Path, help=path)
    argument = add(_export, "write the model as a safetensors file, or as a folder")
    argument("CKPT", type=Path, help=path)
    argument("OUT", type=Path, help="a new .safetensors file; with --hf, a new folder")
    argument("--force", action="store_true", help="replace OUT if it exists")
    argument("--hf", action="store_true", help="of --task hf or lm: a folder for from_pretrained")
    options = parser.read(words)
    try:
        code: int = options.command(options, stdout())
    except (OSError, ValueError) as error:
        return _fail(error, REFUSED if options.command in (_diff, _export) else DAMAGED)
    return code


def _list(options: Namespace, console: Console) -> int:
    found = dict(inspected(options.path))
    if not found:
        problem = (
            "a folder without checkpoints" if options.path.exists() else "there is no such folder"
        )
        raise ValueError(f"{options.path}: {problem}; give the folder of a run")
    contents = {path: about for path, about in found.items() if isinstance(about, Manifest)}
    # The best is by the metric of the newest checkpoint.
    metric = next((content.scored_by for content in contents.values()), "eval_loss")
    best = next(iter(scores(contents, metric)), None)
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", show_edge=False, padding=(0, 1, 0, 0))
    for head in ("checkpoint", "step", "saved (UTC)", "ranks", "MB", "eval loss", "files"):
        numbers = head in ("step", "ranks", "MB", "eval loss")
        table.add_column(head, justify="right" if numbers else "left", no_wrap=True)
    for path, content in found.items():
        if isinstance(content, str):
            table.add_row(path.name, *[""] * 5, "unsound")
            _fail(f"{path}: {content}", DAMAGED)
            continue
        date, ranks = content.date[:16].replace("T", " "), str(content.world["ranks"])
        loss = "" if content.eval_loss is None else f"{content.eval_loss:.4f}"
        row = [str(content.step), date, ranks, f"{content.nbytes / 1e6:.1f}", loss]
        table.add_row(path.name, *row, "complete")
    console.print(table)
    if best is not None:
        _print(console, f"the best by {metric}: {best.name}")
    return DAMAGED if len(contents) < len(found) else 0


def _show(options: Namespace, console: Console) -> int:
    path, content = find_sound(options.path)
    files = []
    for name in (MODEL, OPTIMIZER):
        with open_tensors(path / name) as file:
            count, nbytes = len(_tensors(name, file, content)), (path / name).stat().st_size
        files.append(f"{name}: {count} tensors, {nbytes / 1e6:.1f} MB")
    versions = ", ".join(f"{name} {version}" for name, version in content.versions.items())
    _print(console, str(path))
    _print(
        console, f"after step {content.step}, saved {content.date} by {content.writers}; {versions}"
    )
    if task := content.config.get("task"):  # not in checkpoints of a user's own loop
        _print(console, f"task {task}, {content.samples} training samples")
    if names := names_of_objects(content.objects):
        _print(console, f"states of {', '.join(names)}")
    for line in files:
        _print(console, line)
    return 0


def _verify(options: Namespace, console: Console) -> int:
    code = 0
    for given in options.paths:
        try:
            path, content = find_sound(given, FILES)
        except ValueError as error:
            code = _fail(error, DAMAGED)
        else:
            _print(console, f"{path}: sound, {content.nbytes / 1e6:.1f} MB")
    return code


def _diff(options: Namespace, console: Console) -> int:
    first, second = (find_sound(path, (MODEL, OPTIMIZER)) for path in (options.A, options.B))
    differing, equal = Table(), 0
    for title in ("tensor", "largest difference"):
        differing.add_column(title, overflow="fold")
    for name, one, other in _pairs(first, second):
        if difference := _difference(one, other):
            differing.add_row(*(printable(text, console.encoding) for text in (name, difference)))
        else:
            equal += 1
    for label, (path, content) in zip("AB", (first, second), strict=True):
        _print(console, f"{label}: {path}, step {content.step}")
    if differing.row_count:
        console.print(differing)
    _print(console, f"equal bit for bit: {equal}; different: {differing.row_count}")
    return DIFFERENT if differing.row_count else 0


def _pairs(first: Found, second: Found) -> Iterator[tuple[str, Any, Any]]:
    """Yield each tensor by name, and each other value that differs; None where one lacks it."""
    for file in (MODEL, OPTIMIZER):
        with open_tensors(first[0] / file) as a, open_tensors(second[0] / file) as b:
            found = _tensors(file, a, first[1]), _tensors(file, b, second[1])
            for name in {**found[0], **found[1]}:
                one, other = (of[name]() if name in of else None for of in found)
                yield name, one, other
    values = [
        {f"{name}/{key}": value for name, state in states for key, value in state.others.items()}
        for states in (content.parameter_states.items() for _, content in (first, second))
    ]
    for name in {**values[0], **values[1]}:
        one, other = (of.get(name) for of in values)
        if repr(one) != repr(other):  # by repr, because nan differs from itself
            yield name, one, other


def _difference(one: Any, other: Any) -> str:
    """Return the largest difference of an element, "" if no bit differs; both kinds of others."""
    kinds = _kind(one), _kind(other)
    if kinds[0] != kinds[1] or not isinstance(one, Tensor):
        return " and ".join(kinds)
    if torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other))):
        return ""
    a, b = one.double(), other.double()
    same = (a == b) | (a.isnan() & b.isnan())  # such as infinities
    return f"{(a - b).masked_fill(same, 0.0).abs().max().item():.4g}"


def _kind(value: Any) -> str:
    """Return dtype and shape, as in "float32 (3, 4)", or a value that is no tensor."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}".removeprefix("torch.")
    return "absent" if value is None else reprlib.repr(value.get("value", value))


def _tensors(name: str, file: safe_open, content: Manifest) -> dict[str, Callable[[], Tensor]]:
    """Return what reads each tensor of MODEL or OPTIMIZER, by its name, as a whole."""
    if name == MODEL:
        return {key: partial(file.get_tensor, key) for key in file.keys()}  # noqa: SIM118
    return {
        f"{parameter}/{key}": partial(state.tensor, file, parameter, key)
        for parameter, state in content.parameter_states.items()
        for key in state.tensor_keys
    }


def _export(options: Namespace, console: Console) -> int:
    out: Path = options.OUT
    if not options.hf and out.suffix != ".safetensors":
        raise ValueError(f"{out}: must end in .safetensors, or give --hf for a folder")
    if not out.parent.is_dir():
        raise ValueError(f"{out}: {out.parent} is not a folder: make it, or give another")
    if options.hf:
        path, content = find_sound(options.CKPT, (MODEL,))
        size = export_folder(path, content, out, force=options.force)
        _print(console, f"{out}: the model of {path}, {size / 1e6:.1f} MB")
        return 0
    if out.is_dir():
        raise ValueError(f"{out} is a folder: give the name of a file")
    if out.exists() and not options.force:
        raise ValueError(f"{out} exists: give another name, or --force to replace it")
    path, _ = find_sound(options.CKPT, (MODEL,))
    export_file(path, out)
    _print(console, f"{out}: the model of {path}, {out.stat().st_size / 1e6:.1f} MB")
    return 0


def _print(console: Console, line: str) -> None:
    console.print(printable(line, console.encoding), soft_wrap=True)


def _fail(reason: Exception | str, code: int) -> int:
    print(f"mntrain: {reason}", file=sys.stderr)
    return code
