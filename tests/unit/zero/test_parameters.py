"""Parameters in flight: a failed all-gather is never read silently; close gives the model back."""

from types import SimpleNamespace

import pytest
import torch
from first_of_two import FirstOfTwo
from torch import nn

from zero import SingleProcessCollectives, ZeroOptimizer


class Failing(FirstOfTwo):
    """All-gathers that fail, as those of a world that was abandoned."""

    def all_gather(self, tensor, bounds=None):
        def wait():
            raise RuntimeError("the world is abandoned")

        return SimpleNamespace(wait=wait)


def stepped(stage):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = ZeroOptimizer(
        model.named_parameters(), torch.optim.SGD, Failing(), stage=stage, model=model
    )
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


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
def test_every_read_after_a_failed_all_gather_fails(stage, read):
    model, _optimizer = stepped(stage)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="abandoned"):
            read(model)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_closed_optimizer_gives_the_model_back_although_an_all_gather_failed(stage):
    model, optimizer = stepped(stage)
    with pytest.raises(RuntimeError, match="abandoned"):
        optimizer.close()
    assert all(type(module._parameters) is dict for module in model)
    model.load_state_dict(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).state_dict())
    assert model(torch.ones(1, 3)).shape == (1, 3)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_group_that_comes_later_leaves_the_master_weights_alone(stage):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).bfloat16()
    model[0].requires_grad_(False)
    optimizer = ZeroOptimizer(
        model.named_parameters(), torch.optim.SGD, SingleProcessCollectives(), stage=stage, lr=1e-4
    )
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
