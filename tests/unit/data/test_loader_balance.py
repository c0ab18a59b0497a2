"""Loaders whose batches are divided by the speed of ranks, with clocks that tests set."""

import math
from itertools import chain

import pytest
import torch
from sharding import Clock, Log, balancing_of, in_turns, sharded
from torch.utils.data import DataLoader, TensorDataset

from mntrain.data.loader import Passes

SAMPLES, BATCH = 150, 6


def loader(kind, workers=0):
    data = TensorDataset(torch.arange(SAMPLES))
    made = DataLoader(data, BATCH, shuffle=True, num_workers=workers)
    return made if kind == "indexed" else CutLoader(made)


class CutLoader:
    """An iterable of whole batches, which ranks cut."""

    def __init__(self, made):
        self.made = made

    def __iter__(self):
        return (tuple(batch) for batch in self.made)


def balanced(rank, size, gather, clock, kind="cut", *, workers=0, balance=True, **options):
    """A rank's parts of a loader, and what it was told of them."""
    log, given = Log(), {"gather": gather}
    if balance:
        passes = Passes(balance=balancing_of(size, gather, clock, **options))
        given |= {"passes": passes, "balance": True}
    return sharded(loader(kind, workers), rank, size, log, **given), log


def parts_by_rank(costs, kind="indexed", *, passes=1, saves=False, rooms=(), **options):
    """Return the parts of each rank: for each pass a list of (samples, share).

    `costs` are seconds a sample. With `saves`, rank 0 does something else for a long time after
    every fifth batch. `rooms` are the factors by which the memory of each rank may grow.
    """

    def body(rank, gather):
        clock, taken = Clock(), []
        room = rooms[rank] if rooms else math.inf
        parts, log = balanced(rank, len(costs), gather, clock, kind, room=room, **options)
        for _ in range(passes):
            taken.append([])
            for (batch,) in parts:
                taken[-1].append((batch.tolist(), log.shares[-1]))
                clock.now += costs[rank] * log.shares[-1]
                if saves and rank == 0 and len(taken[-1]) % 5 == 0:
                    clock.now += 1000.0
        with torch.no_grad():
            seen = [sample for (batch,) in parts for sample in batch.tolist()]
        return taken, seen

    return in_turns(len(costs), body)


def whole(by_rank, number):
    """The samples of a pass in the order of batches, and the shares of each batch."""
    rows = list(zip(*(taken[number] for taken, _ in by_rank), strict=True))
    samples = [s for row in rows for part, share in row for s in part[:share]]
    return samples, [tuple(share for _, share in row) for row in rows]


@pytest.mark.parametrize(
    ("kind", "workers"),
    [("indexed", 0), ("cut", 0), pytest.param("indexed", 2, marks=pytest.mark.thorough)],
)
def test_parts_follow_speeds_and_the_order_of_samples_stays(kind, workers):
    warnings = []
    by_rank = parts_by_rank([1.0, 2.0], kind, passes=2, workers=workers, warnings=warnings)
    equal = parts_by_rank([1.0, 2.0], kind, passes=2, balance=False)
    for number in range(2):
        assert whole(by_rank, number)[0] == whole(equal, number)[0]
    _, first = whole(by_rank, 0)
    _, second = whole(by_rank, 1)
    assert first[:10] == [(3, 3)] * 10
    assert first[10 + 2 * workers :] == [(4, 2)] * (15 - 2 * workers)
    assert second == [(4, 2)] * 25
    named = "since batch 1, rank 1 on host1 takes 2.0 times as long for a sample as the other ranks"
    assert warnings == [f"{named} (median)"] * 2  # of both ranks


@pytest.mark.parametrize(
    ("rooms", "last"),
    [
        ((math.inf, math.inf), (4, 2)),
        ((1.4, math.inf), (4, 2)),  # 3 samples have fit, so 4.2 do
        ((1.3, 9.0), (3, 3)),
        ((0.5, 9.0), (3, 3)),  # what has fit fits again
    ],
)
def test_parts_grow_only_as_far_as_memory_may(rooms, last):
    _, shares = whole(parts_by_rank([1.0, 2.0], rooms=rooms), 0)
    assert shares[-1] == last


@pytest.mark.parametrize("saves", [False, True])
def test_equal_ranks_keep_equal_parts_and_evaluations_have_them_always(saves):
    warnings = []
    _, shares = whole(parts_by_rank([1.0, 1.0, 1.0], saves=saves, warnings=warnings), 0)
    assert shares == [(2, 2, 2)] * 25
    assert warnings == []
    seen = [seen for _, seen in parts_by_rank([1.0, 2.0, 1.0])]
    assert [len(samples) for samples in seen] == [50, 50, 50]
    assert sorted(chain(*seen)) == list(range(SAMPLES))


def test_ranks_that_begin_other_passes_are_told_so():
    def body(rank, gather):
        parts, _ = balanced(rank, 2, gather, Clock())
        if rank == 0:
            next(iter(parts))  # to look at a batch
        with pytest.raises(RuntimeError, match=r"other passes .*rank 0: pass 2, rank 1: pass 1"):
            list(parts)

    in_turns(2, body)
