"""The command `python -m mntrain verify`: the first steps of a job, beside those of one process.

One process takes the same micro-batches as the ranks, one after the other, so that statistics of a
micro-batch (batch norm) are the same. A second run of it takes smaller micro-batches of unequal
sizes: its results must be the same, too, since the last batch of an epoch and other numbers of
ranks divide a batch in other ways.
"""

import random
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from torch.nn.modules.batchnorm import _BatchNorm

from mntrain.errors import AgreedError
from mntrain.options.balance import BalanceConfig
from mntrain.options.command_line import parse_options
from mntrain.options.config import CheckpointConfig, Config, LogConfig
from mntrain.train.trainer import Trainer
from mntrain.train.verify.recorded_steps import Distance, RecordedRun, RecordedWorld
from mntrain.train.verify.verification import Verdict, examine
from mntrain.world import World

STEPS = 4
_PROGRAM = "python -m mntrain verify"
_DESCRIPTION = f"""Compare the first {STEPS} steps of a job on all ranks with those of one process:
losses, gradients and weights, at stages 0, 1 and 2. All options of a job. For example:
  mpirun -n 4 {_PROGRAM} --task my_package.my_module:MyTask
Exits with 1 if a result is wrong."""


parse = partial(parse_options, Config, prog=_PROGRAM, description=_DESCRIPTION)


def run(config: Config) -> int:
    """Verify a job, print the verdict on rank 0, and return the exit code. Collective."""
    try:
        return 0 if verify_task(config) else 1
    except AgreedError as error:
        error.report()
        return 2


def verify_task(config: Config) -> Verdict:
    """Verify a job, and return the verdict. Collective. Raises AgreedError for bad input."""
    comm = asdict(config.comm)
    with ExitStack() as cleanup:
        with World(device=config.device, **comm) as world, world.agreement():
            _check(config)
            size = world.size
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="mntrain-verify-")))
        runs = _Runs(config, size, folder)
        return examine(runs, None, {"device": config.device, **comm}, runs.divide)


def _check(config: Config) -> None:
    """Raise ValueError for options whose results are not those of one process."""
    if config.sync.mode != "every-step":
        raise ValueError(
            f"--sync.mode {config.sync.mode}: nodes train alone between exchanges, which one "
            "process does not; leave it out to verify the rest"
        )
    if config.balance.mode != "off":
        raise ValueError(
            f"--balance.mode {config.balance.mode}: parts follow measured speeds, which differ "
            "from run to run; leave it out to verify the rest"
        )


class _Runs:
    """The first steps of a job, in any world."""

    def __init__(self, config: Config, ranks: int, folder: Path) -> None:
        self._config, self._ranks, self._folder = config, ranks, folder
        self._number = 0
        self._batch_size, self._batch_norm, self._stream = 1, False, False  # of the last run

    def __call__(self, world: RecordedWorld, stage: int) -> Iterable[float]:
        """Take the steps, and return their losses. Collective in the world."""
        micro = self._config.train.micro_batch_size
        return self._steps(world, stage, micro, parts=self._ranks)

    def divide(self, world: RecordedWorld, first: RecordedRun) -> tuple[str, str]:
        """Return how results of one process depend on micro-batches, and if that is not known."""
        samples = self._batch_size
        share = -(-samples // self._ranks)
        largest = -(-share // -(-share // self._config.train.micro_batch_size))
        size = -(-largest // 2) if largest > 1 else 2
        if self._stream:
            size = next((s for s in range(size, 0, -1) if samples % -(-samples // s)), size)
        else:
            size = max(size, 2)  # beside a micro-batch of one sample
        uneven = samples % -(-samples // size) if self._stream else samples > 2
        unseen = "" if uneven else f"Loss.count: {samples} samples are in no unequal micro-batches"
        if self._batch_norm:
            return "", "Loss.count: the statistics of batch norm are those of a micro-batch"
        other = RecordedRun(first)
        other.record(lambda *_: self._steps(world, 0, size, parts=1, divide=True), world, 0)
        distance = other.steps[0].distances.get("whole gradient", Distance(0.0, 0.0))
        if distance.relative <= max(distance.rounding, 0.0) ** 0.5:  # less than half of the digits
            return "", unseen
        hint = ""
        if abs(other.steps[0].factor - 1) > 0.01:
            hint = f", which is {other.steps[0].factor:.3g} times as long"
        return (
            f"one process alone has another gradient{hint} with micro-batches of at most {size} "
            f"samples (by {distance.relative:.1g}), and so have other numbers of ranks: the loss "
            "is not the mean over Loss.count items, or depends on the samples that are computed "
            "together"
        ), ""

    def _steps(
        self,
        world: RecordedWorld,
        stage: int,
        micro: int,
        *,
        parts: int,
        divide: bool = False,
    ) -> list[float]:
        given, self._number = self._config, self._number + 1
        config = replace(
            given,
            data=replace(given.data, workers=0),
            train=replace(given.train, micro_batch_size=micro, compile=False, check_every=0),
            zero=replace(given.zero, stage=stage),
            balance=BalanceConfig(),
            run=replace(
                given.run,
                dir=self._folder / str(self._number),
                resume="never",
                stop_after=None,
                max_minutes=None,
            ),
            checkpoint=CheckpointConfig(best=given.checkpoint.best),
            log=LogConfig(),
        )
        trainer = Trainer(world, config)
        job = trainer.job
        self._batch_norm = any(
            isinstance(layer, _BatchNorm) for layer in job.trained.model.modules()
        )
        steps, self._batch_size = min(STEPS, job.last_step), given.train.batch_size
        self._stream = bool(job.data.stream)
        if world.size == 1 and not job.data.stream:
            self._batch_size = min(self._batch_size, job.data.samples)
            divided = partial(_divide, micro) if divide else None
            reorder = _shuffle(world.order) if world.order else divided
            trainer.batches = job.data.batches_of_ranks(parts, steps, reorder)
        with job.directory, closing(trainer.batches):
            losses = [trainer.train_step(step).loss for step in range(1, steps + 1)]
        world.watchdog.at_end.clear()
        world.recorded.batch_norms.clear()  # one process takes the same micro-batches
        return losses


def _divide(size: int, lists: list[list[int]]) -> list[list[int]]:
    """Return the samples of micro-batches in one of a single sample, and others of `size`."""
    samples = [sample for one in lists for sample in one]
    rest = [samples[start : start + size] for start in range(1, len(samples), size)]
    return [samples[:1], *rest]


def _shuffle(order: int) -> Callable[[list[list[int]]], list[list[int]]]:
    """Return a function that puts micro-batches, and the samples in each, in another order."""

    def shuffled(lists: list[list[int]]) -> list[list[int]]:
        draws = random.Random(order)
        return [draws.sample(one, len(one)) for one in draws.sample(lists, len(lists))]

    return shuffled
