"""A run's directory, and going on with what it holds."""

import fcntl
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from mntrain import checkpoint
from mntrain.checkpoint import FoundCheckpoint, checkpoints_of, describe_writers, set_aside
from mntrain.cli import to_toml
from mntrain.config import Config, flag_of
from mntrain.errors import AgreedError
from mntrain.metrics.report import Reporter
from mntrain.world import World

# What makes another run of it: another model, or another order of samples. Where the data lies may
# change from job to job.
FIXED = ("task", "data.valid_fraction", "model", "optim.name", "train.batch_size", "run.seed")


def directory(world: World, config: Config) -> Path:
    """Agree on the run's directory. Collective."""
    default = Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}"
    path: Path = world.gather(config.run.dir or default)[0]
    return path


def to_resume(world: World, config: Config, run_dir: Path) -> FoundCheckpoint | None:
    """The checkpoint that this job begins with, if any. Collective.

    AgreedError where there is to be one and is none, and where the run would have no more steps.
    """
    resume = config.run.resume
    if resume == "never":
        return None
    where = run_dir if resume == "auto" else Path(resume)
    found = checkpoint.newest(world, where)
    if found is None:
        if resume != "auto":
            raise AgreedError(
                f"--run.resume {resume}: there is no checkpoint; give auto, never, or the path of "
                "a checkpoint or of a run that has some",
                world.rank,
            )
        return None
    if found.manifest.step >= config.train.steps:
        raise AgreedError(
            f"{found.path} is after step {found.manifest.step} of {config.train.steps}: nothing is "
            "left to do; give more --train.steps, or another --run.dir",
            world.rank,
        )
    return found


def expect_same(world: World, found: FoundCheckpoint, config: Config, samples: int) -> None:
    """Raise AgreedError unless the run goes on with what it began with."""
    there, here = _fixed(found.manifest.config), _fixed(plain(config))
    wrong = [
        f"{flag_of(name)} was {there.get(name)}, and is {value}"
        for name, value in here.items()
        if there.get(name) != value
    ]
    if found.manifest.samples != samples:
        wrong.append(f"the data had {found.manifest.samples} training samples, and has {samples}")
    if wrong:
        raise AgreedError(
            f"{found.path} is of another run: {'; '.join(wrong)}. Give the same, or another "
            "--run.dir to begin anew",
            world.rank,
        )


def prepare(
    world: World, config: Config, run_dir: Path, found: FoundCheckpoint | None, *, saves: bool
) -> int | None:
    """Make the run's directory, or go on in it. Collective.

    A job that saves begins a run anew that ended before its first checkpoint, by a kill. Gives, on
    the master, the descriptor whose lock keeps other jobs out until it is closed. AgreedError
    where it holds a run with which nobody goes on, or one of a job that is still there.
    """
    lock = None
    with world.agreement():
        if world.master:
            begun = (run_dir / "config.toml").exists()
            goes_on = found is not None and run_dir.resolve() in found.path.resolve().parents
            anew = saves and not goes_on and not (run_dir / "summary.json").exists()
            anew = anew and not checkpoints_of(run_dir)
            if begun and not goes_on and not anew:
                raise ValueError(f"{run_dir} holds a run already: give another --run.dir")
            lock = _made(run_dir)
            (run_dir / "config.toml").write_text(to_toml(config))
            if begun:
                done = found.manifest.step if found and goes_on else 0
                (run_dir / "summary.json").unlink(missing_ok=True)  # it speaks of the last job
                set_aside(run_dir, done)
                _forget_later_steps(run_dir / "metrics.jsonl", done)
    return lock


def tell(found: FoundCheckpoint, reporter: Reporter) -> None:
    """Say where the run goes on, and which newer checkpoints were not sound."""
    for path, why in found.skipped.items():
        reporter.warn(f"{path.name} was passed over: {why}")
    reporter.note(
        f"goes on after step {found.manifest.step}, from {found.path} "
        f"(saved by {describe_writers(found.manifest.world)})"
    )


def plain(config: Config) -> dict[str, Any]:
    """A configuration as JSON has it."""
    content: dict[str, Any] = json.loads(json.dumps(asdict(config), default=str))
    return content


def _made(run_dir: Path) -> int:
    """Make a run's directory if need be, and lock it. ValueError where no files can be made."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        return _locked(run_dir)
    except OSError as error:
        raise ValueError(
            f"--run.dir {run_dir}: no files can be made there ({error.strerror}); give a folder in "
            "which they can"
        ) from error


def _locked(run_dir: Path) -> int:
    """A descriptor with a lock on a run's directory, which ends with the process at the latest.

    ValueError where another process has it. File systems without locks do without.
    """
    file = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = os.pread(file, 1000, 0).decode(errors="replace") or "of another"
        os.close(file)
        raise ValueError(
            f"{run_dir} is in use by a job ({who}): wait for its end, or give another --run.dir"
        ) from None
    except OSError:
        return file
    os.ftruncate(file, 0)
    os.pwrite(file, f"on {socket.gethostname()}, process {os.getpid()}".encode(), 0)
    return file


def _fixed(config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in FIXED:
        section, _, option = name.partition(".")
        value = config[section]
        if option:
            found[name] = value[option]
        elif isinstance(value, Mapping):
            found |= {f"{section}.{key}": one for key, one in value.items()}
        else:
            found[name] = value
    return found


def _forget_later_steps(metrics: Path, done: int) -> None:
    """Leave out of metrics.jsonl what a job did after the checkpoint, and is done again."""
    if not metrics.exists():
        return
    kept = []
    for line in metrics.read_text().splitlines():
        try:
            step = json.loads(line)["step"]
        except ValueError:
            continue  # a line that a kill has cut
        if step <= done:
            kept.append(line + "\n")
    metrics.write_text("".join(kept))
