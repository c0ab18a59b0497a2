"""Comparison of small values that all ranks must give alike."""

import hashlib
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Protocol

from mntrain.alike.naming import difference
from mntrain.errors import AgreedError

_SHOWN = 5  # names that the error about a difference lists


class Peers(Protocol):
    """Ranks that compare what they have, and the place of this one: of a world, or of MPI."""

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's object, by rank. Collective."""


def compare(ranks: Peers, values: Mapping[str, object], fix: str = "") -> None:
    """Raise AgreedError on all ranks unless they give equal values under each name. Collective.

    A digest travels first, and the values only if digests differ. The message has each value of the
    names that differ with its ranks, of lists the first items that differ, and then the `fix`.
    """
    if same_texts(ranks, values):
        return
    given = ranks.gather(values)
    names = dict.fromkeys(name for own in given for name in own)
    texts = [difference(name, [own.get(name, "nothing") for own in given]) for name in names]
    differences = [text for text in texts if text]
    if hidden := differences[_SHOWN:]:
        differences[_SHOWN:] = [f"{len(hidden)} more differ"]
    if differences:
        raise AgreedError("; ".join(differences) + (f": {fix}" if fix else ""), ranks.rank)


def same_texts(ranks: Peers, values: Mapping[str, object]) -> bool:
    """Return True if the texts (`repr`) of the values are the same on all ranks. Collective."""
    digest = hashlib.sha256(repr(sorted(values.items(), key=itemgetter(0))).encode()).digest()
    return len(set(ranks.gather(digest))) == 1
