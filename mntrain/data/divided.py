"""Batches of ranks that have a part of the data each: of streams, and of loaders of their own."""

from collections.abc import Iterator
from itertools import count
from typing import Any, TypeAlias

from mntrain.data.source import Part, Pass, ShardContext, Source

# Of each rank: its samples in a batch, and where its stream continues; None if it has no more.
News: TypeAlias = list[tuple[int, Any] | None]


def until_all_end(parts: Iterator[Part], context: ShardContext) -> Iterator[tuple[Part, News]]:
    """Yield as many parts on every rank as the one with most has. Collective, by batch.

    The batches of all ranks together are a global batch. A rank that has no more gets its last
    batch as a stand-in, or that of another rank.
    """
    stand_in: Any = None
    for number in count():
        part = next(parts, None)
        everyone: News = context.gather(None if part is None else (part.own, part.stream))
        if not any(everyone):
            return
        if number == 0 and not all(everyone):
            donor = next(rank for rank, news in enumerate(everyone) if news)
            batch = part.batch if part is not None and context.rank == donor else None
            stand_in = context.gather(batch)[donor]
        if part is not None:
            stand_in = part.batch
        total = sum(news[0] for news in everyone if news)
        yield Part(stand_in, 0 if part is None else part.own, total), everyone


class DividedSource:
    """The loaders of ranks of which each gives its own part of the data.

    `source` has this rank's batches whole. A position holds those of all ranks, so a pass continues
    on as many.
    """

    def __init__(self, source: Source, context: ShardContext) -> None:
        self._source, self._context = source, context

    def parts(self, this: Pass) -> Iterator[Part]:
        """Yield this rank's batches of a pass. With stand-ins, each batch is collective."""
        size = self._context.size
        streams: list[Any] = [None] * size
        if this.stream is not None or this.done:
            streams = list((this.stream or {}).get("divided", []))
        if len(streams) != size:
            before = f"on {len(streams)} ranks" if streams else "without divided=True"
            raise ValueError(
                f"the state was taken {before}, but each of {size} ranks has data of its own here: "
                "resume with as many ranks and the same option"
            )
        own = this._replace(seed=this.rank_seed, stream=streams[self._context.rank], compare=None)
        if not this.stand_ins:
            for part in self._source.parts(own):
                yield part._replace(number=None)
            return
        for part, everyone in until_all_end(self._source.parts(own), self._context):
            streams = [n[1] if n else s for n, s in zip(everyone, streams, strict=True)]
            yield part._replace(stream={"divided": streams})
