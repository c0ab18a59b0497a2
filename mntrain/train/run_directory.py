"""The run directory of a configured job, and the checkpoint that the job resumes from."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mntrain import checkpoint
from mntrain.checkpoint import FoundCheckpoint
from mntrain.cli import to_toml
from mntrain.config import Config, flag_of
from mntrain.config_types import as_mapping
from mntrain.errors import AgreedError
from mntrain.metrics.files import CONFIG_FILE, write_whole
from mntrain.run.directory import (
    expect_shared,
    expect_startable,
    make_and_lock,
    make_new,
    rewind,
    unwritable,
)
from mntrain.run.lock import RunLock
from mntrain.world import World

# Beginnings of options that a resumed run cannot change: they fix the model and order of samples.
FIXED = (
    "task",
    "data.valid_fraction",
    "model.",
    "hf.head",
    "hf.label_field",
    "hf.mask_fraction",
    "hf.max_length",
    "init.freeze",
    "optim.name",
    "train.batch_size",
    "balance.mode",  # to cadence, and from it: others have the same batches
    "data.drop_last",
    "run.seed",
)
# Those of them that --run.allow-change permits, by its words.
_CHANGEABLE = {
    "train.batch_size": "batch-size",
    "balance.mode": "batch-size",
    "data.drop_last": "drop-last",
    "run.seed": "seed",
}
# Beginnings of options that say nothing of the run, or only of its start.
_UNREPORTED = ("run.", "log.", "data.path", "init.from", "hf.model")
# Options of parameter groups that a resumed run may change.
JOB_OPTIONS = ("lr", "weight_decay")


def agree_on_path(world: World, config: Config) -> Path:
    """Return the path of the run's directory, the master's on all ranks. Collective.

    Without --run.dir, makes one that is named after the date and belongs to this job alone. Raises
    AgreedError if it cannot be made.
    """
    path = config.run.dir or Path("runs", f"{datetime.now():%Y%m%d-%H%M%S}")
    with world.agreement():
        if config.run.dir is None and world.master:
            path = make_new(path)
    return world.gather(path)[0]


def discard(world: World, config: Config, run_dir: Path) -> None:
    """Remove the directory that `agree_on_path` made for a job that was refused. Local."""
    if world.master and config.run.dir is None:
        with suppress(OSError):
            run_dir.rmdir()
            run_dir.parent.rmdir()  # if no other run is in it


def lock_existing(world: World, config: Config, run_dir: Path) -> RunLock | None:
    """Lock the run's directory before anything is read from it; on the master. Collective.

    Another job may be writing in it. One that is new or empty is left for `prepare`. Raises
    AgreedError if another job uses it.
    """
    with world.agreement():
        if world.master and config.run.dir is not None:
            with suppress(OSError):  # of a path that `prepare` refuses
                if any(run_dir.iterdir()):
                    return make_and_lock(run_dir, world.watchdog)
    return None


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
    stop = config.run.stop_after
    if found and stop is not None and found.manifest.step >= stop:
        raise AgreedError(
            f"--run.stop-after {stop}: {found.path} is after step {found.manifest.step} already, "
            "and steps are counted from the beginning of the run; give a later step, or none",
            world.rank,
        )
    return found


def check_same_run(
    world: World,
    found: FoundCheckpoint,
    config: Config,
    samples: int,
    values: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise AgreedError if a fixed option or the data differs from the checkpoint's. Local.

    `values` are those of the task (`Task.compared_values`), which older checkpoints lack.
    """
    if missing := sorted(
        {"task", "data", "model", "optim", "train", "run"} - found.manifest.config.keys()
    ):
        raise AgreedError(
            f"{found.path} is of no run of `python -m mntrain`: its configuration has no "
            f"{', '.join(missing)}; give another --run.dir, or another --run.resume",
            world.rank,
        )
    # Earlier versions lacked some options, and did what their defaults say.
    before = _fixed_options(to_json(Config())) | _fixed_options(found.manifest.config)
    now = _fixed_options(to_json(config))
    changes = {
        f"{flag_of(name)} was {before[name]}, and is {value}": _CHANGEABLE.get(name)
        for name, value in now.items()
        if before[name] != value and (name != "balance.mode" or "cadence" in (before[name], value))
    }
    known = found.manifest.data.get("values", {})
    changes |= {
        f"{name} was {known[name]}, and is {value}": None
        for name, value in values.items()
        if known.get(name, value) != value
    }
    if found.manifest.samples != samples:
        counts = f"{found.manifest.samples} training samples, and has {samples}"
        changes[f"the data had {counts}"] = "data"
    refused = {text: word for text, word in changes.items() if word not in config.run.allow_change}
    if refused:
        words = list(refused.values())
        allow = f", or --run.allow-change {' '.join(map(str, words))}" if all(words) else ""
        raise AgreedError(
            f"{found.path} is of another run: {'; '.join(refused)}. Give the same{allow}, or "
            "another --run.dir to begin anew",
            world.rank,
        )


def changed_options(found: FoundCheckpoint, config: Config) -> list[str]:
    """Return the options that a resumed run has changed, in words. Local.

    Those of the job rather than of the run, and those that the checkpoint does not know, are left
    out.
    """
    before, now = _options(found.manifest.config), _options(to_json(config))
    return [
        f"{flag_of(name)} was {before[name]}, is {value}"
        for name, value in now.items()
        if (name == "run.seed" or not name.startswith(_UNREPORTED))
        and before.get(name, value) != value
    ]


def prepare(
    world: World,
    config: Config,
    run_dir: Path,
    found: FoundCheckpoint | None,
    lock: RunLock | None = None,
    *,
    saves: bool,
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> RunLock | None:
    """Make the run's directory, or continue in it; write config.toml and files. Collective.

    A job that saves may start over a run that was killed before its first checkpoint. Returns, on
    the master, the lock that keeps other jobs out until it is closed: the one that is given, that
    of `lock_existing`, or a new one. Raises AgreedError if the directory holds a run that this job
    does not continue, or is in use by another job, or if a job that saves has ranks that do not see
    it.
    """
    if saves:
        expect_shared(world, run_dir)
    with world.agreement():
        if world.master:
            lock = lock or make_and_lock(run_dir, world.watchdog)
            # Another job may have ended in it meanwhile.
            exists = (run_dir / CONFIG_FILE).exists()
            continued = found is not None and run_dir.resolve() in found.path.resolve().parents
            written = {CONFIG_FILE: to_toml(_with_absolute_paths(config)).encode(), **files}
            try:
                if exists and not continued:
                    expect_startable(run_dir, saves=saves)
                for name, content in written.items():
                    (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
                    write_whole(run_dir / name, content)  # an older one stays if the disk is full
                if exists:
                    rewind(run_dir, found.manifest.step if found and continued else 0)
            except ValueError:
                lock.close()
                raise
            except OSError as error:
                lock.close()
                raise unwritable(run_dir, error) from error
    return lock


def to_json(config: Config) -> dict[str, Any]:
    """Return a configuration as a JSON object."""
    content: dict[str, Any] = json.loads(json.dumps(as_mapping(config), default=str))
    return content


def _with_absolute_paths(config: Config) -> Config:
    """Return a configuration that finds its files from any folder."""
    data, valid = config.data.path, config.data.valid_path
    weights, model = config.init.from_, config.hf.model
    if isinstance(valid, dict):
        valid = {name: path.absolute() for name, path in valid.items()}
    elif valid is not None:
        valid = valid.absolute()
    kind, colon, file = config.data.tokenizer.partition(":")
    tokenizer = f"{kind}:{Path(file).absolute()}" if colon else kind
    return replace(
        config,
        data=replace(
            config.data, path=data and data.absolute(), valid_path=valid, tokenizer=tokenizer
        ),
        init=replace(config.init, from_=weights and weights.absolute()),
        hf=replace(config.hf, model=model and model.absolute()),
    )


def _fixed_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options in `FIXED`, by dotted name."""
    return {n: value for n, value in _options(config).items() if n.startswith(FIXED)}


def _options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of options by dotted name."""
    options = {"task": config.get("task")}
    for section, values in config.items():
        if isinstance(values, Mapping):
            options |= {f"{section}.{name}": value for name, value in values.items()}
    return options
