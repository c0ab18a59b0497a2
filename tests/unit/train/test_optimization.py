import math
import sys
from functools import partial
from types import ModuleType

import pytest
import torch
from gpu.place import ON, gpu
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from mntrain.optim import Muon
from mntrain.options.config import Config, OptimConfig
from mntrain.tasks import Task
from mntrain.train.optimization import (
    advance,
    choose_optimizer,
    lr_factor,
    moved_options,
    options_scheduler,
    resolve_optimizer,
    scheduler_of,
    weight_decay_groups,
)
from zero.trials import check_arguments

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class WithGain(nn.Module):
    """A matrix, a convolution, a bias, and a gain without dimensions."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.conv = nn.Conv1d(2, 3, 2, bias=False)
        self.gain = nn.Parameter(torch.tensor(1.0))


class BringingTask(Task):
    """A task that brings no optimizer, or what `brought` is."""

    def __init__(self, brought=None, scheduled=None):
        super().__init__(Config())
        self.brought, self.scheduled = brought, scheduled

    def model(self):
        raise NotImplementedError

    dataset = loss = model

    def optimizer(self, model):
        return self.brought

    def schedule(self, optimizer):
        return self.scheduled


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "NAdam"])
def test_an_optimizer_of_torch_is_found_by_its_name(name):
    kind, options = resolve_optimizer(OptimConfig(name=name, lr=0.25), CPU)
    assert kind is getattr(torch.optim, name)
    plain = kind([nn.Parameter(torch.ones(2, 2))], lr=0.25)
    assert kind([nn.Parameter(torch.ones(2, 2))], **options).defaults == plain.defaults
    on_gpu = resolve_optimizer(OptimConfig(name=name), GPU)[1]  # one kernel if there is one
    assert on_gpu.get("fused") is (True if name in ("AdamW", "Adam", "SGD") else None)


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device(ON), marks=gpu)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_an_update_has_the_same_bits_wherever_a_parameter_is_cut(name, dtype, device):
    # As shards are: else stages would differ.
    kind, options = resolve_optimizer(OptimConfig(name=name), device)
    options |= {"weight_decay": 0.1, **({"momentum": 0.9} if name == "SGD" else {})}
    whole = torch.linspace(-1, 1, 1003, dtype=dtype, device=device)
    gradients = [whole.sin() * step for step in range(1, 6)]

    def updated(cuts):
        flat = whole.clone()
        pieces = list(flat.split(cuts))
        optimizer = kind(pieces, **options)
        for gradient in gradients:
            for piece, part in zip(pieces, gradient.split(cuts), strict=True):
                piece.grad = part
            optimizer.step()
        return flat

    expected = updated([1003])
    assert not torch.equal(expected, whole)
    for cuts in ([501, 502], [7, 3, 993], [64] * 15 + [43], [1, 1001, 1], [334, 335, 334]):
        assert torch.equal(updated(cuts), expected)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, "is no torch.*Adam, AdamW,") for name in ("adamw", "Optimizer", "lr_scheduler")),
        ("torch.optim:", ".*is not of the form"),
        ("no_module:Adam", ".*module 'no_module' does not import"),
        ("torch.optim:Nothing", ".*has no class 'Nothing'"),
        ("torch.nn:Linear", "is no torch.optim.Optimizer"),
    ],
)
def test_a_name_of_no_optimizer_is_refused(name, message):
    with pytest.raises(ValueError, match=rf"^--optim.name {name}: {message}"):
        resolve_optimizer(OptimConfig(name=name), CPU)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("AdamW", {"lr": 0.9}, "--optim.options: lr is given by --optim.lr"),
        (
            "AdamW",
            {"weight_decay": 0.9},
            "--optim.options: weight_decay is given by --optim.weight-decay",
        ),
        ("Adadelta", {"weight-decay": 0.1}, "weight_decay is given by"),
        ("Rprop", {}, r"--optim.weight-decay 0\.1: Rprop .*weight-decay 0$"),
    ],
)
def test_options_that_the_class_does_not_take_are_refused(name, given, message):
    with pytest.raises(ValueError, match=message):
        resolve_optimizer(OptimConfig(name=name, options=given, weight_decay=0.1), CPU)
    rprop = OptimConfig(name="Rprop", weight_decay=0.0)
    assert resolve_optimizer(rprop, CPU)[0] is torch.optim.Rprop


def test_matrices_decay_and_vectors_and_frozen_parameters_do_not():
    def named(groups):
        return [({id(p) for p in group["params"]}, group.get("weight_decay")) for group in groups]

    def ids(*parameters):
        return {id(p) for p in parameters}

    model = WithGain()
    linear, conv = model.linear, model.conv.weight
    assert named(weight_decay_groups(model, 0.3)) == [
        (ids(linear.weight, conv), 0.3),
        (ids(linear.bias, model.gain), 0.0),
    ]
    # As many without weight decay, which a resumed job may change.
    assert named(weight_decay_groups(model, 0.0)) == [
        (ids(linear.weight, conv), 0.0),
        (ids(linear.bias, model.gain), 0.0),
    ]
    linear.requires_grad_(False)
    assert named(weight_decay_groups(model, 0.3)) == [(ids(conv), 0.3), (ids(model.gain), 0.0)]
    model.gain.requires_grad_(False)
    assert named(weight_decay_groups(model, 0.3)) == [(ids(conv), 0.3)]  # no group of nothing


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Rprop", "Muon"])
def test_without_weight_decay_that_of_the_class_is_not_taken(name):
    config, task = OptimConfig(name=name, weight_decay=0.0), BringingTask()
    task.regions = lambda model: [model.linear]
    _, choice = choose_optimizer(task, WithGain(), config, CPU)
    assert {group["weight_decay"] for group in choice().param_groups} == {0.0}


def test_muon_gets_the_matrices_of_the_layers_and_its_options():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2)]), "head": nn.Linear(2, 3)})
    config = OptimConfig(name="Muon", lr=0.5, weight_decay=0.3, options={"momentum": 0.8})
    name, choice = choose_optimizer(BringingTask(), model, config, CPU)
    assert (choice.func, name) == (Muon, "Muon")
    assert choice.keywords == {"lr": 0.5, "weight_decay": 0.3, "momentum": 0.8}
    weight, *_ = model["layers"].parameters()
    assert [group["muon"] for group in choice.args[0]] == [True, False, False]
    assert [id(p) for p in choice.args[0][0]["params"]] == [id(weight)]
    made = choice()
    assert [group["weight_decay"] for group in made.param_groups] == [0.3, 0.3, 0.0]


# Five steps of cosine: angles of 0, 45, 90, 135 and 180 degrees.
COSINE = [0.1 + 0.9 * (1 + math.cos(turn * math.pi / 4)) / 2 for turn in range(5)]


@pytest.mark.parametrize(
    ("warmup", "least", "options", "expected"),
    [
        (4, 0.1, {}, [0.25, 0.5, 0.75, 1.0, *COSINE]),
        (2, 0.1, {}, [0.5, 1.0, *COSINE]),
        (0, 0.0, {}, [1.0, 0.5, 0.0]),  # without a warm-up
        (0, 1.0, {}, [1.0] * 5),
        (3, 0.1, {}, [1 / 3, 2 / 3, 1.0]),  # as long as training, or longer
        (7, 0.1, {}, [1 / 7, 2 / 7, 3 / 7]),
        (0, 0.1, {}, [1.0]),  # a single step of cosine
        (1, 0.1, {}, [1.0, 1.0]),
        (2, 0.1, {"schedule": "constant"}, [0.5, 1, 1, 1, 1, 1]),
        (2, 0.2, {"schedule": "linear"}, [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
        (
            2,
            0.0,
            {"schedule": "wsd", "decay_fraction": 0.4},
            [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0],
        ),
        # A decay after a warm-up that takes longer than the rest.
        (3, 0.0, {"schedule": "wsd", "decay_fraction": 1.0}, [1 / 3, 2 / 3, 1, 1, 0.5, 0]),
    ],
)
def test_a_schedule_has_these_rates_and_a_scheduler_of_torch_takes_them(
    warmup, least, options, expected
):
    config = OptimConfig(warmup_steps=warmup, min_lr_fraction=least, **options)
    factor = lr_factor(config, len(expected))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
    scheduler = LambdaLR(optimizer, factor)
    for done, rate in enumerate(expected):
        assert factor(done) == pytest.approx(rate)
        assert scheduler.get_last_lr()[0] == pytest.approx(2 * rate)
        optimizer.step()
        scheduler.step()
    if warmup < len(expected) > 2 and options.get("schedule") != "constant":
        assert factor(len(expected) + 50) == pytest.approx(least)


class Slower(torch.optim.SGD):
    """SGD of half the rate, with a name for it."""

    def __init__(self, params, lr, slowness=2.0, **options):
        super().__init__(params, lr=lr / slowness, **options)


def test_a_class_of_any_module_is_found_with_its_options():
    config = OptimConfig(
        name=f"{__name__}:Slower", lr=0.5, weight_decay=0.0, options={"slowness": 4.0}
    )
    kind, options = resolve_optimizer(config, CPU)
    assert kind.__name__ == "Slower"
    optimizer = kind([nn.Parameter(torch.ones(1))], **options)
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_lists_of_options_are_the_tuples_that_optimizers_document_and_dashes_underscores():
    _, options = resolve_optimizer(OptimConfig(options={"betas": [0.8, 0.9], "eps": 1e-6}), CPU)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], **options)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert optimizer.param_groups[0]["eps"] == 1e-6
    _, options = resolve_optimizer(OptimConfig(name="Adagrad", options={"lr-decay": 0.1}), CPU)
    assert options == {"lr": 0.003, "lr_decay": 0.1}


def test_a_task_brings_an_optimizer_with_its_groups_or_one_of_all_parameters():
    model = WithGain()
    groups = [{"params": [model.gain], "lr": 3.0}, {"params": model.linear.parameters()}]
    brought = partial(torch.optim.SGD, groups, lr=0.5, momentum=0.9)
    name, choice = choose_optimizer(BringingTask(brought), model, OptimConfig(lr=7.0), CPU)
    assert name == "SGD of the task"
    assert [group.get("lr") for group in choice.args[0]] == [3.0, None]
    assert choice.keywords == {"lr": 0.5, "momentum": 0.9}
    alone = BringingTask(partial(torch.optim.SGD, lr=0.5))
    _, choice = choose_optimizer(alone, model, OptimConfig(), CPU)
    assert [id(p) for p in choice.args[0]] == [id(p) for p in model.parameters()]


@pytest.mark.parametrize("wrong", [torch.optim.SGD, partial(torch.optim.SGD, [], 0.1), 3])
def test_a_task_that_brings_no_partial_or_no_scheduler_is_told_what_to_return(wrong):
    with pytest.raises(ValueError, match=r"optimizer\(\) of the task returned .*functools.partial"):
        choose_optimizer(BringingTask(wrong), WithGain(), OptimConfig(), CPU)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
    with pytest.raises(ValueError, match=r"schedule\(\) of the task returned a float"):
        scheduler_of(BringingTask(scheduled=0.5), optimizer)


def test_a_configured_schedule_goes_on_where_a_run_has_stopped():
    def rates(done, steps):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
        scheduler = options_scheduler(optimizer, OptimConfig(warmup_steps=2), 9, done)
        found = []
        for _ in range(steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            advance(scheduler)
        return found

    whole = rates(0, 9)
    assert len(set(whole)) == 8  # the end of the warm-up is the peak of the cosine
    assert whole[4:] == rates(4, 5)


class DecayingRate(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler of the weight decay."""

    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 * 0.9**self.last_epoch
        return [group["lr"] for group in self.optimizer.param_groups]


CYCLE = {"lr", "initial_lr", "momentum", "betas", "base_momentum", "max_momentum"}
ONE_CYCLE = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=10)


@pytest.mark.parametrize(
    ("make", "moved"),
    [
        (partial(torch.optim.lr_scheduler.StepLR, step_size=3), {"lr", "initial_lr"}),
        (torch.optim.lr_scheduler.ReduceLROnPlateau, {"lr", "initial_lr"}),
        (partial(torch.optim.lr_scheduler.CyclicLR, base_lr=0.1, max_lr=0.2), CYCLE),
        (ONE_CYCLE, {*CYCLE, "max_lr", "min_lr"}),
        (
            lambda o: torch.optim.lr_scheduler.SequentialLR(
                o, [ONE_CYCLE(o), torch.optim.lr_scheduler.ConstantLR(o)], [5]
            ),
            {*CYCLE, "max_lr", "min_lr"},
        ),
        (partial(ONE_CYCLE, cycle_momentum=False), {"lr", "initial_lr", "max_lr", "min_lr"}),
        (DecayingRate, {"lr", "initial_lr", "weight_decay"}),
    ],
)
def test_a_scheduler_sets_these_options(make, moved):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.95)
    before = [dict(group) for group in optimizer.param_groups]
    assert moved_options(make(optimizer), optimizer.param_groups, before) == moved


def test_a_scheduler_of_plateaus_sees_evaluations_only():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    assert scheduler_of(BringingTask(scheduled=plateau), optimizer) is plateau
    found = []
    for loss in (3.0, 4.0, 5.0):
        advance(plateau)
        advance(plateau, loss)
        found.append(optimizer.param_groups[0]["lr"])
    assert found == [2.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("name", "options", "refused"),
    [
        (
            "AdamW",
            {"betas": [0.9]},
            r"AdamW refuses .*betas=\(0.9,\).* \(IndexError: .*\); it takes lr=0.001, betas=",
        ),
        ("AdamW", {"beta": 0.9}, "AdamW refuses beta=0.9 .*; it takes lr=|; it takes .*betas"),
    ],
)
def test_options_that_the_optimizer_refuses_are_named_in_one_sentence(name, options, refused):
    model = WithGain()
    task = BringingTask()
    task.regions = lambda model: [model]
    _, choice = choose_optimizer(task, model, OptimConfig(name=name, options=options), CPU)
    with pytest.raises(ValueError, match=refused) as raised:  # as world.optimizer does
        check_arguments(choice.func, choice.keywords, *choice.args)
    assert "\n" not in str(raised.value)


def test_an_error_of_the_task_is_a_sentence_with_its_line():
    task, line = BringingTask(), r".* \(test_optimization.py, line \d+\)$"
    optimizer = torch.optim.SGD(WithGain().parameters())
    task.schedule = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, gamma=0.5)
    with pytest.raises(ValueError, match=r"^--task lm: schedule\(\) fails: TypeError: Step" + line):
        scheduler_of(task, optimizer)
    task.schedule = lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1)
    with pytest.raises(ValueError, match="define either total_steps" + line):
        scheduler_of(task, optimizer)


def test_an_error_of_a_task_without_a_source_file_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # as in `python -c`
    task = type("Typed", (BringingTask,), {"__module__": "__main__"})()

    def schedule(optimizer):
        raise ValueError("no rate")

    task.schedule = schedule
    with pytest.raises(ValueError, match=r"schedule\(\) fails: ValueError: no rate \("):
        scheduler_of(task, torch.optim.SGD(WithGain().parameters()))
