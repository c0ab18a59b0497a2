"""Parameters in flight and in flat memory.

A failed all-gather is never read silently; close gives the model back.
"""

import copy
import gc
from types import SimpleNamespace

import pytest
import torch
from first_of_two import STAGES, FirstOfTwo, zero
from torch import nn

from zero import SingleProcessCollectives


class FailingGathers(FirstOfTwo):
    """All-gathers that fail, as those of a world that was abandoned."""

    def all_gather(self, tensor, bounds=None):
        def wait():
            raise RuntimeError("the world is abandoned")

        return SimpleNamespace(wait=wait)


def sgd(model, world=FirstOfTwo, /, **options):
    return zero(model, world=world, **options)


class ManyKinds(nn.Module):
    """Parameters of several dtypes and memory formats, one empty, one scalar."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(7, 5).T)
        self.narrow = nn.Parameter(torch.randn(65, dtype=torch.bfloat16))
        self.empty, self.scalar = nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.ones(()))
        self.wave = nn.Parameter(torch.randn(3, dtype=torch.complex64))


@pytest.mark.parametrize(
    "read",
    [
        lambda model: model[0].weight,
        lambda model: list(model.parameters()),
        lambda model: model.state_dict(),
        lambda model: model(torch.ones(1, 3)),
    ],
    ids=["attribute", "parameters", "state_dict", "forward"],
)
@pytest.mark.parametrize("stage", [1, 2])
def test_every_read_after_a_failed_all_gather_fails_until_the_model_is_given_back(stage, read):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = sgd(model, FailingGathers, stage=stage, model=model, overlap_forward=True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="abandoned"):
            read(model)
    with pytest.raises(RuntimeError, match="abandoned"):
        optimizer.close()
    assert all(type(module._parameters) is dict for module in model)
    model.load_state_dict(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).state_dict())
    assert model(torch.ones(1, 3)).shape == (1, 3)


@STAGES
def test_a_group_that_comes_later_leaves_the_master_weights_alone(stage):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).bfloat16()
    model[0].requires_grad_(False)
    optimizer = sgd(model, SingleProcessCollectives, stage=stage, lr=1e-4)
    model(torch.ones(1, 3).bfloat16()).sum().backward()
    optimizer.step()
    before = {piece.name: piece.tensors["master"].clone() for piece in optimizer.slices()}
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].named_parameters(prefix="0")})
    after = {piece.name: piece.tensors["master"] for piece in optimizer.slices()}
    for name, master in before.items():
        assert not torch.equal(master, master.bfloat16().float())
        assert torch.equal(after[name], master)
    assert torch.equal(after["0.weight"], model[0].weight.detach().float().flatten())


@STAGES
def test_parameters_keep_their_layout_and_lie_in_a_storage_of_their_own(stage):
    model = ManyKinds()
    before = copy.deepcopy(model)
    sgd(model, stage=stage, lr=0.1)
    for name, parameter in model.named_parameters():
        old = before.get_parameter(name)
        assert torch.equal(parameter, old)
        assert (parameter.dtype, parameter.stride()) == (old.dtype, old.stride())
        assert parameter.requires_grad
        assert parameter.is_leaf
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
        copied = copy.deepcopy(parameter)
        assert torch.equal(copied, parameter)
        assert copied.stride() == parameter.stride()


def test_state_dicts_share_the_memory_of_the_model_and_outlive_it():
    model = nn.Linear(3, 3)
    optimizer = sgd(model, stage=1, lr=0.1)
    state = model.state_dict()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(state["weight"], model.weight)
    expected = model.weight.detach().clone()
    optimizer.close()
    del model, optimizer
    gc.collect()
    assert torch.equal(state["weight"], expected)


@STAGES
def test_a_graph_of_values_before_the_update_is_refused_as_in_torch(stage):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = sgd(model, stage=stage, model=model)
    old = model(torch.ones(1, 2)).sum()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()
