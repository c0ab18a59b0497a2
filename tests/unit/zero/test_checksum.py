"""Checksums of the bits of tensors."""

import copy

import pytest
import torch
from torch import nn

from zero.comparison import Report, _differing_weights, _tell_weights
from zero.kernels import ROW_BYTES, checksum


def model():
    torch.manual_seed(1)
    layers = nn.Conv2d(2, 3, 2), nn.Linear(150, 150), nn.Linear(3, 2).bfloat16()
    return nn.Sequential(*layers)  # the second one has a row and a rest


def of(module):
    return int(checksum([*module.parameters()]))


@pytest.mark.parametrize("place", [0, -1, 70_000])
@pytest.mark.parametrize("name", model().state_dict())
def test_one_bit_of_any_parameter_changes_the_checksum(name, place):
    first, second = model(), model()
    data = second.state_dict()[name].view(-1).view(torch.uint8)
    place = min(place, len(data) - 1)
    expected = of(first)
    for bit in range(8):
        data[place] ^= 1 << bit
        assert of(second) != expected
        data[place] ^= 1 << bit
    assert of(second) == expected


def test_differences_of_opposite_signs_do_not_cancel():
    torch.manual_seed(0)
    values = torch.randint(0, 1 << 30, (5 * ROW_BYTES // 4,), dtype=torch.int32)
    expected = int(checksum([values]))
    for _ in range(50):
        one, other = torch.randint(0, len(values), (2,)).tolist()
        changed = values.clone()
        changed[one] += 1
        changed[other] -= 1
        assert one == other or int(checksum([changed])) != expected
    assert int(checksum([values.flip(0)])) != expected
    assert int(checksum([values[:9], values[9:18]])) != int(checksum([values[9:18], values[:9]]))


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
def test_a_checksum_is_of_bits_whatever_the_shape_and_dtype(one, other):
    empty, nan = torch.zeros(0, 3), nn.Parameter(torch.tensor(float("nan")))
    expected = int(checksum([empty, nan, one]))
    assert expected == int(checksum(copy.deepcopy([empty, nan, one])))
    assert expected != int(checksum([empty, nan, other]))
    assert int(checksum([])) == int(checksum([empty])) == 0


def test_a_checksum_depends_on_no_memory_format_or_address():
    first = model()
    second = copy.deepcopy(first).to(memory_format=torch.channels_last)
    assert second[0].weight.stride() != first[0].weight.stride()
    assert of(first) == of(second)
    values = torch.rand(40_000)
    shifted = torch.zeros(40_001)
    shifted[1:] = values
    assert int(checksum([values])) == int(checksum([shifted[1:]]))


@pytest.mark.parametrize(
    ("by_parameter", "words"),
    [
        (["ab"], "rank 0 against rank 1, first in p0"),
        (["ab", "ab"], "rank 0 against rank 1, first in p0 and 1 more"),
        (["aab"], "rank 2 against the others, first in p0"),
        (["baaa", "aaaa"], "rank 0 against the others, first in p0"),
        (["aaaa", "aabb"], "ranks 0, 1 against ranks 2, 3, first in p1"),
        (["abc"], "rank 0 against rank 1 against rank 2, first in p0"),
        (["abac", "aaaa"], "ranks 1, 3 against the others, first in p0"),
        (["aab", "aba"], "ranks 1, 2 against the others, first in p0 and 1 more"),
        (["aab", "abc"], "rank 0 against rank 1 against rank 2, first in p0 and 1 more"),
    ],
)
def test_the_odd_ranks_are_named_only_where_most_agree(by_parameter, words):
    reports = [
        Report(rank, 0, {}, {f"p{i}": digests[rank] for i, digests in enumerate(by_parameter)}, "")
        for rank in range(len(by_parameter[0]))
    ]
    found = _tell_weights(_differing_weights(reports, in_sync=False))
    assert found.startswith(f"the weights differ between ranks: {words}: ")


@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_rows_that_changed_places_change_the_checksum(scale):
    torch.manual_seed(0)
    columns = ROW_BYTES // 4
    first = torch.randn(6, columns)
    first[4] = scale * first[2].flip(0)
    second = first.clone()
    second[[1, 4]] = first[[4, 1]]
    assert int(checksum([second])) != int(checksum([first]))
    signs = torch.ones(6, columns)
    signs[1, 1] = -1.0  # in the upper half of a number of 64 bits
    moved = torch.ones(6, columns)
    moved[5, 1] = -1.0
    assert int(checksum([moved])) != int(checksum([signs]))
