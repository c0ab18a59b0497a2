"""The command `python -m mntrain verify`: the first steps of a job, beside those of one process.

One process divides the same samples in another way than the ranks, with a micro-batch of a single
sample: the results must be the same, since the last batch of an epoch and other numbers of ranks
divide a batch in other ways, too. If statistics of a micro-batch (batch norm) count, it takes the
micro-batches of the ranks, one after the other.
"""

import random
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from pathlib import Path

from torch.nn.modules.batchnorm import _BatchNorm

from mntrain.errors import AgreedError
from mntrain.options.balance import BalanceConfig
from mntrain.options.command_line import parse_options
from mntrain.options.config import CheckpointConfig, Config, LogConfig
from mntrain.train.trainer import Trainer
from mntrain.train.verify.recorded_steps import RecordedWorld
from mntrain.train.verify.verification import Verdict, examine
from mntrain.world import World

STEPS = 4
_PROGRAM = "python -m mntrain verify"
_DESCRIPTION = f"""Compare the first {STEPS} steps of a job on all ranks with those of one process:
losses, gradients and weights, at stages 0, 1 and 2. All options of a job. For example:
  mpirun -n 4 {_PROGRAM} --task my_package.my_module:MyTask
Exits with 1 if a result is wrong."""
_HINT = (
    "; is Loss.count the number of items of the mean, and the loss of a sample the same beside any "
    "others?"
)


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
        numbers = count()

        def run(world: RecordedWorld, stage: int) -> Iterable[float]:
            return _take_steps(world, stage, config, folder / str(next(numbers)), size)

        options = {"device": config.device, **comm}
        return examine(run, None, options, uneven=False, hint=_HINT)


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


def _take_steps(
    world: RecordedWorld, stage: int, given: Config, folder: Path, ranks: int
) -> list[float]:
    """Take the first steps of a job, and return their losses. Collective in the world.

    One process takes the samples of all `ranks`. Those of a stream come in its own micro-batches.
    """
    config = replace(
        given,
        data=replace(given.data, workers=0),
        train=replace(given.train, compile=False, check_every=0),
        zero=replace(given.zero, stage=stage),
        balance=BalanceConfig(),
        run=replace(given.run, dir=folder, resume="never", stop_after=None, max_minutes=None),
        checkpoint=CheckpointConfig(best=given.checkpoint.best),
        log=LogConfig(),
    )
    trainer = Trainer(world, config)
    data, steps = trainer.job.data, min(STEPS, trainer.job.last_step)
    batch_norm = any(isinstance(m, _BatchNorm) for m in trainer.job.model.modules())
    if world.size == 1:
        samples = (
            given.train.batch_size if data.stream else min(given.train.batch_size, data.samples)
        )
        unseen = ""
        if batch_norm:
            unseen = "the statistics of batch norm are those of a micro-batch"
        elif data.stream:
            unseen = "the micro-batches of a stream are not divided in another way"
        elif samples <= 2:
            unseen = f"{samples} samples are in no unequal micro-batches"
        world.recorded.left_out += [f"Loss.count: {unseen}"] if unseen else []
    if world.size == 1 and not data.stream:
        size = max(given.train.micro_batch_size, 2)  # beside a micro-batch of one sample

        def reorder(lists: list[list[int]]) -> list[list[int]]:
            return _shuffled(lists if batch_norm else _divide(size, lists), world.order)

        trainer.batches = data.batches_of_ranks(ranks if batch_norm else 1, steps, reorder)
    with trainer.job.directory, closing(trainer.batches):
        losses = [trainer.train_step(step).loss for step in range(1, steps + 1)]
    world.watchdog.at_end.clear()
    world.recorded.batch_norms.clear()  # one process takes the same micro-batches
    return losses


def _divide(size: int, lists: list[list[int]]) -> list[list[int]]:
    """Return the samples of micro-batches in one of a single sample, and others of `size`."""
    samples = [sample for one in lists for sample in one]
    rest = [samples[start : start + size] for start in range(1, len(samples), size)]
    return [samples[:1], *rest]


def _shuffled(lists: list[list[int]], order: int) -> list[list[int]]:
    """Return micro-batches, and the samples in each, in another order; as they are if it is 0."""
    if not order:
        return lists
    draws = random.Random(order)
    return [draws.sample(one, len(one)) for one in draws.sample(lists, len(lists))]
