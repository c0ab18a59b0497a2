"""Every stage gives the weights of plain torch, wherever ranks sit and however shards are cut.

Every rank trains the oracle too. The whole product of what matters is too large to run: the grid
holds every pair of choices at least once. Without --all, as few of its rows run as have every
choice.
"""

import random
from contextlib import nullcontext
from itertools import combinations, cycle, product

import pytest
from models import MODELS, loss_at
from oracle import (
    ADAMW,
    ALGORITHMS,
    EXACT,
    MAX_NORM,
    OWN,
    SGD,
    SHARED,
    STAGES,
    assert_same_weights,
    rows,
    samples,
    train_in_fp32,
)
from worlds import DEALT, EVERY_WORLD, RANKS

pytestmark = pytest.mark.simulated

STEPS = 3


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
    draw, found = random.Random(1), []
    choices = [range(len(these)) for these in factors]
    missing = {
        ((i, a), (j, b))
        for (i, these), (j, those) in combinations(enumerate(choices), 2)
        for a, b in product(these, those)
    }
    while missing:
        needed = dict(min(missing))
        rows = [
            [needed.get(i, draw.choice(these)) for i, these in enumerate(choices)]
            for _ in range(50)
        ]
        best = max(rows, key=lambda row: len(missing & pairs_of(row)))
        missing -= pairs_of(best)
        found.append(tuple(these[i] for these, i in zip(factors, best, strict=True)))
    return found


GRID = covering(list(FACTORS.values()))


def title(row):
    (algorithm, layout), (stage, partition), *others = row
    return "-".join(map(str, [algorithm, layout or "one", stage, partition, *others]))


def parts_of(batch, micro_batches):
    """Every rank's equal share of a batch, in micro-batches of unequal sizes."""
    shares = zip(*(column.chunk(RANKS) for column in batch), strict=True)
    if micro_batches == 1:
        return [[share] for share in shares]
    return [[rows(share, 0, 1), rows(share, 1, None)] for share in shares]


@pytest.mark.parametrize(
    ("where", "mode", "name", "micro_batches", "kind", "bucket_mb", "limit"),
    GRID,
    ids=map(title, GRID),
)
def test_every_stage_equals_one_process(
    worlds, pair, where, mode, name, *, micro_batches, kind, bucket_mb, limit
):
    world, (stage, partition) = worlds(*where, bucket_mb), mode
    tolerance = 3e-6 if name == "mixed" else EXACT
    options = {"stage": stage, "partition": partition, "max_grad_norm": limit}
    both = pair(MODELS[name](), OPTIMIZERS[kind], world=world, overlap_forward=False, **options)
    for step in range(STEPS):
        parts = parts_of(samples(12, seed=step), micro_batches)
        losses = [
            loss_at(both.alone.model, part, step, rank) * len(part[1]) / 12
            for rank, share in enumerate(parts)
            for part in share
        ]
        sum(losses).backward()
        *first, last = parts[world.rank]
        for part in (*first, last):
            with nullcontext() if part is last else both.optimizer.no_sync():
                loss = loss_at(both.model, part, step, world.rank)
                both.optimizer.backward(loss, len(part[1]))
        result, norm = both.update()
        assert result.weight == 12
        assert result.grad_norm == pytest.approx(norm, rel=10 * tolerance)
        assert result.clip_coef == pytest.approx(min(1, limit / (norm + 1e-6)), rel=10 * tolerance)
        assert not result.skipped
    both.check(tolerance)


# The same bits at every stage.

SOME_WORLDS = [param for param in EVERY_WORLD if param.values[1] in (None, 2, *DEALT[-1:])]
some_worlds = pytest.mark.parametrize(("algorithm", "layout"), SOME_WORLDS)


def train(world, kind, *args, **options):
    found = train_in_fp32(world, kind, *args, max_grad_norm=MAX_NORM, **options)
    assert all(result.clip_coef < 1 for result in found[0])
    return found


def assert_same_bits(first, second):
    assert first[0] == second[0]
    assert_same_weights(first, second)


@some_worlds
def test_with_one_micro_batch_all_stages_give_the_same_bits(worlds, algorithm, layout):
    for bucket_mb, kind in ((SHARED, ADAMW), (OWN, SGD)):
        world = worlds(algorithm, layout, bucket_mb)
        first = train(world, kind, stage=0)
        assert_same_bits(train(world, kind, stage=1), first)
        assert_same_bits(train(world, kind, stage=2), first)


@some_worlds
def test_accumulated_stages_0_and_1_give_the_same_bits(worlds, algorithm, layout):
    world = worlds(algorithm, layout)
    assert_same_bits(train(world, ADAMW, 3, stage=1), train(world, ADAMW, 3, stage=0))


@pytest.mark.parametrize(("algorithm", "layout"), EVERY_WORLD[-2:])
def test_stages_that_keep_parameters_whole_give_the_same_bits(worlds, algorithm, layout):
    first, second = (
        train(worlds(algorithm, layout), SGD, stage=stage, partition="parameter")
        for stage in (1, 2)
    )
    assert_same_bits(first, second)


def test_a_run_repeats_to_the_bit_at_every_stage(worlds):
    for (stage, partition), algorithm in zip(STAGES, cycle(ALGORITHMS)):
        options = {"stage": stage, "partition": partition}
        first, second = (train(worlds(algorithm), ADAMW, 2, **options) for _ in range(2))
        assert_same_bits(first, second)
