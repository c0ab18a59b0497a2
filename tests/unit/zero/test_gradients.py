"""Gradients as backward hands them over: whose memory they lie in, their norm, and whose is odd."""

import copy
import math

import pytest
import torch
from first_of_two import FirstOfTwo
from torch import nn

from zero import SingleProcessCollectives, ZeroOptimizer
from zero.kernels import RUN
from zero.norms import FiniteCheck, NonFiniteGradientError, global_norm

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


def test_at_stage_2_micro_batches_of_16_bits_accumulate_in_fp32():
    model = nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = ZeroOptimizer(
        model.named_parameters(),
        torch.optim.SGD,
        FirstOfTwo(),
        stage=2,
        partition="parameter",  # so it is the first rank's
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


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2**0.5), (torch.bfloat16, None)])
@stages
def test_gradients_outlive_a_step_until_zero_grad(stage, dtype, limit):
    model = nn.Linear(4, 4, bias=False).to(dtype)
    optimizer = ZeroOptimizer(
        model.named_parameters(),
        torch.optim.SGD,
        FirstOfTwo(),
        stage=stage,
        lr=0.0,
        max_grad_norm=limit,
    )
    # A gradient of ones. This rank's half has a norm of 8 ** 0.5, and nobody adds the other's.
    clipped, own = (0.5, slice(0, 4 if stage == 0 else 2)) if limit else (1.0, slice(0, 2))
    for expected in (clipped, clipped + 1.0):
        model(torch.eye(4, dtype=dtype)).sum().backward()
        if expected == clipped:
            optimizer.step()
        gradient = optimizer.full_gradient(model.weight)[own]
        torch.testing.assert_close(gradient, torch.full_like(gradient, expected))


WORLDS = pytest.mark.parametrize("world", [SingleProcessCollectives, FirstOfTwo])


def one_weight(stage, world, **options):
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    named = model.named_parameters()
    options = {"stage": stage, "partition": "parameter", "lr": 1.0, **options}
    return model, ZeroOptimizer(named, torch.optim.SGD, world(), **options)


def value(model, number):
    return model(torch.full((1, 1), float(number))).mean()


@WORLDS
@stages
@pytest.mark.parametrize("weighted", [False, True])
def test_what_no_sync_leaves_after_a_synchronized_backward_counts(stage, world, weighted):
    model, optimizer = one_weight(stage, world)

    def backward(number):
        loss = value(model, number)
        optimizer.backward(loss, weight=4) if weighted else loss.backward()

    backward(3)
    with optimizer.no_sync():
        backward(5)
    assert optimizer.step().grad_norm == 8.0
    assert model.weight.item() == 1.0 - 8.0


@WORLDS
@stages
@pytest.mark.parametrize("weighted", [False, True])
def test_an_accumulation_that_the_model_drops_begins_anew(stage, world, weighted):
    model, optimizer = one_weight(stage, world)

    def backward(number, weight):
        if weighted:
            optimizer.backward(value(model, number), weight=weight)
        else:
            optimizer.share(weight)
            value(model, number).backward()

    with optimizer.no_sync():
        backward(100, 6)
    model.zero_grad()
    backward(3, 2)
    result = optimizer.step()
    assert (result.grad_norm, result.weight) == (3.0, 2.0)


@stages
def test_a_stand_in_within_an_accumulation_adds_nothing(stage):
    model, optimizer = one_weight(stage, FirstOfTwo)  # whose other rank adds nothing either
    with optimizer.no_sync():
        optimizer.expect_batch(8, 16)
        value(model, 3).backward()
    optimizer.expect_batch(0, 1)
    value(model, math.nan).backward()
    result = optimizer.step()
    assert (result.grad_norm, result.weight) == (3.0, 8.0)


@WORLDS
@stages
@pytest.mark.parametrize("how", ["share", "tokens"])
def test_a_weight_that_changes_without_a_total_is_refused(stage, world, how):
    model, optimizer = one_weight(stage, world)

    def weigh(count):
        optimizer.share(count) if how == "share" else optimizer.expect_batch(count, None)

    with optimizer.no_sync():
        weigh(8)
        value(model, 3).backward()
        weigh(8)
        value(model, 3).backward()
    weigh(5)
    if world is SingleProcessCollectives:  # one rank has the whole of every batch
        value(model, 1).backward()
        assert optimizer.step().grad_norm == 7.0
        return
    message = r"weighs 8 in one micro-batch .*, and 5 in another, .*backward\(loss, weight=n\)"
    with pytest.raises(RuntimeError, match=message):
        value(model, 5).backward()


@WORLDS
@stages
def test_an_accumulation_is_zeroed(stage, world):
    model, optimizer = one_weight(stage, world)
    with optimizer.no_sync():
        value(model, 100).backward()
    optimizer.zero_grad(set_to_none=False)
    value(model, 3).backward()
    assert optimizer.step().grad_norm == 3.0


@WORLDS
@stages
def test_a_dropped_accumulation_is_no_part_of_the_step(stage, world):
    model, optimizer = one_weight(stage, world, weight_decay=0.5)
    optimizer.share(4)
    with optimizer.no_sync():
        value(model, 100).backward()
    model.zero_grad()
    optimizer.step()
    assert model.weight.item() == 1.0


@WORLDS
@stages
def test_ways_of_weighing_are_not_mixed_in_an_accumulation(stage, world):
    model, optimizer = one_weight(stage, world)
    with optimizer.no_sync():
        optimizer.backward(value(model, 3), weight=4)
    with pytest.raises(RuntimeError, match=r"loss\.backward\(\) follows optimizer\.backward"):
        value(model, 3).backward()


@WORLDS
@stages
def test_an_assigned_gradient_is_not_weighed(stage, world):
    model, optimizer = one_weight(stage, world)
    model.weight.grad = torch.full((1, 1), 10.0)
    with pytest.raises(RuntimeError, match="assigned before"):
        optimizer.backward(value(model, 1), weight=8)


def test_a_share_of_nothing_that_no_backward_follows_ends_with_its_step():
    model, optimizer = one_weight(2, FirstOfTwo)
    optimizer.share(4)
    with optimizer.no_sync():
        value(model, 6).backward()
    optimizer.share(0)
    assert optimizer.step().weight == 4.0
    optimizer.zero_grad()
    value(model, 3).backward()
    assert optimizer.step().grad_norm == 3.0


@WORLDS
def test_zeros_are_only_for_gradients_that_there_were(world):
    model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    optimizer = ZeroOptimizer(model.named_parameters(), torch.optim.SGD, world(), weight_decay=0.5)
    optimizer.zero_grad(set_to_none=False)
    before = model[1].weight.item()
    value(model[0], 3).backward()
    optimizer.step()
    assert model[1].weight.item() == before


@stages
def test_clipping_hides_no_overflow(stage):
    model, optimizer = one_weight(stage, SingleProcessCollectives)
    value(model, math.inf).backward()
    assert optimizer.clip_grad_norm_(1.0).isinf()
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()


@WORLDS
def test_a_gradient_that_the_user_keeps_is_not_overwritten(world):
    model, optimizer = one_weight(0, world)
    kept = []
    for number in (3, 5, 7):
        optimizer.zero_grad()
        value(model, number).backward()
        kept.append(model.weight.grad)
    assert [gradient.item() for gradient in kept] == [3.0, 5.0, 7.0]
    value(model, 1).backward()
    assert kept[-1] is model.weight.grad
    assert kept[-1].item() == 8.0


@WORLDS
def test_gradients_may_be_exchanged(world):
    model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    optimizer = ZeroOptimizer(model.named_parameters(), torch.optim.SGD, world(), lr=1.0)
    first, second = model.parameters()
    with torch.no_grad():
        first.fill_(0)
        second.fill_(0)
    (first * 3 + second * 5).sum().backward()
    first.grad, second.grad = second.grad, first.grad
    optimizer.step()
    assert (first.item(), second.item()) == (-5.0, -3.0)


@WORLDS
@stages
def test_a_loss_that_cannot_run_backward_leaves_no_half_of_a_step(stage, world):
    model, optimizer = one_weight(stage, world)
    value(model, 3).backward()
    with pytest.raises(RuntimeError, match="does not require grad"):
        optimizer.backward(torch.ones(()), weight=1)
    with pytest.raises(RuntimeError, match="did not end"):
        optimizer.step()
    optimizer.zero_grad()
    value(model, 3).backward()
    assert optimizer.step().grad_norm == 3.0


# The norm.


def norm(*shards, p=2.0):
    return global_norm(SingleProcessCollectives(), shards, p)


def exact(*shards, p=2.0):
    return math.pow(sum(float(s.double().abs().pow(p).sum()) for s in shards), 1 / p)


LENGTHS = [1, 17, RUN - 1, RUN, RUN + 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_a_norm_is_that_of_fp64(p, dtype):
    torch.manual_seed(2)
    shards = [torch.randn(n).to(dtype) for n in LENGTHS]
    assert norm(*shards, p=p) == pytest.approx(exact(*shards, p=p), rel=1e-12)


@pytest.mark.parametrize("size", [1e-42, 1e-22, 1.0, 3e38])
def test_a_norm_of_fp32_neither_overflows_nor_vanishes(size):
    shard = torch.linspace(0.25, 1, 2000).mul(size)
    assert norm(shard) == pytest.approx(exact(shard), rel=1e-12)


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


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("collectives", [SingleProcessCollectives, FirstOfTwo])
def test_compiled_autograd_is_refused_by_its_name(collectives, stage):
    torch.compiler.reset()
    model = nn.Linear(3, 2)
    optimizer = ZeroOptimizer(
        model.named_parameters(), torch.optim.SGD, collectives(), stage=stage, lr=0.1
    )

    def train_step(x):
        model(x).sum().backward()
        optimizer.step()

    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(train_step, backend="eager")
        with pytest.raises(RuntimeError, match=r"dynamo\.config\.compiled_autograd is on: "):
            compiled(torch.ones(2, 3))
    optimizer.close()
    torch.compiler.reset()
