"""Words for ranks and names, and for values that differ between ranks."""

from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

T = TypeVar("T")

_SHOWN = 5  # values of a name that the text about a difference lists


def naming(kind: str, numbers: Collection[int], hosts: Mapping[int, str] | None = None) -> str:
    """Return the kind and the numbers: "rank 3", "ranks 0 to 2, 5", "ranks 0 to 2 on a, 3 on b".

    `hosts` are those of ranks, as far as known.
    """
    by_host: dict[str, list[list[int]]] = {}  # runs of numbers
    for number in sorted(numbers):
        host = f" on {hosts[number]}" if hosts and number in hosts else ""
        runs = by_host.setdefault(host, [])
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [
        ", ".join(f"{r[0]} to {r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)
        + host
        for host, runs in by_host.items()
    ]
    return f"{kind}{'s' * (len(numbers) > 1)} {', '.join(parts)}"


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


def odd_ranks(values: Mapping[int, Any]) -> list[int]:
    """Return the ranks whose value is not the most common one, of values by rank.

    If two are equally common, that of the first rank counts as right.
    """
    groups = sorted(by_value(values), key=lambda group: -len(group[1]))
    return sorted(rank for _, ranks in groups[1:] for rank in ranks)


def difference(name: str, values: Sequence[Any], hosts: Mapping[int, str] | None = None) -> str:
    """Return which ranks, on which `hosts`, have which value, by rank; empty if all are equal.

    Of lists, the first items that differ.
    """
    groups = by_value(dict(enumerate(values)))
    if len(groups) == 1:
        return ""
    if all(isinstance(value, list) for value in values):
        items = zip_longest(*values, fillvalue="no more")
        return difference(name, next(row for row in items if any(row[0] != i for i in row)), hosts)
    shown = [
        f"{naming('rank', ranks, hosts)} {'has' if len(ranks) == 1 else 'have'} {value}"
        for value, ranks in groups
    ]
    if hidden := shown[_SHOWN:]:
        shown[_SHOWN:] = [f"others have {len(hidden)} more values"]
    return f"{name} differs between ranks: {', '.join(shown)}"
