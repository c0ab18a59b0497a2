"""The samples of a job: those of each step, and those of its evaluations."""

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any, cast

from torch.utils.data import Dataset, IterableDataset

from mntrain import tasks
from mntrain.balance.cadence import Cadence
from mntrain.balance.shares import CALIBRATION, Shares, hinted_speeds
from mntrain.checkpoint import FoundCheckpoint
from mntrain.config import Config
from mntrain.data import sampling
from mntrain.data.phase_notes import name_samples
from mntrain.data.sample_digest import detached
from mntrain.data.streams import StreamBatches
from mntrain.world import World


class JobData:
    """The samples of a task: the batches of this rank, and those it validates on. Local."""

    def __init__(
        self,
        world: World,
        config: Config,
        task: tasks.Task,
        resumed: FoundCheckpoint | None,
    ) -> None:
        train = task.dataset("train")
        self.stream: StreamBatches | None = None
        self.datasets: dict[str, Dataset[Any]] = {}  # whose samples are compared
        self._valid: dict[str, tuple[Dataset[Any], Sequence[int]]] = {}  # with the samples used
        self._add_validation_sets(task, config)
        self._options = sampling.LoaderOptions(
            rank=world.rank,
            size=world.size,
            micro_batch_size=config.train.micro_batch_size,
            workers=config.data.workers,
            start_method=config.data.worker_start,
            collate=task.collate,
        )
        size, seed, drop_last = config.train.batch_size, config.run.seed, config.data.drop_last
        self.samples = 0  # of an epoch; 0: of a stream
        self._batch_size = size
        stream = isinstance(train, IterableDataset)
        self.shares = choose_shares(config, world.size, stream=stream)
        self.balances = not refusal_of_balance(config, world.size, stream=stream)  # or could
        self.cadence: Cadence | None = None
        if isinstance(train, IterableDataset):
            self.stream = StreamBatches(
                train, self._options, size, seed, drop_last=drop_last, gather=world.gather
            )
            return
        self._train = _sized(train, "training", config.task)
        self.datasets = {"training": self._train, **self.datasets}
        self.samples = len(cast(Sized, self._train))
        origin = _find_origin(resumed, self.samples)
        self.cadence = choose_cadence(config, world.size, self.samples, origin.step)
        self._plan: sampling.SamplingPlan | sampling.CadenceSampling
        if self.cadence:
            self._plan = sampling.CadenceSampling(
                self.cadence, self.samples, seed, drop_last=drop_last, origin=origin
            )
        else:
            self._plan = sampling.SamplingPlan(
                self.samples, size, seed, drop_last=drop_last, origin=origin, shares=self.shares
            )

    def _add_validation_sets(self, task: tasks.Task, config: Config) -> None:
        valid = task.dataset("valid")
        for name, given in (valid if isinstance(valid, Mapping) else {"": valid}).items():
            label = f"validation {name}".strip()
            if given is not None and len(cast(Sized, sized := _sized(given, label, config.task))):
                chosen = sampling.spread(len(cast(Sized, sized)), config.train.eval_samples)
                self._valid[name] = sized, chosen
                self.datasets[label] = sized

    @property
    def full_batch(self) -> int:
        """The number of samples of a step under the latest plan, unless an epoch has fewer left."""
        if self.cadence:
            return self.cadence.samples(-1)
        return self._batch_size

    def batches(self, done: int, last_step: int) -> Iterator[Sequence[Any]]:
        """Yield this rank's micro-batches of each step after `done`, to `last_step`."""
        if self.stream:
            return self.stream.batches(range(done + 1, last_step + 1))
        return sampling.batches(self._train, self._plan, self._options, range(done, last_step))

    @property
    def validation_sets(self) -> list[str]:
        """The names of the validation sets that have samples; of an only one it is empty."""
        return list(self._valid)

    def name_micro_batch(self, step: int, number: int) -> str:
        """Return the name in errors of one of this rank's micro-batches in a step, 0 for the first.

        Steps are counted from 1.
        """
        if self.stream:
            return f"micro-batch {number + 1} of the training stream"
        options = self._options
        shape = options.rank, options.size, options.micro_batch_size
        return name_samples(self._at(step).micro_batches(step - 1, *shape)[number], options.data)

    def validation_batches(self, name: str) -> Iterator[tuple[str, Any]]:
        """Yield this rank's micro-batches of a validation set, each with its name in errors."""
        data = f"validation data {name}".strip()
        options = replace(self._options, data=data)
        for samples, batch in sampling.validation_batches(*self._valid[name], options):
            yield name_samples(samples, data), batch

    def first_validation_samples(self, name: str) -> list[Any]:
        """Return the samples of one micro-batch of a validation set, the same on all ranks.

        They are drawn from a copy: files that the dataset opens in workers stay closed here.
        """
        dataset, chosen = self._valid[name]
        copied = detached(dataset)
        return [copied[index] for index in chosen[: self._options.micro_batch_size]]

    def describe(self, steps: int) -> str:
        """Return the numbers of samples, and of epochs in so many steps, in one line."""
        sizes = {name: len(cast(Sized, dataset)) for name, dataset in self.datasets.items()}
        trained = sizes.pop("training", 0)
        valid = f"{sum(sizes.values()):,}" if sizes else "no"
        if self.stream:
            return f"data: a stream to train on, and {valid} validation samples"
        latest = self.cadence.latest.first if self.cadence else 0
        epochs = steps / self._plan.at(latest).steps_per_epoch
        counts = f"{trained:,} training and {valid} validation samples"
        by_first_plan = " of the first plan" if self.cadence else ""
        return f"data: {counts}; {steps} steps{by_first_plan} are {epochs:.3g} epochs"

    def _at(self, step: int) -> sampling.SamplingPlan:
        return self._plan.at(step - 1)

    def batch_size(self, step: int) -> int:
        """Return the number of samples of a step, 1 for the first, over all ranks."""
        return self.stream.length(step) if self.stream else self._at(step).length(step - 1)

    def own_samples(self, step: int) -> int:
        """Return the number of samples of this rank in a step, 1 for the first."""
        if self.stream:
            return self.stream.own_length(step)
        return self._at(step).share_length(step - 1, self._options.rank, self._options.size)

    def batch_counts(self, step: int) -> tuple[int, ...]:
        """Return the number of micro-batches of each rank in a step, 1 for the first.

        Not of a stream.
        """
        plan, size, most = self._at(step), self._options.size, self._options.micro_batch_size
        return tuple(plan.micro_batch_count(step - 1, rank, size, most) for rank in range(size))

    def position(self, step: int) -> tuple[int, int]:
        """Return the epoch and the offset of the first sample after a step, 1 for the first.

        Of a stream, whose state becomes that after the step: its epoch and batches.
        """
        if self.stream:
            return self.stream.settle(step)
        _, epoch, offset = self._plan.at(step).position(step)
        return epoch, offset


def _find_origin(resumed: FoundCheckpoint | None, samples: int) -> sampling.Position:
    """Return where a run continues: after the samples that it has seen, in their order."""
    if resumed is None:
        return sampling.BEGIN
    manifest = resumed.manifest
    if manifest.position is None:  # saved by an earlier version
        batch_size = manifest.config.get("train", {}).get("batch_size", 1)
        before = sampling.SamplingPlan(max(1, manifest.samples), batch_size, seed=0)
        return before.position(manifest.step)
    epoch, offset = manifest.position
    if offset >= samples:  # there are fewer than before
        epoch, offset = epoch + 1, 0
    return sampling.Position(manifest.step, epoch, offset)


def _sized(dataset: Any, name: str, task: str) -> Dataset[Any]:
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"the {name} data of --task {task} is a {type(dataset).__name__} without a length: "
            "give a dataset with __len__ and __getitem__, or for training an IterableDataset"
        )
    return cast(Dataset[Any], dataset)


def refusal_of_balance(config: Config, size: int, *, stream: bool) -> str:
    """Return why so many ranks must divide work equally, and the fix; "" if they need not."""
    batch_size, mode = config.train.batch_size, config.sync.mode
    if stream:
        return (
            "the training data is an IterableDataset, whose samples are divided equally; give a "
            "dataset with __len__ and __getitem__, or leave it out"
        )
    if config.balance.mode != "cadence":
        lacking = (
            f"--train.batch-size {batch_size} has no sample for each of the {size} ranks; give at "
            f"least {size}"
        )
        return lacking if batch_size < size else ""
    if mode != "every-step":
        return (
            f"--sync.mode {mode} exchanges parameters every few steps, and a cadence has one "
            "reduction of gradients in a step; leave one of the two out"
        )
    if batch_size != Config().train.batch_size:
        return (
            f"--train.batch-size {batch_size} is not used, since a step has whole micro-batches, as"
            " many as the speeds of ranks say; leave it out, and give --train.micro-batch-size"
        )
    return ""


def most_samples(config: Config, size: int) -> int | None:
    """Return the largest share of one of so many ranks; None if there is no limit.

    At stage 2 each micro-batch is reduced by itself: there are as many as with equal shares.
    """
    if config.zero.stage != 2:
        return None
    micro = config.train.micro_batch_size
    return -(-config.train.batch_size // size // micro) * micro


def choose_shares(config: Config, size: int, *, stream: bool) -> Shares | None:
    """Return the shares of ranks of unequal speed; None if they are equal, as on one rank.

    They are equal at first, or follow the speeds that options state. Raises ValueError for options
    that cannot be followed, of a cadence too, and for speeds of ranks that do not exist.
    """
    balance, limit = config.balance, config.balance.max_rank_grad_norm
    if limit is not None and config.zero.stage == 2:
        raise ValueError(
            f"--balance.max-rank-grad-norm {limit:g}: at --zero.stage 2, ranks reduce the gradient "
            "of each micro-batch by itself, so none has the whole of its own; give --zero.stage 1"
        )
    if balance.mode == "off":
        return None
    if refusal := refusal_of_balance(config, size, stream=stream):
        raise ValueError(f"--balance.mode {balance.mode}: {refusal}")
    try:
        hinted_speeds(size, balance.speeds)
    except ValueError as error:
        raise ValueError(f"--balance.speed {' '.join(balance.speed)}: {error}") from None
    if balance.mode == "cadence" or size == 1:
        return None
    return Shares(size, balance.speeds, most=most_samples(config, size))


def measures_speeds(config: Config, nodes: int, done: int) -> bool:
    """Return whether ranks compare their speeds after `done` steps, often enough to plan by them.

    Nodes that do not wait for each other do so in the steps of the warm-up alone.
    """
    left = config.sync.warmup - done
    return not config.sync.max_staleness or nodes == 1 or left >= CALIBRATION


def choose_cadence(config: Config, size: int, samples: int, first: int) -> Cadence | None:
    """Return the plans of a job with a cadence, from step `first` on, 0 for the first of a run.

    None in another mode. Raises ValueError for fewer samples than a step has.
    """
    balance = config.balance
    if balance.mode != "cadence":
        return None
    return Cadence(
        size,
        config.train.micro_batch_size,
        samples,
        first=first,
        target=balance.overhead_target,
        max_anchor=balance.max_anchor,
        # At stage 2 every micro-batch is reduced by itself, whatever the anchor.
        tunes=config.zero.stage != 2,
        hints=balance.speeds,
    )
