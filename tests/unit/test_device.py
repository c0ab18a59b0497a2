"""Movement of batches to a device, and assignment of GPUs to ranks."""

from collections import Counter, namedtuple
from types import SimpleNamespace

import pytest
import torch
from gpu.place import needs_cuda
from hypothesis import given
from hypothesis import strategies as st

from mntrain.device import assign, move, name_of, visible_gpus

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "x y")


class MovableGraph:
    def to(self, device, non_blocking):
        return "moved", device, non_blocking


def test_a_batch_keeps_its_structure_and_its_values():
    batch = {"pair": Pair(torch.arange(3), [torch.ones(2)]), "name": "b", "more": (1, None)}
    moved = move({**batch, "graph": MovableGraph()}, CPU)
    assert moved["pair"].x.tolist() == [0, 1, 2]
    assert moved["pair"].y[0].dtype == torch.float32
    assert (moved["name"], moved["more"]) == ("b", (1, None))
    assert moved["graph"] == ("moved", CPU, True)
    cast = move([torch.ones(2), torch.tensor([7]), torch.tensor([True])], CPU, torch.bfloat16)
    assert [tensor.dtype for tensor in cast] == [torch.bfloat16, torch.int64, torch.bool]


# Assignment of GPUs


def gpus(*everyone, hosts=None):
    """The GPUs assigned to ranks, by default of one host; a letter names a GPU."""
    indices = assign(hosts or [0] * len(everyone), everyone)
    return ["" if i is None else names[i] for i, names in zip(indices, everyone, strict=True)]


def test_ranks_get_gpus_in_turn_and_leave_the_only_one_of_another_rank():
    assert assign([0] * 4, ["abcd"] * 4) == [0, 1, 2, 3]
    assert gpus(*["ab"] * 5) == [*"ababa"]
    assert assign([0] * 3, ["a", "b", "c"]) == [0, 0, 0]
    # By place, both would choose their first and their second: the same one.
    assert gpus("ab", "ba") == ["a", "b"]
    assert sorted(gpus("abc", "cab", "bca")) == [*"abc"]
    assert gpus("ab", "a") == ["b", "a"]
    assert gpus("ab", "bc", "a", "abcd") == ["b", "c", "a", "d"]
    assert gpus("ab", "ab", "ab", "ab", "c", hosts=[0, 7, 0, 7, 3]) == [*"aabbc"]
    assert assign([0, 0, 1], ["", "", ""]) == [None] * 3
    assert assign([], []) == []
    with pytest.raises(ValueError, match="rank 1 sees no GPU, but others do: make a GPU visible"):
        assign([0, 0, 1], ["ab", "", "a"])


@given(st.lists(st.lists(st.sampled_from("abcdef"), unique=True, min_size=1), max_size=8))
def test_every_rank_gets_a_gpu_that_it_sees(everyone):
    for index, names in zip(assign([0] * len(everyone), everyone), everyone, strict=True):
        assert 0 <= index < len(names)


@given(st.integers(1, 6), st.integers(0, 12))
def test_ranks_that_see_all_gpus_are_spread_evenly(count, ranks):
    used = Counter(gpus(*["abcdef"[:count]] * ranks))
    assert not ranks or max(used.values()) == -(-ranks // count)


# Identifiers of GPUs

UUID = "8f6d1c2a-0000-4000-8000-000000000001"


@pytest.mark.parametrize(
    ("properties", "visible", "name"),
    [
        ({"uuid": UUID}, "", UUID),
        ({"uuid": UUID}, "3,5", UUID),
        ({"uuid": UUID}, "3, MIG-11", "MIG-11"),  # its part of the GPU has the UUID of the whole
        ({}, "3,5", "5"),
        ({}, "", "1"),
        ({}, "3", "1"),
    ],
)
def test_identifier_is_the_uuid_or_a_fallback(properties, visible, name):
    assert name_of(SimpleNamespace(**properties), 1, visible.split(",")) == name


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a CUDA device here")
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused():
    assert visible_gpus("auto") == visible_gpus("cpu") == []
    with pytest.raises(ValueError, match="torch sees no GPU here: choose cpu or auto, or install"):
        visible_gpus("cuda")


@needs_cuda
def test_visible_gpus_have_different_identifiers():
    assert len(set(visible_gpus("cuda"))) == len(visible_gpus("auto")) == torch.cuda.device_count()


@needs_cuda
def test_move_does_not_wait_for_the_gpu():
    device = torch.device("cuda")
    batch = torch.arange(1_000_000)
    move(batch, device)  # the first takes pinned memory
    torch.cuda._sleep(500_000_000)
    moved = move([batch, batch], device)
    assert not torch.cuda.current_stream().query()
    assert all(torch.equal(one.cpu(), batch) for one in moved)
