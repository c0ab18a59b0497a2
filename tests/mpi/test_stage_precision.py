"""Gradients that are not finite, and parameters of 16 bits, at every stage."""

import math
from contextlib import nullcontext

import pytest
import torch
from model_digest import model_digest
from models import net
from mpi4py import MPI
from oracle import ADAMW, MAX_NORM, SGD, loss_of, mine, modes, samples
from torch import nn
from worlds import RANKS

from zero import NonFiniteGradientError

pytestmark = pytest.mark.simulated

RANK = MPI.COMM_WORLD.rank
LAST = RANKS - 1


# Gradients that are not finite.


def spoiled(model, world, seed, where, value=math.inf):
    """A loss whose gradient is `value` in the last layer's bias, on one rank."""
    loss = loss_of(model, mine(world, samples(12, seed=seed)))
    return loss + model[3].bias.sum() * (value if where == RANK else 0.0)


@pytest.mark.parametrize(("value", "where"), [(math.inf, 0), (math.nan, LAST)])
@modes
def test_stop_names_parameter_and_rank_and_changes_nothing(world, pair, mode, value, where):
    both = pair(**mode)
    both.train(0)
    before = model_digest(both.model)
    spoiled(both.model, world, 9, where, value).backward()
    with pytest.raises(NonFiniteGradientError) as error:
        both.optimizer.step()
    words = str(error.value)
    assert world.gather(words) == [words] * RANKS
    assert "3.bias" in words
    assert f"rank {where}" in words
    assert not any(name in words for name in ("0.weight", "2.weight", "3.weight"))
    assert model_digest(both.model) == before
    both.optimizer.zero_grad()
    both.train(1, 2)
    both.check()


@pytest.mark.parametrize(("micro_batches", "where"), [(1, 0), (2, LAST)])
@modes
def test_skip_leaves_the_step_out_on_all_ranks(world, pair, mode, micro_batches, where):
    both = pair(**mode, max_grad_norm=MAX_NORM, non_finite="skip")
    for step in range(2):
        ((result, _),) = both.train(step)
        assert not result.skipped
        before = model_digest(both.model)
        for turn in range(micro_batches):  # spoiled in the first one only
            place = where if turn == 0 else -1
            with nullcontext() if turn == micro_batches - 1 else both.optimizer.no_sync():
                spoiled(both.model, world, 9, place).backward()
        result = both.optimizer.step()
        both.optimizer.zero_grad()
        assert result.skipped
        assert not math.isfinite(result.grad_norm)
        assert world.gather(result.skipped) == [True] * RANKS
        assert model_digest(both.model) == before
    both.train(5, 6)
    both.check()


@modes
def test_a_norm_that_overflows_in_fp32_alone_is_finite(make, mode):
    model = net(torch.float32)
    optimizer = make(model, SGD, **mode)
    before = model_digest(model)
    (model[3].bias.sum() * 3e38 + model[3].bias.sum() * -2.9e38 + model[0].bias.sum()).backward()
    for p in model.parameters():
        gradient = optimizer.full_gradient(p)
        assert gradient is None or bool(gradient.isfinite().all())
    result = optimizer.step()  # the norm is made in fp64: nothing overflows
    assert math.isfinite(result.grad_norm)
    assert model_digest(model) != before


# 16 bits.


class ExactGradients(nn.Module):
    """Its gradient is known to the bit: multiples of a power of two, as stated, in any dtype."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(7)
        self.parts = nn.ParameterList([torch.randn(n).to(dtype) for n in (3, 17, 1)])

    def forward(self, gradients):
        return sum((p.float() * g).sum() for p, g in zip(self.parts, gradients, strict=True))


UNIT = 2.0**-7


def known(rank, step, dtype, unit=UNIT):
    return [
        (((torch.arange(n) * 7 + 3 * rank + 5 * step) % 9 - 4) * unit).to(dtype) for n in (3, 17, 1)
    ]


# Samples of the ranks: their sum is a power of two, so that the mean is exact.
COUNTS = {1: [1], 2: [1, 1], 3: [1, 1, 2], 4: [1, 1, 1, 1]}.get(RANKS, [1] * RANKS)


class Masters:
    """The oracle of 16-bit parameters: torch on an fp32 copy, rounded after every step."""

    def __init__(self, model, optimizer_class):
        self.rounded = [p.detach().clone() for p in model.parameters()]
        self._masters = [nn.Parameter(p.float()) for p in self.rounded]
        self._optimizer = optimizer_class(self._masters)

    def step(self, gradients):
        for p, gradient in zip(self._masters, gradients, strict=True):
            p.grad = gradient
        self._optimizer.step()
        for rounded, p in zip(self.rounded, self._masters, strict=True):
            rounded.copy_(p.detach())

    def check(self, model):
        for ours, theirs in zip(model.parameters(), self.rounded, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


def mean(step, dtype, unit=UNIT):
    everyone = [known(rank, step, dtype, unit) for rank in range(RANKS)]
    return [
        sum(count * g.float() for count, g in zip(COUNTS, one, strict=True)) / sum(COUNTS)
        for one in zip(*everyone, strict=True)
    ]


@pytest.mark.parametrize(
    ("dtype", "optimizer_class"),
    [(torch.bfloat16, ADAMW), (torch.float16, SGD)],
    ids=["bf16", "fp16"],
)
@modes
def test_16_bit_parameters_are_updated_through_masters(world, make, mode, optimizer_class, dtype):
    model = ExactGradients(dtype)
    oracle = Masters(model, optimizer_class)
    optimizer = make(model, optimizer_class, **mode)
    for step in range(12):  # of which single updates are below what bf16 resolves
        optimizer.backward(model(known(RANK, step, dtype)), COUNTS[RANK])
        optimizer.step()
        optimizer.zero_grad()
        oracle.step(mean(step, dtype))
        oracle.check(model)
    assert len(set(world.gather(model_digest(model)))) == 1


@modes
def test_16_bit_micro_batches_accumulate(world, make, mode):
    dtype = torch.bfloat16
    model = ExactGradients(dtype)
    oracle = Masters(model, SGD)
    optimizer = make(model, SGD, **mode)
    for step in range(3):
        for k in range(4):
            with nullcontext() if k == 3 else optimizer.no_sync():
                optimizer.backward(model(known(RANK, 4 * step + k, dtype)), COUNTS[RANK])
        result = optimizer.step()
        optimizer.zero_grad()
        assert result.weight == 4 * sum(COUNTS)
        several = [mean(4 * step + k, dtype) for k in range(4)]
        oracle.step([sum(parts) / 4 for parts in zip(*several, strict=True)])
        oracle.check(model)


@pytest.mark.parametrize("where", sorted({0, LAST}))
@modes
def test_an_overflow_on_one_rank_skips_the_step_of_all_and_halves_the_scale(
    world, make, mode, where
):
    dtype = torch.float16
    model = ExactGradients(dtype)
    oracle = Masters(model, ADAMW)
    optimizer = make(model, ADAMW, **mode, loss_scale="dynamic")
    one = torch.ones(())
    for step in range(6):
        before, scale = model_digest(model), float(optimizer.scale(one))
        overflows = step in (1, 4)
        factor = 1e5 if overflows and where == RANK else 1
        optimizer.backward(factor * model(known(RANK, step, dtype, 2.0**-12)), COUNTS[RANK])
        result = optimizer.step()
        optimizer.zero_grad()
        assert result.skipped == overflows
        if overflows:
            assert not math.isfinite(result.grad_norm)
            assert model_digest(model) == before
            assert float(optimizer.scale(one)) == scale / 2
        else:
            assert float(optimizer.scale(one)) == scale
            oracle.step(mean(step, dtype, 2.0**-12))
        oracle.check(model)
    assert len(set(world.gather(model_digest(model)))) == 1


@pytest.mark.parametrize("loss_scale", [1024.0, "dynamic"])
@modes
def test_a_loss_scale_does_not_show_in_fp64(world, pair, mode, loss_scale):
    both = pair(kind=SGD, **mode, loss_scale=loss_scale, max_grad_norm=MAX_NORM)
    for step in range(3):
        batch = samples(12, seed=step)
        loss_of(both.alone.model, batch).backward()
        both.optimizer.scale(loss_of(both.model, mine(world, batch))).backward()
        result, norm = both.update()
        assert result.grad_norm == pytest.approx(norm, rel=1e-10)
        assert result.weight == RANKS
    both.check()
