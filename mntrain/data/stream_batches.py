"""The steps of a job over an IterableDataset: this rank's micro-batches of each global batch."""

from collections.abc import Callable, Iterator
from itertools import count, pairwise
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, default_collate

from mntrain.data.phase_notes import noted
from mntrain.data.randomness import mixed_seed
from mntrain.data.sampling import LoaderOptions, ignore_signals
from mntrain.data.source import Pass, ShardContext
from mntrain.data.streams import StreamSource
from zero.layout import split


class _MicroBatches:
    """Collates samples into the fewest micro-batches. Picklable."""

    def __init__(self, options: LoaderOptions) -> None:
        self._collate = options.collate or default_collate
        self._most, self._rank = options.micro_batch_size, options.rank

    def __call__(self, samples: list[Any]) -> list[Any]:
        bounds = split(len(samples), -(-len(samples) // self._most))
        with noted(self._rank, f"collating {len(samples)} samples of the training stream"):
            return [self._collate(samples[low:high]) for low, high in pairwise(bounds)]


class _Place(NamedTuple):
    """Position of a stream behind a step, and the samples of that step."""

    epoch: int
    batches: int  # of the epoch, so far
    stream: Any  # `mntrain.data.source.Part.stream`
    samples: int  # over all ranks
    own: int  # of this rank


class StreamBatches:
    """The global batches of a stream, step by step, over any number of epochs.

    Each sample goes to one rank (`mntrain.data.streams`). Checkpoints hold its state, which is that
    behind the step that `settle` has named. `gather` is collective: every rank's object, by rank.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        options: LoaderOptions,
        batch_size: int,
        seed: int,
        *,
        drop_last: bool,
        gather: Callable[[Any], list[Any]],
    ) -> None:
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            drop_last=drop_last,
            num_workers=options.workers,
            multiprocessing_context=options.start_method if options.workers else None,
            persistent_workers=options.workers > 0,  # over the epochs
            collate_fn=_MicroBatches(options),
            worker_init_fn=ignore_signals,
        )
        context = ShardContext(
            options.rank, options.size, gather, lambda *_: None, lambda drawn: None
        )
        self._source, self._seed, self._rank = (
            StreamSource(loader, context, None),
            seed,
            options.rank,
        )
        self._begin = _Place(0, 0, None, 0, 0)
        self._places: dict[int, _Place] = {}  # of the last two steps: the last one may fail
        self._settled: _Place = self._begin

    def batches(self, steps: range) -> Iterator[list[Any]]:
        """Yield this rank's micro-batches of each step, which are none if its share is empty.

        Collective for streams of which each reader has its own. Raises ValueError for an epoch
        without a sample.
        """
        places = self._parts()
        for step in steps:
            with noted(self._rank, f"reading the training stream in step {step}"):
                micro_batches, place = next(places)
            self._places = {step - 1: self._places.get(step - 1, self._begin), step: place}
            yield micro_batches

    def _parts(self) -> Iterator[tuple[list[Any], _Place]]:
        epoch, done, stream, *_ = self._begin
        for number in count(epoch):
            seed = mixed_seed(self._seed, number)
            this = Pass(mixed_seed(seed, self._rank), seed, done, stream, stand_ins=True)
            for part in self._source.parts(this):
                done += 1
                place = _Place(number, done, part.stream, part.total, part.own)
                yield part.batch if part.own else [], place
            if not done:
                raise ValueError("the training stream has no samples: give at least one")
            done, stream = 0, None

    def length(self, step: int) -> int:
        """Return the number of samples of one of the last two steps, over all ranks."""
        return self._places[step].samples

    def own_length(self, step: int) -> int:
        """Return the number of samples of this rank in one of the last two steps."""
        return self._places[step].own

    def settle(self, step: int) -> tuple[int, int]:
        """Let the state be that behind one of the last two steps; return its epoch and batches."""
        self._settled = self._places.get(step, self._begin)
        return self._settled.epoch, self._settled.batches

    def state_dict(self) -> dict[str, Any]:
        """Return the state behind the settled step."""
        return {
            "epoch": self._settled.epoch,
            "batches": self._settled.batches,
            "stream": self._settled.stream,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin behind the step of a state, on any number of ranks and workers.

        Unless each reader has a stream of its own: then on as many.
        """
        self._begin = self._settled = _Place(
            state["epoch"], state["batches"], state["stream"], 0, 0
        )
