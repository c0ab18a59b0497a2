"""Parts of a loader's batches, which its sources yield pass by pass."""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise
from typing import Any, NamedTuple, TypeAlias, TypeGuard

from torch.utils.data import DataLoader

from mntrain.alike.sample_digest import FirstBatch
from mntrain.alike.values import Peers
from mntrain.balance.own_pace import BatchNumber
from mntrain.errors import RemoteRankError
from zero.collectives import AllRanksError
from zero.layout import split

# Of the 107 bytes of a socket's path, "/pymp-xxxxxxxx/listener-xxxxxxxx" of multiprocessing has 32.
_MOST_OF_FOLDER = 107 - 32


class Alone:
    """A rank that shares a loader with none."""

    rank, size = 0, 1

    def gather(self, value: Any) -> list[Any]:
        """Return the value in a list."""
        return [value]


# Of so many samples, a batch of a loader whose parts are not equal: the bounds of the ranks' parts,
# and the number of revisions of the parts before it. Local.
Divider: TypeAlias = Callable[[int, BatchNumber], tuple[Sequence[int], int]]


class Pass(NamedTuple):
    """One iteration over a loader, on one rank."""

    seed: int  # the same on all ranks
    rank_seed: int  # differs between ranks
    done: int  # batches to skip, of a pass that was begun before
    stream: Any  # where a stream continues; None: behind `done` batches
    stand_ins: bool = True  # whether a rank without samples gets some of another
    number: int = 0  # of the training passes of its loader
    compare: Callable[[FirstBatch], None] | None = None  # for the first batch; collective
    check: Callable[[int | None], None] | None = None  # for the digest of the last one skipped


class Part(NamedTuple):
    """This rank's part of a global batch, or its stand-in."""

    batch: Any
    own: int  # samples of this rank, 0 for a stand-in
    total: int  # samples of the global batch
    digest: int | None = None  # 16 bits of the samples' indices; the same on all ranks
    stream: Any = None  # where a stream continues behind this batch
    revision: int = 0  # number of revisions of the parts before it
    number: int | None = None  # of the global batch in its pass; None: ranks have batches apart
    short: bool = False  # whether a rank has no sample of it, so that this one gets a stand-in


Source: TypeAlias = Callable[[Pass], Iterator[Part]]


class Feed:
    """The sampler of a rebuilt loader; each pass sets its items."""

    items: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.items


def check_workers(workers: int) -> None:
    """Raise ValueError for workers whose sockets would have too long a path. Local.

    torch's workers hand over tensors by sockets in a folder of their own in the temporary one, and
    would end without a word to the loader.
    """
    folder = tempfile.gettempdir()
    if workers and len(os.fsencode(folder)) > _MOST_OF_FOLDER:
        raise ValueError(
            f"loader workers make sockets in the temporary folder {folder}, whose path has "
            f"{len(os.fsencode(folder))} bytes, and may have {_MOST_OF_FOLDER}: set TMPDIR to a "
            "shorter path, such as /tmp, or use no workers"
        )


def is_of_torch(loader: object) -> TypeGuard[DataLoader[Any]]:
    """Return whether a loader is of torch's own class, and none of its methods was replaced.

    Another one may change batches in any of them.
    """
    if type(loader) is not DataLoader:
        return False
    return not any(callable(getattr(DataLoader, name, None)) for name in vars(loader))


def rebuilt(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return a loader of the same dataset and settings, but for `changes` and its sampler.

    Raises ValueError as `check_workers`.
    """
    check_workers(loader.num_workers)
    kept = (
        *("dataset", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
        *("multiprocessing_context", "prefetch_factor", "persistent_workers"),
    )
    return DataLoader(**{name: getattr(loader, name) for name in kept} | changes)


def share_of(
    samples: int, rank: int, size: int, bounds: Sequence[int] | None = None
) -> tuple[slice, Part]:
    """Return a rank's rows of a batch, or the stand-in's, and its part, still without them.

    `bounds` are those of the ranks' parts; None makes these equal to within one.
    """
    if samples == 0:
        raise ValueError("the loader made a batch of no samples: leave it out")
    bounds = bounds or split(samples, size)
    start, stop = bounds[rank : rank + 2]
    part = Part(None, stop - start, samples, short=any(a == b for a, b in pairwise(bounds)))
    return (slice(start, stop) if start < stop else slice(0, 1)), part


def positions(state: Any, kind: str, peers: Peers, begin: Any = None) -> list[Any]:
    """Return where each rank continues, by a state of `agreed`; None: at `begin`.

    Raises ValueError for a state of another kind, or of another number of ranks.
    """
    if state is None:
        return [begin] * peers.size
    found = state.get(kind, [])
    if len(found) != peers.size:
        before = f"on {len(found)} ranks" if found else f"of data that was not {kind}"
        raise ValueError(
            f"the state was taken {before}, but each of {peers.size} ranks has data of its own "
            "here: resume with as many ranks and the same options"
        )
    return list(found)


def agreed(
    parts: Iterator[Part], peers: Peers, kind: str, positions: Sequence[Any]
) -> Iterator[Part]:
    """Yield as many parts on every rank as the one with most has. Collective, by batch.

    The batches of all ranks together are a global batch. A rank that has no more gets its last
    batch as a stand-in, or that of another rank. `positions` are where the ranks begin; each part
    has {kind: those behind it}. An error of this rank's data is raised when the others go on as if
    it had no more: they learn of it where the step ends.
    """
    stand_in: Any = None
    for number in count():
        error: Exception | None = None
        try:
            part = next(parts, None)
        except (AllRanksError, RemoteRankError):
            raise
        except Exception as raised:
            part, error = None, raised
        everyone = peers.gather(None if part is None else (part.own, part.stream))
        if not any(everyone):
            if error is not None:
                raise error
            return
        if number == 0 and not all(everyone):
            donor = next(rank for rank, news in enumerate(everyone) if news)
            batch = part.batch if part is not None and peers.rank == donor else None
            stand_in = peers.gather(batch)[donor]
        if error is not None:
            raise error
        if part is not None:
            stand_in = part.batch
        pairs = zip(everyone, positions, strict=True)
        positions = [news[1] if news else old for news, old in pairs]
        total = sum(news[0] for news in everyone if news)
        own, state = 0 if part is None else part.own, {kind: positions}
        yield Part(stand_in, own, total, stream=state, short=not all(everyone))


def divided_parts(source: Source, peers: Peers, this: Pass) -> Iterator[Part]:
    """Yield this rank's batches of a pass, where the loader of each rank has a part of the data.

    `source` has this rank's batches whole. Training is collective, by batch. A position holds those
    of all ranks, so a pass continues on as many.
    """
    state = {} if this.done and this.stream is None else this.stream
    streams = positions(state, "divided", peers)
    own = this._replace(seed=this.rank_seed, stream=streams[peers.rank], compare=None)
    parts = (part._replace(number=None) for part in source(own))
    yield from agreed(parts, peers, "divided", streams) if this.stand_ins else parts
