"""Batches of an IterableDataset, of which each sample goes to one rank.

Every worker of every rank is a reader: it iterates over a copy of the dataset, which decides how:

    whole stream   It yields all samples in every reader. Consecutive samples form the global
                   batches, the same on any number of ranks and workers. Reader w of a rank's W
                   makes this rank's part of batches w, w + W, ..., and drops other samples.
    own stream     It reads `id` or `seed` of `torch.utils.data.get_worker_info()` before its first
                   sample, and yields this reader's samples. It sees the readers of all ranks as
                   workers of one loader. The streams may differ in length, so ranks agree at each
                   batch on whether any has samples left.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, count, islice, repeat
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from mntrain.alike.sample_digest import (
    Content,
    FirstBatch,
    can_be_read_again,
    detached,
    ends,
    fields_of,
)
from mntrain.alike.values import Peers
from mntrain.data.cutting import cut, length_of
from mntrain.data.phase_notes import noted
from mntrain.data.randomness import SeededDraws, mixed_seed
from mntrain.data.sampling import LoaderOptions, as_it_is, cut_evenly, ignore_signals
from mntrain.data.source import Feed, Part, Pass, agreed, positions, rebuilt, share_of

# Of a reader: {"samples": number read, "state": the dataset's `state_dict()`, if it has one}.
ReaderState: TypeAlias = dict[str, Any]

# What a reader makes: this rank's part of a batch, with the position behind it, and a total of 0 at
# the end; the reader; and digests of its first batch, if it is compared.
Read: TypeAlias = tuple[Part, int, Content | None]

_SKIPPED_AT_ONCE = 1000  # samples


class _Draw(NamedTuple):
    """The request for a pass's next batch, which goes to a reader."""

    number: int  # of the pass
    seed: int
    done: int  # global batches of a whole stream that are skipped
    first: int  # the reader whose turn it is at the start
    start: dict[int, ReaderState]  # by reader; absent: the beginning
    compared: bool  # whether ranks compare the first batch


class StreamSource:
    """A DataLoader over an IterableDataset, rebuilt so that each sample goes to one rank."""

    def __init__(self, loader: DataLoader[Any], peers: Peers) -> None:
        init = loader.worker_init_fn
        self._peers, self._readers, self._number = peers, max(1, loader.num_workers), 0
        self._given, self._feed = loader, Feed()
        self._generator = torch.Generator()
        self._loader = rebuilt(
            loader,
            dataset=_Readers(loader, peers.rank, peers.size),
            batch_size=None,
            sampler=self._feed,
            collate_fn=as_it_is,
            worker_init_fn=partial(_init_worker, init) if init else None,
            generator=self._generator,
        )

    def parts(self, this: Pass) -> Iterator[Part]:
        """Yield this rank's part of each batch of a pass.

        With stand-ins, each batch of own streams is collective.
        """
        self._number += 1
        self._generator.manual_seed(this.rank_seed)
        places, start = self._places(this.stream)
        mine = places[self._peers.rank]
        compared = this.compare is not None
        draw = _Draw(self._number, this.seed, this.done, mine["next"], start, compared)
        again = repeat(draw._replace(start={}, compared=False))
        self._feed.items = chain(repeat(draw, self._readers), again)
        loaded: Iterator[Read] = iter(self._loader)
        head = next(loaded)
        if this.compare is not None:
            try:
                this.compare(self._first_batch(head, this.seed))
            except Exception:
                del loaded  # ends its workers, which the frame of this error would keep
                raise
        items = chain([head], loaded)
        if head[0].number is None:
            own = self._until_all_readers_end(items, mine)
            yield from agreed(own, self._peers, "apart", places) if this.stand_ins else own
            return
        for part, *_ in items:
            if not part.total:
                return
            if part.own or this.stand_ins:
                yield part

    def _places(self, stream: Any) -> tuple[list[dict[str, Any]], dict[int, ReaderState]]:
        """Return where the streams of each rank continue, and this rank's readers, but new ones."""
        begin = {"next": 0, "readers": [None] * self._readers}
        if stream is not None and "samples" in stream:  # all readers have one stream
            return [begin] * self._peers.size, dict.fromkeys(range(self._readers), stream)
        places = positions(stream, "apart", self._peers, begin)
        readers = places[self._peers.rank]["readers"]
        if len(readers) != self._readers:
            raise ValueError(
                f"the state is of {len(readers)} readers with a stream each, but here are "
                f"{self._readers}: resume with as many workers"
            )
        return places, {i: place for i, place in enumerate(readers) if place is not None}

    def _first_batch(self, head: Read, seed: int) -> FirstBatch:
        """Describe what a reader has read first. Reads of a stream of its own the head again.

        It is then the stream of rank 0's first reader that is read, on every rank.
        """
        part, _, content = head
        own_stream = part.number is None
        sizes: dict[str, object] = {
            "what each reader yields": "samples of its own" if own_stream else "all samples"
        }
        if not own_stream:
            sizes["the number of samples in a batch"] = part.total
        again = partial(self._head, seed) if can_be_read_again(self._given.dataset) else None
        if own_stream:
            content = again() if again else None
        return FirstBatch(sizes, None, content or {}, again, may_be_random=own_stream)

    def _head(self, seed: int) -> Content:
        """Read the first batch of a copy of the stream as its only reader, from its beginning."""
        try:
            readers = _Readers(self._given, 0, self._peers.size)
            readers.dataset = detached(readers.dataset)
            _, _, content = next(readers.read(_Draw(1, seed, 0, 0, {}, compared=True)))
            return content or {}
        except Exception as error:
            return fields_of([type(error).__name__])

    def _until_all_readers_end(
        self, items: Iterator[Read], begin: dict[str, Any]
    ) -> Iterator[Part]:
        """Yield parts with the place of this rank behind them."""
        ended, places = set(), [*begin["readers"]]
        for part, reader, _ in items:
            if part.total:
                places[reader] = part.stream
                following = (reader + 1) % self._readers
                yield part._replace(stream={"next": following, "readers": [*places]})
                continue
            ended.add(reader)
            if len(ended) == self._readers:
                return


class _Readers(Dataset[Read]):
    """A map-style dataset whose item for a draw is the next batch of a stream.

    A DataLoader sends the draws to its workers in turn; each worker has a copy of this object.
    """

    def __init__(self, loader: DataLoader[Any], rank: int, size: int) -> None:
        self.dataset, self._collate = loader.dataset, loader.collate_fn
        self._batch_size, self._drop_last = loader.batch_size, loader.drop_last
        self.rank, self.size = rank, size
        self.shards_itself = False  # in its worker_init_fn
        self._number = 0
        self._items: Iterator[Read] = iter(())

    def __getitem__(self, draw: _Draw) -> Read:
        if draw.number < self._number:
            raise RuntimeError("another pass over this stream has begun: finish it before the next")
        if draw.number > self._number:
            self._number, self._items = draw.number, self.read(draw)
        return next(self._items)

    def read(self, draw: _Draw) -> Iterator[Read]:
        """Yield the batches of this process's reader, and then its end without end."""
        worker = get_worker_info()
        turn, readers = (worker.id, worker.num_workers) if worker else (0, 1)
        index = turn if self.shards_itself else (turn + draw.first) % readers
        reader = _Reader(self, index, readers, draw.seed)
        if index in draw.start:
            reader.skip_to(draw.start[index])
        head = reader.take(1)
        own_stream = reader.was_asked
        size = self._batch_size or 1
        if own_stream:  # at least one sample of each batch is of this stream
            size = max(1, share_of(size, self.rank, self.size)[1].own)
        done = 0 if draw.start else draw.done
        compared = draw.compared
        for number in count(-done):
            samples, head = head + reader.take(size - len(head)), []
            if not samples or (self._drop_last and len(samples) < size):
                break
            if own_stream or (number >= 0 and number % readers == turn):
                part = self._make(samples, whole=own_stream)
                part = part._replace(
                    stream=reader.position(), number=None if own_stream else number + done
                )
                content, compared = fields_of(ends(samples)) if compared else None, False
                yield part, index, content
        yield from repeat((Part(None, 0, 0, number=None if own_stream else 0), index, None))

    def _make(self, samples: list[Any], *, whole: bool) -> Part:
        """Return this rank's part of the batch, or all of it."""
        batched = self._batch_size is not None
        total = len(samples) if batched else length_of(samples[0])
        rows, part = share_of(total, *((0, 1) if whole else (self.rank, self.size)))
        rows_of = samples[rows] if batched else cut(samples[0], rows)
        return part._replace(batch=self._collate(rows_of))


class _Reader:
    """A reader's stream, whose samples are drawn with seeded generators.

    To its dataset, it is the result of `get_worker_info`: a place among the readers of all ranks.
    """

    rng, worker_method = None, "multiprocessing"

    def __init__(self, readers: _Readers, index: int, of_rank: int, seed: int) -> None:
        self.dataset: Any = readers.dataset
        self.num_workers = readers.size * of_rank
        self._id = readers.rank * of_rank + index
        self._seed = (seed + self._id) % (1 << 63)
        self.was_asked, self.id_was_asked = readers.shards_itself, False
        self._draws = SeededDraws(seed)
        self._own_draws = SeededDraws(mixed_seed(seed, readers.rank, index))
        self._samples: Iterator[Any] | None = None
        self._read = 0  # samples

    @property
    def id(self) -> int:
        """Place among the readers of all ranks."""
        self.was_asked = self.id_was_asked = True
        return self._id

    @property
    def seed(self) -> int:
        """Seed that differs between readers."""
        self.was_asked = True
        return self._seed

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Let `get_worker_info` return this object."""
        module: Any = torch.utils.data._utils.worker
        before, module._worker_info = module._worker_info, self
        try:
            yield
        finally:
            module._worker_info = before

    def skip_to(self, place: ReaderState) -> None:
        """Continue where `position` was taken."""
        if place["state"] is not None:
            self.dataset.load_state_dict(place["state"])
            self._read = place["samples"]
        while self._read < place["samples"]:
            at_once = _SKIPPED_AT_ONCE if self._read else 1
            if not self.take(min(place["samples"] - self._read, at_once)):
                return

    def take(self, number: int) -> list[Any]:
        """Return the next samples: fewer than `number` at the end only.

        The first call takes one. Behind it, a stream of this reader's own draws with its own seed.
        """
        late = self._samples is not None and not self.was_asked
        with self._draws, self.shown():
            self._samples = iter(self.dataset) if self._samples is None else self._samples
            taken = list(islice(self._samples, number))
        if late and self.was_asked:
            raise RuntimeError(
                f"{type(self.dataset).__name__} read get_worker_info() after its first sample: "
                "read it before, so that each sample goes to one rank"
            )
        if self.was_asked:
            self._draws = self._own_draws
        self._read += len(taken)
        return taken

    def position(self) -> ReaderState:
        """Return where the stream continues."""
        state = getattr(self.dataset, "state_dict", None)
        return {"samples": self._read, "state": state() if state else None}


def _init_worker(init: Callable[[int], None], worker: int) -> None:
    """Call the loader's own `worker_init_fn` for this reader's place among those of all ranks."""
    real: Any = get_worker_info()
    readers: _Readers = real.dataset
    reader = _Reader(readers, worker, real.num_workers, real.seed)
    with reader.shown():
        init(readers.rank * real.num_workers + worker)
    readers.shards_itself = reader.id_was_asked  # its seed tells nothing of what is read


def stream_loader(
    dataset: IterableDataset[Any], options: LoaderOptions, batch_size: int, *, drop_last: bool
) -> DataLoader[Any]:
    """Return a loader of the global batches of a job's stream, for `World.shard`. Local.

    A rank's part of a batch is the list of its collated micro-batches. Workers live over epochs.
    """
    return DataLoader(
        dataset,
        batch_size=batch_size,
        drop_last=drop_last,
        num_workers=options.workers,
        multiprocessing_context=options.start_method if options.workers else None,
        persistent_workers=options.workers > 0,
        collate_fn=partial(_micro_batches, options),
        worker_init_fn=ignore_signals,
    )


def _micro_batches(options: LoaderOptions, samples: list[Any]) -> list[Any]:
    with noted(options.rank, f"collating {len(samples)} samples of the training stream"):
        collate = options.collate or default_collate
        return [collate(part) for part in cut_evenly(samples, options.micro_batch_size)]
