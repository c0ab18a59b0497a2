"""Safetensors files written in ranges, read by the library of the format."""

import json
import random
import re
import zlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from mntrain.checkpoint.format import (
    DTYPES,
    FILE,
    FILES,
    ChecksummedRange,
    FileLayout,
    Manifest,
    ParameterState,
    open_tensors,
    read_manifest,
)
from mntrain.checkpoint.objects import HOOK, UNNAMED
from mntrain.checkpoint.reader import verify
from mntrain.checks.storage import PAGE_BYTES

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
    """Let each of several writers write a part of all tensors; return all written ranges."""
    layout = FileLayout(shapes_of(tensors))
    path.write_bytes(bytes(layout.nbytes))
    ranges: list[ChecksummedRange] = []
    for number in reversed(range(writers)):
        with path.open("r+b", buffering=0) as file:
            if number == 1:
                ranges += layout.write_header(file.fileno())
            for name, low, high in layout.part(number, writers, tensors):
                flat = tensors[name].reshape(-1)[low:high]
                ranges += layout.write(file.fileno(), name, flat, low)
    return sorted(ranges, key=lambda part: part.start)


def shapes_of(tensors):
    return {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}


def pages(ranges):
    return {
        page
        for part in ranges
        if part.length
        for page in range(part.start // PAGE_BYTES, -(-(part.start + part.length) // PAGE_BYTES))
    }


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


LENGTHS = st.sampled_from([0, 1, 5, 8191, 8192, 8193, 16_384, 30_001])


@given(
    regions=st.lists(
        st.lists(st.tuples(st.sampled_from([torch.float64, torch.int16, torch.bool]), LENGTHS)),
        min_size=1,
        max_size=4,
    ),
    chooses=st.integers(0, 255),
)
def test_no_page_has_bytes_of_two_writers(tmp_path_factory, regions, chooses):
    """Neither in the regions of what each has alone, nor in the parts of what all have."""
    path = tmp_path_factory.mktemp("files") / "a.safetensors"
    tensors = [
        {f"{number}/{i}": filled(dtype, (length,)) for i, (dtype, length) in enumerate(region)}
        for number, region in enumerate(regions)
    ]
    layout = FileLayout(*map(shapes_of, tensors))
    by_writer: list[list[ChecksummedRange]] = []
    with path.open("w+b", buffering=0) as file:
        for number, own in reversed(list(enumerate(tensors))):
            written = [
                part for n, t in own.items() for part in layout.write(file.fileno(), n, t, 0)
            ]
            by_writer.append(written + layout.write_padding(file.fileno(), number))
        by_writer.append(layout.write_header(file.fileno()))
    expect_pages_apart(by_writer)
    found = load_file(path)
    for name, tensor in (item for own in tensors for item in own.items()):
        assert torch.equal(found.pop(name), tensor)
    assert all(name.startswith("padding/") and not rest.any() for name, rest in found.items())
    ranges = sorted(part for written in by_writer for part in written)
    find_damage(path, ranges)
    assert sum(part.length for part in ranges) == path.stat().st_size == layout.nbytes

    whole = {name: tensor for own in tensors for name, tensor in own.items()}
    layout = FileLayout(shapes_of(whole))
    with path.open("w+b", buffering=0) as file:
        alone = {name for number, name in enumerate(whole) if chooses >> number % 8 & 1}
        shared = whole.keys() - alone
        places = [list(layout.part(number, 3, shared)) for number in range(3)]
        assert not alone & {name for place in places[1:] for name, *_ in place}
        parts = [
            [
                part
                for name, low, high in place
                for part in layout.write(file.fileno(), name, whole[name][low:high], low)
            ]
            for place in places
        ]
        parts.append(layout.write_header(file.fileno()))
    expect_pages_apart(parts)
    found = load_file(path)
    assert all(torch.equal(found.pop(name), tensor) for name, tensor in whole.items())
    assert not found


def expect_pages_apart(by_writer):
    each = list(map(pages, by_writer))
    assert sum(map(len, each)) == len(set().union(*each))


@pytest.mark.parametrize("number", [1, 2])
def test_a_manifest_of_an_earlier_format_is_read(tmp_path, number):
    state = ParameterState((2, 3), (0, 1), ("exp_avg",), {"step": {"value": 3.0}})
    ranges = {name: [ChecksummedRange(0, 8, 5)] for name in FILES}
    values = {"a": {"type": "dict", "items": []}, HOOK: {"by_rank": [1, 2]}, UNNAMED: {"type": "x"}}
    manifest = Manifest(
        4, objects=values, parameter_states={"w": state}, checksums=ranges, optimizer_steps=4
    )
    manifest = replace(manifest, param_groups=[{"params": ["w"]}])
    (tmp_path / FILE).write_text(manifest.to_json())
    assert read_manifest(tmp_path) == manifest

    fields = json.loads(json.loads(manifest.to_json())["content"])
    for name, earlier in {"param_groups": "groups", "checksums": "runs"}.items():
        fields[earlier] = fields.pop(name)
    fields["kept"] = fields.pop("parameter_states")
    fields["kept"]["w"]["by_element"] = fields["kept"]["w"].pop("tensor_keys")
    objects = fields["objects"]
    fields["hook"], fields["unnamed_state"] = (
        {name: objects.pop(name)} for name in (HOOK, UNNAMED)
    )
    if number == 1:  # whose first version had none
        for name in ("hook", "unnamed_state", "objects"):
            del fields[name]
        manifest = replace(manifest, objects={})
    content = json.dumps(fields)
    checksum = zlib.crc32(content.encode())
    whole = {"format": f"mntrain checkpoint {number}", "checksum": checksum, "content": content}
    (tmp_path / FILE).write_text(json.dumps(whole))
    assert read_manifest(tmp_path) == manifest


@pytest.fixture
def written(tmp_path):
    """A file of two tensors, and its ranges."""
    path = tmp_path / "a.safetensors"
    tensors = {"w": torch.randn(7, 3), "n": torch.arange(5)}
    return path, write_in_parts(path, tensors)


def test_every_flipped_bit_is_located_and_every_truncated_file_is_refused(written):
    path, ranges = written
    right, chance = path.read_bytes(), random.Random(1)
    places = {
        *range(600),
        *range(PAGE_BYTES - 8, len(right)),
        *chance.sample(range(len(right)), 50),
    }
    for at in sorted(places):
        data = bytearray(right)
        data[at] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"a\.safetensors is damaged") as error:
            find_damage(path, ranges)
        start, stop = map(int, re.findall(r"\d+", str(error.value)))
        assert start <= at < stop
    for at in chance.sample(range(len(right)), 50):
        path.write_bytes(right[:at])
        with pytest.raises(ValueError, match=r"a\.safetensors is truncated"):
            open_tensors(path)
