"""Parameters of a model that an optimizer does not train, as the first of two ranks sees them."""

from contextlib import nullcontext

import pytest
import torch
from first_of_two import STAGES, FirstOfTwo, OnesOfRank0, zero
from torch import nn

from zero import SingleProcessCollectives
from zero.parameter_watch import dense_parts

X = torch.linspace(-1, 1, 12).view(4, 3)
TOLD = "no optimizer of all ranks trains it"


class Net(nn.Module):
    """A body and a head, of which a forward may leave out the head."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 2), nn.Linear(2, 1)

    def forward(self, *, head=True):
        hidden = torch.tanh(self.body(X))
        return (self.head(hidden) if head else hidden).square().mean()


def over(model, *parts, stage=0, world=FirstOfTwo):
    """An optimizer of some parts of a model."""
    named = [(name, p) for name, p in model.named_parameters() if name.split(".")[0] in parts]
    return zero(named, world=world, model=model, stage=stage, lr=0.1)


def step(model, *optimizers, **options):
    model(**options).backward()
    for optimizer in optimizers:
        optimizer.step()
    for parameter in model.parameters():
        parameter.grad = None


def warned():
    return pytest.warns(UserWarning, match=rf"^head.weight and 1 more of the model has.*{TOLD}")


@STAGES
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", ["foreach", "loop"])
def test_what_a_plain_optimizer_beside_has_changed_is_compared_in_the_next_step(stage, first, kind):
    model = Net()
    body = over(model, "body", stage=stage)
    head = torch.optim.Adam(model.head.parameters(), foreach=kind == "foreach")
    both = (head, body) if first else (body, head)
    with warned():
        step(model, *both)
    assert not body._comparison._changed
    step(model, *both)
    assert body._comparison._changed
    assert list(body._comparison._left) == ["head.weight", "head.bias"]


@STAGES
def test_what_is_left_out_and_does_not_change_is_said_once(stage):
    model = Net()
    body = over(model, "body", stage=stage)
    with warned():
        step(model, body)
    step(model, body)


@STAGES
def test_a_module_that_is_added_later_is_compared_and_said(stage):
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = zero(model.named_parameters(), world=FirstOfTwo, model=model, stage=stage, lr=0.1)
    for added in (False, True):
        if added:
            model.append(nn.Linear(2, 1))
        with pytest.warns(UserWarning, match=TOLD) if added else nullcontext():
            model(X).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
    assert list(optimizer._shard.watch.untrained()) == ["1.weight", "1.bias"]


def later(model, body):
    with warned():
        step(model, body)
    step(model, body, over(model, "head"))


def frozen_meanwhile(model, body):
    head = over(model, "head")
    model.head.requires_grad_(False)
    assert not body._shard.watch.untrained()
    step(model, body)
    model.head.requires_grad_(True)
    step(model, body, head)


def second_phase(model, body):
    step(model, over(model, "body", "head"))
    step(model, over(model, "body"))  # closes the one before


def restored(model, body):
    with warned():
        step(model, body)
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    body.load_state_dict(body.state_dict())
    step(model, body)


def of_this_rank(model, body):
    local = nn.Linear(2, 1)
    both = [body, torch.optim.SGD(local.parameters(), lr=0.1)]
    for _ in range(2):
        (model(head=False) + local(model.body(X)).sum()).backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()


FINE = {
    "no gradient": lambda model, body: step(model, body, head=False),
    "another optimizer": lambda model, body: step(model, body, over(model, "head")),
    "one that is made later": later,
    "frozen": lambda model, body: step(
        model.requires_grad_(False).body.requires_grad_() and model, body
    ),
    "frozen meanwhile": frozen_meanwhile,
    "a second phase": second_phase,
    "restored": restored,
    "a model of this rank": of_this_rank,
}


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("name", FINE)
def test_nothing_is_said_of(name, stage):
    model = Net()
    FINE[name](model, over(model, "body", stage=stage))


@STAGES
def test_a_new_optimizer_takes_rank_0s_values_of_what_no_other_goes_on_to_train(stage):
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("new", "left", "other", "none")})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    kept = over(model, "other", stage=stage), over(model, "new", "left", stage=stage)
    over(model, "new", stage=stage, world=OnesOfRank0)
    for name, p in model.named_parameters():
        same = name.startswith("other")
        assert torch.equal(p, before[name] if same else torch.ones_like(p)), name
    assert [bool(optimizer.closed) for optimizer in kept] == [False, True]


def test_nothing_is_said_in_a_single_process():
    model = Net()
    body = over(model, "body", world=SingleProcessCollectives)
    for _ in range(2):
        step(model, body, torch.optim.SGD(model.head.parameters(), lr=0.1))


class Closed(torch.Tensor):
    """Two tensors as one, which nobody knows of."""

    @staticmethod
    def __new__(cls, first, second):
        made = torch.Tensor._make_wrapper_subclass(cls, first.shape)
        made.first, made.second = first, second
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("nothing else than its memory is of interest")


class TwoTensors(Closed):
    def __tensor_flatten__(self):
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(parts, *_):
        return TwoTensors(parts["first"], parts["second"])


class RefusingParameter(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("nothing else than its memory is of interest")


KINDS = {
    "integers": (lambda: nn.Parameter(torch.arange(3), requires_grad=False), ["p"]),
    "complex": (lambda: nn.Parameter(torch.ones(3, dtype=torch.complex64)), ["p"]),
    "derived": (lambda: RefusingParameter(torch.ones(3)), ["p"]),
    "two": (lambda: TwoTensors(torch.ones(3), torch.zeros(3)), ["p.first", "p.second"]),
    "unknown two": (lambda: Closed(torch.ones(3), torch.zeros(3)), []),
    "without memory": (lambda: torch.ones(3, device="meta"), []),
    "sparse": (lambda: torch.ones(3).to_sparse(), []),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_of_a_parameter_is_found_whatever_its_class(kind):
    make, names = KINDS[kind]
    tensor = make()
    found = dict(dense_parts("p", tensor))
    assert list(found) == names
    assert {type(part) for part in found.values()} <= {torch.Tensor}
    if type(tensor) is TwoTensors:
        assert found["p.second"].data_ptr() == tensor.second.data_ptr()
    elif names:
        found["p"].detach().zero_()
        with torch._C.DisableTorchFunctionSubclass():
            assert not tensor.any()
