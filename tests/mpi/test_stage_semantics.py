"""What a training loop may do at every stage: accumulate, clip, group, freeze, add, schedule.

Compared with plain torch, which every rank runs too.
"""

import math
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import pytest
import torch
from models import net
from mpi4py import MPI
from oracle import (
    ADAMW,
    MAX_NORM,
    SGD,
    Alone,
    assert_parity,
    loss_of,
    mine,
    modes,
    rows,
    samples,
    train,
)
from worlds import RANKS

from mntrain.train.model_digest import model_digest
from mntrain.train.optimization import weight_decay_groups

pytestmark = pytest.mark.mpi

RANK = MPI.COMM_WORLD.rank
LAST = RANKS - 1
WORLDS = [("naive", None), ("leader", 2), ("lanes", 3)]


# Micro-batches and shares.

# Of step 0, rank 0 has samples 0 to 2 and 2 to 3, rank 1 has 3 to 8, rank 2 none, and so on.
DEALT = [[[0, 2, 3], [3, 8], [], [8, 9, 11, 12]], [[0, 4], [], [4, 5, 9], [9, 12]]]


@pytest.mark.parametrize(("algorithm", "layout"), WORLDS)
@modes
def test_any_number_of_micro_batches_of_any_size(worlds, algorithm, layout, mode):
    model = net()
    alone = Alone(model, ADAMW, MAX_NORM)
    world = worlds(algorithm, layout)
    optimizer = world.optimizer(model, ADAMW, **mode, max_grad_norm=MAX_NORM)
    for step in range(4):
        bounds = DEALT[step % 2][: world.size]
        batch = samples(12, seed=step)
        total = max(stop for cuts in bounds for stop in cuts)
        norm = alone.step(loss_of(alone.model, rows(batch, 0, total)))
        cuts = bounds[world.rank]
        for start, stop in pairwise(cuts):
            with nullcontext() if stop == cuts[-1] else optimizer.no_sync():
                optimizer.backward(loss_of(model, rows(batch, start, stop)), stop - start)
        if not cuts:
            optimizer.share(0)
        result = optimizer.step()
        optimizer.zero_grad()
        assert result.weight == total
        assert result.grad_norm == pytest.approx(norm, rel=1e-10)
    optimizer.close()
    assert_parity(world, model, alone)


@modes
@pytest.mark.parametrize("at", ["no_sync", "the first gradient", "the last gradient", "forward"])
def test_a_backward_that_one_rank_cannot_end_changes_no_later_step(world, make, mode, at):
    model = net()
    alone = Alone(model, ADAMW, MAX_NORM)
    optimizer = make(model, ADAMW, **mode, max_grad_norm=MAX_NORM)
    trained = [p for p in model.parameters() if p.requires_grad]
    parameter = trained[0 if at == "the last gradient" else -1]

    def fail(gradient):
        raise KeyError(at)

    def hook(*, wanted):
        return parameter.register_hook(fail) if wanted else nullcontext()

    def backward(batch, *, fails):
        with hook(wanted=fails and at == "no_sync"), optimizer.no_sync():
            optimizer.backward(loss_of(model, rows(batch, 0, 1)), 1)
        if fails and at == "forward":
            fail(None)
        with hook(wanted=fails):
            optimizer.backward(loss_of(model, rows(batch, 1, 4)), 3)

    for step in range(4):
        batch, fails = samples(4, seed=step), step == 1 and world.rank == LAST
        with pytest.raises(KeyError) if fails else nullcontext():
            backward(batch, fails=fails)
        if fails:
            optimizer.finish_interrupted()
        if step != 1:
            norm = alone.step(loss_of(alone.model, batch))
            assert optimizer.step().grad_norm == pytest.approx(norm, rel=1e-10)
        optimizer.zero_grad()
    assert_parity(world, model, alone)


@modes
def test_a_failed_rank_and_ranks_without_items_end_a_step_together(world, make, mode):
    model = net()
    optimizer = make(model, SGD, **mode)
    for step in range(2):
        if world.rank == LAST:
            optimizer.finish_interrupted()
        elif world.rank == 0:
            optimizer.share(0)
        else:
            optimizer.backward(loss_of(model, samples(2, seed=step)), 0)
        optimizer.synchronize()
        assert world.sum([1.0]) == [world.size]
        optimizer.zero_grad()


@modes
@pytest.mark.parametrize("synced", [False, True])
def test_the_micro_batches_of_a_loader_may_differ_in_size(world, make, mode, synced):
    # Ranks have unequal parts of them, and stand-ins at the beginning and the end of a step.
    model = net()
    alone = Alone(model, SGD)
    sizes = (7, 3, 1, 8, 6, 5, 9, 2, 1)
    batches = [samples(size, seed=seed) for seed, size in enumerate(sizes)]
    optimizer = make(model, SGD, **mode)
    for index, batch in enumerate(world.shard(batches)):
        waits = index % 3 == 2 or (synced and index % 3 == 0)
        with nullcontext() if waits else optimizer.no_sync():
            (loss_of(model, batch) / 3).backward()
        if index % 3 == 2:
            result = optimizer.step()
            optimizer.zero_grad()
            three = batches[index - 2 : index + 1]
            norm = alone.step(sum(loss_of(alone.model, each) / 3 for each in three))
            assert result.grad_norm == pytest.approx(norm, rel=1e-10)
    assert_parity(world, model, alone)


@modes
def test_stated_shares_are_weights_of_ranks(world, make, mode):
    # Rank r has r + 1 samples of each of three micro-batches, of which it takes the mean.
    model = net()
    alone = Alone(model, ADAMW)
    bounds = [r * (r + 1) // 2 for r in range(RANKS + 1)]
    optimizer = make(model, ADAMW, **mode)
    for step in range(2):
        several = [samples(bounds[-1], seed=3 * step + k) for k in range(3)]
        alone.step(sum(loss_of(alone.model, batch) for batch in several) / 3)
        for k, batch in enumerate(several):
            optimizer.share(RANK + 1)
            with nullcontext() if k == 2 else optimizer.no_sync():
                (loss_of(model, rows(batch, *bounds[RANK : RANK + 2])) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_parity(world, model, alone)


@pytest.mark.mpi(min_size=2)
@modes
def test_a_share_of_nothing_hides_a_nan(world, make, mode):
    model = net()
    alone = Alone(model, SGD)
    optimizer = make(model, SGD, **mode)
    for idle in (0, LAST, 0):
        batch = samples(12, seed=idle)
        parts = list(zip(*(column.chunk(RANKS) for column in batch), strict=True))
        busy = [part for rank, part in enumerate(parts) if rank != idle]
        alone.step(sum(loss_of(alone.model, part) for part in busy) / len(busy))
        optimizer.share(0 if idle == RANK else 3)
        (loss_of(model, parts[RANK]) * (math.nan if idle == RANK else 1.0)).backward()
        result = optimizer.step()
        optimizer.zero_grad()
        assert result.weight == 3 * (RANKS - 1)
    assert_parity(world, model, alone)


@modes
def test_a_step_without_a_sample_on_any_rank_is_refused_by_all(world, make, mode):
    model = net()
    optimizer = make(model, SGD, **mode)
    before = model_digest(model)
    optimizer.share(0)
    with pytest.raises(ValueError, match="sum to 0:"):
        optimizer.step()
    assert model_digest(model) == before


@modes
def test_collectives_may_run_between_backward_and_step(world, make, mode):
    model = net()
    alone = Alone(model, ADAMW)
    optimizer = make(model, ADAMW, **mode)
    for step in range(3):
        batch = samples(12, seed=step)
        alone.step(loss_of(alone.model, batch))
        loss_of(model, mine(world, batch)).backward()
        optimizer.synchronize()
        assert world.sum([1.0]) == [RANKS]
        optimizer.step()
        optimizer.zero_grad()
    assert_parity(world, model, alone)


@modes
def test_gradients_thrown_away_leave_nothing_behind(world, make, mode):
    model = net()
    alone = Alone(model, ADAMW)
    optimizer = make(model, ADAMW, **mode)
    for step in range(3):
        with optimizer.no_sync():
            (1e3 * loss_of(model, mine(world, samples(12, seed=99)))).backward()
        optimizer.zero_grad()
        train(world, model, optimizer, alone, [step])
    assert_parity(world, model, alone)


# Clipping.


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@modes
def test_clipping_by_any_norm_is_that_of_torch(world, make, mode, norm_type):
    model = net()
    alone = Alone(model, ADAMW, MAX_NORM, norm_type)
    optimizer = make(
        model,
        ADAMW,
        **mode,
        max_grad_norm=MAX_NORM,
        norm_type=norm_type,
    )
    for result, norm in train(world, model, optimizer, alone, range(3)):
        coef = min(1.0, MAX_NORM / (norm + 1e-6))
        assert result.grad_norm == pytest.approx(norm, rel=1e-10)
        assert result.clip_coef == pytest.approx(coef, rel=1e-10)
        assert result.clipped_norm == pytest.approx(norm * coef, rel=1e-10)
        assert result.clip_coef < 1
    assert_parity(world, model, alone)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_every_stage_tells_the_same_of_a_step(world, make, norm_type):
    told = []
    for stage in (0, 1, 2):
        model = net(torch.float32)
        optimizer = make(model, SGD, stage=stage, max_grad_norm=MAX_NORM, norm_type=norm_type)
        told.append([])
        for step in range(3):
            loss_of(model, mine(world, samples(12, step, torch.float32))).backward()
            told[-1].append(optimizer.step())
            optimizer.zero_grad()
    assert told[0] == told[1] == told[2]
    assert world.gather(told) == [told] * RANKS


# Parameter groups and schedules.


@modes
def test_groups_may_split_buckets_any_way(world, make, mode):
    model = net()
    groups = partial(weight_decay_groups, weight_decay=0.5)
    alone = Alone(model, ADAMW, groups=groups)
    optimizer = make(model, ADAMW, **mode, groups=groups(model))
    train(world, model, optimizer, alone, range(3))
    assert_parity(world, model, alone)


@modes
def test_a_group_may_be_added_later(world, make, mode):
    model = net()
    model[0].requires_grad_(False)
    alone = Alone(model, ADAMW)
    optimizer = make(model, ADAMW, **mode, max_grad_norm=None)
    train(world, model, optimizer, alone, range(2))

    model[0].requires_grad_(True)
    alone.model[0].requires_grad_(True)
    named = [(f"0.{name}", p) for name, p in model[0].named_parameters()]
    optimizer.add_param_group({"params": named, "lr": 0.05})
    alone.optimizer.add_param_group({"params": list(alone.model[0].parameters()), "lr": 0.05})
    train(world, model, optimizer, alone, range(2, 5))
    assert_parity(world, model, alone)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.05]


@modes
def test_a_group_that_comes_later_is_taken_from_rank_0(world, make, mode):
    model = net()
    model[3].requires_grad_(False)
    optimizer = make(model, ADAMW, **mode)
    with torch.no_grad():
        model[3].weight += RANK
    model[3].requires_grad_(True)
    optimizer.add_param_group({"params": [("3.weight", model[3].weight)]})
    assert torch.equal(model[3].weight, net()[3].weight)


@modes
def test_step_hooks_fire_once_a_step(world, make, mode):
    model = net()
    optimizer = make(model, ADAMW, **mode)
    fired = []
    optimizer.register_step_pre_hook(lambda who, *_: fired.append(("before", who is optimizer)))
    optimizer.register_step_post_hook(lambda who, *_: fired.append(("after", who is optimizer)))
    train(world, model, optimizer, Alone(model, ADAMW), range(2))
    assert fired == [("before", True), ("after", True)] * 2
