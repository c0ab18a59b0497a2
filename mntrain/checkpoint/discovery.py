"""Which checkpoints a run has, and whether they are sound. No MPI."""

import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from mntrain.checkpoint import manifest
from mntrain.checkpoint.format import ChecksummedRange, FileLayout, wrong_run
from mntrain.checkpoint.manifest import FILES, Manifest


def step_of(step: int) -> str:
    """The name of the checkpoint after so many steps."""
    return f"step-{step:08d}"


def steps_in(folder: Path) -> list[Path]:
    """What may be checkpoints in a folder, the newest first: by their names, not their dates."""
    found = [(int(n[1]), path) for path in folder.glob("step-*") if (n := _number(path))]
    return [path for _, path in sorted(found, reverse=True)]


def checkpoints_of(run_dir: Path) -> list[Path]:
    """What may be checkpoints of a run, the newest first."""
    return steps_in(run_dir / "checkpoints")


def set_aside(run_dir: Path, step: int) -> None:
    """Rename a run's checkpoints after a step: damaged ones, or of steps that are taken again.

    Else they would be the newest. They stay as step-*.aside, for whoever wants them.
    """
    for path in checkpoints_of(run_dir):
        if int(path.name.removeprefix("step-")) > step:
            aside = path.with_name(f"{path.name}.aside")
            if aside.exists():
                shutil.rmtree(aside)
            path.rename(aside)


def losses_of(paths: Iterable[Path]) -> dict[Path, float]:
    """The evaluation losses of checkpoints that have one, and a manifest that can be read."""
    losses: dict[Path, float] = {}
    for path in paths:
        with suppress(ValueError):
            loss = manifest.read(path).eval_loss
            if loss is not None:
                losses[path] = loss
    return losses


def opened(path: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there, whole. ValueError for what is not."""
    found = manifest.read(path)
    for name in FILES:
        if not (path / name).is_file():
            raise ValueError(f"{name} is missing")
        layout = FileLayout.read(path / name)
        at = 0
        for run in found.runs[name]:
            if run.start != at:
                raise ValueError(f"{manifest.FILE} has no checksum for byte {at} of {name}")
            at += run.length
        if at != layout.nbytes:
            raise ValueError(f"{name} has {layout.nbytes} bytes, and was written with {at}")
    return found


def check(path: Path, found: Manifest, rank: int = 0, size: int = 1) -> None:
    """Compare a checkpoint's bytes with their checksums. ValueError for what differs. Local.

    Of `size` callers each looks at another part of it.
    """
    for name in FILES:
        mine: Sequence[ChecksummedRange] = found.runs[name][rank::size]
        if wrong := wrong_run(path / name, list(mine)):
            raise ValueError(
                f"{name} is damaged between bytes {wrong.start} and {wrong.start + wrong.length}"
            )


def _number(path: Path) -> re.Match[str] | None:
    return re.fullmatch(r"step-(\d+)", path.name)
