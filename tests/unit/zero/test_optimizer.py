"""ZeroOptimizer at every stage in a world of one: every torch optimizer, to the bit."""

import copy
import math
import pickle
from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from first_of_two import STAGES, WORLDS, FirstOfTwo, OnesOfRank0, assert_same_weights
from first_of_two import zero as zero_of
from handmade import Lion, Multiplied
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zero import NonFiniteGradientError, Options, SingleProcessCollectives, ZeroOptimizer
from zero.trials import check_arguments

MODES = [
    {"stage": stage, "partition": partition}
    for stage, partition in [(0, "element"), *product((1, 2), ("element", "parameter"))]
]
modes = pytest.mark.parametrize("mode", MODES, ids=str)
ADAMW = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


def mlp(*, bias=True):
    torch.manual_seed(1)
    norm = nn.LayerNorm(8) if bias else nn.Identity()  # without biases all are matrices
    return nn.Sequential(nn.Linear(4, 8, bias=bias), norm, nn.Tanh(), nn.Linear(8, 3, bias=bias))


def inputs(steps, dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(6, 4, generator=generator).to(dtype) for _ in range(steps)]


def zero(model, kind=SGD, /, world=SingleProcessCollectives, **options):
    return zero_of(model, kind, world, **options)


def train(model, optimizer, data):
    for x in data:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_model_in_place_of_its_parameters_is_trained_as_they_are():
    mine, theirs = mlp(), mlp()
    train(mine, ZeroOptimizer(mine, SGD, SingleProcessCollectives(), stage=2), inputs(3))
    train(theirs, zero(theirs, SGD), inputs(3))
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


# Gradients.


def unscale(parameter):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD([parameter], lr=1.0))


@pytest.mark.parametrize("partition", ["element", "parameter"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_sharded_gradient_refuses_every_use(stage, partition):
    model = mlp()
    optimizer = zero(model, SGD, FirstOfTwo, stage=stage, partition=partition)
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
    with pytest.raises(ValueError, match="no parameter of this optimizer"):
        optimizer.full_gradient(nn.Parameter(torch.ones(1)))
    optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_what_is_not_finite_is_named():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
    optimizer = zero(model)
    (model(torch.ones(1, 2)).mean() * math.inf).backward()
    with pytest.raises(NonFiniteGradientError, match=r"0\.weight.* and 3 more, on rank 0$"):
        optimizer.step()
    model = nn.Linear(2, 1).double()
    optimizer = zero(model)
    (model(torch.ones(1, 2).double()).sum() * 1e200).backward()
    with pytest.raises(NonFiniteGradientError, match="overflow"):
        optimizer.step()


# What is refused.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 3}, "stage 3"),
        ({"partition": "row"}, "'row'.*auto, element, parameter"),
        ({"non_finite": "ignore"}, "'ignore'.*stop or skip"),
        ({"loss_scale": -1.0}, "loss_scale is -1.0"),
        ({"loss_scale": "static"}, "loss_scale is 'static'"),
        ({"stage": True}, "stage True"),
        ({"norm_type": "two"}, "norm_type is 'two'"),
        ({"norm_type": 0.0}, "norm_type is 0.0"),
        ({"max_grad_norm": -1.0}, "max_grad_norm is -1.0"),
        ({"check_every": True}, "check_every is True"),
        ({"bucket_bytes": 0}, "bucket_bytes is 0"),
        ({"overlap_forward": "no"}, "overlap_forward is 'no'"),
        ({"options": Options()}, r"stage is given beside Options\(\.\.\.\)"),
        ({"lr": -1.0}, "learning rate"),
        ({"gather_dtype": torch.int8}, r"gather_dtype is torch\.int8: .*torch\.bfloat16"),
    ],
    ids=str,
)
@STAGES
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


def test_the_exponent_of_a_norm_is_above_0():
    model = mlp()
    optimizer = zero(model, SGD)
    model(inputs(1)[0]).sum().backward()
    for wrong in (0.0, -math.inf):
        with pytest.raises(ValueError, match=f"norm_type is {wrong}"):
            optimizer.clip_grad_norm_(1.0, norm_type=wrong)


def twice(names):
    return [(name, nn.Parameter(torch.ones(2))) for name in names]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (lambda: mlp().parameters(), r"names: give model.named_parameters\(\)"),
        (lambda: [{"params": mlp().parameters()}], r"names: give model.named_parameters\(\)"),
        (
            lambda: [*mlp().named_parameters(), {"params": list(mlp().named_parameters())}],
            r"names: give model.named_parameters\(\)",
        ),
        (lambda: twice(["weight", "weight"]), "weight"),
        (list, "nothing to train"),
        (lambda: [("p", nn.Parameter(torch.ones(2), False))], "nothing to train"),
        (
            lambda: [*twice(["here"]), ("there", nn.Parameter(torch.ones(2, device="meta")))],
            "here on cpu, there on meta",
        ),
    ],
    ids=["parameters", "groups", "a mixture", "one name", "none", "frozen", "two devices"],
)
@modes
def test_parameters_that_cannot_train_are_refused(mode, parameters, words):
    with pytest.raises(ValueError, match=words):
        zero(parameters(), **mode)


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_that_share_memory_are_refused(stage):
    whole = torch.randn(6)
    pairs = [("all", nn.Parameter(whole)), ("tail", nn.Parameter(whole[4:]))]
    with pytest.raises(ValueError, match="all and tail share memory"):
        zero(pairs, stage=stage)
    assert pairs[0][1].data_ptr() == whole.data_ptr()  # nothing was moved


@WORLDS
@STAGES
def test_16_bit_parameters_that_share_memory_are_refused_at_every_stage(stage, world):
    def two(dtype):
        whole = torch.ones(4, dtype=dtype)
        return [("a", nn.Parameter(whole)), ("b", nn.Parameter(whole[2:]))]

    first, second = two(torch.bfloat16)
    words = r"^a and b share memory.*: make them one Parameter .*, or give each its own$"
    with pytest.raises(ValueError, match=words):
        zero([first, second], world=world, stage=stage)
    if stage > 0:
        return
    optimizer = zero([first], world=world)
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group({"params": [second]})
    (_, a), (_, b) = pairs = two(torch.float32)
    optimizer = zero(pairs, torch.optim.SGD, world=world, lr=0.25)
    (a.sum() + 2 * b.sum()).backward()
    optimizer.step()
    assert a.tolist() == [0.75, 0.75, 0.25, 0.25]  # as in torch


def in_two(model, stage):
    return zero(model, SGD, world=FirstOfTwo, model=model, stage=stage)


def frozen(model):
    model.late = nn.Linear(4, 8)
    model.late.weight = nn.Parameter(model[0].weight.data, requires_grad=False)


def turned(model):
    model.late = nn.Parameter(model[0].weight.data.T, requires_grad=False)


def of_another_dtype(model):
    model.register_buffer("late", model[0].weight.data.view(torch.int32))


def whole_of_parts(model):
    model.register_buffer("late", torch.randn(20, 4))
    model[0].weight = nn.Parameter(model.late[3:11])


def every_second_row(model):
    whole = torch.randn(16, 4)
    model.register_buffer("late", whole[::2])
    model[0].weight = nn.Parameter(whole[8:])


ALIASES = [frozen, turned, of_another_dtype, whole_of_parts, every_second_row]
ALIASES.append(lambda model: model.register_buffer("late", model[0].weight.data, persistent=False))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("alias", ALIASES)
def test_other_tensors_of_the_model_in_the_memory_of_a_trained_parameter_are_refused(stage, alias):
    model = mlp()
    alias(model)
    memory = model[0].weight.data_ptr()
    with pytest.raises(ValueError, match=r"share memory, which .*, or use stage=0$") as told:
        in_two(model, stage)
    assert "0.weight" in str(told.value)
    assert "late" in str(told.value)
    assert model[0].weight.data_ptr() == memory  # nothing was moved
    in_two(model[3], stage)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_frozen_parameter_that_is_given_without_a_model_may_share_no_memory_either(stage):
    model = mlp()
    frozen(model)
    with pytest.raises(ValueError, match=r"0\.weight and late\.weight share memory"):
        zero(list(model.named_parameters()), stage=stage)


@pytest.mark.parametrize("stage", [1, 2])
def test_memory_that_no_trained_parameter_leaves_may_be_shared(stage):
    model = mlp()
    whole = torch.randn(10, 8)
    model.register_buffer("before", whole[:4])
    model[3].weight = nn.Parameter(whole[4:7])
    model.after = nn.Parameter(whole[7:], requires_grad=False)
    model.register_buffer("also", model.after.data)
    model.again, model.tied = model[0], nn.Linear(4, 8)
    model.tied.bias = model[0].bias
    optimizer = in_two(model, stage)
    model.late = nn.Parameter(model[0].weight.data, requires_grad=False)
    model.more = nn.Linear(2, 2)
    optimizer.add_param_group({"params": list(model.more.named_parameters(prefix="more"))})
    with pytest.raises(ValueError, match=r"0\.weight and late share memory"):
        in_two(model, stage)  # moves it once more


@pytest.mark.parametrize("stage", [1, 2])
def test_memory_shared_with_other_processes_is_refused_but_not_a_mapped_file(stage, tmp_path):
    model = mlp().share_memory()
    with pytest.raises(ValueError, match=r"^0\.weight is in memory .*other processes.*stage=0"):
        in_two(model, stage)
    in_two(copy.deepcopy(model), stage)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    mapped = torch.load(tmp_path / "model.pt", mmap=True)
    model.load_state_dict(mapped, assign=True)
    in_two(model, stage)


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


class Copying(torch.optim.SGD):
    """Copies the parameters when it is made, as Lookahead and penalties of a distance do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        self.copies = [p.clone() for group in self.param_groups for p in group["params"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@STAGES
def test_rank_0s_values_travel_once_and_before_the_torch_optimizer_is_made(stage, dtype):
    class Counting(OnesOfRank0):
        def broadcast(self, tensor, root=0):
            sent.append(tensor.numel())
            return super().broadcast(tensor, root)

    sent, model = [], nn.BatchNorm1d(3).to(dtype)
    nn.init.constant_(model.weight, 2.0)
    model.bias.requires_grad_(False)
    optimizer = zero(model, Copying, Counting, model=model, stage=stage, partition="element")
    values = list(model.state_dict().values())
    assert sum(sent) == sum(tensor.numel() for tensor in values)
    for tensor in (*values, *optimizer._inner.copies):
        assert bool((tensor == 1).all())


@pytest.mark.parametrize(
    ("world", "dtype", "gather_dtype"),
    [
        (SingleProcessCollectives, torch.float32, torch.bfloat16),
        (SingleProcessCollectives, torch.bfloat16, None),
        (FirstOfTwo, torch.float32, None),  # its other rank sends nothing in another dtype
        (FirstOfTwo, torch.bfloat16, torch.bfloat16),
    ],
)
@STAGES
def test_the_torch_optimizer_reads_attributes_of_the_parameters(stage, world, dtype, gather_dtype):
    model = nn.Linear(3, 2).bfloat16().to(dtype)  # values that gather_dtype does not round
    model.weight.lr_mult, model.weight.where = 0.0, lambda: "nothing that can be saved"
    options = {"stage": stage, "partition": "element", "gather_dtype": gather_dtype, "lr": 0.5}
    optimizer = zero(model, Multiplied, world, **options)
    added = nn.Parameter(torch.ones(8, dtype=dtype))
    added.lr_mult = 0.0
    optimizer.add_param_group({"params": [("added", added)]})
    first = [p.detach().clone() for p in (model.weight, model.bias, added)]

    def moved():
        loss = model(torch.ones(1, 3, dtype=dtype)).sum() + added.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        now = [p.detach().clone() for p in (model.weight, model.bias, added)]
        return [not torch.equal(*both) for both in zip(now, first, strict=True)]

    assert moved() == [False, True, False]
    added.lr_mult = 1.0  # attributes may change
    assert moved() == [False, True, True]
    del model.weight.lr_mult
    assert moved() == [True, True, True]
    for piece in optimizer.slices():
        assert not any(vars(tensor) for tensor in piece.tensors.values())


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_an_optimizer_of_torch_that_is_not_copied(copied):
    model = mlp()
    optimizer = zero(model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    with pytest.raises(TypeError, match=r"full_state_dict\(\), and load that into another"):
        copied((optimizer, model) if copied is copy.deepcopy else optimizer)


@STAGES
def test_what_only_the_torch_optimizer_has_is_handed_on(stage):
    model = nn.Linear(3, 2)
    optimizer = zero(model, Averaged, stage=stage, lr=0.1)
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
    masters = zero(nn.Linear(3, 2).bfloat16(), Averaged, stage=stage, lr=0.1)
    with pytest.raises(AttributeError, match="eval of Averaged is of use with whole parameters"):
        masters.eval()


# Parameters that are rounded to a 16-bit gather dtype, with master weights at their owners.

SHARDED = pytest.mark.parametrize("stage", [1, 2])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def masters_of(optimizer):
    return {piece.name: piece.tensors["master"] for piece in optimizer.slices()}


@DTYPES
@SHARDED
def test_parameters_are_the_rounded_master_weights(stage, dtype):
    model, masters, reference = mlp(), mlp(), mlp()
    optimizer = zero(model, ADAMW, stage=stage, gather_dtype=dtype, bucket_bytes=150)
    plain = ADAMW(masters.parameters())
    for number, x in enumerate(inputs(3)):
        for parameter, master in zip(reference.parameters(), masters.parameters(), strict=True):
            # The first forward reads what was never gathered.
            parameter.data = master.detach().to(dtype).float() if number else master.detach()
            parameter.grad = None
        reference(x).square().mean().backward()
        for parameter, master in zip(reference.parameters(), masters.parameters(), strict=True):
            master.grad = parameter.grad
        plain.step()
    train(model, optimizer, inputs(3))
    found = masters_of(optimizer)
    for name, master in masters.named_parameters():
        assert torch.equal(model.get_parameter(name), master.to(dtype).float())
        assert not torch.equal(model.get_parameter(name), master)
        assert torch.equal(found[name], master.detach().flatten())


@SHARDED
def test_what_is_written_into_a_parameter_replaces_its_master_weights_and_others_resume(stage):
    model, options = mlp(), {"stage": stage, "gather_dtype": torch.bfloat16}
    optimizer = zero(model, ADAMW, **options)
    train(model, optimizer, inputs(3))
    other = copy.deepcopy(model)
    resumed = zero(other, ADAMW, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, inputs(3))
    train(other, resumed, inputs(3))
    assert_same_weights(other, model)
    with torch.no_grad():
        model[0].bias.fill_(1 / 3)
    before = {name: master.clone() for name, master in masters_of(optimizer).items()}
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    train(model, optimizer, inputs(1))
    after = masters_of(optimizer)
    assert torch.equal(after["0.bias"], torch.full((8,), 1 / 3))
    assert torch.equal(after["0.weight"], before["0.weight"])


@pytest.mark.parametrize("scales", [False, True])
@WORLDS
@STAGES
def test_each_loss_needs_the_scale_but_one_backward_may_pass_its_gradient_to_another(
    stage, world, scales
):
    model, x = nn.Linear(2, 1), torch.ones(1, 2)
    optimizer = zero(model, world=world, stage=stage, lr=0.1, loss_scale=8.0)
    for _ in range(2):
        out = model(x)
        (gradient,) = torch.autograd.grad(optimizer.scale(out.sum()), out)
        model(x).backward(gradient)
        optimizer.step()
        loss = model(x).sum()
        if scales:
            optimizer.scale(loss)  # which is not the one that runs backward
        with pytest.raises(RuntimeError, match="the loss was not multiplied by it"):
            loss.backward()
        optimizer.zero_grad()


@WORLDS
@STAGES
def test_a_skipped_step_drops_its_gradients_as_an_updated_one_does(stage, world):
    model = nn.Linear(2, 1)
    optimizer = zero(model, world=world, stage=stage, lr=0.1, loss_scale="dynamic")
    skipped = []
    for value in (math.inf, 1.0, 1.0):
        optimizer.scale(model(torch.ones(1, 2)).sum() * value).backward()
        skipped.append(optimizer.step().skipped)
    assert skipped == [True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1 - 1e-7, 1 - 2**-6])
def test_small_updates_add_up_beside_small_changes_of_the_parameters(dtype, factor):
    weight = nn.Parameter(torch.ones(64, dtype=dtype))
    options = {"stage": 1, "gather_dtype": torch.bfloat16, "lr": 1e-4}
    optimizer = zero([("weight", weight)], torch.optim.SGD, FirstOfTwo, **options)
    expected = torch.ones(64)
    for _ in range(60):
        before = weight.detach().float().clone()
        with torch.no_grad():
            weight.mul_(factor)
        expected += weight.detach().float() - before - 1e-4
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    (master,) = masters_of(optimizer).values()
    assert torch.allclose(master, expected[: len(master)], rtol=1e-5)


def test_master_weights_that_a_state_lacks_are_the_loaded_parameters():
    values = torch.linspace(0.1, 3, 64)
    weight = nn.Parameter(values.clone())
    options = {"stage": 1, "gather_dtype": torch.bfloat16, "lr": 0.0}
    optimizer = zero([("weight", weight)], torch.optim.SGD, FirstOfTwo, **options)
    state = optimizer.state_dict()
    for piece in state["slices"]:
        del piece["tensors"]["master"]
    for _ in range(2):  # at the second time, parameters were rounded master weights
        with torch.no_grad():
            weight.copy_(values)
        optimizer.load_state_dict(state)
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        (master,) = masters_of(optimizer).values()
        assert torch.equal(master, values[: len(master)])


HOOKS = [register_optimizer_step_pre_hook, register_optimizer_step_post_hook]


@pytest.mark.parametrize("register", HOOKS)
@STAGES
def test_a_hook_for_the_steps_of_all_optimizers_runs_once_in_a_step(register, stage):
    model = nn.Linear(2, 1)
    optimizer = zero(model, world=FirstOfTwo, stage=stage, lr=0.1)
    called = []
    handle = register(lambda given, *_: called.append(given))
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    assert called == [optimizer, optimizer]


@pytest.mark.parametrize("register", HOOKS)
def test_a_hook_for_the_steps_of_all_optimizers_runs_in_no_trial(register):
    called = []
    handle = register(lambda given, *_: called.append(given))
    optimizer = zero_of(nn.Linear(2, 1), Lion, FirstOfTwo, stage=1, lr=0.1)
    optimizer.predicted_memory()
    check_arguments(torch.optim.AdamW, {}, optimizer.param_groups)
    handle.remove()
    assert called == []
