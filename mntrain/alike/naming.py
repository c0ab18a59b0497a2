"""Words for ranks and names, and for values that differ between ranks."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

T = TypeVar("T")

_SHOWN = 5  # values of a name that the text about a difference lists


def naming(kind: str, values: Sequence[int]) -> str:
    """Return the kind and the numbers: "rank 3", "ranks 0 to 2, 5"."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    parts = [f"{r[0]} to {r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs]
    return f"{kind}{'s' * (len(values) > 1)} {', '.join(parts)}"


def first_names(names: Sequence[str], most: int) -> str:
    """Return the first names, and how many more there are: "a, b and 2 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def by_value(values: Mapping[int, T]) -> list[tuple[T, list[int]]]:
    """Return each different value, which may be unhashable, with its ranks, in their order."""
    groups: list[tuple[T, list[int]]] = []
    for rank in sorted(values):
        equal = next((ranks for known, ranks in groups if known == values[rank]), None)
        if equal is None:
            groups.append((values[rank], [rank]))
        else:
            equal.append(rank)
    return groups


def difference(name: str, values: Sequence[Any], hosts: Sequence[str] = ()) -> str:
    """Return which ranks have which value, by rank; empty if all values are equal.

    Of lists, the first items that differ. With `hosts`, by rank, the first host of each value.
    """
    groups = by_value(dict(enumerate(values)))
    if len(groups) == 1:
        return ""
    if all(isinstance(value, list) for value in values):
        items = zip_longest(*values, fillvalue="no more")
        return difference(name, next(row for row in items if any(row[0] != i for i in row)), hosts)
    shown = [
        f"{naming('rank', ranks)}{_place(ranks, hosts)} {'has' if len(ranks) == 1 else 'have'} "
        f"{value}"
        for value, ranks in groups
    ]
    if hidden := shown[_SHOWN:]:
        shown[_SHOWN:] = [f"others have {len(hidden)} more values"]
    return f"{name} differs between ranks: {', '.join(shown)}"


def _place(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    if not hosts:
        return ""
    host = hosts[ranks[0]]
    one = all(hosts[rank] == host for rank in ranks)
    return f" on {host}" if one else f" (the first on {host})"
