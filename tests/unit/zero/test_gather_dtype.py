"""Parameters that are rounded to a 16-bit gather dtype, with master weights at their owners."""

import copy

import pytest
import torch
from first_of_two import FirstOfTwo
from predictions import predict
from torch import nn

from zero import SingleProcessCollectives, ZeroOptimizer
from zero.layout import ParameterSpec

WORLDS = pytest.mark.parametrize("world", [SingleProcessCollectives, FirstOfTwo])
SHARDED = pytest.mark.parametrize("stage", [1, 2])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def net():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def make(model, world=SingleProcessCollectives, **options):
    return ZeroOptimizer(
        model.named_parameters(), torch.optim.AdamW, world(), lr=0.01, bucket_bytes=150, **options
    )


def train(model, optimizer, steps=3):
    for number in range(steps):
        torch.manual_seed(number)
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@DTYPES
@SHARDED
def test_parameters_are_the_rounded_master_weights(stage, dtype):
    model = net()
    optimizer = make(model, stage=stage, gather_dtype=dtype)
    masters, reference = net(), net()
    plain = torch.optim.AdamW(masters.parameters(), lr=0.01)
    for number in range(3):
        for parameter, master in zip(reference.parameters(), masters.parameters(), strict=True):
            # The first forward reads what was never gathered.
            parameter.data = master.detach().to(dtype).float() if number else master.detach()
            parameter.grad = None
        torch.manual_seed(number)
        reference(torch.randn(5, 4)).square().mean().backward()
        for parameter, master in zip(reference.parameters(), masters.parameters(), strict=True):
            master.grad = parameter.grad
        plain.step()
    train(model, optimizer)
    for parameter, master in zip(model.parameters(), masters.parameters(), strict=True):
        assert torch.equal(parameter, master.to(dtype).float())
        assert not torch.equal(parameter, master)
    by_name = {piece.name: piece.tensors["master"] for piece in optimizer.slices()}
    for name, master in masters.named_parameters():
        assert torch.equal(by_name[name], master.detach().flatten())


@DTYPES
def test_stage_0_and_16_bit_parameters_are_not_rounded(dtype):
    expected, model = net(), net()
    train(expected, make(expected))
    train(model, make(model, gather_dtype=dtype))
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, other)


@SHARDED
def test_what_is_written_into_a_parameter_replaces_its_master_weights(stage):
    model = net()
    optimizer = make(model, stage=stage, gather_dtype=torch.bfloat16)
    train(model, optimizer)
    with torch.no_grad():
        model[0].bias.fill_(1 / 3)
    before = {piece.name: piece.tensors["master"].clone() for piece in optimizer.slices()}
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    train(model, optimizer, steps=1)
    after = {piece.name: piece.tensors["master"] for piece in optimizer.slices()}
    assert torch.equal(after["0.bias"], torch.full((8,), 1 / 3))
    assert torch.equal(after["0.weight"], before["0.weight"])


@SHARDED
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(stage):
    model = net()
    optimizer = make(model, stage=stage, gather_dtype=torch.bfloat16)
    train(model, optimizer)
    other = copy.deepcopy(model)
    resumed = make(other, stage=stage, gather_dtype=torch.bfloat16)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer)
    train(other, resumed)
    for parameter, restored in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, restored)


@pytest.mark.parametrize("stage", [0, 1, 2])
@WORLDS
def test_master_weights_and_copies_hold_what_was_predicted(world, stage):
    model = net()
    optimizer = make(model, world, stage=stage, gather_dtype=torch.bfloat16)
    specs = [ParameterSpec(name, tuple(p.shape), p.dtype) for name, p in model.named_parameters()]
    options = {"stage": stage, "size": world.size, "bucket_bytes": 150}
    with_gather = predict(specs, torch.optim.AdamW, gather_dtype=torch.bfloat16, **options)
    without = predict(specs, torch.optim.AdamW, **options)
    train(model, optimizer)
    assert optimizer.memory() == optimizer.expected_memory() == with_gather
    masters = sum(len(p.tensors.get("master", ())) for p in optimizer.slices())
    copies = sum(spec.numel for spec in specs) if stage and world.size > 1 else 0
    assert with_gather.total - without.total == 4 * masters + 2 * copies
    assert bool(masters) == (stage > 0)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match=r"gather_dtype is torch\.int8: .*torch\.bfloat16"):
        make(net(), gather_dtype=torch.int8)
