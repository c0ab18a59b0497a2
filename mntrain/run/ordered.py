"""Predictions of all ranks in the order of a loader."""

from array import array
from collections import Counter
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from mntrain.data.cutting import cut, join, length_of, map_columns
from mntrain.device import move
from mntrain.ranks import Ranks

_CPU = torch.device("cpu")


def gather_in_order(ranks: Ranks, record: "array[int] | None", predictions: Any) -> Any:
    """Return the predictions of a pass once each, in the order of the loader. Collective.

    `record` is that of the pass, as `ShardRegistry.latest`. See `World.gather_in_order`.
    """
    with ranks.agreement():
        own = _by_batch(record, predictions)
    everyone = [batch for of_rank in ranks.gather(own) for batch in of_rank]
    everyone.sort(key=itemgetter(0))  # of one batch, parts stay by rank
    with ranks.agreement():
        rows = Counter[int]()
        for number, _, part, _ in everyone:
            rows[number] += length_of(part)
        if not everyone:
            raise ValueError("no rank had a sample in the last pass over world.shard")
        if any(rows[number] != total for number, total, *_ in everyone):
            raise ValueError(
                "the ranks give predictions of other batches: let all ranks finish the same pass "
                "over world.shard before world.gather_in_order"
            )
    joined = join([part for _, _, part, _ in everyone])
    return move(joined, ranks.device if any(device for *_, device in everyone) else _CPU)


def _by_batch(record: "array[int] | None", predictions: Any) -> list[tuple[int, int, Any, bool]]:
    """Return of each batch that this rank had its number, its samples and the predictions. Local.

    And whether these were on a device. Raises ValueError if they are not of the batches.
    """
    batches = [
        (first + further, own, total)
        for first, count, own, total in zip(*[iter(record or ())] * 4, strict=True)
        for further in range(count)
    ]
    if record is None or any(number < 0 for number, *_ in batches):
        raise ValueError(
            "world.gather_in_order restores the order of the last pass over world.shard: there was "
            "none, or ranks read their data apart (divided=True, or a stream that reads "
            "get_worker_info), which have no common order: call world.gather"
        )
    counts = [count for _, count, _ in batches]
    fits, found = True, "a list"
    if not isinstance(predictions, list):
        ends = [*accumulate(counts, initial=0)]
        found = f"{length_of(predictions)} rows"
        fits = all(counts) and length_of(predictions) == ends[-1]
        predictions = [cut(predictions, slice(*pair)) for pair in pairwise(ends)]
    lengths = [
        length_of(rows) if count else 0 for rows, count in zip(predictions, counts, strict=False)
    ]
    if not fits or len(predictions) != len(counts) or lengths != counts:
        raise ValueError(
            f"the predictions ({found}) are not those of the last pass over world.shard, in which "
            f"this rank had {sum(counts)} samples in {len(counts)} batches, {counts.count(0)} of "
            "them stand-ins: give a list with the predictions of each batch, one row a sample, or "
            "one tensor of all rows if there are no stand-ins, as under torch.no_grad()"
        )
    return [
        (number, total, *_packed(rows))
        for (number, count, total), rows in zip(batches, predictions, strict=True)
        if count
    ]


def _packed(rows: Any) -> tuple[Any, bool]:
    """Return rows in memory of their own on the host, and whether any was on another device."""
    found = []

    def pack(column: Any) -> Any:
        if not isinstance(column, Tensor):
            return column
        found.append(column.device != _CPU)
        return column.detach().to(_CPU, copy=True, memory_format=torch.contiguous_format)

    return map_columns(rows, pack), any(found)
