"""Attributes, small collectives and agreed errors of a world."""

import math
import re
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.utils.data import TensorDataset
from worlds import BUT_LAST, LAYOUTS, RANKS, refusal

import mntrain
from mntrain.comm.topology import Topology
from mntrain.errors import AgreedError
from mntrain.sync import DiLoCo, LocalSGD
from zero.collectives import gather_objects
from zero.comm_hooks import CommHook

pytestmark = pytest.mark.simulated

COMM = MPI.COMM_WORLD
RANK, LAST = COMM.rank, RANKS - 1
SGD = {"optimizer_class": torch.optim.SGD, "lr": 0.1}
MADE = torch.optim.SGD([torch.zeros(1)], lr=0.1)


@pytest.fixture
def world(worlds):
    return worlds("lanes", None)


# Topology and places.


@pytest.mark.processes
def test_a_kill_would_leave_no_shared_memory_of_mpich(world):
    world.barrier()
    files = re.findall("/dev/shm/mpich_shm_.*", Path("/proc/self/maps").read_text())
    assert files or "MPICH" not in world.library.build
    assert all(file.endswith(" (deleted)") for file in files)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_sizes_and_places_follow_the_topology(worlds, layout):
    world = worlds("lanes", layout)
    letters = layout if isinstance(layout, str) else "a" * RANKS
    topology = Topology.from_hosts(letters, None if isinstance(layout, str) else layout)
    assert world.topology == topology
    assert (world.rank, world.size) == (COMM.rank, RANKS)
    node, cross = topology.node_group(world.rank), topology.cross_group(world.rank)
    assert (world.local_rank, world.local_size) == (node.index(world.rank), len(node))
    assert (world.cross_rank, world.cross_size) == (cross.index(world.rank), len(cross))
    assert world.master == (world.rank == 0)
    assert (world.collectives.rank, world.collectives.size) == (world.rank, world.size)
    assert [place.rank for place in world.places] == list(range(RANKS))
    for place in world.places:
        assert place.node == topology.node(place.rank)
        assert place.local_rank == topology.local_rank(place.rank)
        assert place.host == MPI.Get_processor_name()
        assert place.device == "cpu"
    assert world.places[world.rank].threads == torch.get_num_threads()
    assert (world.device, world.algorithm) == (torch.device("cpu"), "lanes")


# Small collectives.


def test_gather_returns_the_objects_of_all_ranks(world):
    assert world.gather({"rank": world.rank}) == [{"rank": rank} for rank in range(RANKS)]
    assert world.gather(None) == [None] * RANKS


def test_gather_later_takes_values_as_they_are(world):
    value, list_of_one, futures = torch.zeros(2), [0], []
    for number in range(4):
        value.fill_(number)
        list_of_one[0] = number
        futures.append(world.gather_later((value, list_of_one)))
    for number, future in enumerate(futures):
        for gathered, (one,) in future.wait():
            assert gathered.tolist() == [number, number]
            assert one == number


@pytest.mark.parametrize("dtype", [torch.uint16, torch.complex32, torch.float8_e4m3fn], ids=str)
def test_gather_takes_tensors_of_every_dtype(world, dtype):
    bits = torch.arange(8, dtype=torch.uint8) + RANK
    for rank, found in enumerate(world.gather({"of": bits.view(dtype)})):
        assert found["of"].dtype == dtype
        assert found["of"].view(torch.uint8).equal(torch.arange(8, dtype=torch.uint8) + rank)


def test_sum_adds_in_double_precision(world):
    tiny = 2.0**-40
    assert world.sum([1.0, world.rank + tiny]) == [RANKS, sum(range(RANKS)) + RANKS * tiny]
    assert world.sum([]) == []
    assert world.sum(3) == 3.0 * RANKS
    assert world.sum(True) == RANKS
    values = torch.tensor([[world.rank, 1]]).t()
    total = world.sum(values)
    assert total.tolist() == [[sum(range(RANKS))], [RANKS]]
    assert (total.dtype, values.tolist()) == (torch.float64, [[world.rank], [1]])
    assert world.sum(torch.tensor(2.5, requires_grad=True)).item() == 2.5 * RANKS


@pytest.mark.parametrize("value", [None, {"loss": 1.0}, "1"])
def test_sums_of_what_is_no_number_are_refused(world, value):
    with pytest.raises(TypeError, match="give a number, a list of numbers or a tensor"):
        world.sum(value)


def test_sums_and_means_of_sparse_tensors_are_dense(world):
    eye = torch.eye(3).double()
    assert world.sum(eye.to_sparse() if RANK else eye).equal(RANKS * eye)
    assert world.mean(eye.to_sparse()).equal(eye)


KINDS = (torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", KINDS)
def test_sums_and_means_of_tensors_are_in_fp64(world, dtype):
    def own(rank):
        return (torch.tensor([[1, rank], [0, 3]]) * (rank + 1)).to(dtype)

    total = sum(own(rank).double() for rank in range(RANKS))
    weighted = sum((rank + 1) * own(rank).double() for rank in range(RANKS))
    mine = own(RANK).t()  # not contiguous
    torch.testing.assert_close(world.sum(mine), total.t(), rtol=0, atol=0)
    torch.testing.assert_close(
        world.mean(mine, RANK + 1), weighted.t() / sum(range(RANKS + 1)), rtol=1e-15, atol=0
    )
    assert torch.equal(mine, own(RANK).t())


def test_sums_and_means_of_complex_numbers_are_refused(world):
    for value in (1j, np.complex64(1j), torch.ones(3, dtype=torch.complex64)):
        for values in (value, [1.0, value]):
            with pytest.raises(TypeError, match="complex numbers: give real ones, such as torch"):
                world.sum(values)
        assert "the value is complex: give real ones, such as torch" in refusal(world.mean, value)
    assert type(world.mean(np.float32(0.5))) is float
    assert math.isnan(world.mean(math.nan))
    assert "weight is 1j" in refusal(world.mean, 1.0, 1j)
    assert "weight is tensor(0.+1.j)" in refusal(world.mean, 1.0, torch.tensor(1j))


def test_a_rank_of_weight_0_does_not_count_in_a_mean_whatever_its_value(world):
    given = (2.0, 3) if RANK == 0 else (math.nan, 0)
    assert world.mean(*given) == 2.0


def test_broadcast_returns_rank_0s_object(world):
    state = nn.Linear(RANK + 1, 2).state_dict()
    given = {"state": state, "text": f"of {RANK}", "view": torch.arange(9.0)[::4] + RANK}
    got = world.broadcast(given)
    assert (got is given) == (RANK == 0)
    assert (got["text"], got["view"].tolist()) == ("of 0", [0, 4, 8])
    assert got["state"]["weight"].shape == (2, 1)
    weights = world.gather(got["state"]["weight"])
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    assert world.broadcast(None if RANK else 5) == 5
    assert world.broadcast(torch.full((3,), RANK)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("local", [False, True])
def test_the_first_rank_runs_a_block_before_the_others(worlds, folder, local):
    world = worlds("lanes", 2 if local else None)
    first = RANK - RANK % 2 if local else 0
    with world.main_first(local=local):
        if first == RANK:
            time.sleep(0.05)
            (folder / str(RANK)).touch()
        else:
            assert (folder / str(first)).exists()
    world.barrier()
    assert len(list(folder.iterdir())) == (-(-RANKS // 2) if local else 1)


def test_an_error_of_the_first_rank_is_one_of_all(world):
    entered = []

    def download():
        with world.main_first():
            entered.append(RANK)
            raise OSError("no space left")

    assert "no space left" in refusal(download)
    assert entered == [0] * (RANK == 0)

    with pytest.raises(KeyError) if RANK == LAST else nullcontext(), world.main_first():
        if RANK == LAST:
            raise KeyError("own")


def test_print_prints_on_the_master_alone(world, capsys):
    world.print("a", 1, sep="-")
    assert capsys.readouterr().out == ("a-1\n" if RANK == 0 else "")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_of_groups_sum_over_the_node_and_over_the_cross_group(worlds, layout):
    world = worlds("lanes", layout)
    node, cross = world.topology.node_group(RANK), world.topology.cross_group(RANK)
    before = world.usage()[RANK]
    for collectives, group in [(world.node_collectives, node), (world.cross_collectives, cross)]:
        assert (collectives.rank, collectives.size) == (group.index(RANK), len(group))
        for numel in (3, 100_000):
            tensor = torch.full((numel,), float(RANK), dtype=torch.float64)
            collectives.all_reduce(tensor).wait()
            assert tensor.tolist() == [sum(group)] * numel
        assert gather_objects(collectives, RANK) == list(group)
    after = world.usage()[RANK]
    assert (after.cross_bytes > before.cross_bytes) == (len(cross) > 1)
    assert world.node_collectives is world.node_collectives


# Agreement.


@pytest.mark.parametrize("kind", [ValueError, OSError, ImportError, RuntimeError])
def test_an_error_of_all_ranks_is_reported_once(world, kind):
    def refuse(*message):
        with world.agreement(), world.agreement():
            raise kind(*message)

    assert refusal(refuse, "the file is empty") == "the file is empty"
    assert refusal(refuse) == kind.__name__  # of an error without a message


def test_errors_of_some_ranks_are_raised_on_all_with_their_ranks(world):
    def refuse(others):
        with world.agreement():
            if message := others if RANK != LAST else "no such file":
                raise ValueError(message)

    assert refusal(refuse, "") == f"rank {LAST}: no such file"
    others = f"0 to {LAST - 1}" if LAST > 2 else ", ".join(map(str, range(LAST)))
    each = f"rank{'s' * (LAST > 1)} {others}: one; rank {LAST}: no such file"
    assert refusal(refuse, "one") == each
    with pytest.raises(AgreedError) as error:
        refuse("")
    assert isinstance(error.value.__cause__, ValueError) == (RANK == LAST)
    assert world.gather(1) == [1] * RANKS  # the world is still in order


# The link between nodes.


def test_the_link_is_measured_between_nodes_alike_on_all_ranks(worlds):
    world = worlds("lanes", 1)
    nodes = len(world.topology.nodes)
    assert (world.link is None) == (nodes == 1)
    assert len(set(world.gather(world.link))) == 1
    if nodes > 1:
        assert 0 < world.link.latency_s < 1
        assert world.link.bytes_per_s > 1e5
    assert world.collectives.choice.link == world.link


def test_the_link_may_be_given_and_anything_else_is_refused():
    with mntrain.init(link="100gbit,5us", device="cpu", ranks_per_node=1) as world:
        assert world.link.bytes_per_s == pytest.approx(12.5e9)
        assert world.link.latency_s == pytest.approx(5e-6)
    words = refusal(mntrain.init, link="fast", device="cpu")
    assert "link: must be a rate and a latency, such as 100gbit,5us, not 'fast'" in words
    words = refusal(mntrain.init, link="1gbit,5us" if RANK else "2gbit,5us", device="cpu")
    assert "link" in words


# Models that differ.


def two_layers(width=3, dtype=torch.float32):
    return nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1)).to(dtype)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_optimizer_takes_the_weights_and_buffers_of_rank_0(world, stage):
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    model[0].bias.requires_grad_(False)
    model[1].running_mean += world.rank + 1
    expected = world.gather([parameter.tolist() for parameter in model.parameters()])[0]
    world.optimizer(model, stage=stage, **SGD).close()
    assert [parameter.tolist() for parameter in model.parameters()] == expected
    assert model[1].running_mean.item() == 1


def test_expanded_buffers_are_taken_from_rank_0_at_the_start_and_after_steps(world):
    model = nn.Linear(2, 1)
    row = torch.full((1, 3), world.rank + 1.0)
    model.register_buffer("rows", row.expand(4, 3))
    model.register_buffer("empty", row.expand(0, 3))
    optimizer = world.optimizer(model, **SGD)
    assert model.rows.tolist() == [[1, 1, 1]] * 4
    row.fill_(world.rank + 5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert model.rows.tolist() == [[5, 5, 5]] * 4
    assert model.rows.stride() == (0, 1)
    optimizer.close()


DIFFERENT = {
    "shape": (
        lambda odd: two_layers(4 if odd else 3),
        "{but_last} 0.weight (3, 2) float32, rank {last} has 0.weight (4, 2) float32",
    ),
    "dtype": (
        lambda odd: two_layers(dtype=torch.float64 if odd else torch.float32),
        "{but_last} 0.weight (3, 2) float32, rank {last} has 0.weight (3, 2) float64",
    ),
    "one more": (
        lambda odd: nn.Sequential(nn.Linear(2, 3, bias=odd)),
        "{but_last} no more, rank {last} has 0.bias (3,) float32",
    ),
    "one fewer": (
        lambda odd: nn.Sequential(nn.Linear(2, 3, bias=not odd)),
        "{but_last} 0.bias (3,) float32, rank {last} has no more",
    ),
    "frozen": (
        lambda odd: two_layers().requires_grad_(not odd),
        "{but_last} 0.weight (3, 2) float32, rank {last} has 0.weight (3, 2) float32 frozen",
    ),
    "another layer": (
        lambda odd: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3) if odd else nn.ReLU()),
        "rank {last} has 1.weight (3,) float32",
    ),
}


@pytest.mark.parametrize(("build", "words"), DIFFERENT.values(), ids=DIFFERENT)
def test_different_models_are_refused_on_all_ranks(world, build, words):
    said = refusal(world.optimizer, build(world.rank == LAST), **SGD)
    assert said.startswith("the model differs between ranks: ")
    assert words.format(last=LAST, but_last=BUT_LAST) in said


def test_an_error_of_one_ranks_optimizer_is_raised_on_all(world):
    def make(params):
        return torch.optim.SGD(params, lr=-1.0 if world.rank else 0.1)

    said = refusal(world.optimizer, two_layers(), make)
    assert "Invalid learning rate: -1.0" in said
    assert said.startswith("rank")
    # No rank has begun what the refusing ones never join: the next collective meets nothing else.
    tensor = torch.ones(1000)
    world.collectives.all_reduce(tensor).wait()
    assert set(tensor.tolist()) == {RANKS}


@pytest.mark.parametrize(
    ("name", "usual", "other"),
    [
        ("stage", 0, 1),
        ("partition", "element", "parameter"),
        ("max_grad_norm", 1.0, None),
        ("norm_type", 2.0, 1.0),
        ("non_finite", "stop", "skip"),
        ("loss_scale", None, "dynamic"),
        ("comm_hook", CommHook(), CommHook(torch.bfloat16)),
        ("sync", None, LocalSGD(2)),
        ("sync", LocalSGD(2), DiLoCo(2)),
    ],
)
def test_different_arguments_are_refused_on_all_ranks(world, name, usual, other):
    given = {name: other if world.rank == LAST else usual}
    said = refusal(world.optimizer, two_layers(), **given, **SGD)
    if isinstance(other, CommHook):
        usual, other = "CommHook()", "CommHook(wire_dtype=torch.bfloat16)"
    if isinstance(other, LocalSGD):  # with all fields, also those that are not shown elsewhere
        usual, other = (
            value
            and f"{type(value).__name__}({', '.join(f'{k}={v}' for k, v in vars(value).items())})"
            for value in (usual, other)
        )
    assert said == f"{name} differs between ranks: {BUT_LAST} {usual}, rank {LAST} has {other}"


def test_a_hook_beside_a_wire_dtype_is_refused():
    with mntrain.init(device="cpu", wire_dtype="fp16") as narrow:
        given = {"comm_hook": CommHook(torch.bfloat16), **SGD}
        assert "give one of the two" in refusal(narrow.optimizer, two_layers(), **given)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"learning_rate": 3}, "AdamW refuses learning_rate=3 .*'learning_rate'.; it takes lr="),
        (
            {"betas": (0.9,)},
            r"AdamW refuses betas=\(0.9,\) .*; it takes lr=0.001, betas=\(0.9, 0.999\)",
        ),
        ({"model": [1]}, "model is of type list: give the torch.nn.Module to train"),
        ({"optimizer_class": None}, "optimizer_class is of type NoneType: give a class such as"),
        ({"optimizer_class": MADE}, "optimizer_class is of type SGD: give a class such as"),
        ({"sync": "diloco"}, "sync is of type str: give mntrain.sync.LocalSGD"),
        (
            {"groups": [{"params": [torch.zeros(1, requires_grad=True)]}]},
            "a parameter group holds a tensor that is no parameter of the model$",
        ),
    ],
)
@pytest.mark.parametrize("stage", [0, 1])
def test_what_is_no_model_class_or_argument_is_refused_by_all(world, change, words, stage):
    given = {"model": two_layers(), "optimizer_class": torch.optim.AdamW, "stage": stage, **change}
    assert re.match(words, refusal(world.optimizer, **given))


def test_a_dataset_in_place_of_a_loader_is_refused(world):
    for wrong in (TensorDataset(torch.ones(4, 2)), 5):
        with pytest.raises(ValueError, match=r"loader is of type (TensorDataset|int): give"):
            world.shard(wrong)
