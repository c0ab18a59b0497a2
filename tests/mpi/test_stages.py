"""Every stage gives the weights of plain torch, wherever ranks sit and however shards are cut.

Every rank trains the oracle too. The whole product of what matters is too large to run: the grid
holds every pair of choices at least once.
"""

import copy
from itertools import combinations, product

import pytest
import torch
from models import Fickle, Lopsided, Mixed, Strided, Tied, Tiny, loss_at, net
from oracle import (
    ADAMW,
    EXACT,
    MAX_NORM,
    OWN,
    SGD,
    SHARED,
    STAGES,
    Alone,
    assert_parity,
    loss_of,
    mine,
    rows,
    samples,
)
from worlds import DEALT, EVERY_WORLD, RANKS

pytestmark = pytest.mark.mpi

STEPS = 3


def double(kind):
    def build():
        torch.manual_seed(4)
        return kind().double()

    return build


MODELS = {
    "tiny": double(Tiny),
    "lopsided": double(Lopsided),
    "mixed": lambda: Mixed(torch.float64, torch.float32),
    "tied": double(Tied),
    "fickle": double(Fickle),
    "strided": double(Strided),
}
OPTIMIZERS = {"AdamW": ADAMW, "SGD": SGD}
FACTORS = {
    # The one-level algorithms do not look at nodes: one layout is enough for them.
    "world": [p.values for p in EVERY_WORLD if p.values[0] in ("leader", "lanes")]
    + [("naive", None), ("flat", None)],
    "stage": STAGES,
    "model": list(MODELS),
    "micro_batches": [1, 2],
    "optimizer": list(OPTIMIZERS),
    "bucket_mb": [OWN, SHARED],
    "max_norm": [float("inf"), MAX_NORM],
}


def pairs_of(row):
    """The choices of a row, two by two."""
    return set(combinations(enumerate(row), 2))


def covering(factors):
    """Rows of choices that hold every pair of choices of two factors: greedily, so not many."""
    missing = {
        ((i, a), (j, b))
        for (i, these), (j, those) in combinations(enumerate(factors), 2)
        for a, b in product(range(len(these)), range(len(those)))
    }
    found = []
    while missing:
        row = dict(min(missing))
        for i, choices in enumerate(factors):
            if i not in row:
                gains = [
                    sum(tuple(sorted([(i, choice), other])) in missing for other in row.items())
                    for choice in range(len(choices))
                ]
                turn = len(found) % len(choices)  # among equals, not always the first
                order = [*range(turn, len(choices)), *range(turn)]
                row[i] = max(order, key=gains.__getitem__)
        indices = [row[i] for i in range(len(factors))]
        missing -= pairs_of(indices)
        found.append(tuple(these[i] for these, i in zip(factors, indices, strict=True)))
    return found


def with_every_choice(grid):
    """Rows of a grid that hold every choice at least once: greedily, so not many."""
    missing = {choice for row in grid for choice in enumerate(row)}
    found = []
    while missing:
        found.append(max(grid, key=lambda row: len(missing & set(enumerate(row)))))
        missing -= set(enumerate(found[-1]))
    return found


GRID = covering(list(FACTORS.values()))
QUICK = with_every_choice(GRID)


def title(row):
    (algorithm, layout), (stage, partition), *others = row
    return "-".join(map(str, [algorithm, layout or "one", stage, partition, *others]))


def test_the_grid_holds_every_pair_of_choices():
    held = set().union(*map(pairs_of, GRID))
    for (i, these), (j, those) in combinations(enumerate(FACTORS.values()), 2):
        assert held >= {((i, a), (j, b)) for a, b in product(these, those)}


def parts_of(batch, micro_batches):
    """Every rank's equal share of a batch, in micro-batches of unequal sizes."""
    shares = zip(*(column.chunk(RANKS) for column in batch), strict=True)
    if micro_batches == 1:
        return [[share] for share in shares]
    return [[rows(share, 0, 1), rows(share, 1, None)] for share in shares]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(r, id=title(r), marks=[] if r in QUICK else [pytest.mark.thorough])
        for r in GRID
    ],
)
def test_every_stage_equals_one_process(worlds, row):
    (algorithm, layout), (stage, partition), name, micro_batches, kind, bucket_mb, limit = row
    model = MODELS[name]()
    alone = Alone(model, OPTIMIZERS[kind], limit)
    tolerance = 3e-6 if name == "mixed" else EXACT
    world = worlds(algorithm, layout, bucket_mb)
    optimizer = world.optimizer(
        model, OPTIMIZERS[kind], stage=stage, partition=partition, max_grad_norm=limit
    )
    for step in range(STEPS):
        parts = parts_of(samples(12, seed=step), micro_batches)
        losses = [
            loss_at(alone.model, part, step, rank) * len(part[1]) / 12
            for rank, share in enumerate(parts)
            for part in share
        ]
        norm = alone.step(sum(losses))
        for part in parts[world.rank][:-1]:
            with optimizer.no_sync():
                optimizer.backward(loss_at(model, part, step, world.rank), len(part[1]))
        last = parts[world.rank][-1]
        optimizer.backward(loss_at(model, last, step, world.rank), len(last[1]))
        result = optimizer.step()
        optimizer.zero_grad()
        assert result.weight == 12
        assert result.grad_norm == pytest.approx(norm, rel=10 * tolerance)
        assert result.clip_coef == pytest.approx(min(1, limit / (norm + 1e-6)), rel=10 * tolerance)
        assert not result.skipped
    optimizer.close()
    assert_parity(world, model, alone, tolerance)


# The same bits at every stage.

SOME_WORLDS = [param for param in EVERY_WORLD if param.values[1] in (None, 2, *DEALT[-1:])]
some_worlds = pytest.mark.parametrize(("algorithm", "layout"), SOME_WORLDS)


class Bits:
    """Trains copies of one model in fp32, and keeps all that a step may decide."""

    def __init__(self, world, optimizer_class):
        self._world, self._class = world, optimizer_class

    def train(self, stage, micro_batches, partition="element"):
        model = net(torch.float32)
        optimizer = self._world.optimizer(
            model, self._class, stage=stage, partition=partition, max_grad_norm=MAX_NORM
        )
        results, weights = [], []
        for step in range(STEPS):
            share = mine(self._world, samples(12 * micro_batches, step, torch.float32))
            for turn in range(micro_batches):
                part = tuple(column.chunk(micro_batches)[turn] for column in share)
                if turn < micro_batches - 1:
                    with optimizer.no_sync():
                        loss_of(model, part).backward()
                else:
                    loss_of(model, part).backward()
            results.append(optimizer.step())
            optimizer.zero_grad()
            weights.append(copy.deepcopy(model.state_dict()))
        optimizer.close()
        assert all(result.clip_coef < 1 for result in results)
        return results, weights


def assert_same_bits(first, second):
    assert first[0] == second[0]
    for step, (ours, theirs) in enumerate(zip(first[1], second[1], strict=True)):
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), f"{name} in step {step}"


@some_worlds
def test_with_one_micro_batch_all_stages_give_the_same_bits(worlds, algorithm, layout):
    for bucket_mb, optimizer_class in ((SHARED, ADAMW), (OWN, SGD)):
        bits = Bits(worlds(algorithm, layout, bucket_mb), optimizer_class)
        first = bits.train(0, 1)
        assert_same_bits(bits.train(1, 1), first)
        assert_same_bits(bits.train(2, 1), first)


@some_worlds
def test_accumulated_stages_0_and_1_give_the_same_bits(worlds, algorithm, layout):
    bits = Bits(worlds(algorithm, layout), ADAMW)
    assert_same_bits(bits.train(1, 3), bits.train(0, 3))


@pytest.mark.parametrize(("algorithm", "layout"), EVERY_WORLD[-2:])
def test_stages_that_keep_parameters_whole_give_the_same_bits(worlds, algorithm, layout):
    bits = Bits(worlds(algorithm, layout), SGD)
    assert_same_bits(bits.train(2, 1, "parameter"), bits.train(1, 1, "parameter"))


def test_a_run_repeats_to_the_bit_at_every_stage(worlds):
    for stage, partition in STAGES:
        bits = Bits(worlds("lanes"), ADAMW)
        assert_same_bits(bits.train(stage, 2, partition), bits.train(stage, 2, partition))
