"""Parameters that are moved, converted or replaced after their optimizer was made."""

import copy
from functools import partial

import pytest
import torch
from mpi4py import MPI
from oracle import assert_close, mine, update
from torch import nn
from worlds import refusal

pytestmark = pytest.mark.simulated

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
ADAM = partial(torch.optim.Adam, lr=0.01)
STAGES = pytest.mark.parametrize("stage", [0, 1, 2])


class Images(nn.Module):
    """A convolution, in any memory format, and a layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.last = nn.Conv2d(2, 3, 3), nn.Linear(3, 3)

    def forward(self, x):
        image = torch.cat([x, x, x, x.flip(1), x, x, x[:, :2]], dim=1).view(len(x), 2, 4, 4)
        return self.last(torch.tanh(self.conv(image)).mean((2, 3)))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(12, 5, generator=generator, dtype=torch.float64),)


def loss_of(model, inputs):
    parameter = next(model.parameters())
    return (model(inputs.to(parameter.dtype)) - 1).square().mean()


def with_oracle(make, stage, memory_format=torch.contiguous_format):
    """A model and a copy of it, and an optimizer of each."""
    model = Images().double().to(memory_format=memory_format)
    alone = copy.deepcopy(model)
    return model, alone, make(model, ADAM, stage=stage), ADAM(alone.parameters())


def new_layer(model):
    model.last = nn.Linear(3, 3).double()


def turn(model):
    model.last.weight.data = model.last.weight.data.T.contiguous().T


def grow(model):
    model.last.bias.data = torch.zeros(4, dtype=torch.float64)


def assign(model):
    model.last.weight = nn.Parameter(model.last.weight.detach().clone())


def load_by_assignment(model):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


CONVERTED = r"is of torch\.float32, .*, and was of torch\.float64"
CHANGES = {
    "channels last": (
        lambda model: model.to(memory_format=torch.channels_last),
        r"conv\.weight has another memory format",
    ),
    "turn": (turn, r"last\.weight has another memory format"),
    "convert": (nn.Module.float, rf"conv\.weight {CONVERTED}"),
    "convert a part": (lambda model: model.last.float(), rf"last\.weight {CONVERTED}"),
    "empty": (lambda model: model.to_empty(device="meta"), r"conv\.weight is another object"),
    "grow": (grow, r"last\.bias is of .*, \(4,\), and was of .*, \(3,\)"),
    "assign": (assign, r"last\.weight is another object"),
    "new layer": (new_layer, r"last\.weight is another object"),
    "load by assignment": (load_by_assignment, r"conv\.weight is another object"),
}


@STAGES
@pytest.mark.parametrize("trained", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_an_update_cannot_follow_is_refused(world, make, stage, trained, change):
    model = Images().double()
    optimizer = make(model, ADAM, stage=stage)
    if trained:
        update(optimizer, loss_of(model, *mine(world, batch(0))))
    act, words = CHANGES[change]
    act(model)
    for use in (optimizer.step, partial(optimizer.clip_grad_norm_, 1.0), optimizer.state_dict):
        with pytest.raises(RuntimeError, match=words):
            use()
    if change in ("convert a part", "grow"):
        with pytest.raises(RuntimeError, match=words):
            model.conv.weight.sum().backward()


@STAGES
def test_other_memory_is_used_at_stage_0_and_refused_where_a_rank_owns_a_part(world, make, stage):
    model, alone, optimizer, plain = with_oracle(make, stage)
    for step in range(3):
        loss_of(model, *mine(world, batch(step))).backward()
        loss_of(alone, *batch(step)).backward()
        if step == 1:
            for one in (model, alone):
                one.last.weight.data = one.last.weight.data.clone()
            if stage:
                with pytest.raises(RuntimeError, match=r"last\.weight has other memory"):
                    optimizer.step()
                return
        optimizer.step(), plain.step()
        optimizer.zero_grad(), plain.zero_grad()
    assert_close(model, alone)


@STAGES
def test_what_leaves_parameters_as_they_were_is_followed(world, make, stage):
    model, alone, optimizer, plain = with_oracle(make, stage)
    for step in range(4):
        update(optimizer, loss_of(model, *mine(world, batch(step))))
        update(plain, loss_of(alone, *batch(step)))
        for one in (model, alone):
            own = one.last.weight.data
            one.last.weight.data = torch.zeros_like(own)  # for an evaluation, say
            one.last.weight.data = own
            one.double().to(memory_format=torch.contiguous_format)
            one.load_state_dict({name: value * 0.9 for name, value in one.state_dict().items()})
            if step == 1:
                nn.utils.parametrize.register_parametrization(one.last, "weight", nn.Tanh())
            if step == 2:
                one.conv, one.more = nn.Identity(), one.conv
                one.conv, one.unused = one.more, nn.Tanh()
    assert_close(model, alone)


def layers(count):
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(5, 5).double() for _ in range(count)))


def tied_to_a_frozen_one(model):
    model[2].weight = nn.Parameter(model[0].weight.data, requires_grad=False)


def kept_in_a_buffer(model):
    model.register_buffer("kept", model[0].weight.data)


@pytest.mark.parametrize("share", [tied_to_a_frozen_one, kept_in_a_buffer, nn.Module.share_memory])
def test_memory_that_parameters_would_leave_is_refused_by_all_ranks_but_at_stage_0(
    world, make, share
):
    model, alone = layers(3), layers(3)
    share(model), share(alone)
    for stage in (1, 2):
        said = refusal(make, model, ADAM, stage=stage)
        assert "0.weight" in said
        assert "stage=0" in said
    optimizer = make(model, ADAM, stage=0)
    plain = ADAM([p for p in alone.parameters() if p.requires_grad])
    for step in range(3):
        update(optimizer, loss_of(model, *mine(world, batch(step))))
        update(plain, loss_of(alone, *batch(step)))
    assert_close(model, alone)
    for ours, theirs in zip(model.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def remove_a_layer(model):
    del model[1]


def remove_and_append(model):
    layer = model[1]
    del model[1]
    model.append(layer)


def swap_layers(model):
    model[0], model[2] = model[2], model[0]


def share_a_layer(model):
    model[1] = model[0]


def tie_weights(model):
    model[2].weight = model[0].weight


@STAGES
@pytest.mark.parametrize(
    "act", [remove_a_layer, remove_and_append, swap_layers, share_a_layer, tie_weights]
)
def test_trained_parameters_in_the_places_of_others_train_as_in_torch(world, make, stage, act):
    model, alone = layers(4), layers(4)
    optimizer, plain = make(model, ADAM, stage=stage), ADAM(alone.parameters())
    trained = [[*one.parameters()] for one in (model, alone)]
    for step in range(4):
        update(optimizer, loss_of(model, *mine(world, batch(step))))
        update(plain, loss_of(alone, *batch(step)))
        if step < 2:
            act(model), act(alone)
    assert_close(model, alone)
    for ours, theirs in zip(*trained, strict=True):
        torch.testing.assert_close(ours, theirs)


@STAGES
def test_a_new_layer_in_the_place_of_one_that_was_removed_is_refused(world, make, stage):
    model = layers(3)
    optimizer = make(model, ADAM, stage=stage)
    update(optimizer, loss_of(model, *mine(world, batch(0))))
    del model[1]
    model.insert(1, nn.Linear(5, 5).double())
    with pytest.raises(RuntimeError, match=r"1\.weight is another object"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@STAGES
def test_a_traced_model_trains_as_with_torch(world, make, stage):
    plain = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 2)).double()
    model = torch.jit.trace(copy.deepcopy(plain), *batch(0))
    optimizer, reference = make(model, ADAM, stage=stage), ADAM(plain.parameters())
    for step in range(3):
        update(optimizer, loss_of(model, *mine(world, batch(step))))
        update(reference, loss_of(plain, *batch(step)))
    assert_close(model, plain)


@STAGES
def test_gradients_in_another_memory_format_than_their_parameter(world, make, stage):
    model, alone, optimizer, plain = with_oracle(make, stage, torch.channels_last)
    for one in (model, alone):
        one.conv.weight.register_hook(torch.Tensor.contiguous)
        one.last.weight.register_hook(lambda gradient: gradient.T.contiguous().T)
    for step in range(4):
        loss_of(model, *mine(world, batch(step))).backward()
        loss_of(alone, *batch(step)).backward()
        if not stage and step == 2:
            model.conv.weight.grad = model.conv.weight.grad.contiguous()
        if step == 3:  # assigned before backward, which adds to it
            loss_of(model, *mine(world, batch(9))).backward()
            loss_of(alone, *batch(9)).backward()
        optimizer.step(), plain.step()
        optimizer.zero_grad(), plain.zero_grad()
    assert_close(model, alone)
