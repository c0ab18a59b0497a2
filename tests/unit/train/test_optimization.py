import math
from functools import partial

import pytest
import torch
from torch import nn

from mntrain.config import Config, OptimConfig
from mntrain.optim import Muon
from mntrain.tasks import Task
from mntrain.train.optimization import (
    UNSUPPORTED,
    Schedule,
    choose_optimizer,
    lr_factor,
    resolve_optimizer,
    weight_decay_groups,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Scaled(nn.Module):
    """A matrix, a convolution, a bias, and a gain without dimensions."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.conv = nn.Conv1d(2, 3, 2, bias=False)
        self.gain = nn.Parameter(torch.tensor(1.0))


class Plain(Task):
    """A task that brings no optimizer, or what `brought` is."""

    brought = None
    scheduled = None

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
    optimizer = kind([nn.Parameter(torch.ones(2, 2))], **options)
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_on_a_gpu_one_kernel_makes_the_update_if_there_is_one(name):
    assert resolve_optimizer(OptimConfig(name=name), GPU)[1]["fused"] is True
    kind, options = resolve_optimizer(OptimConfig(name=name), CPU)
    plain = kind([nn.Parameter(torch.ones(2))], lr=options["lr"])
    assert kind([nn.Parameter(torch.ones(2))], **options).defaults == plain.defaults


@pytest.mark.parametrize("name", ["NAdam", "Adagrad"])  # Adagrad's is for the CPU
def test_what_has_no_such_kernel_is_not_asked_for_it(name):
    assert "fused" not in resolve_optimizer(OptimConfig(name=name), GPU)[1]


on_gpu = pytest.param(
    GPU,
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
    ],
)


@pytest.mark.parametrize("device", [CPU, on_gpu], ids=str)
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
    ("name", "nearest"),
    [("adamw", "AdamW"), ("AdmW", "AdamW"), ("Sgd", "SGD"), ("rmsprop", "Rprop")],
)
def test_a_misspelt_name_is_refused_with_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=rf"--optim.name {name}: .*nearest: .*{nearest}"):
        resolve_optimizer(OptimConfig(name=name), CPU)


@pytest.mark.parametrize("name", ["Optimizer", "lr_scheduler", "no such thing"])
def test_what_is_no_optimizer_is_refused(name):
    with pytest.raises(ValueError, match="has no such optimizer"):
        resolve_optimizer(OptimConfig(name=name), CPU)


def test_weight_decay_is_refused_where_the_optimizer_takes_none():
    with pytest.raises(ValueError, match=r"--optim.weight-decay 0\.1: Rprop .*weight-decay 0$"):
        resolve_optimizer(OptimConfig(name="Rprop", weight_decay=0.1), CPU)
    assert (
        resolve_optimizer(OptimConfig(name="Rprop", weight_decay=0.0), CPU)[0] is torch.optim.Rprop
    )


@pytest.mark.parametrize(
    ("decay", "frozen", "groups"),
    [
        (0.3, (), {0.3: ["linear.weight", "conv.weight"], 0.0: ["gain", "linear.bias"]}),
        (0.0, (), {None: ["gain", "linear.weight", "linear.bias", "conv.weight"]}),
        (0.3, ("linear",), {0.3: ["conv.weight"], 0.0: ["gain"]}),
        (0.3, ("linear.bias", "gain"), {0.3: ["linear.weight", "conv.weight"]}),  # none is empty
    ],
)
def test_matrices_that_train_decay_and_vectors_do_not(decay, frozen, groups):
    model = Scaled()
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, name in names.items():
        parameter.requires_grad_(not name.startswith(frozen))
    made = weight_decay_groups(model, decay)
    found = {group.get("weight_decay"): [names[p] for p in group["params"]] for group in made}
    assert found == groups
    assert len(made) == len(groups)


def test_muon_gets_the_matrices_of_the_layers_and_its_options():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2)]), "head": nn.Linear(2, 3)})
    config = OptimConfig(name="Muon", lr=0.5, weight_decay=0.3, options={"momentum": 0.8})
    choice = choose_optimizer(Plain(), model, config, CPU)
    assert (choice.kind, str(choice)) == (Muon, "Muon")
    assert choice.options == {"lr": 0.5, "weight_decay": 0.3, "momentum": 0.8}
    weight, *_ = model["layers"].parameters()
    assert [group["muon"] for group in choice.groups] == [True, False, False]
    assert [id(p) for p in choice.groups[0]["params"]] == [id(weight)]
    made = choice.kind(choice.groups, **choice.options)
    assert [group["weight_decay"] for group in made.param_groups] == [0.3, 0.3, 0.0]


HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("steps", "warmup", "least", "options", "expected"),
    [
        (20, 4, 0.1, {}, [0.25, 0.5, 0.75, 1]),
        # Five steps of cosine: angles of 0, 45, 90, 135 and 180 degrees.
        (7, 2, 0, {}, [0.5, 1, 1, (1 + HALF) / 2, 0.5, (1 - HALF) / 2, 0]),
        (5, 1, 0.2, {}, [1, 1, 0.8, 0.4, 0.2, 0.2, 0.2]),  # also after the last step
        (3, 0, 0, {}, [1, 0.5, 0]),
        (5, 0, 1, {}, [1] * 5),
        (3, 3, 0.1, {}, [1 / 3, 2 / 3, 1]),  # a warm-up as long as training
        (3, 7, 0.1, {}, [1 / 7, 2 / 7, 3 / 7]),
        (1, 0, 0.1, {}, [1]),
        (2, 1, 0.1, {}, [1, 1]),
        (6, 2, 0.1, {"schedule": "constant"}, [0.5, 1, 1, 1, 1, 1]),
        (7, 2, 0.2, {"schedule": "linear"}, [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2]),
        (
            10,
            2,
            0,
            {"schedule": "wsd", "decay_fraction": 0.4},
            [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0],
        ),
        # The decay is to begin before the warm-up ends.
        (6, 3, 0, {"schedule": "wsd", "decay_fraction": 1.0}, [1 / 3, 2 / 3, 1, 1, 0.5, 0]),
    ],
)
def test_a_schedule_is_a_function_of_the_completed_steps(steps, warmup, least, options, expected):
    config = OptimConfig(warmup_steps=warmup, min_lr_fraction=least, **options)
    factor = lr_factor(config, steps)
    assert [factor(done) for done in range(len(expected))] == pytest.approx(expected)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_cannot_train_here_is_refused_by_name_with_the_reason(name):
    config = OptimConfig(name=name)
    with pytest.raises(ValueError, match=f"--optim.name {name}: .*; choose another"):
        resolve_optimizer(config, CPU)


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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torch.optim:", "is not of the form"),
        ("no_module:Adam", "module 'no_module' does not import"),
        ("torch.optim:Nothing", "has no class 'Nothing'"),
        ("torch.nn:Linear", "does not derive from"),
    ],
)
def test_a_class_that_cannot_be_imported_is_refused(name, message):
    with pytest.raises(ValueError, match=rf"^--optim.name {name}: .*{message}"):
        resolve_optimizer(OptimConfig(name=name), CPU)


def test_lists_of_options_are_the_tuples_that_optimizers_document():
    _, options = resolve_optimizer(OptimConfig(options={"betas": [0.8, 0.9], "eps": 1e-6}), CPU)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], **options)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert optimizer.param_groups[0]["eps"] == 1e-6
    given = {"rho": 0.5, "weight-decay": 0.1}
    with pytest.raises(ValueError, match="weight_decay is given by"):
        resolve_optimizer(OptimConfig(name="Adadelta", options=given), CPU)
    both = {"lr-decay": 0.1, "lr_decay": 0.1}
    assert resolve_optimizer(OptimConfig(name="Adagrad", options={"lr-decay": 0.1}), CPU)[1] == {
        "lr": 0.003,
        "lr_decay": 0.1,
    }
    with pytest.raises(ValueError, match="with a dash and with an underscore"):
        resolve_optimizer(OptimConfig(name="Adagrad", options=both), CPU)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"beta": 0.9}, "AdamW takes no beta; it takes betas, eps, "),
        ({"lr": 0.9}, "lr is given by --optim.lr"),
        ({"weight_decay": 0.9}, "weight_decay is given by --optim.weight-decay"),
    ],
)
def test_options_that_the_class_does_not_take_are_refused(given, message):
    with pytest.raises(ValueError, match=f"--optim.options: {message}"):
        resolve_optimizer(OptimConfig(options=given), CPU)


def test_a_task_brings_an_optimizer_with_its_groups():
    model = Scaled()
    groups = [{"params": [model.gain], "lr": 3.0}, {"params": model.linear.parameters()}]
    brought = partial(torch.optim.SGD, groups, lr=0.5, momentum=0.9)
    choice = choose_optimizer(Plain(brought), model, OptimConfig(lr=7.0), CPU)
    assert str(choice) == "SGD of the task"
    assert [group.get("lr") for group in choice.groups] == [3.0, None]
    assert choice.options == {"lr": 0.5, "momentum": 0.9}


def test_without_groups_all_parameters_are_one():
    model = Scaled()
    choice = choose_optimizer(Plain(partial(torch.optim.SGD, lr=0.5)), model, OptimConfig(), CPU)
    assert [id(p) for p in choice.groups] == [id(p) for p in model.parameters()]


@pytest.mark.parametrize("wrong", [torch.optim.SGD, partial(torch.optim.SGD, [], 0.1), 3])
def test_a_task_that_brings_no_partial_is_told_what_to_return(wrong):
    with pytest.raises(ValueError, match=r"optimizer\(\) of the task returned .*functools.partial"):
        choose_optimizer(Plain(wrong), Scaled(), OptimConfig(), CPU)


def test_a_task_that_brings_no_scheduler_is_told_what_to_return():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
    with pytest.raises(ValueError, match=r"schedule\(\) of the task returned a float"):
        Schedule(Plain(scheduled=0.5), optimizer, OptimConfig(), 5)


def test_a_configured_schedule_goes_on_where_a_run_has_stopped():
    def rates(done, steps):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
        schedule = Schedule(Plain(), optimizer, OptimConfig(warmup_steps=2), 9)
        schedule.start(done)
        found = []
        for _ in range(steps):
            found.append(schedule.lr)
            optimizer.step()
            schedule.after_step()
        return found

    whole, factor = rates(0, 9), lr_factor(OptimConfig(warmup_steps=2), 9)
    assert whole == pytest.approx([2.0 * factor(done) for done in range(9)])
    assert len(set(whole)) == 8  # the end of the warm-up is the peak of the cosine
    assert whole[4:] == rates(4, 5)


def test_a_scheduler_of_plateaus_sees_evaluations_only():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    schedule = Schedule(Plain(scheduled=plateau), optimizer, OptimConfig(), 9)
    schedule.start(0)
    found = []
    for loss in (3.0, 4.0, 5.0):
        schedule.after_step()
        schedule.after_evaluation(loss)
        found.append(schedule.lr)
    assert found == [2.0, 1.0, 0.5]
    assert str(schedule) == "ReduceLROnPlateau of the task"


@pytest.mark.parametrize(
    ("name", "options", "refused"),
    [
        (
            "AdamW",
            {"betas": [0.9]},
            r"AdamW refuses betas=\(0.9,\) \(IndexError: .*\); its default",
        ),
        ("AdamW", {"betas": [0.9, 0.9, 0.9]}, "its default is betas=\\(0.9, 0.999\\)$"),
        ("Adam", {"betas": 0.9, "amsgrad": True}, "Adam refuses betas=0.9 "),
        ("NAdam", {"eps": "small"}, "NAdam refuses eps='small' "),
        ("AdamW", {"capturable": True}, "AdamW refuses capturable=True "),
        ("AdamW", {"fused": True, "foreach": True}, "refuses fused=True, foreach=True "),
        ("SGD", {"nesterov": True}, "SGD refuses nesterov=True "),
        ("SGD", {"momentum": "much"}, "SGD refuses momentum='much' "),
        ("Muon", {"betas": [0.9]}, r"Muon refuses betas=\(0.9,\) "),
        ("Muon", {"iterations": 2.5}, "Muon refuses iterations=2.5 "),
    ],
)
def test_options_that_the_optimizer_refuses_are_named_in_one_sentence(name, options, refused):
    model = Scaled()
    task = Plain()
    task.regions = lambda model: [model]
    config = OptimConfig(name=name, options=options)
    with pytest.raises(ValueError, match=refused) as raised:
        choose_optimizer(task, model, config, CPU)
    assert str(raised.value).startswith("--optim.options: ")
    assert "\n" not in str(raised.value)


def test_an_error_of_the_task_is_a_sentence_with_its_line():
    task = Plain()
    task.schedule = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, gamma=0.5)
    optimizer = torch.optim.SGD(Scaled().parameters())
    with pytest.raises(
        ValueError, match=r"^schedule\(\) of the task failed: TypeError: StepLR"
    ) as e:
        Schedule(task, optimizer, OptimConfig(), 10)
    assert "test_optimization.py:" in str(e.value)
    task.schedule = lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1)
    with pytest.raises(ValueError, match=r"define either total_steps .* \(.*test_optimization.py:"):
        Schedule(task, optimizer, OptimConfig(), 10)
