"""`python -m mntrain ckpt`: look at checkpoints. One process, no MPI."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mntrain.checkpoint.finding import check, checkpoints_of, opened
from mntrain.checkpoint.manifest import FILE, MODEL, OPTIMIZER, Manifest, writers
from mntrain.checkpoint.tensors import Layout
from mntrain.display import plain, stdout

UNSOUND = 1


def run(words: Sequence[str]) -> int:
    """List, show or verify; gives the exit code: 0 when all that was named is sound."""
    options = _parser().parse_args(words)
    code: int = options.does(options.path, stdout())
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mntrain ckpt", description="Look at the checkpoints of a run."
    )
    commands = parser.add_subparsers(required=True, metavar="{list,show,verify}")
    for name, does, about in (
        ("list", _list, "the checkpoints of a run, the newest first"),
        ("show", _show, "what a checkpoint holds"),
        (
            "verify",
            _verify,
            "compare every byte with its checksum; the exit code is 1 if one is not",
        ),
    ):
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument(
            "path",
            type=Path,
            nargs="+" if name == "verify" else None,
            help="the folder of a run" if name == "list" else "a checkpoint, or a run: its newest",
        )
        command.set_defaults(does=does)
    return parser


def _list(run_dir: Path, console: Console) -> int:
    found = checkpoints_of(run_dir)
    if not found:
        return _refuse(f"{run_dir} has no checkpoints: give the folder of a run that has some")
    table = Table("checkpoint", "step", "saved (UTC)", "ranks", "MB", "eval loss", "files")
    unsound = False
    for path in found:
        try:
            content = opened(path)
        except ValueError as error:
            unsound = True
            table.add_row(path.name, "", "", "", "", "", plain(str(error), console.encoding))
            continue
        loss = "" if content.eval_loss is None else f"{content.eval_loss:.4f}"
        table.add_row(
            path.name,
            str(content.step),
            content.date[:16].replace("T", " "),
            str(content.world["ranks"]),
            f"{content.nbytes / 1e6:.1f}",
            loss,
            "complete",
        )
    console.print(table)
    return UNSOUND if unsound else 0


def _show(path: Path, console: Console) -> int:
    try:
        place = _one(path)
        content = opened(place)
    except ValueError as error:
        return _refuse(f"{path}: {error}")
    for line in _facts(place, content):
        console.print(plain(line, console.encoding), soft_wrap=True)
    return 0


def _facts(path: Path, content: Manifest) -> list[str]:
    model, state = Layout.read(path / MODEL), Layout.read(path / OPTIMIZER)
    versions = ", ".join(f"{name} {version}" for name, version in content.versions.items())
    return [
        str(path),
        f"after step {content.step}, saved {content.date} by {writers(content.world)}; {versions}",
        f"task {content.config['task']}, {content.samples} training samples",
        f"{MODEL}: {len(model.entries)} tensors, {model.nbytes / 1e6:.1f} MB",
        f"{OPTIMIZER}: {len(state.entries)} tensors, {state.nbytes / 1e6:.1f} MB",
    ]


def _verify(paths: Sequence[Path], console: Console) -> int:
    code = 0
    for path in paths:
        try:
            place = _one(path)
            content = opened(place)
            check(place, content)
        except ValueError as error:
            code = _refuse(f"{path}: {error}")
        else:
            text = f"{place}: sound, {content.nbytes / 1e6:.1f} MB"
            console.print(plain(text, console.encoding), soft_wrap=True)
    return code


def _one(path: Path) -> Path:
    """The checkpoint that is named, or the newest of the run that is. ValueError for neither."""
    if (path / FILE).exists():
        return path
    found = checkpoints_of(path)
    if not found:
        raise ValueError("no checkpoint, and no run that has one")
    return found[0]


def _refuse(why: str) -> int:
    print(f"mntrain: {why}", file=sys.stderr)
    return UNSOUND
