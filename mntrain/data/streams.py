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

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, count, islice, repeat, takewhile
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from mntrain.data.cutting import Lists, cut, length_of, share_of
from mntrain.data.divided import until_all_end
from mntrain.data.first_batch import Content, FirstBatch, can_be_read_again, ends
from mntrain.data.randomness import SeededDraws, mixed_seed
from mntrain.data.sample_digest import detached, fields_of
from mntrain.data.source import Part, Pass, ShardContext, rebuilt

# Of a reader: {"samples": number read, "state": the dataset's `state_dict()`, if it has one}.
Position: TypeAlias = dict[str, Any]

_SKIPPED_AT_ONCE = 1000  # samples


class _Item(NamedTuple):
    """A batch that a reader has made for its rank, or the end of its stream."""

    batch: Any
    own: int  # samples of this rank in it, 0 for a stand-in
    total: int  # samples of the global batch, 0 at the end; for an own stream as `own`
    reader: int
    own_stream: bool
    position: Position  # behind this batch
    number: int = 0  # of a whole stream's batch in its pass
    content: Content | None = None  # of the reader's first batch, if it is compared


class _Draw(NamedTuple):
    """The request for a pass's next batch."""

    number: int  # of the pass
    seed: int
    done: int  # global batches of a whole stream that are skipped
    first: int  # the reader whose turn it is at the start
    start: dict[int, Position]  # by reader; absent: the beginning
    compared: bool  # whether ranks compare the first batch


class StreamSource:
    """A DataLoader over an IterableDataset, rebuilt so that each sample goes to one rank."""

    def __init__(self, loader: DataLoader[Any], context: ShardContext, lists: Lists) -> None:
        init = loader.worker_init_fn
        self._context, self._readers, self._number = context, max(1, loader.num_workers), 0
        self._given, self._lists = loader, lists
        self._draws = _Draws()
        self._generator = torch.Generator()
        self._loader = rebuilt(
            loader,
            dataset=_Readers(loader, context.rank, context.size, lists),
            batch_size=None,
            sampler=self._draws,
            collate_fn=_unchanged,
            worker_init_fn=partial(_init_worker, init) if init else None,
            generator=self._generator,
        )

    def parts(self, this: Pass) -> Iterator[Part]:
        """Yield this rank's part of each batch of a pass.

        With stand-ins, each batch of own streams is collective.
        """
        self._number += 1
        self._generator.manual_seed(this.rank_seed)
        self._draws.draws = self._requests(this)
        loaded: Iterator[_Item] = iter(self._loader)
        head = next(loaded)
        if this.compare is not None:
            try:
                this.compare(self._first_batch(head, this))
            except Exception:
                del loaded  # ends its workers, which the frame of this error would keep
                raise
        items = chain([head], loaded)
        if head.own_stream:
            own = self._until_all_end(items)
            yield from self._agreed(own, this) if this.stand_ins else map(_own_part, own)
            return
        for item in takewhile(lambda item: item.total, items):
            if item.own or this.stand_ins:
                yield _part(item)

    def _requests(self, this: Pass) -> Iterator[_Draw]:
        """Yield draws without end; the first one of each reader says where it starts."""
        first, start, done = 0, {}, this.done
        if this.stream is None:
            pass
        elif "ranks" not in this.stream:
            start = dict.fromkeys(range(self._readers), this.stream)
        else:
            ranks = this.stream["ranks"]
            if len(ranks) != self._context.size or len(ranks[0]["readers"]) != self._readers:
                raise ValueError(
                    f"the state is of {len(ranks)} ranks with {len(ranks[0]['readers'])} readers "
                    f"of a stream each, but here are {self._context.size} with {self._readers}: "
                    "resume with as many ranks and workers"
                )
            mine = ranks[self._context.rank]
            first = mine["next"]
            start = {i: place for i, place in enumerate(mine["readers"]) if place is not None}
        draw = _Draw(self._number, this.seed, done, first, start, this.compare is not None)
        return chain(repeat(draw, self._readers), repeat(draw._replace(start={}, compared=False)))

    def _first_batch(self, head: _Item, this: Pass) -> FirstBatch:
        """Describe what a reader has read first. Reads of a stream of its own the head again.

        It is then the stream of rank 0's first reader that is read, on every rank.
        """
        kind = "samples of its own" if head.own_stream else "all samples"
        sizes: dict[str, object] = {"what each reader yields": kind}
        if not head.own_stream:
            sizes["the number of samples in a batch"] = head.total
        again = partial(self._head, this.seed) if can_be_read_again(self._given.dataset) else None
        content = head.content
        if head.own_stream or this.done or this.stream is not None:
            content = again() if again else None
        return FirstBatch(sizes, None, content or {}, again, may_be_random=head.own_stream)

    def _head(self, seed: int) -> Content:
        """Read the first batch of a copy of the stream as its only reader, from its beginning."""
        try:
            readers = _Readers(self._given, 0, self._context.size, self._lists)
            readers.dataset = detached(readers.dataset)
            draw = _Draw(1, seed, 0, 0, {}, compared=True)
            return next(readers.read(draw)).content or {}
        except Exception as error:
            return fields_of([type(error).__name__])

    def _until_all_end(self, items: Iterator[_Item]) -> Iterator[_Item]:
        ended = set()
        for item in items:
            if item.total:
                yield item
                continue
            ended.add(item.reader)
            if len(ended) == self._readers:
                return

    def _agreed(self, items: Iterator[_Item], this: Pass) -> Iterator[Part]:
        """Yield as many parts on every rank as the longest streams have. Collective."""
        unread = {"next": 0, "readers": [None] * self._readers}
        begin: list[Any] = [unread] * self._context.size
        ranks = [copy.deepcopy(place) for place in (this.stream or {"ranks": begin})["ranks"]]
        parts = (_own_part(i)._replace(stream=(i.reader, i.position)) for i in items)
        for part, everyone in until_all_end(parts, self._context):
            for place, news in zip(ranks, everyone, strict=True):
                if news:
                    _, (reader, place["readers"][reader]) = news
                    place["next"] = (reader + 1) % self._readers
            yield part._replace(stream={"ranks": ranks})


class _Draws:
    """The sampler of the rebuilt loader."""

    draws: Iterator[_Draw] = iter(())

    def __iter__(self) -> Iterator[_Draw]:
        return self.draws


class _Readers(Dataset[_Item]):
    """A map-style dataset whose item for a draw is the next batch of a stream.

    A DataLoader sends the draws to its workers in turn; each worker has a copy of this object.
    """

    def __init__(self, loader: DataLoader[Any], rank: int, size: int, lists: Lists) -> None:
        self.dataset, self._collate = loader.dataset, loader.collate_fn
        self._batch_size, self._drop_last = loader.batch_size, loader.drop_last
        self.rank, self.size, self._lists = rank, size, lists
        self.shards_itself = False  # in its worker_init_fn
        self._number = 0
        self._items: Iterator[_Item] = iter(())

    def __getitem__(self, draw: _Draw) -> _Item:
        if draw.number < self._number:
            raise RuntimeError("another pass over this stream has begun: finish it before the next")
        if draw.number > self._number:
            self._number, self._items = draw.number, self.read(draw)
        return next(self._items)

    def read(self, draw: _Draw) -> Iterator[_Item]:
        """Yield the batches of this process's reader, and then its end without end."""
        worker = get_worker_info()
        turn, readers = (worker.id, worker.num_workers) if worker else (0, 1)
        reader = turn if self.shards_itself else (turn + draw.first) % readers
        info = _ReaderInfo(self, reader, readers, draw.seed)
        stream = _Stream(self.dataset, info, draw)
        head = stream.take(1)
        own_stream = info.was_read
        size = self._batch_size or 1
        if own_stream:  # at least one sample of each batch is of this stream
            size = max(1, share_of(size, self.rank, self.size)[1])
        done = 0 if draw.start else draw.done
        compared = draw.compared
        for number in count(-done):
            samples, head = head + stream.take(size - len(head)), []
            if not samples or (self._drop_last and len(samples) < size):
                break
            if own_stream or (number >= 0 and number % readers == turn):
                batch, own, total = self._make(samples, whole=own_stream)
                content, compared = fields_of(ends(samples)) if compared else None, False
                place = stream.position()
                yield _Item(batch, own, total, reader, own_stream, place, number + done, content)
        yield from repeat(_Item(None, 0, 0, reader, own_stream, {}))

    def _make(self, samples: list[Any], *, whole: bool) -> tuple[Any, int, int]:
        """Return this rank's part of the batch or all of it, its samples, and their total."""
        batched = self._batch_size is not None
        total = len(samples) if batched else length_of(samples[0], self._lists)
        rows, own = (slice(0, total), total) if whole else share_of(total, self.rank, self.size)
        part = samples[rows] if batched else cut(samples[0], rows, self._lists)
        return self._collate(part), own, total


class _Stream:
    """The samples of a reader, drawn with seeded generators."""

    def __init__(self, dataset: Any, info: "_ReaderInfo", draw: _Draw) -> None:
        self._dataset, self._info = dataset, info
        self._draws = SeededDraws(draw.seed)
        self._samples: Iterator[Any] | None = None
        self._draws_own = False
        self._read = 0  # samples
        start = draw.start.get(info.reader)
        if start is None:
            return
        if start["state"] is not None:
            dataset.load_state_dict(start["state"])
            self._read = start["samples"]
        while self._read < start["samples"]:
            at_once = _SKIPPED_AT_ONCE if self._read else 1
            if not self.take(min(start["samples"] - self._read, at_once)):
                return

    def take(self, number: int) -> list[Any]:
        """Return the next samples: fewer than `number` at the end only.

        The first call takes one. Behind it, a stream of this reader's own draws with its own seed.
        """
        late = self._samples is not None and not self._info.was_read
        with self._draws, self._info.shown():
            self._samples = iter(self._dataset) if self._samples is None else self._samples
            taken = list(islice(self._samples, number))
        if late and self._info.was_read:
            raise RuntimeError(
                f"{type(self._dataset).__name__} read get_worker_info() after its first sample: "
                "read it before, so that each sample goes to one rank"
            )
        if self._info.was_read and not self._draws_own:
            self._draws, self._draws_own = SeededDraws(self._info.stream_seed), True
        self._read += len(taken)
        return taken

    def position(self) -> Position:
        """Return where the stream continues."""
        state = getattr(self._dataset, "state_dict", None)
        return {"samples": self._read, "state": state() if state else None}


class _ReaderInfo:
    """The result of `get_worker_info` in a reader: its place among those of all ranks."""

    rng, worker_method = None, "multiprocessing"

    def __init__(self, readers: _Readers, reader: int, of_rank: int, seed: int) -> None:
        self.reader, self.dataset = reader, readers.dataset
        self.num_workers = readers.size * of_rank
        self._id = readers.rank * of_rank + reader
        self._seed = (seed + self._id) % (1 << 63)
        self.stream_seed = mixed_seed(seed, readers.rank, reader)
        self.was_read, self.id_was_read = readers.shards_itself, False

    @property
    def id(self) -> int:
        """Place among the readers of all ranks."""
        self.was_read = self.id_was_read = True
        return self._id

    @property
    def seed(self) -> int:
        """Seed that differs between readers."""
        self.was_read = True
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


def _init_worker(init: Callable[[int], None], worker: int) -> None:
    """Call the loader's own `worker_init_fn` for this reader's place among those of all ranks."""
    real: Any = get_worker_info()
    readers: _Readers = real.dataset
    info = _ReaderInfo(readers, worker, real.num_workers, real.seed)
    with info.shown():
        init(readers.rank * real.num_workers + worker)
    readers.shards_itself = info.id_was_read  # its seed tells nothing of what is read


def _part(item: _Item) -> Part:
    return Part(item.batch, item.own, item.total, stream=item.position, number=item.number)


def _own_part(item: _Item) -> Part:
    return Part(item.batch, item.own, item.total, stream=item.position)


def _unchanged(item: _Item) -> _Item:
    return item
