"""The entries of a training job: `run` in Python, `run_command` of the command line."""

import socket
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from mntrain import tasks
from mntrain.alike.compared_options import agree_on_options
from mntrain.errors import AgreedError, ExceptionWatch, TrainingStoppedError
from mntrain.options.command_line import RefusedOptionsError, from_mapping
from mntrain.options.config import Config
from mntrain.train.trainer import Trainer
from mntrain.world import init

# Exit codes of jobs that may be resumed: the shell's for Ctrl-C, and EX_TEMPFAIL of sysexits.h.
EXIT_CODES = {"interrupted": 130, "preempted": 75}
NOT_WRITTEN = 74  # of another job without an error whose files lack something; EX_IOERR


def run(task: tasks.Given, options: Mapping[str, Any] | Config | None = None) -> dict[str, Any]:
    """Train a task on all ranks of the job, and return what summary.json has. Collective.

    The same as `python -m mntrain`, on one process or many, without an exit. `task` is one, its
    class, or its name as in --task. `options` are nested as in a TOML file, or have dotted names:
    {"train.steps": 100}. A task that is given keeps what it was made with, but for its `config`.

    The summary is the same on all ranks, and its "status" says how the job ended: completed,
    stopped, preempted or interrupted. Raises AgreedError on all ranks for bad input, and
    TrainingStoppedError, which is one, for training that had to stop. An exception on one rank
    alone ends the whole job with a traceback.
    """
    if isinstance(task, str):
        name = task
    else:
        name = tasks.class_name(task if isinstance(task, type) else type(task))
    parsed: Config | RefusedOptionsError
    try:
        given = options if isinstance(options, Config) else from_mapping(options or {})
        parsed = replace(given, task=name)
    except ValueError as error:
        parsed = RefusedOptionsError(str(error))
    try:
        config = agree_on_options(parsed)
    except AgreedError as error:
        ExceptionWatch(error.rank, 1, socket.gethostname()).install()  # one line if nobody catches
        raise
    return _train(config, task)


def run_command(config: Config) -> int:
    """Train as configured on all ranks of the job, and return the exit code. Collective.

    An error that all ranks agree on is printed once, by the master: the code is 2 for bad input,
    and 1 for training that had to stop. Else it is that of `exit_code`.
    """
    try:
        return exit_code(_train(config, config.task))
    except AgreedError as error:
        error.report()
        return 1 if isinstance(error, TrainingStoppedError) else 2


def exit_code(summary: Mapping[str, Any]) -> int:
    """Return the exit code of a job without an error.

    0 for a run that completed or stopped as asked for, else one of `EXIT_CODES`; `NOT_WRITTEN`
    instead of 0 if the run's directory lacks metrics or the summary.
    """
    return EXIT_CODES.get(summary["status"], NOT_WRITTEN if "not_written" in summary else 0)


def _train(config: Config, task: tasks.Given) -> dict[str, Any]:
    with init(device=config.device, **asdict(config.comm)) as world:
        with world.recorder.phase("start"):
            trainer = Trainer(world, config, task)
        return trainer.fit()
