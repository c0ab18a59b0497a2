"""Movement of batches to a device, and assignment of GPUs to ranks."""

import itertools
from collections import Counter, namedtuple
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mntrain.device import assign, assign_all, move, name_of, sharing, visible_gpus

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "x y")


def test_a_batch_keeps_its_structure_and_its_values():
    batch = {"pair": Pair(torch.arange(3), [torch.ones(2)]), "name": "b", "more": (1, None)}
    moved = move(batch, CPU)
    assert moved["pair"].x.tolist() == [0, 1, 2]
    assert moved["pair"].y[0].dtype == torch.float32
    assert (moved["name"], moved["more"]) == ("b", (1, None))


def test_floats_are_cast_and_nothing_else():
    moved = move([torch.ones(2), torch.tensor([7]), torch.tensor([True])], CPU, torch.bfloat16)
    assert [tensor.dtype for tensor in moved] == [torch.bfloat16, torch.int64, torch.bool]


def test_objects_are_moved_by_their_own_method():
    class Graph:
        def to(self, device, non_blocking):
            return "moved", device, non_blocking

    assert move(Graph(), CPU, torch.bfloat16) == ("moved", CPU, True)


# Assignment of GPUs


def gpus(*everyone):
    """The GPUs assigned to the ranks of a host; a letter names a GPU."""
    return [given.gpu for given in assign(everyone)]


def indices(*everyone):
    return [given.index for given in assign(everyone)]


def test_ranks_that_see_all_gpus_get_them_in_turn():
    assert gpus(*["abcd"] * 4) == [*"abcd"]
    assert indices(*["abcd"] * 4) == [0, 1, 2, 3]
    assert gpus(*["ab"] * 5) == [*"ababa"]
    assert gpus(*["abcd"] * 2) == [*"ab"]


def test_a_rank_that_sees_one_gpu_gets_it():
    assert gpus("a", "b", "c") == [*"abc"]
    assert indices("a", "b", "c") == [0, 0, 0]
    assert str(assign(["a", "b"])[1].device) == "cuda:0"


def test_numberings_may_differ_between_ranks():
    # By place, both would choose their first and their second: the same one.
    assert gpus("ab", "ba") == ["a", "b"]
    assert indices("ab", "ba") == [0, 0]
    assert sorted(gpus("abc", "cab", "bca")) == [*"abc"]


def test_a_rank_with_a_choice_leaves_the_only_gpu_of_another_rank():
    assert gpus("ab", "a") == ["b", "a"]
    assert gpus("ab", "bc", "a", "abcd") == ["b", "c", "a", "d"]


def test_a_rank_that_sees_no_gpu_stays_on_the_cpu():
    assert gpus("", "ab", "", "ab") == ["", "b", "", "a"]
    assert [str(given.device) for given in assign(["", "a"])] == ["cpu", "cuda:0"]
    assert gpus() == []


def test_hosts_are_assigned_independently():
    found = assign_all([0, 7, 0, 7, 3], ["ab", "cd", "ab", "cd", ""])
    assert [given.gpu for given in found] == ["a", "c", "b", "d", ""]


views = st.lists(st.lists(st.sampled_from("abcdef"), unique=True, max_size=6), max_size=8)


@given(views)
def test_every_rank_gets_a_gpu_that_it_sees_by_its_own_index(everyone):
    for names, given_ in zip(everyone, assign(everyone), strict=True):
        if names:
            assert names[given_.index] == given_.gpu
        else:
            assert (given_.index, given_.gpu) == (None, "")


def spread(chosen):
    """The number of ranks on each GPU, in descending order."""
    return sorted(Counter(filter(None, chosen)).values(), reverse=True)


@given(st.lists(st.lists(st.sampled_from("abcd"), unique=True, max_size=3), max_size=5))
def test_no_other_assignment_is_more_balanced(everyone):
    choices = itertools.product(*[names or [""] for names in everyone])
    best = min((spread(choice) for choice in choices), key=lambda s: [*s, *[0] * (5 - len(s))])
    assert spread(given.gpu for given in assign(everyone)) == best


@given(views)
def test_no_gpu_is_shared_while_one_of_its_ranks_sees_an_idle_gpu(everyone):
    chosen = [given.gpu for given in assign(everyone)]
    used = Counter(chosen)
    for names, mine in zip(everyone, chosen, strict=True):
        if mine and used[mine] > 1:
            assert all(used[name] for name in names)


# Warnings about shared GPUs


def warning(*everyone, hosts=None):
    hosts = hosts or [0] * len(everyone)
    return sharing(hosts, [f"n{host}" for host in hosts], everyone)


@pytest.mark.parametrize("everyone", [["abcd"] * 4, ["a", "b"], ["", ""], ["ab", "a", ""], []])
def test_no_warning_if_no_gpu_is_shared(everyone):
    assert warning(*everyone) == ""


def test_warning_about_more_ranks_than_gpus():
    assert "(on n0: 3 ranks see 2 GPUs). Run no more ranks than GPUs" in warning("ab", "ab", "ab")
    assert "on n0: 2 ranks see 1 GPU)" in warning("a", "a")


def test_warning_about_ranks_bound_to_one_gpu_has_the_fix():
    text = warning("a", "a", "a", "bcd")
    assert "3 ranks are bound to one GPU, while 2 of 4 are idle" in text
    assert "srun --gpus-per-task=1 or --gpu-bind=none" in text
    assert "2 ranks are bound to one GPU, while 1 of 3 is idle" in warning("a", "a", "bc")


def test_warning_about_an_uneven_binding():
    assert "4 ranks see 2 GPUs, and are bound so that one has 3" in warning("a", "a", "a", "b")


def test_warning_groups_hosts_by_reason():
    hosts = [rank // 2 for rank in range(12)]
    text = warning(*["a", "a"] * 5, "ab", "ab", hosts=hosts)
    assert "(on n0, n1, n2 and 2 more: 2 ranks see 1 GPU)" in text
    text = warning("a", "a", "b", "b", "bc", hosts=[0, 0, 1, 1, 1])
    assert "(on n0: 2 ranks see 1 GPU; on n1: 3 ranks see 2 GPUs)" in text


# Identifiers of GPUs

UUID = "8f6d1c2a-0000-4000-8000-000000000001"


@pytest.mark.parametrize(
    ("properties", "visible", "name"),
    [
        ({"uuid": UUID}, "", UUID),
        ({"uuid": UUID}, "3,5", UUID),
        ({"uuid": UUID, "pci_bus_id": 1}, "GPU-8f6d1c2a", UUID),
        ({"uuid": UUID}, "3, MIG-11", "MIG-11"),  # its part of the GPU has the UUID of the whole
        ({"pci_domain_id": 0, "pci_bus_id": 0xC1, "pci_device_id": 2}, "3,5", "0000:c1:02"),
        ({}, "3,5", "5"),
        ({}, "", "1"),
        ({}, "3", "1"),
    ],
)
def test_identifier_is_the_uuid_or_a_fallback(properties, visible, name):
    assert name_of(SimpleNamespace(**properties), 1, visible.split(",")) == name


def test_cpu_needs_no_gpu():
    assert visible_gpus("cpu") == []


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="device 'gpu' is unknown: choose auto, cpu or cuda"):
        visible_gpus("gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a CUDA device here")
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused():
    assert visible_gpus("auto") == []
    with pytest.raises(ValueError, match="torch sees no GPU here: choose cpu or auto, or install"):
        visible_gpus("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
def test_visible_gpus_have_different_identifiers():
    assert len(set(visible_gpus("cuda"))) == len(visible_gpus("auto")) == torch.cuda.device_count()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
def test_move_does_not_wait_for_the_gpu():
    device = torch.device("cuda")
    batch = torch.arange(1_000_000)
    move(batch, device)  # the first takes pinned memory
    torch.cuda._sleep(500_000_000)
    moved = move([batch, batch], device)
    assert not torch.cuda.current_stream().query()
    assert all(torch.equal(one.cpu(), batch) for one in moved)
