"""The samples of a job: those of each step, and those of its evaluations."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from mntrain import tasks
from mntrain.alike.sample_digest import detached
from mntrain.balance.cadence import Cadence
from mntrain.balance.shares import Shares
from mntrain.checkpoint import FoundCheckpoint
from mntrain.data import sampling
from mntrain.data.loader import ShardedLoader
from mntrain.data.phase_notes import name_samples, noted
from mntrain.data.streams import stream_loader
from mntrain.options.config import Config, TrainConfig
from mntrain.world import World


class JobData:
    """The samples of a task: the batches of this rank, and those it validates on. Local.

    Both are those of `World.shard` over a DataLoader, as in a loop of one's own. Of a `stream`,
    checkpoints hold the state: the position behind the batch drawn last. Each save comes before the
    next one is drawn, and a step that fails is not saved.
    """

    def __init__(
        self, world: World, config: Config, task: tasks.Task, resumed: FoundCheckpoint | None
    ) -> None:
        train, valid = task.dataset("train"), task.dataset("valid")
        self._world = world
        self.stream = isinstance(train, IterableDataset)
        self._stream: ShardedLoader | None = None
        self.sizes = 0, 0
        """Samples of this rank in the step whose batch was drawn last, and of all."""
        self._chosen: list[list[int]] | None = None  # its micro-batches, by `batches_of_ranks`
        self.datasets: dict[str, Any] = {}  # whose samples are compared
        self._valid: dict[str, tuple[Dataset[Any], Sequence[int]]] = {}  # with the samples used
        self._options = sampling.LoaderOptions(
            rank=world.rank,
            micro_batch_size=config.train.micro_batch_size,
            workers=config.data.workers,
            start_method=config.data.worker_start,
            collate=task.collate,
        )
        size, seed, drop_last = config.train.batch_size, config.run.seed, config.data.drop_last
        if isinstance(train, IterableDataset):
            loader = stream_loader(train, self._options, size, drop_last=drop_last)
            self._stream = self._shard(loader, seed, train=True)
        else:
            self.datasets["training"] = _sized(train, "training", config.task)
        for name, given in (valid if isinstance(valid, Mapping) else {"": valid}).items():
            label = f"validation {name}".strip()
            if given is not None and (count := len(_sized(given, label, config.task))):
                self._valid[name] = given, sampling.spread(count, config.train.eval_samples)
                self.datasets[label] = given
        self.samples = 0 if self.stream else len(self.datasets["training"])  # of an epoch
        origin = _find_origin(resumed, self.samples)
        samples = None if self.stream else self.samples
        self.division = choose_division(config, world.size, samples, origin.step)
        self._order: sampling.SampleOrder | sampling.CadenceSampling
        if isinstance(self.division, Cadence):
            self._order = sampling.CadenceSampling(
                self.division, self.samples, seed, drop_last=drop_last, origin=origin
            )
        elif not self.stream:
            self._order = sampling.SampleOrder(
                self.samples, size, seed, drop_last=drop_last, origin=origin, shares=self.division
            )

    def _shard(self, loader: Any, seed: int, **options: Any) -> ShardedLoader:
        """Return this rank's part of a loader, whose data `compare_task` compares."""
        shard = self._world.shard(loader, seed, **options)
        shard.assume_compared()
        return shard

    def batches(self, done: int, last_step: int) -> Generator[Sequence[Any]]:
        """Yield this rank's micro-batches of each step after `done`, to `last_step`.

        They are none if the rank has no sample. Close it to end the workers. Collective, by step,
        for streams of which each reader has its own. With a cadence, `world.batch_counts` is that
        of the step. Raises ValueError for an epoch of a stream without a sample.
        """
        if self._stream is not None:
            shard, batches = self._stream, _endless(self._stream)
        else:  # whose samples are noted where they are loaded
            train, steps = self.datasets["training"], range(done, last_step)
            loader = sampling.step_loader(train, self._order, self._options, steps)
            divider = partial(self.division.divide, done=done) if self.division else False
            shard = self._shard(loader, self._order.seed, train=True, balance=divider)
            batches = iter(shard)
        for step in range(done + 1, last_step + 1):
            reading = noted(self._options.rank, f"reading the training stream in step {step}")
            with reading if self.stream else nullcontext():
                batch = next(batches)
            self.sizes = shard.sizes
            if isinstance(self.division, Cadence):
                self._world.batch_counts = self.batch_counts(step)
            yield batch if self.sizes[0] else []

    def steps(self, train: TrainConfig) -> int:
        """Return the number of steps of the run.

        Raises ValueError for --train.epochs of data whose passes are of unknown numbers of steps.
        """
        if train.epochs is None:
            assert train.steps is not None, "the options have one of both"
            return train.steps
        if self.stream:
            reason = "the training data is an IterableDataset, whose samples are not counted before"
        elif isinstance(self._order, sampling.CadenceSampling):
            reason = "with --balance.mode cadence, the speeds of ranks decide the size of a batch"
        else:
            return self._order.steps_until(train.epochs)
        raise ValueError(f"--train.epochs {train.epochs}: {reason}; give --train.steps")

    def batches_of_ranks(
        self,
        ranks: int,
        steps: int,
        reorder: Callable[[list[list[int]]], list[list[int]]] | None = None,
    ) -> Generator[Sequence[Any]]:
        """Yield the micro-batches of all of so many ranks in each of the first steps. Local.

        `reorder` puts them, as lists of samples, in another order, or divides them in another way.
        Not of a stream.
        """
        order, most = self._at(1), self._options.micro_batch_size
        train = self.datasets["training"]
        for step in range(steps):
            parts = [p for r in range(ranks) for p in order.micro_batches(step, r, ranks, most)]
            dataset = sampling.SeededDataset(train, order.seed, self._options)
            self.sizes = (sum(map(len, parts)),) * 2
            self._chosen = chosen = reorder(parts) if reorder else parts
            yield [dataset.micro_batch([(step, sample) for sample in p]) for p in chosen]

    @property
    def validation_sets(self) -> list[str]:
        """The names of the validation sets that have samples; of an only one it is empty."""
        return list(self._valid)

    def name_micro_batch(self, step: int, number: int) -> str:
        """Return the name in errors of a micro-batch in a step, 0 for the first.

        Of this rank, or of those that `batches_of_ranks` has yielded last. Steps are counted from
        1.
        """
        if self.stream:
            return f"micro-batch {number + 1} of the training stream"
        chosen = self._chosen
        if chosen is None:
            shape = self._world.rank, self._world.size, self._options.micro_batch_size
            chosen = self._at(step).micro_batches(step - 1, *shape)
        return name_samples(chosen[number], self._options.data)

    def validation_batches(self, name: str) -> Iterator[tuple[str, Any]]:
        """Yield this rank's micro-batches of a validation set, each with its name in errors."""
        (dataset, chosen), world = self._valid[name], self._world
        data = f"validation data {name}".strip()
        options, most = replace(self._options, data=data), self._options.micro_batch_size
        order = sampling.SampleOrder(len(chosen), world.size * most, seed=0, order=chosen)
        steps = range(order.steps_per_epoch)
        loader = sampling.step_loader(dataset, order, options, steps)
        shard = self._shard(loader, 0, train=False)
        for step, batches in enumerate(shard):
            samples = order.share(step, world.rank, world.size).tolist()
            yield name_samples(samples, data), batches[0]

    def first_validation_samples(self, name: str) -> list[Any]:
        """Return the samples of one micro-batch of a validation set, the same on all ranks.

        They are drawn from a copy: files that the dataset opens in workers stay closed here.
        """
        dataset, chosen = self._valid[name]
        copied = detached(dataset)
        return [copied[index] for index in chosen[: self._options.micro_batch_size]]

    def describe(self, steps: int) -> str:
        """Return the numbers of samples, and of epochs in so many equal steps, in one line."""
        valid = sum(len(self.datasets[f"validation {name}".strip()]) for name in self._valid)
        told = f"{valid or 'no':{',' if valid else ''}} validation samples"
        if self.stream:
            return f"data: a stream to train on, and {told}"
        told = f"data: {self.samples:,} training and {told}"
        if isinstance(self._order, sampling.CadenceSampling):
            return told
        return f"{told}; {steps} steps are {steps / self._order.steps_per_epoch:.3g} epochs"

    def _at(self, step: int) -> sampling.SampleOrder:
        return self._order.at(step - 1)

    def batch_counts(self, step: int) -> tuple[int, ...]:
        """Return the number of micro-batches of each rank in a step, 1 for the first.

        Not of a stream.
        """
        size, most = self._world.size, self._options.micro_batch_size
        bounds = (self._at(step).share_bounds(step - 1, rank, size) for rank in range(size))
        return tuple(-(-(stop - start) // most) for _, start, stop in bounds)

    def position(self, step: int) -> tuple[int, int]:
        """Return the epoch and the offset of the first sample after a step, 1 for the first.

        Of a stream its epoch and batches, behind the batch drawn last.
        """
        if self._stream is not None:
            state = self._stream.position
            return state["epoch"], state["batches"]
        _, epoch, offset = self._order.at(step).position(step)
        return epoch, offset

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the stream behind the batch drawn last, as that of the shard."""
        assert self._stream is not None, "other data have no state"
        return self._stream.position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin behind the step of a state, as `ShardedLoader.load_state_dict`."""
        assert self._stream is not None, "other data have no state"
        self._stream.load_state_dict(state)


def _endless(shard: ShardedLoader) -> Iterator[Any]:
    """Yield the batches of pass after pass."""
    while True:
        drawn = shard.position["batches"] > 0  # before this job
        for batch in shard:
            drawn = True
            yield batch
        if not drawn:
            raise ValueError("the training stream has no samples: give at least one")


def _find_origin(resumed: FoundCheckpoint | None, samples: int) -> sampling.Position:
    """Return where a run continues: after the samples that it has seen, in their order.

    After a checkpoint of an earlier version, which had another order, an epoch begins.
    """
    if resumed is None:
        return sampling.BEGIN
    epoch, offset = resumed.manifest.position or (0, 0)
    if offset >= samples:  # there are fewer than before
        epoch, offset = epoch + 1, 0
    return sampling.Position(resumed.manifest.step, epoch, offset)


def _sized(dataset: Any, name: str, task: str) -> Any:
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"the {name} data of --task {task} is a {type(dataset).__name__} without a length: "
            "give a dataset with __len__ and __getitem__, or for training an IterableDataset"
        )
    return dataset


def choose_division(
    config: Config, size: int, samples: int | None, first: int = 0
) -> Shares | Cadence | None:
    """Return how work is divided by the speeds of ranks; None if equally, as on one rank.

    `samples` are those of an epoch, None of a stream, and `first` is the first step, 0 that of a
    run. Raises ValueError for options that cannot be followed, and for too few samples.
    """
    balance, train = config.balance, config.train
    if balance.max_rank_grad_norm is not None and config.zero.stage == 2:
        raise ValueError(
            f"--balance.max-rank-grad-norm {balance.max_rank_grad_norm:g}: at --zero.stage 2, "
            "ranks reduce the gradient of each micro-batch by itself, so none has the whole of its "
            "own; give --zero.stage 1"
        )
    if balance.mode == "off":
        return None
    if refusal := _refusal_of_balance(config, size, stream=samples is None):
        raise ValueError(f"--balance.mode {balance.mode}: {refusal}")
    if unknown := [rank for rank in balance.speeds if rank >= size]:
        raise ValueError(
            f"--balance.speed {' '.join(balance.speed)}: there is no rank {unknown[0]}; give ranks "
            f"from 0 to {size - 1}"
        )
    hints = tuple(balance.speeds.get(rank, 1.0) for rank in range(size)) if balance.speed else None
    micro, stage_2 = train.micro_batch_size, config.zero.stage == 2
    if balance.mode == "throughput":
        # At stage 2 each micro-batch is reduced by itself: there are as many as of equal shares.
        most = -(-train.batch_size // size // micro) * micro if stage_2 else None
        return Shares(size, train.batch_size, hints, first=first, most=most) if size > 1 else None
    return Cadence(
        size,
        micro,
        samples or 0,
        hints,
        first=first,
        target=balance.overhead_target,
        max_anchor=balance.max_anchor,
        tunes=not stage_2,  # where every micro-batch is reduced, whatever the anchor
    )


def _refusal_of_balance(config: Config, size: int, *, stream: bool) -> str:
    """Return why the balance mode cannot be followed, and the fix; "" if it can be."""
    batch_size, mode = config.train.batch_size, config.sync.mode
    if stream:
        return (
            "the training data is an IterableDataset, whose samples are divided equally; give a "
            "dataset with __len__ and __getitem__, or leave it out"
        )
    if config.balance.mode == "throughput":
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
