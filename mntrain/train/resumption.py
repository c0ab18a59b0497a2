"""The checkpoint that a configured job resumes from, and whether it is of the same run."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from mntrain import checkpoint
from mntrain.checkpoint import FoundCheckpoint
from mntrain.errors import AgreedError
from mntrain.options.config import Config, flag_of
from mntrain.options.types import as_mapping
from mntrain.recorder.launch_notes import LaunchNotes
from mntrain.run.directory import RunDirectory
from mntrain.run.restart import find_restart, passed_over
from mntrain.world import World

# Beginnings of options that a resumed run cannot change: they fix the model and order of samples.
FIXED = (
    "task",
    "data.valid_fraction",
    "model.",
    "hf.head",
    "hf.label_field",
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


def find_checkpoint(
    world: World, config: Config, directory: RunDirectory
) -> FoundCheckpoint | None:
    """Return what this job resumes from, and warn of what was passed over. Collective.

    With `auto`, it may be one from the nodes' memory. A job that `mntrain launch` has started again
    goes on with what it has saved itself, whatever its first start began with. Raises AgreedError
    if the checkpoint that was asked for does not exist.
    """
    resume, given = config.run.resume, None
    if resume not in ("auto", "never"):
        given = checkpoint.newest(world, Path(resume))
        if given is None:
            raise AgreedError(
                f"--run.resume {resume}: there is no checkpoint; give auto, never, or the path of "
                "a checkpoint or of a run that has some",
                world.rank,
            )
        for text in passed_over(given.skipped):
            world.output.warn(text)
    notes = LaunchNotes.of(os.environ) if world.master else None
    has_begun = notes is not None and notes.has_begun(directory.path)
    if resume == "auto" or world.gather(has_begun)[0]:
        return find_restart(world, directory, given)
    return given


def check_left(world: World, found: FoundCheckpoint | None, config: Config, steps: int) -> None:
    """Raise AgreedError if a checkpoint leaves none of a run's steps to do. Local."""
    if found is None:
        return
    done, stop, problem = found.manifest.step, config.run.stop_after, ""
    if done >= steps:
        option = "steps" if config.train.epochs is None else "epochs"
        problem = (
            f"{found.path} is after step {done} of {steps}: nothing is left to do; "
            f"give more --train.{option}, or another --run.dir"
        )
    elif stop is not None and done >= stop:
        problem = (
            f"--run.stop-after {stop}: {found.path} is after step {done} already, and steps are "
            "counted from the beginning of the run; give a later step, or none"
        )
    if problem:
        raise AgreedError(problem, world.rank)


def check_same_run(
    world: World,
    found: FoundCheckpoint,
    config: Config,
    samples: int,
    values: Mapping[str, str],
) -> None:
    """Raise AgreedError if a fixed option or the data differs from the checkpoint's. Local.

    `values` are those of the task (`Task.compared_values`), which older checkpoints lack.
    """
    if "task" not in found.manifest.config:
        raise AgreedError(
            f"{found.path} is of no run of `python -m mntrain`: its configuration has no task; "
            "give another --run.dir, or another --run.resume",
            world.rank,
        )
    # Earlier versions lacked some options, and did what their defaults say.
    before = _options(to_json(Config())) | _options(found.manifest.config)
    now = _options(to_json(config))
    changes = {
        f"{flag_of(name)} was {_word(before[name])}, and is {_word(value)}": _CHANGEABLE.get(name)
        for name, value in now.items()
        if name.startswith(FIXED)
        and before[name] != value
        and (name != "balance.mode" or "cadence" in (before[name], value))
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
        words = [word for word in refused.values() if word]
        allow = f", or --run.allow-change {' '.join(words)}" if len(words) == len(refused) else ""
        raise AgreedError(
            f"{found.path} is of another run: {'; '.join(refused)}. Give the same{allow}, or "
            "another --run.dir to begin anew",
            world.rank,
        )


def regrouped(found: FoundCheckpoint, names: Sequence[Sequence[str]]) -> FoundCheckpoint:
    """Return a checkpoint with parameters in groups of these names, if it has all in one. Local.

    Earlier versions made one group with --optim.weight-decay 0.
    """
    saved = found.manifest.param_groups
    if len(saved) != 1 or sorted(saved[0]["params"]) != sorted(chain(*names)):
        return found
    groups = [{**saved[0], "params": list(group)} for group in names]
    return replace(found, manifest=replace(found.manifest, param_groups=groups))


def changed_options(found: FoundCheckpoint, config: Config) -> list[str]:
    """Return the options that a resumed run has changed, in words. Local.

    Those of the job rather than of the run, and those that the checkpoint does not know, are left
    out.
    """
    before, now = _options(found.manifest.config), _options(to_json(config))
    return [
        f"{flag_of(name)} was {_word(before[name])}, is {_word(value)}"
        for name, value in now.items()
        if (name == "run.seed" or not name.startswith(_UNREPORTED))
        and before.get(name, value) != value
    ]


def to_json(config: Config) -> dict[str, Any]:
    """Return a configuration as a JSON object."""
    content: dict[str, Any] = json.loads(json.dumps(as_mapping(config), default=str))
    return content


def with_absolute_paths(config: Config) -> Config:
    """Return a configuration that finds its files from any folder."""

    def absolute(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: path.absolute() for name, path in value.items()}
        return value and value.absolute()

    data, init, hf, run = config.data, config.init, config.hf, config.run
    resume = run.resume
    if resume not in ("auto", "never"):
        resume = str(Path(resume).absolute())
    kind, colon, file = data.tokenizer.partition(":")
    tokenizer = f"{kind}:{Path(file).absolute()}" if colon else kind
    path, valid_path = absolute(data.path), absolute(data.valid_path)
    return replace(
        config,
        data=replace(data, path=path, valid_path=valid_path, tokenizer=tokenizer),
        init=replace(init, from_=absolute(init.from_)),
        hf=replace(hf, model=absolute(hf.model)),
        run=replace(run, dir=absolute(run.dir), resume=resume, recorder=absolute(run.recorder)),
        checkpoint=replace(config.checkpoint, local=absolute(config.checkpoint.local)),
    )


def _word(value: object) -> object:
    """Return a value as the command line takes it."""
    return str(value).lower() if value is None or isinstance(value, bool) else value


def _options(config: Mapping[str, Any]) -> dict[str, Any]:
    options = {"task": config.get("task")}
    for section, values in config.items():
        if isinstance(values, Mapping):
            options |= {f"{section}.{name}": value for name, value in values.items()}
    return options
