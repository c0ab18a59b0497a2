"""Trials that find out how an optimizer may be sharded, whatever its name."""

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from first_of_two import STAGES, zero
from handmade import DAdapting, Lamb, Normalized
from optimizers import BY_PARAMETER, ELEMENTWISE, each
from torch import nn, optim

from zero.trials import check_partition

LITTLE = {
    "AdamW lr=0": partial(optim.AdamW, lr=0.0),
    "AdamW lr=1e-9": partial(optim.AdamW, lr=1e-9),
    "AdamW tensor lr": partial(optim.AdamW, lr=torch.tensor(0.01)),
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


@pytest.mark.parametrize("partition", ["element", "parameter"])
@pytest.mark.parametrize("name", each([*ELEMENTWISE, *LITTLE, *WHOLE, *OVER_ALL]))
def test_what_an_optimizer_keeps_decides_how_it_may_be_sharded(name, partition):
    make = (ELEMENTWISE | LITTLE | WHOLE | OVER_ALL)[name]
    given = groups((2, 3)) if name in WHOLE else ALL_SHAPES  # Muon takes matrices only
    if name in OVER_ALL:
        words = r"parts get other .* than the whole; give stage=0"
    elif name in WHOLE and partition == "element":
        words = r'with partition "element": .*give partition="parameter"'
    else:
        check_partition(make, given, partition)
        return
    with pytest.raises(ValueError, match=words):
        check_partition(make, given, partition)


COMPLEX = groups((3,), dtype=torch.complex64)


@pytest.mark.parametrize(
    ("make", "given", "words"),
    [
        (DAdapting, groups((3,)), "other option top"),
        (optim.Adafactor, groups((3, 3)), "state row_var"),
        # An elementwise statistic of vectors does not excuse that of matrices.
        (optim.Adafactor, groups((), lr=0.1), ""),
        (optim.Adafactor, groups((), (3, 3), lr=0.1), "Adafactor"),
        (optim.Adam, COMPLEX, ""),
        (Lamb, COMPLEX, "Lamb"),
        (partial(partial(Lamb, lr=0.1), lr=0.2), groups((3,)), '^Lamb .*partition="parameter"'),
    ],
)
def test_a_refusal_names_what_differs(make, given, words):
    with pytest.raises(ValueError, match=words) if words else nullcontext():
        check_partition(make, given, "element")


class Chosen(optim.SGD):
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
    check_partition(Chosen, plain, "element")
    check_partition(Chosen, [*plain, *groups((3,), normalize=False, lr=0.2)], "element")
    with pytest.raises(ValueError, match="Chosen"):
        check_partition(Chosen, [*plain, *groups((3,), **options)], "element")


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


class Narrow(optim.Adam):
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
        (partial(optim.Adam, differentiable=True), "a trial on small tensors fails"),
    ],
)
def test_what_a_trial_cannot_tell_is_refused_and_leaves_random_numbers_alone(
    make, reason, partition
):
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"{reason}.*; give stage=0"):
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
        check_partition(partial(optim.Adam, lr=-1), groups((3,)), "element")
    with pytest.raises(TypeError, match="unexpected keyword"):
        check_partition(partial(optim.Adam, speed=1), groups((3,)), "element")


def test_a_trial_is_made_once_for_a_class_and_its_options_and_always_of_a_function():
    made = []

    class CountedTrials(optim.SGD):
        def __init__(self, params, **options):
            super().__init__(params, **options)
            made.append(self)

    def by_function(params):
        return CountedTrials(params)

    def trials(make, *given):
        made.clear()
        check_partition(make, *(given or (groups((3,)), "element")))
        return len(made)

    assert trials(partial(CountedTrials, lr=0.1)) > 1
    assert trials(partial(CountedTrials, lr=0.1)) == 0
    assert trials(partial(CountedTrials, lr=0.1, momentum=0.5)) > 1
    assert trials(partial(CountedTrials, lr=0.1), groups((3, 3)), "element") > 1
    assert trials(partial(CountedTrials, lr=0.1), groups((3,)), "parameter") > 1
    assert trials(by_function) == trials(by_function) > 1
    with pytest.raises(TypeError, match="betas"):
        trials(partial(CountedTrials, lr=0.1, betas=[]))


REASONS = {
    optim.LBFGS: "LBFGS needs a closure that it runs several times",
    optim.SparseAdam: "SparseAdam takes sparse gradients only",
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
    optimizer = zero([("bias", model.bias)], optim.Adafactor, stage=1, partition="parameter")
    optimizer.add_param_group({"params": [("weight", model.weight)]})
    other = nn.Linear(3, 3)
    optimizer = zero([("bias", other.bias)], Chosen, stage=1)
    with pytest.raises(ValueError, match="Chosen"):
        optimizer.add_param_group({"params": [("weight", other.weight)], "normalize": True})
    assert len(optimizer.param_groups) == 1
