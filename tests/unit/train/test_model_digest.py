import copy

import pytest
import torch
from torch import nn

from mntrain.train.model_digest import differing_ranks, model_digest


class Holding(nn.Module):
    """A model of the tensors given: trainable ones are parameters, the others are buffers."""

    def __init__(self, *tensors):
        super().__init__()
        for index, tensor in enumerate(tensors):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"p{index}", tensor)
            else:
                self.register_buffer(f"b{index}", tensor)


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Linear(3, 2).bfloat16())


def flip_a_bit(tensor):
    """Flip the lowest bit of the last element."""
    tensor.detach().view(-1).view(torch.uint8)[-tensor.element_size()] ^= 1


@pytest.mark.parametrize("name", model().state_dict())
def test_one_bit_of_any_parameter_or_buffer_changes_the_digest(name):
    first, second = model(), model()
    flip_a_bit(second.state_dict()[name])
    assert model_digest(first) != model_digest(second)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor(True), torch.tensor(False)),
        *(
            (torch.ones(3, dtype=dtype), torch.full((3,), 2, dtype=dtype))
            for dtype in (torch.float64, torch.float16, torch.int64, torch.complex64)
        ),
    ],
)
def test_a_digest_is_of_bits_whatever_the_shape_and_dtype(one, other):
    empty, nan = torch.zeros(0, 3), nn.Parameter(torch.tensor(float("nan")))
    first, second = Holding(empty, nan, one), Holding(empty, nan, other)
    assert model_digest(first) == model_digest(copy.deepcopy(first)) != model_digest(second)


def test_a_digest_depends_on_no_memory_format_and_leaves_the_model_alone():
    first = model()
    second = copy.deepcopy(first).to(memory_format=torch.channels_last)
    assert second[0].weight.stride() != first[0].weight.stride()
    assert model_digest(first) == model_digest(second)
    for name, tensor in model().state_dict().items():
        assert torch.equal(tensor, first.state_dict()[name]), name
    assert all(p.requires_grad and p.grad is None for p in first.parameters())


@pytest.mark.parametrize(
    ("digests", "differing"),
    [
        ("a", []),
        ("aaaa", []),
        ("aaba", [2]),
        ("baaa", [0]),
        ("abca", [1, 2]),
        ("aabb", [2, 3]),
        ("abba", [1, 2]),
        ("ab", [1]),
        ("abcd", [1, 2, 3]),
        ("abbcc", [0, 3, 4]),
    ],
)
def test_differing_ranks_are_those_without_the_most_common_digest(digests, differing):
    assert differing_ranks(list(digests)) == differing
