"""Comparison of loaders over ranks, by their sizes and some samples."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from mntrain.alike.naming import naming
from mntrain.alike.sample_digest import Content, FirstBatch
from mntrain.alike.values import Peers, compare, same_texts
from mntrain.errors import AgreedError

_FIX = (
    "give world.shard the same loader over all samples on every rank, of which it hands out the "
    "rank's part, or divided=True if each rank's loader gives that part alone"
)
_READS = 8  # of samples that differ: a coin that is flipped once may not show
_SHOWN = 3  # fields


def compare_loaders(ranks: Peers, first: FirstBatch) -> None:
    """Raise AgreedError on all ranks unless their loaders have equal sizes and samples. Collective.

    Samples as in `compare_samples`.
    """
    _expect_divided(ranks, False)
    compare(ranks, first.sizes, _FIX)
    if not same_texts(ranks, {"indices": first.indices}):
        raise AgreedError(
            "the ranks drew different samples for one global batch: seed the sampler alike on all "
            "ranks, or give world.shard divided=True if each rank's loader gives its own part",
            ranks.rank,
        )
    compare_samples(ranks, first, "the first batch", _FIX)


def length_of_divided(ranks: Peers, loader: Iterable[Any]) -> int | None:
    """Return the number of batches of the longest of the ranks' own loaders. Collective.

    None if one has no length. Raises AgreedError on all ranks if others have not given divided.
    """
    _expect_divided(ranks, True)
    length = None
    with suppress(TypeError, NotImplementedError):
        length = len(loader)  # type: ignore[arg-type]
    lengths = ranks.gather(length)
    return None if None in lengths else max(lengths)


def _expect_divided(ranks: Peers, divided: bool) -> None:
    compare(ranks, {"divided of world.shard": divided}, "give the same on all ranks")


def compare_samples(ranks: Peers, first: FirstBatch, of: str, fix: str) -> None:
    """Raise AgreedError on all ranks unless their samples are equal. Collective.

    A digest travels first. If samples differ, they are read again on every rank: the fields that
    any rank then finds changed are random, and are not compared. If all are, the samples are equal
    where their indices are, and else the error says so.
    """
    if same_texts(ranks, first.content):
        return
    gathered: list[tuple[Content, set[str]]]
    gathered = ranks.gather((dict(first.content), _changing(first)))
    failures = {rank: text for rank, text in enumerate(ranks.gather(first.failure)) if text}
    if 0 < len(failures) < ranks.size:
        raise AgreedError(
            f"{naming('rank', failures)} cannot read samples of {of} that others can: "
            f"{next(iter(failures.values()))}",
            ranks.rank,
        )
    changing = set[str]().union(*(names for _, names in gathered))
    odd: dict[str, list[int]] = {}  # by field, the ranks that have another value than rank 0
    for name in dict.fromkeys(name for own, _ in gathered for name in own):
        values = [own.get(name) for own, _ in gathered]
        if others := [rank for rank, value in enumerate(values) if value != values[0]]:
            odd[name] = others
    if fixed := sorted(odd.keys() - changing):
        where = naming("rank", sorted(set[int]().union(*(odd[name] for name in fixed))))
        fields = [f" in {name}" for name in fixed if name]
        raise AgreedError(
            f"the samples of {of} on {where} differ from those on rank 0"
            f"{','.join(fields[:_SHOWN])}: {fix}",
            ranks.rank,
        )
    if odd and not first.may_be_random and set(first.content) <= changing:
        raise AgreedError(
            f"the samples of {of} differ between ranks, and also if a rank reads them "
            "again, so their order may differ: draw from the default generators of torch, Python "
            "or NumPy, which world.shard seeds alike on all ranks, or give divided=True if each "
            "rank's loader gives its own part",
            ranks.rank,
        )


def _changing(first: FirstBatch) -> set[str]:
    """Return the fields of samples that change when they are read again. Local."""
    if first.again is None:
        return set()
    reads = [first.again() for _ in range(_READS)]
    names = set[str]().union(*reads)
    return {name for name in names if any(r.get(name) != reads[0].get(name) for r in reads)}
