import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mntrain.comm.reduction import HostAdder, as_bytes
from zero.kernels import sum_dtype

WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.uint8: torch.int64,
    torch.int32: torch.int64,
    torch.int64: torch.int64,
}


def far_apart(count, numel, dtype, seed=0):
    """Addends of which each order of adding makes another sum."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-12, 13, (count, numel), generator=generator)
    values = torch.randn(count, numel, generator=generator, dtype=torch.float64)
    return list((values * 2.0 ** exponents.double()).to(dtype))


def in_order(addends, dtype):
    """First to last, each addition in the wide dtype, and one rounding at the end."""
    wide = WIDE[dtype]
    return functools.reduce(torch.add, [addend.to(wide) for addend in addends]).to(dtype)


def bits(tensor):
    return tensor.view(torch.uint8).tolist()


@pytest.mark.parametrize(("dtype", "wide"), WIDE.items(), ids=str)
def test_sums_accumulate_in_32_bits_or_more(dtype, wide):
    assert sum_dtype(dtype) == wide


@given(
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.integers(1, 6),
    st.sampled_from([0, 1, 5, 300]),
    st.data(),
)
def test_addends_are_added_in_their_order_wherever_the_sum_lies(dtype, count, numel, data):
    place = data.draw(st.none() | st.integers(0, count - 1))
    addends = far_apart(count, numel, dtype, seed=count)
    expected = in_order(addends, dtype)
    before = [addend.clone() for addend in addends]
    total = torch.full((numel,), float("nan"), dtype=dtype) if place is None else addends[place]
    HostAdder().add(addends, total, place)
    assert bits(total) == bits(expected)
    for index, (addend, was) in enumerate(zip(addends, before, strict=True)):
        assert index == place or bits(addend) == bits(was)


def test_another_order_makes_another_sum():
    addends = far_apart(4, 1000, torch.float32)
    assert bits(in_order(addends, torch.float32)) != bits(in_order(addends[::-1], torch.float32))


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_addends_are_added_in_the_dtype_of_the_sum(narrow):
    addends = far_apart(3, 1000, narrow)
    total = torch.full((1000,), float("nan"))
    HostAdder().add(addends, total, None)
    assert bits(total) == bits(in_order([addend.float() for addend in addends], torch.float32))


def test_integers_are_exact():
    addends = [torch.tensor([2**62, -1]), torch.tensor([2**62 - 1, -(2**63) + 1])]
    HostAdder().add(addends, addends[1], 1)
    assert addends[1].tolist() == [2**63 - 1, -(2**63)]


def test_an_adder_serves_any_length_and_dtype_in_turn():
    adder = HostAdder()
    for numel, dtype in [(7, torch.bfloat16), (1000, torch.float64), (3, torch.float16)]:
        addends = far_apart(4, numel, dtype)
        expected = in_order(addends, dtype)
        adder.add(addends, addends[3], 3)
        assert bits(addends[3]) == bits(expected)


def test_the_bytes_of_a_tensor_are_its_memory():
    tensor = torch.arange(6, dtype=torch.int16)
    data = as_bytes(tensor[2:4])
    assert data.tobytes() == tensor[2:4].numpy().tobytes()
    data[:] = 0
    assert tensor.tolist() == [0, 1, 0, 0, 4, 5]
    assert as_bytes(torch.empty(0)).nbytes == 0


def test_bits_of_bf16_are_its_memory_too():
    assert as_bytes(torch.tensor([1.0], dtype=torch.bfloat16)).tolist() == [0x80, 0x3F]
