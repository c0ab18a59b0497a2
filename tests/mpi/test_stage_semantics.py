"""Accumulation, weights, clipping, groups and frozen layers at every stage.

Compared with plain torch, which every rank runs too.
"""

import copy
import math
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from model_digest import model_digest
from models import net
from mpi4py import MPI
from oracle import (
    ADAMW,
    MAX_NORM,
    OWN,
    SGD,
    assert_close,
    init,
    loss_of,
    mine,
    modes,
    rows,
    samples,
)
from states import gather_slices
from torch import nn
from worlds import RANKS

from zero import SingleProcessCollectives, ZeroOptimizer

pytestmark = pytest.mark.simulated

RANK = MPI.COMM_WORLD.rank
LAST = RANKS - 1
WORLDS = [("naive", None), ("leader", 2), ("lanes", 3)]


# Micro-batches and shares.

# Of step 0, rank 0 has samples 0 to 2 and 2 to 3, rank 1 has 3 to 8, rank 2 none, and so on.
DEALT = [[[0, 2, 3], [3, 8], [], [8, 9, 11, 12]], [[0, 4], [], [4, 5, 9], [9, 12]]]


@pytest.mark.parametrize(("algorithm", "layout"), WORLDS)
@modes
def test_any_number_of_micro_batches_of_any_size(worlds, pair, algorithm, layout, mode):
    both = pair(world=worlds(algorithm, layout), **mode, max_grad_norm=MAX_NORM)
    optimizer = both.optimizer
    for step in range(4):
        bounds = DEALT[step % 2][:RANKS]
        batch = samples(12, seed=step)
        total = max(stop for cuts in bounds for stop in cuts)
        loss_of(both.alone.model, rows(batch, 0, total)).backward()
        cuts = bounds[RANK]
        for start, stop in pairwise(cuts):
            with nullcontext() if stop == cuts[-1] else optimizer.no_sync():
                optimizer.backward(loss_of(both.model, rows(batch, start, stop)), stop - start)
        if not cuts:
            optimizer.share(0)
        result, norm = both.update()
        assert result.weight == total
        assert result.grad_norm == pytest.approx(norm, rel=1e-10)
    both.check()


@modes
@pytest.mark.parametrize("at", ["no_sync", "the first gradient", "forward"])
def test_a_backward_that_no_rank_can_end_changes_no_later_step(pair, mode, at):
    both = pair(**mode, max_grad_norm=MAX_NORM)
    model, optimizer = both.model, both.optimizer
    parameter = list(model.parameters())[-1]  # whose gradient is the first

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
        batch, fails = samples(4, seed=step), step == 1
        with pytest.raises(KeyError) if fails else nullcontext():
            backward(batch, fails=fails)
        if not fails:
            norm = both.alone.step(loss_of(both.alone.model, batch))
            assert optimizer.step().grad_norm == pytest.approx(norm, rel=1e-10)
        optimizer.zero_grad()
    both.check()


@modes
@pytest.mark.parametrize("synced", [False, True])
def test_the_micro_batches_of_a_loader_may_differ_in_size(world, pair, mode, synced):
    # Ranks have unequal parts of them, and stand-ins at the beginning and the end of a step.
    both = pair(kind=SGD, **mode)
    sizes = (7, 3, 1, 8, 6, 5, 9, 2, 1)
    batches = [samples(size, seed=seed) for seed, size in enumerate(sizes)]
    for index, batch in enumerate(world.shard(batches)):
        waits = index % 3 == 2 or (synced and index % 3 == 0)
        with nullcontext() if waits else both.optimizer.no_sync():
            (loss_of(both.model, batch) / 3).backward()
        (loss_of(both.alone.model, batches[index]) / 3).backward()
        if index % 3 == 2:
            result, norm = both.update()
            assert result.grad_norm == pytest.approx(norm, rel=1e-10)
    both.check()


def one_weight(make, stage):
    """A weight whose gradient is the mean of the inputs, as a loss of one, and its optimizer."""
    model = nn.Linear(1, 1, bias=False).double()
    optimizer = make(model, torch.optim.SGD, stage=stage, lr=0.0)
    return lambda value: model(torch.full((1, 1), value, dtype=torch.float64)).mean(), optimizer


STAGES = pytest.mark.parametrize("stage", [0, 1, 2])


@STAGES
def test_shares_of_unequal_numbers_of_micro_batches_are_a_mean_over_samples_or_refused(make, stage):
    loss, optimizer = one_weight(make, stage)
    values = [3.0, 5.0] if RANK == 0 else [10.0]

    def accumulate():
        for value in values:
            optimizer.share(2)
            with nullcontext() if value == values[-1] else optimizer.no_sync():
                (loss(value) / len(values)).backward()

    if stage == 2:
        with pytest.raises(RuntimeError, match=r"different numbers of micro-batches .* or 1$"):
            accumulate()
        return
    accumulate()
    result, weight = optimizer.step(), 4 + 2 * LAST
    assert result.weight == weight
    assert result.grad_norm == pytest.approx((4 * 4 + 2 * LAST * 10) / weight)


@STAGES
def test_a_rank_without_a_backward_adds_nothing_to_a_mean_over_samples(make, stage):
    loss, optimizer = one_weight(make, stage)
    if RANK == 0:
        optimizer.backward(loss(3.0), weight=1)
    result = optimizer.step()
    assert (result.grad_norm, result.weight) == (3.0, 1)


@STAGES
def test_a_loss_that_reaches_no_parameter_on_one_rank_counts_in_the_same_mean(make, stage):
    loss, optimizer = one_weight(make, stage)
    for number in range(2):
        elsewhere = RANK == LAST and number == 0
        used = torch.zeros((), requires_grad=True) if elsewhere else loss(3.0)
        optimizer.backward(used, weight=4)
    result = optimizer.step()
    assert result.weight == 8 * RANKS
    assert result.grad_norm == pytest.approx(3 * (2 * RANKS - 1) / (2 * RANKS))


@STAGES
def test_a_loss_of_no_samples_takes_part_in_other_optimizers_too(world, make, stage):
    losses, optimizers = zip(*(one_weight(make, stage) for _ in range(2)), strict=True)
    data = torch.arange(1.0, RANKS, dtype=torch.float64)  # the last rank has a stand-in
    for value in world.shard(torch.utils.data.DataLoader(data, RANKS), train=True):
        optimizers[0].backward(sum(loss(value.item()) for loss in losses), weight=len(value))
    for optimizer in optimizers:
        assert optimizer.step().grad_norm == pytest.approx(RANKS / 2)


@STAGES
def test_a_mean_over_no_samples_makes_no_nan(make, stage):
    loss, optimizer = one_weight(make, stage)
    for number in range(2):
        empty = RANK == LAST and number == 0
        optimizer.backward(loss(math.nan if empty else 3.0), weight=0 if empty else 1)
    result = optimizer.step()
    assert (result.grad_norm, result.weight) == (pytest.approx(3.0), 2 * RANKS - 1)


@modes
def test_a_share_of_nothing_hides_a_nan(pair, mode):
    both = pair(kind=SGD, **mode)
    for idle in (0, LAST, 0):
        columns = [column.chunk(RANKS) for column in samples(12, seed=idle)]
        parts = list(zip(*columns, strict=True))
        busy = [part for rank, part in enumerate(parts) if rank != idle]
        (sum(loss_of(both.alone.model, part) for part in busy) / len(busy)).backward()
        both.optimizer.share(0 if idle == RANK else 3)
        (loss_of(both.model, parts[RANK]) * (math.nan if idle == RANK else 1.0)).backward()
        result, norm = both.update()
        assert result.weight == 3 * (RANKS - 1)
        assert result.grad_norm == pytest.approx(norm, rel=1e-10)
    both.check()


# Clipping.


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@modes
def test_clipping_by_any_norm_is_that_of_torch(pair, mode, norm_type):
    both = pair(**mode, max_grad_norm=MAX_NORM, norm_type=norm_type)
    for result, norm in both.train(0, 1, 2):
        coef = min(1.0, MAX_NORM / (norm + 1e-6))
        assert result.grad_norm == pytest.approx(norm, rel=1e-10)
        assert result.clip_coef == pytest.approx(coef, rel=1e-10)
        assert result.clipped_norm == pytest.approx(norm * coef, rel=1e-10)
        assert result.clip_coef < 1
    both.check()


# Parameter groups and schedules.


@modes
def test_a_group_that_comes_later_is_taken_from_rank_0(make, mode):
    model = net()
    model[3].requires_grad_(False)
    optimizer = make(model, ADAMW, **mode)
    with torch.no_grad():
        model[3].weight += RANK
    model[3].requires_grad_(True)
    optimizer.add_param_group({"params": [("3.weight", model[3].weight)]})
    assert torch.equal(model[3].weight, net()[3].weight)


@modes
def test_a_group_may_come_between_two_micro_batches(worlds, make, mode):
    world = worlds(bucket_mb=OWN)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)).double()
    model[0].requires_grad_(False)
    alone = copy.deepcopy(model)
    ours = make(model, SGD, world=world, **mode)
    theirs = SGD([p for p in alone.parameters() if p.requires_grad])
    for optimizer, each, share in ((ours, model, mine), (theirs, alone, lambda _, batch: batch)):
        with optimizer.no_sync() if optimizer is ours else nullcontext():
            loss_of(each, share(world, samples(12, seed=0))).backward()
        each[0].requires_grad_(True)
        added = [*each[0].named_parameters(prefix="0")]
        added = added if optimizer is ours else [p for _, p in added]
        optimizer.add_param_group({"params": added})
        loss_of(each, share(world, samples(12, seed=1))).backward()
        optimizer.step()
    assert_close(model, alone)


@modes
def test_step_hooks_fire_once_a_step(pair, mode):
    both, fired = pair(**mode), []
    own = both.optimizer
    own.register_step_pre_hook(lambda who, *_: fired.append(("before", who is own)))
    own.register_step_post_hook(lambda who, *_: fired.append(("after", who is own)))
    both.train(0, 1)
    assert fired == [("before", True), ("after", True)] * 2


@pytest.mark.parametrize(("setting", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_that_are_gathered_in_16_bits_are_rounded_alike(stage, setting, dtype):
    model, other = net(torch.float32), net(torch.float32)
    alone = ZeroOptimizer(
        other.named_parameters(), ADAMW, SingleProcessCollectives(), stage=stage, gather_dtype=dtype
    )
    with init(gather_dtype=setting) as world:
        optimizer = world.optimizer(model, ADAMW, stage=stage)
        for seed in range(3):
            for trained, stepper in ((model, optimizer), (other, alone)):
                loss_of(trained, samples(12, seed, torch.float32)).backward()
                stepper.step()
                stepper.zero_grad()
        assert len(set(world.gather(model_digest(model)))) == 1
        masters = {piece.name: piece for piece in gather_slices(optimizer)}
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, parameter.to(dtype).to(parameter.dtype))
            torch.testing.assert_close(parameter, other.get_parameter(name), rtol=2**-7, atol=1e-6)
            if world.master:
                master = masters[name].tensors["master"].view(parameter.shape)
                assert torch.equal(master.to(dtype).to(parameter.dtype), parameter)
        optimizer.close()
