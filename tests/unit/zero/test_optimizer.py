"""ZeroOptimizer at every stage in a world of one: every torch optimizer, to the bit."""

import copy
import math
import pickle
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from first_of_two import FirstOfTwo
from handmade import Decaying, Lamb, Lion
from torch import nn

from zero import NonFiniteGradientError, SingleProcessCollectives, ZeroOptimizer

STAGES = [(0, "element"), (1, "element"), (1, "parameter"), (2, "element"), (2, "parameter")]
modes = pytest.mark.parametrize(
    "mode",
    [{"stage": stage, "partition": partition} for stage, partition in STAGES],
    ids=[f"{stage}-{partition}" for stage, partition in STAGES],
)
ADAMW = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
OPTIMIZERS = {
    "AdamW": ADAMW,
    "AdamW foreach": partial(ADAMW, foreach=True),
    "AdamW fused": partial(ADAMW, fused=True),
    "Adam amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True, maximize=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "ASGD": partial(torch.optim.ASGD, lr=0.1, t0=1),
    "Rprop": torch.optim.Rprop,
    "SGD": SGD,
    "SGD nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Lion": partial(Lion, lr=0.01, weight_decay=0.1),
    "Decaying": Decaying,
}
BY_PARAMETER = {
    "Muon": torch.optim.Muon,
    "Adafactor": torch.optim.Adafactor,
    "Lamb": partial(Lamb, lr=0.05),
}


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def matrices():
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))


def inputs(steps, dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(6, 4, generator=generator).to(dtype) for _ in range(steps)]


def zero(model, optimizer_class=SGD, /, **options):
    return ZeroOptimizer(
        model.named_parameters(), optimizer_class, SingleProcessCollectives(), **options
    )


def train(model, optimizer, data):
    for x in data:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same_weights(mine, torchs):
    theirs = torchs.state_dict()
    for name, tensor in mine.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS.values(), ids=OPTIMIZERS)
@modes
def test_weights_have_the_bits_of_plain_torch(optimizer_class, mode):
    mine, theirs = mlp(), mlp()
    train(mine, zero(mine, optimizer_class, bucket_bytes=100, **mode), inputs(5))
    train(theirs, optimizer_class(theirs.parameters()), inputs(5))
    assert_same_weights(mine, theirs)


@pytest.mark.parametrize("optimizer_class", BY_PARAMETER.values(), ids=BY_PARAMETER)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_optimizers_of_whole_parameters_have_them_too(optimizer_class, stage):
    mine, theirs = matrices(), matrices()
    optimizer = zero(mine, optimizer_class, stage=stage, partition="parameter")
    train(mine, optimizer, inputs(5))
    train(theirs, optimizer_class(theirs.parameters()), inputs(5))
    assert_same_weights(mine, theirs)


@pytest.mark.parametrize("name", BY_PARAMETER)
@pytest.mark.parametrize("stage", [1, 2])
def test_optimizers_of_whole_parameters_are_refused_by_name_where_they_are_cut(name, stage):
    for given in (BY_PARAMETER[name], partial(partial(BY_PARAMETER[name], lr=0.1), lr=0.2)):
        with pytest.raises(ValueError, match=rf'{name} .*partition="parameter"'):
            zero(matrices(), given, stage=stage)


def test_an_heir_of_such_an_optimizer_is_refused_as_well():
    class Mine(Lamb):
        pass

    with pytest.raises(ValueError, match="Mine"):
        zero(matrices(), Mine, stage=1)


@modes
def test_memory_formats_stay(mode):
    torch.manual_seed(5)
    mine = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 2, groups=2), nn.Flatten()
    ).to(memory_format=torch.channels_last)
    theirs = copy.deepcopy(mine)
    strides = [p.stride() for p in mine.parameters()]
    images = [torch.randn(2, 3, 6, 6) for _ in range(3)]
    train(mine, zero(mine, ADAMW, **mode), images)
    train(theirs, ADAMW(theirs.parameters()), images)
    assert_same_weights(mine, theirs)
    assert [p.stride() for p in mine.parameters()] == strides


class Forked(nn.Module):
    """One branch or the other."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x, left):
        return (self.left if left else self.right)(x)


@pytest.mark.parametrize("emptied", [True, False])
@modes
def test_unused_parameters_are_left_alone(mode, emptied):
    torch.manual_seed(3)
    mine = Forked()
    theirs = copy.deepcopy(mine)
    optimizer, plain = zero(mine, ADAMW, bucket_bytes=1, **mode), ADAMW(theirs.parameters())
    for step, x in enumerate(inputs(5)):
        for model, stepper in ((mine, optimizer), (theirs, plain)):
            model(x, left=step in (0, 3)).square().mean().backward()
            stepper.step()
        (mine if emptied else optimizer).zero_grad()  # the model's own leaves no gradient at all
        if emptied and mode["stage"] == 2:
            optimizer.zero_grad()  # what is kept is the optimizer's, not the model's
        plain.zero_grad()
    assert_same_weights(mine, theirs)


@modes
def test_a_parameter_that_is_never_used_has_no_state(mode):
    model = Forked()
    optimizer = zero(model, ADAMW, **mode)
    for x in inputs(2):
        model(x, left=True).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert {piece.name for piece in optimizer.slices() if piece.tensors} == {
        "left.weight",
        "left.bias",
    }


# 16 bits: torch on an fp32 copy, fed with the 16-bit gradients; weights are rounded afterwards.


class Masters:
    """The oracle of 16-bit parameters: the model's own gradients, an update in fp32."""

    def __init__(self, model, optimizer_class):
        self.model = copy.deepcopy(model)
        self._masters = [nn.Parameter(p.detach().float()) for p in self.model.parameters()]
        self._optimizer = optimizer_class(self._masters)

    def step(self, loss, scale=1.0):
        (loss * scale).backward()
        for p, master in zip(self.model.parameters(), self._masters, strict=True):
            master.grad = p.grad.float() / scale
            p.grad = None
        self._optimizer.step()
        with torch.no_grad():
            for p, master in zip(self.model.parameters(), self._masters, strict=True):
                p.copy_(master)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("optimizer_class", [ADAMW, SGD], ids=["AdamW", "SGD"])
@modes
def test_16_bit_parameters_have_fp32_masters(dtype, optimizer_class, mode):
    mine = mlp().to(dtype)
    oracle = Masters(mine, optimizer_class)
    optimizer = zero(mine, optimizer_class, **mode)
    for x in inputs(20, dtype):
        oracle.step(oracle.model(x).float().square().mean())
        mine(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_weights(mine, oracle.model)
    assert optimizer.memory().master == 4 * sum(p.numel() for p in mine.parameters())


@modes
def test_weights_that_are_loaded_into_16_bit_parameters_stay(mode):
    mine, other = mlp().bfloat16(), mlp().bfloat16()
    optimizer = zero(mine, partial(torch.optim.SGD, lr=0.0), model=mine, **mode)
    train(mine, optimizer, inputs(1, torch.bfloat16))
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1)
    mine.load_state_dict(other.state_dict())
    train(mine, optimizer, inputs(1, torch.bfloat16))
    assert_same_weights(mine, other)


@modes
def test_weights_that_are_loaded_into_a_part_stay_too(mode):
    mine, other = mlp().bfloat16(), mlp().bfloat16()
    optimizer = zero(mine, partial(torch.optim.SGD, lr=0.0), model=mine, **mode)
    train(mine, optimizer, inputs(1, torch.bfloat16))
    with torch.no_grad():
        other[3].weight.add_(1)
    mine[3].load_state_dict(other[3].state_dict())
    train(mine, optimizer, inputs(1, torch.bfloat16))
    assert_same_weights(mine, other)


@modes
def test_the_scale_halves_at_an_overflow_and_training_goes_on(mode):
    mine = mlp().half()
    optimizer = zero(mine, ADAMW, loss_scale="dynamic", **mode)
    oracle = Masters(mine, ADAMW)
    one, skipped = torch.ones(()), []
    for x in inputs(8, torch.float16):
        scale = float(optimizer.scale(one))
        optimizer.scale(100 * mine(x).float().square().mean()).backward()
        skipped.append(optimizer.step().skipped)
        optimizer.zero_grad()
        assert float(optimizer.scale(one)) == (scale / 2 if skipped[-1] else scale)
        if not skipped[-1]:
            oracle.step(100 * oracle.model(x).float().square().mean(), scale)
        assert_same_weights(mine, oracle.model)
    assert skipped[0]
    assert not skipped[-1]


@modes
def test_a_scale_of_a_power_of_two_leaves_no_trace(mode):
    mine, theirs = mlp(), mlp()
    optimizer, plain = zero(mine, SGD, loss_scale=1024.0, **mode), SGD(theirs.parameters())
    for x in inputs(4):
        optimizer.scale(mine(x).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    train(theirs, plain, inputs(4))
    assert_same_weights(mine, theirs)


@modes
def test_a_scale_that_no_loss_was_multiplied_by_is_refused(mode):
    model = mlp()
    optimizer = zero(model, SGD, loss_scale="dynamic", **mode)
    x = inputs(1)[0]
    with pytest.raises(RuntimeError, match=r"call optimizer\.scale\(loss\)\.backward\(\), or"):
        model(x).square().mean().backward()
    optimizer.zero_grad()
    optimizer.scale(model(x).square().mean()).backward()
    optimizer.step()


@modes
@pytest.mark.parametrize(
    "change",
    [
        lambda groups, new: groups[0]["params"].append(new),
        lambda groups, new: groups[0]["params"].pop(),
        lambda groups, new: groups.pop(),
        lambda groups, new: groups.append({**groups[0], "params": [new]}),
    ],
    ids=["add", "remove", "remove a group", "add a group"],
)
def test_parameters_that_are_put_into_groups_by_hand_are_refused(mode, change):
    model = mlp()
    optimizer = zero(model, SGD, **mode)
    change(optimizer.param_groups, nn.Parameter(torch.ones(3)))
    model(inputs(1)[0]).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"changed by hand.* optimizer\.add_param_group for new"):
        optimizer.step()


def test_a_scale_grows_after_two_thousand_good_steps():
    model = nn.Linear(1, 1, bias=False)
    optimizer = zero(model, partial(torch.optim.SGD, lr=0.0), loss_scale="dynamic")
    one = torch.ones(())
    first = float(optimizer.scale(one))
    for _ in range(1999):
        optimizer.backward(model(torch.ones(1, 1)).sum() * 1e-6, 1)
        optimizer.step()
        optimizer.zero_grad()
    assert float(optimizer.scale(one)) == first
    optimizer.backward(model(torch.ones(1, 1)).sum() * 1e-6, 1)
    optimizer.step()
    assert float(optimizer.scale(one)) == 2 * first


# Gradients.


def unscale(parameter):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD([parameter], lr=1.0))


@pytest.mark.parametrize("partition", ["element", "parameter"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_sharded_gradient_refuses_every_use(stage, partition):
    model = mlp()
    options = {"stage": stage, "partition": partition}
    optimizer = ZeroOptimizer(model.named_parameters(), SGD, FirstOfTwo(), **options)
    uses = [
        lambda p: nn.utils.clip_grad_norm_([p], 1.0),
        lambda p: nn.utils.clip_grad_value_([p], 1.0),
        lambda p: p.grad.norm(),
        lambda p: p.grad.mul_(2),
        lambda p: p.grad * torch.ones(()),
        lambda p: torch.ones_like(p).mul(p.grad),
        lambda p: p.grad.add_(1.0),
        lambda p: p.grad.clone(),
        lambda p: p.grad.detach(),
        lambda p: p.grad.tolist(),
        lambda p: p.grad.numpy(),
        lambda p: p.grad.sum().item(),
        lambda p: p.grad[0],
        lambda p: p.grad.copy_(p),
        lambda p: torch.add(torch.ones(8, 4), 1.0, out=p.grad),
        lambda p: torch.cat([p, p.grad]),
        unscale,
    ]
    for sync in (False, True):
        with nullcontext() if sync else optimizer.no_sync():
            model(inputs(1)[0]).square().mean().backward()
        for use in uses:
            with pytest.raises(RuntimeError, match=r"of 0\.weight is sharded .*full_gradient"):
                use(model[0].weight)
        assert "clip_grad_norm_" in repr(model[0].weight.grad)
    optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_a_gradient_of_a_tensor_that_is_not_trained_is_refused():
    optimizer = zero(mlp())
    with pytest.raises(ValueError, match="no parameter of this optimizer"):
        optimizer.full_gradient(nn.Parameter(torch.ones(1)))


@modes
def test_stop_raises_and_training_goes_on(mode):
    mine, theirs = mlp(), mlp()
    optimizer, plain = zero(mine, ADAMW, **mode), ADAMW(theirs.parameters())
    first, second = inputs(2)
    train(mine, optimizer, [first])
    train(theirs, plain, [first])
    (mine(second).square().mean() + mine[3].bias[1] * math.nan).backward()
    with pytest.raises(NonFiniteGradientError, match=r"nan.* not finite in 3\.bias.* rank 0"):
        optimizer.step()
    assert_same_weights(mine, theirs)
    optimizer.zero_grad()
    train(mine, optimizer, [second])
    train(theirs, plain, [second])
    assert_same_weights(mine, theirs)


# What is refused.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 3}, "stage 3"),
        ({"stage": -1}, "stage -1"),
        ({"partition": "row"}, "'row'.*element or parameter"),
        ({"shard_weights": []}, "shard_weights are .*each of the 1 ranks"),
        ({"shard_weights": [1, 1]}, "shard_weights are .*each of the 1 ranks"),
        ({"shard_weights": [-1]}, "shard_weights are .-1.: give whole numbers from 0"),
        ({"shard_weights": [0]}, "not all 0"),
        ({"shard_weights": [0.5]}, "whole numbers"),
        ({"non_finite": "ignore"}, "'ignore'.*stop or skip"),
        ({"loss_scale": -1.0}, "loss_scale is -1.0"),
        ({"loss_scale": 0.0}, "loss_scale is 0.0"),
        ({"loss_scale": math.inf}, "loss_scale is inf"),
        ({"loss_scale": "static"}, "loss_scale is 'static'"),
        ({"loss_scale": True}, "loss_scale is True"),
        ({"stage": True}, "stage True"),
        ({"norm_type": "two"}, "norm_type is 'two'"),
        ({"max_grad_norm": "1"}, "max_grad_norm is '1'"),
        ({"norm_type": 0.0}, "norm_type is 0.0"),
        ({"norm_type": -2.0}, "norm_type is -2.0"),
        ({"norm_type": math.nan}, "norm_type is nan"),
        ({"max_grad_norm": -1.0}, "max_grad_norm is -1.0"),
        ({"max_grad_norm": math.nan}, "max_grad_norm is nan"),
        ({"lr": -1.0}, "learning rate"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_bad_arguments_are_refused_and_leave_the_model_alone(stage, options, words):
    mine, theirs = mlp(), mlp()
    with pytest.raises(ValueError, match=words):
        zero(mine, SGD, **{"stage": stage, "model": mine, **options})
    for model in (mine, theirs):
        plain = SGD(model.parameters())
        for x in inputs(2):  # no hook of the refused one counts backwards
            model(x).square().mean().backward()
            model(x).square().mean().backward()
            plain.step()
            plain.zero_grad()
    assert_same_weights(mine, theirs)


@modes
def test_parameters_on_two_devices_are_refused(mode):
    here = nn.Parameter(torch.ones(2))
    there = nn.Parameter(torch.ones(2, device=torch.device("meta")))
    with pytest.raises(ValueError, match="here on cpu, there on meta"):
        ZeroOptimizer([("here", here), ("there", there)], SGD, SingleProcessCollectives(), **mode)


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_that_share_memory_are_refused(stage):
    whole = torch.randn(6)
    pairs = [("all", nn.Parameter(whole)), ("tail", nn.Parameter(whole[4:]))]
    with pytest.raises(ValueError, match="all and tail share memory"):
        ZeroOptimizer(pairs, SGD, SingleProcessCollectives(), stage=stage)
    assert pairs[0][1].data_ptr() == whole.data_ptr()  # nothing was moved


@modes
def test_a_group_of_known_names_is_refused(mode):
    model = mlp()
    optimizer = zero(model, **mode)
    with pytest.raises(ValueError, match=r"0\.weight"):
        optimizer.add_param_group({"params": [("0.weight", nn.Parameter(torch.ones(2)))]})
    with pytest.raises(ValueError, match="names"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    elsewhere = nn.Parameter(torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match=r"different devices \(.* on cpu, far on meta\)"):
        optimizer.add_param_group({"params": [("far", elsewhere)]})
    train(model, optimizer, inputs(1))


class Averaged(torch.optim.SGD):
    """Evaluates another point than it trains at, as schedule-free optimizers do."""

    def train(self):
        self._swap(True)

    def eval(self):
        self._swap(False)

    @property
    def training(self):
        return self.param_groups[0].get("training", True)

    @torch.no_grad()
    def _swap(self, training):
        for group in self.param_groups:
            if group.get("training", True) != training:
                for p in group["params"]:
                    p.add_(1.0 if training else -1.0)
                group["training"] = training


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_not_copied(copied):
    model = mlp()
    optimizer = ZeroOptimizer(model.named_parameters(), SGD, SingleProcessCollectives())
    with pytest.raises(TypeError, match=r"full_state_dict\(\), and load that into another"):
        copied((optimizer, model) if copied is copy.deepcopy else optimizer)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_only_the_torch_optimizer_has_is_handed_on(stage):
    model = nn.Linear(3, 2)
    optimizer = ZeroOptimizer(
        model.named_parameters(), Averaged, SingleProcessCollectives(), stage=stage, lr=0.1
    )
    before = model.weight.detach().clone()
    optimizer.eval()
    assert torch.equal(model.weight, before - 1)
    assert not optimizer.training
    assert optimizer.param_groups[0]["training"] is False
    optimizer.train()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight, before - 0.1)
    assert not hasattr(optimizer, "no_such_thing")
    half = nn.Linear(3, 2).bfloat16()
    masters = ZeroOptimizer(
        half.named_parameters(), Averaged, SingleProcessCollectives(), stage=stage, lr=0.1
    )
    with pytest.raises(AttributeError, match="eval of Averaged is of use with whole parameters"):
        masters.eval()
