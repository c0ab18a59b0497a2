"""Named groups, parameters that are unfrozen later, sparse gradients, complex parameters."""

import copy
import math
import warnings
from contextlib import nullcontext

import pytest
import torch
from first_of_two import STAGES, WORLDS, FirstOfTwo
from first_of_two import zero as plain_zero
from torch import nn

from zero import NonFiniteGradientError, SingleProcessCollectives, ZeroOptimizer
from zero.kernels import nan_unless_finite
from zero.param_groups import as_groups
from zero.precision import master_dtype, narrower


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def zero(model, optimizer_class=torch.optim.SGD, world=SingleProcessCollectives, **options):
    return plain_zero(model, optimizer_class, world, model=model, **{"lr": 0.1, **options})


def named(groups):
    return [[name for name, _ in group["params"]] for group in groups]


@pytest.mark.parametrize(
    "params",
    [
        lambda part: part.parameters(),
        lambda part: part.named_parameters(),
        lambda part: list(part.named_parameters("whatever")),
        lambda part: dict(part.named_parameters()).items(),
    ],
    ids=["plain", "named", "named otherwise", "items"],
)
def test_groups_may_have_names_and_get_those_of_the_model(params):
    model = net()
    groups = [
        {"params": params(model[0])},
        {"params": params(model[2]), "lr": 0.2, "name": "head"},
    ]
    found = as_groups(groups, model)
    assert named(found) == [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    assert all(p is model.get_parameter(name) for group in found for name, p in group["params"])
    assert (found[1]["lr"], found[1]["name"]) == (0.2, "head")
    assert named(as_groups(params(model[2]), model)) == [["2.weight", "2.bias"]]


def test_groups_of_another_optimizer_of_torch_may_be_given_but_no_tensor_of_another_model():
    model = net()
    plain = torch.optim.SGD(model.named_parameters(), lr=0.3)
    (found,) = as_groups(plain.param_groups, model)
    assert "param_names" not in found
    assert found["lr"] == 0.3
    assert named([found]) == [[name for name, _ in model.named_parameters()]]
    for stranger in (nn.Parameter(torch.ones(1)), ("0.weight", torch.ones(1))):
        with pytest.raises(ValueError, match="no parameter of the model"):
            as_groups([{"params": [stranger]}], model)


def step(model, optimizer):
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class SecondOfTwo(FirstOfTwo):
    rank = 1


@STAGES
@pytest.mark.parametrize("world", [SingleProcessCollectives, SecondOfTwo])
def test_parameters_that_are_unfrozen_later_are_named_once_by_rank_0(stage, world):
    model = net()
    model[0].requires_grad_(False)
    optimizer = zero(model, world=world, stage=stage)
    step(model, optimizer)  # nothing to warn of
    model[0].requires_grad_(True)
    told = pytest.warns(UserWarning, match=r"not trained: 0.weight, 0.bias, .*add_param_group")
    with nullcontext() if world is SecondOfTwo else told:
        step(model, optimizer)
    step(model, optimizer)


def test_only_given_parameters_are_watched_and_also_those_of_later_groups():
    model = net().requires_grad_(False)
    model[2].bias.requires_grad_(True)
    optimizer = plain_zero([("2.bias", model[2].bias)], lr=0.1)
    model[0].bias.requires_grad_(True)
    step(model, optimizer)
    optimizer.add_param_group({"params": [("2.weight", model[2].weight)]})  # still frozen
    step(model, optimizer)
    model[2].weight.requires_grad_(True)
    with pytest.warns(UserWarning, match="not trained: 2.weight, which"):
        step(model, optimizer)


class WordModel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.bag = nn.Embedding(7, 3), nn.EmbeddingBag(7, 3, sparse=True)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        words = nn.functional.embedding(x, self.embed.weight, sparse=self.bag.sparse)
        return self.head(words.mean(1) + self.bag(x))


@STAGES
def test_sparse_gradients_count_as_dense_ones(stage):
    model = WordModel()
    reference = copy.deepcopy(model)
    reference.bag.sparse = False
    optimizer = zero(model, torch.optim.Adam, stage=stage, max_grad_norm=0.1)
    plain = torch.optim.Adam(reference.parameters(), lr=0.1)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for last in (False, True):
            x = torch.randint(7, (4, 5), generator=generator)
            reference(x).square().mean().backward()
            with nullcontext() if last else optimizer.no_sync():
                model(x).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        assert optimizer.step().grad_norm == pytest.approx(float(norm), rel=1e-5)
        plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@STAGES
@pytest.mark.parametrize("bad", [complex(math.nan, 1), complex(1, math.inf)])
def test_complex_gradients_that_are_not_finite_are_found(stage, bad):
    model = nn.ParameterList([torch.ones(5, dtype=torch.complex64), torch.ones(3)])
    optimizer = zero(model, stage=stage)
    ((model[0] * bad).real.sum() + model[1].sum()).backward()
    with pytest.raises(NonFiniteGradientError, match="not finite in 0, on rank 0"):
        optimizer.step()
    assert nan_unless_finite(torch.ones(3) + 1j) == 0
    assert nan_unless_finite(torch.ones(3) * bad) != 0


@pytest.mark.parametrize("dtype", [torch.complex32, torch.int64])
def test_other_dtypes_are_refused_and_complex_ones_are_not_rounded_to_real_ones(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of complex32
        parameter = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)
    parameter = type("Trained", (nn.Parameter,), {"requires_grad": True})(parameter, False)
    with pytest.raises(ValueError, match="only real floats, complex64 and complex128 train"):
        plain_zero([("p", parameter)])
    for trained in (torch.complex64, torch.complex128):
        assert narrower(torch.bfloat16, trained) is None
        assert master_dtype(trained, torch.bfloat16) is None


@pytest.mark.parametrize("of", ["the model", "the optimizer"])
def test_what_is_made_in_inference_mode_is_refused(of):
    with torch.inference_mode(of == "the model"):
        model = nn.Linear(2, 2)
    with (
        torch.inference_mode(of == "the optimizer"),
        pytest.raises(ValueError, match=r"weight has no gradient under torch\.inference_mode"),
    ):
        plain_zero(model.named_parameters())


@pytest.mark.parametrize("what", ["state_dict", "load_state_dict"])
@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_that_nothing_would_call_are_refused(what, when):
    optimizer = plain_zero(nn.Linear(2, 2).named_parameters())
    with pytest.raises(NotImplementedError, match="change what full_state_dict"):
        getattr(optimizer, f"register_{what}_{when}_hook")(print)


class ScalesItsGroups(torch.optim.SGD):
    """An optimizer that sets what its groups hold whenever it gets some."""

    def __init__(self, params, lr=0.1, by=0.5):
        super().__init__(params, lr=lr)
        for place, group in enumerate(self.param_groups):
            self.change(group, by ** (1 + place))

    def change(self, group, by):
        group["lr"] *= by
        group["train_mode"] = True

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self.param_groups[-1]["added"] = len(self.param_groups)

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            self.change(group, 3.0)


@WORLDS
@STAGES
def test_what_an_optimizer_makes_of_its_groups_counts(stage, world):
    groups = [
        {"params": [("a", nn.Parameter(torch.ones(4)))], "lr": 0.2},
        {"params": [("b", nn.Parameter(torch.ones(4)))]},
    ]
    mine = ZeroOptimizer(groups, ScalesItsGroups, world(), stage=stage, partition="element")
    theirs = ScalesItsGroups([{**g, "params": [torch.ones(4)]} for g in groups])
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.1) for each in (mine, theirs)]

    def assert_alike():
        both = [[{**g, "params": None} for g in each.param_groups] for each in (mine, theirs)]
        assert both[0] == both[1]

    assert_alike()
    for scheduler in schedulers:  # its rates are not in the inner optimizer when groups are added
        scheduler.optimizer.step()
        scheduler.step()
    added = {"lr": 0.7}
    mine.add_param_group({**added, "params": [("c", nn.Parameter(torch.ones(2)))]})
    theirs.add_param_group({**added, "params": [torch.ones(2)]})
    assert mine.param_groups[2]["added"] == 3
    assert_alike()
    saved = mine.state_dict(), theirs.state_dict()
    for each, state in zip((mine, theirs), saved, strict=True):
        each.load_state_dict(state)
    assert mine.param_groups[0]["lr"] == pytest.approx(0.2 * 0.5 * 0.1 * 3)
    assert_alike()


def test_an_optimizer_that_makes_other_groups_is_refused():
    class Split(torch.optim.SGD):
        def __init__(self, params, lr):
            super().__init__([{"params": [p]} for g in params for p in g["params"]], lr=lr)

    with pytest.raises(ValueError, match="Split makes 4 parameter groups of the 1 that"):
        zero(net(), Split)
