"""A run's directory: its lock, its configuration, and the checkpoint that a job resumes from."""

import fcntl
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from mntrain import checkpoint
from mntrain.checkpoint import FoundCheckpoint, list_checkpoints, set_aside
from mntrain.cli import to_toml
from mntrain.config import Config, flag_of
from mntrain.errors import AgreedError
from mntrain.world import World

# Beginnings of options that a resumed run cannot change: they fix the model and order of samples.
FIXED = ("task", "data.valid_fraction", "model.", "optim.name", "train.batch_size", "run.seed")


def agree_on_path(world: World, config: Config) -> Path:
    """Return the path of the run's directory, the master's on all ranks. Collective."""
    return world.gather(config.run.dir or Path("runs", f"{datetime.now():%Y%m%d-%H%M%S}"))[0]


def find_checkpoint(world: World, config: Config, run_dir: Path) -> FoundCheckpoint | None:
    """Return the checkpoint that this job resumes from, if any. Collective.

    Raises AgreedError if the one that was asked for does not exist, or no steps are left.
    """
    resume = config.run.resume
    if resume == "never":
        return None
    found = checkpoint.newest(world, run_dir if resume == "auto" else Path(resume))
    if found is None and resume != "auto":
        raise AgreedError(
            f"--run.resume {resume}: there is no checkpoint; give auto, never, or the path of a "
            "checkpoint or of a run that has some",
            world.rank,
        )
    if found and found.manifest.step >= config.train.steps:
        raise AgreedError(
            f"{found.path} is after step {found.manifest.step} of {config.train.steps}: nothing is "
            "left to do; give more --train.steps, or another --run.dir",
            world.rank,
        )
    return found


def check_same_run(world: World, found: FoundCheckpoint, config: Config, samples: int) -> None:
    """Raise AgreedError if a fixed option or the data differs from the checkpoint's. Local."""
    before, now = _fixed_options(found.manifest.config), _fixed_options(to_json(config))
    changes = [
        f"{flag_of(name)} was {before.get(name)}, and is {value}"
        for name, value in now.items()
        if before.get(name) != value
    ]
    if found.manifest.samples != samples:
        changes.append(f"the data had {found.manifest.samples} training samples, and has {samples}")
    if changes:
        raise AgreedError(
            f"{found.path} is of another run: {'; '.join(changes)}. Give the same, or another "
            "--run.dir to begin anew",
            world.rank,
        )


def prepare(
    world: World, config: Config, run_dir: Path, found: FoundCheckpoint | None, *, saves: bool
) -> TextIO | None:
    """Make the run's directory, or continue in it; write config.toml. Collective.

    A job that saves may start over a run that was killed before its first checkpoint. Returns, on
    the master, a file whose lock keeps other jobs out until it is closed. Raises AgreedError if the
    directory holds a run that this job does not continue, or is in use by another job.
    """
    lock = None
    with world.agreement():
        if world.master:
            exists = (run_dir / "config.toml").exists()
            continued = found is not None and run_dir.resolve() in found.path.resolve().parents
            if exists and not continued:
                ended = (run_dir / "summary.json").exists() or bool(list_checkpoints(run_dir))
                if ended or not saves:
                    raise ValueError(f"{run_dir} holds a run already: give another --run.dir")
            lock = _make_and_lock(run_dir)
            (run_dir / "config.toml").write_text(to_toml(config))
            if exists:
                done = found.manifest.step if found and continued else 0
                (run_dir / "summary.json").unlink(missing_ok=True)  # of the previous job
                set_aside(run_dir, done)
                _drop_later_steps(run_dir / "metrics.jsonl", done)
    return lock


def to_json(config: Config) -> dict[str, Any]:
    """Return a configuration as a JSON object."""
    content: dict[str, Any] = json.loads(json.dumps(asdict(config), default=str))
    return content


def _make_and_lock(run_dir: Path) -> TextIO:
    """Make a run's directory if there is none, and return a file that holds its lock while open.

    Without effect on file systems without locks. Raises ValueError if the directory is not
    writable, or another process holds the lock.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = (run_dir / ".lock").open("a+", errors="replace")
    except OSError as error:
        raise ValueError(
            f"--run.dir {run_dir}: no files can be made there ({error.strerror}); give a folder in "
            "which they can"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read(1000) or "unknown"
        file.close()
        raise ValueError(
            f"{run_dir} is in use by a job ({holder}): wait for its end, or give another --run.dir"
        ) from None
    except OSError:
        return file
    file.truncate(0)
    file.write(f"on {socket.gethostname()}, process {os.getpid()}")
    file.flush()
    return file


def _fixed_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options in `FIXED`, by dotted name."""
    options = {"task": config["task"]}
    for section, values in config.items():
        if isinstance(values, Mapping):
            options |= {f"{section}.{name}": value for name, value in values.items()}
    return {name: value for name, value in options.items() if name.startswith(FIXED)}


def _drop_later_steps(metrics: Path, done: int) -> None:
    """Remove from metrics.jsonl the steps after the checkpoint, which are taken again."""
    if not metrics.exists():
        return
    kept = []
    for line in metrics.read_text().splitlines():
        try:
            step = json.loads(line)["step"]
        except ValueError:
            continue  # a line cut short by a kill
        if step <= done:
            kept.append(line + "\n")
    metrics.write_text("".join(kept))
