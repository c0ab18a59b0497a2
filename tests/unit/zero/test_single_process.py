"""ZeroOptimizer in a world of one, against plain torch."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

from zero import NonFiniteGradientError, SingleProcessCollectives, StepResult, ZeroOptimizer

ADAMW = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


class WithEmpty(nn.Module):
    """Has a parameter of no elements that takes part, and a scalar."""

    def __init__(self):
        super().__init__()
        self.no_rows = nn.Parameter(torch.zeros(0, 4))
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.scale * self.inner(torch.cat([self.no_rows, x]))


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def inputs(steps):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(6, 4, generator=generator) for _ in range(steps)]


def train(model, optimizer, data, schedule=None):
    results = []
    for x in data:
        model(x).square().mean().backward()
        results.append(optimizer.step())
        optimizer.zero_grad()
        if schedule:
            schedule.step()
    return results


def zero(model, optimizer_class=SGD, **options):
    return ZeroOptimizer(
        model.named_parameters(), optimizer_class, SingleProcessCollectives(), **options
    )


def pair(model):
    return model, copy.deepcopy(model)


def assert_same_weights(mine, torchs):
    ours, theirs = mine.state_dict(), torchs.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def norm_of(model):
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))


def groups_of(model, convert):
    first, second = dict(model[0].named_parameters()), dict(model[3].named_parameters())
    return [
        {"params": convert(first), "lr": 0.02},
        {"params": convert({f"last {n}": p for n, p in second.items()}), "weight_decay": 0.3},
    ]


@pytest.mark.parametrize("pairs", [lambda d: list(d.items()), lambda d: iter(d.items())])
def test_groups_keep_their_own_hyperparameters(pairs):
    mine, theirs = pair(mlp())
    optimizer = ZeroOptimizer(groups_of(mine, pairs), ADAMW, SingleProcessCollectives())
    train(mine, optimizer, inputs(3))
    plain = ADAMW(groups_of(theirs, lambda d: list(d.values())))
    train(theirs, plain, inputs(3))
    assert_same_weights(mine, theirs)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (0.02, 0.1),
        (0.05, 0.3),
    ]


def test_is_a_torch_optimizer():
    assert isinstance(zero(mlp()), torch.optim.Optimizer)


def test_the_state_of_each_parameter_is_at_hand():
    model = mlp()
    optimizer = zero(model, ADAMW)
    train(model, optimizer, inputs(2))
    assert [optimizer.state[p]["step"] for p in model.parameters()] == [2] * 6
    fresh = zero(model, ADAMW)
    fresh.load_state_dict(optimizer.state_dict())
    assert [fresh.state[p]["step"] for p in model.parameters()] == [2] * 6


def test_without_a_limit_nothing_is_clipped():
    model = mlp()
    (1e3 * model(inputs(1)[0])).square().mean().backward()
    norm = norm_of(model)
    model.zero_grad()
    optimizer = zero(model)
    (1e3 * model(inputs(1)[0])).square().mean().backward()
    result = optimizer.step()
    assert result == StepResult(pytest.approx(norm), 1.0, pytest.approx(norm), 1.0, skipped=False)


def test_after_a_step_the_gradient_is_the_clipped_mean():
    model = mlp()
    optimizer = zero(model, max_grad_norm=0.01)
    model(inputs(1)[0]).square().mean().backward()
    result = optimizer.step()
    assert result.clip_coef < 1
    assert norm_of(model) == pytest.approx(result.clipped_norm, rel=1e-6)


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_empty_and_scalar_parameters_train(bucket_bytes):
    mine, theirs = pair(WithEmpty())
    train(mine, zero(mine, bucket_bytes=bucket_bytes), inputs(3))
    train(theirs, SGD(theirs.parameters()), inputs(3))
    assert_same_weights(mine, theirs)


def test_dtypes_mix():
    mine, theirs = pair(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double()))

    def loss(model, x):
        return model[1](torch.tanh(model[0](x)).double()).square().mean()

    optimizer, plain = zero(mine), SGD(theirs.parameters())
    for x in inputs(3):
        loss(mine, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss(theirs, x).backward()
        plain.step()
        plain.zero_grad()
    assert_same_weights(mine, theirs)


def test_many_non_finite_parameters_are_counted():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
    optimizer = zero(model)
    (model(torch.ones(1, 2)).mean() * math.inf).backward()
    with pytest.raises(NonFiniteGradientError, match=r"0\.weight.* and 3 more, on rank 0$"):
        optimizer.step()


def test_a_norm_that_overflows_is_refused_with_its_reason():
    model = nn.Linear(2, 1).double()
    optimizer = zero(model)
    (model(torch.ones(1, 2).double()).sum() * 1e200).backward()
    with pytest.raises(NonFiniteGradientError, match="overflow"):
        optimizer.step()


@pytest.mark.parametrize(
    "parameters",
    [
        lambda model: model.parameters(),
        lambda model: [{"params": model.parameters()}],
        lambda model: [*model.named_parameters(), {"params": list(model.named_parameters())}],
    ],
    ids=["parameters", "groups of parameters", "a mixture"],
)
def test_parameters_without_names_are_refused(parameters):
    with pytest.raises(ValueError, match=r"names: give model.named_parameters\(\)"):
        ZeroOptimizer(parameters(mlp()), SGD, SingleProcessCollectives())


def test_two_parameters_of_one_name_are_refused():
    both = [*nn.Linear(2, 2).named_parameters(), *nn.Linear(2, 2).named_parameters()]
    with pytest.raises(ValueError, match="weight"):
        ZeroOptimizer(both, SGD, SingleProcessCollectives())


@pytest.mark.parametrize("parameters", [[], [("p", nn.Parameter(torch.ones(2), False))]])
def test_nothing_to_train_is_refused(parameters):
    with pytest.raises(ValueError, match="nothing to train"):
        ZeroOptimizer(parameters, SGD, SingleProcessCollectives())
