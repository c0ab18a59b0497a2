"""Comparison of the ranks' data: equal where each has all of it, or divided on all of them."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from mntrain.checks.finding import naming
from mntrain.data.sample_digest import Content, FirstBatch
from mntrain.equal_values import expect_same, same_digests
from mntrain.errors import AgreedError

FIX = (
    "give world.shard the same loader over all samples on every rank, of which it hands out the "
    "rank's part, or divided=True if each rank's loader gives that part alone"
)
_READS = 8  # of samples that differ: a coin that is flipped once may not show
_SHOWN = 3  # fields


class Gathering(Protocol):
    """The ranks of a job, as far as loaders are compared."""

    rank: int

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's object, by rank. Collective."""


def compare_loaders(ranks: Gathering, first: FirstBatch) -> None:
    """Raise AgreedError on all ranks unless their loaders have equal sizes and samples. Collective.

    Samples as in `compare_samples`.
    """
    gathered = _expect_divided(ranks, False, (first.sizes, first.indices))
    expect_same([sizes for sizes, _ in gathered], ranks.rank, FIX)
    if len({indices for _, indices in gathered}) > 1:
        raise AgreedError(
            "the ranks drew different samples for one global batch: seed the sampler alike on all "
            "ranks, or give world.shard divided=True if each rank's loader gives its own part",
            ranks.rank,
        )
    compare_samples(ranks, first, "the first batch", FIX)


def compare_samples(ranks: Gathering, first: FirstBatch, of: str, fix: str) -> None:
    """Raise AgreedError on all ranks unless their samples are equal. Collective.

    A digest travels first. If samples differ, they are read again on every rank: the fields that
    any rank then finds changed are random, and are not compared. If all are, the samples are equal
    where their indices are, and else the error says so.
    """
    if same_digests(ranks.gather, first.content):
        return
    content: Sequence[Content] = ranks.gather(dict(first.content))
    differing = {name for name in set[str]().union(*content) if _ranks_that_differ(content, {name})}
    if not differing:
        return
    changing = set[str]().union(*ranks.gather(_changing(first)))
    if differing <= changing and (first.may_be_random or not set(first.content) <= changing):
        return
    if differing <= changing:
        raise AgreedError(
            f"the samples of {of} differ between ranks, and also if a rank reads them "
            "again, so their order may differ: draw from the default generators of torch, Python "
            "or NumPy, which world.shard seeds alike on all ranks, or give divided=True if each "
            "rank's loader gives its own part",
            ranks.rank,
        )
    fields = [f" in {name}" for name in sorted(differing - changing) if name]
    where = naming("rank", _ranks_that_differ(content, differing - changing))
    raise AgreedError(
        f"the samples of {of} on {where} differ from those on rank 0{','.join(fields[:_SHOWN])}: "
        f"{fix}",
        ranks.rank,
    )


def length_of_divided(ranks: Gathering, loader: Iterable[Any]) -> int | None:
    """Return the number of batches of the longest of the ranks' own loaders. Collective.

    None if one has no length. Raises AgreedError on all ranks if others have not given divided.
    """
    length = None
    with suppress(TypeError, NotImplementedError):
        length = len(loader)  # type: ignore[arg-type]
    lengths = _expect_divided(ranks, True, length)
    return None if None in lengths else max(lengths)


def _expect_divided(ranks: Gathering, divided: bool, value: Any) -> list[Any]:
    """Gather values. Raises AgreedError on all ranks unless these give the same `divided`."""
    gathered = ranks.gather((divided, value))
    given = [{"divided of world.shard": each} for each, _ in gathered]
    expect_same(given, ranks.rank, "give the same on all ranks")
    return [each for _, each in gathered]


def _changing(first: FirstBatch) -> set[str]:
    """Return the fields of samples that change when they are read again. Local."""
    read: Callable[[], Content] | None = first.again
    if read is None:
        return set()
    reads = [read() for _ in range(_READS)]
    return {
        name
        for name in set[str]().union(*reads)
        if any(other.get(name) != reads[0].get(name) for other in reads)
    }


def _ranks_that_differ(content: Sequence[Content], names: set[str]) -> list[int]:
    """Return the ranks that have other samples than rank 0 in any of these fields."""
    return [
        rank
        for rank, own in enumerate(content)
        if any(own.get(name) != content[0].get(name) for name in names)
    ]
