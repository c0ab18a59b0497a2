"""Trials that find out how an optimizer may be sharded, whatever its name."""

import inspect
import math
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import pytest
import torch
from first_of_two import STAGES, zero
from handmade import DAdapting, Decaying, Lamb, Lion, Listed, Normalized, Row
from optimizers import BY_PARAMETER, ELEMENTWISE
from torch import nn, optim

from zero.trials import BY_ELEMENT, check_partition

USERS = {
    "Lion": partial(Lion, lr=0.01, weight_decay=0.1),
    "Lion lr=0": partial(Lion, lr=0.0, weight_decay=0.1),
    "Lion lr=1e-9": partial(Lion, lr=1e-9),
    "Lion tensor lr": partial(Lion, lr=torch.tensor(0.01)),
    "Decaying": partial(Decaying, lr=0.3),
}
WHOLE = BY_PARAMETER | {
    "Lamb lr=0": partial(Lamb, lr=0.0),
    "Lamb tensor lr=0": partial(Lamb, lr=torch.tensor(0.0)),
}
OVER_ALL = {
    "Normalized": Normalized,
    "DAdapting": DAdapting,
    "DAdapting lr=1e-3": partial(DAdapting, lr=1e-3),
}


def groups(*shapes, dtype=torch.float32, **options):
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    named = [(f"p{number}", parameter) for number, parameter in enumerate(parameters)]
    return [{"params": named, **options}]


ALL_SHAPES = groups((), (3,), (2, 3), (2, 3, 4), (2, 2, 2, 2), (1, 2, 1, 2, 1))


@pytest.mark.parametrize("partition", ["auto", "element", "parameter"])
@pytest.mark.parametrize("name", [*USERS, *WHOLE, *OVER_ALL])
def test_what_a_trial_finds_is_refused(name, partition):
    make = (USERS | WHOLE | OVER_ALL)[name]
    given = groups((2, 3)) if name in WHOLE else ALL_SHAPES  # Muon takes matrices only
    if name in OVER_ALL:
        words = r"parts get other .* than the whole; .*give stage=0"
    elif name in WHOLE and partition == "element":
        words = r"cannot be sharded by element: .*leave out partition="
    else:
        check_partition(make, given, partition)
        return
    with pytest.raises(ValueError, match=words):
        check_partition(make, given, partition)


# Which optimizers work by element.

OF_TORCH = {kind for kind in vars(optim).values() if isinstance(kind, type)}
NOT_BY_ELEMENT = {optim.Adafactor, optim.LBFGS, optim.Muon, optim.Optimizer, optim.SparseAdam}


def test_every_optimizer_of_torch_is_known():
    assert OF_TORCH == BY_ELEMENT | NOT_BY_ELEMENT
    assert {make.func for make in ELEMENTWISE.values()} >= BY_ELEMENT


def trained_in_parts(make, dtype, cuts):
    """A matrix and its state after gradients of widely different sizes, updated in flat parts."""
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(26, 7, 9, generator=generator, dtype=dtype)
    parts = [start.flatten()[low:high].clone() for low, high in pairwise(cuts)]
    parts = parts if len(parts) > 1 else [start.clone()]
    optimizers = [make([part]) for part in parts]
    for number, gradient in enumerate(gradients):
        size = 0.0 if number % 7 == 3 else 10.0 ** (number % 5 - 2)
        for part, (low, high), optimizer in zip(parts, pairwise(cuts), optimizers, strict=True):
            part.grad = size * gradient.flatten()[low:high].view(part.shape)
            optimizer.step()
    found = {"weights": torch.cat([part.flatten() for part in parts])}
    for key, value in optimizers[0].state[parts[0]].items():
        if isinstance(value, torch.Tensor) and value.dim():
            states = [o.state[p][key] for o, p in zip(optimizers, parts, strict=True)]
            found[key] = torch.cat([state.flatten() for state in states])
    return found


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("name", [n for n in ELEMENTWISE if ELEMENTWISE[n].func in BY_ELEMENT])
def test_optimizers_by_element_train_parts_as_the_whole(name, dtype, foreach):
    make = ELEMENTWISE[name]
    if "fused" in make.keywords and (foreach or dtype.is_complex):
        pytest.skip("torch's fused kernels take real numbers, and exclude foreach")
    ways = {"weight_decay": 0.1, "foreach": None if "fused" in make.keywords else foreach}
    taken = inspect.signature(make.func).parameters
    make = partial(make, **{key: value for key, value in ways.items() if key in taken})
    whole = trained_in_parts(make, dtype, [0, 63])
    cut = trained_in_parts(make, dtype, [0, 1, 17, 40, 63])
    assert whole.keys() == cut.keys()
    for key, value in whole.items():
        assert torch.allclose(cut[key], value, rtol=1e-12, atol=1e-14), key


class AdamOfTheUser(optim.Adam):
    pass


def made_by_a_function(params):
    return optim.AdamW(params)


@pytest.mark.parametrize(
    ("make", "partition", "chosen"),
    [
        (optim.AdamW, "auto", "element"),
        (partial(partial(optim.SGD, momentum=0.9), lr=0.1), "auto", "element"),
        (optim.Adafactor, "auto", "parameter"),
        (optim.Muon, "auto", "parameter"),
        (Lion, "auto", "parameter"),
        (AdamOfTheUser, "auto", "parameter"),
        (partial(AdamOfTheUser, lr=0.1), "auto", "parameter"),
        (made_by_a_function, "auto", "parameter"),
        (AdamOfTheUser, "element", "element"),
        (optim.AdamW, "parameter", "parameter"),
    ],
)
@STAGES
def test_only_known_classes_are_cut_by_element(make, partition, chosen, stage):
    model = nn.Linear(4, 3, bias=False)  # Muon takes matrices only
    assert zero(model, make, stage=stage, partition=partition).partition == chosen


COMPLEX = groups((3,), dtype=torch.complex64)


@pytest.mark.parametrize(
    ("make", "given", "words"),
    [
        (DAdapting, groups((3,)), "other option top"),
        (optim.Adafactor, groups((3, 3)), "state row_var"),
        # An elementwise statistic of vectors does not excuse that of matrices.
        (optim.Adafactor, groups((), lr=0.1), ""),
        (optim.Adafactor, groups((), (3, 3), lr=0.1), "Adafactor"),
        (Decaying, COMPLEX, ""),
        (Lamb, COMPLEX, "Lamb"),
        (partial(partial(Lamb, lr=0.1), lr=0.2), groups((3,)), "^Lamb .*leave out partition="),
        (Listed, groups((3,)), ""),
        (partial(Listed, kind=Row), groups((3,)), "its state momenta is a Row, which has no part"),
        (partial(Listed, stacked=True), groups((3,)), r"momenta is a Tensor of shape \(2, "),
    ],
)
def test_a_refusal_names_what_differs(make, given, words):
    with pytest.raises(ValueError, match=words) if words else nullcontext():
        check_partition(make, given, "element")


class NormalizedGroups(optim.SGD):
    """Normalizes the gradients of those groups that say so."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"] if group.get("normalize") else ():
                p.grad.div_(p.grad.norm())
        super().step()


@pytest.mark.parametrize("options", [{"normalize": True}, {"normalize": 2.5}])
def test_the_options_of_every_group_count(options):
    plain = groups((3,), normalize=False)
    check_partition(NormalizedGroups, plain, "element")
    check_partition(NormalizedGroups, [*plain, *groups((3,), normalize=False, lr=0.2)], "element")
    with pytest.raises(ValueError, match="NormalizedGroups"):
        check_partition(NormalizedGroups, [*plain, *groups((3,), **options)], "element")


class Noisy(optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.randn_like(p))
        super().step()


class Sleeping(optim.SGD):
    def step(self, closure=None):
        pass


class Overflowing(optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.div_(0)


class Narrow(AdamOfTheUser):
    """Knows fp32 only, as some fused kernels do."""

    @torch.no_grad()
    def step(self, closure=None):
        assert all(p.dtype == torch.float32 for g in self.param_groups for p in g["params"])
        super().step()


@pytest.mark.parametrize("partition", ["element", "parameter"])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Noisy, "random numbers"),
        (Sleeping, "updates nothing"),
        (Overflowing, "infinite or NaN"),
        (partial(AdamOfTheUser, lr=math.inf), "infinite or NaN"),
    ],
)
def test_what_a_trial_cannot_tell_is_refused_and_leaves_random_numbers_alone(
    make, reason, partition
):
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"{reason}.*; .*give stage=0"):
        check_partition(make, groups((3,)), partition)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("lr", [1e-2, 1e-5])
def test_an_optimizer_of_one_dtype_is_tried_in_fp32_whatever_the_default_device(lr):
    given = groups((3,), (3, 3))
    with torch.device("meta"):
        check_partition(partial(Narrow, lr=lr), given, "element")


class Limited(optim.SGD):
    """Clips elements to a limit that a group states, and has an infinite state."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.clamp_(-group["limit"], group["limit"])
                self.state[p]["best"] = torch.full_like(p, math.inf)
        super().step()


@pytest.mark.parametrize("limit", [0.5, math.inf, math.nan])
def test_infinite_options_are_no_difference(limit):
    refused = pytest.raises(ValueError, match="infinite or NaN")
    with refused if math.isnan(limit) else nullcontext():
        check_partition(Limited, groups((3,), limit=limit), "element")


def test_errors_of_the_constructor_are_raised_as_they_are():
    with pytest.raises(ValueError, match=r"^Invalid learning rate: -1$"):
        check_partition(partial(AdamOfTheUser, lr=-1), groups((3,)), "element")
    with pytest.raises(TypeError, match="unexpected keyword"):
        check_partition(partial(AdamOfTheUser, speed=1), groups((3,)), "element")


class Differentiable(optim.SGD):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr, differentiable=True)


REASONS = {
    optim.LBFGS: "LBFGS needs a closure that it runs several times",
    optim.SparseAdam: "SparseAdam takes sparse gradients only",
    Differentiable: "Differentiable is given differentiable=True",
}


@STAGES
@pytest.mark.parametrize("kind", REASONS)
def test_what_no_stage_can_drive_is_refused_with_the_reason(kind, stage):
    model = nn.Linear(2, 2)
    before = [p.data_ptr() for p in model.parameters()]

    def made(params):
        return kind(params)

    for make in (kind, partial(kind, lr=0.1), made):
        with pytest.raises(ValueError, match=REASONS[kind]):
            zero(model, make, stage=stage)
    assert [p.data_ptr() for p in model.parameters()] == before


def test_a_group_that_comes_later_is_tried_with_the_others():
    model = nn.Linear(3, 3)
    optimizer = zero([("bias", model.bias)], optim.Adafactor, stage=1)
    optimizer.add_param_group({"params": [("weight", model.weight)]})
    other = nn.Linear(3, 3)
    optimizer = zero([("bias", other.bias)], NormalizedGroups, stage=1, partition="element")
    with pytest.raises(ValueError, match="NormalizedGroups"):
        optimizer.add_param_group({"params": [("weight", other.weight)], "normalize": True})
    assert len(optimizer.param_groups) == 1
