"""Gradients as backward hands them over: whose memory they lie in, their norm, and whose is odd."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from first_of_two import FirstOfTwo
from torch import nn

from zero import SingleProcessCollectives, ZeroOptimizer
from zero.kernels import Kernels
from zero.norms import ROW, FiniteCheck, global_norm

stages = pytest.mark.parametrize("stage", [0, 1, 2])


class Sums(nn.Module):
    """A loss of several parameters of one shape, and of a few others, made by a function."""

    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))
        self.c = nn.Parameter(torch.randn(12))
        self._loss = loss

    def forward(self):
        return self._loss(self.a, self.b, self.c)


X = torch.linspace(-1, 1, 12).view(3, 4)
LOSSES = {
    # Backward gives both parameters the very same tensor, or views of one memory.
    "one tensor": lambda a, b, c: ((a + b) * X).sum() + c.sum(),
    "one memory": lambda a, b, c: ((a.flatten() + b.flatten() + c) * X.flatten()).sum(),
    "parts of one memory": lambda a, b, c: (torch.cat([a, b]) * torch.cat([X, -X])).sum() + c[0],
    # One that does not lie in memory as its parameter does.
    "expanded": lambda a, b, c: a.sum() + 2 * b.sum() + c.mean(),
    "transposed": lambda a, b, c: (a.t() * X.view(4, 3)).sum() + (b * X).sum() + c.sum(),
    "a row": lambda a, b, c: (a[1] * X[0]).sum() + b[:, 2].sum() + c[3],
}


def both(loss, **options):
    """The weights after two steps of three micro-batches, here and in plain torch."""
    mine = Sums(loss)
    theirs = copy.deepcopy(mine)
    optimizer = ZeroOptimizer(
        mine.named_parameters(), torch.optim.SGD, SingleProcessCollectives(), lr=0.1, **options
    )
    limit = options.get("max_grad_norm", math.inf)
    for step in range(2):
        for turn in range(3):
            if turn < 2:
                with optimizer.no_sync():
                    mine().backward()
            else:
                mine().backward()
        result = optimizer.step()
        optimizer.zero_grad()
        # Not by torch's own accumulation, which adds in place to what two parameters may share.
        parameters = list(theirs.parameters())
        gradients = [3 * g for g in torch.autograd.grad(theirs(), parameters)]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        assert result.grad_norm == pytest.approx(norm, rel=1e-6)
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p.sub_(g, alpha=0.1 * min(1.0, limit / norm))
        assert step == 0 or result.clip_coef < 1 or limit == math.inf
    return mine, theirs


@pytest.mark.parametrize("limit", [math.inf, 0.5])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@stages
def test_gradients_that_share_memory_or_lie_otherwise_count_once(stage, loss, limit):
    mine, theirs = both(loss, stage=stage, max_grad_norm=limit)
    for ours, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # with create_graph
@stages
def test_a_gradient_with_a_graph_of_its_own_trains(stage):
    model = Sums(lambda a, b, c: (a * b).square().sum() + c.square().sum())
    other = copy.deepcopy(model)
    optimizer = ZeroOptimizer(
        model.named_parameters(),
        torch.optim.SGD,
        SingleProcessCollectives(),
        stage=stage,
        lr=0.1,
        max_grad_norm=0.1,
    )
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    model().backward(create_graph=True)
    optimizer.step()
    other().backward()
    nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    plain.step()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("micro_batches", [1, 3])
@stages
def test_a_sharded_step_takes_the_gradients_off_the_parameters(stage, micro_batches):
    model = nn.Linear(4, 4, bias=False)
    optimizer = ZeroOptimizer(
        model.named_parameters(),
        torch.optim.SGD,
        SingleProcessCollectives(),
        stage=stage,
        model=model,
    )
    for _ in range(2):
        for turn in range(micro_batches):
            with nullcontext() if turn == micro_batches - 1 else optimizer.no_sync():
                model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        assert (model.weight.grad is None) == optimizer.sharded
        optimizer.zero_grad()


def test_at_stage_2_micro_batches_of_16_bits_accumulate_in_fp32():
    model = nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = ZeroOptimizer(
        model.named_parameters(), torch.optim.SGD, SingleProcessCollectives(), stage=2
    )
    for value in (1.0, 2.0**-10, 2.0**-10):
        with optimizer.no_sync():
            model(torch.full((1, 1), value).bfloat16()).sum().backward()
    assert optimizer.step().grad_norm == 1 + 2.0**-9


def test_a_parameter_may_be_in_any_micro_batch():
    weights = []
    for stage in (0, 1, 2):
        model = Sums(lambda a, b, c: None)
        named = list(model.named_parameters())
        optimizer = ZeroOptimizer(
            named, torch.optim.SGD, SingleProcessCollectives(), stage=stage, lr=0.5
        )
        for _ in range(2):
            with optimizer.no_sync():
                (model.a * X).sum().backward()
            (model.b * X).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append([p.tolist() for p in model.parameters()])
    assert weights[0] == weights[1] == weights[2]
    a, b, c = Sums(None).parameters()
    torch.testing.assert_close(torch.tensor(weights[0][:2]), torch.stack([a - X, b - X]))
    assert weights[0][2] == c.tolist()


@pytest.mark.parametrize("world", [SingleProcessCollectives, FirstOfTwo])
@stages
def test_zero_grad_forgets_a_gradient_that_was_assigned(stage, world):
    model = nn.Linear(4, 4)
    optimizer = ZeroOptimizer(model.named_parameters(), torch.optim.SGD, world(), stage=stage)
    model.weight.grad = torch.ones(4, 4)
    optimizer.zero_grad()
    assert model.weight.grad is None


@stages
def test_a_gradient_that_is_dropped_before_the_step_counts_all_the_same(stage):
    model = nn.Linear(1, 1, bias=False)
    optimizer = ZeroOptimizer(
        model.named_parameters(), torch.optim.SGD, SingleProcessCollectives(), stage=stage, lr=1.0
    )
    before = model.weight.item()
    for _ in range(2):
        model(torch.full((1, 1), 3.0)).mean().backward()
        model.zero_grad()
        optimizer.step()
    assert model.weight.item() == pytest.approx(before - 6.0)


# The norm.


def norm(*shards, p=2.0):
    return global_norm(SingleProcessCollectives(), shards, p, Kernels())


def exact(*shards, p=2.0):
    return math.pow(sum(float(s.double().abs().pow(p).sum()) for s in shards), 1 / p)


LENGTHS = [1, 17, ROW - 1, ROW, ROW + 1, 1000 * ROW + 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_a_norm_is_that_of_fp64(p, dtype):
    torch.manual_seed(2)
    shards = [torch.randn(n).to(dtype) for n in LENGTHS]
    within = 2e-7 if p == 2 and dtype != torch.float64 else 1e-12
    assert norm(*shards, p=p) == pytest.approx(exact(*shards, p=p), rel=within)


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-22, 1e-15, 1e-8, 1.0, 1e12, 1e19, 3e38])
@pytest.mark.parametrize("numel", [3, 2000])
def test_a_norm_of_fp32_neither_overflows_nor_vanishes(numel, size):
    shard = torch.linspace(0.25, 1, numel).mul(size)
    assert norm(shard) == pytest.approx(exact(shard), rel=2e-7)


def test_small_shards_count_beside_large_ones():
    large, small = torch.full((1000,), 1e-6), torch.full((1 << 20,), 1e-9)
    assert norm(large, small) == pytest.approx(exact(large, small), rel=2e-7)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_norm_tells_what_is_not_finite(value):
    shard = torch.ones(1000)
    shard[700] = value
    assert not math.isfinite(norm(shard))


def test_a_norm_of_nothing_is_nothing():
    assert norm() == norm(torch.zeros(0)) == norm(torch.zeros(1000)) == 0.0


# Whose gradient is not finite.

ODD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_what_is_not_finite_is_seen_until_a_reset(dtype, value):
    finite = FiniteCheck(enabled=True)
    odd = torch.ones(1000, dtype=dtype)
    odd[321] = value
    finite.add(torch.ones(5))
    assert finite
    finite.add(odd)
    finite.add(torch.ones(5))
    assert not finite
    finite.reset()
    assert finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_that_overflows_is_of_finite_gradients(dtype):
    finite = FiniteCheck(enabled=True)
    finite.add(torch.full((1000,), torch.finfo(dtype).max, dtype=dtype))
    assert finite


def test_nobody_looks_where_nobody_asks():
    finite = FiniteCheck(enabled=False)
    finite.add(torch.full((3,), math.nan))
    assert finite
