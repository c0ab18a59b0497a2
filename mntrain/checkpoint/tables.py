"""What a person sees of checkpoints: lines and tables. Names in them are shown as they are."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from mntrain.checkpoint.compare import CheckpointDifference, FileComparison, TensorChange
from mntrain.checkpoint.format import FileLayout, TensorEntry
from mntrain.checkpoint.manifest import MODEL, OPTIMIZER, Manifest, describe_writers
from mntrain.metrics.terminal import plain

_MOST = 20  # rows of a table of changes, and names in a line


def listed(found: Mapping[Path, Manifest | None]) -> Table:
    """Checkpoints, each with what it says of itself; None for one that cannot be read."""
    table = Table("checkpoint", "step", "saved (UTC)", "ranks", "MB", "eval loss", "files")
    for path, content in found.items():
        if content is None:
            table.add_row(path.name, "", "", "", "", "", "unsound")
            continue
        table.add_row(
            path.name,
            str(content.step),
            content.date[:16].replace("T", " "),
            str(content.world["ranks"]),
            f"{content.nbytes / 1e6:.1f}",
            "" if content.eval_loss is None else f"{content.eval_loss:.4f}",
            "complete",
        )
    return table


def facts(path: Path, content: Manifest) -> list[str]:
    """What a checkpoint holds. ValueError and OSError, as `FileLayout.read`."""
    model, state = FileLayout.read(path / MODEL), FileLayout.read(path / OPTIMIZER)
    versions = ", ".join(f"{name} {version}" for name, version in content.versions.items())
    return [
        str(path),
        f"after step {content.step}, saved {content.date} by {describe_writers(content.world)}; {versions}",
        f"task {content.config['task']}, {content.samples} training samples",
        f"{MODEL}: {len(model.entries)} tensors, {model.nbytes / 1e6:.1f} MB",
        f"{OPTIMIZER}: {len(state.entries)} tensors, {state.nbytes / 1e6:.1f} MB",
    ]


def difference(
    paths: Sequence[Path], found: CheckpointDifference, encoding: str
) -> Iterator[str | Table]:
    """What differs between two checkpoints, from top to bottom."""
    yield from (f"{label}: {path}" for label, path in zip("AB", paths, strict=True))
    first, second = found.steps
    yield f"step: {first} in both" if first == second else f"step: {first} and {second}"
    yield from (f"{flag}: {ours} and {theirs}" for flag, (ours, theirs) in found.options.items())
    for name, comparison in found.files.items():
        yield from _tensors(name, comparison, encoding)
    yield from (_numbers(key, by_name) for key, by_name in found.numbers.items())


def _tensors(file: str, found: FileComparison, encoding: str) -> Iterator[str | Table]:
    both = found.equal + len(found.changes) + len(found.unlike)
    yield f"{file}: {both} tensors in both, {found.equal} of them equal bit for bit"
    for label, names in zip("AB", found.only, strict=True):
        if names:
            yield f"  only in {label}: {_some(names)}"
    if found.unlike:
        yield f"  unlike: {_some([_unlike(name, *pair) for name, pair in found.unlike.items()])}"
    if found.changes:
        yield _changes(found.changes[:_MOST], encoding)
        if len(found.changes) > _MOST:
            yield f"  and {len(found.changes) - _MOST} more"


def _unlike(name: str, ours: TensorEntry, theirs: TensorEntry) -> str:
    first, second = (f"{str(e.dtype).removeprefix('torch.')} {e.shape}" for e in (ours, theirs))
    return f"{name} is {first} and {second}"


def _changes(changes: Sequence[TensorChange], encoding: str) -> Table:
    table = Table()
    table.add_column("tensor", overflow="fold")
    table.add_column("largest difference", justify="right")
    table.add_column("relative (L2)", justify="right")
    for one in changes:
        table.add_row(plain(one.name, encoding), f"{one.largest:.4g}", f"{one.relative:.4g}")
    return table


def _numbers(key: str, by_name: dict[str, tuple[Any, Any]]) -> str:
    """What the optimizer keeps in a few numbers a parameter, such as how many steps it took."""
    (name, (ours, theirs)), *others = by_name.items()
    values = "differs" if isinstance(ours, list) else f"{ours} and {theirs}"
    more = f", and differs for {len(others)} more" if others else ""
    return f"{key} in the optimizer: {values} for {name}{more}"


def _some(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _MOST} more" if len(texts) > _MOST else ""
    return ", ".join(texts[:_MOST]) + more
