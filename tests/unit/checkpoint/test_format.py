"""Safetensors files written in ranges, read by the library of the format."""

import random
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from mntrain.checkpoint.format import (
    DTYPES,
    ChecksummedRange,
    FileLayout,
    open_tensors,
)
from mntrain.checkpoint.reader import verify

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
TENSORS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(st.sampled_from(list(DTYPES.values())), SHAPES),
    max_size=6,
)


def filled(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)


def write_in_parts(path, tensors, writers=3):
    """Let each of several writers write a part of every tensor; return all written ranges."""
    layout = FileLayout({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})
    path.write_bytes(bytes(layout.nbytes))
    ranges: list[ChecksummedRange] = []
    for number in reversed(range(writers)):
        with path.open("r+b", buffering=0) as file:
            if number == 1:
                ranges += layout.write_header(file.fileno())
            for name, tensor in tensors.items():
                numel = tensor.numel()
                low, high = numel * number // writers, numel * (number + 1) // writers
                ranges += layout.write(file.fileno(), name, tensor.reshape(-1)[low:high], low)
    return sorted(ranges, key=lambda part: part.start)


def find_damage(path, ranges):
    verify(path.parent, SimpleNamespace(checksums={path.name: ranges}), [path.name])


@given(described=TENSORS)
def test_the_library_reads_what_was_written_in_parts(tmp_path_factory, described):
    path = tmp_path_factory.mktemp("files") / "a.safetensors"
    tensors = {name: filled(*about) for name, about in described.items()}
    ranges = write_in_parts(path, tensors)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    ends = [part.start + part.length for part in ranges]
    assert [part.start for part in ranges] == [0, *ends[:-1]]
    assert ends[-1] == path.stat().st_size
    find_damage(path, ranges)
    with pytest.raises(ValueError, match=r"w is of dtype torch\.complex64"):
        FileLayout({"w": (torch.complex64, (2,))})


@pytest.fixture
def written(tmp_path):
    """A file of two tensors, and its ranges."""
    path = tmp_path / "a.safetensors"
    tensors = {"w": torch.randn(7, 3), "n": torch.arange(5)}
    return path, write_in_parts(path, tensors)


def test_every_flipped_bit_is_located_and_every_truncated_file_is_refused(written):
    path, ranges = written
    right, chance = path.read_bytes(), random.Random(1)
    for at in range(len(right)):
        data = bytearray(right)
        data[at] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"a\.safetensors is damaged") as error:
            find_damage(path, ranges)
        start, stop = map(int, re.findall(r"\d+", str(error.value)))
        assert start <= at < stop
        path.write_bytes(right[:at])
        with pytest.raises(ValueError, match=r"a\.safetensors is truncated"):
            open_tensors(path)
