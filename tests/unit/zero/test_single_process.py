"""ZeroOptimizer in a world of one, against plain torch."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from zero import NonFiniteGradientError, SingleProcessCollectives, StepResult, ZeroOptimizer
from zero.param_groups import STAGES

ADAMW = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
OPTIMIZERS = {
    "AdamW": ADAMW,
    "SGD": SGD,
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
}
SMALL_BUCKETS = 64  # bytes


class Tied(nn.Module):
    """A language model whose embedding and head are one parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.middle(self.embed(tokens))))


class Forked(nn.Module):
    """One branch or the other."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x, left):
        return (self.left if left else self.right)(x)


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


@pytest.mark.parametrize("bucket_bytes", [SMALL_BUCKETS, 1 << 20])
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_weights_have_the_bits_of_plain_torch(optimizer_class, bucket_bytes):
    mine, theirs = pair(mlp())
    train(mine, zero(mine, optimizer_class, bucket_bytes=bucket_bytes), inputs(4))
    train(theirs, optimizer_class(theirs.parameters()), inputs(4))
    assert_same_weights(mine, theirs)


def test_options_go_to_the_wrapped_optimizer():
    mine, theirs = pair(mlp())
    train(mine, zero(mine, torch.optim.SGD, lr=0.3, nesterov=True, momentum=0.5), inputs(3))
    train(theirs, torch.optim.SGD(theirs.parameters(), 0.3, 0.5, nesterov=True), inputs(3))
    assert_same_weights(mine, theirs)


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


@pytest.mark.parametrize(
    "schedule",
    [
        partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
        partial(lr_scheduler.StepLR, step_size=2, gamma=0.3),
        partial(lr_scheduler.CosineAnnealingLR, T_max=5),
        partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=5),
    ],
    ids=["LambdaLR", "StepLR", "CosineAnnealingLR", "OneCycleLR"],
)
def test_schedulers_of_torch_work_unchanged(schedule):
    mine, theirs = pair(mlp())
    optimizer, plain = zero(mine), SGD(theirs.parameters())
    ours, torchs = schedule(optimizer), schedule(plain)
    for x in inputs(4):
        train(mine, optimizer, [x], ours)
        train(theirs, plain, [x], torchs)
        assert ours.get_last_lr() == torchs.get_last_lr()
    assert_same_weights(mine, theirs)


def test_is_a_torch_optimizer():
    assert isinstance(zero(mlp()), torch.optim.Optimizer)


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_resumed_run_equals_an_uninterrupted_one(optimizer_class):
    data = inputs(6)
    whole, first = pair(mlp())
    train(whole, zero(whole, optimizer_class), data)

    saved = zero(first, optimizer_class)
    train(first, saved, data[:3])
    state = copy.deepcopy(saved.state_dict())
    second = copy.deepcopy(first)
    resumed = zero(second, optimizer_class)
    resumed.load_state_dict(state)
    train(second, resumed, data[3:])
    assert_same_weights(second, whole)


def test_state_carries_what_a_scheduler_changed():
    optimizer = zero(mlp())
    lr_scheduler.LambdaLR(optimizer, lambda step: 0.25)
    fresh = zero(mlp())
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.param_groups[0]["lr"] == 0.1 * 0.25
    assert fresh.param_groups[0]["initial_lr"] == 0.1


def test_the_state_of_each_parameter_is_at_hand():
    model = mlp()
    optimizer = zero(model, ADAMW)
    train(model, optimizer, inputs(2))
    assert [optimizer.state[p]["step"] for p in model.parameters()] == [2] * 6
    fresh = zero(model, ADAMW)
    fresh.load_state_dict(optimizer.state_dict())
    assert [fresh.state[p]["step"] for p in model.parameters()] == [2] * 6


@pytest.mark.parametrize("max_norm", [0.01, 1e9])
def test_clipping_is_that_of_torch(max_norm):
    mine, theirs = pair(mlp())
    optimizer = zero(mine, max_grad_norm=max_norm, bucket_bytes=SMALL_BUCKETS)
    plain = SGD(theirs.parameters())
    for x in inputs(3):
        theirs(x).square().mean().backward()
        norm = float(nn.utils.clip_grad_norm_(theirs.parameters(), max_norm))
        plain.step()
        [result] = train(mine, optimizer, [x])
        assert result.grad_norm == pytest.approx(norm, rel=1e-6)
        assert result.clip_coef == pytest.approx(min(1.0, max_norm / (norm + 1e-6)), rel=1e-6)
        assert result.clipped_norm == pytest.approx(norm_of(theirs), rel=1e-6)
        plain.zero_grad()
    for ours, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-7)


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


def test_frozen_parameters_are_left_alone():
    mine, theirs = pair(mlp())
    for model in (mine, theirs):
        model[0].weight.requires_grad_(False)
    before = mine[0].weight.clone()
    optimizer = zero(mine, ADAMW)
    train(mine, optimizer, inputs(3))
    train(theirs, ADAMW(theirs.parameters()), inputs(3))
    assert_same_weights(mine, theirs)
    assert torch.equal(mine[0].weight, before)
    assert mine[0].weight.grad is None
    assert mine[0].weight not in optimizer.state


@pytest.mark.parametrize("bucket_bytes", [SMALL_BUCKETS, 1 << 20])
def test_tied_parameters_are_one(bucket_bytes):
    torch.manual_seed(3)
    mine, theirs = pair(Tied())
    tokens = [torch.randint(7, (5,)) for _ in range(3)]
    train(mine, zero(mine, ADAMW, bucket_bytes=bucket_bytes), tokens)
    train(theirs, ADAMW(theirs.parameters()), tokens)
    assert_same_weights(mine, theirs)
    assert mine.head.weight is mine.embed.weight


@pytest.mark.parametrize("emptied", [True, False])
def test_unused_parameters_are_left_alone(emptied):
    mine, theirs = pair(Forked())
    optimizer, plain = zero(mine, ADAMW, bucket_bytes=1), ADAMW(theirs.parameters())
    x = torch.randn(5, 3)
    for step in range(4):
        mine(x, left=step % 2).square().mean().backward()
        optimizer.step()
        (mine if emptied else optimizer).zero_grad()  # the model's own leaves no gradient at all
        theirs(x, left=step % 2).square().mean().backward()
        plain.step()
        plain.zero_grad()
    assert_same_weights(mine, theirs)


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


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("bucket_bytes", [SMALL_BUCKETS, 1 << 20])
def test_the_models_own_zero_grad_will_do(bucket_bytes, set_to_none):
    mine, theirs = pair(mlp())
    optimizer, plain = zero(mine, bucket_bytes=bucket_bytes), SGD(theirs.parameters())
    for x in inputs(3):
        mine.zero_grad(set_to_none=set_to_none)
        mine(x).square().mean().backward()
        optimizer.step()
        train(theirs, plain, [x])
    assert_same_weights(mine, theirs)


def test_without_zero_grad_gradients_accumulate_as_in_torch():
    mine, theirs = pair(mlp())
    optimizer, plain = zero(mine), SGD(theirs.parameters())
    for x in inputs(3):
        for model, stepper in ((mine, optimizer), (theirs, plain)):
            model(x).square().mean().backward()
            stepper.step()
    assert_same_weights(mine, theirs)


@pytest.mark.filterwarnings("ignore:the sparse gradients of:UserWarning")
@pytest.mark.parametrize("emptied", [True, False])
def test_sparse_gradients_count_as_dense_ones(emptied):
    def model(sparse):
        torch.manual_seed(4)
        return nn.Sequential(nn.Embedding(6, 3, sparse=sparse), nn.Linear(3, 2))

    mine, theirs = model(sparse=True), model(sparse=False)
    optimizer, plain = zero(mine), SGD(theirs.parameters())
    for tokens in torch.tensor([[1, 1, 2], [0, 5, 1], [3, 3, 3]]):
        if emptied:
            mine.zero_grad(set_to_none=True)
        train(mine, optimizer, [tokens])
        train(theirs, plain, [tokens])
    assert_same_weights(mine, theirs)


@pytest.mark.parametrize("fused", [True, False])
def test_channels_last_weights_train(fused):
    torch.manual_seed(5)
    mine, theirs = pair(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
    images = [torch.randn(2, 3, 6, 6) for _ in range(3)]
    optimizer_class = partial(torch.optim.AdamW, lr=0.05, fused=fused)
    train(mine, zero(mine, optimizer_class), images)
    train(theirs, optimizer_class(theirs.parameters()), images)
    assert_same_weights(mine, theirs)


def test_a_non_finite_gradient_is_refused_before_anything_changes():
    mine, theirs = pair(mlp())
    optimizer, plain = zero(mine, ADAMW), ADAMW(theirs.parameters())
    first, second = inputs(2)
    train(mine, optimizer, [first])
    train(theirs, plain, [first])

    (mine(second).square().mean() + mine[3].bias[1] * math.nan).backward()
    with pytest.raises(NonFiniteGradientError, match=r"nan: not finite in 3\.bias, on rank 0$"):
        optimizer.step()
    assert_same_weights(mine, theirs)

    optimizer.zero_grad()
    train(mine, optimizer, [second])
    train(theirs, plain, [second])
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


def test_an_unknown_stage_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=rf"stage 7 .*{', '.join(map(str, STAGES))}"):
        zero(mlp(), stage=7)


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


def test_parameters_on_different_devices_are_refused():
    here = nn.Parameter(torch.ones(2))
    there = nn.Parameter(torch.ones(2, device=torch.device("meta")))
    with pytest.raises(ValueError, match="here on cpu, there on meta"):
        ZeroOptimizer([("here", here), ("there", there)], SGD, SingleProcessCollectives())


def test_a_group_may_come_later():
    mine, theirs = pair(mlp())
    for model in (mine, theirs):
        model[0].requires_grad_(False)
    optimizer, plain = zero(mine, ADAMW), ADAMW(p for p in theirs.parameters() if p.requires_grad)
    first, second = inputs(2)
    train(mine, optimizer, [first])
    train(theirs, plain, [first])
    for model in (mine, theirs):
        model[0].requires_grad_(True)
    optimizer.add_param_group({"params": mine[0].named_parameters(prefix="0"), "lr": 0.2})
    plain.add_param_group({"params": theirs[0].parameters(), "lr": 0.2})
    train(mine, optimizer, [second])
    train(theirs, plain, [second])
    assert_same_weights(mine, theirs)
