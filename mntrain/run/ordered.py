"""Predictions of all ranks in the order of a loader."""

from collections import Counter
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from mntrain.data.cutting import cut, join, length_of, map_columns
from mntrain.data.source import PassRecord
from mntrain.device import move
from mntrain.ranks import Ranks

_CPU = torch.device("cpu")


def gather_in_order(ranks: Ranks, record: PassRecord | None, predictions: Any) -> Any:
    """Return the predictions of a pass once each, in the order of the loader. Collective.

    `record` is that of the pass. See `World.gather_in_order`.
    """
    with ranks.agreement():
        own = _by_batch(record, predictions)
    gathered = ranks.gather([(number, total, _packed(rows)) for number, total, rows in own])
    everyone = [batch for of_rank in gathered for batch in of_rank]
    everyone.sort(key=itemgetter(0))  # of one batch, parts stay by rank
    with ranks.agreement():
        _expect_whole([(number, total, length_of(rows)) for number, total, (rows, _) in everyone])
    joined = join([rows for _, _, (rows, _) in everyone])
    on_device = any(of_device for _, _, (_, of_device) in everyone)
    return move(joined, ranks.device if on_device else _CPU)


def _by_batch(record: PassRecord | None, predictions: Any) -> list[tuple[int, int, Any]]:
    """Return of each batch that this rank had its number, its samples and the predictions. Local.

    Raises ValueError if the predictions are not of the batches.
    """
    if record is None:
        raise ValueError(
            "world.gather_in_order follows a pass over world.shard, whose order it restores: "
            "iterate over one, or call world.gather"
        )
    if any(number is None for number, *_ in record):
        raise ValueError(
            "the last pass over world.shard was over data that ranks read apart (divided=True, or "
            "a stream that reads get_worker_info), which have no common order: call world.gather"
        )
    own = [(number, own, total) for number, own, total in record]
    if not isinstance(predictions, list):
        if not all(count for _, count, _ in own):
            raise ValueError(
                "the last pass over world.shard had stand-ins: give a list with the predictions of "
                "each batch, or make the pass under torch.no_grad()"
            )
        predictions = _divide(predictions, [count for _, count, _ in own])
    if len(predictions) != len(own):
        raise ValueError(
            f"{len(predictions)} entries of predictions for {len(own)} batches of the last pass "
            "over world.shard: give a list with one entry a batch, or one tensor with one row a "
            "sample"
        )
    made = []
    for (number, count, total), rows in zip(own, predictions, strict=True):
        if not count:  # a stand-in
            continue
        if (length := length_of(rows)) != count:
            raise ValueError(
                f"the predictions for a batch of {count} samples of this rank have {length} rows: "
                "give one row a sample"
            )
        assert number is not None
        made.append((number, total, rows))
    return made


def _divide(predictions: Any, counts: list[int]) -> list[Any]:
    """Cut predictions of all batches into those of each. Raises ValueError if they do not fit."""
    if (length := length_of(predictions)) != sum(counts):
        raise ValueError(
            f"the predictions have {length} rows for {sum(counts)} samples that this rank had in "
            "the last pass over world.shard: give one row a sample"
        )
    parts, start = [], 0
    for count in counts:
        parts.append(cut(predictions, slice(start, start + count)))
        start += count
    return parts


def _packed(rows: Any) -> tuple[Any, bool]:
    """Return rows in memory of their own on the host, and whether any was on another device."""
    found = []

    def pack(column: Any) -> Any:
        if not isinstance(column, Tensor):
            return column
        found.append(column.device != _CPU)
        return column.detach().to(_CPU, copy=True, memory_format=torch.contiguous_format)

    return map_columns(rows, pack, None), any(found)


def _expect_whole(batches: list[tuple[int, int, int]]) -> None:
    """Raise ValueError unless all samples of each batch are there: its number, total, and rows."""
    rows = Counter[int]()
    for number, _, length in batches:
        rows[number] += length
    if not batches:
        raise ValueError("no rank had a sample in the last pass over world.shard")
    if any(rows[number] != total for number, total, _ in batches):
        raise ValueError(
            "the ranks give predictions of other batches: let all ranks finish the same pass over "
            "world.shard before world.gather_in_order"
        )
