"""Parameters that are moved, converted or replaced after their optimizer was made."""

import copy
from functools import partial

import pytest
import torch
from mpi4py import MPI
from oracle import assert_close, mine, update
from torch import nn

from mntrain import checkpoint

pytestmark = [pytest.mark.mpi, pytest.mark.simulated]

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
            if stage and SIZE > 1:
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


@STAGES
@pytest.mark.parametrize("turned", [False, True], ids=["to channels last", "from channels last"])
def test_a_checkpoint_continues_in_another_memory_format(world, make, folder, stage, turned):
    formats = [torch.contiguous_format, torch.channels_last]
    formats = formats[::-1] if turned else formats
    alone = Images().double()
    plain = ADAM(alone.parameters())
    for step in range(6):
        update(plain, loss_of(alone, *batch(step)))
    for part, memory_format in enumerate(formats):
        model = Images().double().to(memory_format=memory_format)
        optimizer = make(model, ADAM, stage=stage if part else (stage + 1) % 3)
        checkpoints = world.checkpoints(
            folder / str(part), model=model, optimizer=optimizer, every=0
        )
        checkpoints.restore()
        if part:
            found = checkpoint.newest(world, folder / "0")
            checkpoint.load(found, model, optimizer, world)
        for step in range(3 * part, 3 * part + 3):
            update(optimizer, loss_of(model, *mine(world, batch(step))))
        checkpoints.save(3, now=True)
        optimizer.close()
    assert_close(model, alone)
